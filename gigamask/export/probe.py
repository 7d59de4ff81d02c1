"""Inputs for comparing an exported model with the original, and files that are kept only if equal.

A decoder may have thresholds: it counts logits above one, or takes the mask of the best score. At a
tie, rounding decides, and two exact copies of a model answer differently. So prompts are drawn
until the model's own answers hardly move when its embedding changes a little more than by rounding.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.models.pretrained import load_sam
from gigamask.models.promptable import PromptableModel, evaluated
from gigamask.rng import make_rng
from gigamask.types import Prompts

TOLERANCE = 1e-3
"""Largest allowed difference of outputs, relative to the model's largest value; rounding is 100x
less."""
ROUNDING = 1e-6
"""Largest allowed difference of two copies of a model in the same library."""
TIES = 20
"""How often prompts are drawn at most until they lie on no tie."""
Answers = Callable[[Tensor, Prompts], Mapping[str, Tensor]]
"""Outputs of a decoder by name, for the embedding of one image and a prompt."""
Exporter = Callable[..., dict]
"""Writes a model: (model, out, ...) -> at least the `files`."""


@dataclass(frozen=True, eq=False)
class Probe:
    """An image of noise, and prompts in input pixels: points, a box, and a point with a mask.

    `valid` is the height and width of the image without padding. Without a box, a padding token
    comes last, as in Meta's and Hugging Face's code.
    """

    pixels: Float[Tensor, "1 N S S"]
    valid: Int64[Tensor, "1 2"]
    prompts: tuple[Prompts, ...]

    @classmethod
    @torch.no_grad()
    def from_model(
        cls, model: PromptableModel, answers: Answers | None = None, tolerance: float = TOLERANCE
    ) -> "Probe":
        """Return the probe of a model, whose prompts lie on no tie of its answers.

        Args:
            model: The model.
            answers: What is compared later; None: `Sam.decode`.
            tolerance: As `draw_prompts`.
        """
        side = model.config.image_size
        noise = make_rng(0, "probe").integers(0, 256, (1, model.config.in_channels, side, side))
        pixels = torch.from_numpy(noise.astype("float32"))
        valid = torch.tensor([[side * 3 // 4, side]])
        embedding = model.encode(pixels, valid)
        return cls(pixels, valid, draw_prompts(model, embedding, answers, tolerance))

    @torch.no_grad()
    def outputs(self, model: PromptableModel) -> list[dict[str, Tensor]]:
        """Return the embedding, then low-resolution logits and predicted IoU for each prompt."""
        embedding = model.encode(self.pixels, self.valid)
        answers = [_decode(model, embedding, prompts) for prompts in self.prompts]
        return [{"embedding": embedding}, *answers]


@torch.no_grad()
def draw_prompts(
    model: PromptableModel,
    embedding: Float[Tensor, "1 C E E"],
    answers: Answers | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[Prompts, Prompts, Prompts]:
    """Return points, a box, and points with a mask, which lie on no tie of a model's answers.

    Args:
        model: The model.
        embedding: Embedding of the image.
        answers: What is compared later; None: `Sam.decode`.
        tolerance: Largest allowed difference of the comparison; rounding is 100 times less.

    Returns:
        For each of the three, the first that moves the answers by less than a quarter of
        `tolerance`, or, if there is none, that which moves them least.
    """
    side, mask_size = model.config.image_size, model.config.mask_size
    answers = answers or functools.partial(_decode, model)
    nearby = _nearby(embedding, tolerance / 100)

    def draw(kind: int, attempt: int) -> Prompts:
        rng = make_rng(0, "probe", kind, attempt)
        first = torch.from_numpy(rng.uniform(0.0, 0.4, (1, 3, 2)).astype("float32")) * side
        last = torch.from_numpy(rng.uniform(0.5, 0.7, (1, 1, 2)).astype("float32")) * side
        if kind == 0:
            return Prompts(first, torch.tensor([[1, 0, -1]]), None, True)
        if kind == 1:
            corners = torch.cat([first[:, :1], last], 1)
            return Prompts(corners, torch.tensor([[2, 3]]), None, True)
        mask = torch.from_numpy(rng.normal(0, 5, (1, mask_size, mask_size)).astype("float32"))
        return Prompts(first, torch.tensor([[1, 0, -1]]), mask, False)

    def settle(kind: int) -> Prompts:
        tried: list[tuple[float, Prompts]] = []
        for attempt in range(TIES):
            prompts = draw(kind, attempt)
            expected = answers(embedding, prompts)
            moved = max(largest_difference(expected, answers(each, prompts)) for each in nearby)
            if moved < tolerance / 4:
                return prompts
            tried.append((moved, prompts))
        return min(tried, key=lambda each: each[0])[1]

    return settle(0), settle(1), settle(2)


def _decode(model: PromptableModel, embedding: Tensor, prompts: Prompts) -> dict[str, Tensor]:
    logits, iou = model.decode(embedding, torch.zeros(1, dtype=torch.int64), prompts)
    return {"logits": logits, "predicted IoU": iou}


def _nearby(embedding: Tensor, change: float) -> list[Tensor]:
    """Return embeddings on both sides of one: a tie that lies closer is crossed by one of two.

    Args:
        embedding: The embedding.
        change: Standard deviation of the change, relative to each value.
    """
    noises = (make_rng(seed, "probe tie").normal(0, change, embedding.shape) for seed in range(2))
    factors = (torch.from_numpy(noise).to(embedding.dtype) for noise in noises)
    return [embedding * (1 + sign * factor) for factor in factors for sign in (1, -1)]


def keep_if_equal(suffix: str | None = None) -> Callable[[Exporter], Exporter]:
    """Decorate an exporter `write(model, out, ...)`, so that nothing is left if it raises.

    The model is exported as it predicts, not as it trains. It is written into a temporary folder,
    in `out` if that is a folder, else beside it, and compared there; then the files get their
    names, those of an earlier export are replaced, and others stay. `out` is checked, and the
    result must state the `files`.

    Args:
        suffix: End of the name of the exporter's file; None if it writes a folder.
    """

    def decorate(write: Exporter) -> Exporter:
        @functools.wraps(write)
        def keeping(
            model: PromptableModel, out: Path | str, *args: object, **options: object
        ) -> dict:
            out = Path(out)
            if suffix is not None and (out.suffix != suffix or out.is_dir()):
                raise GigamaskError(f"--out {out}: must be a file that ends in {suffix}")
            if any(each.dtype.itemsize < 4 for each in model.parameters()):
                raise GigamaskError(
                    "the model was converted to half precision, which has also rounded the pixels' "
                    "mean; save it before that, or load its weights again"
                )
            if suffix is None and out.exists() and not out.is_dir():
                raise GigamaskError(f"--out {out}: must be a folder, but is a file")
            final = Path(os.path.realpath(out))
            beside = final if final.is_dir() else final.parent  # on the same disk
            folder = Path(tempfile.mkdtemp(files.PARTIAL, f".{final.name[:50]}.", beside))
            staged = folder / os.path.basename(os.path.abspath(out))
            try:
                # On the CPU, as the files are read back.
                copy = model if model.device.type == "cpu" else deepcopy(model).cpu()
                with evaluated(copy):
                    result = write(copy, staged, *args, **options)
                written = [Path(path).relative_to(staged) for path in result["files"]]
                for path in written:
                    (final / path).parent.mkdir(exist_ok=True)
                    (staged / path).replace(final / path)
                return result | {"files": [str(out / path) for path in written]}
            except GigamaskError as error:
                raise GigamaskError(str(error).replace(str(staged), str(out))) from None
            except OSError as error:
                if error.filename is not None:
                    error.filename = str(error.filename).replace(str(staged), str(out))
                raise
            finally:
                shutil.rmtree(folder)

        return keeping

    return decorate


def read_back(model: PromptableModel, out: Path) -> float:
    """Load an exported model as every command does, from what was written alone, and compare it.

    Args:
        model: The original.
        out: File or folder that was written.

    Returns:
        The largest difference of an output, relative to its largest value; 0 unless the hardware
        rounds differently from one call to the next.

    Raises:
        GigamaskError: The export cannot be loaded, or an output differs.
    """
    loaded = load_sam(out, build_custom=lambda: deepcopy(model))
    probe = Probe.from_model(model)
    pairs = zip(probe.outputs(model), probe.outputs(loaded), strict=True)
    return max(compare(*pair, f"{out}: gigamask", ROUNDING) for pair in pairs)


def compare(
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    reader: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare the outputs of an exported model with those of the original.

    Args:
        expected: Outputs of the original by name.
        actual: Outputs of the exported model by name.
        reader: File and library, for the error.
        tolerance: Largest allowed difference, relative to the largest expected value.

    Returns:
        The largest difference of an output, relative to its largest expected value.

    Raises:
        GigamaskError: An output has another shape, or differs by more than `tolerance`.
    """
    worst = 0.0
    for name, tensor in expected.items():
        other = actual[name]
        if tensor.shape != other.shape:
            raise GigamaskError(
                f"{reader} returns {name} of shape {tuple(other.shape)}, the model of "
                f"{tuple(tensor.shape)}: the export is not a copy of the model"
            )
        if not tensor.isfinite().all():
            raise GigamaskError(f"the weights give a {name} that is not finite; they diverged")
        difference = largest_difference({name: tensor}, actual)
        if not difference <= tolerance:
            raise GigamaskError(
                f"{reader} returns {name} that differs by {difference:.2g} of its largest value, "
                f"more than {tolerance}: the export is not a copy of the model"
            )
        worst = max(worst, difference)
    return worst


def largest_difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest value of each.

    Args:
        expected: Outputs by name.
        actual: Others of these names and shapes.
    """
    return max(
        float((tensor - actual[name]).abs().max() / tensor.abs().max().clamp(min=1e-12))
        for name, tensor in expected.items()
    )

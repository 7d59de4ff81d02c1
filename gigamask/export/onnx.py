"""Two ONNX files: the image encoder, and the prompt encoder with the mask decoder behind the six inputs that Meta's export has.

`encoder.onnx` takes `image` (1, 3, S, S), float32 pixels in 0..255 with the picture at the top left, and `input_size` (1, 2), its height and width
there; it gives `image_embeddings`. `decoder.onnx` takes `image_embeddings`, `point_coords` (1, N, 2) in input pixels, `point_labels` (1, N),
`mask_input` (1, 1, G, G), `has_mask_input` (1,) and `orig_im_size` (2,), all float32; it gives `masks` (1, 4, H, W) as logits at the image's size,
`iou_predictions` (1, 4) and `low_res_masks` (1, 4, G, G), the first of each the single mask (Segment Anything, `utils/onnx.py`). As there, a point
with label -1 belongs behind points without a box.

Not here: resizing images and points for these inputs, which is `predict.transform`'s.
"""

import importlib.util
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.export.probe import Probe, compare
from gigamask.models import state_dict
from gigamask.models.sam.attention import attend_plainly
from gigamask.models.sam.image_encoder import EncoderAttention
from gigamask.models.sam.mask_decoder import ALL_MASK_TOKENS
from gigamask.models.sam.sam import Sam
from gigamask.models.sam.transformer import DensePrompt
from gigamask.types import Prompts

OPSET = 17
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
SIZES = ((600, 900), (333, 250))
"""Images (H, W) at whose size answers are compared, one lying and one standing."""


class OnnxEncoder(nn.Module):
    """The image encoder with the normalisation in front of it."""

    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, image: Float[Tensor, "1 3 S S"], input_size: Int64[Tensor, "1 2"]
    ) -> Float[Tensor, "1 C E E"]:
        return self.model.encode(image, input_size)


class OnnxDecoder(nn.Module):
    """All four answers to one prompt, brought to the image's own size."""

    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        image_embeddings: Float[Tensor, "1 C E E"],
        point_coords: Float[Tensor, "1 N 2"],
        point_labels: Float[Tensor, "1 N"],
        mask_input: Float[Tensor, "1 1 G G"],
        has_mask_input: Float[Tensor, "1"],
        orig_im_size: Float[Tensor, "2"],
    ) -> tuple[Float[Tensor, "1 4 H W"], Float[Tensor, "1 4"], Float[Tensor, "1 4 G G"]]:
        encoder = self.model.prompt_encoder
        tokens = encoder.points(point_coords, point_labels.long())
        dense = DensePrompt(*encoder.mixed_features(mask_input[:, 0], has_mask_input > 0.5))
        first = torch.zeros(1, dtype=torch.int64)
        low, iou = self.model.mask_decoder(
            image_embeddings, encoder.get_dense_pe(), tokens, first, dense, ALL_MASK_TOKENS
        )
        return self._at_size(low, orig_im_size), iou, low

    def _at_size(
        self, low: Float[Tensor, "1 4 G G"], size: Float[Tensor, "2"]
    ) -> Float[Tensor, "1 4 H W"]:
        """Returns logits at the image's size, enlarged twice as the reference does: to the input's side, where the padding goes, and from there."""
        side = self.model.config.image_size
        wide = functional.interpolate(low, (side, side), mode="bilinear", align_corners=False)
        height, width = (torch.floor(size * (side / size.max()) + 0.5)).long()
        wanted: Any = tuple(size.long())
        return functional.interpolate(
            wide[..., :height, :width], wanted, mode="bilinear", align_corners=False
        )


def write_pair(model: Sam, out: Path) -> dict:
    """Writes both files into a folder, runs them, and holds them against the model; raises `GigamaskError` where a package is missing or answers differ."""
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise GigamaskError(
            f"--to onnx wants {' and '.join(missing)}, which is not installed; run pip install 'gigamask[onnx]'"
        )
    if out.exists() and not out.is_dir():
        raise GigamaskError(
            f"--out {out}: is a file, the two ONNX files want a folder; give another"
        )
    out.mkdir(parents=True, exist_ok=True)
    plain = deepcopy(model)  # the model given stays as it is
    for module in plain.modules():
        if isinstance(module, EncoderAttention):
            module.attend = attend_plainly
    probe, decoder = Probe.of(model.config), OnnxDecoder(plain)
    with torch.no_grad():
        embedding = model.encode(probe.pixels, probe.valid)
    _export(
        OnnxEncoder(plain),
        (probe.pixels, probe.valid),
        out / ENCODER,
        ["image", "input_size"],
        ["image_embeddings"],
        {},
    )
    given = _six(embedding, probe.prompts[0], SIZES[0], model.config.mask_size)
    sizes = {
        "point_coords": {1: "points"},
        "point_labels": {1: "points"},
        "masks": {2: "height", 3: "width"},
    }
    _export(
        decoder,
        tuple(given.values()),
        out / DECODER,
        list(given),
        ["masks", "iou_predictions", "low_res_masks"],
        sizes,
    )
    return {
        "files": [str(out / ENCODER), str(out / DECODER)],
        "difference": _verified(embedding, decoder, probe, out),
    }


@torch.no_grad()
def _export(
    module: nn.Module,
    given: tuple[Tensor, ...],
    path: Path,
    inputs: list[str],
    outputs: list[str],
    sizes: dict,
) -> None:
    """Traces a module with these inputs; axes of `sizes` may be any."""
    with warnings.catch_warnings(), state_dict.report_write_errors(path):
        # The newer exporter wants sizes that are known, where those of the image are not.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            given,
            str(path),
            input_names=inputs,
            output_names=outputs,
            dynamic_axes=sizes,
            opset_version=OPSET,
            dynamo=False,
        )


@torch.no_grad()
def _verified(embedding: Tensor, decoder: OnnxDecoder, probe: Probe, out: Path) -> float:
    """Returns how far onnxruntime's answers are from the model's, its embedding and its decoder's for every prompt at sizes of either kind."""
    from onnxruntime import InferenceSession

    sessions = {
        name: InferenceSession(str(out / name), providers=["CPUExecutionProvider"])
        for name in (ENCODER, DECODER)
    }
    told = _run(sessions[ENCODER], {"image": probe.pixels, "input_size": probe.valid})
    worst = compare({"image_embeddings": embedding}, told, f"{out / ENCODER}: onnxruntime")
    for prompts in probe.prompts:
        for size in SIZES:
            given = _six(embedding, prompts, size, decoder.model.config.mask_size)
            mine = dict(
                zip(("masks", "iou_predictions", "low_res_masks"), decoder(**given), strict=True)
            )
            worst = max(
                worst,
                compare(mine, _run(sessions[DECODER], given), f"{out / DECODER}: onnxruntime"),
            )
    return worst


def _run(session: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what an onnxruntime session answers, by name."""
    names = [each.name for each in session.get_outputs()]
    return dict(
        zip(
            names,
            map(
                torch.from_numpy,
                session.run(names, {name: value.numpy() for name, value in given.items()}),
            ),
            strict=True,
        )
    )


def _six(
    embedding: Tensor, prompts: Prompts, size: tuple[int, int], grid: int
) -> dict[str, Tensor]:
    """Returns the decoder's six inputs."""
    masks = prompts.masks
    return {
        "image_embeddings": embedding,
        "point_coords": prompts.points_xy_input,
        "point_labels": prompts.labels.float(),
        "mask_input": torch.zeros(1, 1, grid, grid) if masks is None else masks[:, None],
        "has_mask_input": torch.tensor([float(masks is not None)]),
        "orig_im_size": torch.tensor([float(side) for side in size]),
    }

"""Export to two ONNX files: the image encoder, and the decoder with the inputs of Meta's export.

`encoder.onnx` takes `image` (1, 3, S, S), float32 pixels in 0..255 with the image at the top left,
and `input_size` (1, 2), its height and width there; it returns `image_embeddings`. `decoder.onnx`
takes `image_embeddings`, `point_coords` (1, N, 2) in input pixels, `point_labels` (1, N),
`mask_input` (1, 1, G, G), `has_mask_input` (1,) and `orig_im_size` (2,), all float32; it returns
`masks` (1, 4, H, W) as logits at the image's size, `iou_predictions` (1, 4) and `low_res_masks`
(1, 4, G, G), the first of each for the single mask (Segment Anything, `utils/onnx.py`). As in
Meta's export, points without a box must end with a point of label -1. Images and points are resized
as in `inference.resize_longest_side`.
"""

import importlib.util
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from gigamask import files
from gigamask.errors import GigamaskError, first_line
from gigamask.export.probe import Probe, compare
from gigamask.models.compact.prompt_maps import MIDDLE_WINDOW
from gigamask.models.sam.attention import rel_pos_attention_reference
from gigamask.models.sam.dense_decoder import DenseMaskDecoder
from gigamask.models.sam.image_encoder import EncoderAttention
from gigamask.models.sam.mask_decoder import ALL_MASK_TOKENS
from gigamask.models.sam.sam import Sam
from gigamask.models.sam.transformer import DensePrompt
from gigamask.models.sam2.mask_decoder import Sam2MaskDecoder
from gigamask.types import Prompts

OPSET = 17
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
DECODER_OUTPUTS = ["masks", "iou_predictions", "low_res_masks"]
SIZES = ((600, 900), (333, 250))
"""Image sizes (H, W) at which outputs are compared, one landscape and one portrait."""


class OnnxEncoder(nn.Module):
    """The image encoder, including pixel normalization."""

    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, image: Float[Tensor, "1 3 S S"], input_size: Int64[Tensor, "1 2"]
    ) -> Float[Tensor, "1 C E E"]:
        """Embed an image.

        Args:
            image: Pixels in 0..255 with the image at the top left.
            input_size: Height and width of the image.
        """
        return self.model.encode(image, input_size)


class OnnxDecoder(nn.Module):
    """Prompt encoder and mask decoder: all four masks for one prompt at the image's size."""

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
        """Predict the masks of a prompt.

        Args:
            image_embeddings: Embedding of the image.
            point_coords: x and y in input pixels.
            point_labels: Labels of the points; 2 and 3 are the corners of a box.
            mask_input: Low-resolution logits.
            has_mask_input: 1 to use `mask_input`, 0 to ignore it.
            orig_im_size: Height and width of the image.

        Returns:
            Logits at the image's size, predicted IoU, and low-resolution logits.
        """
        first = torch.zeros(1, dtype=torch.int64)
        prompts = Prompts(
            *(point_coords, point_labels.long(), mask_input[:, 0], True), has_mask_input > 0.5
        )
        decoder, config = self.model.mask_decoder, self.model.config
        if isinstance(decoder, DenseMaskDecoder):
            encoder = self.model.prompt_encoder
            answer, iou = decoder(image_embeddings, first, prompts, encoder, ALL_MASK_TOKENS)[:2]
            low = answer.logits
            if self.model.answers_in_windows:
                low = answer.paste(config.mask_size, config.image_size)
            return self._resize(low, orig_im_size), iou, low
        if self.model.answers_in_windows:
            low, iou = self.model.decode(image_embeddings, first, prompts)
            single = torch.where(has_mask_input > 0.5, MIDDLE_WINDOW, iou.argmax(1))
            at = torch.arange(1), single
            low, iou = torch.cat([low[at][:, None], low], 1), torch.cat([iou[at][:, None], iou], 1)
            return self._resize(low, orig_im_size), iou, low
        encoder = self.model.prompt_encoder
        if isinstance(decoder, Sam2MaskDecoder):
            low, iou, *_ = decoder(image_embeddings, first, prompts, encoder, ALL_MASK_TOKENS)
            return self._resize(low, orig_im_size), iou, low
        tokens = encoder.points(point_coords, point_labels.long())
        dense = DensePrompt(*encoder.mixed_features(mask_input[:, 0], has_mask_input > 0.5))
        low, iou, _, _ = decoder(
            image_embeddings, encoder.get_dense_pe(), tokens, first, dense, ALL_MASK_TOKENS
        )
        return self._resize(low, orig_im_size), iou, low

    def _resize(
        self, low: Float[Tensor, "1 4 G G"], size: Float[Tensor, "2"]
    ) -> Float[Tensor, "1 4 H W"]:
        """Resize logits to the image's size, as Meta's code does.

        They are resized to the input's side, cropped to remove the padding, and resized to the
        image; those of a stretched image are resized at once.
        """
        config, image_size = self.model.config, cast(Any, tuple(size.long()))
        if not config.stretch:
            side = config.image_size
            padded = functional.interpolate(low, (side, side), mode="bilinear", align_corners=False)
            height, width = (torch.floor(size * (side / size.max()) + 0.5)).long()
            low = padded[..., :height, :width]
        return functional.interpolate(low, image_size, mode="bilinear", align_corners=False)


def write_onnx(model: Sam, out: Path) -> dict:
    """Write a model as two ONNX files, run them with onnxruntime, and compare the outputs.

    Args:
        model: Model to export.
        out: Folder for `encoder.onnx` and `decoder.onnx`.

    Returns:
        `files`, and the largest `difference` of an output, relative to the model's largest value.

    Raises:
        GigamaskError: A package is not installed, `out` is a file, or outputs differ.
    """
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise GigamaskError(
            f"--to onnx requires {' and '.join(missing)} (not installed): "
            "run pip install 'gigamask[onnx]'"
        )
    if out.exists() and not out.is_dir():
        raise GigamaskError(f"--out {out}: must be a folder for two ONNX files, but is a file")
    out.mkdir(parents=True, exist_ok=True)
    traceable = deepcopy(model)  # the caller's model keeps its fused attention
    for module in traceable.modules():
        if isinstance(module, EncoderAttention):
            module.attend = rel_pos_attention_reference
    probe, decoder = Probe.from_config(model.config), OnnxDecoder(traceable)
    with torch.no_grad():
        embedding = model.encode(probe.pixels, probe.valid)
    encoder_inputs = {"image": probe.pixels, "input_size": probe.valid}
    _export(OnnxEncoder(traceable), encoder_inputs, out / ENCODER, ["image_embeddings"], {})
    decoder_inputs = _decoder_inputs(embedding, probe.prompts[0], SIZES[0], model.config.mask_size)
    dynamic_axes = {
        "point_coords": {1: "points"},
        "point_labels": {1: "points"},
        "masks": {2: "height", 3: "width"},
    }
    _export(decoder, decoder_inputs, out / DECODER, DECODER_OUTPUTS, dynamic_axes)
    return {
        "files": [str(out / ENCODER), str(out / DECODER)],
        "difference": _verify(embedding, decoder, probe, out),
    }


@torch.no_grad()
def _export(
    module: nn.Module,
    inputs: dict[str, Tensor],
    path: Path,
    outputs: list[str],
    dynamic_axes: dict[str, dict[int, str]],
) -> None:
    """Trace a module with these inputs and write it."""

    def write(partial: Path) -> None:
        # The newer exporter (dynamo) requires static sizes, but image sizes vary.
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            str(partial),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_axes=dynamic_axes,
            opset_version=OPSET,
            dynamo=False,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files.write_atomically(path, write)


@torch.no_grad()
def _verify(embedding: Tensor, decoder: OnnxDecoder, probe: Probe, out: Path) -> float:
    """Return the largest difference between onnxruntime's outputs and the model's."""
    from onnxruntime import InferenceSession
    from onnxruntime.capi.onnxruntime_pybind11_state import (  # pyrefly: ignore[missing-import]
        Fail,
    )

    try:
        sessions = {
            name: InferenceSession(str(out / name), providers=["CPUExecutionProvider"])
            for name in (ENCODER, DECODER)
        }
    except Fail as error:
        raise GigamaskError(
            f"{out}: onnxruntime refuses what torch made of this model ({first_line(error)}); use "
            "--to safetensors"
        ) from None
    actual = _run(sessions[ENCODER], {"image": probe.pixels, "input_size": probe.valid})
    worst = compare({"image_embeddings": embedding}, actual, f"{out / ENCODER}: onnxruntime")
    for prompts in probe.prompts:
        for size in SIZES:
            inputs = _decoder_inputs(embedding, prompts, size, decoder.model.config.mask_size)
            expected = dict(zip(DECODER_OUTPUTS, decoder(**inputs), strict=True))
            actual = _run(sessions[DECODER], inputs)
            worst = max(worst, compare(expected, actual, f"{out / DECODER}: onnxruntime"))
        low, iou = decoder.model.decode(embedding, torch.zeros(1, dtype=torch.int64), prompts)
        masks = slice(1, None) if prompts.multimask_output else slice(1)
        decoded = {"low_res_masks": low, "iou_predictions": iou}
        found = {name: actual[name][:, masks] for name in decoded}
        worst = max(worst, compare(decoded, found, f"{out / DECODER}: onnxruntime"))
    return worst


def _run(session: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of an onnxruntime session by name."""
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, map(torch.from_numpy, arrays), strict=True))


def _decoder_inputs(
    embedding: Tensor, prompts: Prompts, size: tuple[int, int], mask_size: int
) -> dict[str, Tensor]:
    masks = prompts.masks
    return {
        "image_embeddings": embedding,
        "point_coords": prompts.points_xy_input,
        "point_labels": prompts.labels.float(),
        "mask_input": torch.zeros(1, 1, mask_size, mask_size) if masks is None else masks[:, None],
        "has_mask_input": torch.tensor([float(masks is not None)]),
        "orig_im_size": torch.tensor([float(side) for side in size]),
    }

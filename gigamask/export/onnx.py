"""Export to two ONNX files: the image encoder, and the decoder with the inputs of Meta's export.

`encoder.onnx` takes `image` (B, 3, S, S), float32 pixels in 0..255 with the image at the top left,
and `input_size` (B, 2), its height and width there; it returns `image_embeddings`. `decoder.onnx`
takes the `image_embeddings` of one image and any number P of prompts: `point_coords` (P, N, 2) in
input pixels, `point_labels` (P, N), `mask_input` (P, 1, G, G), `has_mask_input` (P,), and
`orig_im_size` (2,), all float32; it returns `masks` (P, 4, H, W) as logits at the image's size,
`iou_predictions` (P, 4) and `low_res_masks` (P, 4, G, G), the first of each for the single mask
(Segment Anything, `utils/onnx.py`), or the one of these that Meta's `--return-single-mask` chooses.
As in Meta's export, points without a box must end with a point of label -1. A model with classes
also returns `class_scores` (P, 4, C), their probabilities, whose names are the `class_names` of the
metadata. Images and points are resized as in `inference.resize_longest_side`. In fp16, weights are
stored and multiplied in half precision, as under autocast; inputs and outputs stay float32. The
metadata of both files states the model's configuration as JSON under `spec`, with the window of its
pixels.
"""

import importlib.util
import json
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from gigamask import files
from gigamask.errors import GigamaskError, first_line
from gigamask.export.probe import TOLERANCE, Probe, compare, keep_if_equal
from gigamask.models.promptable import PromptableModel
from gigamask.models.sam.attention import rel_pos_attention_reference
from gigamask.models.weight_files import SPEC, make_spec
from gigamask.types import Prompts

Tensors = dict[str, Tensor]
OPSET = 17
MOST_BYTES = 2**31 - 2**24
"""Most bytes of weights within a file, which may have 2 GiB."""
ENCODER, DECODER = "encoder.onnx", "decoder.onnx"
ENCODER_AXES = {name: {0: "images"} for name in ("image", "input_size", "image_embeddings")}
DECODER_OUTPUTS = ["masks", "iou_predictions", "low_res_masks"]
CLASS_SCORES = "class_scores"
DECODER_AXES = {
    "point_coords": {0: "prompts", 1: "points"},
    "point_labels": {0: "prompts", 1: "points"},
    "mask_input": {0: "prompts"},
    "has_mask_input": {0: "prompts"},
    "masks": {0: "prompts", 2: "height", 3: "width"},
    "iou_predictions": {0: "prompts"},
    "low_res_masks": {0: "prompts"},
}
OnnxPrecision = Literal["fp32", "fp16"]
TOLERANCES = {"fp32": TOLERANCE, "fp16": 3e-2}
"""Largest allowed difference by precision, relative to the largest value."""
HALVED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
COORDINATES = "positional_encoding_gaussian_matrix"
"""The weight by which coordinates are multiplied, for which float16 is too coarse."""
SIZES = ((600, 900), (333, 250))
"""Image sizes (H, W) at which outputs are compared, one landscape and one portrait."""


class OnnxEncoder(nn.Module):
    """The image encoder, including pixel normalization."""

    def __init__(self, model: PromptableModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, image: Float[Tensor, "B channels S S"], input_size: Int64[Tensor, "B 2"]
    ) -> Float[Tensor, "B C E E"]:
        """Embed images.

        Args:
            image: Pixels in 0..255 with the image at the top left.
            input_size: Height and width of the image.
        """
        return self.model.encode(image, input_size).float()


class OnnxDecoder(nn.Module):
    """Prompt encoder and mask decoder: all four masks of prompts at the image's size."""

    def __init__(self, model: PromptableModel, return_single_mask: bool = False) -> None:
        super().__init__()
        self.model, self.return_single_mask = model, return_single_mask

    def forward(
        self,
        image_embeddings: Float[Tensor, "1 C E E"],
        point_coords: Float[Tensor, "P N 2"],
        point_labels: Float[Tensor, "P N"],
        mask_input: Float[Tensor, "P 1 G G"],
        has_mask_input: Float[Tensor, "P"],
        orig_im_size: Float[Tensor, "2"],
    ) -> tuple[Tensor, ...]:
        """Predict the masks of prompts.

        Args:
            image_embeddings: Embedding of the image.
            point_coords: x and y in input pixels.
            point_labels: Labels of the points; 2 and 3 are the corners of a box.
            mask_input: Low-resolution logits.
            has_mask_input: 1 to use `mask_input`, 0 to ignore it.
            orig_im_size: Height and width of the image.

        Returns:
            Logits at the image's size, predicted IoU, low-resolution logits, and probabilities of
            classes if the model has them.
        """
        prompts = Prompts(
            *(point_coords, point_labels.long(), mask_input[:, 0], True), has_mask_input > 0.5
        )
        first = torch.zeros_like(prompts.labels[:, 0])
        low, iou, classes, _ = self.model.predict_all(image_embeddings, first, prompts)
        found = [iou, cast(Tensor, low), *(() if classes is None else (classes.softmax(-1),))]
        if self.return_single_mask:  # of up to two points the best of three, else the single mask
            single = torch.tensor([1000.0, 0, 0, 0]) * (point_labels.shape[1] - 2.5)
            found = choose_masks((iou + single).argmax(1), found)
        return self._resize(found[1], orig_im_size), *found

    def _resize(
        self, low: Float[Tensor, "P k G G"], size: Float[Tensor, "2"]
    ) -> Float[Tensor, "P k H W"]:
        """Resize logits to the image's size, as Meta's code does.

        They are resized to the input's side, cropped to remove the padding, and resized to the
        image; those of a stretched image are resized at once.
        """
        config, image_size = self.model.config, cast(Any, tuple(size.long()))
        if not config.stretch:
            side = config.image_size
            padded = functional.interpolate(low, (side, side), mode="bilinear", align_corners=False)
            sides = torch.floor(size * (side / size.max()) + 0.5).clamp(min=1)
            height, width = sides.long()
            low = padded[..., :height, :width]
        return functional.interpolate(low, image_size, mode="bilinear", align_corners=False)


def choose_masks(
    choice: Int64[Tensor, "P"], outputs: Sequence[Float[Tensor, "P k ..."]]
) -> list[Float[Tensor, "P 1 ..."]]:
    """Return one mask of each prompt; indexing by `arange` would be traced for one prompt.

    Args:
        choice: Which of the masks.
        outputs: What belongs to the masks of each prompt.
    """
    found = []
    for each in outputs:
        index = choice.view(-1, *[1] * (each.ndim - 1))
        found.append(each.gather(1, index.expand(-1, 1, *each.shape[2:])))
    return found


@keep_if_equal()
def write_onnx(
    model: PromptableModel,
    out: Path,
    precision: OnnxPrecision = "fp32",
    return_single_mask: bool = False,
) -> dict:
    """Write a model as two ONNX files, run them with onnxruntime, and compare the outputs.

    Args:
        model: Model to export.
        out: Folder for `encoder.onnx` and `decoder.onnx`.
        precision: fp16 halves the files.
        return_single_mask: Whether the decoder returns one mask of each prompt instead of four, so
            that its `low_res_masks` are the next `mask_input`.

    Returns:
        `files`, and the largest `difference` of an output, relative to the model's largest value.

    Raises:
        GigamaskError: A package is not installed, `out` is a file, the model is rectangular, or
            outputs differ, in which case nothing is written.
    """
    if model.config.rectangular:
        raise GigamaskError(
            "the ONNX encoder pads images to squares, this model was built with "
            "--model.rectangular: export it with --to safetensors"
        )
    check_onnx(out)
    traceable, mask_size = make_traceable(model), model.config.mask_size
    decoder = OnnxDecoder(traceable, return_single_mask)

    def answers(embedding: Tensor, prompts: Prompts) -> Tensors:
        inputs = _decoder_inputs(embedding, prompts, SIZES[0], mask_size)
        return _outputs(decoder, _beside(inputs))

    probe = Probe.from_model(model, answers, TOLERANCES[precision])
    with torch.no_grad():
        embedding = model.encode(probe.pixels, probe.valid)
    encoder_inputs = {"image": probe.pixels, "input_size": probe.valid}
    encoder = OnnxEncoder(traceable)
    written = export(encoder, encoder_inputs, out / ENCODER, ENCODER_AXES, precision)
    decoder_inputs = _decoder_inputs(embedding, probe.prompts[0], SIZES[0], mask_size)
    axes = DECODER_AXES | ({CLASS_SCORES: {0: "prompts"}} if model.config.class_names else {})
    written += export(decoder, decoder_inputs, out / DECODER, axes, precision)
    worst = _verify(model, decoder, probe, out, TOLERANCES[precision])
    return {"files": written, "difference": worst}


def check_onnx(out: Path) -> None:
    """Create the folder of ONNX files; raise `GigamaskError` if a package is not installed."""
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise GigamaskError(
            f"--to onnx requires {' and '.join(missing)} (not installed): "
            "run pip install 'gigamask[onnx]'"
        )
    out.mkdir(parents=True, exist_ok=True)


def make_traceable(model: PromptableModel) -> PromptableModel:
    """Return a copy of a model whose attention can be traced; the model keeps its fused one."""
    traceable = deepcopy(model)
    for module in traceable.modules():
        if use := getattr(module, "use_attention", None):
            use(rel_pos_attention_reference)
    return traceable


@torch.no_grad()
def export(
    module: nn.Module,
    inputs: Tensors,
    path: Path,
    axes: dict[str, dict[int, str]],
    precision: OnnxPrecision = "fp32",
) -> list[str]:
    """Trace a module and write it, with the configuration of its model in the metadata.

    Args:
        module: The module.
        inputs: Its inputs by name.
        path: The ONNX file.
        axes: Axes of any length by the name of the input or output; all outputs, in order.
        precision: Precision of weights and products.

    Returns:
        The file, and that of its weights, if they are too large for a file of ONNX.
    """
    import onnx

    weights = path.with_name(f"{path.name}.data")

    def write(partial: Path) -> None:
        # The exporter writes a file for each of many large weights.
        with tempfile.TemporaryDirectory(prefix=partial.name, dir=path.parent) as folder:
            traced, typed = f"{folder}/{path.name}", f"{folder}/types"
            # The newer exporter (dynamo) requires static sizes, but image sizes vary.
            torch.onnx.export(
                module.eval(),
                tuple(inputs.values()),
                traced,
                input_names=list(inputs),
                output_names=[name for name in axes if name not in inputs],
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
            exported = onnx.load(traced)
            if precision == "fp16":  # by paths, which may be of more than 2 GiB
                onnx.shape_inference.infer_shapes_path(traced, typed)
                _halve(exported.graph, onnx.load(typed, load_external_data=False).graph.value_info)
            spec = json.dumps(make_spec(cast(Any, module).model.config))
            onnx.helper.set_model_props(exported, {SPEC: spec})
            is_large = sum(len(each.raw_data) for each in exported.graph.initializer) > MOST_BYTES
            onnx.save(exported, traced, save_as_external_data=is_large, location=weights.name)
            weights.unlink(missing_ok=True)  # of an earlier export
            if is_large:
                files.write_atomically(weights, (Path(folder) / weights.name).replace)
            Path(traced).replace(partial)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files.write_atomically(path, write)
    return [str(each) for each in (path, weights) if each.exists()]


def _halve(graph: Any, values: Iterable[Any]) -> None:
    """Store weights in float16, and compute convolutions and products of them in it.

    Args:
        graph: The graph, changed in place.
        values: The types of its values.
    """
    from onnx import TensorProto, helper, numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    halves: set[str] = set()
    nodes = []
    doubles = {
        value.name for value in values if value.type.tensor_type.elem_type == TensorProto.DOUBLE
    }
    for node in graph.node:
        is_place = any(COORDINATES in name or name in doubles for name in node.input)
        if node.op_type not in HALVED or is_place:
            nodes.append(node)
            continue
        for i, name in enumerate(node.input):
            half = f"{name}_half"
            if not name:  # an optional input that is left out
                continue
            if name in weights and half not in halves:
                values = numpy_helper.to_array(weights[name]).astype("float16")
                graph.initializer.append(numpy_helper.from_array(values, half))
            elif half not in halves:
                nodes.append(helper.make_node("Cast", [name], [half], to=TensorProto.FLOAT16))
            halves.add(half)
            node.input[i] = half
        (name,) = node.output
        node.output[0] = f"{name}_in_half"
        widen = helper.make_node("Cast", [node.output[0]], [name], to=TensorProto.FLOAT)
        nodes += [node, widen]
    used = {name for node in nodes for name in node.input}
    for tensor in weights.values():
        if tensor.name not in used:
            graph.initializer.remove(tensor)
    del graph.node[:]
    graph.node.extend(nodes)


@torch.no_grad()
def _verify(
    model: PromptableModel, decoder: OnnxDecoder, probe: Probe, out: Path, tolerance: float
) -> float:
    """Return the largest difference between onnxruntime's outputs and the model's."""
    encoder, session = (open_session(out / name) for name in (ENCODER, DECODER))
    reader = f"{out / DECODER}: onnxruntime"
    pixels = torch.cat([probe.pixels, probe.pixels.flip(3)])
    valid = torch.cat([probe.valid, probe.valid.flip(1)])
    embeddings = model.encode(pixels, valid)
    actual = run_session(encoder, {"image": pixels, "input_size": valid})
    expected = {"image_embeddings": embeddings}
    worst = compare(expected, actual, f"{out / ENCODER}: onnxruntime", tolerance)
    embedding, mask_size = embeddings[:1], model.config.mask_size
    for prompts in probe.prompts:
        for size in SIZES:
            inputs = _decoder_inputs(embedding, prompts, size, mask_size)
            actual = run_session(session, inputs)
            worst = max(worst, compare(_outputs(decoder, inputs), actual, reader, tolerance))
        if not decoder.return_single_mask:
            low, iou = model.decode(embedding, torch.zeros(1, dtype=torch.int64), prompts)
            masks = slice(1, None) if prompts.multimask_output else slice(1)
            decoded = {"low_res_masks": low, "iou_predictions": iou}
            found = {name: actual[name][:, masks] for name in decoded}
            worst = max(worst, compare(decoded, found, reader, tolerance))
        inputs = _beside(_decoder_inputs(embedding, prompts, SIZES[0], mask_size))
        actual = run_session(session, inputs)
        worst = max(worst, compare(_outputs(decoder, inputs), actual, reader, tolerance))
    return worst


def _outputs(decoder: OnnxDecoder, inputs: Tensors) -> Tensors:
    """Return the outputs of a decoder by name."""
    return dict(zip([*DECODER_OUTPUTS, CLASS_SCORES], decoder(**inputs), strict=False))


def _beside(inputs: Tensors) -> Tensors:
    """Return the inputs of a decoder with a second prompt beside the first."""
    scale = {"point_coords": 0.5}
    return {
        name: torch.cat([each, scale.get(name, 1.0) * each]) if name in DECODER_AXES else each
        for name, each in inputs.items()
    }


def open_session(path: Path) -> Any:
    """Return an onnxruntime session of a file; raise `GigamaskError` if it refuses it."""
    from onnxruntime import InferenceSession, SessionOptions
    from onnxruntime.capi.onnxruntime_pybind11_state import (  # pyrefly: ignore[missing-import]
        Fail,
    )

    options = SessionOptions()
    options.log_severity_level = 3  # not that it lacks a kernel of float16 and converts instead
    try:
        return InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Fail as error:
        raise GigamaskError(
            f"{path}: onnxruntime refuses what torch made of this model ({first_line(error)}); use "
            "--to safetensors"
        ) from None


def run_session(session: Any, inputs: Tensors) -> Tensors:
    """Return the outputs of an onnxruntime session by name.

    Args:
        session: The session.
        inputs: Its inputs by name.
    """
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, map(torch.from_numpy, arrays), strict=True))


def _decoder_inputs(
    embedding: Tensor, prompts: Prompts, size: tuple[int, int], mask_size: int
) -> Tensors:
    masks = prompts.masks
    return {
        "image_embeddings": embedding,
        "point_coords": prompts.points_xy_input,
        "point_labels": prompts.labels.float(),
        "mask_input": torch.zeros(1, 1, mask_size, mask_size) if masks is None else masks[:, None],
        "has_mask_input": torch.tensor([float(masks is not None)]),
        "orig_im_size": torch.tensor([float(side) for side in size]),
    }

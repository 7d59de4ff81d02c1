"""Export for annotation tools: X-AnyLabeling's ONNX models, and a serverless function of CVAT.

X-AnyLabeling feeds its encoder RGB images (684, 1024, 3) with the image at the top left and black
elsewhere, and its decoder coordinates in pixels of these; both are fixed in its code. CVAT's
interactors are Nuclio functions: `function.yaml` and `main.py`, here with the files of `--to onnx`.
"""

import re
from pathlib import Path

import torch
import yaml
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.export.onnx import (
    DECODER,
    DECODER_AXES,
    DECODER_OUTPUTS,
    ENCODER,
    OnnxDecoder,
    check_onnx,
    choose_masks,
    export,
    make_traceable,
    open_session,
    run_session,
    write_onnx,
)
from gigamask.export.probe import compare, draw_prompts, keep_if_equal
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.annotation_tools import cvat_main
from gigamask.rng import make_rng
from gigamask.types import Prompts

XANYLABELING_SIZE, XANYLABELING_MASK_SIZE = (684, 1024), 256
"""Height and width of X-AnyLabeling's images, and side of its mask prompts, which are empty."""


class XAnyLabelingEncoder(nn.Module):
    """The image encoder for X-AnyLabeling's images, which are resized to the model's input."""

    rows: Tensor
    columns: Tensor

    def __init__(self, model: PromptableModel) -> None:
        super().__init__()
        self.model = model
        self.size = _input_size(model)
        for name, before, after in zip(
            ("rows", "columns"), XANYLABELING_SIZE, self.size, strict=True
        ):
            identity = torch.eye(before)[None, None]
            weights = functional.interpolate(
                identity, (after, before), mode="bilinear", antialias=True
            )
            self.register_buffer(name, weights[0, 0])

    def forward(self, image: Float[Tensor, "h w 3"]) -> Float[Tensor, "1 C E E"]:
        """Embed an image.

        Args:
            image: RGB pixels in 0..255.
        """
        resized = self.rows @ image.permute(2, 0, 1) @ self.columns.T
        height, width = self.size
        side = self.model.config.image_size
        padded = functional.pad(resized, (0, side - width, 0, side - height))
        return self.model.encode(padded[None], torch.tensor([[height, width]])).float()


class XAnyLabelingDecoder(OnnxDecoder):
    """The decoder for coordinates in X-AnyLabeling's images."""

    scale_xy: Tensor

    def __init__(self, model: PromptableModel) -> None:
        super().__init__(model)
        (height, width), (h, w) = _input_size(model), XANYLABELING_SIZE
        self.register_buffer("scale_xy", torch.tensor([width / w, height / h]))

    def forward(
        self,
        image_embeddings: Float[Tensor, "1 C E E"],
        point_coords: Float[Tensor, "P N 2"],
        point_labels: Float[Tensor, "P N"],
        mask_input: Float[Tensor, "P 1 m m"],
        has_mask_input: Float[Tensor, "P"],
        orig_im_size: Float[Tensor, "2"],
    ) -> tuple[Float[Tensor, "P 1 H W"], Float[Tensor, "P 1"], Float[Tensor, "P 1 G G"]]:
        """Predict one mask of each prompt: of one point, the best of three.

        Args:
            image_embeddings: Embedding of the image.
            point_coords: x and y in pixels of X-AnyLabeling's image.
            point_labels: Labels of the points.
            mask_input: Low-resolution logits.
            has_mask_input: 1 to use `mask_input`, 0 to ignore it.
            orig_im_size: Height and width of X-AnyLabeling's image.
        """
        size = (self.model.config.mask_size,) * 2
        masks = functional.interpolate(mask_input, size, mode="bilinear", align_corners=False)
        points = point_coords * self.scale_xy
        masks, iou, low, *_ = super().forward(  # without the classes
            image_embeddings, points, point_labels, masks, has_mask_input, orig_im_size
        )
        best = 1 + iou[:, 1:].argmax(1)
        index = torch.where((point_labels >= 0).sum(1) == 1, best, 0)
        masks, iou, low = choose_masks(index, (masks, iou, low))
        return masks, iou, low


def _input_size(model: PromptableModel) -> tuple[int, int]:
    """Return the height and width of X-AnyLabeling's images in the model's input."""
    side, (height, width) = model.config.image_size, XANYLABELING_SIZE
    return (side, side) if model.config.stretch else (round(height * side / width), side)


@keep_if_equal()
@torch.no_grad()
def write_xanylabeling(model: PromptableModel, out: Path) -> dict:
    """Write a model and its description for X-AnyLabeling, and compare the outputs.

    Args:
        model: Model to export.
        out: Folder for `encoder.onnx`, `decoder.onnx` and the description NAME.yaml.

    Returns:
        `files`, and the largest `difference` of an output, relative to the model's largest value.

    Raises:
        GigamaskError: A package is not installed, `out` is a file, or outputs differ.
    """
    name = _name(out)
    check_onnx(out)
    traceable, rng = make_traceable(model), make_rng(0, "probe")
    encoder, decoder = XAnyLabelingEncoder(traceable).eval(), XAnyLabelingDecoder(traceable).eval()
    image = torch.from_numpy(rng.integers(0, 256, (*XANYLABELING_SIZE, 3)).astype("float32"))
    written = export(encoder, {"image": image}, out / ENCODER, {"image_embeddings": {}})
    embedding = encoder(image)
    found = run_session(open_session(out / ENCODER), {"image": image})
    reader = f"{out / ENCODER}: onnxruntime"
    worst = compare({"image_embeddings": embedding}, found, reader)

    def make_inputs(embedding: Tensor, prompts: Prompts) -> dict[str, Tensor]:
        return {
            "image_embeddings": embedding,
            "point_coords": prompts.points_xy_input / decoder.scale_xy,
            "point_labels": prompts.labels.float(),
            "mask_input": torch.zeros(1, 1, XANYLABELING_MASK_SIZE, XANYLABELING_MASK_SIZE),
            "has_mask_input": torch.zeros(1),
            "orig_im_size": torch.tensor(XANYLABELING_SIZE).float(),
        }

    def answers(embedding: Tensor, prompts: Prompts) -> dict[str, Tensor]:
        outputs = decoder(**make_inputs(embedding, prompts))
        return dict(zip(DECODER_OUTPUTS, outputs, strict=True))

    probes = draw_prompts(model, embedding, answers)
    written += export(decoder, make_inputs(embedding, probes[0]), out / DECODER, DECODER_AXES)
    session, reader = open_session(out / DECODER), f"{out / DECODER}: onnxruntime"
    for prompts in probes:
        found = run_session(session, make_inputs(embedding, prompts))
        worst = max(worst, compare(answers(embedding, prompts), found, reader))
    description = {
        "type": "segment_anything",
        "name": name,
        "provider": "gigamask",
        "display_name": name,
        "encoder_model_path": ENCODER,
        "decoder_model_path": DECODER,
        "input_size": XANYLABELING_SIZE[1],
        "max_width": XANYLABELING_SIZE[1],
        "max_height": XANYLABELING_SIZE[0],
    }
    path = out / f"{name}.yaml"
    files.write_text(path, yaml.safe_dump(description, sort_keys=False))
    return {"files": [*written, str(path)], "difference": worst}


@keep_if_equal()
def write_cvat(model: PromptableModel, out: Path) -> dict:
    """Write a model as a serverless function of CVAT: an interactor with points and a box.

    Args:
        model: Model to export.
        out: Folder for `encoder.onnx`, `decoder.onnx`, `function.yaml` and `main.py`.

    Returns:
        As `write_onnx`, which compares the outputs.

    Raises:
        GigamaskError: As `write_onnx`.
    """
    name = _name(out)
    result = write_onnx(model, out)
    run = [
        "apt-get update && apt-get install -y --no-install-recommends python3 python3-pip "
        "python-is-python3 && rm -rf /var/lib/apt/lists/*",
        "pip3 install --no-cache-dir onnxruntime numpy pillow opencv-python-headless",
    ]
    function = {
        "metadata": {
            "name": f"gigamask-{name}",
            "namespace": "cvat",
            "annotations": {
                "name": name,
                "version": "2",
                "type": "interactor",
                "spec": None,
                "framework": "onnx",
                "min_pos_points": "1",
                "min_neg_points": "0",
                "startswith_box_optional": "true",
                "help_message": "Click on an object, and outside of it to correct the mask",
            },
        },
        "spec": {
            "description": f"Interactive segmentation with {name}",
            "runtime": "python:3.10",
            "handler": "main:handler",
            "eventTimeout": "30s",
            "env": [{"name": "STRETCH", "value": str(int(model.config.stretch))}],
            "build": {
                "image": f"cvat.gigamask.{name}",
                "baseImage": "ubuntu:22.04",
                "directives": {
                    "preCopy": [
                        {"kind": "ENV", "value": "DEBIAN_FRONTEND=noninteractive"},
                        *({"kind": "RUN", "value": each} for each in run),
                        {"kind": "WORKDIR", "value": "/opt/nuclio"},
                    ]
                },
            },
            "triggers": {
                "myHttpTrigger": {
                    "maxWorkers": 1,
                    "kind": "http",
                    "workerAvailabilityTimeoutMilliseconds": 10000,
                    "attributes": {"maxRequestBodySize": 33554432},
                }
            },
            "platform": {
                "attributes": {
                    "restartPolicy": {"name": "always", "maximumRetryCount": 3},
                    "mountMode": "volume",
                }
            },
        },
    }
    files.write_text(out / "function.yaml", yaml.safe_dump(function, sort_keys=False))
    files.write_text(out / "main.py", Path(cvat_main.__file__).read_text(encoding="utf-8"))
    return result | {"files": [*result["files"], str(out / "function.yaml"), str(out / "main.py")]}


def _name(out: Path) -> str:
    """Return the folder's name in lower-case letters, digits and dashes, as Nuclio wants names."""
    name = re.sub(r"[^a-z0-9]+", "-", out.absolute().name.lower()).strip("-")
    if not name:
        raise GigamaskError(
            f"--out {out}: the folder's name becomes the model's and must have a letter or digit"
        )
    return name

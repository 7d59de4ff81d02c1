"""Predictor and automatic masks against Meta's own package `segment_anything`, where it can be imported; it is no dependency, so skips are usual.

    pip download --no-deps segment-anything && unzip segment_anything-*.whl -d official
    PYTHONPATH=official pytest tests/parity/test_official_sam.py -rs

What it needs of torchvision, which does not load beside the CPU build of torch, stands in here: Pillow's resize, and the textbook's suppression.
"""

import importlib
import importlib.util
import sys
import types
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from gigamask.model.sizes import tiny
from gigamask.model.start import build
from gigamask.model.weights import to_official
from gigamask.predict.automatic import AutomaticMasks
from gigamask.predict.predictor import Predictor
from gigamask.prepare.synthetic import compose_scene

SPEC = replace(tiny(), input_side=64, window=3)


def suppression(boxes, scores, idxs, iou_threshold):
    """One box after the other, in torch, as the reference generator calls torchvision's `batched_nms`: all of one category."""
    kept, left = [], torch.sort(scores, descending=True, stable=True)[1]
    while len(left):
        best, left = left[0], left[1:]
        kept.append(int(best))
        low, high = torch.maximum(boxes[best, :2], boxes[left, :2]), torch.minimum(boxes[best, 2:], boxes[left, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        left = left[~((shared / (area(boxes[best : best + 1]) + area(boxes[left]) - shared)).double() > iou_threshold)]
    return torch.tensor(kept, dtype=torch.int64)


def area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


@pytest.fixture(scope="module")
def official():
    if importlib.util.find_spec("segment_anything") is None:
        pytest.skip("Meta's segment_anything is not installed: put it on PYTHONPATH, as the head of this file says, to compare with it")
    stand_in = {
        "torchvision": {},
        "torchvision.ops": {},
        "torchvision.ops.boxes": {"batched_nms": suppression, "box_area": area},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {
            "to_pil_image": Image.fromarray,
            "resize": lambda image, size: image.resize(size[::-1], Image.Resampling.BILINEAR),
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, content in stand_in.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("segment_anything")


@pytest.fixture(scope="module")
def models(official):
    mine, parts = build(SPEC, 0).eval(), official.modeling
    side = SPEC.embedding_side
    theirs = parts.Sam(
        parts.ImageEncoderViT(
            img_size=SPEC.input_side,
            patch_size=SPEC.patch,
            embed_dim=SPEC.dim,
            depth=SPEC.depth,
            num_heads=SPEC.heads,
            out_chans=SPEC.embedding_dim,
            norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=SPEC.window,
            global_attn_indexes=SPEC.global_blocks,
        ),
        parts.PromptEncoder(SPEC.embedding_dim, (side, side), (SPEC.input_side, SPEC.input_side), 16),
        parts.MaskDecoder(
            transformer_dim=SPEC.embedding_dim,
            transformer=parts.TwoWayTransformer(2, SPEC.embedding_dim, SPEC.decoder_heads, SPEC.decoder_mlp),
            iou_head_hidden_dim=SPEC.iou_hidden,
        ),
    )
    theirs.load_state_dict(to_official(mine), strict=True)
    return mine, theirs.eval()


POINTS = {"point_coords": np.array([[30.0, 40], [100, 20]]), "point_labels": np.array([1, 0])}
BOX = {"box": np.array([10, 10, 90, 100])}
PROMPTS = {"points": POINTS, "box": BOX, "points and box": POINTS | BOX, "nothing": {}}


@pytest.mark.parametrize("upright", [False, True])
def test_the_predictor_is_metas(official, models, upright):
    image = compose_scene(1, 3).pixels
    image = np.ascontiguousarray(image.transpose(1, 0, 2)) if upright else image
    mine, theirs = Predictor(models[0]), official.SamPredictor(models[1])
    mine.set_image(image)
    theirs.set_image(image)
    assert (mine.original_size, mine.input_size) == (theirs.original_size, theirs.input_size)
    assert torch.allclose(mine.features, theirs.features, atol=1e-5)
    low = theirs.predict(**POINTS)[2][:1]
    for asked in [*PROMPTS.values(), {"mask_input": low}, POINTS | {"mask_input": low}]:
        for several in (True, False):
            found, expected = (each.predict(**asked, multimask_output=several, return_logits=True) for each in (mine, theirs))
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                assert np.abs(one - other).max() <= 1e-5 * max(1, np.abs(other).max())
    for name in ("apply_coords", "apply_boxes"):
        given = np.arange(8.0).reshape(-1, 2 if name == "apply_coords" else 4)
        assert np.allclose(getattr(mine.transform, name)(given, (259, 316)), getattr(theirs.transform, name)(given, (259, 316)))
        torch.testing.assert_close(
            getattr(mine.transform, f"{name}_torch")(torch.from_numpy(given), (259, 316)),
            getattr(theirs.transform, f"{name}_torch")(torch.from_numpy(given), (259, 316)),
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"points_per_side": 12, "pred_iou_thresh": 0.02, "stability_score_thresh": 0.5, "stability_score_offset": 0.2, "box_nms_thresh": 1.0},
        {"points_per_side": 8, "crop_n_layers": 2, "crop_n_points_downscale_factor": 2, "box_nms_thresh": 0.9, "crop_nms_thresh": 0.8},
        {"points_per_side": 8, "points_per_batch": 7, "crop_n_layers": 1, "box_nms_thresh": 0.95, "min_mask_region_area": 50},
        {"points_per_side": None, "point_grids": [np.array([[0.5, 0.5], [0.2, 0.7]])], "output_mode": "uncompressed_rle"},
    ],
)
def test_automatic_masks_are_metas_in_the_same_order(official, models, settings):
    image = compose_scene(1, 3).pixels
    settings = {"pred_iou_thresh": 0.0, "stability_score_thresh": 0.0} | settings
    mine, theirs = AutomaticMasks(models[0], **settings).generate(image), official.SamAutomaticMaskGenerator(models[1], **settings).generate(image)
    assert len(mine) == len(theirs) > 1
    for one, other in zip(mine, theirs, strict=True):
        assert list(one) == list(other)
        assert (one["point_coords"], one["crop_box"]) == (other["point_coords"], other["crop_box"])
        assert (one["predicted_iou"], one["stability_score"]) == pytest.approx(
            (other["predicted_iou"], other["stability_score"]), abs=1e-3, nan_ok=True
        )
        assert np.abs(np.subtract(one["bbox"], other["bbox"])).max() <= 1
        if isinstance(one["segmentation"], dict):
            assert one["segmentation"]["size"] == other["segmentation"]["size"]
            assert abs(len(one["segmentation"]["counts"]) - len(other["segmentation"]["counts"])) <= 2
        else:
            assert (one["segmentation"] != other["segmentation"]).sum() <= 3  # logits within 1e-5 of 0 may fall on either side

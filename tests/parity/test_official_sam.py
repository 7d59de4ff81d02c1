"""Predictor and mask generator against Meta's package `segment_anything`, skipped without it.

pip download --no-deps segment-anything && unzip segment_anything-*.whl -d official
PYTHONPATH=official pytest tests/parity/test_official_sam.py -rs
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.predictor import SamPredictor
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.synthetic.scenes import compose_scene
from tests import official

SPEC = replace(tiny(), image_size=64, window_size=3)


@pytest.fixture(scope="module")
def package():
    if not official.there():
        pytest.skip(
            "Meta's segment_anything is not installed: add it to PYTHONPATH as the docstring says"
        )
    with official.imported() as package:
        yield package


@pytest.fixture(scope="module")
def models(package):
    mine = build_model(SPEC, 0).eval()
    return mine, official.with_weights_of(mine, package)


POINTS = {"point_coords": np.array([[30.0, 40], [100, 20]]), "point_labels": np.array([1, 0])}
BOX = {"box": np.array([10, 10, 90, 100])}
PROMPTS = {"points": POINTS, "box": BOX, "points and box": POINTS | BOX, "nothing": {}}


@pytest.mark.parametrize("upright", [False, True])
def test_the_predictor_is_metas(package, models, upright):
    image = compose_scene(1, 3).pixels
    image = np.ascontiguousarray(image.transpose(1, 0, 2)) if upright else image
    mine, theirs = SamPredictor(models[0]), package.SamPredictor(models[1])
    mine.set_image(image)
    theirs.set_image(image)
    assert (mine.original_size, mine.input_size) == (theirs.original_size, theirs.input_size)
    assert torch.allclose(mine.features, theirs.features, atol=1e-5)
    low = theirs.predict(**POINTS)[2][:1]
    for asked in [*PROMPTS.values(), {"mask_input": low}, POINTS | {"mask_input": low}]:
        for several in (True, False):
            found, expected = (
                each.predict(**asked, multimask_output=several, return_logits=True)
                for each in (mine, theirs)
            )
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                assert np.abs(one - other).max() <= 1e-5 * max(1, np.abs(other).max())
    for size in ((480, 640), (1, 3), (641, 640), (37, 1999)):
        shapes = [each.transform.get_preprocess_shape(*size, 64) for each in (mine, theirs)]
        assert shapes[0] == shapes[1]
    for name in ("apply_coords", "apply_boxes"):
        given = np.arange(8.0).reshape(-1, 2 if name == "apply_coords" else 4)
        assert np.allclose(
            getattr(mine.transform, name)(given, (259, 316)),
            getattr(theirs.transform, name)(given, (259, 316)),
        )
        torch.testing.assert_close(
            getattr(mine.transform, f"{name}_torch")(torch.from_numpy(given), (259, 316)),
            getattr(theirs.transform, f"{name}_torch")(torch.from_numpy(given), (259, 316)),
        )


@pytest.mark.parametrize(
    "settings",
    [
        {
            "points_per_side": 12,
            "pred_iou_thresh": 0.02,
            "stability_score_thresh": 0.5,
            "stability_score_offset": 0.2,
            "box_nms_thresh": 1.0,
        },
        {
            "points_per_side": 8,
            "crop_n_layers": 2,
            "crop_n_points_downscale_factor": 2,
            "box_nms_thresh": 0.9,
            "crop_nms_thresh": 0.8,
        },
        {
            "points_per_side": 8,
            "points_per_batch": 7,
            "crop_n_layers": 1,
            "box_nms_thresh": 0.95,
            "min_mask_region_area": 50,
        },
        {
            "points_per_side": None,
            "point_grids": [np.array([[0.5, 0.5], [0.2, 0.7]])],
            "output_mode": "uncompressed_rle",
        },
    ],
)
def test_automatic_masks_are_metas_in_the_same_order(package, models, settings):
    image = compose_scene(1, 3).pixels
    settings = {"pred_iou_thresh": 0.0, "stability_score_thresh": 0.0} | settings
    mine, theirs = (
        SamAutomaticMaskGenerator(models[0], **settings).generate(image),
        package.SamAutomaticMaskGenerator(models[1], **settings).generate(image),
    )
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
            assert (
                abs(len(one["segmentation"]["counts"]) - len(other["segmentation"]["counts"])) <= 2
            )
        else:
            assert (
                one["segmentation"] != other["segmentation"]
            ).sum() <= 3  # logits within 1e-5 of 0 may fall on either side


@pytest.mark.parametrize("kind", ["uint8", "uint16", "bool", "float64"])
def test_labels_of_any_type_are_metas(package, models, kind):
    found = []
    for each, model in zip((SamPredictor, package.SamPredictor), models, strict=True):
        predictor = each(model)
        predictor.set_image(compose_scene(1, 3).pixels)
        labels = POINTS["point_labels"].astype(kind)
        found.append(predictor.predict(POINTS["point_coords"], labels, return_logits=True)[0])
    assert np.abs(found[0] - found[1]).max() <= 1e-5 * max(1, np.abs(found[1]).max())


def test_attributes_are_set_as_programs_of_metas_set_them(package, models):
    """The embedding of another predictor, the threshold of masks, and a grid of points."""
    image, found = compose_scene(1, 3).pixels, []
    kinds = (SamPredictor, SamAutomaticMaskGenerator)
    for (predict, generate), model in zip(
        (kinds, (package.SamPredictor, package.SamAutomaticMaskGenerator)), models, strict=True
    ):
        embedded, predictor = predict(model), predict(model)
        embedded.set_image(image)
        for name in ("features", "original_size", "input_size", "is_image_set"):
            setattr(predictor, name, getattr(embedded, name))
        model.mask_threshold = 0.25
        masks, *_ = predictor.predict(**POINTS)
        model.mask_threshold = 0.0
        generator = generate(model, 4, pred_iou_thresh=0.0, stability_score_thresh=0.0)
        grids = generator.point_grids
        generator.box_nms_thresh, generator.point_grids = 1.0, [np.array([[0.5, 0.25]])]
        found.append((masks, grids, generator.generate(image)))
    (mine, grids, records), (theirs, other_grids, others) = found
    assert (mine != theirs).sum() <= 3
    assert np.array_equal(grids, other_grids)
    assert [each["area"] for each in records] == pytest.approx(
        [each["area"] for each in others], abs=3
    )

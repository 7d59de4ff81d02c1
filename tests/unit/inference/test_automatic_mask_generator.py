"""Automatic masks of a model that predicts discs around each point: filters, crops, records."""

import inspect
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch

from benchmarks.automatic import at_full_size
from gigamask.inference import automatic_mask_generator
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import (
    SamAutomaticMaskGenerator,
    build_point_grid,
    generate_crop_boxes,
    postprocess_small_regions,
    remove_small_regions,
)
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.embedding_cache import EmbeddingCache
from tests.errors import error_line

NOTHING_FILTERED = {"pred_iou_thresh": 0.0, "stability_score_thresh": 0.0, "box_nms_thresh": 1.0}


@pytest.fixture
def discs(model, monkeypatch) -> Callable:
    """Return a model that predicts discs of radius 2, 4 and 8 cells around the point.

    Predicted IoUs are 0.5, 0.7 and 0.9, and less the higher up the point lies.
    """

    def decode(embedding, mask_image, prompts):
        place = torch.arange(32) * 2 + 0.5
        xy = prompts.points_xy_input[:, :1, :, None].float()
        far = ((place[:, None] - xy[:, :, 1:]) ** 2 + (place - xy[:, :, :1]) ** 2).sqrt()
        iou = torch.tensor([0.5, 0.7, 0.9]) - 0.1 * (
            1 - prompts.points_xy_input[:, 0, 1:].float() / 64
        )
        return torch.tensor([4.0, 8.0, 16.0])[:, None, None] - far, iou

    monkeypatch.setattr(model, "decode", decode)
    return model


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)


def test_records_say_what_they_are(discs, image):
    found = SamAutomaticMaskGenerator(discs, points_per_side=3, **NOTHING_FILTERED).generate(image)
    assert len(found) == 27
    assert list(found[0]) == [
        "segmentation",
        "area",
        "bbox",
        "predicted_iou",
        "point_coords",
        "stability_score",
        "crop_box",
    ]
    assert [each["predicted_iou"] for each in found] == sorted(
        (each["predicted_iou"] for each in found), reverse=True
    )
    for each in found:
        mask = each["segmentation"]
        assert (mask.shape, mask.dtype, mask.sum()) == ((120, 160), bool, each["area"])
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert each["bbox"] == [columns[0], rows[0], columns[-1] - columns[0], rows[-1] - rows[0]]
        assert each["crop_box"] == [0, 0, 160, 120]
        ((x, y),) = each["point_coords"]
        assert mask[int(y), int(x)]
    points = sorted({tuple(each["point_coords"][0]) for each in found})
    assert np.allclose(points, [(x, y) for x in (160 / 6, 80, 160 * 5 / 6) for y in (20, 60, 100)])


@pytest.mark.slow
def test_batches_and_groups_change_nothing(discs, image, monkeypatch):
    whole = SamAutomaticMaskGenerator(
        discs, points_per_side=4, output_mode="coco_rle", **NOTHING_FILTERED
    ).generate(image)
    monkeypatch.setattr(automatic_mask_generator, "CHUNK_BYTES", 1)
    assert (
        SamAutomaticMaskGenerator(
            discs, points_per_side=4, points_per_batch=3, output_mode="coco_rle", **NOTHING_FILTERED
        ).generate(image)
        == whole
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 160), (301, 77)])
def test_boxes_of_masks_change_nothing(discs, size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    settings = {"points_per_side": 5, "crop_n_layers": 1, "pred_iou_thresh": 0.4}
    generator = SamAutomaticMaskGenerator(discs, stability_score_thresh=0.6, **settings)
    found = generator.generate_proposals(image)
    with at_full_size():
        whole = generator.generate_proposals(image)
    assert len(found) > 10
    for name, values in vars(found).items():
        expected = getattr(whole, name)
        if name == "masks":
            values, expected = values.to_coco(), expected.to_coco()
        assert np.array_equal(values, expected), name


@pytest.mark.slow
def test_what_is_poor_or_unstable_or_twice_there_goes(discs, image):
    settings = {"points_per_side": 4} | NOTHING_FILTERED

    def generate(**changed):
        return SamAutomaticMaskGenerator(discs, **settings | changed).generate_proposals(image)

    everything, good = generate(), generate(pred_iou_thresh=0.6)
    assert len(everything) == 48
    assert (good.predicted_iou > 0.6).all()
    assert len(good) == (everything.predicted_iou > 0.6).sum() > 10
    stable = generate(stability_score_thresh=0.7)
    assert len(stable) == (everything.stability_score >= 0.7).sum() > 10
    assert (everything.stability_score < everything.predicted_iou.max()).all()
    apart = SamAutomaticMaskGenerator(
        discs, **settings | {"box_nms_thresh": 0.1}
    ).generate_proposals(image)
    assert 1 < len(apart) < 48
    assert apart.predicted_iou[0] == everything.predicted_iou.max()


@pytest.mark.slow
def test_nothing_found_is_an_empty_list(discs, image):
    for mode in ("binary_mask", "uncompressed_rle", "coco_rle"):
        settings = {
            "points_per_side": 2,
            "pred_iou_thresh": 0.95,
            "crop_n_layers": 1,
            "min_mask_region_area": 5,
            "output_mode": mode,
        }
        assert SamAutomaticMaskGenerator(discs, **settings).generate(image) == []


def test_an_empty_mask_has_no_box_and_no_stability(model, image, monkeypatch):
    monkeypatch.setattr(
        model,
        "decode",
        lambda embedding, mask_image, prompts: (
            torch.full((len(mask_image), 3, 32, 32), -9.0),
            torch.ones(1, 3),
        ),
    )
    (first, *_) = SamAutomaticMaskGenerator(
        model, points_per_side=1, **NOTHING_FILTERED | {"output_mode": "uncompressed_rle"}
    ).generate(image)
    assert (first["area"], first["bbox"], first["segmentation"]["counts"]) == (
        0,
        [0, 0, 0, 0],
        [120 * 160],
    )
    assert np.isnan(first["stability_score"])
    assert (
        SamAutomaticMaskGenerator(model, points_per_side=1, pred_iou_thresh=0.0).generate(image)
        == []
    )


def test_the_three_forms_of_a_mask_are_the_same_mask(discs, image):
    made = [
        SamAutomaticMaskGenerator(
            discs, points_per_side=2, output_mode=mode, **NOTHING_FILTERED
        ).generate(image)
        for mode in ("binary_mask", "uncompressed_rle", "coco_rle")
    ]
    for dense, plain, packed in zip(*made, strict=True):
        assert plain["segmentation"]["size"] == packed["segmentation"]["size"] == [120, 160]
        for told in (plain, packed):
            assert np.array_equal(
                RLEMasks.from_coco([told["segmentation"]["counts"]], (120, 160)).to_dense()[0],
                dense["segmentation"],
            )
    full = RLEMasks.from_dense(np.ones((1, 2, 3), bool))
    assert automatic_mask_generator.encode_masks(full, "uncompressed_rle") == [
        {"size": [2, 3], "counts": [0, 6]}
    ]


@pytest.mark.slow
def test_crops_are_looked_at_alone_and_those_their_edges_cut_go(discs, image):
    settings = {"points_per_side": 4, "crop_nms_thresh": 1.0} | NOTHING_FILTERED
    found = SamAutomaticMaskGenerator(
        discs, crop_n_layers=1, crop_n_points_downscale_factor=2, **settings
    ).generate_proposals(image)
    areas = np.prod(found.crops[:, 2:] - found.crops[:, :2], 1)
    assert (np.diff(areas) >= 0).all()  # those of smaller crops first
    assert (areas == 160 * 120).sum() == 48
    assert 0 < (areas < 160 * 120).sum() < 4 * 4 * 3
    for (x0, y0, x1, y1), (left, top, right, bottom), (x, y) in zip(
        found.crops, found.boxes, found.points_xy, strict=True
    ):
        assert x0 <= left <= x <= right < x1
        assert y0 <= top <= y <= bottom < y1
        assert left > x0 + 20 or x0 == 0 or left <= 20
    fewer = SamAutomaticMaskGenerator(
        discs,
        crop_n_layers=1,
        crop_n_points_downscale_factor=2,
        **settings | {"crop_nms_thresh": 0.3},
    ).generate_proposals(image)
    assert 0 < len(fewer) < len(found)


def test_crop_boxes_overlap_and_end_with_the_image():
    boxes = generate_crop_boxes((100, 200), 2, 0.34)
    assert [layer for _, layer in boxes] == [0] + [1] * 4 + [2] * 16
    assert [box for box, _ in boxes[:5]] == [
        (0, 0, 200, 100),
        (0, 0, 117, 67),
        (0, 33, 117, 100),
        (83, 0, 200, 67),
        (83, 33, 200, 100),
    ]
    covered = np.zeros((100, 200), int)
    for (x0, y0, x1, y1), _ in boxes[5:]:
        covered[y0:y1, x0:x1] += 1
    assert covered.min() == 1


def test_custom_grids(discs, image):
    grids = [torch.tensor([[0.5, 0.5]]), np.array([[0.25, 0.5], [0.75, 0.5]])]
    found = SamAutomaticMaskGenerator(
        discs, points_per_side=None, point_grids=grids[:1], **NOTHING_FILTERED
    ).generate_proposals(image)
    assert np.unique(found.points_xy, axis=0).tolist() == [[80, 60]]
    layers = SamAutomaticMaskGenerator(
        discs, points_per_side=None, point_grids=grids, crop_n_layers=1, **NOTHING_FILTERED
    ).generate_proposals(image)
    assert len(np.unique(layers.points_xy, axis=0)) > 1
    assert build_point_grid(2).tolist() == [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]


def test_holes_are_filled_and_islands_removed():
    mask = np.zeros((20, 20), bool)
    mask[2:12, 2:12] = True
    mask[4, 4] = mask[5, 5] = False  # one hole: its pixels meet at a corner
    mask[15, 15] = True
    whole = mask.copy()
    whole[4, 4] = whole[5, 5] = True
    filled, changed = remove_small_regions(mask, 3, "holes")
    assert changed
    assert np.array_equal(filled, whole)
    assert remove_small_regions(mask, 2, "holes")[1] is False
    removed, changed = remove_small_regions(mask, 3, "islands")
    whole[15, 15] = False
    assert changed
    assert np.array_equal(removed, mask & whole)
    largest, _ = remove_small_regions(mask, 1000, "islands")
    assert largest.sum() == 98
    assert remove_small_regions(np.zeros((4, 4), bool), 3, "islands")[1] is False


def test_masks_that_needed_no_tidying_go_first(discs, image):
    found = SamAutomaticMaskGenerator(
        discs, points_per_side=2, **NOTHING_FILTERED
    ).generate_proposals(image)[np.array([0, 4, 8])]
    dense = found.masks.to_dense().copy()
    dense[0, 119, 0] = True  # an island
    spoilt = automatic_mask_generator.MaskProposals(
        **{
            **vars(found),
            "masks": RLEMasks.from_dense(dense),
            "boxes": automatic_mask_generator._boxes(RLEMasks.from_dense(dense)),
        }
    )
    tidy = postprocess_small_regions(spoilt, 3, 1.0)
    assert tidy.predicted_iou.tolist() == found.predicted_iou[[1, 2, 0]].tolist()
    assert np.array_equal(tidy.masks.to_dense(), found.masks.to_dense()[[1, 2, 0]])
    assert np.array_equal(tidy.boxes, found.boxes[[1, 2, 0]])
    doubled = automatic_mask_generator.MaskProposals.concatenate([spoilt, found])
    assert (
        len(postprocess_small_regions(doubled, 3, 0.99)) == 3
    )  # what is whole already wins over what became so


def test_the_cache_is_used(discs, image, tmp_path):
    SamAutomaticMaskGenerator(
        discs, points_per_side=1, cache=EmbeddingCache(tmp_path), **NOTHING_FILTERED
    ).generate(image)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"points_per_side": 0}, r"points_per_side.*1.*0"),
        ({"crop_n_layers": -1}, r"crop_n_layers.*0.*-1"),
        ({"crop_overlap_ratio": 1.0}, r"crop_overlap_ratio.*1\.0"),
        (
            {"points_per_side": 3, "crop_n_layers": 2, "crop_n_points_downscale_factor": 2},
            r"crop_n_points_downscale_factor 2.*layer 2.*points_per_side 3",
        ),
        ({"points_per_side": None}, r"points_per_side.*point_grids"),
        (
            {"points_per_side": None, "point_grids": np.full((1, 1, 2), 60.0)},
            r"point_grids.*\[0, 1\]",
        ),
        ({"points_per_side": None, "point_grids": [np.zeros((0, 2))]}, r"point_grids.*\[0, 1\]"),
        ({"points_per_side": None, "point_grids": [np.zeros((6, 3))]}, r"point_grids.*\(n, 2\)"),
        ({"point_grids": [np.zeros((1, 2))]}, r"points_per_side.*point_grids"),
        (
            {"points_per_side": None, "point_grids": [np.zeros((1, 2))], "crop_n_layers": 1},
            r"point_grids.*1 layers.*1",
        ),
    ],
)
def test_invalid_settings_are_a_one_line_error(discs, settings, message):
    with error_line(message):
        SamAutomaticMaskGenerator(discs, **settings)


def test_an_output_mode_that_is_set_later_is_checked(discs):
    generator = SamAutomaticMaskGenerator(discs, points_per_side=1)
    generator.output_mode = "rle"
    with error_line("output_mode must be one of"):
        generator.generate(np.zeros((20, 20, 3), np.uint8))


def test_a_path_is_no_model(no_shape_checks):
    for kind in (SamPredictor, SamAutomaticMaskGenerator):
        with error_line(r"^a model is needed.*load_model\('sam\.pth'\)$"):
            kind("sam.pth")


def test_a_threshold_that_cannot_be_meant_is_a_warning(discs, image):
    """As SAM's class takes it; in flags it is an error."""
    with pytest.warns(UserWarning, match=r"pred_iou_thresh .*\(got 1\.5\)"):
        assert SamAutomaticMaskGenerator(discs, 2, pred_iou_thresh=1.5).generate(image) == []
    with error_line(r"pred_iou_thresh .*\(got 1\.5\)"):
        AutomaticMaskConfig(pred_iou_thresh=1.5)


def test_arguments_are_attributes_that_can_be_set(discs, image):
    generator = SamAutomaticMaskGenerator(discs, 2, crop_n_layers=1)
    assert [len(grid) for grid in generator.point_grids] == [4, 4]
    assert (generator.pred_iou_thresh, generator.stability_score_thresh) == (0.88, 0.95)
    generator.crop_n_layers, generator.pred_iou_thresh, generator.stability_score_thresh = (
        0,
        0.0,
        0.0,
    )
    generator.box_nms_thresh, generator.point_grids = 1.0, [torch.tensor([[0.5, 0.5]])]
    assert len(generator.generate(image)) == 3
    generator.point_grids = [[]]
    assert generator.generate(image) == []
    generator.point_grids, generator.pred_iou_thresh = [np.array([[0.5, 0.5]])], 1.0
    assert generator.generate(image) == []


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 3)])
def test_tiny_images_have_the_crops_that_fit(discs, image, size):
    generator = SamAutomaticMaskGenerator(discs, 2, crop_n_layers=2, **NOTHING_FILTERED)
    records = generator.generate(image[: size[0], : size[1]])
    assert all(record["segmentation"].shape == size for record in records)


def test_arguments_are_those_of_metas_class():
    """Names, order and defaults of `SamAutomaticMaskGenerator` in Segment Anything's repository."""
    signature = inspect.signature(SamAutomaticMaskGenerator)
    positional = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    assert positional.pop("model") is inspect.Parameter.empty
    assert " ".join(f"{name}={default}" for name, default in positional.items()) == (
        "points_per_side=32 points_per_batch=64 pred_iou_thresh=None stability_score_thresh=None "
        "stability_score_offset=1.0 box_nms_thresh=0.7 crop_n_layers=0 crop_nms_thresh=0.7 "
        f"crop_overlap_ratio={512 / 1500} crop_n_points_downscale_factor=1 point_grids=None "
        "min_mask_region_area=0 output_mode=binary_mask"
    )
    flags = {field.name: field.default for field in fields(AutomaticMaskConfig)}
    assert flags.items() <= (positional | {"tile": None, "halo": None}).items()


def test_an_unknown_form_is_one_line(discs, monkeypatch):
    monkeypatch.setattr(automatic_mask_generator, "OUTPUT_MODES", ("coco_rle",))
    with error_line(r"output_mode.*coco_rle.*'binary_mask'"):
        SamAutomaticMaskGenerator(discs)

"""Number of clicks: by hand, and click by click against the protocol written out plainly."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage

from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import embedded_images, noc
from gigamask.evaluation.clicks import evaluate_protocols
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.boundary import farthest_point
from gigamask.masks.rle import RLEMasks
from gigamask.records import AnnotatedImage, ImageAnnotation
from gigamask.synthetic.scenes import compose_scene
from gigamask.training.checkpoint import load_model

ALL = MaskFilters(max_area=None)


class Scenes:
    """Two scenes; the pixels around the first mask of each are ignored, as in GrabCut."""

    def __init__(self) -> None:
        self.images = []
        for number in range(2):
            scene = compose_scene(7, number, (112, 128))
            masks = scene.masks[:3]
            dense = masks.to_dense()[0]
            ring = ndimage.binary_dilation(dense, iterations=2) & ~ndimage.binary_erosion(dense)
            ones = np.ones(len(masks), np.float32)
            ignore = RLEMasks.from_dense(ring[None])
            entry = ImageAnnotation(f"scene{number}", masks.size, masks, ones, ones, ignore=ignore)
            self.images.append(AnnotatedImage(scene.pixels, entry))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> AnnotatedImage:
        return self.images[row]


def curve_by_hand(predictor: SamPredictor, truth, ignored, answer: str) -> list[float]:
    """RITM's loop in plain NumPy: click, predict, measure, twenty times."""
    points: list[tuple[int, int]] = []
    labels: list[int] = []
    predicted, logits, ious = np.zeros_like(truth), None, []
    for click in range(20):
        misses, extras = truth & ~predicted & ~ignored, ~truth & predicted & ~ignored
        taken = np.array(points, np.int64).reshape(-1, 2)
        sides = [farthest_point(region, taken) for region in (misses, extras)]
        positive = sides[0][2] > sides[1][2]
        x, y, depth = sides[not positive]
        if not depth:  # nothing is left to correct: RITM has stopped by now
            return ious
        points.append((x, y))
        labels.append(int(positive))
        masks, scores, low = predictor.predict(
            np.array(points, np.float32),
            np.array(labels),
            mask_input=logits,
            multimask_output=click == 0 and answer != "first_token",
        )
        all_ious = [
            (mask & truth & ~ignored).sum() / ((mask | truth) & ~ignored).sum() for mask in masks
        ]
        best = int(np.argmax(all_ious if answer == "best_of_three" else scores))
        predicted, logits = masks[best], low[best : best + 1]
        ious.append(float(all_ious[best]))
    return ious


@pytest.mark.long
def test_equals_the_protocol_written_out_plainly_click_by_click(monkeypatch):
    # One mask at a time, as by hand, since a batch is rounded otherwise.
    monkeypatch.setattr(embedded_images, "GROUP_BYTES", 1)
    model, scenes = load_model("starter", "cpu").eval(), Scenes()
    protocols = list(noc.ANSWERS.values())
    results = evaluate_protocols(model, scenes, ALL, protocols, rows=[0], max_masks=1)
    predictor, reached = SamPredictor(model), 0
    for answer, result in zip(noc.ANSWERS, results, strict=True):
        curves = noc.iou_curves(result)
        assert len(curves) == 1
        for score, curve in zip(result.scores, curves, strict=True):
            pixels, entry = scenes[score.row]
            assert score.name == entry.name
            predictor.set_image(pixels)
            truth = entry.masks.to_dense()[score.mask_index]
            by_hand = curve_by_hand(predictor, truth, entry.ignore.to_dense()[0], answer)
            np.testing.assert_allclose(curve[: len(by_hand)], by_hand, atol=1e-6)
            reached += len(by_hand)
    assert reached > 30
    best, confident = results[2], results[0]
    assert noc.iou_curves(best)[:, 0].mean() >= noc.iou_curves(confident)[:, 0].mean()


def test_counts_clicks_and_failures():
    curves = np.array([[0.5, 0.85, 0.7], [0.9, 0.2, 0.2], [0.1, 0.2, 0.3], [0.1, 0.2, 0.86]])
    clicks, reached = noc.number_of_clicks(curves, 0.85)
    assert clicks.tolist() == [2, 1, 3, 3]
    assert reached.tolist() == [True, True, False, True]


@pytest.mark.slow
def test_ignored_pixels_change_scores_only_by_what_they_hide():
    """Around a mask's outline, where predictions differ, they raise its score."""
    scenes = Scenes()
    scenes.images = scenes.images[:1]
    model = load_model("starter", "cpu").eval()
    [scored] = evaluate_protocols(model, scenes, ALL, [replace(noc.EVERY_CLICK, clicks=(1,))])
    pixels, entry = scenes[0]
    scenes.images[0] = AnnotatedImage(pixels, replace(entry, ignore=None))
    [plain] = evaluate_protocols(model, scenes, ALL, [replace(noc.EVERY_CLICK, clicks=(1,))])
    assert scored.scores[0].clicks[1] > plain.scores[0].clicks[1] > 0


@pytest.mark.slow
def test_summary_lists_failures_and_curves():
    [result] = evaluate_protocols(
        load_model("starter", "cpu").eval(), Scenes(), ALL, [noc.ANSWERS["confident"]], rows=[1]
    )
    summary = noc.noc_summary(result)
    assert summary["images"] == 1
    assert summary["masks"] == 3
    assert set(summary["mIoU"]) == {str(k) for k in range(1, 21)}
    assert summary["NoC@85"] <= summary["NoC@90"] <= summary["NoC@95"]
    for percent, failed in summary["failed"].items():
        expected = [n for n, c in summary["curves"].items() if max(c) < int(percent) / 100]
        assert failed == expected
        assert summary["failures"][percent] == len(failed)
    assert len(noc.worst_lines(summary, 1)) == min(1, summary["failures"]["90"])
    assert summary["seconds_per_prompt"] > 0
    again = replace(result, scores=[*result.scores, replace(result.scores[0], row=9)])
    assert len(noc.noc_summary(again)["curves"]) == 4


@pytest.mark.slow
def test_some_masks_are_drawn_always_the_same():
    model, protocols = load_model("starter", "cpu").eval(), [replace(noc.EVERY_CLICK, clicks=(1,))]
    drawn = [
        [(s.row, s.mask_index) for s in result.scores]
        for _ in range(2)
        for result in evaluate_protocols(model, Scenes(), ALL, protocols, max_masks=2)
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4

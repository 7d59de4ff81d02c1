"""Scores of models whose answers are known."""

import numpy as np
import pytest
import torch
from torch import nn

from gigamask.data.dataset import Sa1bDataset
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import boundary, clicks, embedded_images, figures
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, MaskScore, evaluate_clicks, table
from gigamask.models.configs import SamConfig
from gigamask.models.sam.sam import Sam
from tests.errors import error_line
from tests.unit.evaluation.test_in_training import spoil


class Answering(Sam):
    """A model whose answer to the first point or box is handed in; it looks at nothing."""

    def __init__(self, answers: torch.Tensor, iou: list[float]) -> None:
        nn.Module.__init__(self)
        self.config = SamConfig(image_size=64, patch_size=8)
        self.pixel_mean = torch.zeros(3, 1, 1)
        self.encoded: list[int] = []
        self.answers, self.iou, self.asked = answers, torch.tensor(iou), []

    def encode(self, images, input_sizes, drop_path=None):
        self.encoded.append(len(images))
        return torch.zeros(len(images), 1, 1, 1)

    def decode(self, embedding, mask_image, prompts):
        self.asked.append(prompts)
        count = len(mask_image)
        answers = self.answers if prompts.multimask_output else self.answers[:1]
        return answers.expand(count, -1, -1, -1), self.iou[: len(answers)].expand(count, -1)


def constant(logit: float) -> Answering:
    return Answering(torch.full((3, 32, 32), logit), [0.1, 0.3, 0.2])


EVERYTHING = MaskFilters(max_area=None)


@pytest.mark.slow
def test_all_foreground_prediction_scores_each_masks_area_fraction(index):
    model = constant(5.0)
    result = evaluate_clicks(model, index, EVERYTHING, rows=[0, 1])
    assert result.images == 2
    for score in result.scores:
        rows = index.mask_rows(score.row)
        share = index.masks["area"][rows][score.mask_index] / (
            int(index.images["height"][score.row]) * int(index.images["width"][score.row])
        )
        assert set(score.clicks) == {1, 2, 3, 5, 9}
        assert [*score.clicks.values(), score.oracle, score.box] == pytest.approx(
            [share] * 7, abs=1e-6
        )
        assert score.area_fraction == pytest.approx(share)


def test_mask_is_chosen_by_predicted_iou_and_oracle_by_ground_truth(index):
    answers = torch.stack(
        [torch.full((32, 32), 5.0), torch.full((32, 32), -5.0), torch.full((32, 32), -5.0)]
    )
    result = evaluate_clicks(
        Answering(answers, [0.1, 0.3, 0.2]), index, EVERYTHING, ClickProtocol(clicks=(1,)), rows=[0]
    )
    assert all(
        score.clicks[1] == 0 and score.box == 0 and score.oracle > 0 for score in result.scores
    )


@pytest.mark.slow
def test_rounds_are_prompted_as_the_protocol_says(index):
    model = constant(-5.0)
    evaluate_clicks(
        model, index, EVERYTHING, ClickProtocol(clicks=(1, 3), feed_mask=False), rows=[0]
    )
    assert [(p.multimask_output, p.masks is None, p.labels.shape[1]) for p in model.asked] == [
        (True, True, 2),
        (False, True, 3),
        (False, True, 4),
        (True, True, 2),
    ]
    model.asked.clear()
    evaluate_clicks(model, index, EVERYTHING, ClickProtocol(clicks=(1, 3)), rows=[0])
    assert [p.masks is None for p in model.asked] == [True, False, False, True]
    assert model.asked[-1].labels[0].tolist() == [2, 3]


@pytest.mark.slow
def test_random_clicks_are_the_same_in_any_group_and_follow_the_protocol(index, monkeypatch):
    """EfficientSAM's: three masks for all positive points; EfficientViT-SAM's: no mask fed back."""
    model = constant(-5.0)
    points = []
    for group_bytes in (embedded_images.GROUP_BYTES, 1):
        monkeypatch.setattr(embedded_images, "GROUP_BYTES", group_bytes)
        model.asked.clear()
        evaluate_clicks(model, index, EVERYTHING, clicks.EFFICIENT_SAM, rows=[0])
        asked = [each for each in model.asked if each.labels.shape[1] == 4]
        assert {tuple(each.labels[0].tolist()) for each in asked} == {(1, 1, 1, -1)}
        assert all(each.multimask_output and each.masks is None for each in asked)
        points.append(torch.cat([each.points_xy_input for each in asked]))
    assert torch.equal(*points)
    model.asked.clear()
    evaluate_clicks(model, index, EVERYTHING, clicks.EFFICIENTVIT_SAM, rows=[0])
    assert all(each.multimask_output and each.masks is None for each in model.asked)


def test_boxes_are_refined_and_loosened_alike_in_any_group(index, monkeypatch):
    """The exact box is scored beside the loose one, whose noise is that of the mask."""
    model = Answering(
        torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)), [0.1, 0.3, 0.2]
    )
    protocol = ClickProtocol(clicks=(1,), refine=True, box_noise=0.1)
    boxes, results = [], []
    for group_bytes in (embedded_images.GROUP_BYTES, 1):
        monkeypatch.setattr(embedded_images, "GROUP_BYTES", group_bytes)
        model.asked.clear()
        results.append(evaluate_clicks(model, index, EVERYTHING, protocol, rows=[2]))
        asked = [each for each in model.asked if each.labels[0, 0] == 2]
        assert [each.multimask_output for each in asked[:4]] == [True, False] * 2
        assert all(torch.equal(each.masks[0], model.answers[1]) for each in asked[1::2])
        boxes.append([torch.cat([each.points_xy_input for each in asked[i::4]]) for i in range(4)])
    assert results[0].scores == results[1].scores
    (exact, again, loose, last), others = boxes
    assert all(map(torch.equal, boxes[0], others))
    assert torch.equal(exact, again)
    assert torch.equal(loose, last)
    size = (exact[:, 1] - exact[:, 0] + 1).repeat(1, 2)
    assert 0.05 < ((loose - exact).flatten(1) / size).std() < 0.15
    summary = results[0].summary()
    plain = evaluate_clicks(model, index, EVERYTHING, ClickProtocol(clicks=(1,)), rows=[2])
    assert "loose_box" not in plain.summary()
    assert summary["box"] == plain.summary()["box"]  # the first mask promises more
    assert "loose box" not in table(plain.summary())
    assert summary["loose_box"] == np.mean([score.loose_box for score in results[0].scores])
    assert all("loose_box" in means for means in summary["size"].values())
    assert "  box loose box" in table(summary)


def test_a_first_click_is_refined_as_an_answer_alone(index):
    """It is the mean of both answers; the next click goes on from the first."""
    model = Answering(torch.tensor([5.0, -3, -4])[:, None, None].expand(3, 32, 32), [0.1, 0.3, 0.2])
    protocol = ClickProtocol((1, 2), refine=True)
    [score, *_] = evaluate_clicks(model, index, EVERYTHING, protocol, rows=[2]).scores
    expected = pytest.approx((score.area_fraction, 0.3), abs=1e-6)
    assert (score.clicks[1], score.predicted[1]) == expected
    fed = torch.cat([each.masks for each in model.asked if each.labels.shape[1] == 3])
    assert (fed == -3).all()


@pytest.mark.slow
def test_filters_and_summary(index):
    model = constant(5.0)
    threshold = float(np.median(index.masks["predicted_iou"]))
    result = evaluate_clicks(model, index, MaskFilters(max_area=None, min_predicted_iou=threshold))
    assert len(result.scores) == int((index.masks["predicted_iou"] >= threshold).sum())
    summary = result.summary()
    assert summary["clicks"]["1"] == pytest.approx(
        np.mean([score.clicks[1] for score in result.scores])
    )
    assert f"{len(result.scores)} masks" in table(summary)
    with error_line("no mask"):
        evaluate_clicks(model, index, MaskFilters(min_predicted_iou=1.0)).summary()


def scored(area_fraction: float, iou: float, area_px: int = 100) -> MaskScore:
    return MaskScore(0, 0, area_fraction, {1: iou, 3: iou / 2}, iou, iou, area_px)


def test_masks_are_grouped_by_area_fraction():
    """One per cent and ten per cent are medium."""
    scores = [
        scored(0.0099, 0.2),
        scored(0.01, 0.4),
        scored(0.1, 0.6),
        scored(0.101, 0.8),
        scored(1.0, 1.0),
    ]
    assert [score.granularity for score in scores] == [
        "fine",
        "medium",
        "medium",
        "coarse",
        "coarse",
    ]
    lines = table(ClickResult(ClickProtocol(clicks=(1, 3)), 1, scores).summary()).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["all", "0.600", "0.300", "0.600", "0.600", "5"],
        ["±", "0.141", "0.071", "0.141", "0.141"],
        ["fine", "0.200", "0.100", "0.200", "0.200", "1"],
        ["medium", "0.500", "0.250", "0.500", "0.500", "2"],
        ["±", "0.100", "0.050", "0.100", "0.100"],
        ["coarse", "0.900", "0.450", "0.900", "0.900", "2"],
        ["±", "0.100", "0.050", "0.100", "0.100"],
        ["to", "32", "px", "0.600", "0.300", "0.600", "0.600", "5"],
        ["±", "0.141", "0.071", "0.141", "0.141"],
        "±: standard error of the mean, of fewer than 100 masks".split(),
    ]
    assert {len(line) for line in lines[1:-1]} == {59, 49}


def test_the_mean_of_a_hundred_masks_has_no_standard_error():
    for count, is_few in ((1, False), (2, True), (99, True), (100, False)):
        summary = ClickResult(ClickProtocol(clicks=(1,)), 1, [scored(0.5, 0.5)] * count).summary()
        assert ("standard_error" in summary) == is_few
        assert ("±" in table(summary)) == is_few


def test_masks_are_grouped_by_area_in_pixels():
    """32 x 32 are small and 96 x 96 medium, as COCO's evaluation has it."""
    scores = [
        scored(0.5, iou, area)
        for iou, area in ((0.2, 32**2), (0.4, 32**2 + 1), (0.6, 96**2), (0.8, 96**2 + 1))
    ]
    found = ClickResult(ClickProtocol(clicks=(1, 3)), 1, scores).summary()["size"]
    assert {name: (each["masks"], each["box"]) for name, each in found.items()} == {
        "small": (1, pytest.approx(0.2)),
        "medium": (2, pytest.approx(0.5)),
        "large": (1, pytest.approx(0.8)),
    }


@pytest.mark.slow
def test_predicted_iou_is_compared_with_actual_iou(index):
    model = constant(5.0)
    result = evaluate_clicks(model, index, EVERYTHING, rows=[0])
    told = result.summary()["calibration"]
    assert told["masks"] == len(result.scores)
    assert told["bins"][3]["predicted"] == pytest.approx(0.3)
    assert told["bins"][3]["actual"] == pytest.approx(
        np.mean([score.clicks[1] for score in result.scores])
    )
    assert "predicted IoU after one click:" in table(result.summary())


@pytest.mark.slow
def test_boundaries_are_scored_if_requested(index):
    model = constant(5.0)
    plain, asked = (
        evaluate_clicks(
            model, index, EVERYTHING, ClickProtocol(clicks=(1, 3), boundaries=on), rows=[0]
        )
        for on in (False, True)
    )
    assert [score.clicks for score in plain.scores] == [score.clicks for score in asked.scores]
    assert "boundary_f" not in plain.summary()
    whole = np.ones((1, int(index.images["height"][0]), int(index.images["width"][0])), bool)
    truth = Sa1bDataset(index)[0].annotation.masks.to_dense()
    for score in asked.scores:
        assert score.boundary_iou == {
            n: boundary.boundary_iou(whole, truth[[score.mask_index]])[0] for n in (1, 3)
        }
        assert score.boundary_f == {
            n: boundary.boundary_f(whole, truth[[score.mask_index]])[0] for n in (1, 3)
        }
    summary = asked.summary()
    assert summary["boundary_iou"]["3"] == pytest.approx(
        np.mean([score.boundary_iou[3] for score in asked.scores])
    )
    assert summary["protocol"]["boundary"]["tolerance"] == 0.008
    assert "Boundary IoU:" in table(summary)


def test_a_granularity_without_masks_has_no_means_and_no_row():
    summary = ClickResult(ClickProtocol(clicks=(1, 3)), 1, [scored(0.5, 0.8)]).summary()
    assert summary["granularity"]["fine"] == {
        "masks": 0,
        "clicks": {"1": None, "3": None},
        "oracle": None,
        "box": None,
    }
    assert [line.split()[0] for line in table(summary).splitlines()[2:]] == ["all", "coarse", "to"]


@pytest.mark.long
def test_an_unreadable_image_is_left_out_and_named(index, monkeypatch):
    """The jpg's bytes are there, but are no jpg."""
    model = constant(5.0)
    sound = evaluate_clicks(model, index, EVERYTHING, rows=[0, 2, 3]).scores
    spoil(monkeypatch, {1})
    for batch_size in (1, 3, 8):
        model.encoded.clear()
        result = evaluate_clicks(model, index, EVERYTHING, rows=[0, 1, 2, 3], batch_size=batch_size)
        assert result.images == sum(model.encoded) == 3
        assert result.scores == sound
        assert len(result.skipped) == 1
        assert "sa_1" in result.skipped[0]


@pytest.mark.slow
def test_figures_have_a_row_per_mask(index, tmp_path, monkeypatch):
    labels, draw_panel = [], figures.draw_panel
    monkeypatch.setattr(
        figures, "draw_panel", lambda *words: labels.append(words[2].label) or draw_panel(*words)
    )
    model = constant(5.0)
    result = evaluate_clicks(model, index, EVERYTHING, rows=[0, 1])
    paths = figures.write_figures(model, index, result, tmp_path / "figures", count=3)
    assert [path.name for path in paths] == ["best.png", "worst.png", "typical.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    worst = min(result.scores, key=lambda score: score.clicks[1])
    shown = f"sa_{worst.row}, mask {worst.mask_index}, "
    assert any(label.startswith(shown) and label.endswith("% of the image") for label in labels)

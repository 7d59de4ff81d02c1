"""What is looked at during training, with models that look and models that do not."""

import os
import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.mask_sampling import MaskFilters
from gigamask.distributed.world import World, init_world
from gigamask.errors import EvaluationStoppedError
from gigamask.evaluation import figures, in_training
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.evaluation.clicks import ClickProtocol, evaluate_clicks
from gigamask.evaluation.embedded_images import scored_masks
from gigamask.evaluation.in_training import ClickScorer, score_warnings
from gigamask.models.configs import SamConfig
from gigamask.models.embedding_cache import ImageEmbedder
from gigamask.models.sam.sam import Sam
from gigamask.synthetic import scenes as synthetic
from tests.errors import error_line
from tests.little import little
from tests.ranks import fork

GRID = 32


class Stub(Sam):
    """What the models here have in common: an input of 128 pixels, masks of 32."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.config = SamConfig(image_size=4 * GRID)
        self.pixel_mean = torch.zeros(3, 1, 1)


class Likeness(Stub):
    """Predicts the pixels with the color at the click, or at the middle of the box."""

    def encode(self, images, input_sizes, drop_path=None):
        return functional.avg_pool2d(images.float(), 4)

    def decode(self, embedding, mask_image, prompts):
        labels = prompts.labels
        points = prompts.points_xy_input
        place = torch.where(labels[:, :1] == 2, points[:, :2].mean(1), points[:, 0])
        x, y = (place / 4).long().clamp(0, GRID - 1).T
        colour = embedding[0][:, y, x].T[:, :, None, None]
        answer = 20 - (embedding - colour).abs().sum(1, keepdim=True)
        count = 3 if prompts.multimask_output else 1
        return answer.expand(-1, count, -1, -1), torch.full((len(labels), count), 0.9)


class Constant(Stub):
    """Gives the same answer to everything; looks at nothing."""

    def __init__(self, answers: torch.Tensor, iou: list[float]) -> None:
        super().__init__()
        self.answers, self.iou = answers, torch.tensor(iou)

    def encode(self, images, input_sizes, drop_path=None):
        return images[:, :1, :1, :1].float()

    def decode(self, embedding, mask_image, prompts):
        answers = self.answers if prompts.multimask_output else self.answers[:1]
        return answers.expand(len(mask_image), -1, -1, -1), self.iou[: len(answers)].expand(
            len(mask_image), -1
        )


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Twelve scenes, smaller than the ones for all tests: each is looked at in full."""
    folder = tmp_path_factory.mktemp("small")
    synthetic.write(str(folder), 12, seed=7, long_side=(96, 128))
    return folder


def evaluator(index, rows, best_by="1 click") -> ClickScorer:
    return ClickScorer(index, tuple(rows), MaskFilters(max_area=None), best_by)


def opened(run) -> ClickScorer | None:
    evaluate = run.evaluation.open(run, World())
    return evaluate and evaluate.__self__


def settled(data, out, **asked):
    return replace(little(), out=str(out), evaluation=ClickEvaluation(data=(str(data),), **asked))


def answers(value: float) -> torch.Tensor:
    return torch.full((3, GRID, GRID), value)


@pytest.mark.slow
def test_a_model_that_looks_scores_less_on_another_picture(index):
    verdict = evaluator(index, range(4)).run(Likeness())
    assert verdict.scores["wrong image"] < 0.8 * verdict.scores["1 click"]
    assert not any("wrong image" in worry for worry in verdict.warnings)


@pytest.mark.slow
def test_model_that_ignores_the_image_is_reported(index):
    verdict = evaluator(index, range(4)).run(Constant(answers(5.0), [0.5, 0.6, 0.7]))
    assert verdict.scores["wrong image"] == pytest.approx(verdict.scores["1 click"])
    assert any(
        worry.startswith("one click scores as well on a wrong image") for worry in verdict.warnings
    )


@pytest.mark.slow
def test_each_picture_is_held_against_the_one_before_and_the_first_against_the_last(
    index, monkeypatch
):
    asked = []
    score = in_training.score_group
    monkeypatch.setattr(
        in_training,
        "score_group",
        lambda model, scene, row, *rest: (
            asked.append((row, scene.embedding)) or score(model, scene, row, *rest)
        ),
    )
    evaluator(index, [1, 4, 7]).run(Likeness())
    assert [row for row, _ in asked] == [1, 1, 4, 4, 7, 7]
    shown = {id(asked[place][1]): asked[place][0] for place in (0, 2, 4)}
    last = asked[1][1]
    assert torch.equal(last, asked[4][1]), "the last one is looked at twice"
    assert [shown[id(embedding)] for _, embedding in (asked[0], *asked[2:])] == [1, 4, 1, 7, 4]


@dataclass(frozen=True)
class Told(World):
    """A process that is given what all of them have."""

    parts: list = field(default_factory=list)

    def gather(self, value):
        if value is False:  # no signal
            return [value] * self.size
        assert value == self.parts[self.rank]
        return self.parts


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_several_processes_find_what_one_finds(index, size):
    """Four images by two, three, or more processes than there are images."""
    whole = evaluator(index, range(4)).run(Likeness())
    ours = [replace(evaluator(index, range(4)), world=Told(rank, size)) for rank in range(size)]
    parts = [each._evaluate_part(Likeness()) for each in ours]
    for rank, each in enumerate(ours):
        verdict = replace(each, world=Told(rank, size, parts=parts)).run(Likeness())
        assert verdict.scores == pytest.approx(whole.scores, abs=1e-9)
        assert (verdict.subject, verdict.warnings) == (whole.subject, whole.warnings)


@pytest.mark.slow
def test_scores_are_those_of_evaluate(index):
    """Those of `evaluate` at 1, 3 and 5 clicks: later rounds do not change earlier ones."""
    model, rows = Likeness(), [0, 2, 5, 9]
    scores = evaluator(index, rows).run(model).scores
    summary = evaluate_clicks(
        model, index, MaskFilters(max_area=None), ClickProtocol(), rows
    ).summary()
    told = {f"{n} click{'s' if n > 1 else ''}": summary["clicks"][str(n)] for n in (1, 3, 5)}
    assert {name: scores[name] for name in (*told, "oracle", "box")} == told | {
        "oracle": summary["oracle"],
        "box": summary["box"],
    }


@pytest.mark.slow
def test_each_image_is_encoded_once_but_the_last_and_two_are_held_at_most(index, monkeypatch):
    embed, held, alive = ImageEmbedder.embed, [], []

    def counted(self, resized):
        alive.append(sum(each() is not None for each in held))
        found = embed(self, resized)
        held.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(ImageEmbedder, "embed", counted)
    evaluator(index, range(8)).run(Likeness())
    assert len(held) == len(alive) == 9
    assert max(alive) == 1, "the one before, when the next is made"


def stop_after(index, polls: int) -> None:
    """Evaluate 2 and 3 images in two processes; the second gets a signal."""
    world, asked = init_world(os.environ, torch.device("cpu"), 60.0), []

    def requested() -> bool:
        asked.append(None)
        return not world.is_main and len(asked) >= polls

    stopped = replace(world, stop_requested=requested)
    with pytest.raises(EvaluationStoppedError):
        replace(evaluator(index, range(5)), world=stopped).run(Likeness())
    assert len(asked) == polls


@pytest.mark.slow
@pytest.mark.parametrize("polls", [1, 3])
def test_a_signal_to_one_process_stops_all_after_the_same_image(index, polls):
    fork(2, stop_after, index, polls)


@pytest.mark.slow
def test_of_a_single_image_nothing_is_said_about_blindness(index):
    verdict = evaluator(index, [3]).run(Constant(answers(5.0), [0.5, 0.6, 0.7]))
    names = ["1 click", "3 clicks", "5 clicks", "oracle", "box", "points with a mask"]
    assert list(verdict.scores) == names
    assert not any("wrong image" in worry for worry in verdict.warnings)


@pytest.mark.slow
def test_what_the_scores_are_of_and_how_far_they_may_be_off(index):
    verdict = evaluator(index, [0, 1]).run(Likeness())
    masks = sum(len(scored_masks(index, row, MaskFilters(max_area=None))) for row in (0, 1))
    assert verdict.of == f"{masks} masks on 2 images"
    assert list(verdict.errors) == ["1 click", "3 clicks", "5 clicks", "oracle", "box"]
    assert all(0 < error < 0.5 for error in verdict.errors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "logit, iou, share",
    [
        (5.0, [0.1, 0.9, 0.2], 1.0),
        (5.0, [0.88, 0.7, 0.5], 0.0),
        (0.5, [0.9] * 3, 0.0),
        (-5.0, [0.9] * 3, 0.0),
    ],
)
def test_automatic_masks_pass_by_predicted_iou_and_stability(index, logit, iou, share):
    """Logits of 0.5 lie between the two cuts, -1 and 1. Empty masks are not stable."""
    verdict = evaluator(index, [0, 1]).run(Constant(answers(logit), iou))
    assert verdict.scores["points with a mask"] == share
    assert any("default thresholds" in worry for worry in verdict.warnings) == (share == 0)


@pytest.mark.parametrize(
    "change, told",
    [
        ({}, []),
        ({"5 clicks": 0.6}, ["more clicks do not help: 5 score no better than 3"]),
        ({"5 clicks": 0.5}, ["more clicks do not help: 5 score no better than 3"]),
        ({"wrong image": 0.476}, ["one click scores as well on a wrong image"]),
        ({"wrong image": 0.474}, []),
        ({"points with a mask": 0.0}, ["no automatic mask passes"]),
        (
            {"5 clicks": 0.0, "wrong image": 1.0, "points with a mask": 0.0},
            ["more clicks", "one click", "no automatic"],
        ),
    ],
)
def test_worries(change, told):
    scores = {
        "1 click": 0.5,
        "3 clicks": 0.6,
        "5 clicks": 0.7,
        "oracle": 0.8,
        "box": 0.8,
        "wrong image": 0.3,
        "points with a mask": 0.1,
    } | change
    found = list(score_warnings(scores))
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True))


def spoil(monkeypatch, rows) -> None:
    """Lets the jpgs of some rows be no jpgs."""
    read = Sa1bDataset.read

    def read_broken(self, row):
        return read(self, row)._replace(jpg=b"no jpg") if row in rows else read(self, row)

    monkeypatch.setattr(Sa1bDataset, "read", read_broken)


@pytest.mark.slow
def test_unreadable_images_are_skipped_and_reported(index, monkeypatch):
    sound = evaluator(index, [0, 2, 3]).run(Likeness())
    spoil(monkeypatch, {1, 4})
    verdict = evaluator(index, [0, 1, 2, 3, 4]).run(Likeness())
    assert verdict.scores == sound.scores
    assert (
        len([worry for worry in verdict.warnings if "2 of 5 images" in worry and "sa_1" in worry])
        == 1
    )


def test_when_no_image_can_be_read_it_is_said_before_training_and_in_it(
    index, monkeypatch, tmp_path
):
    spoil(monkeypatch, set(range(12)))
    with error_line(r"--evaluation.data.*2 images.*sa_\d+"):
        evaluator(index, [0, 1]).run(Likeness())
    with error_line(r"5 images"):
        opened(settled(index.folder, tmp_path, images=5))


def test_one_readable_image_is_enough_to_begin(index, monkeypatch, tmp_path):
    rows = opened(settled(index.folder, tmp_path, images=3)).rows
    spoil(monkeypatch, set(rows[:2]))
    assert opened(settled(index.folder, tmp_path, images=3)).rows == rows


def test_a_run_without_data_to_evaluate_on_has_no_evaluator(tmp_path):
    assert opened(replace(little(), out=str(tmp_path))) is None
    assert list(tmp_path.iterdir()) == []


def test_images_are_chosen_once_and_for_all(index, tmp_path):
    few, more, every = (
        opened(settled(index.folder, tmp_path, images=images)).rows for images in (3, 6, 50)
    )
    assert len(few) == 3
    assert list(few) == sorted(few)
    assert set(few) < set(more) < set(every)
    assert every == tuple(range(12))
    assert opened(replace(settled(index.folder, tmp_path, images=3), seed=9)).rows == few, (
        "runs with other seeds are compared on the same images"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_shape_checks")
def test_scores_are_of_a_subject_which_changes_with_what_is_evaluated(index, scenes, tmp_path):
    model, run = Likeness(), settled(index.folder, tmp_path, images=1)
    subjects = [
        opened(each).run(model).subject
        for each in (
            run,
            replace(run, evaluation=replace(run.evaluation, interval=7)),
            replace(run, evaluation=replace(run.evaluation, best_by="box")),
            replace(run, evaluation=replace(run.evaluation, images=2)),
            replace(run, evaluation=replace(run.evaluation, min_predicted_iou=0.5)),
            replace(run, evaluation=replace(run.evaluation, precision="bf16")),
        )
    ]
    assert subjects[0] == subjects[1], "how often it is made does not matter"
    assert len(set(subjects)) == 5
    assert subjects[-1] == f"{subjects[0]}, bf16"
    synthetic.write(str(tmp_path / "other"), 4, seed=3, long_side=(96, 128))
    assert index.digest in subjects[0]
    assert (
        opened(settled(tmp_path / "other", tmp_path, images=1)).run(model).subject not in subjects
    )


def test_tars_are_indexed_once_into_the_run_folder(scenes, tmp_path, monkeypatch):
    run = settled(scenes, tmp_path)
    opened(run)
    assert [path.name.split("-")[0] for path in (tmp_path / "evaluation").iterdir()] == ["index"]
    monkeypatch.setattr(indexes, "build", lambda *rest, **more: pytest.fail("built anew"))
    assert opened(run).rows == tuple(range(12))


def test_masks_are_wanted(index, scenes, tmp_path):
    with error_line(r"12 images.*--evaluation.min-predicted-iou"):
        opened(settled(index.folder, tmp_path, min_predicted_iou=1.0))
    (path,) = scenes.glob("*.tar")
    raw, members = path.read_bytes(), tar.scan(path)
    spans = zip(members.names, members.offsets, members.sizes, strict=True)
    tar.write(
        tmp_path / "bare.tar",
        [(name, raw[start : start + size]) for name, start, size in spans if name.endswith(".jpg")],
    )
    with error_line(r"12 images.*annotated"):
        opened(settled(tmp_path / "bare.tar", tmp_path))


@pytest.mark.long
@pytest.mark.usefixtures("no_shape_checks")
def test_the_same_few_masks_are_drawn_whatever_the_model_and_the_number_of_processes(
    index, monkeypatch
):
    drawn = []
    draw_row = in_training.figures.draw_row
    monkeypatch.setattr(
        in_training.figures,
        "draw_row",
        lambda model, scene, score, protocol: (
            drawn.append(score) or draw_row(model, scene, score, protocol)
        ),
    )
    whole = evaluator(index, range(8)).run(Likeness())
    chosen = [(score.row, score.mask_index) for score in drawn]
    assert [row for row, _ in chosen] == [0, 2, 4, 7]
    evaluator(index, range(8)).run(Constant(answers(-5.0), [0.1] * 3))
    assert [(score.row, score.mask_index) for score in drawn[4:]] == chosen
    parts = [
        replace(evaluator(index, range(8)), world=Told(rank, 3))._evaluate_part(Likeness())
        for rank in range(3)
    ]
    several = replace(evaluator(index, range(8)), world=Told(0, 3, parts=parts)).run(Likeness())
    assert (several.picture == whole.picture).all()
    assert whole.picture.shape[0] == figure_height(4)


def figure_height(rows):
    """Return the height of a figure in pixels: the legend, and rows of a panel and its label."""
    panel = figures.PANEL_SIZE[1] + figures.LABEL_PX + figures.GAP_PX
    return figures.LABEL_PX + rows * panel


@pytest.mark.slow
def test_of_few_images_each_is_drawn_once(index):
    assert evaluator(index, [3]).run(Likeness()).picture.shape[0] == figure_height(1)
    assert evaluator(index, [1, 5]).run(Likeness()).picture.shape[0] == figure_height(2)

"""Scores of answers against definitions on pixels, rules against what they stand for, and confidences against another's fit."""

import json
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from gigamask.contracts import Cursor
from gigamask.data import index as indexes
from gigamask.data import queries
from gigamask.data.queries import Query
from gigamask.faults import Fault
from gigamask.geometry.runs import Runs
from gigamask.grounding import progress, scores
from gigamask.grounding.items import open_queries
from gigamask.grounding.scores import MEASURES, Answer, Confidence, Prior, Scene, by_chance, calibrate, judge, measure, table
from tests.asked import run_in
from tests.rooms.grounding.test_items import pair


def masks_of(seed, count=6):
    """Overlapping discs and some noise, none of them empty."""
    generator, (y, x) = np.random.default_rng(seed), np.mgrid[:20, :30]
    centres, radii = generator.uniform((2, 2), (18, 28), (count, 2)), generator.uniform(2, 8, count)
    dense = np.hypot(y - centres[:, :1, None], x - centres[:, 1:, None]) < radii[:, None, None]
    return dense & (generator.random(dense.shape) < 0.9)


def deepest(mask):
    """The pixel farthest from all that is not in the mask, the image's border included; every one of equals."""
    outside = np.argwhere(~np.pad(mask, 1)) - 1
    inside = np.argwhere(mask)
    far = np.hypot(*(inside[:, None] - outside).transpose(2, 0, 1)).min(1)
    return {(int(y), int(x)) for y, x in inside[far > far.max() - 1e-6]}


@pytest.mark.parametrize("seed", range(6))
def test_measures_are_what_they_are_called(seed):
    generator, dense = np.random.default_rng(seed), masks_of(seed)
    scene, right = Scene.of(Runs.from_dense(dense)), sorted(generator.choice(6, generator.integers(1, 5), replace=False).tolist())
    told = generator.normal(size=7)
    found = measure(told, right, scene)
    order = sorted(range(6), key=lambda number: -told[number])
    union = [(dense[order[0]] | dense[number]).sum() for number in right]
    chosen = {number for number in range(6) if told[number] > told[-1]}
    assert found["top_1"] == (order[0] in right)
    assert found["top_3"] == any(number in right for number in order[:3])
    assert found["iou"] == pytest.approx(max((dense[order[0]] & dense[number]).sum() / each for number, each in zip(right, union, strict=True)))
    assert found["refused"] == (told[-1] >= max(told[:-1]))
    assert found["answered"] == (order[0] in right and told[order[0]] > told[-1])
    assert found["set_f1"] == pytest.approx(2 * len(chosen & set(right)) / (len(chosen) + len(right)))
    points = deepest(dense[order[0]])
    hits = {any(dense[number][point] for number in right) for point in points}
    assert found["pointing"] in hits
    assert "absent" not in found
    nothing = measure(told, [], scene)
    assert nothing == {"absent": found["refused"], "answered": found["refused"]}


def test_of_equal_scores_the_first_counts_and_none_comes_first():
    scene = Scene.of(Runs.from_dense(masks_of(0, 3)))
    assert measure(np.array([1.0, 1.0, 0.0, 0.0]), [1], scene)["top_1"] == 0
    assert measure(np.array([1.0, 1.0, 0.0, 1.0]), [0], scene) | {"iou": 1} == measure(np.array([1.0, 0.5, 0.0, 1.0]), [0], scene) | {"iou": 1}
    assert measure(np.array([1.0, 0.0, 0.0, 1.0]), [0], scene)["refused"] == 1


def test_an_image_without_masks_refuses():
    scene = Scene.of(Runs.from_dense(np.zeros((0, 4, 5), bool)))
    assert measure(np.array([0.3]), [], scene) == by_chance([], scene) == {"absent": 1.0, "answered": 1.0}


@pytest.mark.parametrize(("count", "right"), [(6, [1]), (6, [0, 2, 5]), (2, [1]), (6, [0, 1, 2, 3, 4]), (1, [0]), (5, [])])
def test_chance_is_the_mean_of_many_random_rankings(count, right):
    generator, scene = np.random.default_rng(0), Scene.of(Runs.from_dense(masks_of(3, count)))
    told = [measure(np.append(generator.random(count), -1.0), right, scene) for _ in range(1000)]
    expected = by_chance(right, scene)
    for name, value in expected.items():
        values = [each[name] for each in told]
        assert np.mean(values) == pytest.approx(value, abs=4 * np.std(values) / math.sqrt(1000) + 1e-9), name
    assert expected.keys() == told[0].keys() - {"set_f1"}


def likelihood(theta, x, y):
    z = theta[0] * x + theta[1]
    return np.logaddexp(0, z).sum() - (y * z).sum() + 0.005 * ((theta[0] - 1) ** 2 + theta[1] ** 2)


@pytest.mark.parametrize("seed", range(6))
def test_confidence_is_a_logistic_regression(seed):
    """Against a minimiser of scipy's, and with many samples against what made them."""
    generator = np.random.default_rng(seed)
    scale, shift, spread = generator.uniform(0.2, 3), generator.uniform(-4, 2), generator.choice([0.5, 2, 10])
    x = spread * generator.normal(size=4000)
    y = generator.random(4000) < 1 / (1 + np.exp(-(scale * x + shift)))
    found = Confidence.fit(x, y)
    best = minimize(likelihood, (1.0, 0.0), (x, y), method="BFGS", options={"gtol": 1e-8})
    assert (found.scale, found.shift) == pytest.approx(best.x, rel=1e-3, abs=1e-3)
    assert likelihood((found.scale, found.shift), x, y) <= best.fun + 1e-6
    assert found.scale == pytest.approx(scale, abs=0.4 * scale)
    assert found(x)[0] == pytest.approx(1 / (1 + math.exp(-(found.scale * x[0] + found.shift))))


@pytest.mark.parametrize("apart", [0.01, 1.0, 1000.0])
def test_confidence_of_answers_that_are_all_right_is_finite(apart):
    x = np.concatenate([np.linspace(-2, -1, 50), np.linspace(1, 2, 50)]) * apart
    y = x > 0
    found = Confidence.fit(x, y)
    assert math.isfinite(found.scale)
    assert math.isfinite(found.shift)
    assert ((found(x) > 0.5) == y).all()


def test_confidence_where_logits_tell_nothing_or_the_wrong_way():
    assert Confidence.fit(np.array([1.0, 2.0]), np.array([True, True])) == Confidence()
    assert Confidence.fit(np.array([1.0, 2.0]), np.array([False, False])) == Confidence()
    assert Confidence.fit(np.array([]), np.array([], bool)) == Confidence()
    generator = np.random.default_rng(0)
    x = generator.normal(size=500)
    y = generator.random(500) < 0.2 / (1 + np.exp(3 * x))
    found = Confidence.fit(x, y)
    assert found.scale == 0
    assert found(x) == pytest.approx(np.full(500, y.mean()))


def test_confidence_of_far_logits_does_not_overflow():
    assert Confidence()(np.array([-1e4, 0.0, 1e4])).tolist() == [0, 0.5, 1]


@pytest.fixture(scope="module")
def judged(described, tmp_path_factory):
    """An index of the scenes, and its queries."""
    index = indexes.open_or_build([str(described / "scenes")], str(tmp_path_factory.mktemp("index")))
    return index, open_queries(index, queries.read(described / "scenes" / "queries.jsonl"))


def answers_of(judged, sure, seed=0):
    """Answers to all queries: right masks and, where there are none, none itself score `sure` higher than noise."""
    (index, catalogue), generator, found = judged, np.random.default_rng(seed), []
    for number, query in enumerate(catalogue.queries):
        told = generator.normal(size=int(index.images["masks"][catalogue.rows[number]]) + 1)
        told[list(query.right) or [-1]] += sure
        found.append(Answer(number, told))
    return found


def test_a_summary_holds_means_by_kind_rules_and_the_protocol(judged):
    index, catalogue = judged
    found = judge(answers_of(judged, 50.0), catalogue, index, Prior.of(catalogue, index), ["sa_9 is cut"])
    told = json.loads(json.dumps(found.summary()))
    assert (told["queries"], told["images"], told["rejected"]) == (len(catalogue.queries), 6, ["sa_9 is cut"])
    assert [told[name] for name in ("top_1", "top_3", "absent", "answered", "refused")] == [1, 1, 1, 1, 0]
    assert set(told["rules"]) == {"chance", "largest", "prior"}
    assert set(told["kinds"]) == {query.kind for query in catalogue.queries}
    assert told["kinds"]["absent"]["top_1"] is None
    assert told["kinds"]["relation"]["absent"] is None
    assert sum(each["queries"] for each in told["kinds"].values()) == told["queries"]
    assert set(told["protocol"]) == {"candidates", "none", "confidence", "iou", "mean"}
    assert all(told["protocol"].values())
    assert set(told["calibration"]) == {"as it comes", "fitted"}
    assert told["rules"]["largest"]["absent"] == told["rules"]["chance"]["absent"] == told["rules"]["chance"]["refused"] == 0
    plain = [by_chance(query.right, scene) for query, scene in scenes_of(judged)]
    assert told["rules"]["chance"]["top_1"] == pytest.approx(np.mean([each["top_1"] for each in plain if "top_1" in each]))
    rows = table(told).splitlines()
    assert rows[0] == f"% of {told['queries']} queries about 6 images"
    assert [row.split()[0] for row in rows[2:-3]] == ["all", *sorted(told["kinds"]), "(chance)", "(largest)", "(prior)"]
    assert rows[1].split() == [*MEASURES, "queries"]
    assert " - " in rows[3]


def scenes_of(judged):
    index, catalogue = judged
    answers = [Answer(number, np.zeros(1)) for number in range(len(catalogue.queries))]
    return [(catalogue.queries[answer.number], scene) for answer, scene in scores._scenes(answers, catalogue, index)]


def test_the_largest_mask_is_taken_by_its_rule(judged):
    index, catalogue = judged
    found = judge(answers_of(judged, 0.0), catalogue, index)
    wanted = [float(int(scene.masks.areas().argmax()) in query.right) for query, scene in scenes_of(judged) if query.right]
    assert found.summary()["rules"]["largest"]["top_1"] == pytest.approx(np.mean(wanted))
    assert "prior" not in found.scores


def test_calibration_is_of_the_other_images_fit(judged):
    _, catalogue = judged
    told = [(int(catalogue.rows[answer.number]), answer) for answer in answers_of(judged, 1.0)]
    confidence, found = calibrate(told, catalogue)
    logits = [answer.logits for _, answer in told]
    right = [np.isin(np.arange(len(answer.logits)), catalogue.queries[answer.number].right) for _, answer in told]
    rows = np.array([row for row, _ in told])
    halves = [np.flatnonzero(rows % 2 == side) for side in (0, 1)]
    fits = [Confidence.fit(np.concatenate([logits[i] for i in half]), np.concatenate([right[i] for i in half])) for half in halves]
    assert fits[0] != fits[1]
    wanted = np.concatenate([fits[1 - row % 2](each) for row, each in zip(rows.tolist(), logits, strict=True)])
    everything = np.concatenate(right)
    bias = float((wanted - everything).mean())
    assert found["fitted"]["bias"] == pytest.approx(bias, abs=1e-9)
    assert found["fitted"]["expected_error"] < found["as it comes"]["expected_error"]
    assert confidence == Confidence.fit(np.concatenate(logits), everything)
    few = calibrate(told[: scores.FEWEST - 1], catalogue)
    assert (few[0], set(few[1])) == (Confidence(), {"as it comes"})
    alone = calibrate([each for each in told if each[0] == 0] * 3, catalogue)
    assert set(alone[1]) == {"as it comes"}, "one image has no other half"


def test_refusing_is_balanced_on_the_other_images(judged):
    _, catalogue = judged
    told = [(int(catalogue.rows[answer.number]), answer) for answer in answers_of(judged, 1.0)]
    best = np.array([answer.logits.max() for _, answer in told]) + 3  # as it comes nothing is refused
    told = [(row, Answer(answer.number, np.append(answer.scores[:-1] + 3, answer.scores[-1]))) for row, answer in told]
    absent = np.array([not catalogue.queries[answer.number].right for _, answer in told])
    rows = np.array([row for row, _ in told])
    assert 0 < absent.sum() < len(absent)

    def balance(least, those):
        return (best[those & absent] <= least).mean() + (best[those & ~absent] > least).mean()

    least, found = scores.refusals(told, catalogue)
    everyone = np.ones(len(told), bool)
    assert balance(least, everyone) == pytest.approx(max(balance(each, everyone) for each in best))
    wanted = {"absent": [], "refused": []}
    for side in (0, 1):
        others = [(row, answer) for row, answer in told if row % 2 != side]
        threshold = scores._balanced(np.array([answer.logits.max() for _, answer in others]), absent[rows % 2 != side])
        for name, kind in (("absent", absent), ("refused", ~absent)):
            wanted[name] += (best[(rows % 2 == side) & kind] <= threshold).tolist()
    assert found["fitted"] == {name: pytest.approx(np.mean(each)) for name, each in wanted.items()}
    assert found["as it comes"] == {"absent": (best[absent] <= 0).mean(), "refused": (best[~absent] <= 0).mean()}
    few, only = scores.refusals(told[: scores.FEWEST - 1], catalogue)
    assert (few, set(only)) == (0.0, {"as it comes"})


@pytest.fixture
def small(tmp_path):
    """Three images of 10 x 100 pixels, masks of which are told apart by size."""
    from gigamask.data import tar

    tar.write(tmp_path / "a.tar", [*pair(0, [10, 200, 600]), *pair(1, [12, 190, 900]), *pair(2, [])])
    return indexes.build([tmp_path], tmp_path / "index")


def test_the_prior_knows_where_and_how_large_and_how_often_absent(small):
    trained = [
        Query(None, "sa_0", "small", (0,)),
        Query(None, "sa_0", "large", (2,)),
        Query(None, "sa_0", "gone", ()),
        Query(None, "sa_1", "half", ()),
    ]
    trained += [Query(None, "sa_0", "half", (1,)), Query(None, "sa_1", "large", (2,))]
    prior = Prior.of(open_queries(small, trained), small)
    assert [int(prior.scores(text, small, 1)[:-1].argmax()) for text in ("small", "large", "half")] == [0, 2, 1]
    assert prior.scores("gone", small, 1)[-1] == np.inf
    assert prior.scores("small", small, 1)[-1] == prior.scores("half", small, 1)[-1] == prior.scores("new", small, 1)[-1] == -np.inf
    where = np.stack([scores._where(small, row)[number] for row, number in ((0, 0), (0, 2), (0, 1), (1, 2))])
    assert prior.everywhere == pytest.approx(where.mean(0))
    assert prior.spread == pytest.approx(where.std(0) + 1e-6)
    away = (scores._where(small, 1) - where.mean(0)) / (where.std(0) + 1e-6)
    assert prior.scores("new", small, 1)[:-1] == pytest.approx(-(away**2).sum(1))
    assert scores._where(small, 0)[0] == pytest.approx([4.5 / 100, 0, math.log(10 / 1000) / 4])
    with pytest.raises(Fault, match=r"^no query that is trained on has a right mask, so that there is no prior; give queries that have$"):
        Prior.of(open_queries(small, trained[2:4]), small)


def test_images_without_masks_are_scored_too(small):
    catalogue = open_queries(small, [Query(None, "sa_2", "anything", (), "absent"), Query(None, "sa_1", "small", (0,), "plain")])
    found = judge([Answer(0, np.array([0.2])), Answer(1, np.array([2.0, 0.0, 0.0, 1.0]))], catalogue, small)
    assert found.summary()["answered"] == 1
    only = judge([Answer(0, np.array([0.2]))], catalogue, small).summary()
    assert (only["absent"], only["top_1"], only["calibration"]["as it comes"]["expected_error"]) == (1, None, None)
    assert table(only).endswith("% off in the mean of ten bins: \nrefused, % as it comes: 100.0 of the absent")


def test_no_answer_is_nothing_to_score(judged):
    index, catalogue = judged
    with pytest.raises(Fault, match=r"^no query could be asked, so there is nothing to score; give queries about these images$"):
        judge([], catalogue, index)
    with pytest.raises(Fault, match=r"^no query could be asked, so there is nothing to score; sa_0: is cut$"):
        judge([], catalogue, index, rejected=["sa_0: is cut"])


def test_asking_is_scoring_every_query_alone(described, tmp_path, judged):
    """Whatever stands beside it, and with all masks of its image."""
    from gigamask.data.shards import Shards
    from gigamask.grounding.fit import score

    run = run_in(tmp_path / "run", described, hold_out=0.0)
    index, catalogue = judged
    asked, model, told = progress.questioner(run, index, catalogue), run.build().train(), []
    answers, bad = scores.ask(model, asked, lambda *counts: told.append(counts))
    assert model.training
    assert bad == []
    assert [answer.number for answer in answers] == list(range(len(catalogue.queries)))
    assert told == [(32, 72), (64, 72), (72, 72)]
    shards = Shards(index.shard_paths)
    for number in (0, 40, 71):
        batch = asked.batch([scores.Visit(3, 5, number)], shards, Cursor())
        alone = score(model.eval(), batch, "fp32")[0].tolist()
        assert answers[number].scores.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-5)
        assert len(answers[number].logits) == index.images["masks"][catalogue.rows[number]]
    shards.close()
    assert asked.gallery.encoded <= 6

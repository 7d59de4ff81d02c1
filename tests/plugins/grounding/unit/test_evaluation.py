"""Evaluation of scored queries, and evaluation during training."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data.shards import ShardReader
from gigamask.distributed.world import World
from gigamask.errors import EvaluationStoppedError
from gigamask.plugins.grounding import queries
from gigamask.plugins.grounding.calibration import Confidence
from gigamask.plugins.grounding.config import (
    GroundingEvalConfig,
    evaluation_set,
    split_queries,
)
from gigamask.plugins.grounding.data import open_queries
from gigamask.plugins.grounding.evaluation import (
    QueryScores,
    evaluate,
    format_table,
    nonsense_dataset,
    score_queries,
    with_image_masks,
)
from gigamask.plugins.grounding.metrics import METRICS, PositionPrior, chance_metrics
from gigamask.plugins.grounding.model import score_batch
from gigamask.plugins.grounding.queries import Query
from gigamask.records import DataCursor, SampleRef
from tests.errors import error_line
from tests.plugins.grounding.asked import run_in, write_spoilt


@pytest.fixture(scope="module")
def judged(index, dataset):
    return index, dataset


def results_of(judged, sure, seed=0):
    """Answers to all queries: right masks and, where there are none, none itself score `sure`
    higher than noise."""
    (index, dataset), generator, found = judged, np.random.default_rng(seed), []
    for number, query in enumerate(dataset.queries):
        told = generator.normal(size=int(index.images["masks"][dataset.rows[number]]) + 1)
        told[list(query.mask_indices) or [-1]] += sure
        found.append(QueryScores(number, told))
    return found


@pytest.mark.slow
def test_a_summary_holds_means_by_kind_rules_and_the_protocol(judged):
    index, dataset = judged
    prior = PositionPrior.fit(dataset, index)
    found = evaluate(results_of(judged, 50.0), dataset, index, prior, ["sa_9 is cut"])
    told = json.loads(json.dumps(found.summary()))
    counts = told["queries"], told["images"], told["skipped"]
    assert counts == (len(dataset.queries), 6, ["sa_9 is cut"])
    for name in ("top_1", "top_3", "absent", "answered"):
        assert told[name] == 1
    assert told["refused"] == 0
    assert set(told["rules"]) == {"chance", "largest", "prior"}
    assert set(told["kinds"]) == {query.kind for query in dataset.queries}
    assert told["kinds"]["absent"]["top_1"] is None
    assert told["kinds"]["relation"]["absent"] is None
    assert sum(each["queries"] for each in told["kinds"].values()) == told["queries"]
    assert set(told["calibration"]) == {"uncalibrated", "calibrated"}
    chance = told["rules"]["chance"]
    assert told["rules"]["largest"]["absent"] == chance["absent"] == chance["refused"] == 0
    plain = [chance_metrics(query.mask_indices, image) for query, image in with_images(judged)]
    expected = np.mean([each["top_1"] for each in plain if "top_1" in each])
    assert chance["top_1"] == pytest.approx(expected)
    told["kinds"]["all"] = told["kinds"]["size"]
    rows = format_table(told).splitlines()
    assert rows[0] == f"shares of {told['queries']} queries about 6 images"
    names = ["all", *told["kinds"], "(chance)", "(largest)", "(prior)"]
    assert [row.split()[0] for row in rows[2:-3]] == names
    assert rows[1].split() == [*METRICS, "queries"]
    assert " - " in rows[3]


def test_nonsense_is_asked_of_each_image_and_reported_beside_the_refusals(judged):
    index, dataset = judged
    nonsense = nonsense_dataset(dataset, index, 0)
    assert sorted(nonsense.rows.tolist()) == sorted(set(dataset.rows.tolist()))
    assert not any(query.mask_indices for query in nonsense.queries)
    known = {query.text for query in dataset.queries}
    assert known.isdisjoint(query.text for query in nonsense.queries)
    answers = [QueryScores(number, np.array([1.0, 0.0])) for number in range(2)]
    refusals = [QueryScores(number, np.array([0.0, 1.0])) for number in range(2, 6)]
    found = evaluate(results_of(judged, 50.0), dataset, index, nonsense=[*answers, *refusals])
    told = found.summary()
    assert told["refusals"]["uncalibrated"]["nonsense"] == pytest.approx(4 / 6)
    assert "0.667 nonsense" in format_table(told)
    assert told["queries"] == len(dataset.queries), "other scores are without nonsense"


def test_a_saved_threshold_is_scored(judged):
    index, dataset = judged
    results = results_of(judged, 50.0)
    logit = max(float(result.logits.max(initial=-1e4)) for result in results)
    found = evaluate(results, dataset, index, saved=Confidence(threshold=logit)).summary()
    assert (found["absent"], found["refused"], found["top_1"]) == (1, 1, 1)
    assert found["refusals"]["saved"] == {"absent": 1, "refused": 1, "right": 0}
    assert set(found["calibration"]) == set(found["refusals"]) == {"uncalibrated", "saved"}


def with_images(judged):
    index, dataset = judged
    answers = [QueryScores(number, np.zeros(1)) for number in range(len(dataset.queries))]
    return [
        (dataset.queries[answer.number], image)
        for answer, image in with_image_masks(answers, dataset, index)
    ]


def test_the_largest_mask_is_taken_by_its_rule(judged):
    index, dataset = judged
    found = evaluate(results_of(judged, 0.0), dataset, index)
    wanted = [
        float(int(image.masks.areas().argmax()) in query.mask_indices)
        for query, image in with_images(judged)
        if query.mask_indices
    ]
    assert found.summary()["rules"]["largest"]["top_1"] == pytest.approx(np.mean(wanted))
    assert "prior" not in found.metrics


def test_images_without_masks_are_scored_too(small):
    asked = Query(None, "sa_2", "anything", (), "absent"), Query(None, "sa_1", "small", (0,))
    dataset = open_queries(small, asked)
    answers = [QueryScores(0, np.array([0.2])), QueryScores(1, np.array([2.0, 0.0, 0.0, 1.0]))]
    assert evaluate(answers, dataset, small).summary()["answered"] == 1
    only = evaluate(answers[:1], dataset, small).summary()
    error = only["calibration"]["uncalibrated"]["expected_error"]
    assert (only["absent"], only["top_1"], error) == (1, None, None)
    assert format_table(only).splitlines()[-1].startswith("refused queries, uncalibrated: 1.000")


def test_no_predictions_are_nothing_to_score(judged):
    index, dataset = judged
    with error_line(r"sa_0: is cut$"):
        evaluate([], dataset, index, skipped=["sa_0: is cut"])


@pytest.mark.slow
def test_predictions_equal_scoring_each_query_alone(described, tmp_path, judged):
    """Whatever stands beside it, and with all masks of its image."""
    run = run_in(tmp_path / "run", described, val_split=0.0)
    index, dataset = judged
    asked, model, told = run.query_loader(dataset, index), run.build().train(), []
    answers, bad = score_queries(model, asked, lambda *counts: told.append(counts))
    assert model.training
    assert bad == []
    assert [answer.number for answer in answers] == list(range(len(dataset.queries)))
    assert told == [(32, 72), (64, 72), (72, 72)]
    shards = ShardReader(index.shard_paths)
    for number in (0, 40, 71):
        batch = asked.batch([SampleRef(3, 5, number)], shards, DataCursor())
        alone = score_batch(model.eval(), batch, "fp32")[0].tolist()
        assert answers[number].scores.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-5)
        assert len(answers[number].logits) == index.images["masks"][dataset.rows[number]]
    shards.close()
    assert asked.mask_features.encoded <= 6


@pytest.fixture
def run(tmp_path, described):
    return run_in(
        tmp_path / "run",
        described,
        val_split=0.5,
        evaluation=GroundingEvalConfig(interval=3, count=10),
    )


def evaluator(run):
    """The evaluation that the training of a run opens."""
    return run.evaluation.open(run, World())


@pytest.mark.slow
def test_fixed_subset_of_the_held_out_queries_is_evaluated(run):
    found = evaluator(run).__self__
    index, dataset = evaluation_set(run)
    assert run.evaluation.interval == 3
    asked = found.loader.dataset.queries
    assert len(asked) == 10
    assert set(asked) < set(dataset.queries)
    assert asked == evaluator(replace(run, seed=run.seed, steps=99)).__self__.loader.dataset.queries
    assert not {query.image for query in dataset.queries} & {
        query.image for query in split_queries(run, queries.read(run.queries), index)[0]
    }
    assert found.loader.max_masks == index.images["masks"].max()
    everything = evaluator(replace(run, evaluation=GroundingEvalConfig(count=1000))).__self__
    assert everything.loader.dataset.queries == dataset.queries


@pytest.mark.slow
def test_scores_are_fractions_and_reproducible(run):
    evaluate_now, model = evaluator(run), run.build().train()
    verdict = evaluate_now(model)
    assert set(verdict.scores) == {"top 1", "top 3", "IoU", "absent", "answered"}
    assert all(0 <= score <= 1 for score in verdict.scores.values())
    assert (verdict.best_by, verdict.warnings) == ("answered", ())
    assert evaluate_now(model) == verdict
    assert model.training
    by_iou = replace(run, evaluation=replace(run.evaluation, best_by="IoU"))
    assert evaluator(by_iou)(model).subject != verdict.subject
    other = replace(run, queries=(str(Path(run.out) / "other.jsonl"),))
    asked = queries.read(run.queries)
    queries.write(other.queries[0], [replace(query, text=f"{query.text} there") for query in asked])
    assert evaluator(other)(model).subject != verdict.subject, "other queries, another score"


@pytest.mark.slow
def test_a_signal_stops_an_evaluation_after_a_batch(run, monkeypatch):
    monkeypatch.setattr("gigamask.plugins.grounding.evaluation.BATCH_SIZE", 3)
    asked, model = [], run.build().train()
    world = World(stop_requested=lambda: asked.append(None) or len(asked) == 2)
    with pytest.raises(EvaluationStoppedError):
        run.evaluation.open(run, world)(model)
    assert len(asked) == 2
    assert model.training


@pytest.mark.slow
def test_a_score_that_no_query_has_gives_way(run, described):
    absent = Path(run.out) / "absent.jsonl"
    queries.write(absent, [query for query in queries.read(run.queries) if not query.mask_indices])
    watching = GroundingEvalConfig(data=run.data, queries=(str(absent),), best_by="top 1")
    verdict = evaluator(replace(run, val_split=0.0, evaluation=watching))(run.build())
    assert set(verdict.scores) == {"absent", "answered"}
    assert verdict.best_by == "answered"


def spoilt(run, folder, rows):
    """The run's data with some images cut short."""
    index = indexes.open_or_build(run.data, str(folder / "index"))
    (folder / "tars").mkdir()
    write_spoilt(index, folder / "tars", rows)
    return replace(run, data=(str(folder / "tars"),), out=str(folder / "out"))


@pytest.mark.slow
def test_images_that_cannot_be_read_are_a_worry(run, tmp_path):
    index, dataset = evaluation_set(run)
    rows = sorted(set(dataset.rows.tolist()))
    (tmp_path / "one").mkdir()
    (tmp_path / "all").mkdir()
    some = spoilt(replace(run, evaluation=GroundingEvalConfig()), tmp_path / "one", rows[:1])
    [worry] = evaluator(some)(run.build()).warnings
    assert worry.startswith(f"1 images cannot be read: sa_000000.tar:sa_{rows[0]}: ")
    with error_line(r"sa_000000.tar:sa_\d: "):
        evaluator(spoilt(run, tmp_path / "all", rows))(run.build())
    assert len(index) == 6

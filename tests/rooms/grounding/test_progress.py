"""What is looked at while a relevance network trains."""

from dataclasses import replace
from pathlib import Path

import pytest

from gigamask.data import index as indexes
from gigamask.data import queries, tar
from gigamask.data.shards import Shards
from gigamask.faults import Fault
from gigamask.grounding import progress, senses
from gigamask.grounding.progress import Progress
from gigamask.grounding.run import Watching
from gigamask.parallel.world import World
from gigamask.prepare import describable
from tests.asked import run_in


@pytest.fixture
def run(tmp_path, described):
    return run_in(tmp_path / "run", described, hold_out=0.5, evaluation=Watching(every=3, count=10))


def test_a_fixed_few_of_the_held_out_queries_are_asked(run):
    found = Progress.of(run)
    index, catalogue = progress.held_out(run)
    assert run.evaluation.open(run, World()).__self__.best_by == run.evaluation.best_by
    asked = found.questioner.catalogue.queries
    assert len(asked) == 10
    assert set(asked) < set(catalogue.queries)
    assert asked == Progress.of(replace(run, seed=run.seed, steps=99)).questioner.catalogue.queries
    assert not {query.image for query in catalogue.queries} & {query.image for query in run.split(queries.read(run.queries), index)[0]}
    assert found.questioner.max_masks == index.images["masks"].max()
    everything = Progress.of(replace(run, evaluation=Watching(count=1000))).questioner.catalogue.queries
    assert everything == catalogue.queries


def test_scores_are_shares_and_the_same_again(run):
    found, model = Progress.of(run), run.build().train()
    verdict = found.run(model)
    assert set(verdict.scores) == {"top 1", "top 3", "IoU", "absent", "answered"}
    assert all(0 <= score <= 1 for score in verdict.scores.values())
    assert (verdict.best_by, verdict.worries) == ("answered", ())
    assert found.run(model) == verdict
    assert model.training
    assert Progress.of(replace(run, evaluation=replace(run.evaluation, best_by="IoU"))).run(model).subject != verdict.subject
    other = replace(run, queries=(str(Path(run.out) / "other.jsonl"),))
    asked = queries.read(run.queries)
    queries.write(other.queries[0], [replace(query, text=f"{query.text} there") for query in asked])
    assert Progress.of(other).run(model).subject != verdict.subject, "other queries, another score"


def test_a_score_that_no_query_has_gives_way(run, described):
    absent = Path(run.out) / "absent.jsonl"
    queries.write(absent, [query for query in queries.read(run.queries) if not query.right])
    watching = Watching(data=run.data, queries=(str(absent),), best_by="top 1")
    verdict = Progress.of(replace(run, hold_out=0.0, evaluation=watching)).run(run.build())
    assert set(verdict.scores) == {"absent", "answered"}
    assert verdict.best_by == "answered"


def test_training_and_evaluation_share_what_is_loaded_and_read(run, monkeypatch):
    loaded, read = [], []
    load, begin = senses.load_model, queries.read
    monkeypatch.setattr(senses, "load_model", lambda *given: loaded.append(given) or load(*given))
    monkeypatch.setattr(queries, "read", lambda paths: read.append(paths) or begin(paths))
    run.look_ahead()
    evaluated = Progress.of(run).questioner
    trained = run.supply(evaluated.index).loader(False)
    assert trained.gallery is evaluated.gallery
    assert trained.read.__self__ is evaluated.read.__self__, "of one text model"
    assert (len(loaded), read) == (1, [run.queries])


def test_nothing_to_evaluate_on(run):
    assert Progress.of(replace(run, hold_out=0.0)) is None
    with pytest.raises(Fault, match=r"^--hold-out 1e-06 holds out none of the images of 72 queries; hold out more, or name --evaluation.data$"):
        Progress.of(replace(run, hold_out=1e-6))


def test_other_data_may_be_evaluated_on(run, tmp_path):
    _, asked = describable.write(tmp_path / "more", 1, seed=9, first=40)
    watching = Watching(data=(str(tmp_path / "more"),), queries=(str(tmp_path / "more" / "queries.jsonl"),))
    index, catalogue = progress.held_out(replace(run, evaluation=watching))
    assert (len(index), list(catalogue.queries)) == (1, asked)
    trained = progress.trained_on(run)
    assert len(trained[0]) == 6
    assert trained[1] == run.split(queries.read(run.queries), trained[0])[0]
    assert progress.trained_on(replace(run, data=(str(tmp_path / "gone"),))) is None
    assert progress.trained_on(replace(run, queries=(str(tmp_path / "gone"),))) is None


def spoilt(run, folder, rows):
    """The run's data with some images cut short."""
    index = indexes.open_or_build(run.data, str(folder / "index"))
    shards, members = Shards(index.shard_paths), []
    for row in range(len(index)):
        jpg, told = shards.read_entry(index, row)
        members += [(f"sa_{row}.jpg", jpg[:200] if row in rows else jpg), (f"sa_{row}.json", told)]
    shards.close()
    (folder / "tars").mkdir()
    tar.write(folder / "tars" / "sa_000000.tar", members)
    return replace(run, data=(str(folder / "tars"),), out=str(folder / "out"))


def test_images_that_cannot_be_read_are_a_worry(run, tmp_path):
    index, catalogue = progress.held_out(run)
    rows = sorted(set(catalogue.rows.tolist()))
    (tmp_path / "one").mkdir()
    (tmp_path / "all").mkdir()
    some = Progress.of(spoilt(replace(run, evaluation=Watching()), tmp_path / "one", rows[:1]))
    [worry] = some.run(run.build()).worries
    assert worry.startswith(f"1 images cannot be read: sa_000000.tar:sa_{rows[0]}: ")
    with pytest.raises(Fault, match=r"^no query could be asked, so there is nothing to score; sa_000000.tar:sa_\d: "):
        Progress.of(spoilt(run, tmp_path / "all", rows)).run(run.build())
    assert len(index) == 6

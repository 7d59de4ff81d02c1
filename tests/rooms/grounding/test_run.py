"""What a run of queries says, and refuses to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask import arguments
from gigamask.data import index as indexes
from gigamask.data import queries
from gigamask.faults import Fault
from gigamask.grounding.fit import RelevanceTask
from gigamask.grounding.run import Watching
from gigamask.grounding.text import MiniLm
from gigamask.losses.mining import Hardest
from gigamask.prepare import describable
from gigamask.train.run import check_resume
from tests.asked import SPEC, run_in


@pytest.fixture
def run(tmp_path, described):
    return run_in(tmp_path / "run", described)


@pytest.fixture(scope="module")
def index(described, tmp_path_factory):
    return indexes.open_or_build([str(described / "scenes")], str(tmp_path_factory.mktemp("index")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queries": ()}, r"^--queries is empty, training needs texts with their right masks; name a JSONL file, or make one: gigamask synth DIR"),
        ({"segmenter": ""}, r"^--segmenter is missing, it sees what texts are about; name the weights of a trained segmenter$"),
        ({"hold_out": 1.0}, r"^--hold-out is 1.0, a share of the images below 1; give such$"),
        ({"hold_out": -0.1}, r"^--hold-out is -0.1, "),
        ({"hold_out": float("nan")}, r"^--hold-out is nan, "),
        ({"alignment_weight": -1.0}, r"^--alignment-weight is -1.0, it must be at least 0$"),
        ({"alignment_weight": float("nan")}, r"^--alignment-weight is nan, "),
        ({"evaluation": Watching(data=("x",))}, r"^--evaluation.data and --evaluation.queries belong together; give both, or neither"),
        ({"evaluation": Watching(queries=("x",))}, r"^--evaluation.data and --evaluation.queries belong together"),
        ({"evaluation": Watching(every=0)}, r"^--evaluation.every is 0, it must be at least 1$"),
        ({"evaluation": Watching(count=0)}, r"^--evaluation.count is 0, it must be at least 1$"),
        ({"max_masks": 0}, r"^--max-masks is 0, it must be at least 1$"),
        ({"parallel": "fsdp"}, r"^--parallel fsdp shares out an image encoder, here none is trained; leave it out$"),
        ({"data": ()}, r"^--data is empty"),
        ({"batch": 0}, r"^--batch is 0"),
    ],
)
def test_numbers_that_cannot_be_trained_with(run, change, words):
    assert run.check() is run
    with pytest.raises(Fault, match=words):
        replace(run, **change).check()


def test_what_is_missing_is_found_before_anything_is_computed(run, tmp_path):
    run.look_ahead()
    with pytest.raises(Fault, match=r"nothing.jsonl: the queries cannot be read \(No such file or directory\); give a JSONL file of queries$"):
        replace(run, queries=(str(tmp_path / "nothing.jsonl"),)).look_ahead()
    with pytest.raises(Fault, match=r"nothing.jsonl: the queries cannot be read"):
        replace(run, evaluation=Watching(data=run.data, queries=(str(tmp_path / "nothing.jsonl"),))).look_ahead()
    with pytest.raises(Fault, match=r"^--segmenter \S+nothing.pth: no such file or folder; give a run folder, a checkpoint, a .pth, a .safetensors"):
        replace(run, segmenter=str(tmp_path / "nothing.pth")).look_ahead()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"segmenter": "other"}, "segmenter"),
        ({"text": MiniLm()}, "text"),
        ({"max_masks": 9}, "max-masks"),
        ({"hold_out": 0.3}, "hold-out"),
        ({"queries": ("other",)}, "queries"),
    ],
)
def test_what_makes_other_samples_is_refused_on_resume_unless_told(run, change, name):
    with pytest.raises(
        Fault, match=rf"^--{name}(\.[\w-]+)? was .* now, which changes the data or its order; give --allow-other-order, or another --out$"
    ):
        check_resume(run, replace(run, **change), False)
    assert name in {each.partition(".")[0] for each in check_resume(run, replace(run, **change), True)}


def test_sizes_are_refused_and_the_rest_is_told(run):
    with pytest.raises(Fault, match=r"^--model.dim was 16 in .* weights of another shape cannot be resumed"):
        check_resume(run, replace(run, model=replace(SPEC, dim=32)), True)
    changed = check_resume(run, replace(run, alignment_weight=2.0, cache="elsewhere", mining=Hardest(), evaluation=Watching(count=9)), False)
    assert {"alignment-weight", "cache", "mining", "evaluation.count"} <= changed.keys()


def test_a_run_comes_back_from_its_folder(run, described, tmp_path):
    assert arguments.load_run(run.out) == run
    other = run_in(tmp_path / "other", described, lora_rank=2, mining=Hardest(share=0.5), evaluation=Watching(best_by="top 1"))
    assert arguments.load_run(other.out) == other
    assert run.senses.kept == Path(run.cache)
    assert replace(run, cache=None).senses.kept == Path(run.out) / "features"
    assert run.tables == run.queries
    assert not run.strata
    assert replace(run, mining=Hardest(within="sampler")).strata


def test_the_task_is_of_the_runs_numbers(run):
    cpu = torch.device("cpu")
    assert run.task(cpu) == RelevanceTask(1.0, "fp32", None)
    mined = replace(run, mining=Hardest(share=0.5), alignment_weight=0.5, precision="bf16").task(cpu)
    assert mined == RelevanceTask(0.5, "bf16", Hardest(share=0.5))


def images(asked):
    return {query.image for query in asked}


def test_whole_images_are_held_out_by_name(run, index):
    asked = queries.read(run.queries)
    assert run.split(asked, index) == (asked, [])
    half = replace(run, hold_out=0.5)
    kept, out = half.split(asked, index)
    assert kept
    assert out
    assert sorted([*kept, *out], key=asked.index) == asked
    assert not images(kept) & images(out)
    assert half.split(asked[::-1], index) == (kept[::-1], out[::-1])
    assert images(replace(run, hold_out=0.25).split(asked, index)[1]) <= images(out), "a larger share holds out more, not others"
    splits = {frozenset(images(replace(half, seed=seed).split(asked, index)[1])) for seed in (0, 1, 3, 4)}
    assert len(splits) > 1


def test_what_is_held_out_does_not_depend_on_what_else_is_indexed(run, index, tmp_path):
    """Neither on other tars nor on the folder that a tar lies in."""
    describable.write(tmp_path / "more", 2, seed=9, first=500)
    both = indexes.open_or_build([str(tmp_path / "more"), *run.data], str(tmp_path / "index"))
    asked, half = queries.read(run.queries), replace(run, hold_out=0.5)
    assert len(both) == len(index) + 2
    assert half.split(asked, both) == half.split(asked, index)
    more = [*queries.read(tmp_path / "more" / "queries.jsonl"), *asked]
    assert [query for query in half.split(more, both)[1] if query in asked] == half.split(asked, index)[1]


def test_holding_out_everything_is_named(run, index):
    with pytest.raises(Fault, match=r"^--hold-out 0.999999 leaves no query to train on; hold out less, or give more --queries$"):
        replace(run, hold_out=0.999999).split(queries.read(run.queries), index)


def test_what_is_supplied_is_what_is_not_held_out(run, index):
    half = replace(run, hold_out=0.5)
    supply = half.supply(index)
    kept = half.split(queries.read(run.queries), index)[0]
    made = supply.loader(False)
    assert supply.items.count == len(kept)
    assert list(made.catalogue.queries) == kept
    assert (made.max_masks, made.seed) == (6, 0)
    assert supply.told == "queries 6"


def test_queries_of_images_elsewhere_are_named(run, index, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"image": "sa_77.jpg", "query": "the red box", "mask_index": 0}) + "\n")
    with pytest.raises(Fault, match=r"^the query 'the red box' of sa_77.jpg: the index .* holds no such image; index its tar too"):
        replace(run, queries=(str(path),)).supply(index)

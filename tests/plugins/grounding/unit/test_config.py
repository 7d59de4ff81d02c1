"""The config of a grounding training: what it checks, loads and splits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask import config_files, registry
from gigamask.data import index as indexes
from gigamask.distributed.world import World
from gigamask.losses.ohem import OHEM
from gigamask.plugins.grounding import described_scenes, mask_features, queries
from gigamask.plugins.grounding.config import (
    GroundingEvalConfig,
    evaluation_set,
    split_queries,
    training_set,
)
from gigamask.plugins.grounding.model import GroundingTask
from gigamask.plugins.grounding.text_encoders import MINILM
from gigamask.training.config import check_resume
from tests.errors import error_line
from tests.plugins.grounding.asked import SPEC, run_in


@pytest.fixture
def asked(run):
    return queries.read(run.queries)


@pytest.fixture
def half(run):
    """Holds out half of the images."""
    return replace(run, val_split=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, flag",
    [
        ({"queries": ()}, r"^--queries\b"),
        ({"segmenter": ""}, r"^--segmenter\b"),
        ({"val_split": 1.0}, r"^--val-split\b.* 1.0$"),
        ({"val_split": float("nan")}, r"^--val-split\b.* nan$"),
        ({"nonsense_fraction": float("nan")}, r"^--nonsense-fraction\b.* .got nan.$"),
        ({"alignment_weight": float("nan")}, r"^--alignment-weight\b.* .got nan.$"),
        (
            {"evaluation": GroundingEvalConfig(data=("x",))},
            r"^--evaluation.data and --evaluation.queries\b",
        ),
        (
            {"evaluation": GroundingEvalConfig(queries=("x",))},
            r"^--evaluation.data and --evaluation.queries\b",
        ),
        ({"evaluation": GroundingEvalConfig(interval=0)}, r"^--evaluation.interval\b.*\b0\b"),
        ({"evaluation": GroundingEvalConfig(count=0)}, r"^--evaluation.count\b.*\b0\b"),
        ({"max_masks": 0}, r"^--max-masks\b.*\b0\b"),
        ({"parallel": "fsdp"}, r"^--parallel\b.*fsdp"),
    ],
)
def test_numbers_that_cannot_be_trained_with(run, change, flag):
    assert run.check() is run
    with error_line(flag):
        replace(run, **change).check()


@pytest.mark.slow
def test_what_is_missing_is_found_before_anything_is_computed(run, tmp_path):
    run.check_inputs()
    gone = str(tmp_path / "nothing")
    for change in (
        {"queries": (gone,)},
        {"evaluation": GroundingEvalConfig(data=run.data, queries=(gone,))},
        {"segmenter": gone},
    ):
        with error_line(f"{gone}: "):
            replace(run, **change).check_inputs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, name",
    [
        ({"segmenter": "other"}, "segmenter"),
        ({"text": MINILM}, "text"),
        ({"max_masks": 9}, "max-masks"),
        ({"nonsense_fraction": 0.2}, "nonsense-fraction"),
        ({"val_split": 0.3}, "val-split"),
        ({"queries": ("other",)}, "queries"),
    ],
)
def test_resume_rejects_changed_samples_unless_allowed(run, change, name):
    other = replace(run, **change)
    with error_line(rf"^--{name}\b.* --allow-data-change\b"):
        check_resume(run, other, False)
    assert any(each.startswith(name) for each in check_resume(run, other, True))


def test_changed_sizes_are_rejected_and_other_changes_printed(run):
    with error_line(r"^--model.dim was 16 in .* shape"):
        check_resume(run, replace(run, model=replace(SPEC, dim=32)), True)
    other = replace(
        run,
        alignment_weight=2.0,
        cache="elsewhere",
        mining=OHEM(),
        evaluation=GroundingEvalConfig(count=9),
    )
    changed = check_resume(run, other, False)
    assert {"alignment-weight", "cache", "mining", "evaluation.count"} <= changed.keys()


@pytest.mark.slow
def test_a_run_comes_back_from_its_folder(run, described, tmp_path):
    assert config_files.load_config(run.out, trust=True) == run
    other = run_in(
        tmp_path / "other",
        described,
        lora_rank=2,
        mining=OHEM(keep_ratio=0.5),
        evaluation=GroundingEvalConfig(best_by="top 1"),
    )
    assert config_files.load_config(other.out, trust=True) == other
    assert replace(run, cache=None).backbones.cache_folder == Path(run.out) / "features"


def test_the_task_is_of_the_runs_numbers(run):
    cpu = torch.device("cpu")
    assert run.task(cpu) == GroundingTask(1.0, "fp32", None)
    mined = replace(run, mining=OHEM(keep_ratio=0.5), alignment_weight=0.5, precision="bf16")
    assert mined.task(cpu) == GroundingTask(0.5, "bf16", OHEM(keep_ratio=0.5))


def images(asked):
    return {query.image for query in asked}


def test_whole_images_are_held_out_by_name(run, half, asked, index):
    assert split_queries(run, asked, index) == (asked, [])
    kept, out = split_queries(half, asked, index)
    assert kept
    assert out
    assert sorted([*kept, *out], key=asked.index) == asked
    assert not images(kept) & images(out)
    assert split_queries(half, asked[::-1], index) == (kept[::-1], out[::-1])
    assert images(split_queries(replace(run, val_split=0.25), asked, index)[1]) <= images(out), (
        "a larger share holds out more, not others"
    )
    others = (split_queries(replace(half, seed=seed), asked, index)[1] for seed in (1, 3, 4))
    assert any(images(other) != images(out) for other in others)


@pytest.mark.slow
def test_what_is_held_out_does_not_depend_on_what_else_is_indexed(half, asked, index, tmp_path):
    """Neither on other tars nor on the folder that a tar lies in."""
    described_scenes.write(tmp_path / "more", 2, seed=9, first=500)
    both = indexes.open_or_build([str(tmp_path / "more"), *half.data], str(tmp_path / "index"))
    assert len(both) == len(index) + 2
    assert split_queries(half, asked, both) == split_queries(half, asked, index)
    more = [*queries.read(tmp_path / "more" / "queries.jsonl"), *asked]
    assert [
        query for query in split_queries(half, more, both)[1] if query in asked
    ] == split_queries(half, asked, index)[1]


def test_minilm_is_named_with_its_files_elsewhere():
    assert registry.make_component("text", "minilm") == MINILM
    elsewhere = replace(MINILM, name="folder")
    assert registry.name_of_component("text", elsewhere) == "minilm"
    assert registry.name_of_component("text", replace(MINILM, sha256="")) == "huggingface"


def test_holding_out_everything_is_named(run, asked, index):
    with error_line(r"^--val-split 0.999999 "):
        split_queries(replace(run, val_split=0.999999), asked, index)


def test_the_source_of_data_is_what_is_not_held_out(half, asked, index):
    source = half.data_source(index)
    kept = split_queries(half, asked, index)[0]
    made = source.make_loader(False)
    assert source.items.count == len(kept) + round(len(kept) / 10)
    assert list(made.dataset.queries[: len(kept)]) == kept
    assert (made.max_masks, made.seed) == (6, 0)


@pytest.mark.slow
def test_training_has_nonsense_that_no_mask_fits(run, asked, index):
    def nonsense(**changes):
        loader = replace(run, **changes).data_source(index).make_loader(False)
        return loader.dataset.queries[len(asked) :]

    added = nonsense(nonsense_fraction=0.25)
    assert len(added) == len(asked) // 4
    assert {(query.kind, query.mask_indices) for query in added} == {("nonsense", ())}
    assert added == nonsense(nonsense_fraction=0.25), "resuming reads the same texts"
    other = nonsense(nonsense_fraction=0.25, seed=1)
    assert {query.text for query in added}.isdisjoint(query.text for query in other)
    assert not nonsense(nonsense_fraction=0.0)
    descriptions = {
        replace(run, nonsense_fraction=fraction).data_source(index).description
        for fraction in (0.0, 0.25)
    }
    assert len(descriptions) == 2, "a loss history belongs to the queries"


def test_queries_of_images_elsewhere_are_named(run, index, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        json.dumps({"image": "sa_77.jpg", "query": "the red box", "mask_index": 0}) + "\n"
    )
    with error_line(r"'the red box' of sa_77.jpg"):
        replace(run, queries=(str(path),)).data_source(index)


@pytest.mark.slow
def test_training_and_evaluation_share_what_is_loaded_and_read(half, monkeypatch):
    loaded, read = [], []
    load, begin = mask_features.load_model, queries.read
    monkeypatch.setattr(
        mask_features, "load_model", lambda *given: loaded.append(given) or load(*given)
    )
    monkeypatch.setattr(queries, "read", lambda paths: read.append(paths) or begin(paths))
    run = replace(half, evaluation=GroundingEvalConfig(count=10))
    run.check_inputs()
    evaluated = run.evaluation.open(run, World()).__self__.loader
    trained = run.data_source(evaluated.index).make_loader(False)
    assert trained.mask_features is evaluated.mask_features
    assert trained.text_features.__self__ is evaluated.text_features.__self__, "of one text model"
    assert (len(loaded), read) == (1, [run.queries])


def test_nothing_to_evaluate_on(run):
    assert run.evaluation.open(replace(run, val_split=0.0), World()) is None
    with error_line(r"^--val-split 1e-06 .*\b72\b"):
        run.evaluation.open(replace(run, val_split=1e-6), World())


@pytest.mark.slow
def test_other_data_may_be_evaluated_on(half, asked, tmp_path):
    _, others = described_scenes.write(tmp_path / "more", 1, seed=9, first=40)
    watching = GroundingEvalConfig(
        data=(str(tmp_path / "more"),), queries=(str(tmp_path / "more" / "queries.jsonl"),)
    )
    index, dataset = evaluation_set(replace(half, evaluation=watching))
    assert (len(index), list(dataset.queries)) == (1, others)
    trained = training_set(half)
    assert len(trained[0]) == 6
    assert list(trained[1].queries) == split_queries(half, asked, trained[0])[0]
    gone = (str(tmp_path / "gone"),)
    assert training_set(replace(half, data=gone)) is None
    assert training_set(replace(half, queries=gone)) is None

"""Tables of variants: files, checks before training, and the table of scores."""

from pathlib import Path

import pytest

from gigamask import registry
from gigamask.errors import GigamaskError
from gigamask.plugins.ablate import ablation
from gigamask.plugins.ablate.tables import TABLES, load_table
from tests.commands import LITTLE
from tests.errors import error_line

WORDS = f"{LITTLE} --data some.tar --steps 4".split()


def written(folder: Path, text: str) -> str:
    (folder / "table.yaml").write_text(text)
    return str(folder / "table.yaml")


def test_a_file_says_flags_as_words_or_as_values(tmp_path):
    text = """
    plain:
    words: [--sampler, streamed, --sampler.lanes, "2"]
    values:
      {sampler: streamed, sampler.buffer: 5, loader.half_scale: true,
       optimizer.lr: 1e-4, init: null}
    dashes: {--batch-size: 2}
    """
    assert load_table(written(tmp_path, text)) == {
        "plain": [],
        "words": "--sampler streamed --sampler.lanes 2".split(),
        "values": (
            "--sampler streamed --sampler.buffer 5 --loader.half_scale true --optimizer.lr 1e-4 "
            "--init null"
        ).split(),
        "dashes": ["--batch-size", "2"],
    }
    assert load_table(written(tmp_path, '{"a": ["--batch-size", 2], "b": {}}')) == {
        "a": ["--batch-size", "2"],
        "b": [],
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no 'key: value' lines; write"),
        ("- a\n- b", "has no 'key: value' lines; write"),
        ("{}", "has no variants; write"),
        ("a: [", "not valid YAML"),
        ("a: text", "a: must be a list of flags or 'flag: value' lines"),
        ("a: {sampler: {lanes: 2}}", "a: must be a list of flags or 'flag: value' lines"),
        ("a: [[--batch-size, 2]]", "a: must be a list of flags or 'flag: value' lines"),
    ],
)
def test_a_file_that_is_no_table_is_one_line(tmp_path, text, message):
    with pytest.raises(GigamaskError) as caught:
        load_table(written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_table_names_the_known_ones():
    with error_line(r"'samplerz'"):
        load_table("samplerz")


@pytest.mark.slow
def test_trainings_are_planned_seed_by_seed():
    trainings = ablation.plan_runs({"a": [], "b": ["--sampler", "streamed"]}, WORDS, "out", 2)
    assert [(each.variant, each.seed, each.out) for each in trainings] == [
        (variant, seed, f"out/{variant}/seed_{seed}") for seed in (0, 1) for variant in ("a", "b")
    ]
    runs = [ablation.config_of(each) for each in trainings]
    assert [run.seed for run in runs] == [0, 0, 1, 1]
    assert {(run.data, run.steps) for run in runs} == {(("some.tar",), 4)}
    assert registry.name_of_component("sampler", runs[1].sampler) == "streamed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "table, message",
    [
        ({"a": ["--stepps", "3"]}, r"variant a: .*perhaps you meant --steps"),
        ({"a": ["--sampler", "huge"]}, r"variant a: --sampler 'huge'"),
        ({"a": ["--batch-size", "0"]}, r"variant a: --batch-size must be at least 1 \(got 0\)"),
        ({"a": ["--steps", "5"]}, r"variant a: --steps must be the same"),
        ({"a": ["--data", "other.tar"]}, r"variant a: --data must be the same"),
        ({"a": ["--stages", "mae,joint"]}, r"variant a: --stages cannot be used here"),
        ({"a": ["--max-minutes", "1"]}, r"variant a: --max-minutes cannot be used here"),
        ({"a": ["--images", "photos"]}, r"variant a: --images cannot be used here"),
        ({"a": ["--classes", "auto"]}, r"variant a: --classes auto cannot be used here"),
        ({"a": ["--lora.alpha", "3"]}, r"variant a: --lora.alpha 3.0: has no effect"),
        ({"a/b": []}, r"variant 'a/b': the name becomes a folder"),
        ({"..": []}, r"variant '\.\.': the name becomes a folder"),
    ],
)
def test_a_plan_refuses_before_anything_is_trained(table, message):
    with error_line(f"^{message}"):
        ablation.plan_runs(table, WORDS, "out", 1)


def test_a_variant_states_no_epochs():
    with error_line(r"^variant a: --epochs cannot be used here"):
        ablation.plan_runs({"a": ["--epochs", "3"]}, ["tiny", "--data", "some.tar"], "out", 1)


@pytest.mark.long
@pytest.mark.usefixtures("no_shape_checks")
def test_every_table_of_ours_parses():
    for table in TABLES.values():
        assert len(ablation.plan_runs(table, "tiny --data some.tar".split(), "out", 1)) == len(
            table
        )


def scored(clicks: float, fine: float | None, seconds: float | None) -> dict:
    means = dict.fromkeys(("oracle", "box"), clicks) | {"clicks": {"1": clicks, "3": clicks}}
    shares = {"fine": fine, "medium": clicks, "coarse": clicks}
    granularity = {name: {"clicks": {"1": share}} for name, share in shares.items()}
    counts = {"images": 2, "masks": 5, "seconds": seconds}
    return means | counts | {"granularity": granularity}


def test_scores_are_means_over_seeds_with_their_spread():
    trainings = [
        ablation.AblationRun(variant, seed, (), "") for seed in (0, 1) for variant in ("a", "b")
    ]
    found = [
        scored(0.5, None, 10.0),
        scored(0.2, 0.1, 20.0),
        scored(0.7, None, None),
        {"fault": "b, seed 1: too hot"},
    ]
    gathered = {name: ablation._summarize(name, ["--flag"], trainings, found) for name in "ab"}
    assert gathered["a"]["mean"]["1 click"] == pytest.approx(0.6)
    assert gathered["a"]["spread"]["1 click"] == pytest.approx(0.1 * 2**0.5)
    assert gathered["b"]["faults"] == ["b, seed 1: too hot"]
    data = {"paths": ["x"], "images": 3, "masks": 5}
    about = {"table": "t", "recipe": "tiny", "steps": 4, "seeds": 2, "data": data, "test": data}
    lines = ablation.markdown(about | {"variants": gathered}).splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    assert rows == [
        "variant,1 click,3 clicks,oracle,box,fine,medium,coarse,masks,seconds".split(","),
        ["a", *["0.600 ± 0.141"] * 4, "-", *["0.600 ± 0.141"] * 2, "5", "10"],
        ["b", *["0.200"] * 4, "0.100", *["0.200"] * 2, "5", "20"],
    ]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert lines[-1] == "- failed: b, seed 1: too hot"
    assert "2 seeds, mean ± standard deviation of those that did not fail" in lines[2]

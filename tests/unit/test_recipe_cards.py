"""The recipe cards are up to date and names sources; docstrings state the recipes' numbers."""

import re
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction

import pytest

from docs.recipe_cards import DOCS, built_in, read, render, tables_of
from gigamask import recipes, registry
from gigamask.config_files import TrainFlags, config_yaml, read_config
from gigamask.recipes import mae, sam
from gigamask.training.config import TrainConfig, flatten_config
from tests.commands import invoke

MARKS = ("paper", "code", "author", "measured", "not stated: ours", "ours")
RECIPES = recipes.names()


@pytest.fixture(scope="module")
def page() -> str:
    return read()


@pytest.fixture(scope="module")
def runs() -> dict[str, dict]:
    return built_in()


def test_regenerating_the_page_changes_nothing(page, runs):
    assert render(page, runs) == page


def test_other_values_and_new_flags_reach_the_page(page, runs):
    changed = {
        name: run | {"optimizer.lr": f"0.{number}", "optimizer.new": str(number)}
        for number, (name, run) in enumerate(runs.items())
    }
    rows = [(table, row) for table in tables_of(render(page, changed)) for row in table.rows]
    for flag in ("optimizer.lr", "optimizer.new"):
        cells = {
            name: row[column]
            for table, row in rows
            if f"`--{flag}`" in row
            for name, column in table.columns.items()
        }
        assert cells == {name: changed[name][flag] for name in RECIPES}


def test_a_flag_that_is_gone_leaves_the_page(page, runs):
    left = {
        name: {flag: value for flag, value in run.items() if flag != "optimizer.betas"}
        for name, run in runs.items()
    }
    assert "`--optimizer.betas` |" in page
    assert "`--optimizer.betas` |" not in render(page, left)


def test_a_recipe_without_a_table_is_refused(page, runs):
    with pytest.raises(SystemExit, match="photos"):
        render(page.replace("| flag | `photos` |", "| flag | photographs |"), runs)


def test_every_mark_has_its_source(page):
    marked = [
        dict(zip(table.headings, row, strict=True))
        for table in tables_of(page)
        if "mark" in table.headings
        for row in table.rows
    ]
    assert len(marked) > 120
    for row in marked:
        mark, source = row["mark"], row["source, or why"]
        assert mark in MARKS, row
        assert len(source) > 2, row
        if mark == "paper":
            assert re.match(
                r"(abstract|[A-F]|[A-F]\.\d|\d(\.\d)?)[,:;]|\d,\d{3} epochs \(4\.1\)", source
            ), row
        if mark == "code":
            assert re.search(r"`[\w/.]+\.(py|md|yaml)`", source), row
        if mark == "author":
            assert re.search(r"issue \d+", source), row
    assert {mark for mark in MARKS if f"\n| {mark} | " in page} == set(MARKS)


def test_every_flag_and_file_of_the_page_exists(page, runs):
    flags = (
        set().union(*runs.values())
        | {each.name.replace("_", "-") for each in fields(TrainFlags)}
        | {"help"}
    )
    for part in registry.kinds():
        flags |= {
            f"{part}.{leaf}"
            for name in registry.names(part)
            for leaf in flatten_config(registry.make_component(part, name))
        }
    assert {
        flag for flag in re.findall(r"(?<![\w|-])--([\w.-]*\w)", page) if flag not in flags
    } == set()
    root = DOCS.parent
    assert [
        path
        for path in re.findall(r"`((?:docs|gigamask|tests)/[\w/]+\.\w+)`", page)
        if not (root / path).is_file()
    ] == []
    assert max(map(len, page.splitlines())) <= 190


def test_the_arithmetic_on_the_page():
    for name, drops in (("sam_vit_h", (60_000, 86_666)), ("sam_vit_b", (120_000, 173_333))):
        run = recipes.find(name)()
        factors = [
            run.schedule.factor(step, run.steps) for drop in drops for step in (drop - 1, drop)
        ]
        assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
        assert run.steps * run.batch_size == 23_040_000
        assert run.schedule.factor(0, run.steps) == pytest.approx(1 / 250)
    assert run.steps * run.batch_size / 11e6 == pytest.approx(2.09, abs=0.005)
    run = recipes.mae_vit_b()
    assert run.steps * run.batch_size / 11e6 == pytest.approx(186, abs=0.5)
    assert 1600 * (mae.IMAGES // 4096) == 499_200
    assert recipes.one_gpu().steps * recipes.one_gpu().batch_size == 1_440_000
    assert recipes.one_gpu().optimizer.lr == pytest.approx(
        recipes.sam_vit_b().optimizer.lr
        * recipes.one_gpu().batch_size
        / recipes.sam_vit_b().batch_size
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_print_config_prints_all_of_it(name, runs, capsys, tmp_path):
    verb = next(verb for verb in recipes.commands() if name in recipes.names(verb))
    invoke(verb, f"{name} --print-config")
    printed = capsys.readouterr().out
    assert printed.rstrip() == config_yaml(recipes.find(name)()).rstrip()
    (tmp_path / "printed.yaml").write_text(printed)
    assert read_config(str(tmp_path / "printed.yaml")) == runs[name]


NUMBER = re.compile(r"(?<![\w.,-])(\d+/\d+|(?:\d*\.)?\d+(?:e-?\d+)?)(k| million)?(?!\w)")
SHARED: dict[str, Callable[..., TrainConfig]] = {
    **dict.fromkeys(("sam_vit_b", "sam_vit_l", "sam_vit_h"), sam._sam),
    **dict.fromkeys(("finetune", "finetune_vit_l", "finetune_vit_h"), sam._finetune),
    **dict.fromkeys(("mae_vit_b", "mae_vit_l", "mae_vit_h"), mae._mae),
}
FACTS = {
    "sam_vit_h": {68},  # hours, model card
    "mixed_prompts": {5, 95},  # "epochs" of the write-ups
    "one_gpu": {24, 7.6},  # GB; section
    "edge_sam": {1, 5, 10, 112_000, 8},  # percent, epochs, images; GPUs
    "mobile_sam": {1, 5_000_000, 5.4},  # percent; parameters
    **{name: {2.1} for name in ("sam2_tiny", "sam2_small", "sam2_base_plus", "sam2_large")},
    "sami_vit_t": {400, 1000},  # epochs; ImageNet-1k
    "efficient_sam": {5, 64},  # epochs, GPUs
    "sbd_vit_b": {8498, 55},  # images, epochs
    "data_curve": {10_000, 100_000, 1_000_000, 7.6},  # images; section
    "mae_tiny": {15},  # minutes, measured
    "mae_vit_b": {1600, 40, 1000},  # epochs; ImageNet-1k
    "mae_vit_l": {1600, 40, 1000, 800, 42},  # and PRETRAIN.md's epochs and hours
    "mae_vit_h": {1600, 40, 1000, 14},  # and the published patch
}


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_in_docstrings_are_those_of_the_recipe(name, runs):
    recipe, run = recipes.find(name), recipes.find(name)()
    values = [
        each
        for value in runs[name].values()
        for each in (value if isinstance(value, list) else [value])
    ]
    numbers = {float(value) for value in values if re.fullmatch(r"[\d.e-]+", value)} | {
        float(fact) for fact in FACTS.get(name, ())
    }
    numbers |= {
        float(run.steps * run.batch_size),
        float(run.prompts.rounds) if hasattr(run, "prompts") else 0.0,
    }
    if "mae_vit" in name:
        numbers |= {run.optimizer.lr * 256 / run.batch_size, 256.0}
    for text in (recipe.__doc__, SHARED[name].__doc__ if name in SHARED else None):
        for number, unit in NUMBER.findall(re.sub(r"`[^`]*`", "", text or "")):
            said = float(Fraction(number)) * {"": 1, "k": 1e3, " million": 1e6}[unit]
            assert any(said == pytest.approx(known, rel=1e-9) for known in numbers), (
                f"{name} has no {number}{unit}: {text}"
            )


def test_sams_docstrings_state_length_batch_rate_and_decays():
    for recipe in (recipes.sam_vit_b, recipes.sam_vit_l, recipes.sam_vit_h):
        run = recipe()
        rate, decay, drop = (
            f"{run.optimizer.lr * 1e4:.0f}e-4",
            f"{run.optimizer.layer_decay}"[1:],
            f"{run.model.drop_path_rate}"[1:],
        )
        assert (
            f"{run.steps // 1000}k updates of {run.batch_size} images, lr {rate}, "
            f"layer decay {decay}, drop path {drop}" in (recipe.__doc__ or "")
        )

"""docs/recipes.md says of every recipe what the code does: each flag, each value, each mark; so do the recipes' docstrings."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gigamask import names, recipes
from gigamask.arguments import TrainFlags, plain, read_config, text_of
from gigamask.cli import main
from gigamask.recipes import mae, sam, variants
from gigamask.train.run import Run, leaves

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
MARKS = ("paper", "code", "author", "measured", "not stated: ours", "ours")
RECIPES = [recipe.__name__ for recipe in recipes.BUILT_IN]

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of the page: which recipes it is of, the one that it only differs from, and its rows as cells under their headings."""

    heading: str
    recipes: tuple[str, ...]
    base: str | None
    rows: tuple[dict[str, str], ...]

    def values(self, recipe: str) -> Iterator[tuple[str, Any]]:
        """Yields each flag and the value it has here, read as a configuration file is: text, or a list of texts."""
        for row in self.rows:
            if row["flag"] == "none":
                continue
            cell = row[recipe] if row[recipe] != "same" else row[self.recipes[0]]
            yield row["flag"].strip("`").removeprefix("--"), _value(cell)

    @property
    def marked(self) -> bool:
        """Whether it states sources."""
        return "mark" in self.rows[0]


def tables(page: str) -> list[Table]:
    """Returns the tables of the page that are of recipes."""
    found, heading, prose, lines = [], "", "", page.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#"):
            heading, prose = line, ""
        elif not line.startswith("|"):
            prose += line + " "
        elif set(line) <= set("|- "):
            head = _cells(lines[number - 1])
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip([each.strip("`") for each in head], _cells(row), strict=True)))
            of = tuple(each.strip("`") for each in head if each.startswith("`"))
            base = re.search(r"Only what differs from `(\w+)`", prose)
            if of:
                found.append(Table(heading, of, base and base[1], tuple(rows)))
    return found


@cache
def _value(cell: str) -> Any:
    return yaml.load(cell, Loader=yaml.BaseLoader)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def told(run: Run) -> dict[str, Any]:
    """Returns every part and every leaf of a run, as a configuration file says them."""
    return names.named_parts(run) | {name: plain(value) for name, value in leaves(run).items()}


def complaints(page: Sequence[Table], runs: Mapping[str, Values]) -> list[str]:
    """Returns where the page and the recipes disagree, with the row that would mend it."""
    found = []
    by_recipe = {name: [table for table in page if name in table.recipes] for name in runs}
    for name, run in runs.items():
        said: set[str] = set()
        bases = {table.base for table in by_recipe[name] if table.base}
        if not by_recipe[name]:
            found.append(f"{name} has no table; write one below 'Only what differs from `sam_vit_b`.', or from another recipe")
            bases = {"sam_vit_b"}
        for table in by_recipe[name]:
            for flag, value in table.values(name):
                said.add(flag)
                if flag not in run:
                    found.append(f"{name} has no --{flag}, though a table of '{table.heading}' says so")
                elif run[flag] != value:
                    found.append(f"{name}: --{flag} is {run[flag]}, '{table.heading}' says {value}")
        known = [runs[base] for base in bases]
        left = [flag for flag in run if flag not in said and flag != "recipe" and not any(base.get(flag) == run[flag] for base in known)]
        found += [f"{name}: not there is | `--{flag}` | {_cell(run[flag])} |" for flag in left]
    return found


def _cell(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else value


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


@pytest.fixture(scope="module")
def cards(page) -> list[Table]:
    return tables(page)


@pytest.fixture(scope="module")
def runs() -> dict[str, Values]:
    return {recipe.__name__: told(recipe()) for recipe in recipes.BUILT_IN}


def test_every_flag_of_every_recipe_is_there_with_its_value(cards, runs):
    assert complaints(cards, runs) == []


def test_sams_and_maes_tables_are_whole(cards, runs):
    for name in ("sam_vit_b", "sam_vit_l", "sam_vit_h", "mae_vit_b", "mae_vit_l", "mae_vit_h"):
        assert {flag for table in cards if name in table.recipes for flag, _ in table.values(name)} == set(runs[name])


@pytest.mark.parametrize("name", RECIPES)
def test_another_number_or_a_new_flag_is_noticed(cards, runs, name):
    changed = dict(runs[name]) | {"optimizer.lr": "0.123", "optimizer.new": "1"}
    found = complaints(cards, dict(runs) | {name: changed})
    assert any(name in each and "optimizer.lr" in each and "0.123" in each for each in found)
    assert f"{name}: not there is | `--optimizer.new` | 1 |" in found


def test_a_part_of_another_kind_and_a_new_recipe_are_noticed(cards, runs):
    muon = told(names.choose_parts(recipes.sam_vit_h(), {"optimizer": "muon"}))
    found = complaints(cards, dict(runs) | {"sam_vit_h": muon})
    assert "sam_vit_h: --optimizer is muon, '### Length, batch, learning rate' says adamw" in found
    assert "sam_vit_h: not there is | `--optimizer.muon-lr` | 0.02 |" in found
    new = told(replace(recipes.sam_vit_b(), recipe="new", steps=7))
    assert complaints(cards, dict(runs) | {"new": new}) == [
        "new has no table; write one below 'Only what differs from `sam_vit_b`.', or from another recipe",
        "new: not there is | `--steps` | 7 |",
    ]


def test_every_slip_and_every_row_left_out_is_noticed(cards, runs):
    rows = [(place, number, row) for place, table in enumerate(cards) for number, row in enumerate(table.rows) if row["flag"] != "none"]
    assert len(rows) > 200
    for place, number, row in rows:
        table = cards[place]
        for recipe in table.recipes:
            slipped = replace(table, rows=(*table.rows[:number], row | {recipe: "slip"}, *table.rows[number + 1 :]))
            assert complaints([*cards[:place], slipped, *cards[place + 1 :]], runs), (recipe, row)
        if row["flag"] != "`--recipe`" and table.marked:
            shorter = replace(table, rows=(*table.rows[:number], *table.rows[number + 1 :]))
            once = sum(row["flag"] == other["flag"] for each in cards if set(each.recipes) & set(table.recipes) for other in each.rows) == 1
            assert not once or complaints([*cards[:place], shorter, *cards[place + 1 :]], runs), row


def test_every_mark_has_its_source(page, cards):
    marked = [row for table in cards if table.marked for row in table.rows]
    assert len(marked) > 180
    for row in marked:
        mark, source = row["mark"], row["source, or why"]
        assert mark in MARKS, row
        assert len(source) > 2, row
        if mark == "paper":
            assert re.match(r"([A-F]|[A-F]\.\d|\d(\.\d)?)[,:;]|\d,\d{3} epochs \(4\.1\)", source), row
        if mark == "code":
            assert re.search(r"`[\w/]+\.(py|md)`", source), row
        if mark == "author":
            assert re.search(r"issue \d+", source), row
    assert {mark for mark in MARKS if f"\n| {mark} | " in page} == set(MARKS)


def test_every_recipe_has_a_heading(page):
    headings = " ".join(line for line in page.splitlines() if line.startswith("#"))
    assert [name for name in RECIPES if f"`{name}`" not in headings] == []


def test_every_flag_and_file_of_the_page_exists(page):
    flags = {name for recipe in recipes.BUILT_IN for name in told(recipe())} | {each.name.replace("_", "-") for each in fields(TrainFlags)} | {"help"}
    for part, (_, kinds) in names.SEAMS.items():
        flags |= {f"{part}.{leaf}" for name in kinds for leaf in leaves(names.make(part, name))}
    assert {flag for flag in re.findall(r"(?<![\w|-])--([\w.-]*\w)", page) if flag not in flags} == set()
    root = PAGE.parents[1]
    assert [path for path in re.findall(r"`((?:docs|gigamask|tests)/[\w/]+\.\w+)`", page) if not (root / path).is_file()] == []
    assert max(map(len, page.splitlines())) <= 150


def test_the_arithmetic_on_the_page():
    for name, drops in (("sam_vit_h", (60_000, 86_666)), ("sam_vit_b", (120_000, 173_333))):
        run = recipes.find(name)()
        factors = [run.schedule.factor(step, run.steps) for drop in drops for step in (drop - 1, drop)]
        assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
        assert run.steps * run.batch == 23_040_000
        assert run.schedule.factor(0, run.steps) == pytest.approx(1 / 250)
    assert run.steps * run.batch / 11e6 == pytest.approx(2.09, abs=0.005)
    run = recipes.mae_vit_b()
    assert run.steps * run.batch / 11e6 == pytest.approx(186, abs=0.5)
    assert 1600 * (mae.IMAGES // 4096) == 499_200
    assert recipes.one_gpu().steps * recipes.one_gpu().batch == 1_440_000
    assert recipes.one_gpu().optimizer.lr == pytest.approx(recipes.sam_vit_b().optimizer.lr * recipes.one_gpu().batch / recipes.sam_vit_b().batch)


@pytest.mark.parametrize("name", RECIPES)
def test_print_config_prints_all_of_it(name, runs, capsys, tmp_path):
    verb = next(verb for verb, known in recipes.OF_VERB.items() if recipes.find(name) in known)
    assert main([*verb.split(), name, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip() == text_of(recipes.find(name)()).rstrip()
    (tmp_path / "printed.yaml").write_text(printed)
    assert read_config(str(tmp_path / "printed.yaml")) == runs[name]


NUMBER = re.compile(r"(?<![\w.,-])(\d+/\d+|(?:\d*\.)?\d+(?:e-?\d+)?)(k| million)?(?!\w)")
SHARED: dict[str, Callable[..., Run]] = {
    **dict.fromkeys(("sam_vit_b", "sam_vit_l", "sam_vit_h"), sam._sam),
    **dict.fromkeys(("finetune", "finetune_vit_l", "finetune_vit_h"), variants._finetune),
    **dict.fromkeys(("mae_vit_b", "mae_vit_l", "mae_vit_h"), mae._mae),
}
FACTS = {
    "sam_vit_h": {68},  # hours, model card
    "mixed_prompts": {5, 95},  # "epochs" of the write-ups
    "one_gpu": {24, 7.6},  # GB; section
    "mae_tiny": {15},  # minutes, measured
    "mae_vit_b": {1600, 40, 1000},  # epochs; ImageNet-1k
    "mae_vit_l": {1600, 40, 1000, 800, 42},  # and PRETRAIN.md's epochs and hours
    "mae_vit_h": {1600, 40, 1000, 14},  # and the published patch
}


@pytest.mark.parametrize("name", RECIPES)
def test_numbers_in_docstrings_are_those_of_the_recipe(name, runs):
    recipe, run = recipes.find(name), recipes.find(name)()
    values = [each for value in runs[name].values() for each in (value if isinstance(value, list) else [value])]
    numbers = {float(value) for value in values if re.fullmatch(r"[\d.e-]+", value)} | {float(fact) for fact in FACTS.get(name, ())}
    numbers |= {float(run.steps * run.batch), float(run.policy.rounds) if hasattr(run, "policy") else 0.0}
    if "mae_vit" in name:
        numbers |= {run.optimizer.lr * 256 / run.batch, 256.0}
    for text in (recipe.__doc__, SHARED[name].__doc__ if name in SHARED else None):
        for number, unit in NUMBER.findall(re.sub(r"`[^`]*`", "", text or "")):
            said = float(Fraction(number)) * {"": 1, "k": 1e3, " million": 1e6}[unit]
            assert any(said == pytest.approx(known, rel=1e-9) for known in numbers), f"{name} has no {number}{unit}: {text}"


def test_sams_docstrings_state_length_batch_rate_and_decays():
    for recipe in (recipes.sam_vit_b, recipes.sam_vit_l, recipes.sam_vit_h):
        run = recipe()
        rate, decay, drop = f"{run.optimizer.lr * 1e4:.0f}e-4", f"{run.optimizer.layer_decay}"[1:], f"{run.model.drop_path}"[1:]
        assert f"{run.steps // 1000}k updates of {run.batch} images, lr {rate}, layer decay {decay}, drop path {drop}" in (recipe.__doc__ or "")

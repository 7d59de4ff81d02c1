"""The ledger: every recipe has an entry, and entries are what they say."""

import re

import pytest

from gigamask import recipes
from gigamask.cli import main
from gigamask.errors import GigamaskError
from gigamask.evaluation import literature
from gigamask.recipes import results
from gigamask.recipes.results import REPRODUCTIONS, RESULTS


def test_every_built_in_recipe_has_an_entry():
    assert set(RESULTS) == set(recipes.names())


def test_results_say_when_where_and_how():
    for recipe, result in RESULTS.items():
        if result is None:
            continue
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", result.date)
        assert result.hardware
        words = result.command.split()
        assert words[0] in main.commands()
        assert recipe in words
        assert all(scores for scores in result.scores.values())


@pytest.mark.parametrize("recipe", REPRODUCTIONS)
def test_reproductions_name_recipes_commands_and_published_rows(recipe):
    reproduction = REPRODUCTIONS[recipe]
    recipes.make(recipe)
    commands = [command.split() for command in reproduction.commands]
    assert all(words[0] in main.commands() for words in commands)
    assert any(recipe in words for words in commands)
    assert commands[-1][-2:] == ["--reproduce", recipe]
    assert bool(results.published(recipe)) == bool(reproduction.model)
    assert bool(results.source(recipe)) == bool(reproduction.model)
    assert results.describe(recipe)["result"] == results.NOT_RUN
    assert f"gigamask plan {recipe}" in reproduction.hours


def test_published_scores_are_clicks_or_shares():
    for row in literature.ROWS:
        for metric, value in row.scores.items():
            assert 1 <= value <= 20 if metric.startswith("NoC") else 0 < value < 1
        noc = [value for metric, value in row.scores.items() if metric.startswith("NoC")]
        assert noc == sorted(noc)
        assert row.source


def test_a_recipe_without_a_published_experiment_is_an_error():
    with pytest.raises(GigamaskError, match="sbd_vit_b, edge_sam"):
        results.find("tiny")

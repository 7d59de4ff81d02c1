"""Published experiments and scores are what they say."""

import re

import pytest

from gigamask import recipes
from gigamask.cli import main
from gigamask.plugins.benchmarks import literature, reproductions
from gigamask.plugins.benchmarks.reproductions import REPRODUCTIONS
from tests.errors import error_line


@pytest.mark.parametrize("recipe", REPRODUCTIONS)
def test_reproductions_name_recipes_commands_and_published_rows(recipe):
    reproduction = REPRODUCTIONS[recipe]
    recipes.make(recipe)
    commands = [command.split() for command in reproduction.commands]
    assert all(words[0] in main.commands() for words in commands)
    assert any(recipe in words for words in commands)
    assert commands[-1][-2:] == ["--reproduce", recipe]
    assert bool(reproductions.published(recipe)) == bool(reproduction.model)
    assert bool(reproductions.source(recipe)) == bool(reproduction.model)
    assert f"gigamask plan {recipe}" in reproduction.hours
    assert not re.search(r"\d\d\.\d", reproduction.expected)  # scores are fractions


def test_published_scores_are_clicks_or_shares():
    for row in literature.ROWS:
        for metric, value in row.scores.items():
            assert 1 <= value <= 20 if metric.startswith("NoC") else 0 < value < 1
        noc = [value for metric, value in row.scores.items() if metric.startswith("NoC")]
        assert noc == sorted(noc)
        assert row.source


def test_a_recipe_without_a_published_experiment_is_an_error():
    with error_line("sbd_vit_b, edge_sam"):
        reproductions.find("tiny")

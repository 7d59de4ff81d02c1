"""What samplers do to hand-made items, counted by hand."""

from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools import sampler_stats
from gigamask.interfaces import Sampler, SampleTable
from gigamask.samplers.random import LazyShuffle, Random
from tests.commands import invoke, refusal
from tests.errors import error_line

# Six items in three tars: two of each granularity.
SIX = SampleTable(
    6,
    {
        "tar": np.array([0, 0, 2, 2, 2, 5], np.int32),
        "granularity": np.array([0, 1, 2, 0, 1, 2], np.int32),
        "difficulty": np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], np.float32),
    },
)


@dataclass(frozen=True)
class Fixed(Sampler):
    """Always the same order, given by hand."""

    items: tuple[int, ...] = ()

    def order(self, table, epoch, history):
        assert history is None
        return np.array(self.items, np.int64)


@dataclass(frozen=True)
class Learning(Sampler):
    """Says what it was given."""

    @property
    def decay(self):
        return 0.9

    def order(self, table, epoch, history):
        assert np.isnan(history.losses).all()
        assert (history.seen == -1).all()
        assert len(history.losses) == len(history.seen) == table.count
        assert not len(history.epoch_losses)
        return (np.arange(table.count) + epoch) % table.count


def test_each_piece_is_described_beside_the_data():
    found = sampler_stats.describe(SIX, Fixed((0, 0, 3, 2)), pieces=2)
    assert (found["items"], found["positions"], found["epochs"]) == (6, 4, 1)
    assert found["visits"] == {"never": 3, "once": 2, "more": 1, "most": 2}
    assert found["data"]["granularity"] == pytest.approx(
        {"fine": 1 / 3, "medium": 1 / 3, "coarse": 1 / 3}
    )
    assert found["data"]["difficulty"] == pytest.approx({"10%": 0.15, "median": 0.35, "90%": 0.55})
    assert found["data"]["tars"] == 3
    first, second = found["pieces"]
    assert (first["end"], first["tars_seen"], first["tars_here"]) == (2, 1, 1)
    assert first["granularity"] == {"fine": 1.0, "medium": 0.0, "coarse": 0.0}
    assert first["difficulty"]["median"] == pytest.approx(0.1)
    assert (second["end"], second["tars_seen"], second["tars_here"]) == (4, 2, 1)
    assert second["granularity"] == {"fine": 0.5, "medium": 0.0, "coarse": 0.5}
    assert second["difficulty"]["median"] == pytest.approx(0.35)
    assert 0 <= found["order_seconds"] < 1


@pytest.mark.parametrize("epochs, pieces", [(1, 1), (1, 50), (3, 2), (3, 5), (2, 7), (5, 3)])
def test_pieces_cover_the_epochs_one_after_the_other(epochs, pieces):
    """Also where a piece lies across the end of an epoch, or over several."""
    found = sampler_stats.describe(SIX, Learning(), epochs, pieces)
    sequence = np.concatenate([(np.arange(6) + epoch) % 6 for epoch in range(epochs)])
    assert found["visits"] == {
        "never": 0,
        "once": 6 if epochs == 1 else 0,
        "more": 0 if epochs == 1 else 6,
        "most": epochs,
    }
    ends = [each["end"] for each in found["pieces"]]
    assert len(ends) == min(pieces, 6 * epochs)
    assert ends[-1] == 6 * epochs
    for start, each in zip([0, *ends], found["pieces"], strict=False):
        here = sequence[start : each["end"]]
        assert each["granularity"]["fine"] == pytest.approx(
            np.mean(SIX.columns["granularity"][here] == 0)
        )
        assert each["difficulty"]["90%"] == pytest.approx(
            np.quantile(SIX.columns["difficulty"][here], 0.9)
        )
        assert each["tars_here"] == len(set(SIX.columns["tar"][here]))
        assert each["tars_seen"] == len(set(SIX.columns["tar"][sequence[: each["end"]]]))


def test_an_order_worked_out_lazily_is_looked_at_whole():
    visits = {"never": 0, "once": 6, "more": 0, "most": 1}
    assert sampler_stats.describe(SIX, LazyShuffle())["visits"] == visits


def test_what_cannot_be_described_is_one_line():
    with error_line(r"^--epochs must be at least 1 .got 0.$"):
        sampler_stats.describe(SIX, Random(), epochs=0)
    none = SampleTable(0, {name: column[:0] for name, column in SIX.columns.items()})
    with error_line(r"^there are no items to sample"):
        sampler_stats.describe(none, Random())
    with error_line(r"^the sampler's order has no positions"):
        sampler_stats.describe(SIX, Fixed(()))


def test_the_table_says_the_numbers():
    lines = sampler_stats.table(
        sampler_stats.describe(SIX, Fixed((0, 0, 3, 2)), epochs=2, pieces=4)
    ).splitlines()
    assert lines[0].startswith("6 items, 4 positions an epoch; 2 epochs; an order is made in ")
    assert lines[1] == "items visited: 3 never, 0 once, 3 more often, the most visited 4 x"
    assert lines[2] == "tars visited: 2 of 3, at most 1 in one of 4 pieces of about 2"
    assert lines[5].split() == "data 33.3% 33.3% 33.3% 0.150 0.350 0.550".split()
    assert lines[6].split() == "first piece 100.0% 0.0% 0.0% 0.100 0.100 0.100".split()
    assert lines[8].split()[:5] == "last piece 50.0% 0.0% 50.0%".split()


@pytest.mark.slow
def test_the_verb_takes_a_sampler_with_its_fields(scenes, tmp_path, capsys):
    streamed = f"stats {scenes} --sampler streamed --sampler.buffer 3 --epochs 2"
    invoke(streamed, f"--json {tmp_path}/said.json --items mask --picture {tmp_path}/sampler.png")
    assert "positions an epoch; 2 epochs; an order is made in " in capsys.readouterr().out
    with Image.open(tmp_path / "sampler.png") as picture:
        assert picture.size[0] == 1600
    (tmp_path / "known.csv").write_text(
        "name,domain\n"
        + "".join(f"sa_{number},{'indoor' if number < 3 else 'street'}\n" for number in range(12))
    )
    known = f"--sampler.attributes domain --attributes {tmp_path}/known.csv"
    invoke(f"stats {scenes} --sampler multi_attribute", known)
    # Three are indoors and nine in streets; of both kinds six are drawn.
    assert "items visited: 3 never, 6 once, 3 more often" in capsys.readouterr().out
    cases = {
        "--sampler streamd": "--sampler 'streamd' is unknown; choose from random",
        "--sampler streamed --sampler.lane 2": "perhaps you meant --sampler.lanes",
        "--sampler.lanes 2": "--sampler.lanes",
        "--sampler random --epochs 0": "--epochs must be at least 1 (got 0)",
    }
    for flags, message in cases.items():
        assert message in refusal(capsys, f"stats {scenes}", flags)


@dataclass(frozen=True)
class Outside(Sampler):
    """Starts at an item that no table has."""

    def order(self, table, epoch, history):
        return np.arange(table.count) - 1


def test_an_order_of_items_that_are_not_in_the_table_is_refused():
    with error_line(r"^Outside: an order must hold integers from 0 to 5"):
        sampler_stats.describe(SIX, Outside())

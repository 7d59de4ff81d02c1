"""What samplers draw, asked from a page: it is their order, and no file is loaded because a page names it."""

import pytest

from gigamask.faults import Fault
from gigamask.serve.studio import Unknown


@pytest.mark.parametrize("sampler", ["random", "curriculum", "stratified_granularity", "loss_weighted", "replay"])
def test_what_a_sampler_draws_is_its_order(orders, sampler):
    whole = orders.drawn(sampler, 1, 0, 200, seed=5)
    part = orders.drawn(sampler, 1, 2, 3, seed=5)
    assert part["positions"] == whole["positions"] == len(whole["images"])
    assert part["images"] == whole["images"][2:5]
    assert orders.drawn(sampler, 1, 10**9, 3, seed=5)["position"] == whole["positions"] - 1


def test_a_samplers_exposure_is_told_in_pieces(orders):
    told = orders.exposed("random", 0)
    assert told["positions"] == 12
    assert len(told["pieces"]) == 5
    assert told["pieces"][-1]["end"] == 12


def test_samplers_that_want_more_than_an_index_say_so(orders):
    with pytest.raises(Fault, match="column"):
        orders.drawn("relevance_diversity", 0, 0, 3, 0)


def test_no_file_is_loaded_because_a_page_names_it(orders, tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    with pytest.raises(Unknown, match="no sampler"):
        orders.drawn(f"{tmp_path / 'mine.py'}:Mine", 0, 0, 3, 0)
    assert not (tmp_path / "loaded").exists()

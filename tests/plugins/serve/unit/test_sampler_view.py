"""The page shows a sampler's own order, and loads no file that a request names."""

import pytest

from gigamask.plugins.serve.open_images import NotFoundError
from gigamask.plugins.serve.sampler_view import SamplerView


@pytest.fixture
def samplers(index):
    return SamplerView(index)


@pytest.mark.parametrize(
    "sampler",
    "random curriculum stratified_granularity loss_weighted replay relevance_diversity".split(),
)
def test_what_a_sampler_draws_is_its_order(samplers, sampler):
    whole = samplers.images(sampler, 1, 0, 200, seed=5)
    part = samplers.images(sampler, 1, 2, 3, seed=5)
    assert part["positions"] == whole["positions"] == len(whole["images"])
    assert part["images"] == whole["images"][2:5]
    assert samplers.images(sampler, 1, 10**9, 3, seed=5)["position"] == whole["positions"] - 1


def test_sampler_exposure_is_sent_in_chunks(samplers):
    told = samplers.statistics("random", 0)
    assert told["positions"] == 12
    assert len(told["pieces"]) == 5
    assert told["pieces"][-1]["end"] == 12


def test_no_file_is_loaded_because_a_page_names_it(samplers, tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    with pytest.raises(NotFoundError, match="no sampler"):
        samplers.images(f"{tmp_path / 'mine.py'}:Mine", 0, 0, 3, 0)
    assert not (tmp_path / "loaded").exists()

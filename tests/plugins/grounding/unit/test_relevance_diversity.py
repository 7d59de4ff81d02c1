"""The sampler `relevance_diversity` on queries."""

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import open_sample_table
from gigamask.interfaces import SampleTable
from gigamask.plugins.grounding import described_scenes
from gigamask.plugins.grounding.data import open_queries
from tests.errors import error_line
from tests.orders import listed
from tests.unit.samplers.test_stratified import Relevance


@pytest.mark.slow
def test_it_orders_queries_and_says_what_other_items_lack(tmp_path):
    index = indexes.build(described_scenes.write(tmp_path, 6)[0], tmp_path / "index")
    found = open_queries(index, described_scenes.queries.read(tmp_path / "queries.jsonl"))
    order = listed(Relevance().order(found.items, 0, None))
    columns = found.items.columns
    met = np.unique(
        np.stack([columns[name][order] for name in ("granularity", "complexity", "domain")]),
        axis=1,
        return_counts=True,
    )[1]
    assert len(set(met.tolist())) == 1
    assert {0, 1, 2} <= set(columns["complexity"].tolist())
    images = open_sample_table(index, MaskFilters(), with_masks=False).items
    told = r"^the items have no column 'granularity'; choose one of tar, masks, .*, domain, or "
    for ask in (lambda: Relevance().order(images, 0, None), lambda: Relevance().strata(images)):
        with error_line(told):
            ask()
    with error_line(r"^Stratified needs the column 'granularity'"):
        listed(Relevance().order(SampleTable(3, {}), 0, None))

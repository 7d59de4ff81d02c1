"""Queries of every kind alike."""

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data.choose import Filters
from gigamask.data.items import open_items
from gigamask.faults import Fault
from gigamask.grounding.data import open_queries
from gigamask.prepare import describable
from gigamask.samplers.relevance import RelevanceDiversity
from gigamask.seams import Items


def mixed(count=400, seed=0):
    generator = np.random.default_rng(seed)
    columns = {
        name: generator.choice(len(odds), count, p=odds) for name, odds in {"granularity": (0.7, 0.2, 0.1), "complexity": (0.6, 0.3, 0.1)}.items()
    }
    return Items(count, columns | {"domain": (generator.random(count) < 0.1).astype(np.int32)}, seed)


def cells(items):
    return items.columns["granularity"] * 6 + items.columns["complexity"] * 2 + items.columns["domain"]


@pytest.mark.parametrize("number", [None, 1, 7])
def test_every_cell_is_met_equally_often(number):
    items = mixed()
    there = np.unique(cells(items))
    assert len(there) > 12
    order = RelevanceDiversity(number).order(items, 2, None)
    assert set(np.bincount(cells(items)[order])[there].tolist()) == {number or 400 // len(there)}


def test_strata_are_the_cells():
    strata = RelevanceDiversity().strata(mixed())
    assert len({*zip(strata.tolist(), cells(mixed()).tolist(), strict=True)}) == strata.max() + 1 == len(np.unique(cells(mixed())))


def test_it_orders_queries_and_says_what_other_items_lack(tmp_path):
    index = indexes.build(describable.write(tmp_path, 6)[0], tmp_path / "index")
    found = open_queries(index, describable.queries.read(tmp_path / "queries.jsonl"))
    order = RelevanceDiversity().order(found.items, 0, None)
    columns = found.items.columns
    met = np.unique(np.stack([columns[name][order] for name in ("granularity", "complexity", "domain")]), axis=1, return_counts=True)[1]
    assert len(set(met.tolist())) == 1
    assert {0, 1, 2} <= set(columns["complexity"].tolist())
    images = open_items(index, Filters()).items
    told = r"^the items have no column 'complexity'; choose one of tar, masks, .*, difficulty, or add it to the table of attributes$"
    for ask in (lambda: RelevanceDiversity().order(images, 0, None), lambda: RelevanceDiversity().strata(images)):
        with pytest.raises(Fault, match=told):
            ask()
    with pytest.raises(Fault, match="the relevance diversity order reads the column 'granularity', which the items lack"):
        RelevanceDiversity().order(Items(3, {}), 0, None)


def test_fields_have_limits():
    with pytest.raises(Fault, match="the relevance diversity order's per_cell is 0, it must be at least 1; give another value"):
        RelevanceDiversity(0)

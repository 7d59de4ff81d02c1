"""Indexes of images with queries."""

import pytest

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.plugins.grounding import queries
from gigamask.plugins.grounding.data import open_queries
from tests.plugins.grounding.asked import run_in
from tests.plugins.grounding.texts import KINDS, write
from tests.plugins.grounding.unit.test_data import pair


@pytest.fixture(scope="module")
def index(described, tmp_path_factory):
    return indexes.open_or_build([str(described / "scenes")], str(tmp_path_factory.mktemp("index")))


@pytest.fixture(scope="module")
def dataset(described, index):
    return open_queries(index, queries.read(described / "scenes" / "queries.jsonl"))


@pytest.fixture
def run(tmp_path, described):
    return run_in(tmp_path / "run", described)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Those of the text models of all kinds."""
    return {kind: write(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture
def small(tmp_path):
    """Three images of 10 x 100 pixels, whose masks differ in size."""
    tar.write(
        tmp_path / "a.tar", [*pair(0, [10, 200, 600]), *pair(1, [12, 190, 900]), *pair(2, [])]
    )
    return indexes.build([tmp_path], tmp_path / "index")

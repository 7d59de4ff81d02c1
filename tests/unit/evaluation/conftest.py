"""An index of scenes."""

import pytest

from gigamask.data.index import build


@pytest.fixture(scope="module")
def index(scenes, tmp_path_factory):
    return build(scenes, tmp_path_factory.mktemp("index") / "index")

"""Data of plugins' tests."""

import dataclasses
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `scenes` with queries about them, `segmenter.safetensors` untrained, and a `text`
    model of random weights; see `tests.plugins.grounding.asked`."""
    from gigamask.models.init import build_model
    from gigamask.models.state_dict import save_weights, to_official
    from gigamask.plugins.grounding import described_scenes
    from tests import little
    from tests.plugins.grounding import texts

    folder = tmp_path_factory.mktemp("described")
    described_scenes.write(folder / "scenes", 6, seed=3)
    spec = dataclasses.replace(little.SPEC, custom_init=True)
    save_weights(to_official(build_model(spec, 0)), spec, folder / "segmenter.safetensors")
    texts.write("bert", folder / "text")
    return folder

"""The plugin of docs/extend.md, installed as a package: its reader and its exporter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.models.init import build_model
from gigamask.synthetic.scenes import compose_scene
from tests.journeys.pages import DOCS, ROOT
from tests.little import SPEC

FILE = re.compile(r"```\w+\n# (gigamask-npz/\S+)\n(.*?)```", re.DOTALL)
MAIN = "import sys; from gigamask.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder that the package is installed into."""
    folder = tmp_path_factory.mktemp("plugin")
    files = dict(FILE.findall((DOCS / "extend.md").read_text()))
    assert sum(text.strip().count("\n") for text in files.values()) < 65
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = "install --quiet --no-deps --no-index --no-build-isolation --target".split()
    command = [sys.executable, "-m", "pip", *words, str(folder / "site")]
    subprocess.run([*command, str(folder / "gigamask-npz")], check=True)
    return folder / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )


def test_its_reader_reads_masks_of_numpy(site, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "masks").mkdir()
    scene = compose_scene(1, 0, (96, 128))
    masks = scene.masks.to_dense()
    np.savez(tmp_path / "masks/7.npz", masks=masks)
    np.savez(tmp_path / "masks/8.npz", masks=masks)
    np.save(tmp_path / "photos/7.npy", scene.pixels)
    done = run(
        site,
        *("convert", str(tmp_path / "masks"), "--images", str(tmp_path / "photos")),
        *("--out", str(tmp_path / "shards"), "--json", str(tmp_path / "done.json")),
    )
    assert done.returncode == 0, done.stderr
    left_out = json.loads((tmp_path / "done.json").read_text())
    assert "8.npz" in json.dumps(left_out)
    _, annotation = Sa1bDataset(indexes.build(tmp_path / "shards", tmp_path / "index"))[0]
    assert np.array_equal(annotation.masks.to_dense(), masks)


def test_its_exporter_writes_weights(site, tmp_path):
    from gigamask.models import state_dict

    model = build_model(SPEC, 0)
    state = state_dict.to_official(model)
    state_dict.save_weights(state, SPEC, tmp_path / "model.safetensors")
    words = ("export", str(tmp_path / "model.safetensors"), "--to", "npz")
    done = run(site, *words, "--out", str(tmp_path / "model.npz"))
    assert done.returncode == 0, done.stderr
    stored = np.load(tmp_path / "model.npz")
    assert set(stored.files) == set(state)
    assert all(np.array_equal(stored[name], state[name].numpy()) for name in state)


def test_without_it_there_is_neither(tmp_path):
    done = run(tmp_path, "export", "starter", "--to", "npz", "--out", str(tmp_path / "a.npz"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)

"""The notebooks of the documentation run from beginning to end, and hold what they draw."""

import base64
import io

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from docs.run_notebooks import FOLDER, WIDTH, digest

FEWEST = {"finetune": "2", "photographs": "6", "training_step": "4"}
"""Scenes from which each can draw its pictures."""
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = {"finetune": 1, "photographs": 2, "training_step": 3}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("SCENES", FEWEST[path.stem])
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = sum("image/png" in output.get("data", ()) for output in outputs)
    assert pictures == PICTURES[path.stem]
    assert path.stem != "photographs" or "clicks" in outputs[-1]["data"]["text/plain"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_of_the_code_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["code_digest"] == digest(notebook), "run python -m docs.run_notebooks"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == PICTURES[path.stem]
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as shown:
            assert shown.width <= WIDTH
    assert path.stat().st_size < 700_000

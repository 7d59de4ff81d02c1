"""The notebooks of the documentation run from beginning to end."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
FEWEST = {"finetune": "2", "photographs": "6", "training_step": "4"}
"""Scenes from which each can draw its pictures."""
PICTURES = {"finetune": 1, "photographs": 2, "training_step": 3}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
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
    assert not [cell for cell in nbformat.read(path, as_version=4).cells if cell.get("outputs")]

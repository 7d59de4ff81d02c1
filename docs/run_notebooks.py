"""Run the notebooks and store their outputs in them: `python -m docs.run_notebooks [NAME ...]`.

A web view of the repository then shows their pictures, without a kernel. It takes about ten minutes
on two idle cores. Each notebook records a digest of its code, by which a test finds old outputs.
"""

import base64
import hashlib
import io
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).parent / "notebooks"
WIDTH = 800
"""Largest width of a stored picture in pixels."""


def digest(notebook: NotebookNode) -> str:
    """Return a digest of the code of a notebook."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\0".join(code).encode()).hexdigest()[:16]


def small_png(encoded: str) -> str:
    """Return a PNG in base64 in at most `WIDTH` pixels of width and 128 colors."""
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
        shown = picture.convert("RGB")
    shown.thumbnail((WIDTH, 10 * WIDTH))
    stored = io.BytesIO()
    shown.quantize(128).save(stored, "png", optimize=True)
    return base64.b64encode(stored.getvalue()).decode()


def is_kept(output: NotebookNode) -> bool:
    """Return whether an output is a result, a print or a picture."""
    if output.output_type == "display_data":
        return "image/png" in output.data
    return output.get("name") != "stderr"


def run(path: Path) -> None:
    """Run a notebook in an empty folder, and store its results, prints and pictures.

    Args:
        path: The notebook.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, kernel_name="python3").execute(cwd=folder)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.metadata = NotebookNode()
        # Others show progress, and warnings with paths of the machine.
        cell.outputs = [output for output in cell.outputs if is_kept(output)]
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = None
            if "image/png" in (data := output.get("data", {})):
                data["image/png"] = small_png(data["image/png"])
    notebook.metadata["code_digest"] = digest(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
    for each in sorted(FOLDER.glob("*.ipynb")):
        if each.stem in sys.argv[1:] or not sys.argv[1:]:
            print(each.name, flush=True)
            run(each)

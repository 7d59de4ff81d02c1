"""What runs on a GPU gives the CPU's numbers, mixes no tensors of both, and waits for the GPU once
a step, on a GPU that is not there (`tests/absent_gpu.py`).

A module of tests has the cases, `CASES`, and a fixture `results` of `run_cases`.
"""

import json
import subprocess
import sys
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.absent_gpu import DeviceError, absent_gpu


class Data(NamedTuple):
    """The folders of the fixtures of these names."""

    scenes: Path
    described: Path


def losses(folder: Path) -> list[float]:
    """Return the losses of all steps of the runs in a folder."""
    records = [
        json.loads(line)
        for path in sorted(folder.rglob("metrics.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [each["loss"] for each in records if "loss" in each]


COPYING = """state checkpoint config embedding_cache mask_features text_features
text_models""".split()
"""Modules that copy to and from the GPU besides the steps: models, what is saved, features."""


def run_all(module: str, scenes: str, described: str, out: str, kind: str) -> None:
    """Write what each case returned, or its error, and where it waited to results.json."""
    data, folder, results = Data(Path(scenes), Path(described)), Path(out), {}
    with absent_gpu(kind) as gpu:
        cases = import_module(module)
        for name in cases.ON_MPS if kind == "mps" else cases.CASES:
            case = cases.CASES[name]
            try:
                gpu.waits.clear()
                gpu.operators = 0
                results[name] = {"numbers": case(data, folder / name, kind)}
                results[name]["waits"] = dict(Counter(gpu.waits))
                results[name]["operators"] = gpu.operators
            except Exception:
                results[name] = {"error": traceback.format_exc()}
        try:
            torch.zeros(2, device=kind) + torch.zeros(2)
        except DeviceError:
            results["mixed"] = "refused"
    (folder / "results.json").write_text(json.dumps(results))


def run_cases(module: str, data: Data, folder: Path, kind: str = "cuda") -> dict[str, Any]:
    """Run the cases of a module in a process of their own, and return what each returned.

    Args:
        module: Name of the module.
        data: What the cases read.
        folder: Where they write.
        kind: Kind of the GPU, "cuda" or "mps"; the latter runs those in `ON_MPS` alone.
    """
    code = "import sys; from tests.on_absent_gpu import run_all; run_all(*sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", code, module, *map(str, (*data, folder)), kind], check=True
    )
    return json.loads((folder / "results.json").read_text())


def check_numbers(found: dict[str, Any], expected: list[float], rel: float = 1e-4) -> None:
    """Check what a case returned on the GPU by what it returned on the CPU."""
    assert "error" not in found, found["error"]
    assert expected
    assert found["numbers"] == pytest.approx(expected, rel=rel)


def check_waits(found: dict[str, Any]) -> None:
    """Check that each step of a training waited once, for its packed results."""
    waits = Counter()
    for line, count in found["waits"].items():
        waits[line.partition(":")[0]] += count
    for module in COPYING:
        del waits[module]
    assert waits == {"step": len(found["numbers"])}

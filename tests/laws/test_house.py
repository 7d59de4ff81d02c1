"""Laws of the house: imports go down, and nothing grows past its cap."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "gigamask").rglob("*.py"))
# What may be larger than the cap, and why.
EXCEPTIONS = {
    "gigamask/geometry/runs.py:Runs": "one value with the operations of masks: strings and pixels in and out, measures, resampling",
}


def test_the_import_contract_is_kept():
    done = subprocess.run([Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_caps():
    """Files have at most 400 lines, functions 60 and 8 parameters, classes 10 methods."""
    over = []
    for path in SOURCES:
        source, name = path.read_text(), str(path.relative_to(ROOT))
        if source.count("\n") > 400:
            over.append(f"{name}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args
                count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - bool(
                    arguments.args and arguments.args[0].arg in ("self", "cls")
                )
                if count > 8:
                    over.append(f"{name}:{node.name}: {count} parameters")
                if node.end_lineno - node.lineno + 1 > 60:
                    over.append(f"{name}:{node.name}: {node.end_lineno - node.lineno + 1} lines")
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef) and not each.name.startswith("__") for each in node.body)
                if methods > 10:
                    over.append(f"{name}:{node.name}: {methods} methods")
    assert [each for each in over if each.rsplit(":", 1)[0] not in EXCEPTIONS] == []


def test_every_room_has_a_noun():
    banned = {"util", "utils", "misc", "helper", "helpers", "common", "base", "core", "manager"}
    assert [str(path) for path in SOURCES if path.stem in banned or path.parent.name in banned] == []


def test_every_module_says_what_it_is():
    assert [str(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))] == []

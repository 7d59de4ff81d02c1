"""The core needs no plugin: trainings import none, and each may be deleted."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gigamask import plugin

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "gigamask" / "plugins").glob("*/__init__.py"))
MODULES = 129
"""Most modules of the core that one step of `tiny` imports; it may only fall."""
STEP = """
import json, sys
from gigamask.cli.main import main
words = "--steps 1 --batch-size 2 --loader.workers 0 --evaluation none --device cpu".split()
assert main(["train", "tiny", "--data", sys.argv[1], "--out", sys.argv[2], *words]) == 0
print(json.dumps([name for name in sys.modules if f"{name}.".startswith("gigamask.")]))
"""
MAIN = "import sys; from gigamask.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run(code: str, *words: str, package: Path = ROOT) -> str:
    """Run code in a new process, with the package of a folder; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=package,
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_imports_no_plugin(scenes, tmp_path):
    names = set(json.loads(run(STEP, str(scenes), str(tmp_path / "run")).splitlines()[-1]))
    added = {name for name in names if name.startswith("gigamask.plugins")}
    records = {"gigamask.plugins", *(f"gigamask.plugins.{name}" for name in NAMES)}
    flags = {f"gigamask.plugins.cluster.{name}" for name in ("launchers", "submission")}
    assert added <= records | flags
    assert len(names - added) <= MODULES


def test_every_reference_names_something():
    found = [each for record in plugin.installed() for each in plugin.references(record)]
    assert len(found) > 40
    for each in found:
        plugin.load(each)


def test_the_tests_of_the_core_import_no_plugin():
    imported = re.compile(r"^ *(from|import) (gigamask|tests)\.plugins\.\w", re.M)
    tests = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")}
    found = {str(path) for path in tests if imported.search((ROOT / path).read_text())}
    assert not {each for each in found if not each.startswith("tests/plugins/")}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_may_be_deleted(scenes, tmp_path, name):
    """What it adds is gone from the help, and all else works; no module of the rest needs it."""
    for folder in ("gigamask", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / folder).is_dir() else shutil.copy
        copy(ROOT / folder, tmp_path / folder)
    shutil.rmtree(tmp_path / "gigamask" / "plugins" / name)
    (record,) = (each for each in plugin.installed() if each.name == name)
    lines = run(MAIN, "--help", package=tmp_path).splitlines()
    commands = {line.split()[0] for line in lines if line.startswith("  ")}
    assert "train" in commands
    assert not commands & {*record.commands, *record.trainings}
    shown = "".join(run(MAIN, command, "--help", package=tmp_path) for command in sorted(commands))
    for recipes in record.recipes.values():
        assert not any(f"  {recipe} " in shown for recipe in recipes)
    assert not any(name in shown for name in (*record.readers, *record.writers))
    run(STEP, str(scenes), str(tmp_path / "run"), package=tmp_path)
    checked = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout

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
from gigamask.suggestions import OF_PLUGINS

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "gigamask" / "plugins").glob("*/__init__.py"))
MODULES = 120
"""Most modules of the core that one step of `tiny` imports; it may only fall."""
STEP = """
import json, sys
from gigamask.cli.main import main
words = "--steps 1 --batch-size 2 --loader.workers 0 --evaluation none --device cpu".split()
words += ["--data", sys.argv[1], "--out", sys.argv[2], *sys.argv[3:]]
assert main(["train", "tiny", *words]) == 0
print(json.dumps([name for name in sys.modules if f"{name}.".startswith("gigamask.")]))
"""
SMALL = ("--model.image-size", "64", "--prompts.clicks", "0", "--micro-batch-size", "1")
HELP = """
import io, json
from contextlib import redirect_stdout, suppress
from gigamask.cli.main import main

def shown(*words):
    with redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()

lines = [line for line in shown().splitlines() if line.startswith("  ")]
print(json.dumps({name: shown(name) for name in (line.split()[0] for line in lines)}), flush=True)
"""


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
@pytest.mark.parametrize("names", [NAMES, *([name] for name in NAMES)], ids="+".join)
def test_plugins_may_be_deleted(scenes, tmp_path, names):
    """What they add is gone from the help, and the core trains without any.

    No module of the rest needs them: the import contract, which names no plugin, forbids that.
    """
    checked = shutil.ignore_patterns("*jaxtyping*", *names)  # bytecode of this process
    shutil.copytree(ROOT / "gigamask", tmp_path / "gigamask", ignore=checked)
    words = HELP + STEP * (names == NAMES), str(scenes), str(tmp_path / "run"), *SMALL
    out = run(*words, package=tmp_path)
    shown = json.loads(out.splitlines()[0])
    assert "train" in shown
    everything = "".join(shown.values())
    for record in (each for each in plugin.installed() if each.name in names):
        added = {*record.commands, *record.trainings}
        assert not shown.keys() & added
        assert {OF_PLUGINS[command.split()[0]] for command in added} <= {record.name}
        for recipes in record.recipes.values():
            assert not any(f"  {recipe} " in everything for recipe in recipes)
        named = (*record.readers, *record.writers, *record.scenes)
        assert not any(each in everything for each in named)

"""An installed package's record of what it adds is found, and a broken one does no harm."""

import subprocess
import sys
from pathlib import Path

import pytest

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.plugin import Plugin

PACKAGE = """
from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="shouting",
    commands={"shout": "shouting.command:ShoutCommand"},
    recipes={"train": {"loud": "shouting.recipe:loud"}},
    components={
        "sampler": {"backwards": "shouting.sampler:Backwards", "loud": "shouting.recipe:loud"}
    },
)
"""
COMMAND = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class ShoutCommand:
    """say a word loudly"""

    word: str = "gigamask"
    """the word"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self):
        print(self.word.upper())
        return {}
'''
RECIPE = '''
from dataclasses import replace

from gigamask.recipes.sam import tiny


def loud():
    """Train as `tiny` does."""
    return replace(tiny(), recipe="loud")
'''
SAMPLER = '''
from dataclasses import dataclass

from gigamask.samplers.random import Random


@dataclass(frozen=True)
class Backwards(Random):
    """Visit the items of `Random` from the last to the first."""

    def order(self, items, epoch, history):
        return super().order(items, epoch, history)[::-1]
'''


def install(folder: Path, name: str, record: str, **modules: str) -> None:
    """Write a package with a plugin's record into a folder as if it were installed there."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(record)
    for module, text in modules.items():
        (folder / name / f"{module}.py").write_text(text)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[gigamask.plugins]\n{name} = {name}:PLUGIN\n")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess:
    code = "import sys; from gigamask.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", "PATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_stranger_s_package_adds_a_command_a_recipe_and_a_component(tmp_path):
    install(tmp_path, "shouting", PACKAGE, command=COMMAND, recipe=RECIPE, sampler=SAMPLER)
    assert "  shout     say a word loudly\n" in run(tmp_path, "--help").stdout
    assert run(tmp_path, "shout", "--word", "hello").stdout == "HELLO\n"
    assert "  loud            Train as `tiny` does.\n" in run(tmp_path, "train", "--help").stdout
    words = ["train", "loud", "--sampler", "backwards", "--print-config"]
    lines = run(tmp_path, *words).stdout.splitlines()
    assert {"recipe: loud", "  class: backwards"} <= set(lines)
    refused = run(tmp_path, "train", "loud", "--sampler", "loud", "--print-config")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "no frozen dataclass 'loud' that is a gigamask.interfaces.Sampler" in refused.stderr
    refused = run(tmp_path, "train", "laud")
    assert (refused.returncode, "perhaps you meant loud" in refused.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("record", ["import gone", "1 / 0", "PLUGINS = ()", "PLUGIN = None"])
def test_a_broken_plugin_is_named_and_left_out(tmp_path, record):
    install(tmp_path, "broken", record)
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "plugin broken = broken:PLUGIN raised" in done.stderr


def test_a_plugin_whose_folder_was_deleted_is_no_fault(tmp_path):
    install(tmp_path, "gone", "PLUGIN = None")
    (tmp_path / "gone" / "__init__.py").unlink()
    (tmp_path / "gone").rmdir()
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_names_of_all_plugins_are_merged_and_two_of_one_name_are_refused(monkeypatch):
    first = Plugin("a", {"x": "a:X"}, recipes={"train": {"r": "a:r"}})
    second = Plugin("b", {"y": "b:Y"}, recipes={"train": {"s": "b:s"}})
    monkeypatch.setattr(plugin, "installed", lambda: (first, second))
    assert plugin.merged("commands") == {"x": "a:X", "y": "b:Y"}
    assert plugin.merged("recipes") == {"train": {"r": "a:r", "s": "b:s"}}
    monkeypatch.setattr(plugin, "installed", lambda: (first, first))
    for what, name in (("commands", "x"), ("recipes", "r")):
        with pytest.raises(GigamaskError, match=f"plugin a adds {name}"):
            plugin.merged(what)


def test_a_docstring_is_read_without_an_import():
    assert plugin.docstring("this:zen") == ""
    assert "this" not in sys.modules
    assert plugin.docstring("gigamask.cli.commands.stats:StatsCommand").startswith("describe")

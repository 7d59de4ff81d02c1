"""An installed package's record of what it adds is found, and a broken one does no harm."""

import subprocess
import sys
from pathlib import Path

import pytest

from gigamask import plugin
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
READER = """
from gigamask.datatools.sources import FileSource

class Table(FileSource):
    @classmethod
    def is_format(cls, annotations, images):
        return any(annotations.glob("*.csv"))

    def listing(self, options, with_annotations=True):
        {}
"""


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
    opening = "shout --word hello: say a word loudly"
    assert run(tmp_path, "shout", "--word", "hello").stdout == f"{opening}\nHELLO\n"
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


@pytest.mark.parametrize("module, lines", [("gigamask.plugins.gone", 0), ("gon", 1)])
def test_only_a_plugin_of_gigamask_may_be_deleted_without_a_word(tmp_path, module, lines):
    install(tmp_path, "gone", "PLUGIN = None")
    points = tmp_path / "gone-1.dist-info" / "entry_points.txt"
    points.write_text(f"[gigamask.plugins]\ngone = {module}:PLUGIN\n")
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr.count("\n")) == (0, lines)
    assert done.stderr.count(f"No module named '{module}'") == lines


def test_names_of_all_plugins_are_merged_and_one_that_is_taken_is_a_warning(monkeypatch):
    first = Plugin("a", {"x": "a:X"}, recipes={"train": {"r": "a:r"}})
    second = Plugin("b", {"y": "b:Y"}, recipes={"train": {"s": "b:s"}})
    third = Plugin("c", {"x": "c:X", "z": "c:Z"}, recipes={"train": {"r": "c:r", "t": "c:t"}})
    monkeypatch.setattr(plugin, "installed", lambda: (first, second))
    assert plugin.merged("commands") == {"x": "a:X", "y": "b:Y"}
    assert plugin.merged("recipes") == {"train": {"r": "a:r", "s": "b:s"}}
    monkeypatch.setattr(plugin, "installed", lambda: (first, second, third))
    with pytest.warns(UserWarning, match="plugin c adds x to commands, which plugin a has"):
        assert plugin.merged("commands") == {"x": "a:X", "y": "b:Y", "z": "c:Z"}
    with pytest.warns(UserWarning, match="plugin c adds r to recipes, which plugin a has"):
        assert plugin.merged("recipes") == {"train": {"r": "a:r", "s": "b:s", "t": "c:t"}}
    with pytest.warns(UserWarning, match="plugin b adds y to commands, which gigamask itself"):
        assert plugin.merged("commands", ["y"]) == {"x": "a:X", "z": "c:Z"}
    with pytest.warns(UserWarning, match="plugin c adds t to recipes, which gigamask itself"):
        left = plugin.merged("recipes", {"train": {"t": "core:t"}})
    assert left == {"train": {"r": "a:r", "s": "b:s"}}


@pytest.mark.slow
def test_a_plugin_cannot_take_a_command_of_the_core(tmp_path):
    record = PACKAGE.replace('"shout":', '"demo":')
    install(tmp_path, "shouting", record, command=COMMAND)
    done = run(tmp_path, "--help")
    assert "  demo      train a small model" in done.stdout
    assert "plugin shouting adds demo to commands, which gigamask itself has" in done.stderr


@pytest.mark.slow
def test_a_reader_that_fails_is_named_and_leaves_others_alone(tmp_path):
    readers = '    readers={"csv": "shouting.csv:Table"},\n    recipes'
    install(tmp_path, "shouting", PACKAGE.replace("    recipes", readers))
    (tmp_path / "photos").mkdir()
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "boxes.csv").write_text("0 0 4 4\n")
    words = ["convert", str(tmp_path / "masks"), "--images", str(tmp_path / "photos")]
    words += ["--out", str(tmp_path / "shards")]
    done = run(tmp_path, *words)
    assert "plugin shouting: shouting.csv:Table raised ModuleNotFoundError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"gigamask: {tmp_path}/masks: ")
    for body, message in (
        ("return []", "shouting.csv:Table.listing must return SourceListing (got list)"),
        ("return 1 / 0", "Table.listing raised ZeroDivisionError"),
    ):
        (tmp_path / "shouting" / "csv.py").write_text(READER.format(body))
        assert message in run(tmp_path, *words).stderr.splitlines()[0]


def test_a_docstring_is_read_without_an_import():
    assert plugin.docstring("this:zen") == ""
    assert "this" not in sys.modules
    assert plugin.docstring("gigamask.cli.commands.stats:StatsCommand").startswith("describe")

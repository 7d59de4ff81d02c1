"""The docs are true: commands and code run, links work, the reference and the tree are complete."""

import argparse
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from docs.site_hooks import without_deleted
from gigamask import plugin, recipes
from gigamask.cli import main
from tests.forked import forked  # noqa: F401 (a fixture)
from tests.journeys import doc_fixtures
from tests.journeys.pages import DOCS, PAGES, PLUGINS, ROOT, Item, benchmarks, items
from tests.journeys.substitutions import everywhere, small, small_python
from tests.servers import FileServer, Hub, ObjectStore
from tests.tiers import long_after

FIRST_PAGES = ["README.md", "docs/own_data.md", "docs/tour.md"]
PAGES_WITH_ITEMS = FIRST_PAGES + [page for page in PAGES if items(page) and page not in FIRST_PAGES]
SEPARATE_SECTIONS = "docs/measurements/"
"""Pages whose sections are separate experiments, each of which starts from the same folder."""


@pytest.fixture(scope="session")
def populated(tmp_path_factory) -> Path:
    """A folder that is copied; of several processes of tests, the first makes it."""
    folder = tmp_path_factory.mktemp("populated")
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp().parent / "populated"
    with FileLock(f"{folder}.lock"):
        if not (done := folder.with_suffix(".done")).exists():
            folder.mkdir(exist_ok=True)
            doc_fixtures.populate(folder)
            done.touch()
    return folder


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("page", long_after(len(FIRST_PAGES), PAGES_WITH_ITEMS))
def test_every_command_of_a_page_runs(page, populated, tmp_path, monkeypatch):
    """In order, in a folder with the page's paths; `substitutions` makes them small."""
    sections: dict[str, list[Item]] = {}
    for item in items(page):
        heading = item.heading if page.startswith(SEPARATE_SECTIONS) else ""
        sections.setdefault(heading, []).append(item)
    for number, section in enumerate(sections.values()):
        folder = tmp_path / str(number)
        shutil.copytree(populated, folder)
        commands = [gigamask_words(item.text) for item in section if item.kind == "command"]
        doc_fixtures.remove_outputs(folder, commands)
        monkeypatch.chdir(folder)
        variables: dict = {}
        with ExitStack() as stack:
            start_servers(folder, " ".join(item.text for item in section), stack)
            for item in section:
                try:
                    run_item(item, variables)
                except BaseException as error:
                    error.add_note(f"{page}:{item.line}: {item.text}")
                    raise


def start_servers(folder: Path, text: str, stack: ExitStack) -> None:
    """Start the servers that a page's commands need."""
    tars = sorted((folder / "disk/sa1b").glob("*.tar"))
    if "links.txt" in text:
        server = stack.enter_context(FileServer(folder / "disk/sa1b"))
        links = [f"{path.name}\t{server.url}/{path.name}\n" for path in tars]
        (folder / "links.txt").write_text("file_name\tcdn_link\n" + "".join(links))
    if "s3://bucket/" in text:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(ObjectStore, "bucket", "bucket")
        objects = stack.enter_context(ObjectStore())
        for path in tars:
            objects.put(path, f"sa1b/{path.name}")
    if "hf://ORG/NAME" in text:
        shutil.copytree(folder / "disk/sa1b", folder / "hub/datasets/ORG/NAME/main")
        stack.enter_context(Hub(folder / "hub"))
    if "hf://ORG/CELLS" in text:
        for split in ("train", "test"):
            path = folder / f"hub/datasets/ORG/CELLS/main/data/{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "cells.parquet", path)
        stack.enter_context(Hub(folder / "hub"))


def run_item(item: Item, variables: dict) -> None:
    """Run one item as a user does; Python code of a page shares its variables."""
    if item.kind == "script":
        subprocess.run(["bash", "-n"], input=item.text, text=True, check=True)
    elif item.kind == "command":
        run_command(item.text)
    elif not re.match(r"# [\w/-]+\.py\n", item.text):  # else a file of the user's, already written
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(small_python(item.text), item.heading, "exec"), variables)


def gigamask_words(text: str) -> str:
    """Return what follows `gigamask` in a command, or an empty string."""
    return text.partition("gigamask ")[2] if "gigamask " in text else ""


def run_command(text: str) -> None:
    """Run a command of gigamask in this process; check that what other commands name exists."""
    words = shlex.split(text)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    program = words.pop(0)
    if program == "srun":
        program = words.pop(0)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(words) <= targets, text
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        package = r"(?:\./)?gigamask(?:\[([\w,]+)\])?|build"
        named = [re.fullmatch(package, word) for word in words[1:]]
        assert words[0] == "install", text
        assert all(named), text
        extras = {extra for match in named for extra in (match[1] or "").split(",")} - {""}
        assert extras <= project["optional-dependencies"].keys(), text
    elif program.startswith("python"):
        assert words[0] == "-m", text
        assert importlib.util.find_spec(words[1]), text
    elif program in ("gigamask", "torchrun"):
        if program == "torchrun":
            from torch.distributed.run import get_args_parser

            arguments = get_args_parser().parse_args(words)
            assert (arguments.no_python, arguments.training_script) == (True, "gigamask"), text
        run_gigamask(gigamask_words(text))
    else:
        assert program in ("source", "export"), f"no test for this program: {text}"


def run_gigamask(words: str) -> None:
    """Run the small form of a command."""
    arguments = small(words)
    try:
        code = main.main(arguments)
    except SystemExit as exit:  # --help
        code = exit.code or 0
    assert code == 0, shlex.join(arguments)


def test_no_substitution_is_left_over():
    """Each matches some command of the pages."""
    found = [item for page in PAGES for item in items(page) if item.kind == "command"]
    commands = [words for item in found if (words := gigamask_words(item.text))]
    for pattern, replacement, _ in everywhere("REPLACED"):
        assert any(re.search(pattern, words) for words in commands), pattern
        commands = [re.sub(pattern, replacement, words) for words in commands]
    for pattern, *_ in everywhere("ADDED"):
        assert any(re.search(pattern, words) for words in commands), pattern


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in benchmarks(page)}))
def test_benchmarks_that_pages_name_take_these_flags(line, monkeypatch):
    """Each is stopped when it has parsed its flags; placeholders for files are not read yet."""
    name, *flags = shlex.split(line)
    if not flags:
        assert importlib.util.find_spec(f"benchmarks.{name}")
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, *arguments):
        parse_args(self, *arguments)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    try:
        program = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("gigamask.plugins."):
            raise
        pytest.skip(f"{error.name}, which it measures, was deleted")
    with pytest.raises(SystemExit) as exit:
        program.main()
    assert exit.value.code == 0


OTHERS = {
    *("help", "version", "print-config", "resume", "config", "torch-backend", "in-channels"),
    *("no-python", "nproc-per-node", "node-rank", "max-restarts", "standalone", "nnodes"),
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id"),
    *("requeue", "container-image", "platform", "project-name", "no-deps", "require-hashes"),
    *("signal", "signals-to-handle", "shutdown-timeout"),
}
"""Flags of torchrun, Slurm, uv, pip and CVAT, and those that are not fields."""


def fields_of(paths: Iterable[Path]) -> set[str]:
    """Return the fields of dataclasses and the flags of parsers, with underscores."""
    source = "".join(path.read_text() for path in paths)
    parsed = re.findall(r'"--([\w-]+)"', source)
    return {*re.findall(r"^ +(\w+): ", source, re.MULTILINE)} | {
        name.replace("-", "_") for name in parsed
    }


def test_flags_that_pages_mention_exist():
    """Also those in prose: each is a field of a component, a command or a configuration.

    Pages of the core mention no flag of a plugin.
    """
    paths = [*(ROOT / "gigamask").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    core = fields_of(path for path in paths if ROOT / "gigamask/plugins" not in path.parents)
    everything = fields_of(paths)
    for page in PAGES:
        fields = everything if page.startswith(PLUGINS) else core
        text = (ROOT / page).read_text()
        flags = {match[1] for match in re.finditer(r"(?<![\w-])--([a-z][\w-]*(?:\.[\w-]+)*)", text)}
        own = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))  # of a component on the page
        names = {
            flag: flag.rpartition(".")[2].replace("-", "_").removeprefix("no_")
            for flag in flags - OTHERS
        }
        assert {flag for flag, name in names.items() if name not in fields | own} == set(), page


LESS_CERTAIN = ("starter", "compact", "photos", "runs/mine")
"""Names on pages of weights with the decoder of `compact`; the others have SAM's."""


def test_thresholds_of_pages_lose_no_mask_that_the_defaults_find():
    """None is above the default of its model's decoder, and lower ones keep more masks."""
    found = []
    for page in PAGES:
        found += [
            (words[2], item.text)
            for item in items(page)
            if (words := item.text.split())[:2] == ["gigamask", "segment"]
        ]
        prose = " ".join((ROOT / page).read_text().split())
        found += re.findall(r"for `(\w+)`, as in `(--[^`]*thresh[^`]*)`", prose)
    states = "--(pred_iou|stability_score)_thresh ([0-9.]+)"
    stated = [
        (recipes.make("compact" if weights in LESS_CERTAIN else "tiny").model.decoder, *state)
        for weights, text in found
        for state in re.findall(states, text.replace("-", "_").replace("__", "--"))
    ]
    assert len(stated) >= 4
    for decoder, name, threshold in stated:
        assert float(threshold) <= getattr(decoder, f"{name}_thresh"), (decoder, name, threshold)


def test_pages_of_the_core_use_no_plugin():
    """So that their commands and code run where any plugin was deleted."""
    words = {"--submit"}
    for record in plugin.installed():
        words |= {*record.commands, *record.trainings, *record.exporters, *record.functions}
        words |= {*record.writers, *record.scenes}
        for names in (*record.recipes.values(), *record.components.values()):
            words |= names.keys()
    words -= {"huggingface", "clutter"}  # also the name of an export, and of a folder
    used = {
        f"{page}:{item.line}: {word}"
        for page in PAGES
        if not page.startswith(PLUGINS)
        for item in items(page)
        for word in re.split(r"[\s:(),]+", item.text)
        if word in words or word.startswith("gigamask.plugins")
    }
    assert used == set()


def test_the_page_of_a_plugin_says_first_what_it_adds():
    """A table of three rows, below the title; the list of plugins names it."""
    listed = (DOCS / "plugins/index.md").read_text()
    pages = sorted((DOCS / "plugins").glob("*/index.md"))
    assert len(pages) == len(list((ROOT / "gigamask/plugins").glob("*/__init__.py")))
    for page in pages:
        name, lines = page.parent.name, page.read_text().splitlines()
        rows = [cells[0] for line in lines[4:7] if (cells := line.strip("| ").split(" | "))]
        assert rows == ["adds", "needs", "missed by"], name
        assert f"[`{name}`]({name}/index.md)" in listed


def test_links_of_the_readme_work():
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    linked = {path.removeprefix("docs/") for path in paths}
    assert linked >= {path.name for path in DOCS.glob("*.md")} - {"index.md"}


def test_the_tree_of_the_readme_is_the_tree():
    """A plugin that was deleted may still be named."""
    tree = re.search(r"```\n(gigamask/ .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    named = [
        name
        for line in tree.splitlines()
        for word in re.match(r" *((?:[\w./]+ )+)", line)[1].split()
        if re.search(r"[/.]", name := word.removeprefix("gigamask/"))
    ]
    inside = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "gigamask").iterdir()
        if path.name[0] != "_" and path.suffix in ("", ".py")
    }
    plugins = (ROOT / "gigamask/plugins").glob("*/__init__.py")
    inside |= {f"plugins/{path.parent.name}/" for path in plugins}
    here = {name for name in named if (ROOT / "gigamask" / name).exists()}
    assert inside <= here, "in the package, not in the README's tree"
    assert [
        name
        for name in named
        if not ((ROOT / name).exists() or (ROOT / "gigamask" / name).exists())
        and not name.startswith("plugins/")
    ] == []


def test_lines_are_short():
    """Except in tables and commands."""
    long = [
        f"{page}:{number}"
        for page in PAGES
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1)
        if len(line) > 120 and not line.startswith(("|", "    "))
    ]
    assert long == []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; broken links and anchors, and pages missing in the nav, are errors."""
    out = tmp_path_factory.mktemp("site")
    command = [
        str(Path(sys.executable).parent / "mkdocs"),
        *f"build --strict --quiet --site-dir {out}".split(),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    build = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    assert build.stdout + build.stderr == ""
    return out


def test_the_pages_stand_without_those_of_plugins(tmp_path):
    """Built without the reference: no link or entry of the navigation leads to a missing page."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    deleted = [page.parent for page in DOCS.glob("plugins/*/index.md")]
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("*.ipynb"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in deleted:
        shutil.rmtree(tmp_path / "docs/plugins" / folder.name)
    config = load_config(
        str(tmp_path / "mkdocs.yml"), plugins=[], site_dir=str(tmp_path / "site"), strict=True
    )
    build(config)
    listed = (tmp_path / "site/plugins/index.html").read_text()
    for folder in deleted:
        assert f"<code>{folder.name}</code>" in listed
        assert f"{folder.name}/index.html" not in listed
        for page in folder.glob("*.md"):
            name = page.relative_to(DOCS).as_posix()
            left = without_deleted(page.read_text(), name, tmp_path / "docs")
            assert not re.findall(r"\]\([./]*/plugins/|\]\(\.\./\w+/index", left), name


@pytest.mark.long
def test_every_module_is_on_a_page_of_the_reference(site):
    body = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split()[0] for line in body.splitlines()}
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "gigamask").rglob("*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert modules - shown == {"gigamask", "gigamask.__main__"}, "neither defines anything"
    from gigamask import interfaces

    parts = [
        name
        for name, kind in vars(interfaces).items()
        if inspect.isclass(kind) and kind.__module__ == interfaces.__name__
    ]
    assert {f"gigamask.interfaces.{name}" for name in parts} <= shown


@pytest.mark.long
def test_the_nav_names_every_page(site):
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"[\w/]+\.md", str(config["nav"]))
    assert len(named) == len(set(named))
    assert all((site / name).with_suffix(".html").is_file() for name in named)

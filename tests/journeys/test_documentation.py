"""The pages are true: every command and every piece of Python in them runs, links lead somewhere, the reference and the tree are whole."""

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
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from gigamask.cli import main
from gigamask.data import storage
from tests.journeys import homes
from tests.journeys.pages import DOCS, PAGES, ROOT, Item, benchmarks, items
from tests.journeys.substitutions import ADDED, REPLACED, small
from tests.servers import FileServer, ObjectStore

COMMANDED = [page for page in PAGES if items(page)]
SECTIONED = ("docs/measurements.md",)
"""Pages whose chapters are experiments of their own, each of which begins with what lies there."""


@pytest.fixture(scope="session")
def furnished(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("furnished")
    homes.furnish(home)
    return home


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.002)


@pytest.mark.parametrize("page", COMMANDED)
def test_every_command_of_a_page_runs(page, furnished, tmp_path, monkeypatch):
    """In their order, in a folder where the page's paths exist; what is written otherwise to be small stands in `substitutions`."""
    chapters: dict[str, list[Item]] = {}
    for item in items(page):
        chapters.setdefault(item.heading if page in SECTIONED else "", []).append(item)
    for number, chapter in enumerate(chapters.values()):
        home = tmp_path / str(number)
        shutil.copytree(furnished, home)
        homes.clear(home, [behind(item.text) for item in chapter if item.kind == "command"])
        monkeypatch.chdir(home)
        held: dict = {}
        with ExitStack() as stack:
            serve(home, " ".join(item.text for item in chapter), stack)
            for item in chapter:
                try:
                    typed(item, held)
                except BaseException as error:
                    error.add_note(f"{page}:{item.line}: {item.text}")
                    raise


def serve(home: Path, text: str, stack: ExitStack) -> None:
    """Starts the servers that a page's commands ask."""
    if "links.txt" in text:
        server = stack.enter_context(FileServer(home / "disk/sa1b"))
        names = sorted(path.name for path in (home / "disk/sa1b").glob("*.tar"))
        (home / "links.txt").write_text(
            "file_name\tcdn_link\n" + "".join(f"{name}\t{server.url}/{name}\n" for name in names)
        )
    if "s3://bucket/" in text:
        stack.enter_context(patched(ObjectStore, "bucket", "bucket"))
        objects = stack.enter_context(ObjectStore())
        for path in (home / "disk/sa1b").glob("*.tar"):
            objects.put(path, f"sa1b/{path.name}")


def patched(owner: type, name: str, value: str) -> ExitStack:
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, value)
    stack = ExitStack()
    stack.callback(patch.undo)
    return stack


def typed(item: Item, held: dict) -> None:
    """Does what a user does with one item."""
    if item.kind == "script":
        subprocess.run(["bash", "-n"], input=item.text, text=True, check=True)
    elif item.kind == "python":
        if not re.match(r"# \w+\.py\n", item.text):  # else a file of the user's, which lies there
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(item.text, item.heading, "exec"), held)
    else:
        command(item.text)


def behind(text: str) -> str:
    """Returns what stands behind `gigamask` in a command, or nothing."""
    return text.partition("gigamask ")[2] if "gigamask " in text else ""


def command(text: str) -> None:
    """Runs a command of gigamask's in this process; of others, looks whether what they name is there."""
    words = shlex.split(text)
    while re.match(r"\w+=", words[0]):
        words.pop(0)
    program = words.pop(0)
    if program == "srun":
        program = words.pop(0)
    if program == "make":
        targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(words) <= targets, text
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        named = [
            re.fullmatch(r"(?:\./)?gigamask(?:\[([\w,]+)\])?|build", word) for word in words[1:]
        ]
        assert words[0] == "install", text
        assert all(named), text
        assert {
            extra for each in named for extra in (each[1] or "").split(",")
        } <= extras.keys() | {""}, text
    elif program.startswith("python"):
        assert words[0] == "-m", text
        assert importlib.util.find_spec(words[1]), text
    elif program in ("gigamask", "torchrun"):
        if program == "torchrun":
            from torch.distributed.run import get_args_parser

            asked = get_args_parser().parse_args(words)
            assert (asked.no_python, asked.training_script) == (True, "gigamask"), text
        gigamask(behind(text))
    else:
        assert program in ("source", "export"), f"nothing says how this is tested: {text}"


def gigamask(words: str) -> None:
    """Runs one command in small."""
    try:
        code = main.main(small(words))
    except SystemExit as leaving:  # --help
        code = leaving.code or 0
    assert code == 0, shlex.join(small(words))


def test_no_substitution_is_left_over():
    """Each is of some command of the pages."""
    typed_as = [
        behind(item.text)
        for page in PAGES
        for item in items(page)
        if item.kind == "command" and behind(item.text)
    ]
    for pattern, instead, _ in REPLACED:
        assert any(re.search(pattern, words) for words in typed_as), pattern
        typed_as = [re.sub(pattern, instead, words) for words in typed_as]
    assert [
        pattern for pattern, *_ in ADDED if not any(re.search(pattern, words) for words in typed_as)
    ] == []


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in benchmarks(page)}))
def test_benchmarks_that_pages_name_take_these_flags(line, monkeypatch):
    """Each is started and left as soon as it has read its flags; placeholders are names of files, which are not read yet."""
    name, *flags = shlex.split(line)
    if not flags:
        assert importlib.util.find_spec(f"benchmarks.{name}")
        return
    read = argparse.ArgumentParser.parse_args

    def parse(self, *given):
        read(self, *given)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as leaving:
        importlib.import_module(f"benchmarks.{name}").main()
    assert leaving.value.code == 0


OTHERS = {
    *(
        "help",
        "version",
        "no-python",
        "nproc-per-node",
        "node-rank",
        "max-restarts",
        "standalone",
        "nnodes",
    ),
    *(
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "dependency",
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "cpus-per-task",
        "time",
    ),
    *("signal", "open-mode", "print-config", "resume", "config", "torch-backend"),
}
"""Flags of torchrun, Slurm and uv, and those that no record holds."""


def test_flags_that_pages_speak_of_are_there():
    """Also those within a sentence: each is a field of a part, a verb or a run, or a flag of a benchmark."""
    folders = (ROOT / "gigamask", ROOT / "benchmarks")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    fields = set(re.findall(r"^ +(\w+): ", source, re.MULTILINE)) | {
        name.replace("-", "_") for name in re.findall(r'"--([\w-]+)"', source)
    }
    for page in PAGES:
        text = (ROOT / page).read_text()
        told = {match[1] for match in re.finditer(r"(?<![\w-])--([a-z][\w-]*(?:\.[\w-]+)*)", text)}
        own = set(re.findall(r"^    (\w+): ", text, re.MULTILINE))  # of a part that the page shows
        names = {
            flag: flag.rpartition(".")[2].replace("-", "_").removeprefix("no_")
            for flag in told - OTHERS
        }
        assert {flag for flag, name in names.items() if name not in fields | own} == set(), page


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", text)
    assert len(links) > 15
    assert [path for path, _ in links if not (ROOT / path).is_file()] == []
    named = {path.removeprefix("docs/") for path, _ in links}
    assert named >= {path.name for path in DOCS.glob("*.md")} - {"index.md"}, (
        "every page is named in the README"
    )


def test_the_tree_of_the_readme_is_the_tree():
    tree = re.search(r"```\n(gigamask/ .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    named = [
        name
        for line in tree.splitlines()
        for name in re.match(r" *((?:[\w./]+ )+)", line)[1].split()
        if re.search(r"[/.]", name)
    ]
    inside = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "gigamask").iterdir()
        if path.name[0] != "_" and path.suffix in ("", ".py")
    }
    here = {name for name in named if (ROOT / "gigamask" / name).exists()}
    assert inside <= here, "in the package, not in the README's tree"
    assert [
        name
        for name in named
        if not ((ROOT / name).exists() or (ROOT / "gigamask" / name).exists())
    ] == []


def test_lines_are_short():
    """Tables aside, and what is typed."""
    long = [
        f"{page}:{number}"
        for page in PAGES
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1)
        if len(line) > 150 and not line.startswith(("|", "    "))
    ]
    assert long == []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; a link that leads nowhere, an anchor that is not there and a page that is not in the nav are errors."""
    out = tmp_path_factory.mktemp("site")
    command = [
        str(Path(sys.executable).parent / "mkdocs"),
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(out),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""
    return out


def test_every_module_is_on_a_page_of_the_reference(site):
    body = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split()[0] for line in body.splitlines()}
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "gigamask").rglob("*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in files} - {"gigamask"}
    assert modules - shown == set()
    from gigamask import interfaces

    parts = [
        name
        for name, kind in vars(interfaces).items()
        if inspect.isclass(kind) and kind.__module__ == interfaces.__name__
    ]
    assert {f"gigamask.interfaces.{name}" for name in parts} <= shown


def test_the_nav_names_every_page(site):
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"[\w/]+\.md", str(config["nav"]))
    assert len(named) == len(set(named))
    assert all((site / name).with_suffix(".html").is_file() for name in named)

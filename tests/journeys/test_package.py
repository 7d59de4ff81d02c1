"""The archives that are handed out: what stands in them, and nothing else."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import gigamask

ROOT = Path(__file__).resolve().parents[2]
LEFTOVERS = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, zipfile.ZipFile, list[str]]:
    """The tree that was built from, the wheel made from its source archive, and the names in that
    archive."""
    tree, out = tmp_path_factory.mktemp("package") / "tree", tmp_path_factory.mktemp("built")
    shutil.copytree(
        ROOT, tree, ignore=LEFTOVERS
    )  # what an earlier build left in the checkout would count as sources
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(out.glob("*.tar.gz"))) as source:
        names = [member.name.partition("/")[2] for member in source.getmembers() if member.isfile()]
    return tree, zipfile.ZipFile(next(out.glob("*.whl"))), names


def files(tree: Path, folder: str) -> set[str]:
    return {str(path.relative_to(tree)) for path in (tree / folder).rglob("*") if path.is_file()}


@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(built):
    tree, wheel, _ = built
    about = f"gigamask-{gigamask.__version__}.dist-info"
    told = {
        f"{about}/{name}"
        for name in (
            "METADATA",
            "RECORD",
            "WHEEL",
            "entry_points.txt",
            "top_level.txt",
            "licenses/LICENSE",
        )
    }
    assert set(wheel.namelist()) == files(tree, "gigamask") | told
    assert "gigamask/py.typed" in wheel.namelist()
    assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_source_archive_holds_what_is_read_tested_and_measured(built):
    tree, _, names = built
    alone = {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "CITATION.cff",
        "Makefile",
        "constraints.txt",
        "requirements.lock",
        "pyproject.toml",
    }
    assert alone | files(tree, "gigamask") | files(tree, "tests") | files(tree, "docs") | files(
        tree, "benchmarks"
    ) <= set(names)


def test_the_lock_of_the_core_has_hashes_and_the_versions_of_the_tests():
    locked = (ROOT / "requirements.lock").read_text()
    pins = re.findall(
        r"^([\w.-]+)==([\w.]+)(?: ;[^\\\n]*)? \\\n +--hash=sha256:", locked, re.MULTILINE
    )
    assert len(pins) == len(re.findall(r"^\w", locked, re.MULTILINE))
    tested = set(
        re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert set(pins) <= tested
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}
    assert needed <= {name for name, _ in pins}


def test_the_wheel_says_what_it_is(built):
    _, wheel, _ = built
    said = Parser().parsestr(
        wheel.read(f"gigamask-{gigamask.__version__}.dist-info/METADATA").decode()
    )
    assert (said["Name"], said["License-Expression"], said["Description-Content-Type"]) == (
        "gigamask",
        "Apache-2.0",
        "text/markdown",
    )
    assert said["Requires-Python"] == ">=3.11"


def test_one_version_is_stated():
    """The package's own; the citation and the newest entry of the changes repeat it."""
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == gigamask.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == gigamask.__version__


def test_citation_has_the_required_fields():
    """The fields that CFF 1.2.0 requires, of the software and of each work it refers to."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["license"] == "Apache-2.0"
    assert all(cited[name] for name in ("message", "title", "authors"))
    assert all(each[name] for each in cited["references"] for name in ("type", "title", "authors"))

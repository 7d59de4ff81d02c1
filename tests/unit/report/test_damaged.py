"""Damaged and hostile run folders: a report and the page leave out what is damaged and name it."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gigamask.data.image import encode_jpeg
from gigamask.report import history
from tests.commands import invoke
from tests.html import Page
from tests.unit.report.test_history import checkpoint, record, written

TAG = "<script>alert(1)</script>"
JPEG = encode_jpeg(np.zeros((8, 8, 3), np.uint8), 80)
CALIBRATION = {
    "expected_error": 0.1,
    "bias": 0.1,
    "correlation": None,
    "bins": [{"predicted": 0.5, "actual": 0.5, "count": 3}],
}
GROUP = {"clicks": {"1": 0.5}, "oracle": 0.5, "box": 0.5, "masks": 3}
SCORES = GROUP | {
    "images": 2,
    "granularity": {"fine": GROUP},
    "size": {"small": GROUP},
    "calibration": CALIBRATION,
}


def png_of(side: int) -> bytes:
    """A PNG that states a size."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    crc = zlib.crc32(header).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + crc


Damage = Callable[[Path], None]


def place(run: Path, name: str) -> Path:
    """The path of a file of the run, whose folder is made."""
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    return run / name


def file(name: str, content: bytes | str) -> Damage:
    """Write a file of the run."""
    raw = content if isinstance(content, bytes) else content.encode(errors="surrogatepass")

    def write(run: Path) -> None:
        place(run, name).write_bytes(raw)

    return write


def lines(*events: object) -> Damage:
    """Append lines to metrics.jsonl."""

    def write(run: Path) -> None:
        with open(run / "metrics.jsonl", "a") as metrics:
            metrics.writelines(
                (event if isinstance(event, str) else json.dumps(event)) + "\n" for event in events
            )

    return write


def scores(**changes: object) -> Damage:
    """Write an evaluation.json with changes."""
    return file("evaluation.json", json.dumps(SCORES | changes))


def pipe(name: str) -> Damage:
    """Replace a file of the run by a pipe, whose reader would wait forever."""

    def write(run: Path) -> None:
        place(run, name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return write


def link(name: str, target: str) -> Damage:
    """Add a symbolic link to the run."""

    def write(run: Path) -> None:
        place(run, name).symlink_to(target)

    return write


def manifest(raw: bytes | None, **more: object) -> Damage:
    """Add a checkpoint with this manifest, or with changes of a valid one."""

    def write(run: Path) -> None:
        path = checkpoint(run, 7, **more) / "manifest.json"
        if raw is not None:
            path.write_bytes(raw)

    return write


DEEP = "[" * 5_000 + "]" * 5_000
BOMB = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'])}]" for i in range(9))
ENTRY = {"bytes": 7, "crc32": 1}
DAMAGED: dict[str, tuple[Damage, str]] = {
    "YAML bomb": (file("config.yaml", BOMB), "config.yaml"),
    "YAML nested": (file("config.yaml", "[" * 1_000), "config.yaml"),
    "config of bytes": (file("config.yaml", bytes(range(256))), "config.yaml"),
    "config of huge numbers": (
        file("config.yaml", f"recipe: [a]\nsteps: '{'9' * 5000}'\nbatch-size: '²'\ndata: {{a: b}}"),
        "",
    ),
    "config is a pipe": (pipe("config.yaml"), "config.yaml"),
    "metrics of bytes": (lines("\0\1\x7f" * 100), "1 of metrics.jsonl"),
    "metrics of other types": (
        lines(
            [1],
            "null",
            {"step": "1"},
            {"step": True},
            {"step": -1},
            {"step": 10**30},
            {"step": 3, "evaluation": []},
            {"step": 3, "evaluation": {}, "warnings": 5},
            {"step": 3, "started": 5},
            {"step": 3, "started": "now", "corrupt_checkpoints": 5},
            {"step": 3, "skipped_sample": {}},
            {"step": 3, "leak": "x", "bytes": "many"},
        ),
        "12 of metrics.jsonl",
    ),
    "metrics of huge numbers": (
        lines(record(2, 1e308, a=-1e99, b=float("inf"), images=float("nan"))),
        "",
    ),
    "metrics nested": (lines(DEEP, f'{{"step": 3, "x": {DEEP}}}'), "2 of metrics.jsonl"),
    "metrics of many columns": (
        lines({"step": 2, "images_per_s": 1.0} | {f"m{i}": 1 for i in range(500)}),
        "",
    ),
    "metrics is a pipe": (pipe("metrics.jsonl"), "metrics.jsonl"),
    "origin of other types": (
        file("origin.jsonl", '{"argv": 5}\n{"argv": [5]}\n{"git": []}\n[]\n'),
        "",
    ),
    "scores are a number": (scores(clicks=5), "evaluation.json"),
    "scores nested": (file("evaluation.json", f'{{"clicks": {DEEP}}}'), "evaluation.json"),
    "scores of other types": (scores(granularity={"fine": {"clicks": 3}}), "evaluation.json"),
    "scores of an unknown size": (scores(size={TAG: GROUP}), "evaluation.json"),
    "scores are huge": (
        file("evaluation.json", '{"clicks": {"1": 1e999}}'),
        "evaluation.json",
    ),
    "scores of boundaries": (scores(protocol={"boundary": {"clicks": [1]}}), ""),
    "scores lack a part": (file("evaluation.json", json.dumps({"clicks": {"1": 0.5}})), ""),
    "picture cut": (file("pictures/step_00000001.png", png_of(8)), "step_00000001.png"),
    "picture huge": (file("pictures/worst.png", png_of(100_000)), "worst.png"),
    "picture empty": (file("pictures/best.jpg", b""), "best.jpg"),
    "picture of text": (file("pictures/best.jpg", TAG), "best.jpg"),
    "picture is a pipe": (pipe("pictures/best.jpg"), "best.jpg"),
    "picture is a folder": (lambda run: (run / "pictures/x.png").mkdir(parents=True), "x.png"),
    "picture elsewhere": (link("pictures/x.png", "/etc/passwd"), "x.png"),
    "picture of an odd number": (file("pictures/step_²1.jpg", JPEG), ""),
    "manifest of another type": (manifest(b"[]"), "manifest.json"),
    "manifest nested": (manifest(DEEP.encode()), "manifest.json"),
    "manifest names a device": (manifest(None, files={"/dev/zero": ENTRY}), "manifest.json"),
    "manifest of odd entries": (manifest(None, files={"model": 5}), "manifest"),
    "manifest of odd scores": (manifest(None, score="x", scored_by=[1], samples={}), ""),
    "manifest is a pipe": (
        lambda run: (
            (checkpoint(run, 7) / "manifest.json").unlink()
            or pipe("checkpoints/step_00000007/manifest.json")(run)
        ),
        "manifest.json",
    ),
    "checkpoint is a file": (file("checkpoints/step_00000009", b""), ""),
    "checkpoint of an odd number": (
        lambda run: (run / "checkpoints" / "step_1²").mkdir(parents=True),
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_part_is_left_out_and_named(kind, tmp_path, capsys):
    damage, named = DAMAGED[kind]
    sound = written(tmp_path / "runs" / "sound", record(1), record(2))
    run = written(tmp_path / "runs" / "bad", record(1))
    checkpoint(run, 1)
    damage(run)
    out = tmp_path / "report.html"
    invoke(f"report {run} --out {out} --verify")
    said = capsys.readouterr()
    assert named in said.err + out.read_text()
    page = Page(out.read_text())
    assert not any(TAG in str(value) for _, values in page.tags for value in values.values())
    assert history.read(sound).damaged == []


@pytest.mark.slow
def test_every_text_of_a_run_is_escaped(tmp_path):
    """Names of the run, flags, metrics, scores, warnings, events, commands, checkpoints and
    pictures; the name of a file may also not be text.
    """
    name = TAG.replace("/", "_")
    run = written(
        tmp_path / os.fsdecode(b"\xff" + name.encode()),
        {"step": 0, "started": TAG, "device": TAG, "corrupt_checkpoints": [TAG]},
        record(1, **{TAG: 1.0}),
        {"step": 1, "evaluation": {TAG: 0.5, "1 click": 0.5}, "warnings": [TAG]},
        {"step": 1, "skipped_sample": TAG, "reason": TAG},
        {"step": 1, "skipped_step": TAG},
        {"step": 1, "save_failed": TAG},
        {"step": 1, "leak": TAG, "bytes": 1, "bytes_per_step": 1},
        {"step": 0, "started": TAG, "device": TAG},
        record(1, **{TAG: 1.0}),
        {"step": 1, "evaluation": {TAG: 0.5, "1 click": 0.5}, "warnings": [TAG]},
        config=f"recipe: {TAG!r}\n{TAG!r}: {TAG!r}\ndata: [{TAG!r}]\nevaluation.best-by: {TAG!r}\n",
    )
    checkpoint(run, 1, score=0.5, scored_by=TAG)
    start = {"argv": [TAG, TAG], "gigamask": TAG, "torch": TAG, "numpy": TAG, "git": TAG}
    file("origin.jsonl", json.dumps(start) + "\n")(run)
    group = {"granularity": {TAG: GROUP}, "clicks": {TAG: 0.5, "1": 0.5}}
    scores(**group)(run)
    for picture in (f"{name}.jpg", f"step_1{name}.jpg"):
        file(f"pictures/{picture}", JPEG)(run)
    file(f"pictures/bad{name}.jpg", b"")(run)
    other = written(tmp_path / "other", record(1))
    for folders in ([run], [run, other]):
        out = tmp_path / "report.html"
        invoke("report", *folders, f"--out {out}")
        text = out.read_text()
        assert TAG not in text
        assert name not in text
        page = Page(text)
        assert page.count("script") == 2, "the data and the script of the page"
        assert TAG in " ".join(page.text), "it is shown"

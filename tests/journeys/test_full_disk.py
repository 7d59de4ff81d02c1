"""On a full disk each command says so in one line, leaves no half file, and works once there is
room.

The disk is a limit on the size of files, at several sizes: the first byte, headers, most of a file.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests import little
from tests.commands import exit_code, invoke
from tests.limits import files_limited
from tests.tiers import long_after

SPEC = replace(little.SPEC, custom_init=True)
FEW = "--points-per-side 2 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"
TRAIN = "--steps 2 --batch-size 2 --evaluation none --loader.workers 0 --device cpu"
LIMITS_BYTES = (0, 200, 3_000, 40_000)
COMMANDS = {
    "synth": "synth {out} --images 3 --json {out}.json",
    "index": "index {scenes} --out {out} --json {out}.json",
    "verify": "verify {scenes} --json {out}.json",
    "repack": "repack {scenes} --out {out} --size 64 --json {out}.json",
    "convert": "convert {labels} --images {photos} --out {out} --json {out}.json",
    "masks": "masks {scenes} --out {out} --mask-size 64 --image-size 256 --json {out}.json",
    "segment": "segment {weights} {photos} --out {out} --to shards --pictures {out}/seen --json "
    "{out}.json {few}",
    "official": "export {weights} --to official --out {out}.pth --json {out}.json",
    "safetensors": "export {weights} --to safetensors --out {out}.safetensors",
    "report": "report {run} --out {out}.html --json {out}.json",
    "stats": "stats {scenes} --json {out}.json --picture {out}.png",
    "huggingface": "export {weights} --to huggingface --out {out}",
    "train": "train tiny --data {scenes} --out {out} {train}",
    "evaluate": "evaluate {weights} --data {scenes} --max-images 1 --pictures {out} "
    "--json {out}.json --html {out}.html",
    "onnx": "export {weights} --to onnx --out {out}",
}


@pytest.fixture(scope="module")
def places(scenes, tmp_path_factory) -> dict[str, str]:
    """Inputs of the commands, by name."""
    import cv2

    from gigamask.synthetic.scenes import compose_scene

    folder = tmp_path_factory.mktemp("inputs")
    for name in ("photos", "labels"):
        (folder / name).mkdir()
    for number in range(2):
        pixels = compose_scene(1, number).pixels[::4, ::4]
        cv2.imwrite(str(folder / "photos" / f"{number}.png"), pixels)
        cv2.imwrite(str(folder / "labels" / f"{number}.png"), pixels[..., 0] // 64)
    run = folder / "run"
    invoke(f"train tiny --data {scenes} --out {run} {TRAIN}")
    return {
        "scenes": str(scenes),
        "weights": little.save_little(folder, SPEC),
        "photos": str(folder / "photos"),
        "labels": str(folder / "labels"),
        "run": str(run),
        "few": FEW,
        "train": TRAIN,
    }


def written(folder: Path) -> list[Path]:
    """All files that are not the work in progress of a command to be run again."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


@pytest.mark.parametrize("command", long_after(len(COMMANDS) - 5, list(COMMANDS)))
def test_a_full_disk_is_one_line_and_leaves_no_half_file(
    command, places, tmp_path, capsys, record_property
):
    record_property("tried", len(LIMITS_BYTES))
    if command == "onnx":
        pytest.importorskip("onnxruntime")
    words = COMMANDS[command]
    whole = tmp_path / "whole"
    whole.mkdir()
    invoke(words.format(out=whole / "out", **places))
    sizes = {path.relative_to(whole): path.stat().st_size for path in written(whole)}
    assert sizes
    refused = 0
    for limit in LIMITS_BYTES:
        folder = tmp_path / str(limit)
        folder.mkdir()
        again = words.format(out=folder / "out", **places)
        capsys.readouterr()
        with files_limited(limit):
            code = exit_code(again)
        lines = capsys.readouterr().err.splitlines()
        refused += code != 0
        if code:
            assert code == 2, lines
            assert any("File too large" in line for line in lines), lines
        for path in written(folder):
            if command != "train":  # metrics.jsonl grows in place
                assert path.stat().st_size == sizes[path.relative_to(folder)], path
        if code:
            invoke(again)
            assert {path.relative_to(folder) for path in written(folder)} >= {*sizes} - _logs(sizes)
        if (folder / "out.json").exists():
            json.loads((folder / "out.json").read_text())
        assert not list(folder.rglob("*.partial"))
    assert refused


def _logs(sizes: dict[Path, int]) -> set[Path]:
    """Files whose names depend on the time."""
    return {path for path in sizes if "tensorboard" in path.parts}

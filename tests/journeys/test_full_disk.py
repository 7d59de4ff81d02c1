"""On a full disk each command says so in one line, leaves no half file, and works once there is
room.

The disk is a limit on the size of files, at several sizes: the first byte, headers, most of a file.
"""

from dataclasses import replace

import pytest

from tests import little
from tests.commands import invoke
from tests.limits import LIMITS_BYTES, check_full_disk
from tests.tiers import long_after

SPEC = replace(little.SPEC, custom_init=True)
FEW = "--points-per-side 2 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"
TRAIN = "--steps 2 --batch-size 2 --evaluation none --loader.workers 0 --device cpu"
COMMANDS = {
    "synth": "synth {out} --images 3 --json {out}.json",
    "index": "index {scenes} --out {out} --json {out}.json",
    "verify": "verify {scenes} --json {out}.json",
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


@pytest.mark.parametrize("command", long_after(len(COMMANDS) - 5, list(COMMANDS)))
def test_a_full_disk_is_one_line_and_leaves_no_half_file(
    command, places, tmp_path, capsys, record_property
):
    record_property("tried", len(LIMITS_BYTES))
    if command == "onnx":
        pytest.importorskip("onnxruntime")
    check_full_disk(COMMANDS[command].format(out="{out}", **places), tmp_path, capsys)

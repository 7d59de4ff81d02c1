"""Commands that `--submit` runs in parts: the joined result is that of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from gigamask.cli.main import main
from gigamask.evaluation import clicks
from gigamask.plugins.cluster import local_jobs
from gigamask.rng import make_rng
from gigamask.synthetic import scenes as synthetic
from tests import little
from tests.commands import invoke, refusal
from tests.forked import forked  # noqa: F401 (a fixture)
from tests.plugins.cluster import fake_slurm

ROOT = Path(__file__).resolve().parents[4]
THRESHOLDS = ("--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0").split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Five tars of three images, their index, weights, and labels with their images."""
    folder = tmp_path_factory.mktemp("inputs")
    synthetic.write(folder / "tars", 15, shard_images=3)
    invoke(f"index {folder}/tars --out {folder}/index")
    little.save_little(folder)
    for name in ("labels", "photos"):
        (folder / name).mkdir()
    rng = np.random.default_rng(0)
    for number in range(7):
        labels = np.kron(rng.integers(0, 3, (4, 6)), np.ones((8, 8))).astype(np.uint8)
        Image.fromarray(labels).save(folder / "labels" / f"{number}.png")
        pixels = rng.integers(0, 256, (32, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.jpg")
    return folder


COMMANDS = {
    "verify": "verify {0}/index",
    "index": "index {0}/tars --out out --checksums",
    "masks": "masks {0}/index --out out --mask-size 32 --image-size 64",
    "masks --verify": "masks {0}/index --out {0}/store --verify",
    "convert": "convert {0}/labels --images {0}/photos --out out --shard-images 2",
    "evaluate": "evaluate {0}/model.safetensors --data {0}/index --batch-size 2 --boundaries",
    "segment": "segment {0}/model.safetensors {0}/index --out out",
    "segment tars": "segment {0}/model.safetensors {0}/index --out out --to shards "
    "--shard-images 4",
}


def run_in(folder: str, words: list[str]) -> tuple[dict, dict[str, bytes]]:
    """Run a command in a new folder; return its JSON and the files in `out`."""
    before = Path.cwd()
    Path(folder).mkdir()
    os.chdir(folder)
    try:
        invoke(*words, "--json", "result.json")
        files = {
            str(path): path.read_bytes()
            for path in sorted(Path("out").rglob("*"))
            if path.is_file()
        }
        assert not list(Path().glob("sub*/*"))
        return json.loads(Path("result.json").read_bytes()), files
    finally:
        os.chdir(before)


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_parts_give_the_result_of_one_process(name, inputs):
    words = COMMANDS[name].format(inputs).split()
    if words[0] == "segment":
        words += THRESHOLDS
    if name == "masks --verify":
        store = f"--out {inputs}/store --mask-size 32 --image-size 64".split()
        invoke("masks", inputs / "index", *store)
    plain = run_in("plain", words)
    local = "--submit local --submit-jobs 3 --submit-folder 'sub mitted'"
    joined = run_in("joined", [*words, local])
    if name == "evaluate":  # two evaluations differ by rounding; the next test is exact
        for key in ("clicks", "oracle", "box", "boundary_iou", "boundary_f"):
            assert joined[0][key] == pytest.approx(plain[0][key], abs=5e-3), key
        return
    assert joined == plain
    assert name in ("verify", "masks --verify", "evaluate") or plain[1]


def test_joined_scores_are_exact(inputs, tmp_path, monkeypatch, capfd):
    """With scores that depend on the image and the mask alone, one of them not finite."""

    def score(model, image, row, mask_indices, protocol):
        assert model is not None
        values = [
            make_rng(0, "scores", row, int(mask)).random(20).tolist() for mask in mask_indices
        ]
        values[0][9] = float("nan") if row == 3 else values[0][9]
        by_clicks = [dict(zip(protocol.clicks, value, strict=False)) for value in values]
        return [
            clicks.MaskScore(row, int(mask), *value[:1], by, value[8], value[9], 900, by)
            for mask, value, by in zip(mask_indices, values, by_clicks, strict=True)
        ]

    monkeypatch.setattr(clicks, "score_group", score)
    words = COMMANDS["evaluate"].format(inputs).replace(" --boundaries", "").split()
    plain = run_in("plain", words)
    for number in (2, 0, 1):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--part", f"{number}/3@{tmp_path}"])
        assert ended.value.code == 0
        part = f"part {number} of 3 is done, in {tmp_path}/part-{number}.json; join all parts with "
        assert f"{part}--part join/3@{tmp_path}\n" in capfd.readouterr().out
    joined = run_in("joined", [*words, "--part", f"join/3@{tmp_path}"])
    assert json.dumps(joined) == json.dumps(plain)


@pytest.mark.long
def test_more_parts_than_tars_on_slurm(inputs, slurm):
    words = ["verify", str(inputs / "tars"), "--no-decode"]
    flags = "--submit slurm --submit-jobs 6 --submit-parallel 2".split()
    assert run_in("joined", [*words, *flags]) == run_in("plain", words)
    options = fake_slurm.options_of((slurm / "100.sh").read_text())
    assert options["array"] == "0,1,2,3,4,5%2"
    assert "gpus-per-node" not in options


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_part_that_is_killed_runs_again(inputs, monkeypatch):
    words = COMMANDS["masks"].format(inputs).split()
    plain = run_in("plain", words)
    begin, started = local_jobs.subprocess.Popen, []

    def start(*given, **options):
        started.append(begin(*given, **options))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(local_jobs.subprocess, "Popen", start)
    flags = "--submit local --submit-jobs 2 --submit-parallel 2".split()
    assert run_in("joined", [*words, *flags]) == plain
    assert (len(started), started[0].wait()) == (3, -signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("where", ["local", "slurm"])
@pytest.mark.usefixtures("slurm")
def test_a_part_that_fails_twice_is_named_with_its_log(where, inputs, tmp_path, capsys):
    tars = tmp_path / "tars"
    tars.mkdir()
    (tars / "a.tar").write_bytes((inputs / "tars" / "sa_000000.tar").read_bytes())
    (tars / "b.tar").write_bytes((inputs / "tars" / "sa_000001.tar").read_bytes()[:3000])
    flags = ["--submit", where, "--submit-jobs", "2"]
    line = refusal(capsys, "index", tars, "--out", "out", *flags)
    (log,) = Path("submitted").glob("index-*/1.log")
    assert f"part 1 of 2 failed twice ({'exit code 2' if where == 'local' else 'job 200_1'}" in line
    assert f"see {log.absolute()}" in line
    assert "b.tar" in line
    assert log.read_text().count("b.tar: ") == 2
    assert not Path("out").exists()


@pytest.mark.parametrize("where", ["local", "slurm"])
def test_sigterm_stops_the_parts(where, inputs, slurm):
    words = ["verify", str(inputs / "tars"), "--submit", where, "--submit-parallel", "2"]
    submitted = subprocess.Popen(
        [sys.executable, "-m", "gigamask", *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    parts: list[psutil.Process] = []
    while not parts and not (slurm / "100.asked").exists():
        assert time.monotonic() < deadline
        if where == "local":
            parts = psutil.Process(submitted.pid).children()
        time.sleep(0.01)
    submitted.terminate()
    assert "stopped by SIGTERM" in submitted.communicate(timeout=60)[1]
    assert submitted.returncode == 128 + signal.SIGTERM
    assert (slurm / "100.cancelled").exists() == (where == "slurm")
    assert not any(part.is_running() for part in parts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify {0}/tars --part 3/3@.", "--part must be NUMBER/COUNT@FOLDER"),
        ("verify {0}/tars --part join/1@.", "part 0 has not ended"),
        ("verify {0}/tars --submit local --submit-jobs 0", "--submit-jobs is 0"),
        ("verify {0}/tars --submit local --submit-parallel 0", "--submit-parallel is 0"),
        (f"{COMMANDS['evaluate']} --submit local --submit-jobs 0", "--submit-jobs is 0"),
        (f"{COMMANDS['evaluate']} --automatic --submit local", "--automatic keeps all"),
    ],
)
def test_wrong_flags_give_one_line(words, message, inputs, capsys):
    assert message in refusal(capsys, words.format(inputs))


def test_data_that_changed_between_the_parts_is_refused(inputs, tmp_path, capsys):
    content = {"total": 4, "results": []}
    (tmp_path / "part-0.json").write_text(json.dumps(content))
    assert "the data changed meanwhile" in refusal(
        capsys, f"verify {inputs}/tars --part join/1@{tmp_path}"
    )

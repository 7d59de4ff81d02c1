"""Commands that `--submit` runs in parts: the joined result is that of one process."""

import json
import signal
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from gigamask.cli.main import main
from gigamask.evaluation import clicks
from gigamask.files import PARTIAL
from gigamask.rng import make_rng
from gigamask.synthetic import scenes as synthetic
from tests import little
from tests.commands import LITTLE, invoke, refusal
from tests.forked import forked, started  # noqa: F401 (fixtures)
from tests.journeys.runs import wait_until
from tests.plugins.cluster import fake_slurm

THRESHOLDS = ("--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0").split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Five tars of three images, their index, weights, and labels with their images."""
    folder = tmp_path_factory.mktemp("inputs")
    synthetic.write(folder / "tars", 15, shard_images=3)
    invoke(f"index {folder}/tars --out {folder}/index")
    little.save_little(folder)
    for name in ("labels", "photos", "changed"):
        (folder / name).mkdir()
    (folder / "changed" / "part-0.json").write_text('{"total": 4, "results": []}')
    rng = np.random.default_rng(0)
    for number in range(7):
        labels = np.kron(rng.integers(0, 3, (4, 6)), np.ones((8, 8))).astype(np.uint8)
        Image.fromarray(labels).save(folder / "labels" / f"{number}.png")
        pixels = rng.integers(0, 256, (32, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.jpg")
    return folder


TRAIN = f"train {LITTLE} --data {{0}}/tars --out run --submit"
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
    Path(folder).mkdir()
    with chdir(folder):
        invoke(*words, "--json", "result.json")
        files = {
            str(path): path.read_bytes()
            for path in sorted(Path("out").rglob("*"))
            if path.is_file() and path.suffix != PARTIAL  # of the part that was killed
        }
        assert not list(Path().glob("sub*/*"))
        return json.loads(Path("result.json").read_bytes()), files


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_the_parts_give_the_result_of_one_process(name, inputs, started):  # noqa: F811
    """The first part is killed, and runs again."""
    words = COMMANDS[name].format(inputs).split()
    if words[0] == "segment":
        words += THRESHOLDS
    if name == "masks --verify":
        store = f"--out {inputs}/store --mask-size 32 --image-size 64".split()
        invoke("masks", inputs / "index", *store)
    plain = run_in("plain", words)
    local = "--submit local --submit-jobs 3 --submit-parallel 2 --submit-folder 'sub mitted'"
    joined = run_in("joined", [*words, local])
    assert (len(started), started[0].wait()) == (4, -signal.SIGKILL)
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
        found = []
        for mask in mask_indices.tolist():
            values = make_rng(0, "scores", row, mask).random(20).tolist()
            box = values[9] if row != 3 or found else float("nan")
            by_clicks = dict(zip(protocol.clicks, values, strict=False))
            found.append(
                clicks.MaskScore(row, mask, values[0], by_clicks, values[8], box, 900, by_clicks)
            )
        return found

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
def test_more_parts_than_tars_on_slurm_in_a_folder_of_any_name(inputs, slurm):
    words = ["verify", str(inputs / "tars"), "--no-decode"]
    flags = "--submit slurm --submit-folder müller(1) --submit-jobs 6 --submit-parallel 2".split()
    assert run_in("joined", [*words, *flags]) == run_in("plain", words)
    options = fake_slurm.options_of((slurm / "100.sh").read_text())
    assert options["array"] == "0,1,2,3,4,5%2"
    assert "gpus-per-node" not in options


@pytest.mark.long
@pytest.mark.parametrize("where", ["local", "slurm"])
@pytest.mark.usefixtures("slurm")
def test_a_part_that_fails_twice_is_named_with_its_log(where, inputs, tmp_path, capsys):
    tars = tmp_path / "tars"
    tars.mkdir()
    whole = (inputs / "tars" / "sa_000000.tar").read_bytes()
    (tars / "a.tar").write_bytes(whole)
    (tars / "b.tar").write_bytes(whole[:3000])
    line = refusal(capsys, f"index {tars} --out out --submit {where} --submit-jobs 2")
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
    children = psutil.Process(submitted.pid).children
    wait_until((slurm / "100.asked").exists if where == "slurm" else children)
    parts = children() if where == "local" else []
    submitted.terminate()
    assert "stopped by SIGTERM" in submitted.communicate(timeout=60)[1]
    assert submitted.returncode == 128 + signal.SIGTERM
    assert (slurm / "100.cancelled").exists() == (where == "slurm")
    assert not any(part.is_running() for part in parts)


@pytest.mark.parametrize(
    "words, message",
    [
        ("verify {0}/tars --part 3/3@.", "--part must be NUMBER/COUNT@FOLDER"),
        ("verify {0}/tars --part join/1@.", "part 0 has not ended"),
        (
            "verify {0}/tars --submit local --submit-jobs 0",
            "--submit-jobs must be between 1 and 1000 (got 0)",
        ),
        (
            "verify {0}/tars --submit local --submit-parallel 0",
            "--submit-parallel must be at least 1 (got 0)",
        ),
        (
            f"{COMMANDS['evaluate']} --submit local --submit-jobs 0",
            "--submit-jobs must be between 1 and 1000 (got 0)",
        ),
        (f"{COMMANDS['evaluate']} --automatic --submit local", "--automatic keeps all"),
        (f"{TRAIN} local --submit-nodes 2", "--submit local has one machine"),
        (f"{TRAIN} slurm --submit-time 'a day'", "--submit-time must be one word"),
        (f"{TRAIN} slurm --submit-time soon", "--submit-time must be minutes"),
        (f"{TRAIN} slurm --submit-gpus -1", "--submit-gpus must be at least 0 (got -1)"),
        (f"{TRAIN} slurm --submit-sbatch --account=x", "--account"),
        (f"{TRAIN} slurm --submit-folder 'a b'", "cannot write logs"),
        (f"{TRAIN} pbs", "--submit must be one of none, local, slurm"),
        ("verify {0}/tars --submit-jobs 4", "--submit-jobs: has no effect without --submit"),
        ("verify {0}/tars --part join/1@{0}/changed", "the data changed meanwhile"),
    ],
)
def test_wrong_flags_give_one_line(words, message, inputs, slurm, capsys):
    assert message in refusal(capsys, words.format(inputs))
    assert not list(slurm.glob("*.sh"))

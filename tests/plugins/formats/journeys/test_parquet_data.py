"""`--data` with parquet files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gigamask
from gigamask.cli.main import main
from gigamask.config_files import load_config
from tests.commands import LITTLE, invoke, refusal
from tests.journeys.test_own_data import here  # noqa: F401 (a fixture)


def train(*words: str) -> int:
    return main(["train", LITTLE, "--out", "run", "--steps", "2", *words])


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_parquet(capsys):
    """Training, held-out and other data in parquet are converted once, beside the files."""
    folder = Path.cwd()
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in Path("photos").iterdir()]
    labels = [{"bytes": Path(f"labels/{each['path']}").read_bytes()} for each in images]
    labels[3] = None
    table = pa.table({"image": images, "label": labels, "scan": labels})
    Path("set").mkdir()
    for name, part in (("train-0", table[:4]), ("train-1", table[4:9]), ("test-0", table[9:])):
        pq.write_table(part, f"set/{name}.parquet", row_group_size=3)
    assert train("--data", "set") == 2
    assert "train (2 files)" in capsys.readouterr().err
    assert not Path("run").exists()
    words = ["--data", "set/train-0.parquet", "set/train-1.parquet"]
    held_out = ["--evaluation.data", "set/test-0.parquet", "--evaluation.interval", "1"]
    assert train(*words, "--strict") == 2
    assert "--strict: 1 of the images" in capsys.readouterr().err
    assert train(*words, *held_out) == 0
    out = capsys.readouterr().out
    assert "8 images with 16 masks" in out
    assert "train-0.parquet:3: its label is null" in out
    config = load_config("run", trust=True)
    assert Path(config.data[0]).parent.parent == folder / "set.gigamask"
    assert "test-0.parquet.gigamask" in config.evaluation.data[0]
    written = {path: path.stat().st_mtime_ns for path in Path().glob("**/*.tar")}
    assert train("--data", "set/train-*.parquet", *held_out, "--steps", "3") == 0
    assert {path: path.stat().st_mtime_ns for path in Path().glob("**/*.tar")} == written
    capsys.readouterr()
    invoke("stats", "set/test-0.parquet")
    assert "3 images with 6 masks" in capsys.readouterr().out
    words = "evaluate run --trust --data set/test-0.parquet --masks scan --device cpu".split()
    invoke(*words, "--json", "scores.json")
    assert json.loads(Path("scores.json").read_text())["images"] == 3
    invoke("convert set/train-* --out tars --masks scan")
    assert "8 images with 16 masks" in capsys.readouterr().out
    assert "--images FOLDER" in refusal(capsys, "convert", "coco.json", "--out", "of_coco")
    loader = gigamask.DataLoader("set/test-0.parquet", "tiny", batch_size=3, num_workers=0)
    (batch,) = loader
    assert len(batch.names) == 3
    for words in (["index", "set/test-0.parquet"], ["segment", "starter", "set"]):
        assert f"gigamask convert {folder}/set" in refusal(capsys, *words, "--out", "out")

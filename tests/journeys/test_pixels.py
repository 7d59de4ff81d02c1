"""Images of 16 bits and of five channels, from the data to masks."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gigamask
from gigamask.config_files import load_config
from gigamask.data.image import decode
from gigamask.data.index import Index
from gigamask.models.init import build_model
from gigamask.models.state_dict import read_weights
from gigamask.serialization import read_json
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.journeys.runs import CONSTANT_LR, same
from tests.little import SPEC

TRAIN = " ".join([f"train {LITTLE} --loader.workers 0", *CONSTANT_LR])
MEASURED = "--percentiles 1 99 --model.pixels.percentiles-of data"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scores(weights: str, data: str, *words: str) -> dict:
    invoke(f"evaluate {weights} --data {data} --json scores.json", *words)
    return read_json("scores.json")


@pytest.mark.long
def test_cells_of_16_bits_are_trained_on_scored_and_segmented(here, capsys):
    cells = "synth cells --kind cells --images 5 --long-side 64 64"
    invoke(cells, "--bits 16")
    with tarfile.open("cells/sa_000000.tar") as archive:
        first = archive.extractfile("sa_0.png").read()  # pyrefly: ignore
        stored = np.array(Image.open(archive.extractfile("sa_0.png")))
    assert stored.dtype == np.uint16
    invoke("verify cells")
    assert "--window" in refusal(capsys, TRAIN, "--data cells --out refused")
    assert not Path("refused/config.yaml").exists()

    words = f"--data cells {MEASURED}"
    invoke(TRAIN, words, "--out run --steps 1")
    assert "of 5 images: --window" in capsys.readouterr().out
    low, high = load_config("run", trust=True).model.pixels.window
    with tarfile.open("cells/sa_000000.tar") as archive:
        pngs = [archive.extractfile(name) for name in archive.getnames() if name.endswith("png")]
        values = np.concatenate([np.array(Image.open(png)).ravel() for png in pngs])
    assert np.allclose((low, high), np.percentile(values, (1, 99)), rtol=1e-5)
    invoke(TRAIN, words, "--out run --steps 2")
    assert "--window" not in capsys.readouterr().out, "it is not measured again"
    invoke("train --resume run --steps 3")
    invoke(TRAIN, words, "--out straight --steps 3")
    assert same(Path("run"), Path("straight"))
    assert exit_code(TRAIN, "--data cells --out run --window 0 9 --steps 5") == 2

    invoke("export run --to safetensors --out run.safetensors")
    before, after = scores("run", "cells"), scores("run.safetensors", "cells")
    assert (before["clicks"], before["box"]) == (after["clicks"], after["box"])
    assert f"{low:g}" in refusal(capsys, "evaluate run --data cells --window 0 65535")

    few = "--points-per-side 2 --pred-iou-thresh 0 --stability-score-thresh 0"
    segment = "segment run.safetensors cells --out out --pictures pictures"
    invoke(segment, "--to shards coco", few)
    invoke("index out --out index")
    assert len(Index.open("index")) == 5
    with tarfile.open("out/sa_000000.tar") as archive:
        assert archive.extractfile("sa_0.png").read() == first  # pyrefly: ignore
    record = read_json("out/sa_000000/sa_0.json")
    assert read_json("out/coco.json")["images"][0]["file_name"] == "sa_000000/sa_0.png"
    assert record["image"]["file_name"] == "sa_0.png"
    onnx = pytest.importorskip("onnx")
    invoke("export run --to onnx --out onnx")
    for name in ("encoder.onnx", "decoder.onnx"):
        metadata = {each.key: each.value for each in onnx.load(f"onnx/{name}").metadata_props}
        assert json.loads(metadata["spec"])["pixels"]["window"] == [low, high]
    capsys.readouterr()
    invoke("export run --to official --out run.pth")
    assert "no window" in capsys.readouterr().out
    assert read_weights("run.pth")[1].pixels.window == (low, high)  # pyrefly: ignore
    seen = decode(first, "x", pixels=load_config("run", trust=True).model.pixels)
    model = gigamask.Sam.from_pretrained("run.safetensors")
    from_array, from_file = gigamask.SamPredictor(model), gigamask.SamPredictor(model)
    from_array.set_image(stored)
    from_file.set_image(seen)
    assert (from_array.features == from_file.features).all()
    plain = build_model(SPEC, 0)
    gigamask.evaluate(plain, "cells", window=(0.0, 5000.0), max_images=1)
    assert not plain.config.pixels.has_window, "it is the program's"


@pytest.mark.long
def test_own_images_of_five_channels_start_from_weights_for_rgb(here, capsys):
    chance = np.random.default_rng(0)
    for folder in ("stacks", "labels"):
        Path(folder).mkdir()
    for i in range(4):
        labels = np.zeros((48, 64), np.uint8)
        labels[5:20, 8:30], labels[25:40, 30:60] = 1, 2
        Image.fromarray(labels).save(f"labels/p{i}.png")
        stack = chance.poisson(200 + 900 * (labels > 0)[..., None], (48, 64, 5)).astype(np.uint16)
        pages = [Image.fromarray(stack[..., channel]) for channel in range(5)]
        if i % 2:
            pages[0].save(f"stacks/p{i}.tif", save_all=True, append_images=pages[1:])
        else:
            np.save(f"stacks/p{i}.npy", stack)
    invoke("synth scenes --images 2 --long-side 64 64")
    invoke(TRAIN, "--data scenes --out rgb --steps 1")
    own = "--data stacks --masks labels --val-split 0.5 --steps 2"
    five = "--in-channels 5 --window 0 1500 --init rgb"
    invoke(TRAIN, own, five, "--out five")
    config = load_config("five", trust=True)
    assert config.model.pixels.channels == 5
    tensors, stated = read_weights("five")
    assert stated == replace(config.model, drop_path_rate=stated.drop_path_rate)
    assert tensors["image_encoder.patch_embed.proj.weight"].shape[1] == 5
    scores("five", config.data[0])
    invoke("segment five stacks --out out --points-per-side 2")
    capsys.readouterr()
    assert "5 channels" in refusal(capsys, "export five --to official --out five.pth")
    assert "--in-channels 5" in refusal(capsys, TRAIN, own, "--window 0 1500 --out three")
    invoke("export rgb --to safetensors --out rgb.safetensors")
    assert "5 channels" in refusal(capsys, f"evaluate rgb.safetensors --data {config.data[0]}")


@pytest.mark.parametrize(
    "words, named",
    [
        ("--window 9 3", "9 3"),
        ("--window 0 9", "8 bits"),
        (MEASURED, "8 bits"),
        ("--in-channels 4", "--in-channels 3"),
        ("--in-channels 1 --loader.color-jitter.saturation 0.2", "saturation"),
    ],
)
def test_pixels_that_are_stated_wrongly_are_one_line(here, capsys, words, named):
    invoke("synth scenes --images 2 --long-side 64 64")
    error = refusal(capsys, TRAIN, "--data scenes --out run --steps 1", words)
    assert named in error.replace("'", "")
    assert not Path("run/config.yaml").exists()


def test_bits_are_of_cells(here, capsys):
    assert "--kind cells" in refusal(capsys, "synth scenes --bits 16")

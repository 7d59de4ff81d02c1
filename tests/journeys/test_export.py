"""`gigamask export` as a user types it: what it writes is what `evaluate` and `--init` read."""

import json

import pytest

from gigamask.cli.main import main
from gigamask.models.init import build_model
from gigamask.models.state_dict import save_weights, to_official
from tests.little import SPEC


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_weights(to_official(build_model(SPEC, 0)), SPEC, path)
    return str(path)


@pytest.mark.parametrize(
    ("to", "out"), [("official", "new/sam.pth"), ("safetensors", "copy.safetensors")]
)
def test_what_is_exported_is_exported_again(weights, to, out, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert (
        main(["export", weights, "--to", to, "--out", str(tmp_path / out), "--json", str(told)])
        == 0
    )
    assert "read back: " in capsys.readouterr().out
    assert json.loads(told.read_text())["files"] == [str(tmp_path / out)]


def test_onnx_export_prints_its_difference(weights, tmp_path, capsys):
    assert main(["export", weights, "--to", "onnx", "--out", str(tmp_path / "onnx")]) == 0
    assert "differ by " in capsys.readouterr().out


def test_what_is_wrong_is_one_line(weights, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    for words, message in (
        ([weights, "--to", "tflite", *out], "'tflite'"),
        ([weights, *out], "--to"),
        ([str(tmp_path / "none.pth"), "--to", "official", *out], "none.pth: no such file"),
        ([weights, "--to", "official", *out], "file that ends in .pth"),
    ):
        assert main(["export", *words]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1

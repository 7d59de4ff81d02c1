"""`gigamask export` as a user types it: what it writes is what `evaluate` and `--init` read."""

import json
from dataclasses import replace

import pytest
import torch

from gigamask.cli.main import main
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.state_dict import save_weights, to_official
from tests.little import SPEC


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_weights(to_official(build_model(SPEC, 0)), SPEC, path)
    return str(path)


@pytest.mark.parametrize(
    ("to", "out"), [("official", "sam.pth"), ("safetensors", "copy.safetensors")]
)
def test_what_is_exported_is_exported_again(weights, to, out, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert (
        main(["export", weights, "--to", to, "--out", str(tmp_path / out), "--json", str(told)])
        == 0
    )
    assert "read back: " in capsys.readouterr().out
    assert json.loads(told.read_text())["files"] == [str(tmp_path / out)]


@pytest.mark.long
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
        ([weights, "--to", "safetensors", *out, "--precision", "fp16"], "is for --to onnx"),
        (
            [weights, "--to", "official", "--out", str(tmp_path / "new" / "a.pth")],
            "new does not exist",
        ),
    ):
        assert main(["export", *words]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1


def numbers(told: object) -> list[float]:
    """Return all numbers of nested dictionaries and lists."""
    if isinstance(told, dict | list):
        parts = told.values() if isinstance(told, dict) else told
        return [number for part in parts for number in numbers(part)]
    return [float(told)] if isinstance(told, int | float) else []


@pytest.mark.long
def test_everything_exported_scores_as_its_source(scenes, tmp_path, monkeypatch):
    """The heads of `tiny` are not Meta's, and its shapes do not tell."""
    monkeypatch.chdir(tmp_path)
    save_weights(to_official(build_model(tiny(), 0)), tiny(), "source.safetensors")
    scores = {}
    for name, to in (
        ("source.safetensors", None),
        ("a.pth", "official"),
        ("b.safetensors", "safetensors"),
        ("c", "huggingface"),
    ):
        if to:
            assert main(["export", "source.safetensors", "--to", to, "--out", name]) == 0
        words = f"--data {scenes} --max-images 2 --json told.json".split()
        assert main(["evaluate", name, *words]) == 0
        scores[name] = numbers(json.loads((tmp_path / "told.json").read_text()))
    # Addresses in memory decide how a CPU adds, so the last digits vary.
    exact = pytest.approx(scores.pop("source.safetensors"), abs=1e-3)
    assert all(each == exact for each in scores.values())
    eight = replace(tiny(), decoder_num_heads=8)
    save_weights(to_official(build_model(tiny(), 0)), eight, "d.safetensors")
    assert main(["evaluate", "d.safetensors", *words]) == 0
    assert numbers(json.loads((tmp_path / "told.json").read_text())) != exact
    torch.save(dict(torch.load("a.pth")), "bare.pth")
    assert main(f"evaluate bare.pth --data {scenes}".split()) == 2


def test_a_folder_is_sent_to_the_hub_with_its_card(weights, tmp_path, capsys, monkeypatch):
    calls = []

    def create_repo(api, *given, **named):
        calls.append(("create", given, named))

    def upload_folder(api, **named):
        calls.append(
            ("upload", sorted(path.name for path in named["folder_path"].iterdir()), named)
        )
        return "https://hub/us/mine/commit/1"

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload_folder)
    out = tmp_path / "hf"
    words = ["export", weights, *f"--to huggingface --out {out} --license mit".split()]
    assert main([*words, "--push", "us/mine"]) == 0
    assert "https://hub/us/mine/commit/1" in capsys.readouterr().out
    names = ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert [call[0] for call in calls] == ["create", "upload"]
    assert calls[0][1:] == (("us/mine",), {"exist_ok": True})
    assert calls[1][1] == names
    assert calls[1][2]["repo_id"] == "us/mine"
    assert "license: mit" in (out / "README.md").read_text()


def test_what_cannot_be_sent_is_one_line(weights, tmp_path, capsys, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("401 Unauthorized\nand more")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    out = ["--out", str(tmp_path / "hf")]
    for words, message in (
        (["--to", "safetensors", *out, "--push", "us/mine"], "--push us/mine: expected USER/NAME"),
        (["--to", "huggingface", *out, "--push", "mine"], "--push mine: expected USER/NAME"),
        (["--to", "huggingface", *out, "--push", "us/mine"], "not sent (401 Unauthorized)"),
    ):
        assert main(["export", weights, *words]) == 2
        told = [line for line in capsys.readouterr().err.splitlines() if "gigamask:" in line]
        assert len(told) == 1
        assert message in told[0]

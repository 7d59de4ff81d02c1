"""`gigamask export` as a user types it: what it writes is what `evaluate` and `--init` read."""

import shutil
from dataclasses import replace
from unittest.mock import ANY, Mock, call

import pytest
import torch

from gigamask.config_files import save_config
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.state_dict import read_weights, save_weights, to_official
from gigamask.serialization import read_json
from tests.commands import exit_code, invoke, refusal
from tests.little import little, save_little


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_little(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("to, out", [("official", "sam.pth"), ("safetensors", "copy.safetensors")])
def test_what_is_exported_is_exported_again(weights, to, out, tmp_path, capsys):
    told = tmp_path / "told.json"
    invoke(f"export {weights} --to {to} --out {tmp_path}/{out} --json {told}")
    assert "read back: " in capsys.readouterr().out
    assert read_json(told)["files"] == [str(tmp_path / out)]


def test_weights_for_another_input_size_differ_in_position_tables_alone(weights, tmp_path):
    out = tmp_path / "larger.safetensors"
    invoke(f"export {weights} --to safetensors --image-size 96 --out {out}")
    (before, _), (after, config) = map(read_weights, (weights, out))
    assert config.image_size == 96
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert changed
    assert all("pos_embed" in name or "rel_pos" in name for name in changed)


@pytest.mark.long
def test_onnx_export_prints_its_difference(weights, tmp_path, capsys):
    invoke(f"export {weights} --to onnx --out {tmp_path}/onnx")
    assert "differ by " in capsys.readouterr().out


def test_what_is_wrong_is_one_line(weights, tmp_path, capsys):
    out = f"--out {tmp_path}/out"
    for words, message in (
        (f"{weights} --to tflite {out}", "'tflite'"),
        (f"{weights} {out}", "--to"),
        (f"{tmp_path}/none.pth --to official {out}", "none.pth: no such file"),
        (f"{weights} --to official {out}", "file that ends in .pth"),
        (f"{weights} --to official --out {tmp_path}/new/a.pth", "new does not exist"),
        (f"{weights} --to official --image-size 100 {out}.pth", "image_size must be a multiple"),
    ):
        assert message in refusal(capsys, "export", words)


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
            invoke(f"export source.safetensors --to {to} --out {name}")
        words = f"--data {scenes} --max-images 2 --json told.json"
        invoke(f"evaluate {name}", words)
        scores[name] = numbers(read_json(tmp_path / "told.json"))
    # Addresses in memory decide how a CPU adds, so the last digits vary.
    exact = pytest.approx(scores.pop("source.safetensors"), abs=1e-3)
    assert all(each == exact for each in scores.values())
    eight = replace(tiny(), decoder_num_heads=8)
    save_weights(to_official(build_model(tiny(), 0)), eight, "d.safetensors")
    invoke("evaluate d.safetensors", words)
    assert numbers(read_json(tmp_path / "told.json")) != exact
    torch.save(dict(torch.load("a.pth")), "bare.pth")
    assert exit_code(f"evaluate bare.pth --data {scenes}") == 2


def test_a_folder_is_sent_to_the_hub_with_its_card(weights, tmp_path, capsys, monkeypatch):
    hub, listed, address = Mock(), [], "https://hub/us/mine/commit/1"

    def upload(repo_id, folder_path, allow_patterns):
        listed.extend(sorted(allow_patterns))
        return address

    hub.upload.side_effect = upload
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", hub.create)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", hub.upload)
    out = tmp_path / "hf"
    out.mkdir()
    (out / "README.md").write_text("# Mine")
    assert exit_code(f"export {weights} --to huggingface --out {out}") == 2
    assert "README.md that no export wrote" in capsys.readouterr().err
    (out / "README.md").rename(out / "private.md")  # which is not sent
    invoke(f"export {weights} --to huggingface --out {out} --license mit --push us/mine")
    assert address in capsys.readouterr().out
    assert listed == ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    sent = call.upload(repo_id="us/mine", folder_path=out, allow_patterns=ANY)
    assert hub.mock_calls == [call.create("us/mine", exist_ok=True), sent]
    assert "license: mit" in (out / "README.md").read_text()


def test_a_checkpoint_that_was_copied_under_another_name(weights, tmp_path):
    copy = tmp_path / "run" / "checkpoints" / "good"
    copy.mkdir(parents=True)
    shutil.copy(weights, copy / "model.safetensors")
    save_config(replace(little(), out=str(tmp_path / "run")))
    invoke(f"export {copy} --to huggingface --out {tmp_path}/hf --trust")
    assert "## Training" in (tmp_path / "hf" / "README.md").read_text()


def test_what_cannot_be_sent_is_one_line(weights, tmp_path, capsys, monkeypatch):
    refuse = Mock(side_effect=RuntimeError("401 Unauthorized\nand more"))
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    out = f"--out {tmp_path}/hf"
    for words, message in (
        (f"--to safetensors {out} --push us/mine", "--push us/mine: expected USER/NAME"),
        (f"--to huggingface {out} --push mine", "--push mine: expected USER/NAME"),
        (f"--to huggingface {out} --push us/mine", "not sent (401 Unauthorized)"),
    ):
        assert exit_code(f"export {weights} {words}") == 2
        (told,) = (line for line in capsys.readouterr().err.splitlines() if "gigamask:" in line)
        assert message in told

"""Each format is read by who it is for, and a copy that is none is refused."""

import errno
import importlib.util
import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask import files, load_model
from gigamask.errors import GigamaskError
from gigamask.export import huggingface, official, onnx
from gigamask.export.probe import Probe, compare, draw_prompts, keep_if_equal
from gigamask.models import state_dict, weight_files
from gigamask.models.configs import SamConfig, tiny
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from tests.errors import error_line
from tests.limits import files_limited
from tests.little import COMPACT
from tests.tiers import long_after

# Windows of 3 on 8 x 8 tokens need padding.
SPEC = replace(tiny(), image_size=64, window_size=3, depth=2, global_attn_indexes=(1,))


@pytest.fixture
def model() -> Sam:
    """A model all of whose parameters are away from zero."""
    model, chance = build_model(SPEC, 0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=chance))
    return model.eval()


@pytest.mark.slow
def test_a_pth_is_metas(model, tmp_path):
    told = official.write_pth(model, str(tmp_path / "model.pth"))
    assert told == {
        "files": [str(tmp_path / "model.pth")],
        "tensors": len(model.state_dict()),
        "difference": 0.0,
    }
    assert set(torch.load(tmp_path / "model.pth", weights_only=True)) == set(model.state_dict())


@pytest.mark.slow
def test_config_is_inferred_from_safetensors(model, tmp_path):
    official.write_safetensors(model, tmp_path / "model.safetensors")
    state, spec = state_dict.read_weights(tmp_path / "model.safetensors")
    assert spec == SPEC
    torch.testing.assert_close(state, model.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("write", [official.write_pth, official.write_safetensors])
def test_an_export_that_states_other_heads_is_refused(model, write, tmp_path, monkeypatch):
    """Every tensor is equal and of the right shape; only the outputs tell."""
    make_spec = weight_files.make_spec
    monkeypatch.setattr(
        weight_files, "make_spec", lambda config: make_spec(replace(config, decoder_num_heads=8))
    )
    out = tmp_path / f"model{ {official.write_pth: '.pth'}.get(write, '.safetensors') }"
    out.write_text("an earlier export")
    with error_line(rf"^{re.escape(str(out))}.*logits.*not a copy"):
        write(model, out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_text() == "an earlier export"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["new", "there", "link", "."])
def test_an_export_is_moved_within_its_disk(model, name, tmp_path, monkeypatch):
    """A folder that is there may be another disk; it is written to, not what is beside it."""
    (tmp_path / "here" / "there").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "here")
    final = Path(os.path.realpath(name))

    @keep_if_equal()
    def write(model: Sam, out: Path, fault: Exception | None) -> dict:
        assert out.name == Path(os.path.abspath(name)).name
        assert out.parent.parent == (final.parent if name == "new" else final)
        out.mkdir()
        (out / "model").write_text("new")
        if fault:
            raise fault
        return {"files": [str(out / "model")]}

    for fault in (OSError(errno.ENOSPC, "no space"), GigamaskError("differs")):
        with pytest.raises(type(fault), match=r"^\[Errno 28\] no space$|^differs$"):
            write(model, Path(name), fault)
        assert not list(tmp_path.rglob("*model"))
    assert write(model, Path(name), None) == {"files": [str(Path(name) / "model")]}
    assert (final / "model").read_text() == "new"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_prompts_are_drawn_until_they_lie_on_no_tie(model):
    """Of an answer with a threshold exactly where the first prompts are, rounding decides."""
    embedding, thresholds = model.encode(torch.rand(1, 3, 64, 64), torch.tensor([[48, 64]])), []

    def answers(embedding, prompts):
        logits, iou = model.decode(embedding, torch.zeros(1).long(), prompts)
        thresholds.append(logits.double().mean())
        return {"predicted IoU": iou + 2e-3 * (thresholds[-1] > thresholds[0])}

    with torch.no_grad():
        points = draw_prompts(model, embedding, answers)[0]
        on_tie = draw_prompts(model, embedding)[0]
        for prompts in (points, on_tie):
            answers(embedding, prompts)
    assert abs(thresholds[-2] - thresholds[0]) > 1e-5
    assert thresholds[-1] == thresholds[0]


@pytest.mark.long
def test_flipped_bits_of_an_export_are_found(model, tmp_path, record_property):
    """Each is an error, or changes nothing, as in a date within the zip."""
    record_property("tried", 160)
    official.write_pth(model, tmp_path / "model.pth")
    official.write_safetensors(model, tmp_path / "model.safetensors")
    model.save_pretrained(tmp_path / "hf")
    chance, found = np.random.default_rng(0), 0
    files_by_source = {
        "model.pth": ("model.pth",),
        "model.safetensors": ("model.safetensors",),
        "hf": ("hf/model.safetensors", "hf/config.json"),
    }
    for source, names in files_by_source.items():
        for path in (tmp_path / name for name in names):
            content = path.read_bytes()
            for bit in chance.integers(8 * len(content), size=40).tolist():
                flipped = bytearray(content)
                flipped[bit // 8] ^= 1 << bit % 8
                path.write_bytes(flipped)
                try:
                    loaded = Sam.from_pretrained(tmp_path / source)
                except GigamaskError:
                    found += 1
                else:
                    assert "config.json" in path.name or source == "model.pth", bit
                    assert loaded.config == model.config
                    state = model.state_dict()
                    torch.testing.assert_close(loaded.state_dict(), state, rtol=0, atol=0)
            path.write_bytes(content)
    assert found >= 110


@pytest.mark.slow
def test_a_folder_is_hugging_faces(model, tmp_path):
    """Its processor scales, pads and normalises as SAM's own does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = huggingface.write_huggingface(model, tmp_path / "hf")
    assert told["difference"] < 5e-4, "its epsilon is another one"
    assert [path.rpartition("/")[2] for path in told["files"]] == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    processor = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"longest_edge": 64}
    assert processor["mask_size"] == {"longest_edge": SPEC.mask_size}
    assert np.allclose(
        np.array(processor["image_mean"]) * 255, model.pixel_mean.flatten(), atol=1e-3
    )
    state, spec = state_dict.read_weights(tmp_path / "hf")
    torch.testing.assert_close(state, model.state_dict(), rtol=0, atol=0)
    assert replace(spec, drop_path_rate=SPEC.drop_path_rate, custom_init=SPEC.custom_init) == SPEC
    processor["image_mean"] = [0.5] * 3
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(processor))
    with error_line(r"preprocessor_config.json: image_mean is \[0.5, .*the model's is \[0.485"):
        state_dict.read_weights(tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", long_after(1, [{}, {"image_size": 96, "global_attn_indexes": ()}])
)
@pytest.mark.parametrize("most, files", [(onnx.MOST_BYTES, 2), (0, 4)])
def test_onnx_predicts_as_the_model_does(change, most, files, tmp_path, monkeypatch):
    """Weights that are more than a file may have lie beside it."""
    spec: SamConfig = replace(SPEC, **change)
    monkeypatch.setattr(onnx, "MOST_BYTES", most)
    told = onnx.write_onnx(build_model(spec, 0).eval(), tmp_path / "onnx")
    assert told["difference"] < 1e-4
    names = [path.rpartition("/")[2] for path in told["files"]]
    assert names[:: files // 2] == ["encoder.onnx", "decoder.onnx"]
    assert sorted(names) == sorted(os.listdir(tmp_path / "onnx"))
    assert len(names) == files
    onnx.open_session(told["files"][0])


@pytest.mark.long
@pytest.mark.parametrize("config", [COMPACT, SPEC])
def test_onnx_scores_classes_as_the_model_does(config, tmp_path, no_shape_checks):
    """Those of all four masks, the first of which is the single mask; metadata has the names."""
    model = build_model(replace(config, class_names=("cat", "a dog", "bird")), 0).eval()
    assert onnx.write_onnx(model, tmp_path)["difference"] < 1e-4
    session = onnx.open_session(tmp_path / "decoder.onnx")
    spec = json.loads(session.get_modelmeta().custom_metadata_map["spec"])
    assert spec["class_names"] == ["cat", "a dog", "bird"]
    probe = Probe.from_model(model)
    with torch.no_grad():
        embedding = model.encode(probe.pixels, probe.valid)
        for prompts in probe.prompts[:2]:
            inputs = onnx._decoder_inputs(embedding, prompts, (40, 60), config.mask_size)
            found = onnx.run_session(session, inputs)["class_scores"]
            expected = model.predict(embedding, torch.zeros(1).long(), prompts).class_logits
            torch.testing.assert_close(found[:, 1:], expected.softmax(-1), rtol=1e-3, atol=1e-4)
            assert found.shape == (1, 4, 3)


@pytest.mark.long
def test_onnx_takes_metas_six_inputs_in_any_number_and_size(model, tmp_path):
    from onnxruntime import InferenceSession

    onnx.write_onnx(model, tmp_path)
    session = InferenceSession(str(tmp_path / "decoder.onnx"), providers=["CPUExecutionProvider"])
    names = "image_embeddings point_coords point_labels mask_input has_mask_input orig_im_size"
    names = names.split()
    assert [each.name for each in session.get_inputs()] == names
    assert {each.type for each in session.get_inputs()} == {"tensor(float)"}
    probe = Probe.from_model(model)
    embedding = model.encode(probe.pixels, probe.valid).detach()
    for prompts, count, size in ((1, 1, (40, 60)), (3, 5, (77, 31)), (1, 1, (1, 400))):
        points = torch.rand(prompts, count, 2) * 60
        labels = torch.tensor([[1.0, 0, 1, 2, -1][:count]]).repeat(prompts, 1)
        blank = torch.zeros(prompts, 1, SPEC.mask_size, SPEC.mask_size)
        none = torch.zeros(prompts)
        inputs = (embedding, points, labels, blank, none, torch.tensor(size).float())
        given = dict(zip(names, inputs, strict=True))
        masks, iou, low = session.run(None, {name: value.numpy() for name, value in given.items()})
        assert masks.shape == (prompts, 4, *size)
        assert iou.shape == (prompts, 4)
        assert low.shape == (prompts, 4, SPEC.mask_size, SPEC.mask_size)
        mine = onnx.OnnxDecoder(model)(**given)
        assert all(
            np.allclose(theirs, ours.detach(), atol=1e-4)
            for theirs, ours in zip((masks, iou, low), mine, strict=True)
        )


@pytest.mark.long
def test_a_single_mask_goes_back_in_as_a_prompt(model, tmp_path):
    onnx.write_onnx(model, tmp_path, return_single_mask=True)
    session = onnx.open_session(tmp_path / "decoder.onnx")
    probe, every = Probe.from_model(model), onnx.OnnxDecoder(model)
    embedding = model.encode(probe.pixels, probe.valid).detach()
    low, none = torch.zeros(2, 1, SPEC.mask_size, SPEC.mask_size), torch.zeros(2)
    for labels in ([1, -1], [2, 3], [1, 0, -1]):
        points = torch.rand(2, len(labels), 2) * 60
        named = torch.tensor([labels, labels]).float()
        inputs = (embedding, points, named, low, none, torch.tensor([40.0, 60.0]))
        given = dict(zip([each.name for each in session.get_inputs()], inputs, strict=True))
        found = onnx.run_session(session, given)
        masks, iou, lows = every(*inputs)
        choice = slice(1, None) if len(labels) == 2 else slice(1)  # of the four
        lows, masks, iou = lows[:, choice], masks[:, choice], iou[:, choice]
        best = (lows - found["low_res_masks"]).abs().amax((2, 3)).argmin(1)
        for name, each in (("masks", masks), ("iou_predictions", iou), ("low_res_masks", lows)):
            expected = each[torch.arange(2), best][:, None].detach()
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found["iou_predictions"][:, 0], iou.amax(1), rtol=0, atol=1e-4)
        low, none = found["low_res_masks"], torch.ones(2)


@pytest.mark.long
def test_onnx_in_half_precision_embeds_several_images(model, tmp_path, monkeypatch):
    import onnx as library
    from onnxruntime import InferenceSession

    told = onnx.write_onnx(model, tmp_path, "fp16")
    assert 1e-5 < told["difference"] < 1e-2
    graph = library.load(tmp_path / "encoder.onnx").graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    product = next(node for node in graph.node if node.op_type == "MatMul")
    assert kinds[product.input[1]] == library.TensorProto.FLOAT16
    session = InferenceSession(str(tmp_path / "encoder.onnx"), providers=["CPUExecutionProvider"])
    probe = Probe.from_model(model)
    pixels, valid = probe.pixels.repeat(3, 1, 1, 1), probe.valid.repeat(3, 1)
    (found,) = session.run(None, {"image": pixels.numpy(), "input_size": valid.numpy()})
    assert found.dtype == np.float32
    expected = model.encode(pixels, valid).detach().numpy()
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
    monkeypatch.setitem(onnx.TOLERANCES, "fp16", 1e-9)
    with error_line(r"onnxruntime returns .* more than 1e-09"):
        onnx.write_onnx(model, tmp_path / "refused", "fp16")
    assert not (tmp_path / "refused").exists()


@pytest.mark.long
def test_the_packaged_model_in_half_precision(tmp_path):
    """It computes where its windows lie in float64."""
    assert 1e-5 < onnx.write_onnx(load_model("starter"), tmp_path, "fp16")["difference"] < 1e-2


def test_what_differs_is_said():
    ours = {"iou": torch.tensor([1.0, 2.0])}
    assert compare(ours, {"iou": torch.tensor([1.0, 2.0002])}, "it") == pytest.approx(1e-4, rel=0.1)
    with error_line(r"iou.*0\.05.*0\.001"):
        compare(ours, {"iou": torch.tensor([1.1, 2.0])}, "it")
    with error_line("differs by nan"):
        compare(ours, {"iou": torch.tensor([torch.nan, 2.0])}, "it")
    with error_line(r"iou.*\(3,\).*\(2,\)"):
        compare(ours, {"iou": torch.zeros(3)}, "it")


@pytest.mark.parametrize(
    "write, package",
    [(huggingface.write_huggingface, "transformers"), (onnx.write_onnx, "onnx and onnxruntime")],
)
def test_packages_that_are_missing_are_named(model, write, package, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with error_line(rf"{package}.*gigamask\["):
        write(model, tmp_path / "out")


def test_paths_must_fit_the_format(model, tmp_path):
    (tmp_path / "file").touch()
    for write, message in (
        (official.write_pth, r"file.*\.pth"),
        (official.write_safetensors, r"file.*\.safetensors"),
        (huggingface.write_huggingface, "file.*folder"),
        (onnx.write_onnx, "file.*folder"),
    ):
        with error_line(message):
            write(model, tmp_path / "file")


@pytest.mark.slow
@pytest.mark.parametrize(
    "write, name",
    [
        (official.write_pth, "sam.pth"),
        (official.write_safetensors, "sam.safetensors"),
        (huggingface.write_huggingface, "folder"),
        (onnx.write_onnx, "pair"),
    ],
)
def test_a_disk_that_is_full_says_so_and_keeps_no_half(model, write, name, tmp_path):
    """The error names the file, at the first bytes or later: the command prints one line."""
    pytest.importorskip("onnx")
    pytest.importorskip("transformers")
    for most in (50_000,) if write is onnx.write_onnx else (100, 50_000):
        with (
            files_limited(most),
            pytest.raises(OSError, match=rf"{errno.EFBIG}.*File too large") as full,
        ):
            write(model, tmp_path / name)
        assert str(tmp_path) in full.value.filename
        assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_what_is_no_matter_of_the_disk_stays_what_it_is(tmp_path):
    refused = pytest.raises(RuntimeError, match=r"^no such operator$")
    with refused, files.report_write_errors(tmp_path):
        raise RuntimeError("no such operator")

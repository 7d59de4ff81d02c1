import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from gigamask.faults import Fault
from gigamask.model.sam import Sam
from gigamask.model.sizes import tiny, vit_b, vit_h, vit_l
from gigamask.model.start import build
from gigamask.model.weights import from_huggingface, infer_spec, load, read, resize_positions, resize_table, save, to_huggingface, to_official


@pytest.fixture(scope="module")
def model() -> Sam:
    return build(tiny(), 7)


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_save_read_load_gives_the_same_model(model, tmp_path):
    save(model, tmp_path / "model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        state, spec = read(path)
        assert spec == tiny()
        other = build(spec, 0)
        load(other, state, str(path))
        assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "step": 3},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {f"sam.{name}": value for name, value in state.items()},
        lambda state: {f"module._orig_mod.{name}".replace("blocks.0.", "blocks.0._orig_mod."): value for name, value in state.items()},
    ],
)
def test_pth_files_are_read_however_they_are_wrapped(model, tmp_path, wrap):
    torch.save(wrap(to_official(model)), tmp_path / "weights.pth")
    state, spec = read(tmp_path / "weights.pth")
    assert spec is None
    assert_same(state, to_official(model))


def test_a_hugging_face_folder_is_read(model, tmp_path):
    save_file({name: value.clone() for name, value in to_huggingface(to_official(model)).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sam", "mask_decoder_config": {"num_attention_heads": 2}}))
    state, spec = read(tmp_path)
    assert_same(state, to_official(model))
    assert spec == replace(tiny(), informed_start=False)


@pytest.mark.parametrize("make", [vit_b, vit_l, vit_h])
def test_the_spec_is_read_off_the_shapes(make):
    assert infer_spec(build(make(), 0, "meta").state_dict()) == make()


def test_a_model_without_windows_is_read_off_the_shapes():
    spec = replace(tiny(), global_blocks=(0, 1, 2, 3), window=16)
    assert infer_spec(build(spec, 0, "meta").state_dict(), decoder_heads=2) == replace(spec, informed_start=False)


def test_names_translate_there_and_back(model):
    state = to_official(model)
    there = to_huggingface(state)
    assert len(there) == len(state) + 1
    assert_same(from_huggingface(there), state)
    assert_same(from_huggingface({name: value for name, value in there.items() if not name.startswith("prompt_encoder.shared")}), state)


def test_positions_are_interpolated_to_another_side(model):
    larger = build(replace(tiny(), input_side=192), 0)
    load(larger, to_official(model), "weights")
    own, other = model.image_encoder, larger.image_encoder
    assert torch.equal(other.pos_embed, resize_positions(own.pos_embed, 24))
    assert torch.equal(other.blocks[0].attn.rel_pos_h, own.blocks[0].attn.rel_pos_h)
    assert torch.equal(other.blocks[1].attn.rel_pos_h, resize_table(own.blocks[1].attn.rel_pos_h, 47))


def test_interpolation_keeps_what_is_even_and_the_middle():
    assert torch.allclose(resize_positions(torch.full((1, 14, 14, 3), 2.5), 64), torch.full((1, 64, 64, 3), 2.5))
    table = torch.arange(27.0)[:, None].repeat(1, 2)
    assert resize_table(table, 127)[63].tolist() == pytest.approx([13, 13])
    assert resize_positions(torch.zeros(1, 4, 4, 2, dtype=torch.bfloat16), 8).dtype == torch.bfloat16


def test_loading_is_strict(model):
    state = to_official(model)
    target = build(tiny(), 0)
    before = to_official(target)
    lacking = {name: value for name, value in state.items() if not name.startswith("mask_decoder.iou_token")}
    with pytest.raises(Fault, match=r"w\.pth: lacks 1 \(mask_decoder\.iou_token\.weight\); the model wants 202 tensors"):
        load(target, lacking, "w.pth")
    with pytest.raises(Fault, match=r"w\.pth: has unknown 4 \(a, b, c, \.\.\.\)"):
        load(target, {**state, **dict.fromkeys("abcd", torch.zeros(1))}, "w.pth")
    with pytest.raises(Fault, match=r"w\.pth: 1 \(mask_decoder\.iou_token\.weight\) of another shape: \(1, 32\), the model's is \(1, 64\)"):
        load(target, {**state, "mask_decoder.iou_token.weight": torch.zeros(1, 32)}, "w.pth")
    assert_same(before, to_official(target))


def test_paths_that_hold_no_weights_are_named(tmp_path):
    with pytest.raises(Fault, match=r"nowhere\.pth: no such file; give a \.pth"):
        read(tmp_path / "nowhere.pth")
    with pytest.raises(Fault, match=r"holds no model\.safetensors; give a folder that does"):
        read(tmp_path)
    (tmp_path / "short.safetensors").write_bytes(b"\x00\x01")
    with pytest.raises(Fault, match=r"short\.safetensors: cannot be read as safetensors \(.*\); fetch or write it again"):
        read(tmp_path / "short.safetensors")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(Fault, match=r"text\.pth: cannot be read as weights alone \(.*\); save its state dict"):
        read(tmp_path / "text.pth")
    torch.save({"epoch": 3}, tmp_path / "number.pth")
    with pytest.raises(Fault, match=r"number\.pth: holds no state dict of tensors; save the model's state_dict\(\)"):
        read(tmp_path / "number.pth")


def test_specs_that_cannot_be_used_are_named(model, tmp_path):
    save_file(to_official(model), tmp_path / "odd.safetensors", metadata={"spec": '{"global_blocks": [1], "colour": "red"}'})
    with pytest.raises(Fault, match=r"odd\.safetensors: its spec cannot be used \(.*colour.*\); it was written by another version"):
        read(tmp_path / "odd.safetensors")
    save_file(to_official(model), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(Fault, match=r"config\.json: is not the config of a SamModel \(.*\); export the folder again"):
        read(tmp_path)


def test_weights_of_another_kind_are_refused():
    with pytest.raises(Fault, match=r"the weights are not a SAM's: 'image_encoder.pos_embed' is missing"):
        infer_spec({"layer.weight": torch.zeros(1)})
    with pytest.raises(Fault, match=r"fc\.weight: not the name of a tensor of a SAM; take it out"):
        to_huggingface({"fc.weight": torch.zeros(1)})
    with pytest.raises(Fault, match=r"fc\.weight: not the name of a tensor of a SamModel"):
        from_huggingface({"fc.weight": torch.zeros(1)})

import argparse
import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gigamask import recipes
from gigamask.models.configs import SamConfig, mae_tiny, tiny, vit_b, vit_h, vit_l
from gigamask.models.convert import (
    from_huggingface,
    from_mae,
    huggingface_config,
    infer_config,
    resample_abs_pos_embed,
    resample_patch_embed,
    resample_rel_pos,
    to_huggingface,
)
from gigamask.models.families import SAM_RECIPES
from gigamask.models.init import build_model
from gigamask.models.mae import MAE
from gigamask.models.sam.sam import Sam
from gigamask.models.state_dict import load_weights, read_weights, save_weights, to_official
from gigamask.models.weight_files import make_spec
from tests.errors import error_line
from tests.little import COMPACT
from tests.unit.models.test_mae import SPEC


@pytest.fixture(scope="module")
def model() -> Sam:
    return build_model(tiny(), 7)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel])
def test_a_state_dict_that_a_program_saves_states_the_configuration(model, wrap, tmp_path):
    torch.save({"model": wrap(model).state_dict(), "epoch": 3}, tmp_path / "own.pth")
    loaded = Sam.from_pretrained(tmp_path / "own.pth")
    assert loaded.config == model.config
    assert_same(loaded.state_dict(), model.state_dict())


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_save_read_load_gives_the_same_model(model, tmp_path):
    save_weights(to_official(model), model.config, tmp_path / "model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    for path in (tmp_path, str(tmp_path / "model.safetensors")):
        state, config = read_weights(path)
        assert config == tiny()
        other = build_model(config, 0)
        load_weights(other, state, str(path))
        assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "step": 3},
        lambda state: {"model_state_dict": state, "epoch": 3, "loss": 0.5},
        lambda state: {
            "state_dict": {f"model.module.{name}": value for name, value in state.items()}
        },
        lambda state: {f"sam.{name}": value for name, value in state.items()},
        lambda state: {"model_state": state, "decoder_state": {"weight": torch.zeros(1)}},
        lambda state: {
            f"module._orig_mod.{name}".replace("blocks.0.", "blocks.0._orig_mod."): value
            for name, value in state.items()
        },
    ],
)
def test_pth_files_are_read_however_they_are_wrapped(model, tmp_path, wrap):
    torch.save(wrap(to_official(model)), tmp_path / "weights.pth")
    state, config = read_weights(tmp_path / "weights.pth")
    assert config is None
    assert_same(state, to_official(model))


def test_a_hugging_face_folder_is_read(model, tmp_path):
    save_file(
        {name: value.clone() for name, value in to_huggingface(to_official(model)).items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(tiny())))
    state, config = read_weights(tmp_path)
    assert_same(state, to_official(model))
    assert config == replace(tiny(), custom_init=False)


@pytest.mark.parametrize("make", [vit_b, vit_l, vit_h])
def test_the_spec_is_read_off_the_shapes(make):
    assert infer_config(build_model(make(), 0, "meta").state_dict(), "w") == make()
    smaller = replace(make(), image_size=512)
    assert infer_config(build_model(smaller, 0, "meta").state_dict(), "w") == smaller


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        replace(vit_b(), depth=11, global_attn_indexes=(2,)),
        replace(vit_b(), window_size=7),
        replace(vit_b(), decoder_mlp=1024),
        replace(vit_b(), global_attn_indexes=(2, 5, 8)),
    ],
)
def test_a_configuration_that_shapes_do_not_determine_is_refused(config):
    with error_line(r"^w: .*configuration.*not known"):
        infer_config(build_model(config, 0, "meta").state_dict(), "w")


def test_names_translate_there_and_back(model):
    state = to_official(model)
    there = to_huggingface(state)
    assert len(there) == len(state) + 1
    assert_same(from_huggingface(there), state)
    assert_same(
        from_huggingface(
            {
                name: value
                for name, value in there.items()
                if not name.startswith("prompt_encoder.shared")
            }
        ),
        state,
    )


def test_positions_are_interpolated_to_another_side(model):
    larger = build_model(replace(tiny(), image_size=192), 0)
    load_weights(larger, to_official(model), "weights")
    own, other = model.image_encoder, larger.image_encoder
    assert torch.equal(other.pos_embed, resample_abs_pos_embed(own.pos_embed, 24))
    assert torch.equal(other.blocks[0].attn.rel_pos_h, own.blocks[0].attn.rel_pos_h)
    assert torch.equal(
        other.blocks[1].attn.rel_pos_h, resample_rel_pos(own.blocks[1].attn.rel_pos_h, 47)
    )


def test_interpolation_keeps_what_is_even_and_the_middle():
    assert torch.allclose(
        resample_abs_pos_embed(torch.full((1, 14, 14, 3), 2.5), 64), torch.full((1, 64, 64, 3), 2.5)
    )
    table = torch.arange(27.0)[:, None].repeat(1, 2)
    assert resample_rel_pos(table, 127)[63].tolist() == pytest.approx([13, 13])
    assert (
        resample_abs_pos_embed(torch.zeros(1, 4, 4, 2, dtype=torch.bfloat16), 8).dtype
        == torch.bfloat16
    )


def test_loading_is_strict(model):
    state = to_official(model)
    target = build_model(tiny(), 0)
    before = to_official(target)
    lacking = {
        name: value
        for name, value in state.items()
        if not name.startswith("mask_decoder.iou_token")
    }
    with error_line(r"w\.pth.*1.*mask_decoder\.iou_token\.weight"):
        load_weights(target, lacking, "w.pth")
    with error_line(r"w\.pth.*4.*a, b, c"):
        load_weights(target, {**state, **dict.fromkeys("abcd", torch.zeros(1))}, "w.pth")
    with error_line(r"w\.pth.*mask_decoder\.iou_token\.weight.*\(1, 32\).*\(1, 64\)"):
        load_weights(
            target, {**state, "mask_decoder.iou_token.weight": torch.zeros(1, 32)}, "w.pth"
        )
    assert_same(before, to_official(target))


def test_paths_that_hold_no_weights_are_named(tmp_path):
    with error_line(r"nowhere\.pth"):
        read_weights(tmp_path / "nowhere.pth")
    with error_line(r"model\.safetensors"):
        read_weights(tmp_path)
    (tmp_path / "short.safetensors").write_bytes(b"\x00\x01")
    with error_line(r"short\.safetensors"):
        read_weights(tmp_path / "short.safetensors")
    (tmp_path / "text.pth").write_text("no weights")
    with error_line(r"text\.pth"):
        read_weights(tmp_path / "text.pth")
    for junk in (
        b"hello",
        b"",
        b"\x80\x02q",
        b"\x80\x02cos\nsystem\n",
        b"\xff\xd8\xff\xe0 a picture",
        b"(lp0\n.",
    ):
        (tmp_path / "junk.pth").write_bytes(junk)
        with error_line(r"junk\.pth"):
            read_weights(tmp_path / "junk.pth")
    torch.save({"epoch": 3}, tmp_path / "number.pth")
    with error_line(r"number\.pth.*state_dict"):
        read_weights(tmp_path / "number.pth")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_of_a_diverged_training_are_refused(model, tmp_path, value):
    state = to_official(model)
    state["mask_decoder.iou_token.weight"] = torch.full((1, 64), value)
    torch.save(state, tmp_path / "w.pth")
    save_weights(state, model.config, tmp_path / "w.safetensors")
    for name in ("w.pth", "w.safetensors"):
        with error_line(f"{name}.*NaN or infinite"):
            read_weights(tmp_path / name)


@pytest.mark.slow
def test_specs_that_cannot_be_used_are_named(model, tmp_path):
    save_file(
        to_official(model),
        tmp_path / "odd.safetensors",
        metadata={"spec": '{"global_attn_indexes": [1], "colour": "red"}'},
    )
    with error_line(r"odd\.safetensors.*colour"):
        read_weights(tmp_path / "odd.safetensors")
    save_file(
        {name: value.clone() for name, value in to_huggingface(to_official(model)).items()},
        tmp_path / "model.safetensors",
    )
    stated = huggingface_config(tiny())
    for content in (
        [1],
        {"model_type": "sam2"},
        {"vision_config": 3},
        {"vision_config": {"hidden_size": "many"}},
        stated | {"vision_config": stated["vision_config"] | {"hidden_act": "relu"}},
        stated | {"mask_decoder_config": {"num_hidden_layers": 3}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with error_line(r"config\.json"):
            read_weights(tmp_path)


def test_weights_of_another_kind_are_refused():
    with error_line(r"SAM.*'image_encoder.pos_embed'"):
        infer_config({"layer.weight": torch.zeros(1)}, "w")
    with error_line(r"fc\.weight.*SAM"):
        to_huggingface({"fc.weight": torch.zeros(1)})
    with error_line(r"fc\.weight.*SamModel"):
        from_huggingface({"fc.weight": torch.zeros(1)})


@pytest.fixture(scope="module")
def mae() -> MAE:
    return build_model(mae_tiny(), 5)


def test_a_masked_autoencoder_is_saved_read_and_loaded(mae, tmp_path):
    save_weights(to_official(mae), mae.config, tmp_path / "model.safetensors")
    state, config = read_weights(tmp_path)
    assert config == mae_tiny()
    other = build_model(config, 0)
    other.load_init(str(tmp_path))
    assert_same(mae.state_dict(), other.state_dict())
    with error_line(r"1.*cls_token"):
        load_weights(
            other, {name: value for name, value in state.items() if name != "cls_token"}, "w"
        )


@pytest.mark.slow
def test_a_stated_configuration_is_whole(model, tmp_path):
    """What a file leaves out is never guessed, except its kind, a SAM, and what is newer."""
    parts = ("encoder", "decoder")
    fields = {name: value for name, value in asdict(tiny()).items() if name not in parts}

    def read(spec):
        save_file(
            to_official(model), tmp_path / "w.safetensors", metadata={"spec": json.dumps(spec)}
        )
        return read_weights(tmp_path / "w.safetensors")[1]

    assert read(fields) == tiny()
    assert "stretch" not in make_spec(tiny()), "files of earlier versions have none"
    assert read({**fields, "stretch": True}).stretch
    del fields["stretch"]
    assert read(fields) == tiny()
    for wrong, name in (
        ({**fields, "kind": "bird"}, "'bird'"),
        (
            {key: value for key, value in fields.items() if key != "decoder_num_heads"},
            "decoder_num",
        ),
        ({**fields, "depth": "4"}, "int"),
        ({**fields, "drop_path_rate": None}, "float"),
        ({**fields, "num_heads": 0}, "num_heads"),
    ):
        with error_line(rf"w\.safetensors.*{name}"):
            read(wrong)


@pytest.mark.slow
def test_a_compact_model_states_its_parts_and_loads_back(tmp_path):
    compact = build_model(COMPACT, 7)
    save_weights(to_official(compact), COMPACT, tmp_path / "model.safetensors")
    state, config = read_weights(tmp_path / "model.safetensors")
    assert config == COMPACT
    assert type(config.encoder.widths) is tuple
    assert_same(Sam.from_pretrained(tmp_path).state_dict(), compact.state_dict())
    other = build_model(config, 0)
    load_weights(other, state, "w")
    assert_same(other.state_dict(), compact.state_dict())


def test_parts_of_sam_are_not_stated():
    """So that older versions read the files of all models that they know."""
    assert {"encoder", "decoder"}.isdisjoint(make_spec(tiny()))
    assert make_spec(COMPACT)["encoder"]["name"] == "conv_pyramid"
    assert make_spec(COMPACT)["decoder"]["name"] == "window"


def refuse(folder, spec, message):
    """Check that a file which states this configuration is refused."""
    path = folder / "w.safetensors"
    save_file({"w": torch.zeros(1)}, path, metadata={"spec": json.dumps(spec)})
    with error_line(message):
        read_weights(path)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda fields: fields.pop("widths"), "widths is missing"),
        (lambda fields: fields.update(colour=3), "colour is unknown"),
        (lambda fields: fields.update(name="bird"), "'bird'"),
        (lambda fields: fields.pop("name"), "''"),
        (lambda fields: fields.update(widths="many"), "array"),
        (lambda fields: fields.update(widths=[8]), "length"),
        (lambda fields: fields.update(widths=[-8] * len(fields["widths"])), "widths"),
    ],
)
def test_parts_that_cannot_be_used_are_named(tmp_path, part, change, message):
    spec = json.loads(json.dumps(make_spec(COMPACT)))
    change(spec[part])
    refuse(tmp_path, spec, rf"w\.safetensors.*{message}")


@pytest.mark.parametrize("stated", [3, [1], True, {"name": ["window"]}, "window", {}])
def test_a_decoder_of_another_type_is_refused(tmp_path, stated):
    spec = {**make_spec(COMPACT), "decoder": stated}
    refuse(tmp_path, spec, r"w\.safetensors")


def test_a_missing_part_is_sams(tmp_path):
    """Which does not fit the other."""
    for part in ("encoder", "decoder"):
        spec = make_spec(COMPACT)
        del spec[part]
        refuse(tmp_path, spec, "conv_pyramid")


def without_decoder(state):
    return {
        name: value
        for name, value in state.items()
        if not name.startswith(("decoder", "mask_token"))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state},
        lambda state: {"model": without_decoder(state)},
        lambda state: {
            "model": state,
            "args": argparse.Namespace(lr=1e-3),
            "epoch": np.int64(3),
            "best": [np.float32(0.5), np.bool_(True), np.arange(3.0)],
            "optimizer": {"state": {}, "param_groups": []},
        },
    ],
)
def test_an_image_encoder_starts_from_a_masked_autoencoder(mae, tmp_path, wrap):
    torch.save(wrap(to_official(mae)), tmp_path / "mae.pth")
    sam, fresh = build_model(tiny(), 7), build_model(tiny(), 7).state_dict()
    sam.load_init(f"mae:{tmp_path / 'mae.pth'}")
    theirs, ours = mae.state_dict(), sam.state_dict()
    assert torch.equal(ours["image_encoder.pos_embed"].flatten(1, 2), theirs["pos_embed"][:, 1:])
    assert torch.equal(
        ours["image_encoder.patch_embed.proj.weight"], theirs["patch_embed.proj.weight"]
    )
    for part, other in (
        ("norm1", "norm1"),
        ("attn.qkv", "attn.qkv"),
        ("attn.proj", "attn.proj"),
        ("mlp.fc1", "mlp.lin1"),
        ("mlp.fc2", "mlp.lin2"),
    ):
        for kind in ("weight", "bias"):
            assert torch.equal(
                ours[f"image_encoder.blocks.2.{other}.{kind}"], theirs[f"blocks.2.{part}.{kind}"]
            )
    kept = [
        name
        for name in fresh
        if "rel_pos" in name or "neck" in name or not name.startswith("image_encoder.")
    ]
    assert len(fresh) - len(kept) == 3 + 4 * 12
    assert all(torch.equal(ours[name], fresh[name]) for name in kept)
    assert not any(ours[name].any() for name in ours if "rel_pos" in name)


def test_positions_and_patches_of_a_masked_autoencoder_are_fitted():
    config = replace(SPEC, image_size=70, patch_size=14, num_heads=2, decoder_num_heads=2)
    mae = build_model(config, 0)
    sam = build_model(
        replace(
            tiny(),
            image_size=192,
            patch_size=16,
            embed_dim=24,
            depth=2,
            num_heads=2,
            global_attn_indexes=(1,),
        ),
        0,
    )
    found = from_mae(mae.state_dict(), sam.config, "w")
    load_weights(sam, {**sam.state_dict(), **found}, "w")
    positions = mae.pos_embed[:, 1:].unflatten(1, (5, 5))
    assert torch.equal(sam.image_encoder.pos_embed, resample_abs_pos_embed(positions, 12))
    assert torch.equal(
        sam.image_encoder.patch_embed.proj.weight,
        resample_patch_embed(mae.patch_embed.proj.weight, 16),
    )


def test_resampled_kernel_gives_the_same_output_on_resized_patches():
    """Exactly: a patch of any picture, enlarged; also one of a single color."""
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(5, 3, 14, 14, generator=generator, dtype=torch.float64)
    picture = torch.rand(4, 3, 14, 14, generator=generator, dtype=torch.float64)
    larger = resample_patch_embed(kernel, 16)
    enlarged = torch.nn.functional.interpolate(
        picture, size=(16, 16), mode="bicubic", antialias=True
    )
    answers, expected = (
        torch.einsum("bcij,ocij->bo", enlarged, larger),
        torch.einsum("bcij,ocij->bo", picture, kernel),
    )
    assert torch.allclose(answers, expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(larger.sum((2, 3)), kernel.sum((2, 3)), rtol=1e-10, atol=1e-10)
    assert resample_patch_embed(kernel, 14) is kernel
    assert resample_patch_embed(kernel.float(), 16).dtype == torch.float32


@pytest.mark.slow
def test_a_masked_autoencoder_that_does_not_fit_is_named(mae, tmp_path):
    state = to_official(mae)
    deeper, wider = replace(tiny(), depth=6), replace(tiny(), embed_dim=48)
    with error_line(r"4.*96.*6.*96.*--model\.depth 4 --model\.embed-dim 96"):
        from_mae(state, deeper, "w")
    with error_line(r"4.*blocks.*96.*4.*48"):
        from_mae(state, wider, "w")
    with error_line(r"1.*blocks\.3\.mlp\.fc1\.bias"):
        from_mae(
            {name: value for name, value in state.items() if name != "blocks.3.mlp.fc1.bias"},
            tiny(),
            "w",
        )
    with error_line(r"255 patches"):
        from_mae({**state, "pos_embed": state["pos_embed"][:, 1:]}, tiny(), "w")
    fewer = build_model(replace(mae_tiny(), num_heads=2), 0)
    save_weights(to_official(fewer), fewer.config, tmp_path / "heads.safetensors")
    with error_line(r"heads\.safetensors.*2.*3.*--model\.num-heads 2"):
        build_model(tiny(), 0).load_init(f"mae:{tmp_path / 'heads.safetensors'}")


@pytest.mark.slow
def test_mae_and_sam_weights_are_distinguished(mae, model, tmp_path):
    save_weights(to_official(mae), mae.config, tmp_path / "mae.safetensors")
    save_weights(to_official(model), model.config, tmp_path / "sam.safetensors")
    with error_line(r"mae\.safetensors.*mae:.*mae\.safetensors"):
        build_model(tiny(), 0).load_init(str(tmp_path / "mae.safetensors"))
    with error_line(r"sam\.safetensors.*3.*pos_embed.*patch_embed"):
        build_model(tiny(), 0).load_init(f"mae:{tmp_path / 'sam.safetensors'}")
    with error_line(r"mae:w\.pth.*w\.pth"):
        mae.load_init("mae:w.pth")
    with error_line(r"'image_encoder\.pos_embed'.*mae:"):
        infer_config(to_official(mae), "w")
    other = build_model(tiny(), 0)
    other.load_init(str(tmp_path / "sam.safetensors"))
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.slow
def test_weights_that_do_not_fit_name_the_recipe_that_does(model, tmp_path):
    save_weights(to_official(model), model.config, tmp_path / "tiny.safetensors")
    other = build_model(replace(tiny(), embed_dim=48), 0)
    with error_line(r"tiny\.safetensors.*fit the recipe tiny$"):
        other.load_init(str(tmp_path / "tiny.safetensors"))
    fewer = build_model(replace(tiny(), decoder_num_heads=4), 0)
    with error_line(r"2 attention heads.*--model\.decoder-num-heads 2"):
        fewer.load_init(str(tmp_path / "tiny.safetensors"))
    for change, said in (
        ({"window_size": 4}, f"--model.window-size {tiny().window_size}$"),
        ({"global_attn_indexes": (0,)}, "--model.global-attn-indexes "),
    ):
        with error_line(said):
            build_model(replace(tiny(), **change), 0).load_init(str(tmp_path / "tiny.safetensors"))


def test_recipes_named_for_sizes_train_them():
    assert set(SAM_RECIPES) == {vit_b, vit_l, vit_h, tiny}
    for make, names in SAM_RECIPES.items():
        for name in names.split(" or "):
            model = recipes.make(name).model
            assert replace(model, drop_path_rate=0.0) == make()


def test_a_configuration_of_a_subclass_is_stated_as_the_kind_it_is():
    @dataclass(frozen=True)
    class Own(SamConfig):
        """A configuration of a user's own."""

    assert make_spec(Own()) == make_spec(SamConfig())

"""Files and folders of weights that a stranger may have made; none is to be loaded."""

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from gigamask.models import weight_files
from gigamask.models.configs import mae_tiny, vit_b
from gigamask.models.convert import huggingface_config, to_huggingface
from gigamask.models.init import build_model
from gigamask.models.state_dict import to_official
from tests.little import COMPACT, SPEC

DEEP = 1_000_000
STATE = to_official(build_model(SPEC, 0))
COMPACT_STATE = to_official(build_model(COMPACT, 0))
STATED = {name: value for name, value in asdict(SPEC).items() if name not in ("encoder", "decoder")}


class Code:
    """Pickled as a call that would leave a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def pth(content: Any, **options: Any) -> bytes:
    """The bytes of `torch.save`."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def safetensors(state: dict[str, Tensor], spec: Any = None) -> bytes:
    """The bytes of a `.safetensors` that states a configuration, if any."""
    text = spec if isinstance(spec, str) else json.dumps(spec)
    return save(state, metadata=None if spec is None else {"spec": text})


def header(text: bytes, length: int | None = None) -> bytes:
    """A `.safetensors` with this header and nothing else."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def stated(**changes: Any) -> bytes:
    """A `.safetensors` of sound tensors with other values in its configuration."""
    return safetensors(STATE, STATED | changes)


def stated_part(part: str, **changes: Any) -> bytes:
    """A `.safetensors` of a compact model with other values in the configuration of a part."""
    spec = weight_files.make_spec(COMPACT)
    return safetensors(COMPACT_STATE, spec | {part: spec[part] | changes})


def changed(name: str, value: Any) -> dict[str, Any]:
    """The state dict with another value for a tensor."""
    return STATE | {name: value}


def quantized() -> Tensor:
    """A quantized tensor, whose creation torch warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(1, 16), 0.1, 0, torch.qint8)


def in_itself() -> dict[str, Any]:
    """A state dict that contains itself."""
    content: dict[str, Any] = {}
    content["model"] = content
    return content


def repacked(raw: bytes, compression: int, **replaced: bytes) -> bytes:
    """A zip with other members or another compression."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for member in old.namelist():
            new.writestr(member, replaced.get(member.rpartition("/")[2], old.read(member)))
    return file.getvalue()


def flipped(raw: bytes, part: float) -> bytes:
    """The bytes with one bit flipped, at this share of them."""
    return raw[: (at := int(part * len(raw)))] + bytes([raw[at] ^ 16]) + raw[at + 1 :]


def pth_files() -> dict[str, bytes]:
    """`.pth` files by what is wrong."""
    token, sound = "mask_decoder.iou_token.weight", pth(STATE)
    nested = {"data.pkl": b"\x80\x02" + b"]" * DEEP + b"a" * DEEP + b"."}
    huge = torch.zeros(1).expand(1 << 40)
    spec = OrderedDict(STATE)
    spec._metadata = {"": {"spec": "[" * DEEP}}
    no_heads = OrderedDict(STATE)
    no_heads._metadata = {"": {"spec": json.dumps(STATED | {"num_heads": 0})}}
    return {
        "code": pth(Code()),
        "code beside tensors": pth(STATE | {"x": Code()}),
        "plain pickle of code": pickle.dumps(Code()),
        "a terabyte": pth({"x": Call(bytearray, 1 << 40)}),
        "integer keys": pth(dict(enumerate(STATE.values()))),
        "contains itself": pth(in_itself()),
        "contains itself beside tensors": pth(STATE | in_itself()),
        "no dictionary": pth([1, 2]),
        "one tensor": pth(torch.zeros(3)),
        "nested": pth({"model": {"model": {"model": {"model": {"model": {"model": STATE}}}}}}),
        "strings": pth(changed(token, "1.0")),
        "none": pth(changed(token, None)),
        "integers": pth(changed(token, torch.zeros(1, 16, dtype=torch.int64))),
        "complex": pth(changed(token, torch.zeros(1, 16, dtype=torch.complex64))),
        "sparse": pth(changed(token, torch.zeros(1, 16).to_sparse())),
        "quantized": pth(changed(token, quantized())),
        "meta": pth(changed(token, torch.zeros(1, 16, device="meta"))),
        "all meta": pth({name: value.to("meta") for name, value in STATE.items()}),
        "expanded": pth(changed(token, huge)),
        "expanded positions": pth(
            changed("image_encoder.pos_embed", huge[: 1 << 32].view(1, 1 << 14, 1 << 14, 16))
        ),
        "two prefixes": pth({**STATE, **{f"module.{name}": each for name, each in STATE.items()}}),
        "unknown configuration": sound,
        "many tensors": pth({str(number): torch.zeros(0) for number in range(20_001)}),
        "nested configuration": pth(spec),
        "no heads": pth(no_heads),
        "truncated": sound[: len(sound) // 2],
        "truncated by a byte": sound[:-1],
        "head of a zip": b"PK\x03\x04",
        "flipped early": flipped(sound, 0.2),
        "flipped late": flipped(sound, 0.6),
        "compressed": repacked(sound, zipfile.ZIP_DEFLATED),
        "legacy, truncated": pth(STATE, _use_new_zipfile_serialization=False)[:-1000],
        "legacy, code": pth(Code(), _use_new_zipfile_serialization=False),
        "nested pickle": repacked(sound, zipfile.ZIP_STORED, **nested),
        "an MAE": pth(build_model(mae_tiny(), 0).state_dict()),
    }


def safetensors_files() -> dict[str, bytes]:
    """`.safetensors` files by what is wrong."""
    sound = stated()
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "nothing": b"",
        "header of 2^60 bytes": header(b"{}", 1 << 60),
        "header cut": header(b"{}", 1000),
        "nested header": header(b'{"a":' * 100_000),
        "no json": header(b"\x00" * 64),
        "huge shape": header(json.dumps({"a": one | {"shape": [1 << 40, 1 << 40]}}).encode()),
        "beyond the file": header(json.dumps({"a": one | {"data_offsets": [0, 1 << 50]}}).encode()),
        "unknown type": header(json.dumps({"a": one | {"dtype": "X9"}}).encode()) + b"\0" * 4,
        "truncated": sound[:-1],
        "no tensors": header(b"{}"),
        "no configuration": safetensors(STATE),
        "configuration is no json": safetensors(STATE, "{"),
        "nested configuration": safetensors(STATE, "[" * DEEP),
        "nested value": safetensors(STATE, '{"depth": ' + "[" * DEEP),
        "null configuration": safetensors(STATE, "null"),
        "list for configuration": safetensors(STATE, [1]),
        "list for kind": stated(kind=["sam"]),
        "depth of 10^9": stated(depth=10**9),
        "depth of 10^30": stated(depth=10**30),
        "NaN depth": safetensors(STATE, json.dumps(STATED | {"depth": float("nan")})),
        "zero decoder heads": stated(decoder_num_heads=0),
        "negative width": stated(embed_dim=-16),
        "zero patch": stated(patch_size=0),
        "huge image": stated(image_size=8 << 40),
        "huge width": stated(embed_dim=16 << 40),
        "huge embedding": stated(embedding_dim=16 << 30),
        "huge mlp": stated(decoder_mlp=1 << 61),
        "huge window": stated(window_size=1 << 61),
        "pyramid of 10^9 blocks": stated_part("encoder", depths=[0, 10**9, 0, 0]),
        "pyramid of 10^30 blocks": stated_part("encoder", depths=[10**30, 0, 0, 0]),
        "huge pyramid": stated_part("encoder", widths=[1 << 40] * 4),
        "huge embedding of a pyramid": stated_part("encoder", width=1 << 61),
        "huge embedding of stride 2": stated_part("encoder", fine_width=1 << 61),
        "wide pyramid": stated_part("encoder", widths=[8, 16, 16, 32]),
        "pyramid of text": stated_part("encoder", depths="0000"),
        "huge window decoder": stated_part("decoder", widths=[8 << 40, 8 << 40]),
        "endless windows": safetensors(
            COMPACT_STATE,
            json.dumps(weight_files.make_spec(COMPACT))
            .replace("1.0", "Infinity")
            .replace("2.2", "NaN"),
        ),
        "decoder of text": safetensors(
            COMPACT_STATE, weight_files.make_spec(COMPACT) | {"decoder": "window"}
        ),
        "compact without configuration": safetensors(COMPACT_STATE),
        "many global blocks": stated(global_attn_indexes=[0] * 100_000),
        "global block of text": stated(global_attn_indexes="01"),
        "NaN drop path": safetensors(STATE, json.dumps(STATED | {"drop_path_rate": float("nan")})),
        "another depth": stated(depth=1, global_attn_indexes=[]),
        "another size of positions": stated(image_size=128),
        "another encoder": stated(encoder="x:Y"),
        "wrong checksum": stated(kind="sam", crc32=1),
        "text for checksum": stated(crc32="1"),
        "integers": safetensors({name: each.long() for name, each in STATE.items()}, STATED),
        "sizes of ViT-B only": safetensors(
            STATE, asdict(vit_b()) | {"encoder": None, "decoder": None}
        ),
        "an MAE": safetensors(
            {name: each.clone() for name, each in build_model(mae_tiny(), 0).state_dict().items()},
            {"kind": "mae"} | asdict(mae_tiny()),
        ),
    }


def huggingface_configs() -> dict[str, str]:
    """Content of config.json beside sound weights of transformers, by what is wrong."""
    sound = huggingface_config(SPEC)

    def part(name: str, **changes: Any) -> str:
        return json.dumps(sound | {name: sound[name] | changes})

    return {
        "nested": "[" * DEEP,
        "nested value": '{"vision_config": ' + "[" * DEEP,
        "null": "null",
        "nothing": "",
        "huge depth": part("vision_config", num_hidden_layers=10**9),
        "huge image": part("vision_config", image_size=8 << 40),
        "no heads": part("mask_decoder_config", num_attention_heads=0),
        "other heads": part("vision_config", num_attention_heads=4),
        "larger than the limit": " " * (1 << 21),
    }


def write_all(folder: Path) -> dict[str, Path]:
    """Write every malformed file and folder, and return them by what is wrong."""
    paths: dict[str, Path] = {}
    for suffix, found in (("pth", pth_files()), ("safetensors", safetensors_files())):
        for number, (name, content) in enumerate(found.items()):
            paths[f"{suffix}: {name}"] = path = folder / f"{number}.{suffix}"
            path.write_bytes(content)
    for number, (name, text) in enumerate(huggingface_configs().items()):
        paths[f"config.json: {name}"] = path = folder / f"hf{number}"
        path.mkdir()
        (path / "config.json").write_text(text)
        weights = {each: value.clone() for each, value in to_huggingface(STATE).items()}
        save_file(weights, path / "model.safetensors")
    for suffix in ("pth", "safetensors"):
        os.mkfifo(folder / f"fifo.{suffix}")
        (folder / f"loop.{suffix}").symlink_to(folder / f"loop.{suffix}")
        (folder / f"folder.{suffix}").mkdir()
        for name in ("fifo", "loop", "folder", "missing"):
            paths[f"{suffix}: {name}"] = folder / f"{name}.{suffix}"
    paths["long name"] = folder / ("a" * 300 + ".pth")
    paths["device"] = Path("/dev/zero")
    (folder / "model.safetensors").symlink_to("/dev/zero")
    paths["folder with a device"] = folder
    assert weight_files.MAX_TENSORS == 20_000
    return paths

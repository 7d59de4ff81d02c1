"""Files of weights: safetensors and `.pth`, read within limits, written with their configuration.

What gigamask writes states the model's configuration, and a `.safetensors` also the crc32 of its
tensors. Files of others are read as they are. A file is untrusted: no code in it runs, and no
tensor may be larger than the file.
"""

import argparse
import json
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gigamask import plugin
from gigamask.errors import GigamaskError, first_line
from gigamask.files import write_atomically
from gigamask.interfaces import ImageEncoder
from gigamask.models.configs import (
    PARTS,
    Decoder,
    MAEConfig,
    ModelConfig,
    SamConfig,
    SamDecoder,
    ViT,
    find_part,
    part_name,
)
from gigamask.pixels import RGB
from gigamask.serialization import decode_json

State = dict[str, Tensor]
"""A state dict."""
KINDS: dict[str, type[ModelConfig]] = {"sam": SamConfig, "mae": MAEConfig}
"""Configuration class by kind of model in a file's metadata; without a kind, the model is a SAM.
Plugins add others."""
UNSTATED: dict[str, Any] = {
    "stretch": False,
    "feature_channels": 0,
    "class_names": (),
    "rectangular": False,
    "pixels": {},
}
"""Fields that a file states only if they have other values; earlier versions had none of them."""
SPEC = "spec"
"""Key of the configuration in the metadata of a file."""
MAX_TENSORS = 20_000
"""Most tensors of a file: SAM ViT-H has 594."""
MAX_WRAPPERS = 4
"""Most dictionaries around the state dict of a `.pth`."""


@dataclass(frozen=True)
class UnavailableEncoder(ImageEncoder):
    """A custom image encoder that a file names, but does not contain."""

    name: str
    is_available: ClassVar[bool] = False

    def build(self, model: SamConfig) -> nn.Module:
        """Raise `GigamaskError`: only the configuration of the run has the encoder."""
        raise GigamaskError(
            f"the image encoder is {self.name}, not SAM's ViT: only the configuration of its run "
            "builds it; give the run folder"
        )


def read_safetensors(path: Path) -> tuple[State, ModelConfig | None]:
    """Read a `.safetensors` file, and verify its checksum if it has one.

    Args:
        path: The file.

    Returns:
        The tensors, and the configuration; None if the file states none.

    Raises:
        GigamaskError: The file is damaged, or its configuration is not valid.
        PermissionError: It may not be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            _check_count(len(names), path)
            state = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except (PermissionError, GigamaskError):
        raise
    except Exception as error:  # safetensors has none in common for all that it refuses
        raise GigamaskError(
            f"{path}: cannot be read as safetensors ({first_line(error)}); "
            "download or write it again"
        ) from None
    if SPEC not in metadata:
        return state, None
    config, content, crc = _parse_spec(metadata[SPEC], str(path))
    if crc is not None and crc != checksum(state, content):
        raise GigamaskError(
            f"{path}: damaged, the crc32 of its tensors is not the one that was written; "
            "copy or write it again"
        )
    return state, config


def save_weights(
    state: State, config: ModelConfig, path: Path | str, metadata: dict[str, str] | None = None
) -> None:
    """Save weights as safetensors with their configuration and checksum, atomically.

    Args:
        state: The tensors.
        config: Configuration of the model.
        path: File to write.
        metadata: Further entries of the header. safetensors writes several in arbitrary order, so
            that equal weights then give different files.
    """
    content = make_spec(config)
    content["crc32"] = checksum(state, json.dumps(content))
    entries = {**(metadata or {}), SPEC: json.dumps(content)}
    write_atomically(path, lambda partial: save_file(state, partial, metadata=entries))


def checksum(state: State, content: str) -> int:
    """Return the crc32 of a configuration and of all tensors with names, types and shapes.

    Args:
        state: The tensors.
        content: The configuration.
    """
    crc = zlib.crc32(content.encode())
    for name in sorted(state):
        tensor = state[name].contiguous()
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def make_spec(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration as a file states it, without parts and values that are SAM's."""
    spec: dict[str, Any] = {"kind": _kind_of(config)} | {
        field.name: getattr(config, field.name) for field in fields(config)
    }
    for name in PARTS:
        part = spec.pop(name, None)
        if part is not None and part not in (ViT(), SamDecoder()):  # the default of every file
            spec[name] = _part_spec(name, part)
    if "pixels" in spec:
        stated, default = vars(spec["pixels"]), vars(RGB)
        spec["pixels"] = {name: stated[name] for name in stated if stated[name] != default[name]}
    return {name: value for name, value in spec.items() if (name, value) not in UNSTATED.items()}


def _kind_of(config: ModelConfig) -> str:
    """Return the kind of a configuration, which may be of a subclass."""
    kinds = {plugin.reference(each): name for name, each in KINDS.items()}
    kinds |= {where: name for name, where in plugin.merged("model_configs").items()}
    own = map(plugin.reference, type(config).__mro__)
    return next(kinds[each] for each in own if each in kinds)


def _part_spec(name: str, part: Any) -> str | dict[str, Any]:
    """Return the name and fields of a known encoder or decoder; only the name of another."""
    if known := part_name(name, type(part)):
        return {"name": known, **{f.name: getattr(part, f.name) for f in fields(part)}}
    return plugin.reference(type(part)) if part.is_available else part.name


def _parse_part(name: str, stated: Any, source: str) -> ImageEncoder | Decoder:
    """Return a stated encoder or decoder; a custom encoder is not available."""
    if isinstance(stated, str) and name == "encoder":
        return UnavailableEncoder(stated[:80])
    values = msgspec.convert(stated, dict[str, Any])
    chosen = msgspec.convert(values.pop("name", ""), str)
    if (kind := find_part(name, chosen)) is None:
        raise GigamaskError(
            f"{source}: its model has the {name} {chosen[:80]!r}, which neither gigamask nor an "
            "installed plugin has; install the package that wrote the file"
        )
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    if absent := [each for each in getattr(kind, "stated", ()) if not values.get(each)]:
        raise TypeError(f"{absent[0]} is missing")
    if wrong := values.keys() ^ known:
        raise TypeError(f"{min(wrong)[:80]} is {'missing' if min(wrong) in known else 'unknown'}")
    return kind(**{name: msgspec.convert(value, hints[name]) for name, value in values.items()})


def _parse_spec(text: str, source: str) -> tuple[ModelConfig, str, int | None]:
    """Return a stated configuration, its text without the checksum, and the checksum."""
    spec: dict[str, Any] = decode_json(text, f"{source}: its model configuration", dict[str, Any])
    content = json.dumps({name: value for name, value in spec.items() if name != "crc32"})
    try:
        crc = msgspec.convert(spec.pop("crc32", None), int | None)
        name = spec.pop("kind", "sam")
        kind = KINDS[name] if name in KINDS else plugin.load(plugin.merged("model_configs")[name])
        hints = get_type_hints(kind)
        stated = {name: spec.pop(name, None) for name in PARTS} if kind is SamConfig else {}
        parts: dict[str, Any] = {
            name: _parse_part(name, part, source)
            for name, part in stated.items()
            if part is not None
        }
        unstated = {name: UNSTATED[name] for name in UNSTATED if name in hints}
        spec = unstated | spec
        if wrong := spec.keys() ^ (hints.keys() - PARTS.keys()):
            state = "is missing" if min(wrong) in hints else "is unknown"
            raise TypeError(f"{min(wrong)[:80]} {state}")
        values = {name: msgspec.convert(value, hints[name]) for name, value in spec.items()}
        return kind(**values, **parts), content, crc
    except (TypeError, KeyError, ValueError) as error:
        raise GigamaskError(
            f"{source}: its model configuration is not valid ({error}); write the file again with "
            "this version"
        ) from None


def read_pth(path: Path) -> tuple[State, ModelConfig | None]:
    """Read the state dict of a file of `torch.save`, as weights only.

    Args:
        path: The file.

    Returns:
        The tensors, and the configuration; None if the file states none.

    Raises:
        GigamaskError: The file is damaged, contains anything but tensors, or wants to run code.
        PermissionError: It may not be read.
    """
    _verify_zip(path)
    try:
        with torch.serialization.safe_globals(_plain_values()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # files that are not pickles raise almost any error
        code = re.search(r"(?:GLOBAL|unsupported class) ([\w.]+)", str(error))
        reason = (
            f"it wants to run code, {code[1][:80]}, which is never done); save only the model's "
            "state_dict()"
            if code and isinstance(error, pickle.UnpicklingError)
            else "torch.save did not write it as a whole); check the path, or download it again"
        )
        raise GigamaskError(f"{path}: cannot be read as weights ({reason}") from None
    state, config = _unwrap(content), None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise GigamaskError(
            f"{path}: holds no state dict of named tensors; save the model's state_dict()"
        )
    _check_tensors(state, path)
    metadata = getattr(state, "_metadata", None)
    for own in metadata.values() if isinstance(metadata, dict) else ():  # of each module
        if isinstance(own, dict) and isinstance(own.get(SPEC), str):
            config, _, _ = _parse_spec(own[SPEC], str(path))
            break
    bare = {
        re.sub(r"^(module\.|model\.|sam\.)+", "", name.replace("_orig_mod.", "")): value.detach()
        for name, value in state.items()
    }
    if len(bare) < len(state):
        raise GigamaskError(
            f"{path}: holds a tensor under two names, with and without a prefix such as module.; "
            "save only the model's state_dict()"
        )
    return bare, config


def _plain_values() -> list[Any]:
    """Return what is safe to unpickle beside tensors, and stands beside them in checkpoints.

    That is a Namespace, which has the flags of MAE's, and NumPy's numbers and arrays, as scores.
    """
    makers = {"scalar": np.float64().__reduce__()[0], "_reconstruct": np.empty(0).__reduce__()[0]}
    modules = "numpy.core.multiarray", "numpy._core.multiarray"  # before NumPy 2, and since
    named = [(make, f"{each}.{name}") for each in modules for name, make in makers.items()]
    dtypes = [each for each in vars(np.dtypes).values() if isinstance(each, type)]
    return [argparse.Namespace, np.ndarray, np.dtype, *dtypes, *named]


def write_pth(state: State, config: ModelConfig, path: Path | str, key: str = "") -> None:
    """Write a `.pth` that Meta's code loads strictly, with the configuration in its metadata.

    The configuration is an entry of the state dict's `_metadata`, where torch keeps the versions of
    modules, and which `load_state_dict` ignores.

    Args:
        state: State dict with Meta's names.
        config: Configuration of the model.
        path: File to write.
        key: Key of the state dict in the file; "": the file has nothing else.
    """
    content = OrderedDict(state)
    content._metadata = {"": {"version": 1, SPEC: json.dumps(make_spec(config))}}  # pyrefly: ignore

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:  # a Python file, whose errors say why writing fails
            torch.save({key: content} if key else content, file)

    write_atomically(path, write)


def _unwrap(content: Any) -> Any:
    """Return the state dict in dictionaries such as `{"model": state_dict, "epoch": 3}`."""
    for _ in range(MAX_WRAPPERS):
        if isinstance(content, dict):
            # The third as in torch's tutorials, the last as in micro-sam's files.
            names = "model", "state_dict", "model_state_dict", "model_state"
            parts = [content.get(name) for name in names]
            content = next((part for part in parts if isinstance(part, dict)), content)
    return content


def _verify_zip(path: Path) -> None:
    """Verify the checksums of a `.pth`, which torch does not; a file before torch 1.6 has none."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
    try:
        with zipfile.ZipFile(path) as archive:
            members, size = archive.infolist(), path.stat().st_size
            if sum(member.file_size for member in members) > size or any(
                member.compress_type != zipfile.ZIP_STORED for member in members
            ):
                raise GigamaskError(
                    f"{path}: unpacks to more than its size, unlike a file of torch.save; "
                    "save the model's state_dict() again"
                )
            damaged = archive.testzip()
    except GigamaskError:
        raise
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError):
        damaged = "the archive"
    if damaged:
        raise GigamaskError(
            f"{path}: damaged, the crc32 of {damaged[:80]} does not match; copy or write it again"
        )


def _check_tensors(state: dict[str, Tensor], path: Path) -> None:
    """Check that tensors are plain, have values, and are not larger than their file."""
    _check_count(len(state), path)
    total = 0
    for name, value in state.items():
        is_plain = (
            type(value) in (Tensor, nn.Parameter)
            and value.device.type == "cpu"
            and value.layout == torch.strided
            and not value.is_quantized
            and not value.is_complex()
        )
        if not is_plain:
            raise GigamaskError(
                f"{path}: {name[:80]} is not a plain tensor with values; save the model's "
                "state_dict() in float32"
            )
        total += value.numel() * value.element_size()
    if total > 2 * path.stat().st_size:
        raise GigamaskError(
            f"{path}: its tensors take {total} bytes, more than the file; they share storage; "
            "clone them before saving"
        )


def _check_count(count: int, path: Path) -> None:
    if count > MAX_TENSORS:
        raise GigamaskError(
            f"{path}: holds {count} tensors, more than {MAX_TENSORS}; give the weights of a model"
        )

"""Reading, loading and saving of model weights.

Meta's `.pth`, safetensors, Hugging Face folders and checkpoint folders are read as state dicts with
Meta's names. Position embeddings are interpolated if the model's input size differs, as in ViTDet
and SAM; everything else must match exactly.
"""

import argparse
import errno
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.models.configs import GroundingModelConfig, MAEConfig, SamConfig
from gigamask.models.convert import (
    State,
    abbreviate,
    from_huggingface,
    from_mae,
    infer_config,
    resample_abs_pos_embed,
    resample_rel_pos,
)
from gigamask.models.mae import MAE
from gigamask.models.sam.sam import Sam

MAE_PREFIX = "mae:"
"""Path prefix of a MAE from which the image encoder of a SAM is initialized."""

Model = nn.Module
ModelConfig = SamConfig | MAEConfig | GroundingModelConfig
KINDS: dict[str, type[ModelConfig]] = {
    "sam": SamConfig,
    "mae": MAEConfig,
    "relevance": GroundingModelConfig,
}
"""Configuration class by kind of model in a file's metadata; without a kind, the model is a SAM."""


def read_weights(path: Path | str) -> tuple[State, ModelConfig | None]:
    """Read weights from a file or folder.

    Args:
        path: A `.pth`, a `.safetensors`, or a folder with model.safetensors.

    Returns:
        State dict with Meta's names, and the configuration; None if the file has none (see
        `infer_config`).

    Raises:
        GigamaskError: There is no such file, or it does not contain weights.
    """
    path = Path(path)
    if path.is_dir():
        weights, config_file = path / "model.safetensors", path / "config.json"
        if not weights.is_file():
            raise GigamaskError(
                f"{path}: holds no model.safetensors; give a folder that does, or the file itself"
            )
        state, config = _read_safetensors(weights)
        if config is None and config_file.is_file():
            config = _read_huggingface_config(state, config_file)
        return state, config
    if not path.is_file():
        raise GigamaskError(
            f"{path}: no such file; pass a .pth, a .safetensors, or a folder with model.safetensors"
        )
    return _read_safetensors(path) if path.suffix == ".safetensors" else (_read_pth(path), None)


def _read_safetensors(path: Path) -> tuple[State, ModelConfig | None]:
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise GigamaskError(
            f"{path}: cannot be read as safetensors ({error}); download or write it again"
        ) from None
    if "spec" not in metadata:
        huggingface = any(name.startswith("vision_encoder.") for name in state)
        return (from_huggingface(state) if huggingface else state), None
    try:
        fields: dict[str, Any] = json.loads(metadata["spec"])
        kind = KINDS[fields.pop("kind", "sam")]
        if kind is SamConfig:
            fields["global_attn_indexes"] = tuple(fields["global_attn_indexes"])
        return state, kind(**fields)
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise GigamaskError(
            f"{path}: its model configuration is not valid ({error}); use the version that wrote it"
        ) from None


def _read_pth(path: Path) -> State:
    try:
        # MAE's checkpoints contain their flags as a Namespace, which is safe to unpickle.
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:
        # Files that are not pickles raise almost any error; the text of a LookupError does not
        # help.
        lines = [] if isinstance(error, LookupError) else str(error).splitlines()
        reason = lines[0] if lines else "torch.save did not write it"
        raise GigamaskError(
            f"{path}: cannot be read as weights alone ({reason}); save only its state_dict()"
        ) from None
    while isinstance(state, dict) and (
        inner := next(
            (state[name] for name in ("model", "state_dict") if isinstance(state.get(name), dict)),
            None,
        )
    ):
        state = inner
    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise GigamaskError(
            f"{path}: holds no state dict of tensors; save the model's state_dict()"
        )
    return {
        re.sub(r"^(module\.|sam\.)+", "", name.replace("_orig_mod.", "")): value
        for name, value in state.items()
    }


def _read_huggingface_config(state: State, path: Path) -> SamConfig | None:
    """Infer the configuration from the shapes, and the decoder's heads from config.json."""
    try:
        decoder = json.loads(path.read_text()).get("mask_decoder_config") or {}
        return infer_config(state, decoder_heads=int(decoder.get("num_attention_heads", 8)))
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise GigamaskError(
            f"{path}: is not the config of a SamModel ({error}); export the folder again"
        ) from None


def load_init_weights(model: Model, path: str) -> None:
    """Load initial weights into a model.

    Args:
        model: Model to load into; with `mae:PATH`, a SAM of which only the image encoder is loaded.
        path: Path of the weights, or `mae:PATH` of a MAE.

    Raises:
        GigamaskError: The weights do not fit the model.
    """
    if not path.startswith(MAE_PREFIX):
        state, _ = read_weights(path)
        if isinstance(model, Sam) and "cls_token" in state:
            raise GigamaskError(
                f"{path}: holds a MAE; give {MAE_PREFIX}{path} to start the image encoder from it"
            )
        return load_weights(model, state, path)
    path = path.removeprefix(MAE_PREFIX)
    if not isinstance(model, Sam):
        kind = "MAE" if isinstance(model, MAE) else "grounding model"
        raise GigamaskError(
            f"{MAE_PREFIX}{path}: {MAE_PREFIX} starts a SAM from a MAE; "
            f"to continue with the {kind} itself, pass {path}"
        )
    state, config = read_weights(path)
    if isinstance(config, MAEConfig) and config.num_heads != model.config.num_heads:
        raise GigamaskError(
            f"{path}: has {config.num_heads} attention heads, the model has "
            f"{model.config.num_heads}; use --model.num-heads {config.num_heads}"
        )
    load_weights(model, {**model.state_dict(), **from_mae(state, model.config, path)}, path)


def load_weights(model: Model, state: State, source: str) -> None:
    """Load a state dict strictly; only position embeddings may differ in size.

    Args:
        model: Model to load into; unchanged on error.
        state: State dict with Meta's names.
        source: Where the weights come from, for error messages.

    Raises:
        GigamaskError: A tensor is missing, unknown, or of another shape.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    if missing or unknown:
        problems = "; ".join(
            f"{word} {abbreviate(names)}"
            for word, names in (("lacks", missing), ("has unknown", unknown))
            if names
        )
        raise GigamaskError(
            f"{source}: {problems}; the model has {len(own)} tensors with Meta's names: "
            "build it with the configuration of these weights"
        )
    fitted = {name: _fit(value, own[name], name) for name, value in state.items()}
    if wrong := [name for name, value in fitted.items() if value.shape != own[name].shape]:
        raise GigamaskError(
            f"{source}: {abbreviate(wrong)} of another shape: {tuple(state[wrong[0]].shape)}, the "
            f"model's is {tuple(own[wrong[0]].shape)}; build the model with the configuration of "
            "these weights"
        )
    model.load_state_dict(fitted)


def _fit(value: Tensor, own: Tensor, name: str) -> Tensor:
    """Resample position embeddings to the model's size; return everything else unchanged."""
    if value.shape == own.shape or value.dim() != own.dim() or value.shape[-1] != own.shape[-1]:
        return value
    if name == "image_encoder.pos_embed":
        return resample_abs_pos_embed(value, own.shape[1])
    if name.endswith((".attn.rel_pos_h", ".attn.rel_pos_w")):
        return resample_rel_pos(value, len(own))
    return value


def save_weights(state: State, config: ModelConfig, path: Path | str) -> None:
    """Save weights as safetensors, atomically.

    Args:
        state: State dict with Meta's names.
        config: Configuration of the model, saved in the file's metadata. A custom encoder is left
            out, since it can be rebuilt only from the run folder.
        path: File to write.
    """
    kind = next(name for name, config_class in KINDS.items() if isinstance(config, config_class))
    fields = {name: value for name, value in asdict(config).items() if name != "encoder"}
    # A single entry, since safetensors writes several in arbitrary order, and equal weights should
    # give equal files.
    metadata = {"spec": json.dumps({"kind": kind, **fields})}
    write_atomically(Path(path), lambda partial: save_file(state, partial, metadata=metadata))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: it gets its name only once it is complete.

    Args:
        path: The file.
        write: Writes to the path it is called with; a partial file is removed on error.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with report_write_errors(partial):
            write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Convert a library's write error, such as a full disk, to an `OSError` with the file name."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = _system_errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def _system_errno(error: BaseException | None) -> int | None:
    """Return the errno of a library's write error; None for any other error.

    safetensors has it in its message; torch chains its own error to the system's.
    """
    if isinstance(error, SafetensorError):
        match = re.search(r"os error (\d+)", str(error))
        return int(match[1]) if match else errno.EIO
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.errno if error else None


def to_official(model: Model) -> State:
    """Return the state dict on the CPU, in a form that Meta's code loads strictly."""
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}

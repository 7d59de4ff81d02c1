"""Reading, loading and saving of model weights.

Meta's `.pth`, safetensors, Hugging Face folders and ids, and checkpoint folders are read as state
dicts with Meta's names. Position embeddings are interpolated if the model's input size differs, as
in ViTDet and SAM; everything else must match exactly.
"""

import argparse
import json
import pickle
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.files import write_atomically
from gigamask.models.configs import GroundingModelConfig, MAEConfig, SamConfig
from gigamask.models.convert import (
    State,
    format_names,
    from_huggingface,
    infer_config,
    resample_abs_pos_embed,
    resample_rel_pos,
)

Model = nn.Module
ModelConfig = SamConfig | MAEConfig | GroundingModelConfig
KINDS: dict[str, type[ModelConfig]] = {
    "sam": SamConfig,
    "mae": MAEConfig,
    "relevance": GroundingModelConfig,
}
"""Configuration class by kind of model in a file's metadata; without a kind, the model is a SAM."""


def read_weights(path: Path | str) -> tuple[State, ModelConfig | None]:
    """Read weights from a file or folder, or from the Hugging Face Hub.

    Args:
        path: A `.pth`, a `.safetensors`, a folder with model.safetensors, or the id of a model on
            the Hub, such as `facebook/sam-vit-base`, which is downloaded unless it is cached.

    Returns:
        State dict with Meta's names, and the configuration; None if the file has none (see
        `infer_config`).

    Raises:
        GigamaskError: There is no such file, or it does not contain weights.
    """
    path = _download(str(path)) if is_hub_id(path) else Path(path)
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


def is_hub_id(path: Path | str) -> bool:
    """Return whether a path is an id of the Hugging Face Hub, `ORGANIZATION/NAME`.

    A path below an existing folder is not, so that a misspelled run folder is never looked up.
    """
    local = Path(path)
    is_file_name = local.suffix in (".pth", ".pt", ".bin", ".safetensors")
    pattern = r"\w[\w.-]*/\w[\w.-]*"
    return bool(re.fullmatch(pattern, str(path))) and not (is_file_name or local.parent.exists())


def _download(hub_id: str) -> Path:
    """Return the folder of a model of the Hugging Face Hub, downloaded unless it is cached."""
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ImportError:
        raise GigamaskError(
            f"{hub_id}: no such file or folder; for a model of the Hugging Face Hub, run "
            "pip install 'gigamask[hf]'"
        ) from None
    offline = False
    try:
        try:
            HfApi().model_info(hub_id)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # the HTTP library's; a download would retry for a minute
            offline = True
        hf_hub_download(hub_id, "config.json", local_files_only=offline)
        return Path(hf_hub_download(hub_id, "model.safetensors", local_files_only=offline)).parent
    except (HfHubHTTPError, HFValidationError, EntryNotFoundError) as error:
        reason = "it cannot be reached" if offline else str(error).strip().splitlines()[0]
        raise GigamaskError(
            f"{hub_id}: no such file or folder, and no model that can be downloaded from the "
            f"Hugging Face Hub ({reason})"
        ) from None


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
            f"{word} {format_names(names)}"
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
            f"{source}: {format_names(wrong)} of another shape: {tuple(state[wrong[0]].shape)}, "
            f"the model's is {tuple(own[wrong[0]].shape)}; build the model with the configuration "
            "of these weights"
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
    write_atomically(path, lambda partial: save_file(state, partial, metadata=metadata))


def to_official(model: Model) -> State:
    """Return the state dict on the CPU, in a form that Meta's code loads strictly."""
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}

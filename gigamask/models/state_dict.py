"""Reading, loading and saving of model weights.

Meta's `.pth`, safetensors, Hugging Face folders and ids, and checkpoint folders are read as state
dicts with Meta's names. Position embeddings are interpolated if the model's input size differs, as
in ViTDet and SAM, and the first convolution is inflated if the model has other channels than RGB;
everything else must match exactly.
"""

import math
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.models import manifest, weight_files
from gigamask.models.configs import ModelConfig
from gigamask.models.convert import format_names, resample_abs_pos_embed, resample_rel_pos
from gigamask.models.families import families
from gigamask.models.layers import inflate_channels
from gigamask.models.weight_files import State
from gigamask.models.weight_paths import find_weights

save_weights = weight_files.save_weights


def read_weights(path: Path | str) -> tuple[State, ModelConfig | None]:
    """Read weights from a file or folder, or from the Hugging Face Hub.

    Every command and function that takes weights reads them here. Checksums are verified: those of
    a checkpoint however it is named, of a `.pth`, and of every `.safetensors` of gigamask.

    Args:
        path: A `.pth`, a `.safetensors`, a run folder, whose newest intact checkpoint is read, a
            folder with model.safetensors, the id of a model on the Hub, such as
            `facebook/sam-vit-base` or `hf:facebook/sam-vit-base@REVISION`, which is downloaded
            unless it is cached, a folder or id of a format that a plugin reads, or `starter`, the
            weights in this package, unless there is a file or folder of that name.

    Returns:
        State dict with Meta's names, and the configuration; None if the weights state none (see
        `infer_config`).

    Raises:
        GigamaskError: There is no such file, it may not be read, is damaged, does not contain
            weights, or a weight is not finite.
    """
    state, config = _read_any(path)
    if not all(
        math.isfinite(bound) for each in state.values() if each.numel() for bound in each.aminmax()
    ):
        raise GigamaskError(
            f"{path}: has weights that are NaN or infinite; use those of before the training "
            "diverged, or save them in float32"
        )
    return state, config


def _read_any(path: Path | str) -> tuple[State, ModelConfig | None]:
    """Return the weights of a file, a folder, the Hub or a format of a plugin."""
    from gigamask.models.hub import download, has_file, parse_hub_id

    hub = parse_hub_id(path)
    folders = plugin.merged("weight_folders")
    try:
        for name, reader in folders.items():
            if hub is None and (Path(path) / name).is_file():
                return plugin.load(reader)(lambda _: Path(path))
        try:
            return read_file(find_weights(path))
        except GigamaskError:
            if hub is None:
                raise
            download_from = partial(download, hub[0], revision=hub[1])
            found = (each for name, each in folders.items() if has_file(hub[0], name, hub[1]))
            if (reader := next(found, None)) is None:
                raise
            return plugin.load(reader)(download_from)
    except OSError as error:
        raise GigamaskError(
            f"{error.filename or path}: cannot be read ({error.strerror}); check the path and its "
            "permissions"
        ) from None


def read_file(file: Path) -> tuple[State, ModelConfig | None]:
    """Return the weights of a file of any format, with Meta's names, as `read_weights`."""
    from gigamask.models import lora

    manifest.verify_named(file)
    state, config = (
        weight_files.read_safetensors if file.suffix == ".safetensors" else weight_files.read_pth
    )(file)
    if lora.has_adapters(state):
        return lora.merge(state, _read_base(file), str(file)), config
    found = (family.from_others(state, config, file) for family in families())
    return next((each for each in found if each), (state, config))


def _read_base(file: Path) -> State:
    """Return the frozen weights of a checkpoint of adapters, which its run folder holds."""
    base = file.resolve().parent.parent / manifest.BASE
    if not base.is_file():
        raise GigamaskError(
            f"{file}: holds adapters without the weights they belong to ({base} is missing); give "
            "the checkpoint in its run folder, or export it there"
        )
    return weight_files.read_safetensors(base)[0]


def load_weights(model: nn.Module, state: State, source: str) -> None:
    """Load a state dict strictly; only position embeddings and channels may differ in size.

    Args:
        model: Model to load into; unchanged on error.
        state: State dict with Meta's names.
        source: Where the weights come from, for error messages.

    Raises:
        GigamaskError: A tensor is missing, unknown, or of another shape or type.
    """
    model.load_state_dict(fit_weights(model, state, source))


def fit_weights(model: nn.Module, state: State, source: str, resample: bool = True) -> State:
    """Return weights that fit a model's tensors in name, shape and type.

    Args:
        model: The model; it may be on the meta device.
        state: State dict with Meta's names.
        source: Where the weights come from, for error messages.
        resample: Whether position embeddings may be resampled to the model's size, and weights for
            RGB inflated to its channels.

    Raises:
        GigamaskError: A tensor is missing, unknown, or of another shape or type.
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
    if wrong := [
        name
        for name, value in state.items()
        if value.is_floating_point() != own[name].is_floating_point()
    ]:
        raise GigamaskError(
            f"{source}: {format_names(wrong)} of type {state[wrong[0]].dtype}, the model's is "
            f"{own[wrong[0]].dtype}; save the weights in float32"
        )
    fitted = {
        name: _fit(value, own[name], name) if resample else value for name, value in state.items()
    }
    if wrong := [name for name, value in fitted.items() if value.shape != own[name].shape]:
        raise GigamaskError(
            f"{source}: {format_names(wrong)} of another shape: {tuple(state[wrong[0]].shape)}, "
            f"the model's is {tuple(own[wrong[0]].shape)}; build the model with the configuration "
            "of these weights, or load them with the gigamask that wrote them"
        )
    return fitted


def _fit(value: Tensor, own: Tensor, name: str) -> Tensor:
    """Fit position embeddings and a first convolution; return everything else unchanged."""
    value = inflate_channels(value, own)
    if value.shape == own.shape or value.dim() != own.dim() or value.shape[-1] != own.shape[-1]:
        return value
    if name == "image_encoder.pos_embed":
        return resample_abs_pos_embed(value, own.shape[1])
    if name.endswith((".attn.rel_pos_h", ".attn.rel_pos_w")):
        return resample_rel_pos(value, len(own))
    return value


def to_official(model: nn.Module) -> State:
    """Return the state dict on the CPU, in a form that Meta's code loads strictly."""
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}

"""Weights on disk and under other names: read them from wherever they come, load them strictly, save them, translate them.

Enters: Meta's `.pth`, a `.safetensors`, a Hugging Face folder, a checkpoint's folder. Leaves: a state dict under Meta's names, and the spec
if the file tells it. Positions and relative positions are interpolated when the model has another side, as ViTDet and SAM do; everything else
must match exactly. A Sam's image encoder may also start from a masked autoencoder, whose patches may have another size.

Not here: the checkpoints of training (`train.checkpoint`), whole exported folders (`export`).
"""

import argparse
import errno
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.models.configs import GroundingModelConfig, MAEConfig, SamConfig
from gigamask.models.mae import MAE
from gigamask.models.sam.sam import Sam

State = dict[str, Tensor]

MAE_PREFIX = "mae:"
"""Before a path: what lies there is a masked autoencoder, of which a Sam's image encoder takes what it has a place for."""

Model = nn.Module
ModelConfig = SamConfig | MAEConfig | GroundingModelConfig
KINDS: dict[str, type[ModelConfig]] = {
    "sam": SamConfig,
    "mae": MAEConfig,
    "relevance": GroundingModelConfig,
}
"""What a file says it holds, and its spec; a file that says nothing holds a Sam."""

GAUSSIAN = "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"

NAMES = (
    ("image_encoder.patch_embed.proj.", "vision_encoder.patch_embed.projection."),
    ("image_encoder.pos_embed", "vision_encoder.pos_embed"),
    ("image_encoder.blocks.{i}.norm1.", "vision_encoder.layers.{i}.layer_norm1."),
    ("image_encoder.blocks.{i}.norm2.", "vision_encoder.layers.{i}.layer_norm2."),
    ("image_encoder.blocks.{i}.", "vision_encoder.layers.{i}."),
    ("image_encoder.neck.0.", "vision_encoder.neck.conv1."),
    ("image_encoder.neck.1.", "vision_encoder.neck.layer_norm1."),
    ("image_encoder.neck.2.", "vision_encoder.neck.conv2."),
    ("image_encoder.neck.3.", "vision_encoder.neck.layer_norm2."),
    (GAUSSIAN, "prompt_encoder.shared_embedding.positional_embedding"),
    ("prompt_encoder.point_embeddings.{i}.", "prompt_encoder.point_embed.{i}."),
    ("prompt_encoder.mask_downscaling.0.", "prompt_encoder.mask_embed.conv1."),
    ("prompt_encoder.mask_downscaling.1.", "prompt_encoder.mask_embed.layer_norm1."),
    ("prompt_encoder.mask_downscaling.3.", "prompt_encoder.mask_embed.conv2."),
    ("prompt_encoder.mask_downscaling.4.", "prompt_encoder.mask_embed.layer_norm2."),
    ("prompt_encoder.mask_downscaling.6.", "prompt_encoder.mask_embed.conv3."),
    ("prompt_encoder.not_a_point_embed.", "prompt_encoder.not_a_point_embed."),
    ("prompt_encoder.no_mask_embed.", "prompt_encoder.no_mask_embed."),
    (
        "mask_decoder.transformer.layers.{i}.norm1.",
        "mask_decoder.transformer.layers.{i}.layer_norm1.",
    ),
    (
        "mask_decoder.transformer.layers.{i}.norm2.",
        "mask_decoder.transformer.layers.{i}.layer_norm2.",
    ),
    (
        "mask_decoder.transformer.layers.{i}.norm3.",
        "mask_decoder.transformer.layers.{i}.layer_norm3.",
    ),
    (
        "mask_decoder.transformer.layers.{i}.norm4.",
        "mask_decoder.transformer.layers.{i}.layer_norm4.",
    ),
    (
        "mask_decoder.transformer.norm_final_attn.",
        "mask_decoder.transformer.layer_norm_final_attn.",
    ),
    ("mask_decoder.transformer.", "mask_decoder.transformer."),
    ("mask_decoder.iou_token.", "mask_decoder.iou_token."),
    ("mask_decoder.mask_tokens.", "mask_decoder.mask_tokens."),
    ("mask_decoder.output_upscaling.0.", "mask_decoder.upscale_conv1."),
    ("mask_decoder.output_upscaling.1.", "mask_decoder.upscale_layer_norm."),
    ("mask_decoder.output_upscaling.3.", "mask_decoder.upscale_conv2."),
    (
        "mask_decoder.output_hypernetworks_mlps.{i}.layers.0.",
        "mask_decoder.output_hypernetworks_mlps.{i}.proj_in.",
    ),
    (
        "mask_decoder.output_hypernetworks_mlps.{i}.layers.1.",
        "mask_decoder.output_hypernetworks_mlps.{i}.layers.0.",
    ),
    (
        "mask_decoder.output_hypernetworks_mlps.{i}.layers.2.",
        "mask_decoder.output_hypernetworks_mlps.{i}.proj_out.",
    ),
    ("mask_decoder.iou_prediction_head.layers.0.", "mask_decoder.iou_prediction_head.proj_in."),
    ("mask_decoder.iou_prediction_head.layers.1.", "mask_decoder.iou_prediction_head.layers.0."),
    ("mask_decoder.iou_prediction_head.layers.2.", "mask_decoder.iou_prediction_head.proj_out."),
)
"""Meta's name and Hugging Face's for each part; {i} is a number. The first that fits holds. transformers/models/sam/convert_sam_to_hf.py."""

SHARED = "shared_image_embedding.positional_embedding"
"""Hugging Face's name for its second copy of the position code."""

MAE_PATCHES = ("patch_embed.proj.weight", "patch_embed.proj.bias")
MAE_PARTS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
"""What a Sam's image encoder takes over of a masked autoencoder, besides its positions: of the patch embedding, and of each block."""


def read_weights(path: Path | str) -> tuple[State, ModelConfig | None]:
    """Returns the weights at `path` under Meta's names, and their spec where the file states one; `infer_spec` reads it off the shapes otherwise.

    Raises a Fault that names the path when there is nothing there, or nothing that can be read as weights.
    """
    path = Path(path)
    if path.is_dir():
        inside = path / "model.safetensors"
        if not inside.is_file():
            raise GigamaskError(
                f"{path}: holds no model.safetensors; give a folder that does, or the file itself"
            )
        state, spec = _read_safetensors(inside)
        config = path / "config.json"
        return state, spec or (_config_from_dict(state, config) if config.is_file() else None)
    if not path.is_file():
        raise GigamaskError(
            f"{path}: no such file; give a .pth, a .safetensors, or a folder that holds model.safetensors"
        )
    return _read_safetensors(path) if path.suffix == ".safetensors" else (_read_pth(path), None)


def _read_safetensors(path: Path) -> tuple[State, ModelConfig | None]:
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise GigamaskError(
            f"{path}: cannot be read as safetensors ({error}); fetch or write it again"
        ) from None
    if "spec" not in metadata:
        return (
            from_huggingface(state)
            if any(name.startswith("vision_encoder.") for name in state)
            else state
        ), None
    try:
        fields: dict[str, Any] = json.loads(metadata["spec"])
        kind = KINDS[fields.pop("kind", "sam")]
        if kind is SamConfig:
            fields["global_attn_indexes"] = tuple(fields["global_attn_indexes"])
        return state, kind(**fields)
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise GigamaskError(
            f"{path}: its spec cannot be used ({error}); it was written by another version, read it with that one"
        ) from None


def _read_pth(path: Path) -> State:
    try:
        with torch.serialization.safe_globals(
            [argparse.Namespace]
        ):  # MAE's own checkpoints hold their flags, which run nothing when read
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
        # What is no pickle at all is read as one, so that anything may be missing there, and what is says little.
        said = [] if isinstance(error, LookupError) else str(error).splitlines()
        what = said[0] if said else "torch.save did not write it"
        raise GigamaskError(
            f"{path}: cannot be read as weights alone ({what}); save its state dict and give that"
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
            f"{path}: holds no state dict of tensors; save the model's state_dict() and give that"
        )
    return {
        re.sub(r"^(module\.|sam\.)+", "", name.replace("_orig_mod.", "")): value
        for name, value in state.items()
    }


def _config_from_dict(state: State, config: Path) -> SamConfig | None:
    """Returns the spec of a Hugging Face folder: shapes, and from its config what shapes do not tell."""
    try:
        decoder = json.loads(config.read_text()).get("mask_decoder_config") or {}
        return infer_config(state, decoder_heads=int(decoder.get("num_attention_heads", 8)))
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise GigamaskError(
            f"{config}: is not the config of a SamModel ({error}); export the folder again"
        ) from None


def infer_config(state: State, decoder_heads: int = 8) -> SamConfig:
    """Returns the spec that the shapes imply.

    Shapes do not tell the decoder's heads: Meta's models have 8. Raises a Fault that names a missing tensor.
    """
    try:
        _, side, _, dim = state["image_encoder.pos_embed"].shape
        patch = state["image_encoder.patch_embed.proj.weight"].shape[-1]
        depth = 1 + max(
            (
                int(found[1])
                for name in state
                if (found := re.match(r"image_encoder\.blocks\.(\d+)\.", name))
            ),
            default=0,
        )
        tables = [
            state[f"image_encoder.blocks.{index}.attn.rel_pos_h"].shape for index in range(depth)
        ]
        hidden, embedding_dim = state["mask_decoder.iou_prediction_head.layers.0.weight"].shape
        decoder_mlp = state["mask_decoder.transformer.layers.0.mlp.lin1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        act = (
            "put mae: before the path"
            if "cls_token" in state
            else "give Meta's, Hugging Face's or gigamask's own"
        )
        raise GigamaskError(f"the weights are not a SAM's: {error} is missing; {act}") from None
    whole = 2 * side - 1
    return SamConfig(
        image_size=side * patch,
        patch_size=patch,
        embed_dim=dim,
        depth=depth,
        num_heads=dim // tables[0][1],
        window_size=next(((length + 1) // 2 for length, _ in tables if length != whole), side),
        global_attn_indexes=tuple(
            index for index, (length, _) in enumerate(tables) if length == whole
        ),
        embedding_dim=embedding_dim,
        decoder_num_heads=decoder_heads,
        decoder_mlp=decoder_mlp,
        iou_hidden=hidden,
    )


def load_init_weights(model: Model, path: str) -> None:
    """Puts the weights at `path` into the model, all of them; or at `mae:PATH`, those of a masked autoencoder into a Sam's image encoder.

    Everything else of the Sam then keeps its start. Raises a Fault that names the path where the weights do not fit.
    """
    if not path.startswith(MAE_PREFIX):
        state, _ = read_weights(path)
        if isinstance(model, Sam) and "cls_token" in state:
            raise GigamaskError(
                f"{path}: holds a masked autoencoder; give {MAE_PREFIX}{path} to start the image encoder from it"
            )
        return load_weights(model, state, path)
    path = path.removeprefix(MAE_PREFIX)
    if not isinstance(model, Sam):
        kind = "masked autoencoder" if isinstance(model, MAE) else "grounding model"
        raise GigamaskError(
            f"{MAE_PREFIX}{path}: {MAE_PREFIX} starts a SAM from a masked autoencoder; to go on with the {kind} itself give {path}"
        )
    state, spec = read_weights(path)
    if isinstance(spec, MAEConfig) and spec.num_heads != model.config.num_heads:
        raise GigamaskError(
            f"{path}: has {spec.num_heads} attention heads, the model {model.config.num_heads}; build the model with heads={spec.num_heads}"
        )
    load_weights(model, {**model.state_dict(), **from_mae(state, model.config, path)}, path)


def from_mae(state: State, spec: SamConfig, name: str) -> State:
    """Returns a masked autoencoder's encoder under the names of a Sam's, its positions and patches fitted to `spec`.

    Its tokens, last norm and decoder have no place there; relative positions, neck, prompts and decoder of a Sam are not in it. Meta's files with
    and without a decoder and gigamask's own are the same to it. Raises a Fault that names depths or widths that differ, or a missing tensor.
    """
    indices = {int(found[1]) for key in state if (found := re.match(r"blocks\.(\d+)\.", key))}
    wanted = [
        f"blocks.{index}.{part}.{kind}"
        for index in range(len(indices))
        for part in MAE_PARTS
        for kind in ("weight", "bias")
    ]
    if missing := [key for key in ("pos_embed", *MAE_PATCHES, *wanted) if key not in state]:
        raise GigamaskError(
            f"{name}: not the weights of a masked autoencoder, it lacks {_few(missing)}; give MAE's own .pth or what gigamask pre-trained"
        )
    count, dim = state["pos_embed"].shape[1] - 1, state["pos_embed"].shape[-1]
    if (len(indices), dim) != (spec.depth, spec.embed_dim):
        theirs, ours = f"{len(indices)} blocks of width {dim}", f"{spec.depth} of {spec.embed_dim}"
        raise GigamaskError(
            f"{name}: has {theirs}, the model {ours}; build the model with depth={len(indices)} and dim={dim}, or give its own size's weights"
        )
    if math.isqrt(count) ** 2 != count:
        raise GigamaskError(
            f"{name}: has positions for {count} patches, which are no square of them; give weights trained on squares"
        )
    positions = state["pos_embed"][:, 1:].unflatten(1, (math.isqrt(count), -1))
    taken = {key: state[key] for key in (*MAE_PATCHES, *wanted)}
    taken["patch_embed.proj.weight"] = resize_kernel(
        taken["patch_embed.proj.weight"], spec.patch_size
    )
    taken["pos_embed"] = resize_positions(positions, spec.embedding_size)
    return {
        f"image_encoder.{key.replace('.fc1.', '.lin1.').replace('.fc2.', '.lin2.')}": value
        for key, value in taken.items()
    }


def load_weights(model: Model, state: State, name: str) -> None:
    """Puts `state` into the model; `name` says in messages where it came from.

    Raises a Fault when a tensor is missing, unknown, or has another shape that interpolating positions does not explain. Nothing is loaded then.
    """
    own = model.state_dict()
    missing, unknown = (
        [key for key in own if key not in state],
        [key for key in state if key not in own],
    )
    if missing or unknown:
        told = "; ".join(
            f"{word} {_few(keys)}"
            for word, keys in (("lacks", missing), ("has unknown", unknown))
            if keys
        )
        raise GigamaskError(
            f"{name}: {told}; the model wants {len(own)} tensors under Meta's names: build it with the spec of these weights"
        )
    fitted = {key: _fit(value, own[key], key) for key, value in state.items()}
    if wrong := [key for key, value in fitted.items() if value.shape != own[key].shape]:
        shapes = f"{tuple(state[wrong[0]].shape)}, the model's is {tuple(own[wrong[0]].shape)}"
        raise GigamaskError(
            f"{name}: {_few(wrong)} of another shape: {shapes}; build the model with the spec of these weights"
        )
    model.load_state_dict(fitted)


def _few(keys: list[str]) -> str:
    return f"{len(keys)} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"


def _fit(value: Tensor, own: Tensor, key: str) -> Tensor:
    """Returns positions interpolated to the model's side, and everything else as it is."""
    if value.shape == own.shape or value.dim() != own.dim() or value.shape[-1] != own.shape[-1]:
        return value
    if key == "image_encoder.pos_embed":
        return resize_positions(value, own.shape[1])
    return (
        resize_table(value, len(own))
        if key.endswith((".attn.rel_pos_h", ".attn.rel_pos_w"))
        else value
    )


def resize_positions(positions: Float[Tensor, "1 e e C"], side: int) -> Float[Tensor, "1 E E C"]:
    """Returns absolute positions for another side, by bicubic interpolation (ViTDet, `modeling/backbone/utils.py`)."""
    if positions.shape[1] == side:
        return positions
    return (
        F.interpolate(positions.permute(0, 3, 1, 2).float(), size=(side, side), mode="bicubic")
        .permute(0, 2, 3, 1)
        .to(positions.dtype)
    )


def resize_table(table: Float[Tensor, "l d"], length: int) -> Float[Tensor, "L d"]:
    """Returns a table of relative positions for another side, by linear interpolation (Segment Anything, `get_rel_pos`)."""
    return F.interpolate(table.T[None].float(), size=length, mode="linear")[0].T.to(table.dtype)


def resize_kernel(kernel: Float[Tensor, "C 3 p p"], patch: int) -> Float[Tensor, "C 3 P P"]:
    """Returns a patch embedding for patches of another size, which answers enlarged patches as the old one does the patches themselves.

    Least squares, by the pseudo-inverse of bicubic resizing (Beyer et al. 2022, FlexiViT, section 3.4): exact where patches grow. Interpolating
    the kernel itself would make 14 x 14 to 16 x 16 answer 1.3 times as loudly.
    """
    old = kernel.shape[-1]
    if old == patch:
        return kernel
    basis = torch.eye(old, dtype=torch.float64)[:, None, None, :].expand(-1, 1, 1, -1)
    resizing = F.interpolate(basis, size=(1, patch), mode="bicubic", antialias=True)[:, 0, 0]
    inverse = torch.linalg.pinv(resizing)
    return (inverse @ kernel.double() @ inverse.T).to(kernel.dtype)


def save_weights(state: State, spec: ModelConfig, path: Path | str) -> None:
    """Writes the weights and the spec as safetensors; the file appears under its name only when it is whole."""
    kind = next(kind for kind, each in KINDS.items() if isinstance(spec, each))
    # One entry: a safetensors file lists several in any order, and equal weights should make equal files.
    numbers = {
        name: value for name, value in asdict(spec).items() if name != "encoder"
    }  # which the run folder knows
    metadata = {"spec": json.dumps({"kind": kind, **numbers})}
    write_atomically(Path(path), lambda partial: save_file(state, partial, metadata=metadata))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that appears under its name only when it is whole; what there is of it when writing fails is removed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(partial):
            write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises as an `OSError` that names the file what keeps it from being written, such as a full disk, whatever a library says of that."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = _refused(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def _refused(error: BaseException | None) -> int | None:
    """Returns the system's number for why a library could not write, None where an error is of something else.

    safetensors tells it in words, torch puts an error of its own before the system's.
    """
    if isinstance(error, SafetensorError):
        found = re.search(r"os error (\d+)", str(error))
        return int(found[1]) if found else errno.EIO
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.errno if error else None


def to_official(model: Model) -> State:
    """Returns the state dict as Meta's own `.pth` holds it, on the CPU: `torch.save` of it loads there strictly."""
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def to_huggingface(state: State) -> State:
    """Returns the weights under the names of Hugging Face's `SamModel`. Raises a Fault that names a tensor it does not know."""
    renamed = {_rename(name, 0, 1): value for name, value in state.items()}
    if GAUSSIAN in state:
        renamed[SHARED] = state[GAUSSIAN].clone()
    return renamed


def from_huggingface(state: State) -> State:
    """Returns a `SamModel`'s weights under Meta's names; a file may keep either copy of the position code."""
    renamed = {_rename(name, 1, 0): value for name, value in state.items() if name != SHARED}
    if SHARED in state:
        renamed.setdefault(GAUSSIAN, state[SHARED])
    return renamed


def _rename(name: str, start: int, end: int) -> str:
    """Returns one tensor's name on the other side."""
    for pair in NAMES:
        pattern = re.escape(pair[start]).replace(r"\{i\}", r"(\d+)")
        if found := re.match(pattern + ("" if pair[start].endswith(".") else "$"), name):
            return (
                pair[end].replace("{i}", found[1] if found.groups() else "") + name[found.end() :]
            )
    raise GigamaskError(
        f"{name}: not the name of a tensor of a {('SAM', 'SamModel')[start]}; take it out, or check where the weights came from"
    )

"""Names of SAM 2's tensors: Meta's files, Hugging Face's `Sam2Model`, and gigamask's.

gigamask's are Meta's without the prefix `sam_`; MLPs are named as in SAM, and `no_mem_embed` is
part of the mask decoder. Of Meta's files only the tensors of the image model are used: those of
memory and video are left out.
"""

import re
from dataclasses import replace
from typing import Any, cast

import torch

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.convert import PE_MATRIX_KEY, block_indices, format_names
from gigamask.models.weight_files import State
from gigamask.plugins.sam2.configs import (
    Hiera,
    Sam2Decoder,
    sam2_base_plus,
    sam2_large,
    sam2_small,
    sam2_tiny,
)

SIZES = (sam2_tiny, sam2_small, sam2_base_plus, sam2_large)
VIDEO = re.compile(
    r"(memory_attention|memory_encoder|mask_downsample|obj_ptr_proj|obj_ptr_tpos_proj)\."
    r"|(maskmem_tpos_enc|no_mem_pos_enc|no_obj_ptr|no_obj_embed_spatial)$"
    r"|(memory_temporal_positional_encoding|no_memory_positional_encoding|no_object_pointer)$"
    r"|object_pointer_proj\.|temporal_positional_encoding_projection_layer\."
    r"|occlusion_spatial_embedding_parameter$"
)
"""Tensors of published files that only videos need: Meta's, then Hugging Face's."""
PREFIXES = (
    ("image_encoder.", "image_encoder."),
    ("prompt_encoder.", "sam_prompt_encoder."),
    ("mask_decoder.no_mem_embed", "no_mem_embed"),
    ("mask_decoder.", "sam_mask_decoder."),
)
"""What names begin with: gigamask's, and Meta's."""
MLP_LAYERS = ((r"\.mlp\.lin1\.", ".mlp.layers.0."), (r"\.mlp\.lin2\.", ".mlp.layers.1."))
HEADS = r"(iou_prediction_head|pred_obj_score_head|output_hypernetworks_mlps\.\d)"
HF_NAMES = (
    ("image_encoder.trunk.patch_embed.proj.", "vision_encoder.backbone.patch_embed.projection."),
    ("image_encoder.trunk.", "vision_encoder.backbone."),
    ("image_encoder.neck.", "vision_encoder.neck."),
    ("prompt_encoder.mask_downscaling.0.", "prompt_encoder.mask_embed.conv1."),
    ("prompt_encoder.mask_downscaling.1.", "prompt_encoder.mask_embed.layer_norm1."),
    ("prompt_encoder.mask_downscaling.3.", "prompt_encoder.mask_embed.conv2."),
    ("prompt_encoder.mask_downscaling.4.", "prompt_encoder.mask_embed.layer_norm2."),
    ("prompt_encoder.mask_downscaling.6.", "prompt_encoder.mask_embed.conv3."),
    (PE_MATRIX_KEY, "prompt_encoder.shared_embedding.positional_embedding"),
    ("mask_decoder.output_upscaling.0.", "mask_decoder.upscale_conv1."),
    ("mask_decoder.output_upscaling.1.", "mask_decoder.upscale_layer_norm."),
    ("mask_decoder.output_upscaling.3.", "mask_decoder.upscale_conv2."),
    ("mask_decoder.no_mem_embed", "no_memory_embedding"),
)
"""What names begin with: gigamask's, and Hugging Face's; others begin alike."""
HF_SHARED_PE = "shared_image_embedding.positional_embedding"
HF_POINTS = "prompt_encoder.point_embed.weight"
POINTS = tuple(f"prompt_encoder.point_embeddings.{index}.weight" for index in range(4))


def is_meta(state: State) -> bool:
    """Return whether these are tensors of Meta's SAM 2."""
    return any(name.startswith("sam_mask_decoder.") for name in state)


def is_huggingface(state: State) -> bool:
    """Return whether these are tensors of `Sam2Model`."""
    return any(name.startswith("vision_encoder.backbone.") for name in state)


def from_meta(state: State, source: str) -> State:
    """Return the tensors of the image model under gigamask's names.

    Args:
        state: The tensors of a file such as `sam2.1_hiera_tiny.pt`.
        source: The file, for errors.

    Raises:
        GigamaskError: A tensor is not SAM 2's.
    """
    renamed, unknown = {}, []
    for name, value in state.items():
        if VIDEO.match(name):
            continue
        own = next((a + name[len(b) :] for a, b in PREFIXES if name.startswith(b)), None)
        if own is None:
            unknown.append(name)
            continue
        for ours, theirs in MLP_LAYERS:
            own = own.replace(theirs, ours.replace("\\", ""))
        renamed[own] = value
    if unknown:
        raise GigamaskError(
            f"{source}: has unknown {format_names(unknown)}; use a file of SAM 2.1, such as "
            "sam2.1_hiera_tiny.pt"
        )
    return renamed


def to_meta(state: State) -> State:
    """Return the tensors of an image model under Meta's names, without those of videos."""
    renamed = {}
    for name, value in state.items():
        theirs = next(b + name[len(a) :] for a, b in PREFIXES if name.startswith(a))
        for ours, meta in MLP_LAYERS:
            theirs = re.sub(ours, meta, theirs)
        renamed[theirs] = value
    return renamed


def from_huggingface(state: State) -> State:
    """Return the tensors of `Sam2Model` under gigamask's names."""
    renamed: State = {}
    for name, value in state.items():
        if VIDEO.match(name):
            continue
        if name == HF_POINTS:
            renamed |= {
                point: row.clone() for point, row in zip(POINTS, value.split(1), strict=True)
            }
        elif name == HF_SHARED_PE:
            renamed.setdefault(PE_MATRIX_KEY, value)
        else:
            own = next((a + name[len(b) :] for a, b in HF_NAMES if name.startswith(b)), name)
            renamed[_from_huggingface_name(own)] = value
    return renamed


def _from_huggingface_name(name: str) -> str:
    name = re.sub(r"layer_norm(\d|_final_attn)", r"norm\1", name)
    name = re.sub(r"(neck\.convs\.\d+)\.", r"\1.conv.", name)
    if match := re.match(rf"(mask_decoder\.{HEADS})\.(proj_in|layers\.0|proj_out)\.(.*)", name):
        index = {"proj_in": 0, "layers.0": 1, "proj_out": 2}[match[3]]
        return f"{match[1]}.layers.{index}.{match[4]}"
    name = name.replace(".mlp.proj_in.", ".mlp.lin1.").replace(".mlp.proj_out.", ".mlp.lin2.")
    return name.replace(".o_proj.", ".out_proj.")


def to_huggingface(state: State) -> State:
    """Return the tensors of an image model under the names of `Sam2Model`."""
    renamed = {
        _to_huggingface_name(name): value for name, value in state.items() if name not in POINTS
    }
    renamed[HF_POINTS] = torch.cat([state[name] for name in POINTS])
    renamed[HF_SHARED_PE] = state[PE_MATRIX_KEY].clone()
    return renamed


def _to_huggingface_name(name: str) -> str:
    if match := re.match(rf"(mask_decoder\.{HEADS})\.layers\.(\d)\.(.*)", name):
        part = ("proj_in", "layers.0", "proj_out")[int(match[3])]
        return f"{match[1]}.{part}.{match[4]}"
    name = re.sub(r"(neck\.convs\.\d+)\.conv\.", r"\1.", name)
    name = next((b + name[len(a) :] for a, b in HF_NAMES if name.startswith(a)), name)
    if ".transformer." in name or ".backbone." in name:
        name = re.sub(r"\.norm(\d|_final_attn)", r".layer_norm\1", name)
        name = name.replace(".mlp.lin1.", ".mlp.proj_in.").replace(".mlp.lin2.", ".mlp.proj_out.")
        name = name.replace(".out_proj.", ".o_proj.")
    return name


def infer_config(state: State) -> SamConfig | None:
    """Return the configuration of published weights, from the sizes of their tensors.

    Args:
        state: The tensors of an image model under gigamask's names.

    Returns:
        The configuration; None if the sizes are not those of SAM 2.1.
    """
    return next((make() for make in SIZES if _is_of(state, make())), None)


def recipe(state: State) -> str | None:
    """Return the recipe that trains models of the published size of weights; None: they have none.

    Args:
        state: The tensors of an image model under gigamask's names.
    """
    return next((make.__name__ for make in SIZES if _is_of(state, make())), None)


def _is_of(state: State, config: SamConfig) -> bool:
    """Return whether weights have the sizes of a configuration."""
    trunk = "image_encoder.trunk."
    positions = state.get(f"{trunk}pos_embed")
    depth = len(block_indices(state, re.escape(f"{trunk}blocks.")))
    shape = None if positions is None else tuple(positions.shape[1:3])
    hiera = cast(Hiera, config.encoder)
    return ((hiera.embed_dim, hiera.position_size), sum(hiera.depths)) == (shape, depth)


UNSEEN = ("attention_heads", "heads_per_stage", "size_per_stage", "attention_blocks", "patch_size")
"""Ends of names in config.json of `Sam2Model` whose values no tensor shows."""


def with_huggingface_config(config: SamConfig, content: dict[str, Any], name: str) -> SamConfig:
    """Return the configuration of published sizes with what a config.json of `Sam2Model` states.

    Args:
        config: The configuration that the sizes of the tensors determine.
        content: The content of config.json, which leaves out what is as in transformers' default.
        name: The file, for errors.

    Raises:
        GigamaskError: It states what neither the tensors nor the flags of the model do.
    """
    stated, decoder = _flat(content), cast(Sam2Decoder, config.decoder)
    of_decoder = {
        "dynamic_multimask": "dynamic_multimask_via_stability",
        "stability_delta": "dynamic_multimask_stability_delta",
        "stability_threshold": "dynamic_multimask_stability_thresh",
    }
    chosen = {
        field: stated.get(f"mask_decoder_config.{theirs}", getattr(decoder, field))
        for field, theirs in of_decoder.items()
    }
    size = stated.get("prompt_encoder_config.image_size", config.image_size)
    side = size[0] if isinstance(size, list) and size else size
    if not isinstance(side, int) or size not in (side, [side, side]):
        raise GigamaskError(f"{name}: image_size is {size}, but images must be square")
    config = replace(config, image_size=side, decoder=replace(decoder, **chosen))
    for key, value in _flat(huggingface_config(config)).items():
        if key.endswith(UNSEEN) and stated.get(key, value) != value:
            raise GigamaskError(
                f"{name}: {key} is {stated[key]}, but SAM 2.1 of these sizes has {value}"
            )
    return config


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in content.items():
        is_part = isinstance(value, dict)
        found |= _flat(value, f"{prefix}{key}.") if is_part else {f"{prefix}{key}": value}
    return found


def huggingface_config(config: SamConfig) -> dict[str, Any]:
    """Return the content of config.json for `Sam2Model`."""
    hiera, decoder = cast(Hiera, config.encoder), cast(Sam2Decoder, config.decoder)
    size, dim = config.embedding_size, config.embedding_dim
    widths = [hiera.embed_dim * 2**stage for stage in range(4)]
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": hiera.embed_dim,
        "num_attention_heads": hiera.num_heads,
        "image_size": [config.image_size] * 2,
        "blocks_per_stage": list(hiera.depths),
        "embed_dim_per_stage": widths,
        "num_attention_heads_per_stage": [hiera.num_heads * 2**stage for stage in range(4)],
        "window_size_per_stage": list(hiera.window_sizes),
        "global_attention_blocks": list(hiera.global_attn_indexes),
        "window_positional_embedding_background_size": [hiera.position_size] * 2,
    }
    return {
        "architectures": ["Sam2Model"],
        "model_type": "sam2",
        "vision_config": {
            "model_type": "sam2_vision_model",
            "backbone_config": backbone,
            "backbone_channel_list": widths[::-1],
            "backbone_feature_sizes": [[size * scale] * 2 for scale in (4, 2, 1)],
            "fpn_hidden_size": dim,
        },
        "prompt_encoder_config": {
            "hidden_size": dim,
            "image_size": config.image_size,
            "patch_size": config.patch_size,
        },
        "mask_decoder_config": {
            "hidden_size": dim,
            "mlp_dim": config.decoder_mlp,
            "num_attention_heads": config.decoder_num_heads,
            "iou_head_hidden_dim": config.iou_hidden,
            "dynamic_multimask_via_stability": decoder.dynamic_multimask,
            "dynamic_multimask_stability_delta": decoder.stability_delta,
            "dynamic_multimask_stability_thresh": decoder.stability_threshold,
        },
    }

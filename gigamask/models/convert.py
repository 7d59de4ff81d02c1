"""Conversion of weights between Meta's, Hugging Face's and MAE's parameter names and sizes."""

import math
import re
from dataclasses import replace
from typing import Any, get_type_hints

import msgspec
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig, vit_b, vit_h, vit_l
from gigamask.models.weight_files import State

PE_MATRIX_KEY = "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"

HF_KEY_MAP = (
    ("image_encoder.patch_embed.proj.", "vision_encoder.patch_embed.projection."),
    ("image_encoder.pos_embed", "vision_encoder.pos_embed"),
    ("image_encoder.blocks.{i}.norm", "vision_encoder.layers.{i}.layer_norm"),
    ("image_encoder.blocks.{i}.", "vision_encoder.layers.{i}."),
    ("image_encoder.neck.0.", "vision_encoder.neck.conv1."),
    ("image_encoder.neck.1.", "vision_encoder.neck.layer_norm1."),
    ("image_encoder.neck.2.", "vision_encoder.neck.conv2."),
    ("image_encoder.neck.3.", "vision_encoder.neck.layer_norm2."),
    (PE_MATRIX_KEY, "prompt_encoder.shared_embedding.positional_embedding"),
    ("prompt_encoder.point_embeddings.{i}.", "prompt_encoder.point_embed.{i}."),
    ("prompt_encoder.mask_downscaling.0.", "prompt_encoder.mask_embed.conv1."),
    ("prompt_encoder.mask_downscaling.1.", "prompt_encoder.mask_embed.layer_norm1."),
    ("prompt_encoder.mask_downscaling.3.", "prompt_encoder.mask_embed.conv2."),
    ("prompt_encoder.mask_downscaling.4.", "prompt_encoder.mask_embed.layer_norm2."),
    ("prompt_encoder.mask_downscaling.6.", "prompt_encoder.mask_embed.conv3."),
    ("prompt_encoder.not_a_point_embed.", "prompt_encoder.not_a_point_embed."),
    ("prompt_encoder.no_mask_embed.", "prompt_encoder.no_mask_embed."),
    ("mask_decoder.transformer.layers.{i}.norm", "mask_decoder.transformer.layers.{i}.layer_norm"),
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
"""Prefixes of parameter names, Meta's and Hugging Face's; the first match applies, and {i} is a
number. From transformers/models/sam/convert_sam_to_hf.py."""

HF_SHARED_PE_KEY = "shared_image_embedding.positional_embedding"
"""Hugging Face's name for its second copy of `PE_MATRIX_KEY`."""

MAE_PATCHES = ("patch_embed.proj.weight", "patch_embed.proj.bias")
MAE_PARTS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
"""Parameters that SAM's image encoder takes from an MAE besides the position embedding: the patch
embedding, and these parts of each block."""


EFFICIENT_SAM_KEY = "image_encoder.blocks.0.mlp.fc1.weight"
"""A tensor of EfficientSAM, whose image encoder has MAE's names after this prefix."""
PUBLISHED = (vit_b, vit_l, vit_h)
"""Sizes of published SAMs, for which shapes determine the whole configuration."""

HF_FIELDS = (
    ("image_size", "vision_config", "image_size"),
    ("patch_size", "vision_config", "patch_size"),
    ("embed_dim", "vision_config", "hidden_size"),
    ("depth", "vision_config", "num_hidden_layers"),
    ("num_heads", "vision_config", "num_attention_heads"),
    ("window_size", "vision_config", "window_size"),
    ("global_attn_indexes", "vision_config", "global_attn_indexes"),
    ("embedding_dim", "vision_config", "output_channels"),
    ("decoder_num_heads", "mask_decoder_config", "num_attention_heads"),
    ("decoder_mlp", "mask_decoder_config", "mlp_dim"),
    ("iou_hidden", "mask_decoder_config", "iou_head_hidden_dim"),
)
"""Fields of `SamConfig`, and where a Hugging Face config.json has them."""
HF_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "vision_config": {
        "hidden_act": ("gelu",),
        "layer_norm_eps": (1e-6,),
        "num_channels": (3,),
        "qkv_bias": (True,),
        "use_abs_pos": (True,),
        "use_rel_pos": (True,),
    },
    "prompt_encoder_config": {
        "hidden_act": ("gelu",),
        "layer_norm_eps": (1e-6,),
        "mask_input_channels": (16,),
        "num_point_embeddings": (4,),
    },
    "mask_decoder_config": {
        "attention_downsample_rate": (2,),
        "hidden_act": ("relu",),
        "iou_head_depth": (3,),
        "layer_norm_eps": (1e-6, 1e-5),
        "num_hidden_layers": (2,),
        "num_multimask_outputs": (3,),
    },
}
"""Values that gigamask's SAM has, for entries of a Hugging Face config.json that it cannot vary."""


def infer_config(state: State, source: str) -> SamConfig:
    """Infer the configuration of a published SAM from the shapes of its weights.

    Shapes do not determine the attention heads of the mask decoder, so other sizes are refused.

    Args:
        state: State dict with Meta's names.
        source: Where the weights come from, for error messages.

    Raises:
        GigamaskError: A tensor is missing, or the sizes are not those of a published SAM.
    """
    try:
        _, side, _, dim = state["image_encoder.pos_embed"].shape
        patch = state["image_encoder.patch_embed.proj.weight"].shape[-1]
        hidden, embedding_dim = state["mask_decoder.iou_prediction_head.layers.0.weight"].shape
        decoder_mlp = len(state["mask_decoder.transformer.layers.0.mlp.lin1.weight"])
        depth = len(block_indices(state, r"image_encoder\.blocks\."))
        tables = [len(state[f"image_encoder.blocks.{i}.attn.rel_pos_h"]) for i in range(depth)]
    except (KeyError, ValueError, TypeError) as error:
        fix = (
            "put mae: before the path"
            if "cls_token" in state
            else "use weights from Meta, Hugging Face or gigamask"
        )
        raise GigamaskError(
            f"{source}: these are not the weights of a SAM ({error} is missing or has another "
            f"shape); {fix}"
        ) from None
    sizes = (patch, dim, depth, embedding_dim, decoder_mlp, hidden)
    for config in (replace(make(), image_size=side * patch) for make in PUBLISHED):
        attention = [
            2 * (side if index in config.global_attn_indexes else config.window_size) - 1
            for index in range(config.depth)
        ]
        if tables == attention and sizes == (
            config.patch_size,
            config.embed_dim,
            config.depth,
            config.embedding_dim,
            config.decoder_mlp,
            config.iou_hidden,
        ):
            return config
    raise GigamaskError(
        f"{source}: its configuration is not known: the file does not state it, the sizes ({depth} "
        f"blocks of width {dim}) are not those of a published SAM, and shapes do not determine the "
        "decoder's attention heads; give the run folder or what gigamask export wrote, or in "
        "Python Sam.from_pretrained(path, config)"
    )


def parse_huggingface_config(content: Any, source: str) -> SamConfig:
    """Return the configuration that a Hugging Face config.json states.

    What it leaves out has transformers' default, ViT-B.

    Args:
        content: Decoded config.json.
        source: The file, for error messages.

    Raises:
        GigamaskError: It is not the config of a `SamModel`, or of one that gigamask cannot build.
    """
    try:
        if content.get("model_type", "sam") != "sam":
            raise ValueError(f"its model_type is {content['model_type']!r}"[:80])
        parts = {part: content.get(part) or {} for part in HF_FIXED}
        vision, decoder = parts["vision_config"], parts["mask_decoder_config"]
        default, hints = huggingface_config(SamConfig()), get_type_hints(SamConfig)
        found: dict[str, Any] = {}
        for name, part, key in HF_FIELDS:
            value = parts[part].get(key, default[part][key])
            found[name] = msgspec.convert(value, hints[name])
        fixed = HF_FIXED | {
            "vision_config": HF_FIXED["vision_config"] | {"mlp_dim": (4 * found["embed_dim"], None)}
        }
        if vision.get("mlp_dim") is None:
            fixed["vision_config"]["mlp_ratio"] = (4,)
        for part, values in fixed.items():
            for key, allowed in values.items():
                if key in parts[part] and parts[part][key] not in allowed:
                    raise ValueError(
                        f"{part}.{key} must be {allowed[0]}, but is {parts[part][key]!r}"[:120]
                    )
        if decoder.get("hidden_size", found["embedding_dim"]) != found["embedding_dim"]:
            raise ValueError("mask_decoder_config.hidden_size differs from output_channels")
        return SamConfig(**found)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise GigamaskError(
            f"{source}: is not the config of a SamModel that gigamask can build ({error}); export "
            "the folder again, or choose other weights"
        ) from None


def block_indices(state: State, prefix: str) -> set[int]:
    """Return the numbers that follow a prefix in the names of tensors.

    Args:
        state: The tensors.
        prefix: Regular expression.
    """
    return {int(match[1]) for name in state if (match := re.match(rf"{prefix}(\d+)\.", name))}


def plain_vit(config: SamConfig, source: str) -> tuple[Any, str]:
    """Return the sizes of an image encoder that can start from an MAE.

    Args:
        config: Configuration of a SAM.
        source: Where the weights come from, for errors.

    Returns:
        As `ImageEncoder.plain_vit`.

    Raises:
        GigamaskError: The encoder is not a ViT.
    """
    found = config.encoder.plain_vit(config)
    if found is None:
        raise GigamaskError(
            f"mae:{source}: mae: is for --model.encoder vit, vit_t or vit_s (got "
            f"{config.encoder_name}); leave --init out"
        )
    return found


def from_mae(state: State, config: SamConfig, source: str) -> State:
    """Return the encoder weights of an MAE under the names of SAM's image encoder.

    The MAE's tokens, final norm and decoder are dropped. SAM's relative positions, prompt encoder
    and mask decoder are not in the result. EfficientSAM's image encoder has MAE's names, 14 x 14
    positions, and SAM's neck, which is in the result (`efficient_sam_encoder.py` of
    yformer/EfficientSAM).

    Args:
        state: State dict of an MAE: Meta's, with or without the decoder, or gigamask's; or of an
            EfficientSAM.
        config: SAM to resample the positions and the patch embedding for.
        source: Where the weights come from, for error messages.

    Raises:
        GigamaskError: Depth, width or heads differ, a tensor is missing, or the model has no such
            encoder.
    """
    sizes, flag = plain_vit(config, source)
    if EFFICIENT_SAM_KEY in state:
        state = {name.removeprefix("image_encoder."): value for name, value in state.items()}
    depth = len(block_indices(state, r"blocks\."))
    names = [
        f"blocks.{index}.{part}.{kind}"
        for index in range(depth)
        for part in MAE_PARTS
        for kind in ("weight", "bias")
    ]
    if missing := [name for name in ("pos_embed", *MAE_PATCHES, *names) if name not in state]:
        raise GigamaskError(
            f"{source}: these are not the weights of an MAE, {format_names(missing)} missing; "
            "use MAE's .pth or what gigamask pretrain wrote"
        )
    count, dim = state["pos_embed"].shape[1] - 1, state["pos_embed"].shape[-1]
    if (depth, dim) != (sizes.depth, sizes.embed_dim):
        raise GigamaskError(
            f"{source}: has {depth} blocks of width {dim}, the model has {sizes.depth} of "
            f"{sizes.embed_dim}; use {flag}.depth {depth} {flag}.embed-dim {dim}, "
            "or other weights"
        )
    side = math.isqrt(count)
    if side**2 != count:
        raise GigamaskError(
            f"{source}: has positions for {count} patches, which is not a square number; "
            "use weights trained on square images"
        )
    positions = state["pos_embed"][:, 1:].unflatten(1, (side, -1))
    neck = [name for name in state if name.startswith("neck.")]
    encoder = {name: state[name] for name in (*MAE_PATCHES, *names, *neck)}
    encoder["patch_embed.proj.weight"] = resample_patch_embed(
        encoder["patch_embed.proj.weight"], config.patch_size
    )
    encoder["pos_embed"] = resample_abs_pos_embed(positions, config.embedding_size)
    return {
        f"image_encoder.{name.replace('.fc1.', '.lin1.').replace('.fc2.', '.lin2.')}": value
        for name, value in encoder.items()
    }


def check_is_published(config: SamConfig, target: str) -> None:
    """Check that a model is SAM, or SAM 2.1's image model, as published.

    Args:
        config: Configuration of the model.
        target: What requires it, for the error.

    Raises:
        GigamaskError: The model has another decoder or encoder, resizes images otherwise, or
            classifies masks.
    """
    if config.class_names:
        raise GigamaskError(
            f"{target} has no head for classes, which this model has; export it with --to "
            "safetensors or --to onnx"
        )
    if config.rectangular:
        raise GigamaskError(
            f"{target} pads images to squares, this model was built with --model.rectangular: "
            "export it with --to safetensors"
        )
    if config.stretch != config.decoder.stretches:
        raise GigamaskError(
            f"{target} {'pads' if config.stretch else 'stretches'} images, this model was built "
            f"with --model.{'stretch' if config.stretch else 'no-stretch'}: export it with --to "
            "safetensors or --to onnx"
        )
    if config.in_channels != 3:
        raise GigamaskError(
            f"{target} reads RGB, this model images of {config.in_channels} channels: export it "
            "with --to safetensors or --to onnx"
        )
    if lacks := config.decoder.unpublished(config):
        raise GigamaskError(
            f"{target} has no {lacks}; export it with --to safetensors or --to onnx"
        )


def to_huggingface(state: State) -> State:
    """Return weights with the names of Hugging Face's `SamModel`.

    Raises:
        GigamaskError: A tensor is not SAM's.
    """
    renamed = {_rename(name, 0, 1): value for name, value in state.items()}
    if PE_MATRIX_KEY in state:
        renamed[HF_SHARED_PE_KEY] = state[PE_MATRIX_KEY].clone()
    return renamed


def from_huggingface(state: State) -> State:
    """Return the weights of a `SamModel` with Meta's names, from either copy of the PE matrix."""
    renamed = {
        _rename(name, 1, 0): value for name, value in state.items() if name != HF_SHARED_PE_KEY
    }
    if HF_SHARED_PE_KEY in state:
        renamed.setdefault(PE_MATRIX_KEY, state[HF_SHARED_PE_KEY])
    return renamed


def huggingface_config(config: SamConfig) -> dict[str, Any]:
    """Return the content of config.json for Hugging Face's `SamModel`."""
    sizes = {"image_size": config.image_size, "patch_size": config.patch_size}
    content: dict[str, Any] = {
        "architectures": ["SamModel"],
        "model_type": "sam",
        "vision_config": {
            "model_type": "sam_vision_model",
            "num_pos_feats": config.embedding_dim // 2,
            "mlp_dim": 4 * config.embed_dim,
        },
        "prompt_encoder_config": {
            "model_type": "sam_prompt_encoder",
            "hidden_size": config.embedding_dim,
            **sizes,
        },
        "mask_decoder_config": {
            "model_type": "sam_mask_decoder",
            "hidden_size": config.embedding_dim,
        },
    }
    for name, part, key in HF_FIELDS:
        value = getattr(config, name)
        content[part][key] = list(value) if isinstance(value, tuple) else value
    return content


def processor_config(
    config: SamConfig, pixel_mean: tuple[float, ...], pixel_std: tuple[float, ...]
) -> dict[str, Any]:
    """Return the content of preprocessor_config.json for Hugging Face's image processors.

    `SamImageProcessor` resizes the long side of an image and pads the other; `Sam2ImageProcessor`
    resizes both.

    Args:
        config: Configuration of the model.
        pixel_mean: Mean of each channel, 0..255.
        pixel_std: Standard deviation of each channel, 0..255.
    """
    name = "Sam2" if config.stretch else "Sam"
    image_size, mask_size = config.image_size, config.mask_size
    square, mask_square = ({"height": side, "width": side} for side in (image_size, mask_size))
    sizes: dict[str, Any] = {"size": square, "mask_size": mask_square}
    if not config.stretch:
        sizes = {
            "do_pad": True,
            "size": {"longest_edge": image_size},
            "pad_size": square,
            "mask_size": {"longest_edge": mask_size},
            "mask_pad_size": mask_square,
        }
    return {
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [round(value / 255, 6) for value in pixel_mean],
        "image_std": [round(value / 255, 6) for value in pixel_std],
        **sizes,
    }


def _rename(name: str, source: int, target: int) -> str:
    """Translate a tensor's name between conventions: 0 is Meta's, 1 Hugging Face's."""
    for names in HF_KEY_MAP:
        if match := re.match(re.escape(names[source]).replace(r"\{i\}", r"(\d+)"), name):
            index = match[1] if match.groups() else ""
            return names[target].replace("{i}", index) + name[match.end() :]
    raise GigamaskError(
        f"{name[:80]}: not a tensor of {('SAM', 'SamModel')[source]}; remove it, or use other "
        "weights"
    )


def resample_abs_pos_embed(
    positions: Float[Tensor, "1 e e C"], side: int
) -> Float[Tensor, "1 E E C"]:
    """Resample absolute position embeddings by bicubic interpolation.

    As in ViTDet (`modeling/backbone/utils.py`).

    Args:
        positions: Position embedding of e x e tokens.
        side: New number of tokens along a side, E.
    """
    if positions.shape[1] == side:
        return positions
    return (
        F.interpolate(positions.permute(0, 3, 1, 2).float(), size=(side, side), mode="bicubic")
        .permute(0, 2, 3, 1)
        .to(positions.dtype)
    )


def resample_rel_pos(table: Float[Tensor, "l d"], length: int) -> Float[Tensor, "L d"]:
    """Resample relative positions by linear interpolation, as Segment Anything's `get_rel_pos`.

    Args:
        table: One vector per offset, 2 * side - 1 of them.
        length: New number of offsets, L.
    """
    return F.interpolate(table.T[None].float(), size=length, mode="linear")[0].T.to(table.dtype)


def resample_patch_embed(kernel: Float[Tensor, "C 3 p p"], patch: int) -> Float[Tensor, "C 3 P P"]:
    """Resample a patch embedding for patches of another size.

    Uses the pseudo-inverse of bicubic resizing (Beyer et al. 2022, FlexiViT, section 3.4): an
    enlarged patch gives exactly the same output as the original patch. Interpolating the kernel
    from 14 x 14 to 16 x 16 would scale outputs by 1.3 instead.

    Args:
        kernel: Weight of the patch embedding.
        patch: New side of a patch in pixels, P.
    """
    old = kernel.shape[-1]
    if old == patch:
        return kernel
    basis = torch.eye(old, dtype=torch.float64)[:, None, None, :].expand(-1, 1, 1, -1)
    resizing = F.interpolate(basis, size=(1, patch), mode="bicubic", antialias=True)[:, 0, 0]
    inverse = torch.linalg.pinv(resizing)
    return (inverse @ kernel.double() @ inverse.T).to(kernel.dtype)


def format_names(names: list[str]) -> str:
    """Format names as their number and the first three."""
    first = ", ".join(name[:80] for name in names[:3])
    return f"{len(names)} ({first}{', ...' if len(names) > 3 else ''})"

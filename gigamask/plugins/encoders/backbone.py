"""Backbones of transformers as image encoders, with SAM's neck.

A backbone runs as in inference, in training too: no dropout, and batch norms keep their statistics.
Training thus stays exact: its result depends neither on micro-batches, processes nor resuming.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn

from gigamask.errors import GigamaskError, first_line
from gigamask.interfaces import PIXEL_MEAN, PIXEL_STD, ImageEncoderModule
from gigamask.models.hub import download, is_hub_id
from gigamask.models.layers import inflate_channels, smoothing_layers
from gigamask.serialization import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURE, PROCESSOR, WEIGHTS = "config.json", "preprocessor_config.json", "model.safetensors"
MAX_JSON_BYTES = 1 << 20
UNUSED = ("_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id")
UNUSED += ("out_features", "out_indices", "torch_dtype", "transformers_version")
"""Entries of a config.json that do not concern the layers, or that the encoder chooses itself."""


class _PixelScale(msgspec.Struct):
    """Mean and standard deviation of RGB in 0..1, as `preprocessor_config.json` states them."""

    image_mean: tuple[float, float, float] | None = None
    image_std: tuple[float, float, float] | None = None


def read_architecture(
    name: str, revision: str | None
) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """Read the configuration of a backbone, and the scale of its pixels.

    Args:
        name: A folder, or an id of the Hub.
        revision: Commit, branch or tag of the Hub; None means the main branch.

    Returns:
        Its `config.json` as compact text, and mean and standard deviation of RGB in 0..255;
        ImageNet's if it states none.

    Raises:
        GigamaskError: There is no such model, or it is not a backbone.
    """
    folder = _folder(name, revision, (ARCHITECTURE,))
    values = read_json(folder / ARCHITECTURE, dict[str, Any], MAX_JSON_BYTES)
    architecture = json.dumps(
        {key: value for key, value in sorted(values.items()) if key not in UNUSED}
    )
    _config_of(architecture)
    processor = folder / PROCESSOR
    if not processor.is_file():
        return architecture, PIXEL_MEAN, PIXEL_STD
    stated = read_json(processor, _PixelScale, MAX_JSON_BYTES)
    mean = PIXEL_MEAN if stated.image_mean is None else _times_255(stated.image_mean)
    std = PIXEL_STD if stated.image_std is None else _times_255(stated.image_std)
    if min(std) <= 0:
        raise GigamaskError(f"{processor}: image_std must be > 0 (got {stated.image_std})")
    return architecture, mean, std


def _times_255(scale: tuple[float, float, float]) -> tuple[float, ...]:
    return tuple(255 * each for each in scale)


def _folder(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Return the folder of a backbone, which holds the given files."""
    if is_hub_id(name):
        return download(name, files, (PROCESSOR,), revision)
    for file in files:
        if not (Path(name) / file).is_file():
            raise GigamaskError(
                f"--model.encoder hf:{name}: no such folder with {file}, and no id of the Hugging "
                "Face Hub, such as facebook/dinov2-small"
            )
    return Path(name)


def _config_of(architecture: str) -> "PreTrainedConfig":
    """Return the configuration of transformers; no code of the model's folder is run."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_BACKBONE_MAPPING
    except ImportError:
        raise GigamaskError(
            "--model.encoder hf needs transformers, which is not installed: run "
            "pip install 'gigamask[hf]'"
        ) from None
    values = json.loads(architecture)
    kind = str(values.pop("model_type", ""))[:80]
    known = {each.model_type: each for each in MODEL_FOR_BACKBONE_MAPPING}
    if kind not in known or kind == "timm_backbone":
        raise GigamaskError(
            f"--model.encoder hf: {kind or 'a model without model_type'} is not a backbone of "
            f"transformers; there are {', '.join(sorted(known.keys() - {'timm_backbone'}))}"
        )
    try:
        return CONFIG_MAPPING[kind](**values)
    except Exception as error:  # transformers has none in common for all that it refuses
        raise GigamaskError(
            f"--model.encoder hf: the {ARCHITECTURE} of the backbone {kind} is not valid "
            f"({first_line(error)})"
        ) from None


def with_channels(architecture: str, channels: int) -> str:
    """Return the configuration of a backbone with another number of input channels.

    Args:
        architecture: Configuration of the backbone as JSON.
        channels: Channels of the input.

    Raises:
        GigamaskError: The backbone has a fixed number of channels.
    """
    config = _config_of(architecture)
    if not hasattr(config, "num_channels"):
        raise GigamaskError(
            f"--in-channels {channels}: the backbone {config.model_type} reads three channels; "
            "choose another --model.encoder, or leave the flag out"
        )
    return json.dumps(json.loads(architecture) | {"num_channels": channels})


@cache
def feature_shapes(
    architecture: str, image_size: int
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return which feature maps of a backbone are used, found on the meta device.

    Those of all stages, or of the last one if none lowers the resolution, as in a ViT.

    Args:
        architecture: Configuration of the backbone as JSON.
        image_size: Side of the input in pixels.

    Returns:
        Names of the stages, and channels and side of each map.

    Raises:
        GigamaskError: The backbone cannot take images of this size.
    """
    config = _config_of(architecture)
    stages = tuple(config.stage_names[1:])
    try:
        with torch.device("meta"), torch.no_grad():
            backbone = _build(architecture, stages)
            channels = getattr(config, "num_channels", 3)
            maps = backbone(torch.empty(1, channels, image_size, image_size)).feature_maps
    except Exception as error:  # of a model that fails to build or to run
        stated = getattr(config, "image_size", None)
        hint = f"; its own size is {stated}" if stated else ""
        raise GigamaskError(
            f"--model.image-size {image_size} does not fit the backbone {config.model_type} "
            f"({first_line(error)}){hint}"
        ) from None
    shapes = tuple((each.shape[1], each.shape[-1]) for each in maps)
    if shapes[0][1] == shapes[-1][1]:
        return stages[-1:], shapes[-1:]
    return stages, shapes


def _build(architecture: str, stages: Sequence[str]) -> nn.Module:
    """Return a backbone with random weights that returns the maps of the given stages."""
    from transformers import AutoBackbone

    config = _config_of(architecture)
    config.out_features = list(stages)
    return cast(nn.Module, AutoBackbone.from_config(config)).eval()


def blocks_of(backbone: nn.Module) -> list[nn.Module]:
    """Return the blocks of a backbone, from input to output: those of the innermost lists.

    Args:
        backbone: The backbone.
    """
    return [
        child
        for module in backbone.modules()
        if isinstance(module, nn.ModuleList)
        for child in module
        if any(True for _ in child.children())
        and not any(isinstance(inner, nn.ModuleList) for inner in child.modules())
    ]


@cache
def count_blocks(architecture: str) -> int:
    """Return the number of blocks of a backbone.

    Args:
        architecture: Configuration of the backbone as JSON.
    """
    with torch.device("meta"):
        return len(blocks_of(_build(architecture, _config_of(architecture).stage_names[-1:])))


class BackboneEncoder(nn.Module, ImageEncoderModule):
    """A backbone and a neck, which joins its feature maps and smooths them like SAM's.

    With a single feature map, the neck is SAM's.

    Args:
        architecture: Configuration of the backbone as JSON.
        image_size: Side of the input in pixels.
        patch_size: Stride of the embedding in pixels.
        out_chans: Channels of the embedding.
        drop_path_rate: Drop path rate of the last block, increasing linearly from 0.

    Raises:
        GigamaskError: The feature maps do not fit the image size or the stride.
    """

    def __init__(
        self,
        architecture: str,
        image_size: int,
        patch_size: int,
        out_chans: int,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        stages, shapes = feature_shapes(architecture, image_size)
        self.image_size, self._side = image_size, image_size // patch_size
        _check_strides(architecture, image_size, patch_size, [side for _, side in shapes])
        self.backbone = _build(architecture, stages)
        self.laterals = nn.ModuleList(
            nn.Conv2d(channels, out_chans, 1, bias=False) for channels, _ in shapes
        )
        self.neck = nn.Sequential(*smoothing_layers(out_chans))
        self._drop_path: Tensor | None = None
        blocks = blocks_of(self.backbone) if drop_path_rate else []
        for index, block in enumerate(blocks):
            rate = drop_path_rate * index / max(1, len(blocks) - 1)
            block.forward = partial(self._skip, index, rate, block.forward)

    def train(self, mode: bool = True) -> "BackboneEncoder":
        """Set the mode of the neck; the backbone stays in evaluation mode.

        Args:
            mode: Whether to train.
        """
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(
        self, pixels: Float[Tensor, "B N S S"], drop_path: Float[Tensor, "B L 2"] | None = None
    ) -> Float[Tensor, "B C E E"]:
        """Return the image embedding; see `ImageEncoderModule`.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Uniform numbers that decide which blocks are skipped; None in evaluation.
        """
        self._drop_path = drop_path
        maps = self.backbone(pixels).feature_maps
        embedding = torch.zeros((), dtype=pixels.dtype, device=pixels.device)
        for lateral, features in zip(self.laterals, maps, strict=True):
            embedding = embedding + _resize(lateral(features), self._side)
        return self.neck(embedding)

    def _skip(
        self, index: int, rate: float, forward: Callable[..., Any], *inputs: Any, **options: Any
    ) -> Any:
        """Run a block, and skip it for some images (Huang et al. 2016)."""
        output, before = forward(*inputs, **options), inputs[0]
        after = output[0] if isinstance(output, tuple) else output
        if self._drop_path is None or not rate or before.shape != after.shape:
            return output
        kept = (self._drop_path[:, index, 0] >= rate).to(after.device, after.dtype)
        scale = (kept / (1 - rate)).view(-1, *[1] * (after.ndim - 1))
        changed = before + (after - before) * scale
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


def _resize(features: Float[Tensor, "B C h h"], side: int) -> Float[Tensor, "B C E E"]:
    """Return means of finer features, and coarser ones interpolated bilinearly."""
    if features.shape[-1] == side:
        return features
    factor, rest = divmod(int(features.shape[-1]), side)
    if factor and not rest:  # as the next line, but for ONNX
        return F.avg_pool2d(features, factor)
    if factor:
        return F.interpolate(features, (side, side), mode="area")
    return F.interpolate(features, (side, side), mode="bilinear", align_corners=False)


def _check_strides(
    architecture: str, image_size: int, patch_size: int, sides: Sequence[int]
) -> None:
    """Check that a single map has the stride of the embedding, and that one is as fine as it."""
    kind, side = json.loads(architecture)["model_type"], image_size // patch_size
    if len(sides) == 1 and sides[0] != side:
        stride = image_size // sides[0]
        raise GigamaskError(
            f"the backbone {kind} has patches of {stride} pixels: use --model.patch-size {stride} "
            f"and a --model.image-size that is a multiple of it, such as "
            f"{max(1, round(image_size / stride)) * stride} (got {patch_size} and {image_size})"
        )
    if max(sides) < side:
        raise GigamaskError(
            f"the backbone {kind} is coarser than --model.patch-size {patch_size}: its finest map "
            f"has a stride of {image_size / max(sides):g} pixels; use that or more"
        )


def load_pretrained(
    encoder: BackboneEncoder, name: str, revision: str | None, architecture: str
) -> None:
    """Load the weights of a backbone into an encoder.

    Args:
        encoder: The encoder.
        name: A folder, or an id of the Hub.
        revision: Commit, branch or tag of the Hub; None means the main branch.
        architecture: Configuration of the backbone as JSON.

    Raises:
        GigamaskError: There are no such weights, or they do not fit.
    """
    from transformers.utils import logging

    folder = _folder(name, revision, (ARCHITECTURE, WEIGHTS))
    config = _config_of(architecture)
    config.out_features = list(feature_shapes(architecture, encoder.image_size)[0])
    kind, verbosity = cast(Any, type(encoder.backbone)), logging.get_verbosity()
    logging.set_verbosity_error()  # it reports the tensors of the head that a backbone lacks
    logging.disable_progress_bar()
    try:
        loaded, report = kind.from_pretrained(
            str(folder),
            config=config,
            output_loading_info=True,
            dtype=torch.float32,
            use_safetensors=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise GigamaskError(
            f"--model.encoder hf:{name}: {WEIGHTS} does not fit its {ARCHITECTURE} "
            f"({first_line(error)})"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    # The norms of the feature maps are not among the published weights of hierarchical backbones.
    norms = "hidden_states_norms."
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(norms)):
        raise GigamaskError(
            f"--model.encoder hf:{name}: {WEIGHTS} lacks {len(missing)} tensors of the backbone, "
            f"such as {missing[0]}; use --model.encoder.no-pretrained for random ones"
        )
    own = encoder.backbone.state_dict()
    encoder.backbone.load_state_dict(
        {name: inflate_channels(value, own[name]) for name, value in loaded.state_dict().items()}
    )

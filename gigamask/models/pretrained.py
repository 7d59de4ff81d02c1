"""Models that are read from files and written to them, with their configuration."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gigamask import files, plugin
from gigamask.errors import GigamaskError, first_line
from gigamask.models.configs import SamConfig, as_sam
from gigamask.models.model import Model
from gigamask.models.weight_files import SPEC, State, make_spec, save_weights
from gigamask.rng import make_rng

Loaded = TypeVar("Loaded", bound="PretrainedModel")
NOT_IN_SHAPES = "decoder_num_heads", "global_attn_indexes", "stretch", "rectangular"
"""Fields whose values the shapes of weights do not show."""


class PretrainedModel(Model):
    """A model that is read from files and written to them with its configuration."""

    config: SamConfig
    image_encoder: nn.Module
    pixel_mean: Tensor
    pixel_std: Tensor

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that `from_pretrained` and transformers load, as `SamModel` or another.

        Args:
            folder: The folder, created if necessary.

        Raises:
            GigamaskError: The model is not one as published.
        """
        from gigamask.models import convert, state_dict

        family = plugin.load(self.config.decoder.family)
        convert.check_is_published(self.config, f"Hugging Face's {family.huggingface}Model")
        weights = family.to_huggingface(state_dict.to_official(self))
        buffers = [each.flatten() for each in (self.pixel_mean, self.pixel_std)]
        scale = [  # not as half precision has rounded it
            stated if each.equal(torch.tensor(stated).to(each)) else tuple(each.tolist())
            for stated, each in zip(self.config.pixel_scale, buffers, strict=True)
        ]
        configs = {
            "config.json": family.huggingface_config(self.config),
            "preprocessor_config.json": convert.processor_config(self.config, *scale),
        }
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(weights, self.config, folder / "model.safetensors", {"format": "pt"})
        for name, content in configs.items():
            files.write_text(folder / name, json.dumps(content, indent=2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the configuration, as to files, to what torch keeps beside the tensors."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if own := getattr(destination, "_metadata", {}).get(prefix[:-1]):
            own[SPEC] = json.dumps(make_spec(self.config))

    def set_window(
        self: Loaded, window: tuple[float, ...] = (), percentiles: tuple[float, ...] = ()
    ) -> Loaded:
        """State how pixels of more than 8 bits are read, where the weights do not; return self.

        Args:
            window: Values that become 0 and 255: LO HI for all channels, or a pair for each.
            percentiles: Percentiles of each image that become 0 and 255 instead.

        Raises:
            GigamaskError: The weights state another window, or the values are invalid.
        """
        given = (tuple(map(float, each)) for each in (window, percentiles))
        pixels = self.config.pixels.stated(*given)
        self.config = replace(self.config, pixels=pixels)
        return self

    def init_parts(self, seed: int) -> list[nn.Module]:
        """Return an image encoder that initializes itself, built anew."""
        encoder = self.config.encoder
        if not encoder.initializes_itself:
            return []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(make_rng(seed, "image encoder").integers(2**31)))
            self.image_encoder = encoder.build(self.config)
        return [self.image_encoder]

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the mean or standard deviation of each channel.

        Args:
            name: Its name in the module.
            shape: Its shape.
            generator: Its random generator.
        """
        return torch.tensor(self.config.pixel_scale[name == "pixel_std"]).view(-1, 1, 1)

    @property
    def pretrained_names(self) -> tuple[str, ...]:
        """What the names of the parameters begin with that have trained weights from the start."""
        encoder = self.config.encoder
        return (f"image_encoder.{encoder.pretrained_part}",) if encoder.pretrained else ()

    def load_pretrained(self) -> None:
        """Load the trained weights that the image encoder comes with."""
        self.config.encoder.load_pretrained(self.image_encoder)

    def load_init(self, path: str) -> set[str]:
        """Load initial weights of a SAM, or of a part of one; see `models.initial_weights`."""
        from gigamask.models import initial_weights

        return initial_weights.load_init(self, path)

    @property
    def encoder(self) -> nn.Module:
        """The image encoder."""
        return self.image_encoder

    @property
    def encoder_blocks(self) -> list[nn.Module]:
        """The image encoder's blocks, from input to output."""
        return list(self.config.encoder.blocks(self.image_encoder))


def load_sam(
    weights: str | Path,
    config: SamConfig | None = None,
    build_custom: Callable[[], nn.Module | None] = lambda: None,
) -> Any:
    """Load a SAM in evaluation mode; every command and function loads models here.

    Args:
        weights: As for `Sam.from_pretrained`.
        config: Configuration of the model; None: the one that the weights state.
        build_custom: Builds the model if the configuration does not, as with a custom image
            encoder; None if it cannot. Its position embeddings may differ in size.

    Raises:
        GigamaskError: As for `Sam.from_pretrained`.
    """
    from gigamask.models import convert, state_dict

    tensors, stated = state_dict.read_weights(weights)
    own = as_sam(stated, str(weights))
    if config and own:
        _warn_of_conflict(config, own, weights)
    used = config or own or convert.infer_config(tensors, str(weights))
    model = _build(used, tensors, weights) if used.encoder.is_available else None
    if model is None or model.state_dict().keys() != tensors.keys():
        custom = build_custom()
        if custom is not None:
            state_dict.load_weights(custom, tensors, str(weights))
            return custom.eval()
    if model is None:
        raise GigamaskError(
            f"{weights}: its image encoder is not SAM's ViT; give its run folder, whose "
            "configuration builds it"
        )
    fitted = state_dict.fit_weights(model, tensors, str(weights), resample=config is not None)
    state = model.state_dict()
    copies = {name: value.to(state[name].dtype, copy=True) for name, value in fitted.items()}
    model.load_state_dict(copies, assign=True)
    model.pixel_mean, model.pixel_std = (
        torch.tensor(values).view(-1, 1, 1) for values in used.pixel_scale
    )
    return model.to(model.device).eval()


def _warn_of_conflict(config: SamConfig, own: SamConfig, source: str | Path) -> None:
    """Warn of values that weights state otherwise, and that do not show in their shapes."""
    for name in NOT_IN_SHAPES:
        given, stated = getattr(config, name), getattr(own, name)
        if not np.array_equal(given, stated):  # a list equals a tuple
            warnings.warn(
                f"{source}: states {name} {stated}, but is built with {given}, so that it predicts "
                "other masks; leave the configuration out, as gigamask.load_model does",
                stacklevel=4,
            )


def _build(config: SamConfig, tensors: State, source: str | Path) -> Any:
    """Build a model to load tensors into, on the meta device unless its encoder is custom.

    A stranger's configuration may state any size: the meta device allocates nothing.
    """
    if config.has_custom_encoder:
        with torch.random.fork_rng(devices=[]):
            return config.build()
    try:
        depths = getattr(config.encoder, "depths", (getattr(config.encoder, "depth", 0),))
        if (depth := max(config.depth, len(config.global_attn_indexes), *depths)) > len(tensors):
            raise ValueError(f"depth {depth} for {len(tensors)} tensors")
        with torch.device("meta"):
            model = config.build()
        if config.encoder.initializes_itself and _shapes(model.state_dict()) == _shapes(tensors):
            with torch.random.fork_rng(devices=[]):
                return config.build()  # it also has buffers that are no weights
        return model
    except GigamaskError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise GigamaskError(
            f"{source}: its model configuration has sizes that cannot be built "
            f"({first_line(error)[:120]}); use other weights"
        ) from None


def _shapes(tensors: State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}

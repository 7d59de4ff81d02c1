"""Promptable models: one embedding per image, then masks for any number of prompts.

State dicts of SAM have Meta's names and shapes.
"""

import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from gigamask import files, plugin
from gigamask.errors import GigamaskError
from gigamask.models import convert, initial_weights, state_dict
from gigamask.models.configs import SamConfig, as_sam
from gigamask.models.families import ModelFamily
from gigamask.models.model import Model
from gigamask.models.official import OfficialInterface
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.rectangles import encode_rectangles
from gigamask.rng import make_rng
from gigamask.types import MaskDecoderOutput, Prompts


def preprocess(
    images: UInt8[Tensor, "B N S S"] | Float[Tensor, "B N S S"],
    input_sizes: Int64[Tensor, "B 2"],
    mean: Float[Tensor, "N 1 1"],
    std: Float[Tensor, "N 1 1"],
) -> Float[Tensor, "B N S S"]:
    """Return normalized pixels, zero in the padding.

    Args:
        images: The N channels in 0..255.
        input_sizes: Height and width of each image without padding, at the top left.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """
    index = torch.arange(images.shape[-1], device=images.device)
    rows, columns = index < input_sizes[:, :1], index < input_sizes[:, 1:]
    return (
        (images.to(mean.dtype) - mean) / std * (rows[:, None, :, None] & columns[:, None, None, :])
    )


class PretrainedModel(Model):
    """A model that is read from files and written to them with its configuration."""

    config: SamConfig
    image_encoder: nn.Module
    pixel_mean: Tensor
    pixel_std: Tensor

    @classmethod
    def from_pretrained(
        cls, weights: str | Path, config: SamConfig | None = None
    ) -> "PromptableModel":
        """Load a SAM in evaluation mode.

        Args:
            weights: A `.pth`, a `.safetensors`, a run folder, a checkpoint, a folder of
                `save_pretrained` or of transformers, or the id of a SAM on the Hugging Face Hub,
                such as `facebook/sam-vit-base`.
            config: Configuration of the model; None: the one that the weights state. Files of
                published SAMs need none.

        Raises:
            GigamaskError: There are no such weights, they are damaged or not a SAM's, or their
                configuration is not known.
        """
        return load_sam(weights, config)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that `from_pretrained` and transformers load, as `SamModel` or another.

        Args:
            folder: The folder, created if necessary.

        Raises:
            GigamaskError: The model is not one as published.
        """
        family: ModelFamily = plugin.load(self.config.decoder.family)
        convert.check_is_published(self.config, f"Hugging Face's {family.huggingface}Model")
        weights = family.to_huggingface(state_dict.to_official(self))
        mean, std = (tuple(each.flatten().tolist()) for each in (self.pixel_mean, self.pixel_std))
        configs = {
            "config.json": family.huggingface_config(self.config),
            "preprocessor_config.json": convert.processor_config(self.config, mean, std),
        }
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state_dict.save_weights(
            weights, self.config, folder / "model.safetensors", {"format": "pt"}
        )
        for name, content in configs.items():
            files.write_text(folder / name, json.dumps(content, indent=2))

    def set_window(
        self, window: tuple[float, ...] = (), percentiles: tuple[float, ...] = ()
    ) -> "PromptableModel":
        """State how pixels of more than 8 bits are read, where the weights do not; return self.

        Args:
            window: Values that become 0 and 255: LO HI for all channels, or a pair for each.
            percentiles: Percentiles of each image that become 0 and 255 instead.

        Raises:
            GigamaskError: The weights state another window, or the values are invalid.
        """
        pixels = self.config.pixels.stated(tuple(window), tuple(percentiles))
        self.config = replace(self.config, pixels=pixels)
        return cast("PromptableModel", self)

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
        return initial_weights.load_init(self, path)

    @property
    def encoder(self) -> nn.Module:
        """The image encoder."""
        return self.image_encoder

    @property
    def encoder_blocks(self) -> list[nn.Module]:
        """The image encoder's blocks, from input to output."""
        return list(self.config.encoder.blocks(self.image_encoder))


class PromptableModel(PretrainedModel, OfficialInterface):
    """A model that embeds an image once, then predicts masks for any number of prompts.

    Its parts have the names of Meta's `Sam`, and it can be called as that.
    """

    prompt_encoder: PromptEncoder
    mask_decoder: Any
    answers_in_windows: bool = False
    """whether `predict` returns masks in windows around the prompt"""
    embedding_parts: tuple[str, ...] = ()
    """what the names of the mask decoder's tensors begin with that make the embedding"""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = config.encoder.build(config)
        self.prompt_encoder, self.mask_decoder = self.build_decoder()
        for name, values in zip(("pixel_mean", "pixel_std"), config.pixel_scale, strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    @abstractmethod
    def build_decoder(self) -> tuple[PromptEncoder, nn.Module]:
        """Return a new prompt encoder and mask decoder."""

    def finish_init(self, seed: int) -> None:
        """Apply the custom initialization of small models; see `models.init`."""
        if self.config.custom_init:
            self.mask_decoder.custom_init(seed)
            self.config.encoder.custom_init(self.image_encoder)

    def train(self, mode: bool = True) -> "PromptableModel":
        """Set the mode; frozen parts of an encoder of the user's run as in evaluation.

        They neither drop anything out nor collect statistics.

        Args:
            mode: Whether to train.
        """
        super().train(mode)
        if mode and self.config.has_custom_encoder:
            for module in self.image_encoder.modules():
                trained = [parameter.requires_grad for parameter in module.parameters()]
                if trained and not any(trained):
                    module.eval()
        return self

    def encode(
        self,
        images: UInt8[Tensor, "B N S S"] | Float[Tensor, "B N S S"],
        input_sizes: Int64[Tensor, "B 2"],
        drop_path: Float[Tensor, "B L 2"] | None = None,
    ) -> Float[Tensor, "B C E E"]:
        """Return the image embedding.

        Args:
            images: The channels that the model reads, RGB by default, in 0..255.
            input_sizes: Height and width of each image without padding, at the top left.
            drop_path: Uniform numbers that decide which residual branches are skipped; None in
                evaluation.

        Raises:
            GigamaskError: The images do not have the size or the channels of the model input.
        """
        if images.shape[1] != self.config.in_channels:
            raise GigamaskError(
                f"images must have {self.config.in_channels} channels (got {images.shape[1]}); "
                "give the channels that the model was trained on"
            )
        if images.shape[-1] != self.config.image_size:
            side = images.shape[-1]
            raise GigamaskError(
                f"images must be {self.config.image_size} pixels wide and high (got {side}); "
                f"resize them, or build the model with image_size={side} and load its weights"
            )
        pixels = preprocess(images, input_sizes, self.pixel_mean, self.pixel_std)
        return self.embed(pixels, input_sizes, drop_path)

    def embed(
        self,
        pixels: Float[Tensor, "B N S S"],
        input_sizes: Int64[Tensor, "B 2"],
        drop_path: Float[Tensor, "B L 2"] | None,
    ) -> Float[Tensor, "B C E E"]:
        """Return the embedding of normalized pixels.

        Args:
            pixels: Normalized pixels, zero in the padding.
            input_sizes: As of `encode`.
            drop_path: As of `encode`.
        """
        if self.config.rectangular:
            encoder, patch = self.image_encoder, self.config.patch_size
            return encode_rectangles(encoder, pixels, input_sizes, drop_path, patch)
        if self.config.encoder.takes_input_sizes:
            return self.image_encoder(pixels, drop_path, input_sizes)
        # A program's own in the place of SAM's may take pixels alone, as Meta's does.
        takes_drop_path = len(signature(self.image_encoder.forward).parameters) > 1
        return self.image_encoder(pixels, *[drop_path] * takes_drop_path)

    def decode(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> tuple[Float[Tensor, "M K G G"], Float[Tensor, "M K"]]:
        """Return mask logits and predicted IoU of M prompts.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image.
            prompts: The prompts. `prompts.masks` are ignored where `has_mask_prompt` is False.

        Returns:
            Logits on the G x G grid, and predicted IoU; K is 3 with `multimask_output`, else 1.
        """
        output, config = self.predict(embedding, mask_image, prompts), self.config
        return output.low_res_logits(config.mask_size, config.image_size), output.iou_predictions

    @abstractmethod
    def predict(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `decode` returns and logits of classes; masks in windows are not pasted.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """

    @abstractmethod
    def predict_all(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return the single mask and all three others of each prompt, on the G x G grid.

        No operation depends on values, so that a graph of it, as in ONNX, holds for any prompts.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """


def load_sam(
    weights: str | Path,
    config: SamConfig | None = None,
    build_custom: Callable[[], nn.Module | None] = lambda: None,
) -> PromptableModel:
    """Load a SAM in evaluation mode; every command and function loads models here.

    Args:
        weights: As for `Sam.from_pretrained`.
        config: Configuration of the model; None: the one that the weights state.
        build_custom: Builds the model if the configuration does not, as with a custom image
            encoder; None if it cannot. Its position embeddings may differ in size.

    Raises:
        GigamaskError: As for `Sam.from_pretrained`.
    """
    tensors, stated = state_dict.read_weights(weights)
    own = as_sam(stated, str(weights))
    used = config or own or convert.infer_config(tensors, str(weights))
    model = _build(used, tensors, weights) if used.encoder.is_available else None
    if model is None or model.state_dict().keys() != tensors.keys():
        custom = build_custom()
        if custom is not None:
            state_dict.load_weights(custom, tensors, str(weights))
            return cast(PromptableModel, custom).eval()
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
    return model.eval()


def _build(config: SamConfig, tensors: convert.State, source: str | Path) -> PromptableModel:
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
            f"({str(error).splitlines()[0][:120]}); use other weights"
        ) from None


def _shapes(tensors: convert.State) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}

"""Promptable models: one embedding per image, then masks for any number of prompts.

State dicts of SAM have Meta's names and shapes.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.pretrained import PretrainedModel, load_sam
from gigamask.models.prompt_encoder import PromptEncoder, make_prompts
from gigamask.types import ImageEmbedding, MaskDecoderOutput, PerMask, Prompts


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


def require_model(model: Any) -> None:
    """Check that a model is one that predictors can use.

    Args:
        model: The model.

    Raises:
        GigamaskError: It is something else, such as a path.
    """
    if isinstance(model, str | Path):
        raise GigamaskError(f"a model is needed, not its path: gigamask.load_model({str(model)!r})")
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise GigamaskError(
            "a model is needed, such as gigamask.load_model('starter') returns (got "
            f"{type(model).__name__})"
        )


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation within the context, and its modules back to what they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _is_of_gigamask(method: Callable | None) -> bool:
    return method is None or method.__module__.startswith("gigamask.")


def warn_of_replaced(model: "OfficialInterface", *names: str) -> None:
    """Warn of methods that a program has replaced, but that predictors do not call.

    Args:
        model: The model, of whose prompt encoder and mask decoder `forward` is looked at.
        *names: Methods of the model.
    """
    methods = {"prompt_encoder": ("forward",), "mask_decoder": ("forward", "predict_masks")}
    parts = [(part, methods[name]) for name, part in model.named_children() if name in methods]
    found = [
        f"{type(owner).__name__}.{name}"
        for owner, each in [(model, names), *parts]
        for name in each
        if name in vars(owner) or not _is_of_gigamask(getattr(type(owner), name, None))
    ]
    if found:
        warnings.warn(
            f"{', '.join(found)}: replaced by this program, but not called here, where methods "
            "that train many masks at once answer; call the modules instead "
            "(docs/segment_anything.md)",
            stacklevel=4,
        )


class OfficialInterface(nn.Module, ABC):
    """The attributes and methods of Meta's `Sam`."""

    config: SamConfig
    prompt_encoder: PromptEncoder
    mask_decoder: Any
    pixel_mean: Tensor
    pixel_std: Tensor
    mask_threshold: float = 0.0
    """logits above it are foreground"""
    image_format: str = "RGB"
    """order of the channels"""

    encode: Callable[..., Tensor]
    """as `PromptableModel.encode`"""
    decode: Callable[..., tuple[Tensor, Tensor]]
    """as `PromptableModel.decode`"""

    def forward(
        self, batched_input: Sequence[dict[str, Any]], multimask_output: bool
    ) -> list[dict[str, Tensor]]:
        """Predict masks for several images, like `forward` of Meta's `Sam`.

        Gradients flow, unlike in Meta's class; wrap the call in `torch.no_grad()` for inference.

        Args:
            batched_input: One dictionary per image: "image", `(3, h, w)` RGB in 0..255, already
                resized to the model's long side; "original_size", (H, W); optionally
                "point_coords" `(B, N, 2)` with "point_labels" `(B, N)`, "boxes" `(B, 4)`, both in
                pixels of the resized image, and "mask_inputs" `(B, 1, G, G)`.
            multimask_output: Whether to predict three masks per prompt instead of one.

        Returns:
            One dictionary per image: "masks" `(B, C, H, W)` bool at the original size,
            "iou_predictions" `(B, C)`, "low_res_logits" `(B, C, G, G)`.

        Raises:
            GigamaskError: An image is larger than the model's input, or prompts are invalid.
        """
        warn_of_replaced(self, "preprocess")
        side, mask_size, device = self.config.image_size, self.config.mask_size, self.device
        images = [record["image"] for record in batched_input]
        if any(max(image.shape[1:]) > side for image in images):
            raise GigamaskError(f"images must be resized to a long side of at most {side} pixels")
        sizes = torch.tensor([image.shape[1:] for image in images], device=device)
        squares = [
            pad(image, (0, side - image.shape[2], 0, side - image.shape[1])) for image in images
        ]
        embeddings = self.encode(torch.stack(squares).to(device), sizes)
        outputs = []
        for record, image, embedding in zip(batched_input, images, embeddings, strict=True):
            prompts = make_prompts(
                record.get("point_coords"),
                record.get("point_labels"),
                record.get("boxes"),
                record.get("mask_inputs"),
                multimask_output,
                mask_size,
            )
            first = prompts.labels.new_zeros(len(prompts.labels))
            low_res_logits, iou_predictions = self.decode(embedding[None], first, prompts)
            logits = self.postprocess_masks(
                low_res_logits, image.shape[1:], record["original_size"]
            )
            outputs.append(
                {
                    "masks": logits > self.mask_threshold,
                    "iou_predictions": iou_predictions,
                    "low_res_logits": low_res_logits,
                }
            )
        return outputs

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.pixel_mean.device

    def preprocess(self, x: Float[Tensor, "... h w"] | UInt8[Tensor, "... h w"]) -> Tensor:
        """Return normalized pixels with zeros below and to the right, as Meta's `Sam` does.

        Args:
            x: One image `(3, h, w)` or several, in 0..255, resized to the model's long side.
        """
        side = self.config.image_size
        height, width = x.shape[-2:]
        normal = (x - self.pixel_mean) / self.pixel_std
        return pad(normal, (0, side - width, 0, side - height))

    def postprocess_masks(
        self,
        masks: Float[Tensor, "B K G G"],
        input_size: Sequence[int],
        original_size: Sequence[int],
    ) -> Float[Tensor, "B K H W"]:
        """Return logits at the image's size, without padding, as Meta's `Sam` does.

        Args:
            masks: Low-resolution logits.
            input_size: Height and width of the resized image without padding.
            original_size: Height and width of the image, (H, W).
        """
        side, (height, width) = self.config.image_size, input_size
        square = interpolate(masks, (side, side), mode="bilinear", align_corners=False)
        shown = square[..., :height, :width]
        return interpolate(shown, tuple(original_size), mode="bilinear", align_corners=False)


class PromptableModel(PretrainedModel, OfficialInterface):
    """A model that embeds an image once, then predicts masks for any number of prompts.

    Its parts have the names of Meta's `Sam`, and it can be called as that.
    """

    answers_in_windows: bool = False
    """whether `predict` returns masks in windows around the prompt"""
    embedding_parts: tuple[str, ...] = ()
    """what the names of the mask decoder's tensors begin with that make the embedding"""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = config.encoder.build(config)
        self.prompt_encoder, self.mask_decoder = self.build_decoder()
        vars(self.image_encoder)["takes_parts"] = config.rectangular
        for name, values in zip(("pixel_mean", "pixel_std"), config.pixel_scale, strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

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
    ) -> ImageEmbedding:
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
    ) -> ImageEmbedding:
        """Return the embedding of normalized pixels.

        Args:
            pixels: Normalized pixels, zero in the padding.
            input_sizes: As of `encode`.
            drop_path: As of `encode`.
        """
        if self.config.rectangular:
            from gigamask.models.rectangles import encode_rectangles

            encoder, patch = self.image_encoder, self.config.patch_size
            return encode_rectangles(encoder, pixels, input_sizes, drop_path, patch)
        if self.config.encoder.takes_input_sizes:
            return self.image_encoder(pixels, drop_path, input_sizes)
        # A program's own in the place of SAM's may take pixels alone, or have other arguments.
        more = [*signature(self.image_encoder.forward).parameters.values()][1:2]
        needs_one = any(
            each.default is each.empty and each.kind < each.VAR_POSITIONAL for each in more
        )
        if not more or (drop_path is None and not needs_one):
            return self.image_encoder(pixels)
        return self.image_encoder(pixels, drop_path)

    def decode(
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> tuple[Float[Tensor, "M K G G"], Float[Tensor, "M K"]]:
        """Return mask logits and predicted IoU of M prompts.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image.
            prompts: The prompts. `prompts.masks` are ignored where `has_mask_prompt` is False.

        Returns:
            Logits on the G x G grid, and predicted IoU; K is 3 with `multimask_output`, else 1.
        """
        output = self.predict(embedding, mask_image, prompts)
        return self.on_grid(output), output.iou_predictions

    def on_grid(self, output: MaskDecoderOutput) -> Float[Tensor, "M K G G"]:
        """Return masks on the G x G grid.

        Args:
            output: What the mask decoder predicts, on the grid or in windows.
        """
        return output.low_res_logits(self.config.mask_size, self.config.image_size)

    @abstractmethod
    def predict(
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `decode` returns and logits of classes; masks in windows are not pasted.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """

    @abstractmethod
    def predict_all(
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return the single mask and all three others of each prompt, on the G x G grid.

        No operation depends on values, so that a graph of it, as in ONNX, holds for any prompts.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """

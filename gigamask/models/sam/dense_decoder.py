"""SAM's mask decoder with options by which prompts also enter densely (`configs.SamDecoder`).

A prompt without a mask prompt has a prior in its place: the ellipse of its box, or a disc at its
clicks. The three masks of a click have discs of three sizes, of which the middle one is the mask
prompt. Windows and discs have the sizes of `models.compact`; the token for a single mask has the
middle window.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.masks.devices import constant
from gigamask.masks.windows import sample_per_image, sampling_matrices
from gigamask.models.compact.prompt_maps import (
    MIDDLE_WINDOW,
    PromptShapes,
    WindowPrompts,
    masks_in_windows,
    repeat_rows,
    widened,
)
from gigamask.models.configs import SamConfig, SamDecoder, WindowDecoder
from gigamask.models.sam.layers import MLP, no_autocast
from gigamask.models.sam.mask_decoder import MaskDecoder, image_tokens
from gigamask.models.sam.prompt_encoder import PromptEncoder
from gigamask.models.sam.transformer import DensePrompt
from gigamask.types import MaskDecoderOutput, Prompts, WindowLogits

WINDOW_TOKENS = 32
"""Image tokens along each side of a window; fewer if the embedding has fewer."""
SIZES = WindowDecoder()
"""Sizes of the windows and discs."""


def prompt_frame(config: SamConfig) -> SamConfig:
    """Return the configuration of what SAM's prompt encoder sees: a window, or the whole image."""
    if not cast(SamDecoder, config.decoder).windows:
        return config
    tokens = min(WINDOW_TOKENS, config.embedding_size)
    return replace(config, image_size=4 * tokens, patch_size=4)


@dataclass(frozen=True)
class View:
    """What the decoder sees of M prompts: R rows, which are M images or M x K windows.

    Attributes:
        images: Image tokens of B images, or of the rows.
        image_index: Index of each row's image tokens; None: each row has its own.
        prompted: The prompts of each row, relative to its image or window.
        masks: Logits of mask prompts; None if there are none.
        prior: Prior logits of each row.
        priors: Prior logits of each of the K masks of a prompt.
    """

    images: Float[Tensor, "B C E E"]
    image_index: Int64[Tensor, "R"] | None
    prompted: WindowPrompts
    masks: Float[Tensor, "R G G"] | None
    prior: Float[Tensor, "R G G"]
    priors: Float[Tensor, "M K G G"]


class DenseMaskDecoder(MaskDecoder):
    """SAM's mask decoder with at least one of the options of `SamDecoder`."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__(prompt_frame(config))
        self.options = cast(SamDecoder, config.decoder)
        self.side, self.image_tokens = config.image_size, config.embedding_size
        if self.options.residual:  # masks start as the prior
            for head in self.output_hypernetworks_mlps:
                cast(MLP, head).layers[-1].parameter_std = 0.0  # pyrefly: ignore

    def forward(  # pyrefly: ignore[bad-override]
        self,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "M"],
        prompts: Prompts,
        prompt_encoder: PromptEncoder,
        mask_tokens: range,
    ) -> MaskDecoderOutput:
        """Return mask logits, in windows or in one window of the whole image, and predicted IoU.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: M prompts.
            prompt_encoder: SAM's prompt encoder, for `prompt_frame`.
            mask_tokens: Range of K of the four mask tokens to use.
        """
        embedding, prompts = widened(embedding, prompts)
        shapes = PromptShapes.from_prompts(prompts)
        which = [MIDDLE_WINDOW if token == 0 else token - 1 for token in mask_tokens]
        with no_autocast(embedding):
            windows = shapes.windows(prompts.masks, SIZES, self.side).unbind(1)
            windows = torch.stack([windows[index] for index in which], 1)
            if self.options.windows:
                view = self._view_windows(embedding, mask_image, prompts, shapes, windows)
            else:
                view = self._view_images(embedding, mask_image, prompts, shapes, windows)
        dense = self._dense(view, prompts, prompt_encoder)
        count = len(which) if self.options.windows else 1
        labels = repeat_rows(prompts.labels, count)
        index, token_mask = view.image_index, prompts.token_mask
        if token_mask is not None:
            token_mask = repeat_rows(token_mask, count)
        tokens, image = self._attend(
            image_tokens(view.images),
            prompt_encoder.get_dense_pe(),
            prompt_encoder.points(
                view.prompted.points * prompt_encoder.image_size - 0.5,
                labels,
            ),
            torch.arange(labels.shape[0], device=labels.device) if index is None else index,
            dense,
            token_mask,
        )
        heads, iou, classes = self._heads(tokens, mask_tokens)
        if self.options.windows:  # each window has one of the masks
            shape = (mask_image.shape[0], count)
            heads = heads.unflatten(0, shape).diagonal(dim1=1, dim2=3).transpose(1, 2)
            heads = heads.flatten(0, 1)[..., None]
            iou = iou.unflatten(0, shape).diagonal(dim1=1, dim2=2)
            if classes is not None:
                classes = classes.unflatten(0, shape).diagonal(dim1=1, dim2=2).transpose(1, 2)
        logits = self._masks(image, heads).view(-1, *view.priors.shape[1:])
        if self.options.residual:
            logits = view.priors + logits
        if not self.options.windows:
            windows = constant([0.0, 0.0, self.side, self.side], windows.device)
            windows = windows.expand(*iou.shape, 4)
        return MaskDecoderOutput(WindowLogits(logits, windows), iou, classes)

    def _view_images(
        self,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "M"],
        prompts: Prompts,
        shapes: PromptShapes,
        discs: Float[Tensor, "M K 4"],
    ) -> View:
        """Return a view of the whole image for each prompt; the middle disc is the prior."""
        side, count = 4 * self.embedding_size, int(discs.shape[1])
        whole = constant([0.0, 0.0, self.side, self.side], discs.device, discs.dtype)
        frames = whole.expand(discs.shape[0], count, 4)
        masks = prompts.masks
        repeated = None if masks is None else repeat_rows(masks, count)
        priors = WindowPrompts.from_shapes(shapes, frames, discs).prior(repeated, side)
        priors = priors.unflatten(0, (-1, count))
        # Of one mask, of three, and of a single mask and three, this one has MIDDLE_WINDOW.
        middle = slice(count // 2, count // 2 + 1)
        prompted = WindowPrompts.from_shapes(shapes, frames[:, middle], discs[:, middle])
        prior = priors[:, count // 2]
        return View(embedding, mask_image, prompted, masks, prior, priors)

    def _view_windows(
        self,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "M"],
        prompts: Prompts,
        shapes: PromptShapes,
        windows: Float[Tensor, "M K 4"],
    ) -> View:
        """Return a view of each window, in which the embedding is sampled."""
        tokens, index = self.embedding_size, repeat_rows(mask_image, int(windows.shape[1]))
        side = self.image_tokens
        in_tokens = windows.flatten(0, 1) / self.side * side
        images = sample_per_image(
            embedding, index, sampling_matrices(in_tokens, (side, side), tokens)
        )
        prompted = WindowPrompts.from_shapes(shapes, windows)
        masks = masks_in_windows(prompts.masks, windows, self.side, 4 * tokens)
        prior = prompted.prior(masks, 4 * tokens)
        priors = prior.unflatten(0, (-1, windows.shape[1]))
        return View(images, None, prompted, masks, prior, priors)

    def _dense(self, view: View, prompts: Prompts, prompt_encoder: PromptEncoder) -> DensePrompt:
        """Return the dense prompts."""
        masks = view.masks
        has_mask = None if prompts.has_mask_prompt is None else view.prompted.has_mask
        if self.options.prior:
            given = view.prompted.has_mask[:, None, None]
            masks = view.prior if masks is None else torch.where(given, masks, view.prior)
            has_mask = None
        return prompt_encoder.dense(masks, has_mask)

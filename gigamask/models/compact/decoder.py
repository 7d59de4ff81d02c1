"""A mask decoder that answers in windows around the prompt, with SAM's transformer inside.

The embedding is sampled in each window, so a small mask has as many samples as a large one. The
prompt enters as maps beside the features, as tokens, and as a mask: a prior, the box's ellipse, a
click's disc or the earlier mask, which is SAM's mask prompt and to which the answer is added. The
last layer is 0 at the start, so an untrained model answers with the prior.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.masks.devices import no_autocast
from gigamask.masks.windows import sample_per_image, sampling_matrices
from gigamask.models.compact.encoder import ConvNorm, ResidualBlock
from gigamask.models.compact.prompt_maps import (
    LIKENESS_CHANNELS,
    MAP_CHANNELS,
    PROPAGATIONS,
    PromptShapes,
    WindowMaps,
    WindowPrompts,
    likeness,
    masks_in_windows,
    propagated,
    quarters,
    repeat_rows,
    widened,
)
from gigamask.models.configs import ConvPyramid, SamConfig, WindowDecoder
from gigamask.models.layers import MLP, embedding, make_class_head, working_dtype
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.transformer import TwoWayTransformer
from gigamask.types import ImageEmbedding, MaskDecoderOutput, PerMask, Prompts, WindowLogits

WindowTokens = Float[Tensor, "R C t t"]
COARSE, SAMPLES, TOKENS = 16, 32, 8
"""Samples along each side of a window: of the features, of the answer, and of the image tokens."""
KINDS = 5
"""Kinds of answers: a box, three windows of a click, a correction."""
STATISTICS = 4


class WindowMaskDecoder(nn.Module):
    """Predicts masks in three windows for each prompt."""

    def __init__(self, config: SamConfig, encoder: ConvPyramid, decoder: WindowDecoder) -> None:
        super().__init__()
        self.side, self.decoder, self.width = config.image_size, decoder, encoder.width
        dim, (wide, deep) = config.embedding_dim, decoder.widths
        self.kind_embed = embedding(KINDS, wide)
        maps = MAP_CHANNELS + LIKENESS_CHANNELS + PROPAGATIONS
        self.enter = ConvNorm(1 + encoder.width + maps, wide)
        self.refine = ConvNorm(wide, wide)
        self.down = ConvNorm(wide, dim, stride=2)
        self.block = ResidualBlock(dim)
        self.deep = ConvNorm(dim, deep, stride=2)
        self.context = nn.Linear(deep, deep)
        self.lateral = nn.Conv2d(deep, dim, 1)
        self.transformer = TwoWayTransformer.from_config(config)
        self.iou_token = embedding(1, dim)
        self.mask_tokens = embedding(KINDS, dim)
        self.upscale = nn.Conv2d(dim, dim // 2, 1)
        self.skip = nn.Conv2d(wide, dim // 2, 1)
        self.upscaled = ConvNorm(dim // 2, dim // 2)
        self.fine = nn.Conv2d(dim // 2, dim // 4, 1)
        self.fine_skip = nn.Conv2d(encoder.fine_width + 1, dim // 4, 1)
        self.finest = ConvNorm(dim // 4, dim // 4)
        self.output_hypernetwork_mlp = MLP(dim, dim, dim // 4)
        # The answer starts as the prior.
        self.output_hypernetwork_mlp.layers[-1].parameter_std = 0.0  # pyrefly: ignore
        self.iou_prediction_head = MLP(2 * (2 * dim + STATISTICS), config.iou_hidden, 1)
        self.class_head = make_class_head(dim, config.iou_hidden, config.class_names)

    def forward(
        self,
        embedding: ImageEmbedding,
        mask_image: PerMask,
        prompts: Prompts,
        prompt_encoder: PromptEncoder,
        all_windows: bool,
    ) -> MaskDecoderOutput:
        """Return logits in windows, predicted IoU, and logits of classes if the model has them.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: M prompts.
            prompt_encoder: SAM's prompt encoder, for windows.
            all_windows: Whether to answer in all three windows of each prompt, or in the middle
                one; with `closer`, in four that cover the smallest.
        """
        half, device = self.kind_embed.weight.dtype, embedding.device.type
        if half in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled(device):
            with torch.autocast(device, half):  # places and masks are in float32
                return self.forward(embedding, mask_image, prompts, prompt_encoder, all_windows)
        embedding, prompts = widened(embedding, prompts)
        shapes = PromptShapes.from_prompts(prompts)
        windows, kinds = shapes.windows(prompts.masks, self.decoder, self.side), shapes.kinds
        if prompts.closer:
            windows, kinds = quarters(windows[:, 0]), kinds[:, :1].expand(-1, 4)
        elif not all_windows:
            windows, kinds = windows[:, 1:2], kinds[:, 1:2]
        count = int(windows.shape[1])
        flat, kind = windows.flatten(0, 1), kinds.flatten()
        coarse, fine = self._sample(embedding, mask_image, flat, count)
        with no_autocast(embedding):
            prompted = WindowPrompts.from_shapes(shapes, windows)
            masks = masks_in_windows(prompts.masks, windows, self.side, SAMPLES)
            prior = prompted.prior(masks, SAMPLES)
            small = F.avg_pool2d(prior[:, None], 2)[:, 0]
            maps = prompted.maps(
                None if masks is None else F.avg_pool2d(masks[:, None], 2)[:, 0], COARSE
            )
            features = coarse[:, 1:].to(small.dtype)
            alike = likeness(features, maps, small), propagated(features, maps, small)
        skip, dense = self._dense(torch.cat([coarse, maps, *alike], 1), kind)
        labels, token_mask = repeat_rows(prompts.labels, count), prompts.token_mask
        if token_mask is not None:
            token_mask = repeat_rows(token_mask, count)
        points = prompt_encoder.points(prompted.points * SAMPLES - 0.5, labels)
        tokens, image = self._attend(dense, points, kind, prior, prompt_encoder, token_mask)
        residual, pooled = self._upscale(tokens[:, 1], image, skip, fine)
        logits = prior + residual
        shape = (mask_image.shape[0], count)
        scores = torch.cat([tokens[:, 0], pooled, _statistics(logits)], 1).unflatten(0, shape)
        # A click's windows compete; other prompts are answered alike in one window and in three.
        alone = (shapes.has_mask | shapes.has_box)[:, None, None]
        joint = torch.where(alone, scores, scores.mean(1, keepdim=True).expand_as(scores))
        iou = torch.sigmoid(self.iou_prediction_head(torch.cat([scores, joint], 2))[..., 0])
        classes = None
        if self.class_head is not None:
            seen = tokens[:, 1] + pool_inside(image, logits)
            classes = self.class_head(seen).unflatten(0, shape)
        return MaskDecoderOutput(WindowLogits(logits.unflatten(0, shape), windows), iou, classes)

    def _sample(
        self,
        embedding: ImageEmbedding,
        mask_image: PerMask,
        windows: Float[Tensor, "R 4"],
        count: int,
    ) -> tuple[Float[Tensor, "R c n n"], Float[Tensor, "R d m m"]]:
        """Return the features of stride 4, and those of stride 2, each after the valid area."""
        tokens, index = embedding.shape[-1], repeat_rows(mask_image, count)
        in_tokens = windows * (tokens / self.side)
        dtype = working_dtype(embedding)
        features = embedding.to(dtype)

        def sample(maps: Tensor, parts: int, samples: int) -> Tensor:
            size = int(maps.shape[-1])
            matrices = sampling_matrices(in_tokens * (size / tokens), (size, size), samples)
            rows, columns = (
                each.to(dtype).unflatten(2, (tokens, parts)).transpose(2, 3).flatten(2)
                for each in matrices
            )
            return sample_per_image(maps, index, (rows, columns))

        coarse = sample(features[:, : 1 + self.width], 1, COARSE)
        # Even rows and columns before odd ones, which costs less than the right order.
        fine = features[:, 1 + self.width :].unflatten(1, (-1, 2, 2)).transpose(3, 4)
        fine = sample(fine.flatten(4).flatten(2, 3), 2, SAMPLES)
        valid = F.interpolate(coarse[:, :1], scale_factor=2.0)
        return coarse, torch.cat([valid, fine], 1)

    def _dense(
        self, x: Float[Tensor, "R c n n"], kind: Int64[Tensor, "R"]
    ) -> tuple[Float[Tensor, "R w n n"], WindowTokens]:
        """Return the prompted features, and the image tokens of the transformer."""
        entered = self.enter(x) + _select(self.kind_embed, kind)[..., None, None]
        skip = self.refine(entered)
        tokens = self.block(self.down(skip))
        deep = self.deep(tokens)
        deep = F.relu(deep + self.context(deep.mean((2, 3)))[..., None, None])
        return skip, tokens + F.interpolate(self.lateral(deep), scale_factor=2.0)

    def _attend(
        self,
        dense: WindowTokens,
        points: Float[Tensor, "R N C"],
        kind: Int64[Tensor, "R"],
        prior: WindowMaps,
        prompt_encoder: PromptEncoder,
        token_mask: Bool[Tensor, "R N"] | None,
    ) -> tuple[Float[Tensor, "R T C"], WindowTokens]:
        """Return the tokens and the image tokens after SAM's two-way transformer."""
        rows = kind.shape[0]
        own = [self.iou_token.weight.expand(rows, 1, -1), _select(self.mask_tokens, kind)[:, None]]
        tokens, image = self.transformer.attend(
            dense.flatten(2).transpose(1, 2).contiguous(),
            prompt_encoder.token_positions().flatten(0, 1),
            torch.cat([*own, points], 1),
            torch.arange(rows, device=kind.device),
            prompt_encoder.mask_prompt(prior),
            None if token_mask is None else F.pad(token_mask, (2, 0), value=True),
        )
        return tokens, image.transpose(1, 2).unflatten(2, dense.shape[2:])

    def _upscale(
        self,
        mask_token: Float[Tensor, "R C"],
        image: WindowTokens,
        skip: Float[Tensor, "R w n n"],
        fine: Float[Tensor, "R d m m"],
    ) -> tuple[Float[Tensor, "R m m"], Float[Tensor, "R C"]]:
        """Return what is added to the prior, and the mean image token."""
        x = F.interpolate(
            self.upscale(image), scale_factor=2.0, mode="bilinear", align_corners=False
        )
        x = self.upscaled(F.relu(x + self.skip(skip)))
        x = F.interpolate(self.fine(x), scale_factor=2.0, mode="bilinear", align_corners=False)
        x = self.finest(F.relu(x + self.fine_skip(fine.to(x.dtype))))
        head = self.output_hypernetwork_mlp(mask_token)
        return torch.einsum("rc,rcyx->ryx", head, x.to(head.dtype)), image.mean((2, 3))


def pool_inside(image: WindowTokens, logits: WindowMaps) -> Float[Tensor, "R C"]:
    """Return the mean image token inside each mask; it has no gradient to the masks.

    Args:
        image: Image tokens.
        logits: Logits of the masks.
    """
    inside = torch.sigmoid(logits.detach())[:, None].to(image.dtype)
    shares = F.avg_pool2d(inside, SAMPLES // TOKENS).flatten(1)
    shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-6)
    return torch.einsum("rct,rt->rc", image.flatten(2), shares)


def _select(embedding: nn.Embedding, kind: Int64[Tensor, "R"]) -> Float[Tensor, "R C"]:
    """Return the vector of each kind, by a product whose gradient is deterministic on a GPU."""
    weight = embedding.weight
    return F.one_hot(kind, len(weight)).to(weight.dtype) @ weight


def _statistics(logits: WindowMaps) -> Float[Tensor, "R 4"]:
    """Return area, certainty, stability and the part at the border of each mask, detached."""
    logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    inside = torch.sigmoid(logits)
    area = inside.mean((1, 2))
    certainty = (2 * inside - 1).abs().mean((1, 2))
    sure, possible = ((logits > offset).to(inside.dtype).mean((1, 2)) for offset in (1.0, -1.0))
    border = torch.cat([inside[:, 0], inside[:, -1], inside[:, :, 0], inside[:, :, -1]], 1).mean(1)
    return torch.stack([area, certainty, sure / possible.clamp(min=1e-3), border], 1)

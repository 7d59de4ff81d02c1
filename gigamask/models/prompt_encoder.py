"""SAM's prompt encoder: embeddings of points, box corners and mask logits.

Follows `modeling/prompt_encoder.py` of Segment Anything: coordinates are shifted by 0.5 to pixel
centers, divided by the side of the model input on both axes, and encoded by a fixed Gaussian
matrix. Embeddings are selected by arithmetic instead of indexing, which needs no device
synchronization and includes every embedding in every step.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.masks.devices import no_autocast
from gigamask.models.configs import SamConfig
from gigamask.models.layers import LayerNorm2d, embedding, layer_norm, normal
from gigamask.models.shared_tensors import shared
from gigamask.models.transformer import DensePrompt
from gigamask.types import Prompts

PADDING_LABEL, CORNER_LABELS = -1, (2, 3)
"""Labels of a token without a point, and of a box's top-left and bottom-right corners."""


class PositionEmbeddingRandom(nn.Module):
    """Position encoding by sines and cosines of random projections (Tancik et al. 2020).

    The Gaussian matrix is drawn once and saved with the weights.
    """

    positional_encoding_gaussian_matrix: Tensor
    parameter_std = 1.0

    def __init__(self, num_pos_feats: int = 64) -> None:
        super().__init__()
        self.register_buffer("positional_encoding_gaussian_matrix", normal(2, num_pos_feats))

    def forward(self, size: tuple[int, int]) -> Float[Tensor, "C H W"]:
        """Return the encoding of the centers of a grid, as Meta's class does.

        Args:
            size: Height and width of the grid, (H, W).
        """
        return self.grid(size).permute(2, 0, 1)

    def forward_with_coords(
        self, coords_input: Float[Tensor, "... 2"], image_size: tuple[int, int]
    ) -> Float[Tensor, "... C"]:
        """Return the encoding of positions in pixels, as Meta's class does.

        Args:
            coords_input: Positions, xy.
            image_size: Height and width of the image, (H, W).
        """
        height, width = image_size
        if height == width:
            return self.encode(coords_input / width)
        x, y = coords_input.unbind(-1)
        return self.encode(torch.stack([x / width, y / height], -1))

    def grid(self, size: tuple[int, int]) -> Float[Tensor, "H W C"]:
        """Return the encoding of the centers of a grid.

        Args:
            size: Height and width of the grid, (H, W).
        """
        device = self.positional_encoding_gaussian_matrix.device
        down, across = ((torch.arange(side, device=device) + 0.5) / side for side in size)
        xy = [across.expand(len(down), -1), down[:, None].expand(-1, len(across))]
        return self.encode(torch.stack(xy, -1))

    def _pe_encoding(self, coords: Float[Tensor, "... 2"]) -> Float[Tensor, "... C"]:
        """Return `encode`, by the name that exporters of Meta's repository call."""
        return self.encode(coords)

    def encode(self, xy: Float[Tensor, "... 2"]) -> Float[Tensor, "... C"]:
        """Return the encoding of positions in [0, 1].

        Computed in at least float32, since half precision cannot distinguish neighboring pixels.

        Args:
            xy: Positions.
        """
        matrix = self.positional_encoding_gaussian_matrix
        wide = torch.promote_types(matrix.dtype, torch.float32)
        with no_autocast(xy):
            angles = 2 * math.pi * (torch.rsub(xy.to(wide), -1, alpha=-2) @ matrix.to(wide))
        return torch.cat([angles.sin(), angles.cos()], -1).to(matrix.dtype)


class PromptEncoder(nn.Module):
    """SAM's prompt encoder: `forward` as Meta's class has it, and what trains many masks at once.

    In `points`, a box is two corner points.
    """

    def __init__(
        self,
        embed_dim: int,
        image_embedding_size: tuple[int, int],
        input_image_size: tuple[int, int],
        mask_in_chans: int = 16,
        activation: type[nn.Module] = nn.GELU,
    ) -> None:
        """Build the encoder; the arguments are those of Meta's class.

        Args:
            embed_dim: Channels of a token.
            image_embedding_size: Height and width of the image embedding in tokens.
            input_image_size: Height and width of the model's input in pixels.
            mask_in_chans: Channels of a mask prompt before the last projection.
            activation: Activation after the norms.
        """
        super().__init__()
        self.embed_dim, self.input_image_size = embed_dim, tuple(input_image_size)
        self.image_embedding_size = height, width = tuple(image_embedding_size)
        self.mask_input_size = 4 * height, 4 * width
        self.num_point_embeddings = 4
        self.pe_layer = PositionEmbeddingRandom(embed_dim // 2)
        self.point_embeddings = nn.ModuleList(embedding(1, embed_dim) for _ in range(4))
        self.not_a_point_embed = embedding(1, embed_dim)
        self.no_mask_embed = embedding(1, embed_dim)
        self.mask_downscaling = nn.Sequential(
            nn.Conv2d(1, mask_in_chans // 4, 2, stride=2),
            LayerNorm2d(mask_in_chans // 4),
            activation(),
            nn.Conv2d(mask_in_chans // 4, mask_in_chans, 2, stride=2),
            LayerNorm2d(mask_in_chans),
            activation(),
            nn.Conv2d(mask_in_chans, embed_dim, 1),
        )

    @classmethod
    def from_config(cls, config: SamConfig) -> "PromptEncoder":
        """Return the prompt encoder of a configuration."""
        embedding, image = config.embedding_size, config.image_size
        return cls(config.embedding_dim, (embedding, embedding), (image, image))

    def forward(
        self,
        points: tuple[Float[Tensor, "M N 2"], Tensor] | None,
        boxes: Float[Tensor, "M ..."] | None,
        masks: Float[Tensor, "M 1 G G"] | None,
    ) -> tuple[Float[Tensor, "M T C"], Float[Tensor, "M C E E"]]:
        """Return the tokens and the dense embeddings of prompts, as Meta's class does.

        Args:
            points: Points, xy in input pixels, and their labels `(M, N)`: 1 foreground, 0
                background, -1 no point.
            boxes: Boxes x0, y0, x1, y1 in input pixels, `(M, 4)`.
            masks: Low-resolution logits.
        """
        *kinds, top_left, bottom_right = cast(Iterable[nn.Embedding], self.point_embeddings)
        tokens = []
        if points is not None:
            xy, labels = points[0], points[1].to(torch.float32)
            if boxes is None:
                xy, labels = F.pad(xy, (0, 0, 0, 1)), F.pad(labels, (0, 1), value=PADDING_LABEL)
            tokens.append(self._tokens(xy, labels, [self.not_a_point_embed, *kinds]))
        if boxes is not None:
            corners = boxes.reshape(-1, 2, 2)
            labels = torch.arange(2, device=boxes.device).expand(len(corners), -1)
            tokens.append(self._tokens(corners, labels, [top_left, bottom_right], first=0))
        count = next((len(given) for given in (*tokens, masks) if given is not None), 1)
        if not tokens:
            tokens.append(self.no_mask_embed.weight.new_empty(count, 0, self.embed_dim))
        if masks is not None:
            return torch.cat(tokens, 1), self.mask_downscaling(masks)
        dense = self.no_mask_embed.weight.view(1, -1, 1, 1)
        return torch.cat(tokens, 1), dense.expand(count, -1, *self.image_embedding_size)

    def points(
        self, points_xy_input: Float[Tensor, "M N 2"], labels: Int64[Tensor, "M N"]
    ) -> Float[Tensor, "M N C"]:
        """Return a token for each point.

        Args:
            points_xy_input: Points, xy in input pixels.
            labels: 1 foreground, 0 background, 2 and 3 the corners of a box, -1 no point (its own
                token, without a position).
        """
        points = cast(Iterable[nn.Embedding], self.point_embeddings)
        return self._tokens(points_xy_input, labels, [self.not_a_point_embed, *points])

    def _tokens(
        self,
        xy: Float[Tensor, "M N 2"],
        labels: Tensor,
        embeddings: Sequence[nn.Embedding],
        first: int = PADDING_LABEL,
    ) -> Float[Tensor, "M N C"]:
        """Return the sum of each point's position and of the embedding of its label.

        Labels of the embeddings count from `first`; there are no positions below 0.
        """
        kinds, numbers = shared(
            self,
            f"kinds {first} {len(embeddings)}",
            lambda: (
                torch.cat([kind.weight for kind in embeddings]),
                torch.arange(first, first + len(embeddings), device=labels.device),
            ),
        )
        code = self.pe_layer.forward_with_coords(xy + 0.5, self.input_image_size)
        chosen = (labels[..., None] == numbers).to(kinds.dtype)
        with no_autocast(labels):
            return torch.where((labels >= 0)[..., None], code, 0) + chosen @ kinds

    def get_dense_pe(self) -> Float[Tensor, "1 C E E"]:
        """Return the encoding of the center of each token of the image embedding."""
        return self.token_positions().permute(2, 0, 1)[None]

    def token_positions(self) -> Float[Tensor, "E E C"]:
        """Return the encoding of the center of each token, the channels last."""
        grid = self.pe_layer.grid
        return shared(self, "positions", lambda: (grid(self.image_embedding_size),))[0]

    def mask_features(self, masks: Float[Tensor, "M G G"]) -> Float[Tensor, "M T c"]:
        """Return the 16 channels of T = E x E tokens before the last layer of `mask_downscaling`.

        The last layer, a 1 x 1 convolution, is folded into the mask decoder's projections. The
        other convolutions do not overlap, so they are computed as matrix products over 2 x 2 cells.
        """
        layers = cast(Iterable[Any], self.mask_downscaling)
        first, norm, activation, second, last_norm, last_activation, _ = layers
        height, width = self.image_embedding_size
        cells = (
            masks.to(first.weight.dtype)
            .view(-1, height, 2, 2, width, 2, 2)
            .permute(0, 1, 4, 2, 5, 3, 6)
            .reshape(-1, height * width, 4, 4)
        )
        half = F.linear(cells, first.weight.flatten(1), first.bias)
        half = activation(layer_norm(half, norm))
        weight, *_ = shared(
            self, "second cells", lambda: (second.weight.permute(0, 2, 3, 1).flatten(1),)
        )
        quarter = F.linear(half.flatten(2), weight, second.bias)
        return last_activation(layer_norm(quarter, last_norm))

    def mask_prompt(self, masks: Float[Tensor, "M G G"]) -> DensePrompt:
        """Return the dense embeddings of mask prompts.

        Args:
            masks: Their logits.
        """
        last = cast(nn.Conv2d, self.mask_downscaling[6])
        weight, bias = last.weight.flatten(1), cast(Tensor, last.bias)
        return DensePrompt(bias, self.mask_features(masks), weight, "mask prompt")

    def mixed_prompt(
        self, masks: Float[Tensor, "M G G"], has_mask_prompt: Bool[Tensor, "M"]
    ) -> DensePrompt:
        """Return dense embeddings: mask prompts where there are any, `no_mask_embed` elsewhere.

        Two additional channels select the bias of the mask projection or `no_mask_embed`; the other
        16 are zero without a mask prompt.

        Args:
            masks: Logits of mask prompts, ignored where `has_mask_prompt` is False.
            has_mask_prompt: Which masks have a mask prompt.
        """
        given = has_mask_prompt[:, None, None]
        prompt = self.mask_prompt(torch.where(given, masks, 0))
        features = cast(Tensor, prompt.features)
        kinds = torch.cat([given, ~given], -1).to(features.dtype).expand(-1, features.shape[1], -1)
        columns = [cast(Tensor, prompt.weight), prompt.bias[:, None], self.no_mask_embed.weight.T]
        return DensePrompt(
            torch.zeros_like(prompt.bias),
            torch.cat([torch.where(given, features, 0), kinds], -1),
            torch.cat(columns, 1),
        )

    def dense(
        self, masks: Float[Tensor, "M G G"] | None, has_mask_prompt: Bool[Tensor, "M"] | None
    ) -> DensePrompt:
        """Return the dense embeddings of prompts.

        Args:
            masks: Logits of mask prompts; None: there are none.
            has_mask_prompt: Which prompts have one; None: all, if `masks` is not None.
        """
        if masks is None:
            return DensePrompt(self.no_mask_embed.weight[0], name="no mask prompt")
        if has_mask_prompt is None:
            return self.mask_prompt(masks)
        return self.mixed_prompt(masks, has_mask_prompt)


def make_prompts(
    points: Tensor | None,
    labels: Tensor | None,
    boxes: Tensor | None,
    masks: Tensor | None,
    multimask_output: bool,
    mask_size: int,
) -> Prompts:
    """Return the prompts of one image for the mask decoder.

    The tokens are the points, then the corners of the box; without a box, one padding token
    follows the points, as in SAM.

    Args:
        points: `(B, N, 2)` x and y in pixels of the model's input.
        labels: `(B, N)`; 1 foreground, 0 background, -1 no point.
        boxes: `(B, 4)` x0, y0, x1, y1 in pixels of the model's input.
        masks: `(B, 1, G, G)` low-resolution logits, or one for all prompts.
        multimask_output: Whether to predict three masks per prompt instead of one.
        mask_size: Side of the low-resolution masks, G.

    Returns:
        Prompts for B masks.

    Raises:
        GigamaskError: Points without labels, an unknown label, a value that is not finite,
            different numbers of prompts, or masks of another size.
    """
    if (points is None) != (labels is None):
        raise GigamaskError("pass both point_coords and point_labels, one label per point")
    tokens, kinds = [], []
    check_finite(point_coords=points, boxes=boxes, mask_input=masks)
    if points is not None and labels is not None:
        _check_points(points, labels)
        padding = int(boxes is None)
        tokens.append(functional.pad(points, (0, 0, 0, padding)))
        kinds.append(functional.pad(labels.long(), (0, padding), value=PADDING_LABEL))
    if boxes is not None:
        if boxes.shape[1:] == (1, 4):  # which Meta's takes, too
            boxes = boxes[:, 0]
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise GigamaskError(f"boxes must be prompts x 4 (x0 y0 x1 y1), got {_shape(boxes)}")
        tokens.append(boxes.view(-1, 2, 2))
        kinds.append(torch.tensor([CORNER_LABELS], device=boxes.device).expand(len(boxes), 2))
    if masks is not None and masks.shape[1:] != (1, mask_size, mask_size):
        raise GigamaskError(
            f"mask_input must be prompts x 1 x {mask_size} x {mask_size} low-resolution logits, "
            f"got {_shape(masks)}"
        )
    counts = {len(token) for token in tokens}
    if masks is not None and (not tokens or len(masks) != 1):
        counts.add(len(masks))
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise GigamaskError(
            f"points, boxes and masks must have the same number of prompts, got {numbers}"
        )
    count = counts.pop() if counts else 1
    if not tokens:
        device = None if masks is None else masks.device
        tokens = [torch.zeros(count, 0, 2, device=device)]
        kinds = [torch.zeros(count, 0, dtype=torch.int64, device=device)]
    return Prompts(
        torch.cat(tokens, 1),  # of several types, in the widest
        torch.cat(kinds, 1),
        None if masks is None else masks[:, 0].expand(count, -1, -1),
        multimask_output,
    )


def check_finite(**given: Tensor | None) -> None:
    """Check that values, if they are set, are neither NaN nor infinite.

    Args:
        **given: The values by name.

    Raises:
        GigamaskError: Some are.
    """
    for name, values in given.items():
        if values is not None and not values.isfinite().all():
            raise GigamaskError(f"{name} must be numbers (got NaN or infinity)")


def _check_points(points: Tensor, labels: Tensor) -> None:
    if points.shape[:-1] != labels.shape or points.ndim != 3 or points.shape[-1] != 2:
        raise GigamaskError(
            "point_coords must be prompts x points x 2 and point_labels prompts x points, "
            f"got {_shape(points)} and {_shape(labels)}"
        )
    whole = labels.long()
    unknown = labels[(whole != labels) | (whole < PADDING_LABEL) | (whole > 1)]
    if len(unknown):
        raise GigamaskError(
            "point_labels must be 1 (foreground), 0 (background) or -1 (no point), "
            f"got {unknown[0].item():g}; pass a box as `boxes`"
        )


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a scalar"

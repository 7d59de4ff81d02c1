"""The mask decoder's transformer: prompt tokens and image tokens attend to each other, twice.

Equivalent to `modeling/transformer.py` of Segment Anything, computed in another order. The first
block projects the image tokens once per image and gathers the results; a mask prompt adds a linear
function of its 16 channels. Otherwise, one matrix product computes all projections of the same
tokens, including those of the positions, so that fewer tensors are kept for the backward pass.
Under autocast all tokens stay in half precision between the layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.masks.devices import no_autocast
from gigamask.models.configs import SamConfig
from gigamask.models.layers import (
    MLPBlock,
    TokenNorm,
    layer_norm,
    orthonormal,
    planless_attention,
    working_dtype,
)
from gigamask.models.shared_tensors import affine, linear, shared

Tokens = Float[Tensor, "M N C"]
TIE_SCALE = 1.5
"""Scale of the orthonormal rows that queries and keys share in the custom initialization. The
attention logit at the prompt's position then exceeds distant ones by about 2 * 1.5 ** 2, which
outweighs several hundred other tokens."""
AttentionMask = Bool[Tensor, "M N"] | None
"""Which keys to attend to; None means all."""


@dataclass(frozen=True)
class DensePrompt:
    """What is added to the image tokens: a projection of features of mask prompts, and a vector.

    Attributes:
        bias: The vector.
        features: Features of mask prompts; None if there are none.
        weight: Their projection.
        name: Name under which rounds share what follows from `weight` and `bias`; None if these
            change from round to round.
    """

    bias: Float[Tensor, "C"]
    features: Float[Tensor, "M T c"] | None = None
    weight: Float[Tensor, "C c"] | None = None
    name: str | None = None


class JoinedWeights(NamedTuple):
    """Weights and biases of projections of the same tensors, side by side.

    Attributes:
        image: The first block's keys, values and queries of the image, and what positions add.
        image_2: Likewise of the second block.
        image_3: Keys and values of the last attention.
        tokens: Queries, keys and values of the first block's tokens.
        queries: Of tokens with position: the first block's keys for the image, the second block's
            queries and keys.
        values: Of tokens: the first block's values for the image, the second block's values.
        last: Of tokens with position: the second block's keys for the image, the last queries.
    """

    image: Float[Tensor, "D C"]
    image_positions: Float[Tensor, "T D"]
    image_2: Float[Tensor, "D C"]
    image_2_positions: Float[Tensor, "T D"]
    image_3: Float[Tensor, "E C"]
    image_3_positions: Float[Tensor, "T E"]
    tokens: Float[Tensor, "F C"]
    tokens_bias: Float[Tensor, "F"]
    queries: Float[Tensor, "G C"]
    queries_bias: Float[Tensor, "G"]
    values: Float[Tensor, "H C"]
    values_bias: Float[Tensor, "H"]
    last: Float[Tensor, "I C"]
    last_bias: Float[Tensor, "I"]


class _Start(NamedTuple):
    """What the first block computes once per image.

    Attributes:
        projected: Keys, values and queries of the image tokens, with the dense prompt's bias.
        added: Image tokens plus the biases of the dense prompt and of the output projection.
        projection: Projection of the mask prompt's features to keys, values and queries.
    """

    projected: Float[Tensor, "B T D"]
    added: Float[Tensor, "B T C"]
    projection: Float[Tensor, "D c"] | None = None


class DecoderAttention(nn.Module):
    """Multi-head attention whose inner width may be smaller than its outer width."""

    def __init__(self, dim: int, inner: int, heads: int) -> None:
        super().__init__()
        self.embedding_dim, self.internal_dim, self.num_heads = dim, inner, heads
        self.q_proj = nn.Linear(dim, inner)
        self.k_proj = nn.Linear(dim, inner)
        self.v_proj = nn.Linear(dim, inner)
        self.out_proj = nn.Linear(inner, dim)

    def forward(
        self,
        q: Float[Tensor, "M Q C"],
        k: Tokens,
        v: Tokens,
    ) -> Float[Tensor, "M Q C"]:
        """Return the projected attended values, as Meta's class does.

        Args:
            q: What queries are projected from.
            k: What keys are projected from.
            v: What values are projected from.
        """
        return self.out_proj(self.attend(self.q_proj(q), self.k_proj(k), self.v_proj(v)))

    @torch.no_grad()
    def tie(self, seed: int, name: str) -> None:
        """Initialize queries and keys with the same projection, of orthonormal rows.

        A prompt then attends to the image tokens at its position.

        Args:
            seed: Random seed of the run.
            name: Path of the module in the transformer.
        """
        rows = orthonormal(self.q_proj.out_features, self.q_proj.in_features, seed, f"tie {name}")
        self.q_proj.weight.copy_(TIE_SCALE * rows)
        self.k_proj.weight.copy_(TIE_SCALE * rows)

    def attend(
        self,
        q: Float[Tensor, "M Q I"],
        k: Float[Tensor, "M N I"],
        v: Float[Tensor, "M N I"],
        attention_mask: AttentionMask = None,
    ) -> Float[Tensor, "M Q I"]:
        """Return attended values, before the output projection.

        Args:
            q: Projected queries.
            k: Projected keys.
            v: Projected values.
            attention_mask: Which keys to attend to; None means all.
        """
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = None if attention_mask is None else attention_mask[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class TwoWayAttentionBlock(nn.Module):
    """Block of token self-attention, token-to-image attention, MLP and image-to-token attention."""

    def __init__(
        self, dim: int, heads: int, mlp_dim: int, activation: type[nn.Module], downsample_rate: int
    ) -> None:
        super().__init__()
        inner = dim // downsample_rate
        self.self_attn = DecoderAttention(dim, dim, heads)
        self.norm1 = TokenNorm(dim)
        self.cross_attn_token_to_image = DecoderAttention(dim, inner, heads)
        self.norm2 = TokenNorm(dim)
        self.mlp = MLPBlock(dim, mlp_dim, activation)
        self.norm3 = TokenNorm(dim)
        self.norm4 = TokenNorm(dim)
        self.cross_attn_image_to_token = DecoderAttention(dim, inner, heads)

    def update_tokens(
        self,
        attended: Tokens,
        query_pe: Tokens,
        image: tuple[Float[Tensor, "M T I"], Float[Tensor, "M T I"]],
    ) -> Tokens:
        """Return the tokens after attention to the image and the MLP.

        Args:
            attended: Tokens of M prompts after self-attention, not normalized.
            query_pe: Initial tokens, which are added to the queries.
            image: Keys and values of the image tokens.
        """
        across, tokens = self.cross_attn_token_to_image, layer_norm(attended, self.norm1)
        queries = linear(across.q_proj, tokens + query_pe).to(image[0].dtype)
        out = linear(across.out_proj, across.attend(queries, *image))
        tokens = layer_norm(tokens + out, self.norm2)
        return layer_norm(tokens + self.mlp(tokens), self.norm3)

    def attend_to_tokens(
        self,
        queries: Float[Tensor, "M T I"],
        keys: Float[Tensor, "M N I"],
        values: Float[Tensor, "M N I"],
        attention_mask: AttentionMask,
    ) -> Float[Tensor, "M T I"]:
        """Return attended values of the image tokens, before the output projection.

        Args:
            queries: Queries of the image tokens.
            keys: Keys of the prompts' tokens.
            values: Values of the prompts' tokens.
            attention_mask: Which tokens to attend to; None means all.
        """
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        return self.cross_attn_image_to_token.attend(queries, keys, values, attention_mask)


class TwoWayTransformer(nn.Module):
    """Two attention blocks, then a final token-to-image attention."""

    def __init__(
        self,
        depth: int,
        embedding_dim: int,
        num_heads: int,
        mlp_dim: int,
        activation: type[nn.Module] = nn.ReLU,
        attention_downsample_rate: int = 2,
    ) -> None:
        """Build the transformer; the arguments are those of Meta's class.

        Args:
            depth: Number of blocks, 2.
            embedding_dim: Channels of a token.
            num_heads: Attention heads.
            mlp_dim: Hidden width of the MLPs.
            activation: Activation of the MLPs.
            attention_downsample_rate: Width of tokens by that of attention between tokens and
                image.

        Raises:
            GigamaskError: It does not have two blocks.
        """
        super().__init__()
        if depth != 2:
            raise GigamaskError(f"the mask decoder's transformer has 2 blocks (got depth {depth})")
        self.depth, self.embedding_dim = depth, embedding_dim
        self.num_heads, self.mlp_dim = num_heads, mlp_dim
        sizes = embedding_dim, num_heads, mlp_dim, activation, attention_downsample_rate
        self.layers = nn.ModuleList(TwoWayAttentionBlock(*sizes) for _ in range(depth))
        self.final_attn_token_to_image = DecoderAttention(
            embedding_dim, embedding_dim // attention_downsample_rate, num_heads
        )
        self.norm_final_attn = TokenNorm(embedding_dim)

    @classmethod
    def from_config(cls, config: SamConfig) -> "TwoWayTransformer":
        """Return the transformer of a configuration."""
        return cls(2, config.embedding_dim, config.decoder_num_heads, config.decoder_mlp)

    def forward(
        self,
        image_embedding: Float[Tensor, "M C H W"],
        image_pe: Float[Tensor, "M C H W"],
        point_embedding: Tokens,
    ) -> tuple[Tokens, Float[Tensor, "M T C"]]:
        """Return the tokens and the image tokens of prompts, as Meta's class does.

        Args:
            image_embedding: Embedding of each prompt's image, the dense embeddings added.
            image_pe: Encoding of positions, the same for all.
            point_embedding: Tokens.
        """
        rows = torch.arange(len(image_embedding), device=image_embedding.device)
        images = image_embedding.flatten(2).transpose(1, 2).contiguous()
        dense = DensePrompt(images.new_zeros(images.shape[-1]))
        positions = image_pe[0].flatten(1).T
        return self.attend(images, positions, point_embedding, rows, dense, None)

    def attend(
        self,
        images: Float[Tensor, "B T C"],
        positions: Float[Tensor, "T C"],
        tokens: Tokens,
        mask_image: Int64[Tensor, "M"],
        dense: DensePrompt,
        attention_mask: AttentionMask,
        same_images: bool = False,
    ) -> tuple[Tokens, Float[Tensor, "M T C"]]:
        """Return the tokens and the image tokens of each prompt.

        Args:
            images: Image tokens of B images, T = E x E.
            positions: Position encoding of the image tokens.
            tokens: Tokens of M prompts.
            mask_image: Index of each prompt's image.
            dense: What is added to the image tokens.
            attention_mask: Which tokens to attend to; None means all.
            same_images: Whether the images are the same in all rounds of a micro-batch.
        """
        with planless_attention(images.device):
            first, second = self._blocks
            images = images.to(working_dtype(images))
            query_pe = tokens = tokens.to(working_dtype(tokens))
            joined = JoinedWeights(*shared(self, "joined", lambda: self._join(positions)))
            start = self._start(images, joined, dense, same_images)
            image = gather(start.projected, mask_image)
            if dense.features is not None and start.projection is not None:
                image = F.linear(dense.features, start.projection).add_(image)
            *image_keys, image_queries = image.chunk(3, -1)
            q, k, v = linear(self, tokens, (joined.tokens, joined.tokens_bias)).chunk(3, -1)
            attended = first.self_attn.attend(q, k, v, attention_mask)
            tokens = first.update_tokens(
                linear(first.self_attn.out_proj, attended), query_pe, (image_keys[0], image_keys[1])
            )
            inner, dim = image_queries.shape[-1], tokens.shape[-1]
            widths = [inner, dim, dim]
            keys, queries, own_keys = linear(
                self, tokens + query_pe, (joined.queries, joined.queries_bias)
            ).split(widths, -1)
            values, own_values = linear(self, tokens, (joined.values, joined.values_bias)).split(
                widths[:2], -1
            )
            attended = first.attend_to_tokens(image_queries, keys, values, attention_mask)
            weight, _ = affine(first.cross_attn_image_to_token.out_proj)
            update = _add_mask_prompt(F.linear(attended.flatten(0, 1), weight), dense)
            update = update.view(-1, *images.shape[1:]) + gather(start.added, mask_image)
            image_tokens = layer_norm(update, first.norm4)

            image = _project(image_tokens, joined.image_2, joined.image_2_positions)
            *image_keys, image_queries = image.chunk(3, -1)
            attended = second.self_attn.attend(queries, own_keys, own_values, attention_mask)
            tokens = second.update_tokens(
                tokens + linear(second.self_attn.out_proj, attended),
                query_pe,
                (image_keys[0], image_keys[1]),
            )
            keys, queries = linear(self, tokens + query_pe, (joined.last, joined.last_bias)).chunk(
                2, -1
            )
            values = linear(second.cross_attn_image_to_token.v_proj, tokens)
            attended = second.attend_to_tokens(image_queries, keys, values, attention_mask)
            update = second.cross_attn_image_to_token.out_proj(attended)
            image_tokens = layer_norm(update + image_tokens, second.norm4)

            last = self.final_attn_token_to_image
            image = _project(image_tokens, joined.image_3, joined.image_3_positions)
            out = last.attend(queries.to(image.dtype), *image.chunk(2, -1))
            return layer_norm(
                tokens + linear(last.out_proj, out), self.norm_final_attn
            ), image_tokens

    def init_tied_cross_attention(self, seed: int) -> None:
        """Initialize the attention between tokens and image with `DecoderAttention.tie`.

        Args:
            seed: Random seed of the run.
        """
        for index, block in enumerate(self._blocks):
            for name in ("cross_attn_token_to_image", "cross_attn_image_to_token"):
                getattr(block, name).tie(seed, f"layers.{index}.{name}")
        self.final_attn_token_to_image.tie(seed, "final_attn_token_to_image")

    @property
    def _blocks(self) -> tuple[TwoWayAttentionBlock, TwoWayAttentionBlock]:
        first, second = cast(Iterable[TwoWayAttentionBlock], self.layers)
        return first, second

    def _join(self, positions: Float[Tensor, "T C"]) -> JoinedWeights:
        """Return the joined weights; what positions add to queries and keys is in the biases."""
        first, second = self._blocks
        last = self.final_attn_token_to_image
        positions = positions.to(working_dtype(positions))
        blocks = [
            (
                (block.cross_attn_token_to_image.k_proj, True),
                (block.cross_attn_token_to_image.v_proj, False),
                (block.cross_attn_image_to_token.q_proj, True),
            )
            for block in (first, second)
        ]
        own, next_own = first.self_attn, second.self_attn
        to_token, next_to_token = (b.cross_attn_image_to_token for b in (first, second))
        return JoinedWeights(
            *_join_projections(*blocks[0], positions=positions),
            *_join_projections(*blocks[1], positions=positions),
            *_join_projections((last.k_proj, True), (last.v_proj, False), positions=positions),
            *_join_layers(own.q_proj, own.k_proj, own.v_proj),
            *_join_layers(to_token.k_proj, next_own.q_proj, next_own.k_proj),
            *_join_layers(to_token.v_proj, next_own.v_proj),
            *_join_layers(next_to_token.k_proj, last.q_proj),
        )

    def _start(
        self,
        images: Float[Tensor, "B T C"],
        joined: JoinedWeights,
        dense: DensePrompt,
        same_images: bool,
    ) -> _Start:
        """Return what the first block computes once per image.

        A mask prompt adds a linear function of its 16 channels to the projections of the image.
        """
        weight = joined.image
        _, out_bias = affine(self._blocks[0].cross_attn_image_to_token.out_proj)

        def project() -> tuple[Tensor]:
            return (_project(images, weight, joined.image_positions),)

        (base,) = shared(self, "image", project) if same_images else project()

        def compute() -> tuple[Tensor, ...]:
            with no_autocast(images):
                bias = dense.bias.to(weight.dtype)
                projected = base + (weight @ bias).to(base.dtype)
                added = images + (bias + out_bias.to(bias.dtype)).to(images.dtype)
                if dense.weight is None:
                    return projected, added
                return projected, added, weight @ dense.weight.to(weight.dtype)

        shares = same_images and dense.name is not None
        return _Start(*(shared(self, str(dense.name), compute) if shares else compute()))


def gather(
    images: Float[Tensor, "B ..."], mask_image: Int64[Tensor, "M"]
) -> Float[Tensor, "M ..."]:
    """Return the image of each prompt.

    For one image this is a view; otherwise a copy whose gradient is summed in a fixed order.

    Args:
        images: Tensors of B images.
        mask_image: Index of each prompt's image.
    """
    return (
        images.expand(mask_image.shape[0], *images.shape[1:])
        if len(images) == 1
        else _Gather.apply(images, mask_image)
    )


class _Gather(torch.autograd.Function):
    """Index select whose backward is a matrix product.

    Unlike index_add, this is deterministic and accumulates half precision in float32.
    """

    @staticmethod
    def forward(ctx, images, mask_image):
        ctx.save_for_backward(mask_image)
        ctx.count = len(images)
        return images.index_select(0, mask_image)

    @staticmethod
    def backward(ctx, *gradients):
        (mask_image,), (gradient,) = ctx.saved_tensors, gradients
        one_hot = (mask_image == torch.arange(ctx.count, device=mask_image.device)[:, None]).to(
            gradient.dtype
        )
        with no_autocast(gradient):
            return (one_hot @ gradient.flatten(1)).view(ctx.count, *gradient.shape[1:]), None


def _join_projections(
    *layers: tuple[nn.Module, bool], positions: Float[Tensor, "T C"]
) -> tuple[Float[Tensor, "D C"], Float[Tensor, "T D"]]:
    """Join projections into one weight and one bias; True also projects the positions."""
    pairs = [affine(layer) for layer, _ in layers]
    biases = [
        F.linear(positions, weight, bias) if with_positions else bias.expand(len(positions), -1)
        for (weight, bias), (_, with_positions) in zip(pairs, layers, strict=True)
    ]
    dtype = biases[0].dtype
    return torch.cat([weight for weight, _ in pairs]), torch.cat(
        [bias.to(dtype) for bias in biases], -1
    )


def _join_layers(*layers: nn.Module) -> tuple[Float[Tensor, "D C"], Float[Tensor, "D"]]:
    """Join layers into one weight and one bias."""
    weights, biases = zip(*map(affine, layers), strict=True)
    return torch.cat(weights), torch.cat(biases)


def _project(
    keys: Float[Tensor, "M T C"], weight: Float[Tensor, "D C"], bias: Float[Tensor, "T D"]
) -> Float[Tensor, "M T D"]:
    return F.linear(keys, weight).add_(bias)


def _add_mask_prompt(total: Float[Tensor, "R C"], dense: DensePrompt) -> Float[Tensor, "R C"]:
    """Add the projected features of mask prompts, if there are any, in place, row by row."""
    if dense.features is None or dense.weight is None:
        return total
    with no_autocast(total):
        features, weight = (x.to(total.dtype) for x in (dense.features, dense.weight))
        return total.addmm_(features.flatten(0, 1), weight.T)

"""What the prompt tokens pass through between their attentions to the image tokens.

Within a training step, a linear layer's gradient is one product of all rounds, which the shared
tensors compute. Positions that go in are returned: who uses them afterwards passes their gradient
through the backward pass, which adds its own.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gigamask.models.shared_tensors import SharedTensors
from gigamask.plugins.kernels import token_layers

Given = tuple[Tensor | None, ...]
Rows = Float[Tensor, "R C"]


class Shared(NamedTuple):
    """What calls share.

    Attributes:
        tensors: Computes the gradients of weights at the end of a step; None: at once.
        heads: Number of heads.
        eps: Added to the norms' variance.
    """

    tensors: SharedTensors | None
    heads: int
    eps: float


def weight_gradients(
    shared: Shared, pair: tuple[Tensor, Tensor], x: Float[Tensor, "R C"], given: Tensor
) -> Given:
    """Return the gradients of weight and bias; None if they are computed at the end of the step.

    Args:
        shared: What calls share.
        pair: Weight and bias.
        x: The layer's inputs.
        given: Gradient of its outputs.
    """
    if not pair[0].requires_grad:
        return None, None
    if shared.tensors is None or not all(each.is_leaf for each in pair):
        return given.T @ x, given.sum(0)
    shared.tensors.keep(*pair, x, given)
    return None, None


class TokensAfterTokens(torch.autograd.Function):
    """Projection of attended tokens, sum, norm, and the projection of the result with positions.

    It returns what is projected, the tokens and positions.
    """

    @staticmethod
    def forward(
        ctx, shared: Shared, attended: Rows, tokens: Rows | None, positions: Rows, *weights: Tensor
    ) -> tuple[Tensor, Rows, Rows]:
        """Return the results.

        Args:
            ctx: What the backward pass needs.
            shared: What calls share.
            attended: Attended tokens.
            tokens: What is added; None adds nothing.
            positions: Positions.
            *weights: Weight and bias of the output projection, the norm, and weight and bias of
                the projection.
        """
        out, out_bias, norm, *pair = weights
        attended = attended.contiguous()
        x, _ = token_layers.SUM([attended, out], [out_bias, tokens], False)
        width = [0, 0, 0, len(pair[0])]
        own, moved, rows = token_layers.PROJECT(x, positions, norm, pair, width, shared.eps)
        ctx.save_for_backward(attended, x, moved, *weights)
        ctx.shared, ctx.adds = shared, tokens is not None
        return rows, own, positions.view_as(positions)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> Given:  # pyrefly: ignore[bad-override]
        """Return the gradients.

        Args:
            ctx: What the forward pass kept.
            *gradients: Those of the results.
        """
        attended, x, moved, out, out_bias, norm, weight, bias = ctx.saved_tensors
        shared, (of_rows, *added) = ctx.shared, (each.contiguous() for each in gradients)
        total, of_positions = token_layers.SUM([of_rows, weight], [None, *added], True)
        of_sum, of_norm, of_attended = token_layers.PROJECT_BACKWARD(
            [total, x, norm, out], None, shared.eps
        )
        return (
            *(None, of_attended, of_sum if ctx.adds else None, of_positions),
            *weight_gradients(shared, (out, out_bias), attended, of_sum),
            of_norm,
            *weight_gradients(shared, (weight, bias), moved, of_rows),
        )


class TokensAfterImage(torch.autograd.Function):
    """Projection of attended image tokens, sum, norm, MLP, sum, norm, and two projections.

    The first projection reads tokens with positions and gives keys, scores, and queries and keys
    of the next block or rows; the second gives values, and those of the next block. Positions are
    only returned if there is a next block.
    """

    @staticmethod
    def forward(
        ctx,
        shared: Shared,
        attended: Float[Tensor, "R HC"],
        tokens: Rows,
        positions: Rows,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return keys, scores and values of all heads, the rest, the tokens, and positions.

        Args:
            ctx: What the backward pass needs.
            shared: What calls share.
            attended: Attended image tokens.
            tokens: What is added.
            positions: Positions.
            *weights: Weight and bias of the output projection, a norm, weights and biases of the
                MLP, a norm, and those of both projections.
        """
        out, out_bias, norm, first, first_bias, second, second_bias, last_norm = weights[:8]
        project, (heads, eps) = token_layers.PROJECT, shared[1:]
        x, _ = token_layers.SUM([attended, out], [out_bias, tokens], False)
        inner = [0, 0, 0, len(first)]
        own, _, hidden = project(x, None, norm, [first, first_bias], inner, eps)
        y, _ = token_layers.SUM([hidden, second], [second_bias, own], False)
        width, count = attended.shape[1], len(attended)
        keys, values = len(weights[8]), len(weights[10])
        more, rest = keys - width - heads, keys + values - 2 * width - heads
        ranges = [0, 0, 0, width, width, 2 * width + rest, 0, heads]
        ranges += [width + heads, 2 * width, 0, rest, keys, width, 0, width]
        ranges += [keys + width, 2 * width, more, rest]
        last, moved, found = project(y, positions, last_norm, list(weights[8:]), ranges, eps)
        results = found.view(-1).split([count * each for each in (width, width, rest, heads)])
        of_keys, of_values, others, scores = (each.view(count, -1) for each in results)
        ctx.save_for_backward(attended, x, own, hidden, y, last, moved, *weights)
        ctx.shared = shared
        results = of_keys, scores, of_values, others, last
        return results if more == rest else (*results, positions.view_as(positions))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> Given:  # pyrefly: ignore[bad-override]
        """Return the gradients.

        Args:
            ctx: What the forward pass kept.
            *gradients: Those of the results.
        """
        attended, x, own, hidden, y, last, moved, *weights = ctx.saved_tensors
        out, out_bias, norm, first, first_bias, second, second_bias, last_norm, *pairs = weights
        shared, (keys, scores, values, rest, of_last, *more) = ctx.shared, gradients
        added = [None, of_last.contiguous(), more[0].contiguous() if more else None]
        before, after = rest.split(
            [each - keys.shape[1] for each in (len(pairs[0]) - scores.shape[1], len(pairs[2]))], 1
        )
        of_keys = torch.cat([keys, scores, before], 1)
        of_values = torch.cat([values, after], 1) if more else values.contiguous()
        products = [of_keys, pairs[0], of_values, pairs[2]]
        total, of_positions = token_layers.SUM(products, added, True)
        step, eps = token_layers.PROJECT_BACKWARD, shared.eps
        of_y, of_last_norm, of_hidden = step([total, y, last_norm, second], hidden, eps)
        total, _ = token_layers.SUM([of_hidden, first], [None, of_y], True)
        of_x, of_norm, of_attended = step([total, x, norm, out], None, eps)
        return (
            *(None, of_attended, of_x, of_positions),
            *weight_gradients(shared, (out, out_bias), attended, of_x),
            of_norm,
            *weight_gradients(shared, (first, first_bias), own, of_hidden),
            *weight_gradients(shared, (second, second_bias), hidden, of_y),
            of_last_norm,
            *weight_gradients(shared, (pairs[0], pairs[1]), moved, of_keys),
            *weight_gradients(shared, (pairs[2], pairs[3]), last, of_values),
        )

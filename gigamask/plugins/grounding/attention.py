"""Multi-head attention of masks and words."""

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head attention from one sequence to another."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(
        self,
        x: Float[Tensor, "B N C"],
        context: Float[Tensor, "B T C"],
        context_valid: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B N C"]:
        """Attend from each element of `x` to the context.

        Args:
            x: Elements that attend.
            context: Elements that are attended to.
            context_valid: False for padding of the context.
        """
        query = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key_value = self.key_value(context).unflatten(2, (2, self.heads, -1))
        key, value = key_value.permute(2, 0, 3, 1, 4).unbind(0)
        mask = context_valid[:, None, None]
        output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(output.transpose(1, 2).flatten(2))

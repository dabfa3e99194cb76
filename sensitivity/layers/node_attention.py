"""Self-attention over the nodes of one time step."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from sensitivity.checks import head_width
from sensitivity.layers.dropout import Dropout


class NodeAttention(nn.Module):
    r"""Self-attention over nodes with its residual, ``h = x + Dropout(A(x))``, each time step by itself.

    It has no description as a ``SoftmaxAttention``: its tokens are nodes, so a sweep over the number of time steps must
    not find it.

    Args:
        dim: features.
        heads: number of heads; must divide ``dim``.
        dropout: dropout of the output.

    Raises:
        InputError: ``dim`` is not divisible by ``heads``.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(dim, heads)
        self.projection = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, states: Float[Tensor, "batch node time dim"]) -> Float[Tensor, "batch node time dim"]:
        """The states, each with what it gathered from the other nodes at its time."""
        batch, nodes, time, dim = states.shape
        packed = self.projection(states).reshape(batch, nodes, time, 3, self.heads, self.width)
        query, key, value = packed.permute(3, 0, 2, 4, 1, 5).flatten(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mixed = mixed.unflatten(0, (batch, time)).permute(0, 3, 1, 2, 4).reshape(batch, nodes, time, dim)
        return states + self.dropout(self.output(mixed))

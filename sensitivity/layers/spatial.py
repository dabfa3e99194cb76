r"""Graph convolutions over the nodes of ``(batch, node, time, feature)`` states.

All of them compute :math:`\mathrm{Linear}([x, P_f x, P_f^2 x, P_b x, P_b^2 x])` with a forward and a backward
transition matrix; they differ in where the matrices come from, and in whether nodes are mixed at all.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.layers.dropout import Dropout

SPATIAL = ("as_published", "adaptive", "distance", "none")
RANK = 10
TERMS = 5


class _AdaptiveTables(nn.Module):
    """Two node tables and the adaptive transition matrices that they define."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.source = nn.Parameter(torch.randn(nodes, RANK))
        self.target = nn.Parameter(torch.randn(nodes, RANK))

    def forward(self) -> tuple[Float[Tensor, "node node"], Float[Tensor, "node node"]]:
        """Forward and backward matrices, each the row softmax of a rectified product of the tables."""
        forward = torch.softmax(torch.relu(self.source @ self.target.mT), dim=-1)
        backward = torch.softmax(torch.relu(self.target @ self.source.mT), dim=-1)
        return forward, backward


class NodeScaling(nn.Module):
    r"""What the published code computes: it reads only the diagonals :math:`a_n, b_n` of the adaptive matrices.

    .. math::

        y_n = \mathrm{Linear}([x_n, a_n x_n, a_n^2 x_n, b_n x_n, b_n^2 x_n])

    No node sees another: the derivative of a node's output with respect to any other node is exactly 0. The five
    terms are folded into one matrix per node, :math:`W_0 + a_n W_1 + a_n^2 W_2 + b_n W_3 + b_n^2 W_4`, a fifth of the
    products.

    Args:
        nodes: number of nodes.
        dim: features.
        dropout: dropout of the output.
    """

    def __init__(self, nodes: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tables = _AdaptiveTables(nodes)
        self.linear = nn.Linear(TERMS * dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, states: Float[Tensor, "batch node time dim"]) -> Float[Tensor, "batch node time dim"]:
        """Scales and projects every node by itself."""
        batch, nodes, time, dim = states.shape
        a, b = (matrix.diagonal() for matrix in self.tables())
        factors = torch.stack([torch.ones_like(a), a, a**2, b, b**2], dim=-1)
        weight = self.linear.weight.reshape(dim, TERMS, dim).permute(1, 2, 0).reshape(TERMS, dim * dim)
        per_node = (factors @ weight).reshape(nodes, dim, dim)
        flat = states.transpose(0, 1).reshape(nodes, batch * time, dim)
        out = torch.baddbmm(self.linear.bias, flat, per_node.to(flat.dtype))
        return self.dropout(out.reshape(nodes, batch, time, dim).transpose(0, 1))


class AdaptiveMixing(nn.Module):
    """Graph convolution with adaptive transition matrices: every node sees every other.

    Args:
        nodes: number of nodes.
        dim: features.
        dropout: dropout of the output.
    """

    def __init__(self, nodes: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tables = _AdaptiveTables(nodes)
        self.linear = nn.Linear(TERMS * dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, states: Float[Tensor, "batch node time dim"]) -> Float[Tensor, "batch node time dim"]:
        """Mixes and projects."""
        return self.dropout(self.linear(propagate(states, *self.tables())))


class DistanceMixing(nn.Module):
    """Graph convolution along a given road graph, with its row-normalised weights as transition matrices.

    Args:
        graph: weights ``(node, node)`` from row to column, not negative; kept as a buffer, so checkpoints carry it.
        dim: features.
        dropout: dropout of the output.
    """

    graph: Tensor

    def __init__(self, graph: Float[Tensor, "node node"], dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("graph", graph)
        self.linear = nn.Linear(TERMS * dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, states: Float[Tensor, "batch node time dim"]) -> Float[Tensor, "batch node time dim"]:
        """Mixes and projects."""
        matrices = (row_normalised(self.graph), row_normalised(self.graph.mT))
        return self.dropout(self.linear(propagate(states, *matrices)))


def row_normalised(matrix: Float[Tensor, "node node"]) -> Float[Tensor, "node node"]:
    """Every row divided by its sum; a row of zeros stays zero."""
    total = matrix.sum(dim=-1, keepdim=True)
    return matrix / torch.where(total == 0, 1.0, total)


def propagate(
    states: Float[Tensor, "batch node time dim"],
    forward: Float[Tensor, "node node"],
    backward: Float[Tensor, "node node"],
) -> Float[Tensor, "batch node time terms_dim"]:
    """The states beside their one- and two-hop mixtures, ``[x, F x, F^2 x, B x, B^2 x]``, by one matrix product."""
    batch, nodes, time, dim = states.shape
    hops = torch.cat([forward, forward @ forward, backward, backward @ backward]).to(states.dtype)
    first = states.transpose(0, 1)  # nodes first: one product for the whole batch
    mixed = (hops @ first.reshape(nodes, batch * time * dim)).reshape(TERMS - 1, nodes, batch, time, dim)
    joined = torch.cat([first[..., None, :], mixed.permute(1, 2, 3, 0, 4)], dim=-2)
    return joined.flatten(-2).transpose(0, 1)


def spatial_layer(
    kind: str, nodes: int, dim: int, dropout: float = 0.0, graph: Tensor | None = None
) -> NodeScaling | AdaptiveMixing | DistanceMixing | None:
    """The spatial module of a block.

    Args:
        kind: ``"as_published"``, ``"adaptive"``, ``"distance"`` (needs ``graph``) or ``"none"``.
        nodes: number of nodes.
        dim: features.
        dropout: dropout of the output.
        graph: road graph ``(node, node)``, for ``"distance"`` only.

    Returns:
        The module; None for ``"none"``.

    Raises:
        InputError: an unknown kind, or a graph that is missing, not asked for, or unfit.
    """
    if kind == "as_published":
        return NodeScaling(nodes, dim, dropout)
    if kind == "adaptive":
        return AdaptiveMixing(nodes, dim, dropout)
    if kind == "distance":
        return DistanceMixing(check_graph(graph, nodes), dim, dropout)
    if kind == "none":
        return None
    raise InputError(f"unknown spatial module {kind!r}; known: {', '.join(SPATIAL)}.")


def check_graph(graph: Any, nodes: int) -> Float[Tensor, "node node"]:
    """A road graph as a float32 tensor.

    Raises:
        InputError: no graph, of another shape than ``(nodes, nodes)``, or with entries that are negative or not finite.
    """
    if graph is None:
        raise InputError("spatial='distance' needs the road graph; give graph=, or choose 'adaptive'.")
    weights = torch.as_tensor(graph, dtype=torch.float32)
    if tuple(weights.shape) != (nodes, nodes):
        raise InputError(f"the road graph has shape {tuple(weights.shape)}, but there are {nodes} nodes.")
    if not (torch.isfinite(weights) & (weights >= 0)).all():
        raise InputError(
            "the road graph has entries that are negative or not finite; its weights are similarities >= 0."
        )
    return weights

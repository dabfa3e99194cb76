"""A plain forecaster of the published design, from stock modules: what the toolkit's own one is timed against.

Nothing here is taken from the toolkit. Attention is ``nn.MultiheadAttention`` that also returns its weights; every hop
of the propagation is a product of its own, the hops are concatenated and projected.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NODE_RANK, HOPS = 10, 2


class Propagation(nn.Module):
    """Two hops forward and two backward over adaptive matrices of which, as published, only the diagonal is read."""

    def __init__(self, nodes: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(nodes, NODE_RANK))
        self.second = nn.Parameter(torch.randn(nodes, NODE_RANK))
        self.project = nn.Linear((1 + 2 * HOPS) * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        ahead = torch.softmax(torch.relu(self.first @ self.second.T), dim=1)
        behind = torch.softmax(torch.relu(self.second @ self.first.T), dim=1)
        terms = [states]
        for matrix in (ahead, behind):
            hop = states
            for _ in range(HOPS):
                hop = torch.einsum("nn,bntd->bntd", matrix, hop)
                terms.append(hop)
        return self.dropout(self.project(torch.cat(terms, dim=-1)))


class PlainBlock(nn.Module):
    """Attention over time, then propagation over nodes; each with the clock, dropout, residual and normalisation."""

    def __init__(self, nodes: int, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.propagation = Propagation(nodes, dim, dropout)
        self.clocks = nn.ModuleList(nn.Linear(1, dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, clock: Tensor) -> Tensor:
        batch, nodes, time, dim = states.shape
        series = states.reshape(batch * nodes, time, dim)
        mixed, _ = self.attention(series, series, series, need_weights=True)
        mixed = mixed.reshape(batch, nodes, time, dim) + self.clocks[0](clock)
        states = self.norms[0](states + self.dropout(mixed))
        mixed = self.propagation(states) + self.clocks[1](clock)
        return self.norms[1](states + self.dropout(mixed))


class PlainForecaster(nn.Module):
    """``(batch, time, node, 2)`` of scaled speed and time of day to ``(batch, horizon, node)`` of scaled speed."""

    def __init__(
        self, nodes: int, dim: int, depth: int, heads: int, length: int = 12, horizon: int = 12, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.register_buffer("positions", positions(length, dim).float(), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PlainBlock(nodes, dim, heads, dropout) for _ in range(depth))
        self.per_step = nn.Linear(dim + 1, 1)
        self.over_time = nn.Linear(length, horizon)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.permute(0, 2, 1, 3)
        speed, clock = inputs[..., :1], inputs[..., 1:]
        states = self.dropout(self.embed(speed) + self.positions)
        for block in self.blocks:
            states = block(states, clock)
        steps = self.per_step(torch.cat([states, clock], dim=-1)).squeeze(-1)
        return self.over_time(steps).permute(0, 2, 1)


def positions(length: int, dim: int) -> Tensor:
    """The fixed time encoding, in double precision: sines and cosines with frequencies spread over ``length`` steps."""
    table = torch.zeros(length, dim, dtype=torch.float64)
    step = torch.arange(length, dtype=torch.float64)
    for column in range(dim):
        frequency = 10000 ** (-2 * (column // 2) / dim) * dim / length
        table[:, column] = torch.sin(step * frequency) if column % 2 == 0 else torch.cos(step * frequency)
    return table

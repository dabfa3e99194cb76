"""The time-and-space forecaster of arXiv 2602.10956, rebuilt from its published description and numbers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.layers.diagonal import Diagonal, diagonal_from_config
from sensitivity.layers.dropout import Dropout, branch
from sensitivity.layers.gate import ResidualGate, residual_from_config
from sensitivity.layers.positional import time_encoding
from sensitivity.layers.short import is_plain
from sensitivity.layers.spatial import check_graph, spatial_layer
from sensitivity.layers.temporal import TemporalAttention
from sensitivity.models.clock import DAYS, check_inputs, clock
from sensitivity.models.config import arguments, described, sizes


class Block(nn.Module):
    r"""One post-norm block: attention over time, then a graph convolution over the nodes.

    .. math::

        h' = \mathrm{LN}(h + \mathrm{Dropout}(A(h) + U_1 u)), \quad
        h'' = \mathrm{LN}(h' + \mathrm{Dropout}(G(h') + U_2 u))

    with the clock :math:`u`: the time of day, and indicators of the day of the week if the model takes it. There is no
    feed-forward part and no activation. Without a spatial module the second half is left out.

    Args:
        temporal: the attention layer, its residual and output dropout included.
        spatial: the graph convolution, or None.
        dropout: dropout before the second residual.
        parts: numbers in the clock.
    """

    def __init__(self, temporal: TemporalAttention, spatial: nn.Module | None, dropout: float, parts: int = 1) -> None:
        super().__init__()
        self.temporal = temporal
        self.temporal_clock = nn.Linear(parts, temporal.dim)
        self.temporal_norm = nn.LayerNorm(temporal.dim)
        self.spatial = spatial
        if spatial is not None:
            self.spatial_clock = nn.Linear(parts, temporal.dim)
            self.spatial_norm = nn.LayerNorm(temporal.dim)
            self.dropout = Dropout(dropout)

    def forward(
        self, states: Float[Tensor, "batch node time dim"], clock: Float[Tensor, "batch node time part"]
    ) -> Float[Tensor, "batch node time dim"]:
        """The next states, from the states and the clock; in memory, nodes come first, which saves copies."""
        clock = _swapped(clock).contiguous()
        attended = self.temporal(_swapped(_swapped(states).contiguous()), _swapped(self.temporal_clock(clock)))
        states = self.temporal_norm(_swapped(attended))
        if self.spatial is None:
            return _swapped(states)
        mixed = _swapped(self.spatial(_swapped(states))) + self.spatial_clock(clock)
        if self.training and is_plain(mixed):
            return _swapped(self.spatial_norm(branch(mixed, None, self.dropout.p, states)))
        return _swapped(self.spatial_norm(states + self.dropout(mixed)))


def _swapped(values: Float[Tensor, "first second time feature"]) -> Float[Tensor, "second first time feature"]:
    """Batch and nodes exchanged, as a view."""
    return values.transpose(0, 1)


class Forecaster(nn.Module):
    """Direct multi-step forecaster of all nodes at once, in z-scored units.

    Speed is embedded and given a fixed time encoding; ``depth`` blocks follow; a linear readout per step and one over
    time give the forecast. The attention layers are the modules ``blocks.K.temporal``; they are called with tokens
    ``(batch, node, time, dim)``.

    The published code multiplies each node by a diagonal instead of mixing nodes: ``spatial="as_published"`` does the
    same, ``"adaptive"`` mixes as the text says, ``"distance"`` mixes along a given road graph, and ``"none"`` leaves
    the spatial half of every block out.

    Args:
        nodes: number of nodes (sensors).
        input_length: time steps in.
        horizon: time steps out.
        dim: width of the states.
        depth: number of blocks.
        heads: attention heads; must divide ``dim``.
        dropout: the one rate of all dropouts, attention weights included.
        spatial: ``"as_published"``, ``"adaptive"``, ``"distance"`` or ``"none"``.
        diagonal: regulariser of the attention diagonal, in all blocks.
        residual: False leaves out the residual around the attention layers; a ``ResidualGate`` scales it, in every
            block by a factor of its own.
        graph: road graph ``(node, node)`` for ``spatial="distance"``.
        day_of_week: takes the day of the week as a third input channel.

    Raises:
        InputError: a size below 1, heads that do not divide ``dim``, an unknown spatial module, or an unfit graph.
    """

    NAMES = (
        "nodes", "input_length", "horizon", "dim", "depth", "heads", "dropout", "spatial", "diagonal", "residual",
        "day_of_week",
    )  # fmt: skip
    """The entries of ``config``."""

    def __init__(
        self,
        nodes: int,
        input_length: int = 12,
        horizon: int = 12,
        dim: int = 72,
        depth: int = 12,
        heads: int = 8,
        dropout: float | int = 0.1,
        spatial: str = "as_published",
        diagonal: Diagonal | None = None,
        residual: bool | ResidualGate = True,
        graph: Any = None,
        day_of_week: bool = False,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            **sizes(nodes=nodes, input_length=input_length, horizon=horizon, dim=dim, depth=depth),
            "spatial": spatial,
            **described(heads, dropout, diagonal, residual, day_of_week),
        }
        self.nodes, self.input_length, self.horizon = nodes, input_length, horizon
        self.embedding = nn.Linear(1, dim)
        self.dropout = Dropout(dropout)
        shared = check_graph(graph, nodes) if spatial == "distance" else None
        self.blocks = nn.ModuleList(self._block(shared) for _ in range(depth))
        self.readout = nn.Linear(dim + self._parts, 1)
        self.horizon_readout = nn.Linear(input_length, horizon)

    @classmethod
    def from_config(cls, config: dict[str, Any], graph: Any = None) -> Forecaster:
        """A fresh model from ``.config``; ``spatial="distance"`` also needs the graph.

        Raises:
            InputError: names that no forecaster has, or values that it refuses.
        """
        return cls(**arguments(config, cls.NAMES, cls.__name__), graph=graph)

    def forward(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch horizon node"]:
        """The forecast in z-scored units.

        Args:
            inputs: channel 0 is the z-scored speed, channel 1 the time of day in [0, 1), channel 2 (with
                ``day_of_week``) the day of the week in [0, 1).

        Raises:
            InputError: another length, number of nodes or number of channels than the model was built for.
        """
        if inputs.shape[1] != self.input_length:
            raise InputError(
                f"the forecast takes {self.input_length} time steps, not {inputs.shape[1]}; encode() takes any number."
            )
        states = self.encode(inputs)
        joined = torch.cat([states, clock(inputs, self.config["day_of_week"])], dim=-1)
        return self.horizon_readout(self.readout(joined).squeeze(-1)).transpose(1, 2)

    def encode(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch node time dim"]:
        """The states after the last block, for any number of time steps.

        The time encoding's scale is ``input_length`` at every length, so longer inputs begin with the positions seen in
        training and go on at the same step.

        Raises:
            InputError: another number of nodes or channels than the model was built for, or no time step.
        """
        check_inputs(inputs, self.nodes, self.config["day_of_week"])
        speed, times = inputs[..., :1].transpose(1, 2), clock(inputs, self.config["day_of_week"])
        encoding = time_encoding(
            inputs.shape[1], self.config["dim"], self.input_length, dtype=speed.dtype, device=speed.device
        )
        states = self.dropout(self.embedding(speed) + encoding)
        for block in self.blocks:
            states = block(states, times)
        return states

    @property
    def _parts(self) -> int:
        """Numbers in the clock."""
        return 1 + DAYS * self.config["day_of_week"]

    def _block(self, graph: Tensor | None) -> Block:
        config = self.config
        temporal = TemporalAttention(
            config["dim"],
            config["heads"],
            diagonal_from_config(config["diagonal"]),
            residual=residual_from_config(config["residual"]),
            dropout=config["dropout"],
            output_dropout=config["dropout"],
        )
        spatial = spatial_layer(config["spatial"], self.nodes, config["dim"], config["dropout"], graph)
        return Block(temporal, spatial, config["dropout"], self._parts)

"""The time-and-space forecaster of arXiv 2602.10956, rebuilt from its published description and numbers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.layers.diagonal import (
    Diagonal,
    DiagonalDropout,
    DiagonalMask,
    DiagonalPenalty,
    diagonal_from_config,
)
from sensitivity.layers.positional import time_encoding
from sensitivity.layers.spatial import check_graph, spatial_layer
from sensitivity.layers.temporal import TemporalAttention, check_dropout

VARIANTS = ("none", "no-residual", "mask", "dropout", "penalty")


class Block(nn.Module):
    r"""One post-norm block: attention over time, then a graph convolution over the nodes.

    .. math::

        h' = \mathrm{LN}(h + \mathrm{Dropout}(A(h) + U_1 u)), \quad
        h'' = \mathrm{LN}(h' + \mathrm{Dropout}(G(h') + U_2 u))

    with the time of day :math:`u`. There is no feed-forward part and no activation. Without a spatial module the second
    half is left out.

    Args:
        temporal: the attention layer, its residual and output dropout included.
        spatial: the graph convolution, or None.
        dropout: dropout before the second residual.
    """

    def __init__(self, temporal: TemporalAttention, spatial: nn.Module | None, dropout: float) -> None:
        super().__init__()
        self.temporal = temporal
        self.temporal_clock = nn.Linear(1, temporal.dim)
        self.temporal_norm = nn.LayerNorm(temporal.dim)
        self.spatial = spatial
        if spatial is not None:
            self.spatial_clock = nn.Linear(1, temporal.dim)
            self.spatial_norm = nn.LayerNorm(temporal.dim)
            self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Float[Tensor, "batch node time dim"], clock: Float[Tensor, "batch node time 1"]
    ) -> Float[Tensor, "batch node time dim"]:
        """The next states, from the states and the time of day."""
        states = self.temporal_norm(self.temporal(states, self.temporal_clock(clock)))
        if self.spatial is None:
            return states
        mixed = self.dropout(self.spatial(states) + self.spatial_clock(clock))
        return self.spatial_norm(states + mixed)


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
        residual: False leaves out the residual around the attention layers.
        graph: road graph ``(node, node)`` for ``spatial="distance"``.

    Raises:
        InputError: a size below 1, heads that do not divide ``dim``, an unknown spatial module, or an unfit graph.
    """

    NAMES = ("nodes", "input_length", "horizon", "dim", "depth", "heads", "dropout", "spatial", "diagonal", "residual")
    """The entries of ``config``."""

    def __init__(
        self,
        nodes: int,
        input_length: int = 12,
        horizon: int = 12,
        dim: int = 72,
        depth: int = 12,
        heads: int = 8,
        dropout: float = 0.1,
        spatial: str = "as_published",
        diagonal: Diagonal | None = None,
        residual: bool = True,
        graph: Any = None,
    ) -> None:
        super().__init__()
        sizes = {"nodes": nodes, "input_length": input_length, "horizon": horizon, "dim": dim, "depth": depth}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer of at least 1, not {value!r}.")
        self.config: dict[str, Any] = sizes | {
            "heads": heads,
            "dropout": check_dropout(dropout, "dropout"),
            "spatial": spatial,
            "diagonal": None if diagonal is None else diagonal.config(),
            "residual": residual,
        }
        self.nodes, self.input_length, self.horizon = nodes, input_length, horizon
        self.embedding = nn.Linear(1, dim)
        self.dropout = nn.Dropout(dropout)
        shared = check_graph(graph, nodes) if spatial == "distance" else None
        self.blocks = nn.ModuleList(self._block(shared) for _ in range(depth))
        self.readout = nn.Linear(dim + 1, 1)
        self.horizon_readout = nn.Linear(input_length, horizon)

    @classmethod
    def from_config(cls, config: dict[str, Any], graph: Any = None) -> Forecaster:
        """A fresh model from ``.config``; ``spatial="distance"`` also needs the graph.

        Raises:
            InputError: names that no forecaster has, or values that it refuses.
        """
        unknown = sorted(set(config) - set(cls.NAMES))
        if unknown or "nodes" not in config:
            fault = f"unknown: {', '.join(unknown)}" if unknown else "'nodes' is missing"
            raise InputError(f"this is not the configuration of a Forecaster ({fault}).")
        return cls(**(config | {"diagonal": diagonal_from_config(config.get("diagonal")), "graph": graph}))

    def forward(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch horizon node"]:
        """The forecast in z-scored units.

        Args:
            inputs: channel 0 is the z-scored speed, channel 1 the time of day in [0, 1).

        Raises:
            InputError: another length, number of nodes or number of channels than the model was built for.
        """
        if inputs.shape[1] != self.input_length:
            raise InputError(
                f"the forecast takes {self.input_length} time steps, not {inputs.shape[1]}; encode() takes any number."
            )
        states = self.encode(inputs)
        joined = torch.cat([states, _channel(inputs, 1)], dim=-1)
        return self.horizon_readout(self.readout(joined).squeeze(-1)).transpose(1, 2)

    def encode(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch node time dim"]:
        """The states after the last block, for any number of time steps.

        The time encoding's scale is ``input_length`` at every length, so longer inputs begin with the positions seen in
        training and go on at the same step.

        Raises:
            InputError: another number of nodes or channels than the model was built for, or no time step.
        """
        if inputs.shape[2:] != (self.nodes, 2) or inputs.shape[1] < 1:
            raise InputError(
                f"inputs have the shape {tuple(inputs.shape)}; this model takes (batch, time, {self.nodes}, 2): "
                "z-scored speed and time of day of every node."
            )
        speed, clock = _channel(inputs, 0), _channel(inputs, 1)
        encoding = time_encoding(
            inputs.shape[1], self.config["dim"], self.input_length, dtype=speed.dtype, device=speed.device
        )
        states = self.dropout(self.embedding(speed) + encoding)
        for block in self.blocks:
            states = block(states, clock)
        return states

    def _block(self, graph: Tensor | None) -> Block:
        config = self.config
        temporal = TemporalAttention(
            config["dim"],
            config["heads"],
            diagonal_from_config(config["diagonal"]),
            residual=config["residual"],
            dropout=config["dropout"],
            output_dropout=config["dropout"],
        )
        spatial = spatial_layer(config["spatial"], self.nodes, config["dim"], config["dropout"], graph)
        return Block(temporal, spatial, config["dropout"])


def variant_diagonal(
    variant: str, *, p: float = 0.1, value: float = -0.05, where: str = "logits", shared: bool = False
) -> tuple[Diagonal | None, bool]:
    """The diagonal regulariser and the residual switch of one of the five published variants.

    Args:
        variant: ``"none"``, ``"no-residual"``, ``"mask"``, ``"dropout"`` or ``"penalty"``.
        p: rate of the dropout (not published; 0.1 by default).
        value: the penalty (published: -0.05).
        where: ``"logits"`` or ``"weights"``, for the dropout.
        shared: one dropout draw for all samples and heads, as in the published code.

    Raises:
        InputError: an unknown variant.

    >>> variant_diagonal("no-residual")
    (None, False)
    >>> variant_diagonal("penalty")
    (DiagonalPenalty(value=-0.05), True)
    """
    if variant in ("none", "no-residual"):
        return None, variant == "none"
    if variant == "mask":
        return DiagonalMask(), True
    if variant == "dropout":
        return DiagonalDropout(p, where, shared), True
    if variant == "penalty":
        return DiagonalPenalty(value), True
    raise InputError(f"unknown variant {variant!r}; known: {', '.join(VARIANTS)}.")


def _channel(inputs: Float[Tensor, "batch time node channel"], index: int) -> Float[Tensor, "batch node time 1"]:
    return inputs[..., index : index + 1].transpose(1, 2)

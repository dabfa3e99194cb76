"""A spatio-temporal transformer with adaptive embeddings, after STAEformer (Liu et al., 2023, arXiv 2308.10425)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.layers.diagonal import Diagonal, diagonal_from_config
from sensitivity.layers.dropout import Dropout
from sensitivity.layers.gate import ResidualGate, residual_from_config
from sensitivity.layers.node_attention import NodeAttention
from sensitivity.layers.temporal import TemporalAttention
from sensitivity.models.clock import DAYS, channels, check_inputs, day_number
from sensitivity.models.config import arguments, described, sizes

SHARE = 3 / 19
"""Width of one embedding of speed or time beside the whole: 24 of 152, as published."""


class Layer(nn.Module):
    r"""A post-norm transformer layer, :math:`x' = \mathrm{LN}(A(x))`, :math:`h = \mathrm{LN}(x' + \mathrm{FF}(x'))`.

    Args:
        attention: attention with its residual, over time or over nodes.
        dim: features.
        feed_forward: width between the two linear maps.
        dropout: dropout of the feed-forward part's output.
    """

    def __init__(
        self, attention: TemporalAttention | NodeAttention, dim: int, feed_forward: int, dropout: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, feed_forward), nn.ReLU(), nn.Linear(feed_forward, dim), Dropout(dropout)
        )
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, states: Float[Tensor, "batch node time dim"]) -> Float[Tensor, "batch node time dim"]:
        """The next states."""
        states = self.norm(self.attention(states))
        return self.final_norm(states + self.feed_forward(states))


class STAEformer(nn.Module):
    """Direct multi-step forecaster of all nodes at once, in z-scored units, with attention over time, then over nodes.

    A state is speed and clock, projected, beside embeddings of the time of day and of the day of the week, and beside a
    table with a vector for each node and input step. ``depth`` layers attend over time, ``depth`` more over nodes; one
    linear map takes the states of all steps to the forecast. The attention layers over time are the modules
    ``temporal.K.attention``, called with tokens ``(batch, node, time, dim)``.

    The table has ``input_length`` steps. ``encode`` takes any number of them: the last step of an input is always the
    last of the table, and all steps that lie further back than the table reaches share its first. Beyond the length of
    training, the states are thus as defined as the time encoding of a ``Forecaster`` there, and as unseen.

    Args:
        nodes: number of nodes (sensors).
        input_length: time steps in.
        horizon: time steps out.
        dim: width of the states; 3 / 19 of it for each of speed, time of day and day of the week, the rest for the
            table (24, 24, 24 and 80 of the published 152).
        depth: layers over time, and as many over nodes.
        heads: attention heads; must divide ``dim``.
        dropout: dropout of every layer's two outputs; attention weights have none.
        diagonal: regulariser of the diagonal of the attention over time, in all layers.
        residual: False leaves out the residual around the attention over time; a ``ResidualGate`` scales it.
        day_of_week: takes the day of the week as a third input channel; published: yes.
        feed_forward: width of the feed-forward parts.
        steps_per_day: entries of the embedding of the time of day.

    Raises:
        InputError: a size below 1, heads that do not divide ``dim``, or a ``dim`` too small for its parts.
    """

    NAMES = (
        "nodes", "input_length", "horizon", "dim", "depth", "heads", "dropout", "diagonal", "residual", "day_of_week",
        "feed_forward", "steps_per_day",
    )  # fmt: skip
    """The entries of ``config``."""

    def __init__(
        self,
        nodes: int,
        input_length: int = 12,
        horizon: int = 12,
        dim: int = 152,
        depth: int = 3,
        heads: int = 4,
        dropout: float | int = 0.1,
        diagonal: Diagonal | None = None,
        residual: bool | ResidualGate = True,
        day_of_week: bool = True,
        feed_forward: int = 256,
        steps_per_day: int = 288,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            **sizes(
                nodes=nodes,
                input_length=input_length,
                horizon=horizon,
                dim=dim,
                depth=depth,
                feed_forward=feed_forward,
                steps_per_day=steps_per_day,
            ),
            **described(heads, dropout, diagonal, residual, day_of_week),
        }
        self.nodes, self.input_length, self.horizon = nodes, input_length, horizon
        width = int(SHARE * dim + 1e-9)
        if width < 1:
            raise InputError(f"dim must be at least 7, so that every embedding has a feature, not {dim}.")
        self.projection = nn.Linear(channels(day_of_week), width)
        self.time_of_day = nn.Embedding(steps_per_day, width)
        self.day_of_week = nn.Embedding(DAYS, width) if day_of_week else None
        rest = dim - (3 if day_of_week else 2) * width
        self.adaptive = nn.Parameter(nn.init.xavier_uniform_(torch.empty(input_length, nodes, rest)))
        self.temporal = nn.ModuleList(self._layer(self._temporal()) for _ in range(depth))
        self.spatial = nn.ModuleList(self._layer(NodeAttention(dim, heads, dropout)) for _ in range(depth))
        self.readout = nn.Linear(input_length * dim, horizon)

    @property
    def beyond(self) -> str:
        """What stands in for training at inputs that are longer than it."""
        return (
            f"the model's table of embeddings has {self.input_length} steps: at longer inputs, all steps further back "
            "share its first"
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> STAEformer:
        """A fresh model from ``.config``.

        Raises:
            InputError: names that this model does not have, or values that it refuses.
        """
        return cls(**arguments(config, cls.NAMES, cls.__name__))

    def forward(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch horizon node"]:
        """The forecast in z-scored units; arguments as for a ``Forecaster``.

        Raises:
            InputError: another length, number of nodes or number of channels than the model was built for.
        """
        if inputs.shape[1] != self.input_length:
            raise InputError(
                f"the forecast takes {self.input_length} time steps, not {inputs.shape[1]}; encode() takes any number."
            )
        return self.readout(self.encode(inputs).flatten(2)).transpose(1, 2)

    def encode(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch node time dim"]:
        """The states after the last layer, for any number of time steps; see the class for what lies beyond training.

        Raises:
            InputError: another number of nodes or channels than the model was built for, or no time step.
        """
        check_inputs(inputs, self.nodes, self.config["day_of_week"])
        states = self._embedded(inputs)
        for layer in (*self.temporal, *self.spatial):
            states = layer(states)
        return states

    def _embedded(self, inputs: Float[Tensor, "batch time node channel"]) -> Float[Tensor, "batch node time dim"]:
        steps = self.config["steps_per_day"]
        parts = [self.projection(inputs), self.time_of_day((inputs[..., 1] * steps).round().long() % steps)]
        if self.day_of_week is not None:
            parts.append(self.day_of_week(day_number(inputs[..., 2])))
        rows = torch.arange(inputs.shape[1], device=inputs.device) + self.input_length - inputs.shape[1]
        table = self.adaptive[rows.clamp_min(0)].expand(len(inputs), -1, -1, -1)
        return torch.cat([*parts, table], dim=-1).transpose(1, 2)

    def _temporal(self) -> TemporalAttention:
        config = self.config
        return TemporalAttention(
            config["dim"],
            config["heads"],
            diagonal_from_config(config["diagonal"]),
            residual=residual_from_config(config["residual"]),
            output_dropout=config["dropout"],
        )

    def _layer(self, attention: TemporalAttention | NodeAttention) -> Layer:
        return Layer(attention, self.config["dim"], self.config["feed_forward"], self.config["dropout"])

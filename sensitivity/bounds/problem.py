"""One layer and its tokens, prepared once for every bound that looks at them."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds import assumptions
from sensitivity.bounds.assumptions import Assumption
from sensitivity.bounds.cloud import Ball, BallConstants, Cloud
from sensitivity.bounds.layer import LayerConstants
from sensitivity.bounds.local import local, row_tiles
from sensitivity.bounds.verdict import FLOOR
from sensitivity.jacobian.closed_form import tiles
from sensitivity.jacobian.norms import Norm


class Problem:
    """A layer in float64 with its tokens, measured norms, and everything bounds are computed from, each at first use.

    Args:
        attention: the layer.
        tokens: ``(sample, time, dim)``.
        norm: ``frobenius``, ``rms`` (as Frobenius; ``unit`` has the factor) or ``spectral``.
        rows: how many query rows of each sample to look at, spread evenly from the first to the last; None for all.
        measured: norms measured elsewhere, ``(sample, query, key)``; None to compute them from the closed form.
    """

    def __init__(
        self,
        attention: SoftmaxAttention,
        tokens: Float[Tensor, "sample time dim"],
        norm: Norm,
        rows: int | None = None,
        measured: Float[Tensor, "sample query key"] | None = None,
    ) -> None:
        self.attention, self.tokens = attention.to(dtype=torch.float64), tokens.double()
        self.samples, self.length, self.dim = tokens.shape
        self.spectral = norm == "spectral"
        self.unit = math.sqrt(self.dim) if norm == "rms" else 1.0
        count = self.length if rows is None else min(rows, self.length)
        spread = torch.linspace(0, self.length - 1, count, dtype=torch.float64, device=tokens.device)
        self.rows: Int[Tensor, " row"] = spread.round().long()
        self.constants = LayerConstants.of(self.attention, self.spectral)
        self._measured = None if measured is None else measured[:, self.rows].double() * self.unit

    @cached_property
    def seen(self) -> Bool[Tensor, "sample time"]:
        """Positions that are not padding."""
        padding = self.attention.padding
        if padding is None:
            return torch.ones(self.samples, self.length, dtype=torch.bool, device=self.tokens.device)
        return ~padding.expand(self.samples, self.length)

    @cached_property
    def diagonal(self) -> Bool[Tensor, "1 row key"]:
        """Pairs of a token with itself."""
        return (self.rows[:, None] == torch.arange(self.length, device=self.rows.device))[None]

    @cached_property
    def pairs(self) -> Bool[Tensor, "sample row key"]:
        """Pairs that the layer connects: visible to some head, or on the diagonal; neither end padded."""
        visible = (~self.attention.hidden(self.length, self.rows)).any(dim=1) | self.diagonal
        return visible & self.seen[:, self.rows, None] & self.seen[:, None, :]

    @cached_property
    def off(self) -> Bool[Tensor, "sample row key"]:
        """Connected pairs off the diagonal."""
        return self.pairs & ~self.diagonal

    @cached_property
    def measured(self) -> Float[Tensor, "sample row key"]:
        """Norms of the blocks; zero where a position is padded."""
        if self._measured is None:
            found = self.tokens.new_zeros(self.samples, len(self.rows), self.length)
            norm: Norm = "spectral" if self.spectral else "frobenius"
            start = 0
            for tile in tiles(self.attention, self.tokens, norm=norm, rows=self.rows):
                count = len(tile.rows)
                found[tile.samples, start : start + count] = tile.maps.total
                start = (start + count) % len(self.rows)
            self._measured = found
        return torch.where(self.seen[:, self.rows, None] & self.seen[:, None, :], self._measured, 0.0)

    @cached_property
    def local(self) -> tuple[Tensor, Tensor, Tensor]:
        """Local bound and triangle bound of every block, and each row's weight on itself per head."""
        sharp, plain = torch.zeros_like(self.measured), torch.zeros_like(self.measured)
        own = self.tokens.new_zeros(self.samples, len(self.rows), self.attention.heads)
        for some, place, rows in row_tiles(self.attention, self.tokens, self.rows):
            off, triangle = local(self.attention.sample(some), self.constants, rows, keep_triangle=True)
            sharp[some, place] = off
            if triangle is not None:
                plain[some, place] = triangle
            itself = rows.weights[:, :, torch.arange(len(rows.index), device=rows.index.device), rows.index]
            own[some, place] = itself.movedim(1, -1)
        return sharp, plain, own

    @cached_property
    def rounding(self) -> Float[Tensor, "1 row key"]:
        """Absolute rounding error of the blocks: of note on the diagonal alone, where covariances may cancel."""
        attention, kept = self.attention, self.tokens * self.seen[..., None]
        _, key, value = (torch.linalg.vector_norm(part, dim=-1).amax(dim=(0, 2)) for part in attention.project(kept))
        outer = self.constants.outputs[0] * self.constants.query_size * abs(attention.scale or 0.0)
        size = float(outer * (key * value).sum()) + float(self.constants.sizes.sum()) + self.constants.identity
        error = self.tokens.new_full((1, len(self.rows), self.length), FLOOR)
        return error.masked_fill(self.diagonal, 8 * torch.finfo(torch.float64).eps * self.length**0.5 * size)

    @cached_property
    def gradients(self) -> Float[Tensor, "sample row head dim"]:
        """Score gradients of the rows."""
        return self.constants.gradients(self.tokens[:, self.rows])

    @cached_property
    def prior(self) -> Float[Tensor, "#sample head row key"]:
        """Softmax of the biases and masks alone: the weights at zero tokens."""
        per_sample = self.attention.padding is not None or (
            self.attention.bias is not None and self.attention.bias.shape[0] > 1
        )
        zeros = torch.zeros_like(self.tokens if per_sample else self.tokens[:1])
        return self.attention.weights(zeros)[:, :, self.rows]

    @cached_property
    def ball(self) -> Ball:
        """The ball that holds all tokens of all samples."""
        return Ball.around(self.tokens[self.seen])

    @cached_property
    def on_ball(self) -> BallConstants:
        """The layer's constants on that ball."""
        return BallConstants.of(self.constants, self.ball)

    @cached_property
    def cloud(self) -> Cloud:
        """The reach of each sequence's tokens."""
        return Cloud.of(self.constants, self.tokens, self.seen)

    @cached_property
    def assumptions(self) -> dict[str, Assumption]:
        """Every assumption, tested, by a short name."""
        return {
            "multiplier": assumptions.no_multiplier(self.attention),
            "ball": assumptions.in_ball(self.ball),
            "bias": assumptions.same_bias(self.prior, self.off),
            "exchangeable": assumptions.exchangeable(self.tokens, self.seen),
            "normalised": assumptions.normalised(self.tokens[self.seen]),
        }

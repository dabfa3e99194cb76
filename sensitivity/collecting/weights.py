"""Attention weights that are computed when they are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian import tile_sizes
from sensitivity.jacobian.state import exact_arithmetic

FEW = 2**21  # weights that are sooner copied than put off: 8 MB


class DeferredWeights:
    """The attention weights of a measurement, which are most of what it would hold and which few readers look at.

    All that they depend on is copied, so that they stay those of the layer that was measured whatever becomes of it.

    Args:
        attention: the layer; its ``bias``, which may be as large as the weights, must be None.
        tokens: what it was measured at.
        times: the query times that were measured; None for all.
    """

    def __init__(
        self,
        attention: SoftmaxAttention,
        tokens: Float[Tensor, "sample time dim"],
        times: Int[Tensor, " row"] | None,
    ) -> None:
        names = ("query_weight", "key_weight", "query_bias", "key_bias", "padding", "diagonal_bias")
        found = {name: getattr(attention, name) for name in names}
        copies: dict[str, Any] = {
            name: value.detach().clone() for name, value in found.items() if isinstance(value, Tensor)
        }
        self.attention = dataclasses.replace(attention, multiplier=None, **copies)
        self.tokens = tokens.detach().clone()
        self.times = torch.arange(tokens.shape[1]) if times is None else times

    @staticmethod
    def fits(attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"], rows: int) -> bool:
        """Whether the weights of so many rows of this layer are worth it, and can be had again from copies."""
        return attention.bias is None and tokens.shape[0] * tokens.shape[1] * rows * attention.heads > FEW

    def __call__(self) -> Float[Tensor, "sample head row key"]:
        """The weights."""
        samples, length, _ = self.tokens.shape
        times = self.times.to(self.tokens.device)
        step = max(1, tile_sizes.tile_size(self.attention, length) // (samples * length * self.attention.heads))
        with torch.inference_mode(False), exact_arithmetic():
            query, key, _ = self.attention.project(self.tokens)
            weights = query.new_empty(samples, self.attention.heads, len(times), length)
            for low in range(0, len(times), step):
                rows = times[low : low + step]
                weights[:, :, low : low + step] = self.attention.row_weights(query[:, :, rows], key, rows)
        return weights

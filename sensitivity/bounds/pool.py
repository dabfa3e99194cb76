"""The empirical law: rows of any length, resampled from a pool of real tokens."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.bounds.layer import LayerConstants


class Pool:
    """Tokens of one or more sequences, each a pool of its own: a row takes all its tokens from one of them.

    Args:
        layer: the layer's constants.
        tokens: ``(pool, token, dim)``.
        generator: draws the rows.
    """

    def __init__(
        self, layer: LayerConstants, tokens: Float[Tensor, "pool token dim"], generator: torch.Generator
    ) -> None:
        self.layer, self.tokens, self.generator = layer, tokens, generator
        self.values = torch.einsum("hod,ptd->ptho", layer.value_maps, tokens)
        self.gram = torch.einsum("hod,god->hg", layer.value_maps, layer.value_maps)

    def draw(self, rows: int, others: int) -> tuple[Int[Tensor, " row"], Int[Tensor, "row place"]]:
        """Which pool, and which of its tokens: the query first; without replacement where the pool is large enough."""
        pools, size = self.tokens.shape[:2]
        pool = torch.arange(rows) % pools
        if others + 1 <= size:
            order = torch.rand(rows, size, generator=self.generator).argsort(dim=1)[:, : others + 1]
        else:
            order = torch.randint(size, (rows, others + 1), generator=self.generator)
        return pool.to(self.tokens.device), order.to(self.tokens.device)

    def norms(
        self, pool: Int[Tensor, " row"], places: Int[Tensor, "row place"], diagonal_bias: Any, residual: float | int
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
        """Sum of the squared Frobenius norms off the diagonal, and the norm on it, of the rows."""
        tokens = self.tokens[pool[:, None], places]
        gradient = self.layer.gradients(tokens[:, 0])
        logits = torch.einsum("rhd,rtd->rth", gradient, tokens)
        logits[:, 0] += diagonal_bias
        weights = torch.softmax(logits, dim=1)
        values = self.values[pool[:, None], places]
        change = values - torch.einsum("rth,rtho->rho", weights, values)[:, None]
        return self._off(weights, change, gradient), self._on(weights, change, tokens, gradient, residual)

    def _off(self, weights: Tensor, change: Tensor, gradient: Tensor) -> Float[Tensor, " row"]:
        others, change = weights[:, 1:], change[:, 1:] * weights[:, 1:, :, None]
        gains = torch.einsum("god,rhd->rhgo", self.layer.value_maps, gradient)
        angle = gradient @ gradient.mT
        total = torch.einsum("rth,rtg,hg->r", others, others, self.gram)
        total = total + 2 * torch.einsum("rtho,rtg,rhgo->r", change, others, gains)
        return total + torch.einsum("rtho,rtgo,rhg->r", change, change, angle)

    def _on(
        self, weights: Tensor, change: Tensor, tokens: Tensor, gradient: Tensor, residual: float | int
    ) -> Float[Tensor, " row"]:
        centred = tokens[:, :1] - tokens
        covariance = -torch.einsum("rth,rtho,rtd->rhod", weights, change, centred)
        block = torch.einsum("rhod,hdk->rok", covariance, self.layer.score_maps)
        block = block + torch.einsum("rh,hod->rod", weights[:, 0], self.layer.value_maps)
        block = block + torch.einsum("rh,rho,rhd->rod", weights[:, 0], change[:, 0], gradient)
        if residual:
            block = block + residual * torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
        return torch.linalg.matrix_norm(block)

r"""Where query tokens are drawn from: a mixture that also visits the rare tokens with large score gradients.

The second moment of a weight grows like :math:`e^{w^T S w}`, so a few query tokens carry much of it. Besides the
tokens' own Gaussian, the mixture holds one Gaussian per head, widened along the directions that lengthen this head's
score gradients. Weights are density ratios against the whole mixture, which no draw can exceed the number of
components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.bounds.gaussian import Tokens
from sensitivity.bounds.layer import LayerConstants

NARROWEST = 0.4
"""Least precision of a widened direction, beside 1 for the Gaussian itself."""


@dataclass(frozen=True)
class Proposal:
    """The mixture, in whitened coordinates: square roots and precisions of its components, the plain Gaussian first."""

    tokens: Tokens
    roots: Float[Tensor, "component dim dim"]
    precisions: Float[Tensor, "component dim dim"]
    logs: Float[Tensor, " component"]

    @classmethod
    def of(cls, layer: LayerConstants, tokens: Tokens) -> Proposal:
        """The mixture for a layer's heads."""
        maps = layer.score_maps @ tokens.root
        growth = maps.mT @ tokens.covariance @ maps
        growth = torch.cat([torch.zeros_like(growth[:1]), growth])
        values, vectors = torch.linalg.eigh(growth)
        precise = (1 - 2 * values).clamp_min(NARROWEST)
        return cls(
            tokens=tokens,
            roots=vectors / precise.sqrt()[:, None],
            precisions=(vectors * precise[:, None]) @ vectors.mT,
            logs=0.5 * precise.log().sum(dim=-1),
        )

    def draw(self, count: int, seed: int) -> tuple[Float[Tensor, "draw dim"], Float[Tensor, " draw"]]:
        """About ``count`` query tokens, at least one per component (the plain Gaussian's come first), and weights."""
        components, dim = self.roots.shape[:2]
        each = max(1, count // components)
        normal = _normal(each * components, dim, seed).to(self.roots).unflatten(0, (components, each))
        white = (normal @ self.roots.mT).flatten(0, 1)
        exponents = self.logs - 0.5 * torch.einsum("nd,cde,ne->nc", white, self.precisions, white)
        log_mixture = exponents.logsumexp(dim=-1) - math.log(components)
        weights = torch.exp(-0.5 * white.square().sum(dim=-1) - log_mixture)
        return self.tokens.draw(white), weights

    def plain(self, draws: int) -> int:
        """How many of the draws come from the plain Gaussian."""
        return draws // len(self.roots)


def _normal(count: int, dim: int, seed: int) -> Float[Tensor, "draw dim"]:
    """Standard normal numbers from scrambled Sobol points: more even than independent ones."""
    points = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return math.sqrt(2) * torch.erfinv((2 * points - 1).clamp(-1 + 1e-15, 1 - 1e-15))

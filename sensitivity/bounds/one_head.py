r"""The law of one head at any length, exact given the query token: one-dimensional integrals in place of the softmax.

Given :math:`x_i`, the scores :math:`z_l` of the n other tokens are i.i.d. :math:`N(0, \tau^2)` (up to a shift of the
row), and :math:`1 / Z^k = \frac{1}{\Gamma(k)} \int_0^\infty t^{k-1} e^{-tZ} dt` makes moments of the weights products
of

.. math:: \phi_{k,p}(t) = E[z^p (t e^z)^k \exp(-t e^z)] .

Both integrals are trapezoidal sums, in :math:`\log t` and in the score: the integrands are analytic in a strip around
the real axis and fall off at both ends, where that rule converges exponentially. The parts of tokens that are
orthogonal to the score gradient are independent of all weights, so they enter by their covariance alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.bounds.gaussian import Tokens
from sensitivity.bounds.layer import LayerConstants

SCORE_RANGE, SCORE_STEP, LOG_STEP = 9.0, 0.15, 0.4
CHUNK = 128


@dataclass(frozen=True)
class Query:
    r"""What a query token contributes, one entry per draw.

    Attributes:
        spread: :math:`\tau`, the standard deviation of its scores.
        own: its own score, relative to the mean score of the others.
        norm: :math:`|w|^2`.
        along: :math:`M S w / \tau^2`, the mean change of a value per unit of score.
        rest: M times the part of the token that the scores do not explain.
        gain: :math:`M w`.
        trace: :math:`tr(M S' M^T)`, with S' the covariance that the scores leave.
    """

    spread: Float[Tensor, " draw"]
    own: Float[Tensor, " draw"]
    norm: Float[Tensor, " draw"]
    along: Float[Tensor, "draw out"]
    rest: Float[Tensor, "draw out"]
    gain: Float[Tensor, "draw out"]
    trace: Float[Tensor, " draw"]

    @classmethod
    def of(cls, layer: LayerConstants, tokens: Tokens, draws: Float[Tensor, "draw dim"]) -> Query:
        """The queries of some drawn tokens."""
        value, gradient = layer.value_maps[0], layer.gradients(draws)[:, 0]
        image = gradient @ tokens.covariance
        variance = (image * gradient).sum(dim=-1)
        slope = image / torch.where(variance > 0, variance, 1.0)[:, None]
        own = ((draws - tokens.mean) * gradient).sum(dim=-1)
        along = slope @ value.mT
        rest = (draws - tokens.mean - slope * own[:, None]) @ value.mT
        trace = torch.trace(value @ tokens.covariance @ value.mT) - variance * along.square().sum(dim=-1)
        return cls(
            variance.clamp_min(0).sqrt(), own, gradient.square().sum(dim=-1), along, rest, gradient @ value.mT, trace
        )

    def part(self, index: Tensor) -> Query:
        """Some of the draws."""
        return Query(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


class OneHead:
    r""":math:`E[|J_{ij}|_F^2 | x_i]` of some query tokens, for rows of any length.

    Args:
        layer: a layer with one head.
        tokens: the tokens' distribution.
        draws: the query tokens.
        longest: the largest number of other tokens that will be asked for.
        diagonal_bias: gives what is added to the token's own score in a row with so many other tokens.
    """

    def __init__(
        self,
        layer: LayerConstants,
        tokens: Tokens,
        draws: Float[Tensor, "draw dim"],
        longest: int,
        diagonal_bias: Callable[[int], float],
    ) -> None:
        query = Query.of(layer, tokens, draws)
        order = query.spread.argsort()  # draws of like spread share a grid
        self.place = order.argsort()
        self.size = float(layer.value_maps.square().sum())
        parts = [query.part(some) for some in order.split(CHUNK)]
        self.parts = [(part, Moments(part, longest, diagonal_bias)) for part in parts]

    def second_moments(self, others: int) -> Float[Tensor, " draw"]:
        """The second moments for rows that see so many other tokens; zero without any."""
        if others < 1:
            return torch.zeros(len(self.place), dtype=torch.float64, device=self.place.device)
        found = [_norm(query, moments, self.size, others) for query, moments in self.parts]
        return torch.cat(found)[self.place]


def _norm(query: Query, moments: Moments, size: float, n: int) -> Float[Tensor, " draw"]:
    """The squared norm from the moments of the weights, with n other tokens."""
    weight, score, square, own, own_score, own_square, spread = moments.at(n)
    along, rest, gain = query.along, query.rest, query.gain
    first = 2 * (score * (along * gain).sum(dim=-1) - own * (rest * gain).sum(dim=-1))
    second = square * along.square().sum(dim=-1) - 2 * own_score * (along * rest).sum(dim=-1)
    second = second + own_square * rest.square().sum(dim=-1) + spread * query.trace
    return weight * size + first + query.norm * second


class Moments:
    r"""Moments of the weights of one row, per draw; ``zeta`` is :math:`z_j - \sum_l a_l z_l` (own token included)."""

    def __init__(self, query: Query, largest: int, diagonal_bias: Callable[[int], float]) -> None:
        tau = query.spread
        top = float(tau.max())
        step = min(SCORE_STEP, 0.5 / max(top, 1e-12))
        grid = torch.arange(-SCORE_RANGE, SCORE_RANGE + step / 2, step, dtype=tau.dtype, device=tau.device)
        density = torch.exp(-0.5 * grid**2)
        density = density / density.sum()
        score = tau[:, None] * grid
        self.place = query.own
        self.bias = diagonal_bias
        biases = [diagonal_bias(n) for n in (1, largest)]  # it grows with n, if it depends on it
        highest = max(float(query.own.max()) + max(biases), 6 * top, math.log(largest) + top**2 / 2)
        lowest = max(float(query.own.min()) + min(biases), -6 * top)
        log_t = torch.arange(-highest - 12, -lowest + 4, LOG_STEP, dtype=tau.dtype, device=tau.device)
        rate = torch.exp(score[:, None] + log_t[:, None])
        table = torch.exp(-rate) * density
        self.log_t = log_t
        self.phi = table.sum(dim=-1)
        power = table
        self.raised: dict[tuple[int, int], Tensor] = {}
        for k in range(1, 5):
            power = power * rate
            for p in range(3):
                self.raised[k, p] = torch.einsum("dtz,dz->dt", power, score**p)

    def at(self, n: int) -> tuple[Tensor, ...]:
        """E of a_j^2 times: 1, zeta, zeta^2, a_i, a_i zeta, a_i^2, and (1 - a_j)^2 + the others' squares."""
        phi, place = self.raised, self.place[:, None]
        own = torch.exp(self.log_t + place + self.bias(n))
        floor = self.phi.clamp_min(torch.finfo(self.phi.dtype).tiny)
        base = torch.exp(-own + (n - 1) * floor.log())
        one = (n - 1) * phi[1, 1] / floor  # sum over the others of a z, one factor of the integrand
        centre = one + own * place

        def total(integrand: Tensor, order: int) -> Tensor:
            return LOG_STEP / math.factorial(order - 1) * (base * integrand).sum(dim=-1)

        def with_mean(p: int) -> Tensor:
            return phi[3, p + 1] + phi[2, p] * centre

        weight = total(phi[2, 0], 2)
        mean_square = (
            phi[4, 2]
            + 2 * phi[3, 1] * centre
            + phi[2, 0] * ((n - 1) * phi[2, 2] / floor + own * place * (2 * one + own * place))
            + phi[2, 0] * (n - 1) * (n - 2) * (phi[1, 1] / floor) ** 2
        )
        score = total(phi[2, 1], 2) - total(with_mean(0), 3)
        square = total(phi[2, 2], 2) - 2 * total(with_mean(1), 3) + total(mean_square, 4)
        own_weight = total(own * phi[2, 0], 3)
        own_score = total(own * phi[2, 1], 3) - total(own * with_mean(0), 4)
        own_square = total(own**2 * phi[2, 0], 4)
        others = total(phi[4, 0] + (n - 1) * phi[2, 0] ** 2 / floor, 4)
        spread = weight - 2 * total(phi[3, 0], 3) + others
        return weight, score, square, own_weight, own_score, own_square, spread

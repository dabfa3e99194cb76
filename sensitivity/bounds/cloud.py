"""Where the tokens of a sequence lie: the ball around them, and the size of their images under the layer's maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.bounds.layer import LayerConstants

BALANCES = 33  # weights that a product of two radii is balanced with


@dataclass(frozen=True)
class Ball:
    """The smallest ball around the tokens' mean that holds them all: every token has ``|x - centre| <= radius``."""

    centre: Float[Tensor, " dim"]
    radius: float

    @classmethod
    def around(cls, tokens: Float[Tensor, "token dim"]) -> Ball:
        """The ball around the mean of some tokens."""
        centre = tokens.mean(dim=0)
        return cls(centre, float(torch.linalg.vector_norm(tokens - centre, dim=-1).max()))


@dataclass(frozen=True)
class BallConstants:
    r"""What a layer can do to any tokens in a ball, per head.

    Attributes:
        gradient: :math:`w = \max_{x \in ball} |w_h(x)| \le |N_h| R + |N_h c + n_h|`.
        spread: the scores of one row differ by at most :math:`2 R w` before any bias.
        radius: :math:`\rho = |M_h| R`, which the values cannot leave.
        query: bound of :math:`|\sum_h M_h \Sigma_h N_h|` for all covariances of tokens in the ball: the smaller of
            :math:`R^2 \sum_h \kappa_h` and ``query_total``; the constant :math:`\kappa_h = \max_{|x|=1} |M_h x| |N_h^T
            x|` is sharp for one head (two antipodal tokens attain it).
        inner_radius: :math:`|W_V| R`.
        inner_query: as ``query``, for the stacked heads before the output weights.
    """

    gradient: Float[Tensor, " head"]
    spread: Float[Tensor, " head"]
    radius: Float[Tensor, " head"]
    query: Float[Tensor, ""]
    inner_radius: Float[Tensor, " head"]
    inner_query: Float[Tensor, ""]

    @classmethod
    def of(cls, constants: LayerConstants, ball: Ball) -> BallConstants:
        """The constants of a layer on a ball."""
        at_centre = torch.linalg.vector_norm(constants.gradients(ball.centre), dim=-1)
        gradient = torch.linalg.matrix_norm(constants.score_maps, ord=2) * ball.radius + at_centre
        inner = torch.linalg.matrix_norm(constants.inner_value_maps, ord=2)
        square = ball.radius**2
        covariance = square * paired_size(constants.inner_value_maps, constants.key_maps.mT)
        outer_query = square * paired_size(constants.value_maps, constants.score_maps)
        inner_query = square * paired_size(constants.inner_value_maps, constants.score_maps)
        return cls(
            gradient=gradient,
            spread=2 * ball.radius * gradient,
            radius=constants.operator_sizes * ball.radius,
            query=query_total(constants, outer_query, covariance),
            inner_radius=inner * ball.radius,
            inner_query=inner_query_total(constants, inner_query, covariance),
        )


@dataclass(frozen=True)
class Cloud:
    r"""How far the tokens of one sequence reach under the layer's maps, per head, around their own centre.

    Attributes:
        radius: :math:`\rho_h \ge \max_l |M_h (x_l - c)|`.
        query: bound of :math:`|\sum_h M_h \Sigma_h N_h|` for all weighted covariances of these tokens.
        inner_radius: as ``radius``, with :math:`W_V` instead of :math:`M_h`.
        inner_query: as ``query``, for the stacked heads before the output weights.
    """

    radius: Float[Tensor, "sample head"]
    query: Float[Tensor, " sample"]
    inner_radius: Float[Tensor, "sample head"]
    inner_query: Float[Tensor, " sample"]

    @classmethod
    def of(
        cls, constants: LayerConstants, tokens: Float[Tensor, "sample time dim"], seen: Bool[Tensor, "sample time"]
    ) -> Cloud:
        """The reach of the tokens that are ``seen`` (not padding)."""
        count = seen.sum(dim=1, keepdim=True)[..., None]
        centred = tokens - (tokens * seen[..., None]).sum(dim=1, keepdim=True) / count
        centred = centred * seen[..., None]
        scores = _lengths(centred, constants.score_maps.mT)
        outer, inner = _lengths(centred, constants.value_maps), _lengths(centred, constants.inner_value_maps)
        covariance = _balanced(inner, _lengths(centred, constants.key_maps))
        return cls(
            radius=outer.amax(dim=1).sqrt(),
            query=query_total(constants, _balanced(outer, scores), covariance),
            inner_radius=inner.amax(dim=1).sqrt(),
            inner_query=inner_query_total(constants, _balanced(inner, scores), covariance),
        )


def query_total(
    constants: LayerConstants, per_head: Float[Tensor, "*axes head"], covariance: Float[Tensor, "*axes head"]
) -> Float[Tensor, "*axes"]:
    r"""Bound of the query paths of all heads, :math:`\sum_h W_O^h C_h W_Q^h` with :math:`C_h = c\,Cov(v, k)`.

    The smaller of the sum over heads and :math:`|W_O| |W_Q|` times the largest :math:`|C_h|` (root sum of squares for
    Frobenius norms), since the :math:`C_h` act on separate coordinates between the stacked weights.
    """
    together = covariance.amax(dim=-1) if constants.spectral else covariance.square().sum(dim=-1).sqrt()
    together = constants.outputs[0] * constants.query_size * together
    return torch.minimum(per_head.sum(dim=-1), together)


def inner_query_total(
    constants: LayerConstants, per_head: Float[Tensor, "*axes head"], covariance: Float[Tensor, "*axes head"]
) -> Float[Tensor, "*axes"]:
    """Bound of the spectral norm of the stacked :math:`C_h W_Q^h`, likewise."""
    together = constants.query_size * covariance.amax(dim=-1)
    return torch.minimum(per_head.square().sum(dim=-1).sqrt(), together)


def paired_size(left: Float[Tensor, "head out dim"], right: Float[Tensor, "head dim other"]) -> Float[Tensor, " head"]:
    r""":math:`\max_{|x| = 1} |L x| |R^T x| = \min_t \tfrac12 \lambda_{max}(t L^T L + R R^T / t)`, from above.

    Equality holds because the joint range of two quadratic forms on a sphere is convex in three or more dimensions; the
    inequality from left to right, which a bound needs, holds for every single t.
    """
    first, second = left.mT @ left, right @ right.mT
    best = torch.linalg.matrix_norm(left, ord=2) * torch.linalg.matrix_norm(right, ord=2)
    balance = torch.where(best > 0, torch.linalg.matrix_norm(right, ord=2) ** 2 / best, 1.0)
    for step in torch.logspace(-1.5, 1.5, BALANCES, dtype=first.dtype):
        t = torch.where(balance > 0, step * balance, 1.0)[:, None, None]
        best = torch.minimum(best, 0.5 * torch.linalg.eigvalsh(t * first + second / t)[..., -1])
    return best


def _lengths(tokens: Tensor, maps: Float[Tensor, "head out dim"]) -> Float[Tensor, "sample time head"]:
    return torch.einsum("hod,std->stho", maps, tokens).square().sum(dim=-1)


def _balanced(first: Tensor, second: Tensor) -> Float[Tensor, "sample head"]:
    r""":math:`\min_t \max_l \tfrac12 (t |L x_l|^2 + |R^T x_l|^2 / t)`, at most the product of the two radii."""
    high, other = first.amax(dim=1), second.amax(dim=1)
    best = (high * other).sqrt()
    middle = torch.where(high > 0, (other / torch.where(high > 0, high, 1.0)).sqrt(), 1.0)
    for step in torch.logspace(-1.0, 1.0, BALANCES, dtype=first.dtype):
        t = torch.where(middle > 0, step * middle, 1.0)[:, None]
        best = torch.minimum(best, 0.5 * (t * first + second / t).amax(dim=1))
    return best

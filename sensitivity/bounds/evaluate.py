"""Each bound on one layer: what is measured, what the bound says, and where it says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sensitivity.bounds import lipschitz as whole_map
from sensitivity.bounds import rowwise
from sensitivity.bounds.problem import Problem
from sensitivity.bounds.verdict import Comparison, NotApplicableError

Evaluate = Callable[[Problem], Comparison]


def local(problem: Problem) -> Comparison:
    """Every connected pair; no assumption."""
    return _per_pair(problem, problem.local[0])


def triangle(problem: Problem) -> Comparison:
    """The local bound by plain triangle inequalities, for comparison."""
    return _per_pair(problem, problem.local[1])


def expected(problem: Problem) -> Comparison:
    """Mean over the other visible keys of each row, from the row's own query and the reach of the values."""
    return _per_row(problem, rowwise.row_total(problem.constants, problem.gradients, problem.cloud))


def expected_ball(problem: Problem) -> Comparison:
    """The same mean from the ball's radius and the layer's weights alone."""
    constant = rowwise.row_total_on_ball(problem.constants, problem.on_ball)
    return _per_row(problem, torch.full_like(problem.gradients[..., 0, 0], constant))


def worst_case(problem: Problem) -> Comparison:
    """Every pair off the diagonal, for any tokens in the ball."""
    _needs_whole_rows(problem)
    _needs_other_keys(problem)
    ball = problem.on_ball
    prior = problem.prior.movedim(1, -1)
    weight, product = rowwise.largest_weights(prior, ball.spread)
    bound = rowwise.one_block(problem.constants, weight, product, ball.gradient, ball.radius)
    return Comparison(problem.measured, bound, problem.off, int(problem.off.sum()))


def diagonal(problem: Problem) -> Comparison:
    """The block of each token with itself, from the token's own weight and the reach of the sequence."""
    _needs_whole_rows(problem)
    cloud, own = problem.cloud, problem.local[2]
    gradient = torch.linalg.vector_norm(problem.gradients, dim=-1)
    part = rowwise.one_block(problem.constants, own, own * (1 - own), gradient, cloud.radius[:, None])
    query = cloud.query[:, None]
    return _per_token(problem, rowwise.diagonal_upper(problem.constants, problem.attention.residual, part, query))


def diagonal_ball(problem: Problem) -> Comparison:
    """The same from the ball's radius and the layer's weights alone: bounded in T."""
    _needs_whole_rows(problem)
    ball = problem.on_ball
    prior = _own(problem, problem.prior)
    weight, product = rowwise.largest_weights(prior, ball.spread)
    part = rowwise.one_block(problem.constants, weight, product, ball.gradient, ball.radius)
    return _per_token(problem, rowwise.diagonal_upper(problem.constants, problem.attention.residual, part, ball.query))


def diagonal_lower(problem: Problem) -> Comparison:
    """From below: the output directions that attention reaches least keep the residual."""
    _needs_whole_rows(problem)
    if not problem.attention.residual:
        raise NotApplicableError("there is no residual connection to keep the diagonal from vanishing")
    cloud, own = problem.cloud, problem.local[2]
    gradient = torch.linalg.vector_norm(problem.gradients, dim=-1)
    residual, inner = problem.attention.residual, (cloud.inner_radius[:, None], cloud.inner_query[:, None])
    bound = rowwise.diagonal_lower(problem.constants, residual, own, gradient, *inner)
    if not (bound > 0).any():
        raise NotApplicableError("attention is strong in every output direction, so that it could cancel the residual")
    found = _per_token(problem, bound)
    return dataclasses.replace(found, lower=True)


def lipschitz(problem: Problem) -> Comparison:
    """The whole Jacobian of each sample as one matrix, in the spectral norm whatever the norm of the blocks."""
    _needs_whole_rows(problem)
    length = int(problem.seen.sum(dim=1).max())
    bound = whole_map.upper(problem.constants, problem.on_ball, problem.attention.residual, length)
    found = whole_map.measured(problem.attention, problem.tokens, problem.seen) * problem.unit
    everything = torch.ones_like(found, dtype=torch.bool)
    blocks = int((problem.seen.sum(dim=1) ** 2).sum())
    return Comparison(found, torch.full_like(found, bound * problem.unit), everything, blocks)


def _per_pair(problem: Problem, bound: torch.Tensor) -> Comparison:
    return Comparison(problem.measured, bound, problem.pairs, int(problem.pairs.sum()), rounding=problem.rounding)


def _per_row(problem: Problem, total: torch.Tensor) -> Comparison:
    _needs_whole_rows(problem)
    _needs_other_keys(problem)
    count = problem.off.sum(dim=-1)
    divisor = count.clamp_min(1)
    mean = (problem.measured * problem.off).sum(dim=-1) / divisor
    return Comparison(mean, total / divisor, count > 0, int(count.sum()))


def _per_token(problem: Problem, bound: torch.Tensor) -> Comparison:
    measured = problem.measured.gather(-1, problem.rows[None, :, None].expand(problem.samples, -1, 1))[..., 0]
    seen = problem.seen[:, problem.rows]
    return Comparison(measured, bound, seen, int(seen.sum()), rounding=problem.rounding.max())


def _own(problem: Problem, values: torch.Tensor) -> torch.Tensor:
    """Diagonal entries of a map per head, heads last."""
    index = problem.rows[None, None, :, None].expand(*values.shape[:2], -1, 1)
    return values.gather(-1, index)[..., 0].movedim(1, -1)


def _needs_whole_rows(problem: Problem) -> None:
    if problem.attention.multiplier is not None:
        raise NotApplicableError("a dropout multiplier after the softmax: the weights of a row no longer sum to one")


def _needs_other_keys(problem: Problem) -> None:
    if not problem.off.any():
        raise NotApplicableError("no pair off the diagonal is visible")


EVALUATE: dict[str, tuple[Evaluate, tuple[str, ...]]] = {
    "local": (local, ()),
    "triangle": (triangle, ()),
    "expected": (expected, ("multiplier", "bias", "exchangeable")),
    "expected_ball": (expected_ball, ("multiplier", "ball", "bias", "exchangeable", "normalised")),
    "worst_case": (worst_case, ("multiplier", "ball", "normalised")),
    "diagonal": (diagonal, ("multiplier",)),
    "diagonal_ball": (diagonal_ball, ("multiplier", "ball", "normalised")),
    "diagonal_lower": (diagonal_lower, ("multiplier",)),
    "lipschitz": (lipschitz, ("multiplier", "ball")),
}
"""The bounds on a single layer, each with the assumptions that its reading rests on."""

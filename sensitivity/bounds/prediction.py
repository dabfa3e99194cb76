"""law(): how sensitivity falls with the length, predicted from the layer and the distribution of its tokens alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity import checks, diagonal_bias
from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds import gaussian, one_head, sampled
from sensitivity.bounds.curve import Curve, Law, assemble, limit
from sensitivity.bounds.gaussian import Tokens
from sensitivity.bounds.layer import LayerConstants
from sensitivity.bounds.pool import Pool
from sensitivity.bounds.proposal import Proposal
from sensitivity.errors import InputError

REPLICATES = 8
SCORES = 2**21  # scores per head that one length may draw
EXACT = 4096  # query tokens whose rows are integrated exactly
ROWS = (1024, 8192)  # least and most query tokens per length
DIAGONAL, DIAGONAL_WORK = (64, 2048), 2e9  # query tokens whose diagonal block is averaged, and multiplications for them
POOL = 4096  # tokens of a pool that its mean field looks at
MAPS = 2**22  # numbers in one tile of per-draw matrices
NO_LIMITS = math.nan, math.nan  # under a penalty that follows the length


def law(
    attention: SoftmaxAttention,
    lengths: Sequence[int],
    mean: Float[Tensor, " dim"] | None = None,
    covariance: Float[Tensor, "dim dim"] | None = None,
    tokens: Float[Tensor, "*axes dim"] | None = None,
    finite: bool = True,
    *,
    draws: int | None = None,
    seed: int = 0,
) -> Law:
    """Predicts the sensitivity of a layer on exchangeable tokens at every length, without a Jacobian.

    One head on Gaussian tokens is integrated exactly given the query token; several heads average over sampled scores
    with everything else in expectation; a pool of real tokens is resampled into rows. In each case the curve at T needs
    nothing measured at T.

    Args:
        attention: the layer; causal and diagonal masks and penalties are taken into account.
        lengths: the values of T.
        mean: mean of the Gaussian tokens; zero by default.
        covariance: their covariance; the identity by default.
        tokens: a pool of real tokens instead, ``(token, dim)``, or ``(sample, time, dim)`` with each sample a pool of
            its own.
        finite: the law at each T; otherwise the limit of large T.
        draws: query tokens per length; by default as many as a second or two allow.
        seed: seed of the draws.

    Returns:
        The ``Law``.

    Raises:
        InputError: a layer with a bias matrix, padding or a multiplier, or a distribution that does not fit the layer.

    Examples:
        >>> found = law(SoftmaxAttention.random(16, 1), [16, 64, 256])
        >>> bool((found.off_diagonal[:-1] > found.off_diagonal[1:]).all())
        True
    """
    _check(attention, mean, covariance, tokens)
    if not finite and attention.diagonal_length is not None:
        raise InputError(
            "a penalty that follows the length keeps the weight of a token on itself from vanishing, so the limit of "
            "large T is not that of the law; use finite=True."
        )
    found = checks.lengths(lengths)
    layer = LayerConstants.of(attention, spectral=False)
    generator = torch.Generator().manual_seed(seed)
    if tokens is not None:
        pool = Pool(layer, _pool(tokens), generator)
        limits = NO_LIMITS if attention.diagonal_length else _pool_limits(pool, attention.residual)
        if not finite:
            return limit(attention.causal, found, limits, None)
        curve = _pool_curve(pool, attention, draws)
        return assemble(attention.causal, found, curve, limits, "rows resampled from the pool")
    dim, like = attention.dim, layer.value_maps
    given = Tokens.of(
        torch.zeros(dim).to(like) if mean is None else mean.to(like),
        torch.eye(dim).to(like) if covariance is None else covariance.to(like),
    )
    limits = gaussian.limit_off_diagonal(layer, given), gaussian.limit_diagonal(layer, given, attention.residual)
    if not finite:
        errors = gaussian.validity(layer, given, *Proposal.of(layer, given).draw(EXACT, seed), found)
        return limit(attention.causal, found, limits, errors)
    method = "exact integrals given the query" if attention.heads == 1 else "sampled scores, the rest in expectation"
    limits = NO_LIMITS if attention.diagonal_length else limits
    curve = _gaussian_curve(layer, attention, given, draws, seed, found[-1])
    return assemble(attention.causal, found, curve, limits, method)


def _gaussian_curve(
    layer: LayerConstants, attention: SoftmaxAttention, tokens: Tokens, draws: int | None, seed: int, longest: int
) -> Callable[[int], Curve]:
    """The curve over the number of other tokens that a row sees."""
    generator = torch.Generator().manual_seed(seed + 1)
    proposal = Proposal.of(layer, tokens)
    exact = _exact_curve(layer, attention, tokens, proposal, draws, seed, longest) if attention.heads == 1 else None

    heads, dim = attention.heads, attention.dim
    blocks = max(DIAGONAL[0], min(DIAGONAL[1], int(DIAGONAL_WORK / (heads**2 * dim**3))))

    def curve(others: int) -> Curve:
        rows = max(ROWS[0], min(ROWS[1], SCORES // max(1, others))) if draws is None else draws
        off, on = [], []
        for replicate in range(REPLICATES):
            queries, weights = proposal.draw(rows // REPLICATES, seed + replicate)
            plain = queries[: min(proposal.plain(len(queries)), blocks // REPLICATES)]
            on.append(_scored(layer, attention, tokens, plain, others, generator, on_diagonal=True).mean())
            if exact is None:
                squares = _scored(layer, attention, tokens, queries, others, generator, on_diagonal=False)
                off.append((weights * squares).mean() / max(1, others))
        return exact(others) if exact is not None else torch.stack(off), torch.stack(on)

    return curve


def _exact_curve(
    layer: LayerConstants,
    attention: SoftmaxAttention,
    tokens: Tokens,
    proposal: Proposal,
    draws: int | None,
    seed: int,
    longest: int,
) -> Callable[[int], Float[Tensor, " replicate"]]:
    """The mean square off the diagonal of one head, integrated for query tokens that all lengths share."""
    each = max(2, (EXACT if draws is None else draws) // REPLICATES)
    drawn = [proposal.draw(each, seed + replicate) for replicate in range(REPLICATES)]
    queries, weights = (torch.cat(part) for part in zip(*drawn, strict=True))

    def bias(others: int) -> float:
        return float(diagonal_bias.at_length(attention.diagonal_bias, attention.diagonal_length, others))

    integrals = one_head.OneHead(layer, tokens, queries, longest, bias)

    def curve(others: int) -> Float[Tensor, " replicate"]:
        return (weights * integrals.second_moments(others)).unflatten(0, (REPLICATES, -1)).mean(dim=1)

    return curve


def _scored(
    layer: LayerConstants,
    attention: SoftmaxAttention,
    tokens: Tokens,
    queries: Float[Tensor, "draw dim"],
    others: int,
    generator: torch.Generator,
    on_diagonal: bool,
) -> Float[Tensor, " draw"]:
    """With sampled scores, per query token: the norm on the diagonal, or the sum of squares off it."""
    heads, dim = attention.heads, attention.dim
    per_draw = max(heads**2 * dim**2 if on_diagonal else heads**2 * dim, (others + 1) * (heads + 1) ** 2)
    bias = diagonal_bias.at_length(attention.diagonal_bias, attention.diagonal_length, others)
    parts = []
    for part in queries.split(max(1, MAPS // per_draw)):
        found = sampled.Queries.of(layer, tokens, part)
        normal = torch.randn(len(part), others, heads, generator=generator, dtype=torch.float64)
        weights = sampled.Weights.of(found, normal.to(part) @ found.root.mT, bias)
        if on_diagonal:
            parts.append(sampled.diagonal(layer, tokens, found, weights, attention.residual).clamp_min(0).sqrt())
        else:
            parts.append(sampled.off_diagonal(layer, tokens, found, weights))
    return torch.cat(parts)


def _pool_curve(pool: Pool, attention: SoftmaxAttention, draws: int | None) -> Callable[[int], Curve]:
    def curve(others: int) -> Curve:
        rows = max(256, min(4096, SCORES // (16 * max(1, others)))) if draws is None else draws
        bias = diagonal_bias.at_length(attention.diagonal_bias, attention.diagonal_length, others)
        return _pool_rows(pool, max(1, rows // REPLICATES), others, bias, attention.residual)

    return curve


def _pool_rows(pool: Pool, rows: int, others: int, bias: Any, residual: float | int) -> Curve:
    chosen, places = pool.draw(rows * REPLICATES, others)
    height = max(1, MAPS // ((others + 1) * pool.values.shape[2] * pool.values.shape[3]))
    parts = [
        pool.norms(chosen[low : low + height], places[low : low + height], bias, residual)
        for low in range(0, len(chosen), height)
    ]
    off, on = (torch.cat(part).unflatten(0, (REPLICATES, -1)).mean(dim=1) for part in zip(*parts, strict=True))
    return off / max(1, others), on


def _pool_limits(pool: Pool, residual: float | int) -> tuple[float, float]:
    """The mean field of a pool: rows that see the whole of it, but not themselves."""
    others = min(pool.tokens.shape[1] - 1, POOL)
    if others < 1:
        return math.nan, math.nan
    off, on = _pool_rows(pool, 64, others, -math.inf, residual)
    return float(off.mean()) * others**2, float(on.mean())


def _pool(tokens: Float[Tensor, "*axes dim"]) -> Float[Tensor, "pool token dim"]:
    return tokens.double().reshape(-1, *tokens.shape[-2:])


def _check(attention: SoftmaxAttention, mean: Tensor | None, covariance: Tensor | None, tokens: Tensor | None) -> None:
    """Refuses what no law is known for."""
    for name in ("bias", "padding", "multiplier"):
        if getattr(attention, name) is not None:
            raise InputError(
                f"the law holds for exchangeable tokens, but the layer has a {name}; drop it from the description "
                "(causal masks and diagonal masks or penalties are fine)."
            )
    if tokens is not None:
        if mean is not None or covariance is not None:
            raise InputError("give either tokens or a mean and covariance, not both.")
        checks.tokens(tokens, attention.dim)
        return
    if mean is not None and mean.shape != (attention.dim,):
        raise InputError(f"the mean has shape {tuple(mean.shape)}, but the layer takes {attention.dim} features.")
    if covariance is None:
        return
    if covariance.shape != (attention.dim, attention.dim):
        raise InputError(
            f"the covariance has shape {tuple(covariance.shape)}; the layer needs ({attention.dim}, {attention.dim})."
        )
    lowest = float(torch.linalg.eigvalsh(checks.finite(covariance, "the covariance").double())[0])
    size = float(covariance.diagonal().max())
    if lowest < -1e-6 * size or not torch.allclose(covariance, covariance.mT, atol=1e-6 * size):
        raise InputError(
            f"the covariance must be symmetric and positive semi-definite, but its smallest eigenvalue is {lowest:.3g}."
        )

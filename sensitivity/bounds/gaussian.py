r"""Gaussian tokens: what a row's softmax does to them, and the asymptotic law in closed form.

Tokens i.i.d. :math:`N(m, S)`. The softmax of row i tilts the Gaussian: under its weights the tokens have mean
:math:`m + S w_h(i)` and covariance S. As T grows,

.. math:: T^2 E|J_{ij}|_F^2 \to E_x \sum_{hg} e^{w_h^T S w_g} \left[ \langle M_h, M_g \rangle + 2 (M_h S w_g)^T M_g w_h
          + (tr(M_h S M_g^T) + (M_h S w_g)^T (M_g S w_h)) w_h^T w_g \right]

with :math:`w_h = N_h x + n_h`. The exponent is quadratic in the Gaussian x, so the expectation is a Gaussian integral
again. It is finite only while :math:`I - L^T (N_h^T S N_g + N_g^T S N_h) L` is positive definite (:math:`S = L L^T`):
beyond that, rare rows with large score gradients dominate, and the root mean square decays more slowly than 1/T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.bounds.layer import LayerConstants


@dataclass(frozen=True)
class Tokens:
    """The distribution of the tokens: mean, covariance, and a square root of the covariance."""

    mean: Float[Tensor, " dim"]
    covariance: Float[Tensor, "dim dim"]
    root: Float[Tensor, "dim dim"]

    @classmethod
    def of(cls, mean: Float[Tensor, " dim"], covariance: Float[Tensor, "dim dim"]) -> Tokens:
        """With a root that singular covariances have too."""
        values, vectors = torch.linalg.eigh(covariance)
        return cls(mean, covariance, vectors * values.clamp_min(0).sqrt())

    def draw(self, normal: Float[Tensor, "draw dim"]) -> Float[Tensor, "draw dim"]:
        """Tokens from standard normal numbers."""
        return self.mean + normal @ self.root.mT


def limit_off_diagonal(layer: LayerConstants, tokens: Tokens) -> float:
    """The limit of :math:`T^2 E|J_{ij}|_F^2`; infinite where the expectation diverges."""
    heads = layer.value_maps.shape[0]
    total = 0.0
    for h in range(heads):
        for g in range(h + 1):
            total += (1 if h == g else 2) * _pair(layer, tokens, h, g)
    return total


def limit_diagonal(layer: LayerConstants, tokens: Tokens, residual: float | int) -> float:
    r"""Frobenius norm of the limit of a diagonal block, :math:`\gamma I + \sum_h M_h S N_h`."""
    limit = torch.einsum("hod,de,hek->ok", layer.value_maps, tokens.covariance, layer.score_maps)
    if residual:
        limit = limit + residual * torch.eye(limit.shape[0], dtype=limit.dtype, device=limit.device)
    return float(torch.linalg.matrix_norm(limit))


def _pair(layer: LayerConstants, tokens: Tokens, h: int, g: int) -> float:
    """One head pair's part of the limit, by completing the square."""
    cov = tokens.covariance
    maps = [layer.score_maps[index] @ tokens.root for index in (h, g)]
    offsets = [layer.score_maps[index] @ tokens.mean + layer.score_offsets[index] for index in (h, g)]
    quadratic = maps[0].mT @ cov @ maps[1]
    precision = torch.eye(len(cov), dtype=cov.dtype, device=cov.device) - quadratic - quadratic.mT
    values, vectors = torch.linalg.eigh(precision)
    if values[0] <= 0:
        return math.inf
    linear = maps[0].mT @ cov @ offsets[1] + maps[1].mT @ cov @ offsets[0]
    centre = vectors @ ((vectors.mT @ linear) / values)
    log = float(offsets[0] @ cov @ offsets[1] + 0.5 * linear @ centre - 0.5 * values.log().sum())
    spread = torch.cat(maps) @ (vectors / values.sqrt())
    mean = torch.cat([offset + part @ centre for offset, part in zip(offsets, maps, strict=True)])
    return math.exp(log) * _polynomial(layer.value_maps[h], layer.value_maps[g], cov, mean, spread @ spread.mT)


def _polynomial(first: Tensor, second: Tensor, cov: Tensor, mean: Tensor, spread: Tensor) -> float:
    """Expectation of the bracket over Gaussian (w_h, w_g) with this mean and covariance."""
    zero = torch.zeros_like(cov)

    def form(block: Tensor) -> Tensor:
        """The symmetric matrix A with u^T A u = w_g^T block w_h for u = (w_h, w_g)."""
        return 0.5 * torch.cat([torch.cat([zero, block.mT], dim=1), torch.cat([block, zero], dim=1)])

    def expected(matrix: Tensor) -> Tensor:
        return (matrix * spread).sum() + mean @ matrix @ mean

    gram = first.mT @ second
    inner = form(torch.eye(len(cov), dtype=cov.dtype, device=cov.device))
    values = form(cov @ gram @ cov)
    product = expected(values) * expected(inner) + 2 * torch.trace(values @ spread @ inner @ spread)
    product = product + 4 * mean @ values @ spread @ inner @ mean
    # <M_g S w_h, M_h w_g> and its mirror image: quadratic forms in one head's gradient and the other's
    cross = expected(form(cov @ gram)) + expected(form(gram @ cov))
    return float((first * second).sum() + cross + torch.trace(gram @ cov) * expected(inner) + product)


def validity(
    layer: LayerConstants,
    tokens: Tokens,
    draws: Float[Tensor, "draw dim"],
    weights: Float[Tensor, " draw"],
    lengths: list[int],
) -> list[float]:
    r"""Estimated relative error of the asymptotic form at each length, from weighted query tokens.

    A row whose scores have variance :math:`\tau^2` has the correction :math:`-2 e^{2 \tau^2} / T` in its second moment
    (its largest weight leaves the mean field at :math:`\tau^2 = \frac12 \log T`, as in a random energy model). Rows
    count by their share of the limit; the root mean square has half the error.
    """
    gradient = layer.gradients(draws)
    variance = torch.einsum("nhd,de,nhe->nh", gradient, tokens.covariance, gradient)
    share = weights[:, None] * variance.exp()
    share = share / share.sum()
    return [float((share * ((2 * variance).exp() / length).clamp_max(1)).sum()) for length in lengths]

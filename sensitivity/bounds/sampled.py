r"""The law of several heads at any length: sampled scores, everything else in expectation.

Given :math:`x_i`, a token enters the weights only through its H scores :math:`z_l = (w_h \cdot x_l)_h`. Write
:math:`x_l = m + \Gamma (z_l - E z) + e_l` with :math:`e_l` independent of the scores, covariance
:math:`S' = S - \Gamma C \Gamma^T`. Scores are drawn from their joint Gaussian, T - 1 numbers per head; the
D-dimensional rest is averaged exactly. No token is drawn and no block is formed; the error is that of the sampling, and
is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.bounds.gaussian import Tokens
from sensitivity.bounds.layer import LayerConstants


@dataclass(frozen=True)
class Queries:
    r"""Some query tokens, one entry per draw; ``part`` runs over the H scores and, last, the token's own rest.

    Attributes:
        gradient: :math:`w_h`.
        own: the token's scores relative to the mean score of the others.
        root: a square root of the scores' covariance C.
        basis: :math:`[\Gamma, e_i]`.
    """

    gradient: Float[Tensor, "draw head dim"]
    own: Float[Tensor, "draw head"]
    root: Float[Tensor, "draw head head"]
    basis: Float[Tensor, "draw dim part"]

    @classmethod
    def of(cls, layer: LayerConstants, tokens: Tokens, draws: Float[Tensor, "draw dim"]) -> Queries:
        """The queries of some drawn tokens."""
        gradient = layer.gradients(draws)
        image = gradient @ tokens.covariance
        covariance = image @ gradient.mT
        values, vectors = torch.linalg.eigh(covariance)
        kept = values > 1e-12 * values[:, -1:].clamp_min(1e-300)
        roots = torch.where(kept, values, 0.0).sqrt()
        inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
        slope = image.mT @ (vectors * inverse[:, None]) @ vectors.mT
        own = ((draws - tokens.mean)[:, None] * gradient).sum(dim=-1)
        rest = draws - tokens.mean - (slope @ own[..., None])[..., 0]
        return cls(gradient, own, vectors * roots[:, None], torch.cat([slope, rest[..., None]], dim=-1))


@dataclass(frozen=True)
class Weights:
    r"""Weights of one row per draw, and their moments over the other tokens.

    ``change_hl`` is :math:`y_l - \bar y_h`, where :math:`y_l` are the coordinates of token l in the query's basis.

    Attributes:
        own: :math:`a_{ii}` per head.
        pair: :math:`\sum_l a^h_l a^g_l`.
        cubes: :math:`\sum_l (a^h_l)^2 a^g_l`.
        change: :math:`\sum_l a^h_l a^g_l (y_l - \bar y_h)`.
        changes: :math:`\sum_l a^h_l a^g_l (y_l - \bar y_h)(y_l - \bar y_g)^T`.
        own_change: :math:`y_i - \bar y_h`.
        spread: covariance of the coordinates under the weights of a head, own token included.
    """

    own: Float[Tensor, "draw head"]
    pair: Float[Tensor, "draw head head"]
    cubes: Float[Tensor, "draw head head"]
    change: Float[Tensor, "draw head head part"]
    changes: Float[Tensor, "draw head head part part"]
    own_change: Float[Tensor, "draw head part"]
    spread: Float[Tensor, "draw head part part"]

    @classmethod
    def of(cls, queries: Queries, scores: Float[Tensor, "draw other head"], diagonal_bias: Any) -> Weights:
        """The weights that some scores give; the bias is a number, or one for each head."""
        draws, _, heads = scores.shape
        logits = torch.cat([scores, queries.own[:, None] + diagonal_bias], dim=1)
        weights = torch.softmax(logits, dim=1)
        others, own = weights[:, :-1], weights[:, -1]
        places = torch.cat([scores, scores.new_zeros(draws, scores.shape[1], 1)], dim=-1)
        here = torch.cat([queries.own, queries.own.new_ones(draws, 1)], dim=-1)
        mean = others.mT @ places + own[..., None] * here[:, None]
        second = torch.einsum("dlh,dlp,dlq->dhpq", others, places, places)
        second = second + own[..., None, None] * here[:, None, :, None] * here[:, None, None, :]
        pairs = (others[..., :, None] * others[..., None, :]).flatten(2).mT
        first = (pairs @ places).unflatten(1, (heads, heads))
        products = (pairs @ (places[..., :, None] * places[..., None, :]).flatten(2)).reshape(
            draws, heads, heads, heads + 1, heads + 1
        )
        pair = others.mT @ others
        left, right = mean[:, :, None], mean[:, None, :]
        changes = products - left[..., :, None] * first[..., None, :] - first[..., :, None] * right[..., None, :]
        return cls(
            own=own,
            pair=pair,
            cubes=(others**2).mT @ others,
            change=first - pair[..., None] * left,
            changes=changes + pair[..., None, None] * left[..., :, None] * right[..., None, :],
            own_change=here[:, None] - mean,
            spread=second - mean[..., :, None] * mean[..., None, :],
        )


def off_diagonal(layer: LayerConstants, tokens: Tokens, queries: Queries, weights: Weights) -> Float[Tensor, " draw"]:
    r""":math:`E \sum_{j \ne i} |J_{ij}|_F^2` given the query and the scores."""
    value = layer.value_maps
    images = torch.einsum("hod,ndp->nhpo", value, queries.basis)
    grams = torch.einsum("nhpo,ngqo->nhgpq", images, images)
    gains = torch.einsum("god,nhd->nhgo", value, queries.gradient)
    lean = torch.einsum("nhpo,nhgo->nhgp", images, gains)
    angle = queries.gradient @ queries.gradient.mT
    constant = torch.einsum("hod,god->hg", value, value)
    pair = weights.pair
    spread = pair + pair**2 - weights.cubes - weights.cubes.mT
    changes = (grams * weights.changes).sum(dim=(-2, -1))
    second = angle * (changes + spread * _rest_trace(layer, tokens, queries, grams))
    return (constant * pair + 2 * (lean * weights.change).sum(dim=-1) + second).sum(dim=(-2, -1))


def _rest_trace(layer: LayerConstants, tokens: Tokens, queries: Queries, grams: Tensor) -> Tensor:
    """tr(M_h S' M_g^T)."""
    heads = queries.root.shape[-1]
    whole = torch.einsum("hod,de,goe->hg", layer.value_maps, tokens.covariance, layer.value_maps)
    covariance = queries.root @ queries.root.mT
    return whole - torch.einsum("nhgpq,npq->nhg", grams[..., :heads, :heads], covariance)


def diagonal(
    layer: LayerConstants, tokens: Tokens, queries: Queries, weights: Weights, residual: float | int
) -> Float[Tensor, " draw"]:
    r""":math:`E |J_{ii}|_F^2` given the query and the scores: the mean block, and its fluctuation to leading order."""
    heads = queries.root.shape[-1]
    values = torch.einsum("hod,ndp->nhop", layer.value_maps, queries.basis)
    scores = torch.einsum("hke,nkp->nhep", layer.score_maps, queries.basis)
    free = 1 - weights.own - weights.pair.diagonal(dim1=1, dim2=2)
    inner = weights.spread.clone()
    covariance = queries.root @ queries.root.mT
    inner[..., :heads, :heads] -= free[..., None, None] * covariance[:, None]
    whole = torch.einsum("hod,de,hek->hok", layer.value_maps, tokens.covariance, layer.score_maps)
    mean = torch.einsum("nh,hok->nok", free, whole) + torch.einsum("nhop,nhpq,nhkq->nok", values, inner, scores)
    mean = mean + torch.einsum("nh,hok->nok", weights.own, layer.value_maps)
    key = torch.einsum("nhop,nhp->nho", values, weights.own_change)
    mean = mean + torch.einsum("nh,nho,nhd->nod", weights.own, key, queries.gradient)
    if residual:
        mean = mean + residual * torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    return mean.square().sum(dim=(-2, -1)) + _fluctuation(layer, tokens, queries, weights, values, scores)


def _fluctuation(
    layer: LayerConstants, tokens: Tokens, queries: Queries, weights: Weights, values: Tensor, scores: Tensor
) -> Float[Tensor, " draw"]:
    r"""Second moment of what the rests :math:`e_l` add to the weighted covariances of the tokens.

    With :math:`b = M \Gamma (y_l - \bar y)` and :math:`p = N^T \Gamma (y_l - \bar y)`, the covariance of a head holds
    :math:`\sum_l a_l (M e_l p_l^T + b_l e_l^T N)` and :math:`\sum_l a_l M e_l e_l^T N`.
    """
    heads = queries.root.shape[-1]
    slope = queries.basis[..., :heads] @ queries.root
    rest = tokens.covariance - slope @ slope.mT
    value_rest = torch.einsum("hod,nde->nhoe", layer.value_maps, rest)
    mixed = torch.einsum("nhoe,gek->nhgok", value_rest, layer.score_maps)
    value_trace = torch.einsum("nhoe,goe->nhg", value_rest, layer.value_maps)
    score_trace = torch.einsum("hek,nef,gfk->nhg", layer.score_maps, rest, layer.score_maps)
    value_gram = torch.einsum("nhop,ngoq->nhgpq", values, values)
    score_gram = torch.einsum("nhep,ngeq->nhgpq", scores, scores)
    # b_g . (M_h S' N_g) p_h, with the first axis of ``changes`` that of p_h
    cross = torch.einsum("nhep,nhgoe,ngoq->nhgpq", scores, mixed, values)
    linear = value_trace[..., None, None] * score_gram + score_trace[..., None, None] * value_gram + 2 * cross
    pair = weights.pair
    quadratic = pair - weights.cubes - weights.cubes.mT + pair**2
    swapped = torch.einsum("nhgok,nghok->nhg", mixed, mixed)
    square = quadratic * (value_trace * score_trace + swapped)
    return ((linear * weights.changes).sum(dim=(-2, -1)) + square).sum(dim=(-2, -1))

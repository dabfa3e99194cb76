r"""Bounds that know a row's query, but not its attention weights: ``expected``, ``diagonal``, and their ball forms.

Within one row the weights of a head sum to one, and the weighted spread of the values is at most their radius around
any centre. By the concavity of the square root, with :math:`\hat w = w / |w|` and one head,

.. math:: \sum_j N(J_{ij}) \le \sum_j a_{ij} \sqrt{N(M)^2 + |M \hat w + |w| (u_j - \bar u)|^2}
          \le \sqrt{N(M)^2 + |M \hat w|^2 + |w|^2 \rho^2} .

The cross term has gone because :math:`\sum_j a_{ij} (u_j - \bar u) = 0`. Heads add by the triangle inequality, which is
sharp here: heads that attend to disjoint keys attain it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.bounds.cloud import BallConstants, Cloud
from sensitivity.bounds.layer import LayerConstants


def row_total(
    constants: LayerConstants, gradient: Float[Tensor, "sample row head dim"], cloud: Cloud
) -> Float[Tensor, "sample row"]:
    r"""Bound of :math:`\sum_j N(J_{ij})` over the value and key paths of a row, from the row's own score gradients."""
    length = torch.linalg.vector_norm(gradient, dim=-1)
    size, spread = constants.sizes, length * cloud.radius[:, None]
    if not constants.spectral:
        return (size**2 + spread**2).sqrt().sum(dim=-1)
    unit = gradient / torch.where(length > 0, length, 1.0)[..., None]
    along = torch.linalg.vector_norm(torch.einsum("hod,srhd->srho", constants.value_maps, unit), dim=-1)
    return torch.minimum(size + spread, (size**2 + along**2 + spread**2).sqrt()).sum(dim=-1)


def row_total_on_ball(constants: LayerConstants, ball: BallConstants) -> float:
    """The same for every row of every sequence in a ball: a constant of the layer and the radius alone."""
    size, spread = constants.sizes, ball.gradient * ball.radius
    if not constants.spectral:
        return float((size**2 + spread**2).sqrt().sum())
    return float(torch.minimum(size + spread, (2 * size**2 + spread**2).sqrt()).sum())


def one_block(
    constants: LayerConstants,
    weight: Float[Tensor, "*axes head"],
    product: Float[Tensor, "*axes head"],
    gradient: Float[Tensor, "#*axes head"],
    radius: Float[Tensor, "#*axes head"],
) -> Float[Tensor, "*axes"]:
    r"""Bound of the value and key paths of one block, for :math:`a \le weight` and :math:`a (1 - a) \le product`.

    ``v_j - vbar_i = (1 - a_ij) (v_j - the mean of the others)``, which is at most :math:`(1 - a) 2 \rho` long.
    """
    key = product * 2 * radius * gradient
    if constants.spectral:
        return (weight * constants.sizes + key).sum(dim=-1)
    cross = 2 * weight * constants.operator_sizes * key
    return ((weight * constants.sizes) ** 2 + cross + key**2).sqrt().sum(dim=-1)


def largest_weights(
    prior: Float[Tensor, "*axes head"], spread: Float[Tensor, " head"]
) -> tuple[Float[Tensor, "*axes head"], Float[Tensor, "*axes head"]]:
    r"""Largest possible :math:`a_{ij}` and :math:`a_{ij} (1 - a_{ij})` when the scores differ by at most ``spread``.

    ``prior`` is the softmax of the biases alone (1/T without any); then :math:`a \le \pi / (\pi + e^{-spread} (1 -
    \pi))`.
    """
    weight = prior / (prior + torch.exp(-spread) * (1 - prior))
    weight = torch.where(prior > 0, weight, 0.0)
    half = weight.clamp_max(0.5)
    return weight, half * (1 - half)


def diagonal_upper(
    constants: LayerConstants, residual: float | int, own: Float[Tensor, "*axes"], query: Float[Tensor, "#*axes"]
) -> Float[Tensor, "*axes"]:
    """Residual (times its factor), query paths, and the value and key paths of the token's own weight (``own``)."""
    return constants.identity * abs(residual) + query + own


def diagonal_lower(
    constants: LayerConstants,
    residual: float | int,
    weight: Float[Tensor, "*axes head"],
    gradient: Float[Tensor, "#*axes head"],
    inner_radius: Float[Tensor, "#*axes head"],
    inner_query: Float[Tensor, "#*axes"],
) -> Float[Tensor, "*axes"]:
    r"""Lower bound of a diagonal block with the residual: zero where it says nothing.

    All paths but the residual end in the output weights, :math:`J_{ii} = \gamma I + W_O Y` with :math:`|Y| \le C`.
    Along the left singular vectors :math:`y_k` of :math:`W_O`, :math:`|y_k^T J_{ii}| \ge |\gamma| - \sigma_k C`: the
    weakest output direction keeps the residual.
    """
    inner = torch.linalg.matrix_norm(constants.inner_value_maps, ord=2)
    per_head = weight * inner + weight * (1 - weight) * 2 * inner_radius * gradient
    size = per_head.square().sum(dim=-1).sqrt() + inner_query
    kept = (abs(residual) - size[..., None] * constants.outputs).clamp_min(0)
    return kept.amax(dim=-1) if constants.spectral else kept.square().sum(dim=-1).sqrt()

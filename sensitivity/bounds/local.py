r"""The local bound: no assumption at all, several heads at once.

Row i of a layer sends every perturbation of a key through the same few score gradients :math:`w_h(i)`. With :math:`Q`
an orthonormal basis of their span (at most one direction per head) and :math:`z_h = Q^T w_h`,

.. math:: J_{ij} = B (I - QQ^T) + G Q^T, \quad B = \sum_h \beta_h M_h, \quad
          G = \sum_h \beta_h M_h Q + r_h z_h^T, \quad N(J_{ij})^2 \le N(B)^2 + N(G)^2,

where :math:`\beta_h = m_{ij} a_{ij}` and :math:`r_h = W_O (m_{ij} a_{ij} v_j - a_{ij} o_i)`. The two parts act on
orthogonal inputs, which is what the plain triangle inequality gives away. :math:`G` has as many columns as there are
heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds.layer import LayerConstants
from sensitivity.jacobian.query_rows import Rows, RowSource

TILE = 2**21  # numbers in one (row, key, out, head) tile


def row_tiles(
    attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"], rows: Int[Tensor, " row"]
) -> Iterator[tuple[slice, slice, Rows]]:
    """Rows of some samples at a time: (samples, places among ``rows``, the rows)."""
    samples, length, _ = tokens.shape
    per_row = length * attention.out_dim * attention.heads
    height = max(1, min(len(rows), TILE // per_row))
    batch = max(1, min(samples, TILE // (per_row * height)))
    for start in range(0, samples, batch):
        here = slice(start, min(start + batch, samples))
        source = RowSource(attention, tokens, here)
        for low in range(0, len(rows), height):
            place = slice(low, min(low + height, len(rows)))
            yield here, place, source.rows(rows[place])


def local(
    attention: SoftmaxAttention, constants: LayerConstants, rows: Rows, keep_triangle: bool = False
) -> tuple[Float[Tensor, "sample row key"], Float[Tensor, "sample row key"] | None]:
    """The bound of every block of some rows, and the plain triangle bound of the same blocks if it is wanted."""
    w_o = attention.output_weight
    gradient = (attention.scale * rows.query @ attention.key_weight).movedim(1, 2)
    alpha, weights = rows.alpha.movedim(1, -1), rows.weights.movedim(1, -1)
    # blocks of vanishing weight are scaled to size one, or their squares would underflow
    unit = torch.maximum(alpha.abs(), weights).amax(dim=-1, keepdim=True)
    scale = torch.where(unit > torch.finfo(unit.dtype).tiny, 1 / unit, 0.0)
    alpha, weights = alpha * scale, weights * scale
    deviation = alpha[..., None] * (rows.source.value @ w_o.mT).movedim(1, 2)[:, None]
    deviation -= weights[..., None] * (rows.mean @ w_o.mT).movedim(1, 2)[:, :, None]
    off = unit[..., 0] * _pythagoras(constants, gradient, alpha, deviation)
    plain = None
    if keep_triangle:
        lengths = torch.linalg.vector_norm(deviation, dim=-1) * torch.linalg.vector_norm(gradient, dim=-1)[:, :, None]
        plain = unit[..., 0] * (alpha.abs() * constants.sizes + lengths).sum(dim=-1)
    return _with_diagonal(attention, constants, rows, off, plain)


def _pythagoras(
    constants: LayerConstants,
    gradient: Float[Tensor, "sample row head dim"],
    alpha: Float[Tensor, "sample row key head"],
    deviation: Float[Tensor, "sample row key head out"],
) -> Float[Tensor, "sample row key"]:
    basis, coordinates = torch.linalg.qr(gradient.mT)
    along = torch.einsum("hod,srdp->srhop", constants.value_maps, basis)
    narrow = torch.einsum("srkh,srhop->srkop", alpha, along)
    narrow = narrow + torch.einsum("srkho,srph->srkop", deviation, coordinates)
    square = top_eigenvalue(narrow.mT @ narrow) if constants.spectral else narrow.square().sum(dim=(-2, -1))
    return (constants.mixture(alpha).square() + square).sqrt()


def top_eigenvalue(gram: Float[Tensor, "*axes p p"], doublings: int = 5) -> Float[Tensor, "*axes"]:
    r"""An upper bound of the largest eigenvalue of positive semi-definite matrices: :math:`(\mathrm{tr}\, K^m)^{1/m}`.

    With :math:`m = 2^{doublings}` it is at most :math:`p^{1/m}` too large (7 % for p = 8), and costs a few small
    products.
    """
    size = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    if gram.shape[-1] == 1:
        return size
    power = gram / torch.where(size > 0, size, 1.0)[..., None, None]
    log, scale = torch.zeros_like(size), 1.0
    for _ in range(doublings):
        power = power @ power
        scale /= 2
        trace = power.diagonal(dim1=-2, dim2=-1).sum(dim=-1).clamp_min(torch.finfo(gram.dtype).tiny)
        power = power / trace[..., None, None]
        log = log + scale * trace.log()
    return size * log.exp()


def _with_diagonal(
    attention: SoftmaxAttention, constants: LayerConstants, rows: Rows, off: Tensor, plain: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Adds the residual and query paths, which live on the diagonal alone."""
    inner = attention.scale * rows.covariance().movedim(-1, 2) @ attention.query_weight[:, None]
    query = attention.output_weight[:, None] @ inner
    order = 2 if constants.spectral else "fro"
    total = query.sum(dim=1)
    if attention.residual:
        total = total + attention.residual * torch.eye(attention.dim, dtype=total.dtype, device=total.device)
    place = torch.arange(len(rows.index), device=rows.index.device)
    off[:, place, rows.index] += torch.linalg.matrix_norm(total, ord=order)
    if plain is not None:
        residual = constants.identity * abs(attention.residual)
        plain[:, place, rows.index] += residual + torch.linalg.matrix_norm(query, ord=order).sum(dim=1)
    return off, plain

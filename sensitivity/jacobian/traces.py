"""Trace and Frobenius norm of the product whose eigenvalues are a block's squared singular values."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def power_traces(
    value: Float[Tensor, "row head 1 key"],
    deviation: Float[Tensor, "row head width key"],
    inside: Float[Tensor, "row both both"],
    gram: Float[Tensor, "inner inner"],
) -> tuple[Float[Tensor, "row key"], Float[Tensor, "row key"]]:
    r"""Traces of :math:`K G` and of its square for every pair, with :math:`K = [D, R] N [D, R]^T`.

    With :math:`N = \begin{pmatrix} V & L \\ L^T & P \end{pmatrix}`, :math:`W = D G R`, :math:`Q = R^T G R`,
    :math:`B = L^T W` and :math:`E = D G D L`, all but the first two of which have one column a head,

    .. math::
        \mathrm{tr}\, K G &= \mathrm{tr}\, V D G D + 2\, \mathrm{tr}\, B + \langle P, Q \rangle \\
        \mathrm{tr}\, (K G)^2 &= \mathrm{tr}\, (V D G D)^2 + \langle V W, 4 E + 2 W P \rangle + \mathrm{tr}\, B^2
        + 2 \langle L^T E, Q \rangle + 2\, \mathrm{tr}\, P B^T Q + \mathrm{tr}\, (B + P Q)^2 .
    """
    heads, inner = value.shape[1], len(gram)
    values, along, products = inside[:1, :inner, :inner], inside[:, :inner, inner:], inside[:, inner:, inner:]
    columns = gram.unflatten(1, (heads, -1)).movedim(1, 0)  # (head, inner, width)
    seen = columns @ deviation  # G R: (row, head, inner, key)
    inward = seen.unflatten(2, (heads, -1))  # (row, column, head, width, key)
    q = deviation.new_empty(len(deviation), heads, heads, deviation.shape[3])
    for head in range(heads):  # symmetric
        torch.sum(deviation[:, head:] * inward[:, head, head:], dim=2, out=q[:, head:, head])
        q[:, head, head + 1 :] = q[:, head + 1 :, head]
    w = inward.mul_(value[:, None]).flatten(2, 3)
    shared = columns @ along.unflatten(1, (heads, -1))  # G L by head of G's columns: (row, head, inner, column)
    flat = shared.permute(0, 3, 2, 1).flatten(1, 2)  # (row, column inner, head)
    e = (4 * flat @ value[:, :, 0]).unflatten(1, (heads, heads, -1)).mul_(value[:, None]).flatten(2, 3)  # 4 E
    b = (along.mT[:, None] @ w).movedim(1, 2)  # (row, head, column, key)
    outward = (along.mT[:, None] @ e).movedim(1, 2)
    e.flatten(2).baddbmm_(2 * products, w.flatten(2))  # 4 E + 2 W P, as P is symmetric
    image = values[:, None] @ w
    pair = torch.einsum("rhgk,rgl->rhlk", q, products)  # Q P
    square = b + pair.movedim(1, 2)  # B + P Q
    trace = 2 * torch.einsum("rhhk->rk", b) + torch.einsum("rhhk->rk", pair)
    second = image.mul_(e).sum(dim=(1, 2)) + (b * b.movedim(1, 2)).sum(dim=(1, 2))
    second += (outward * q).sum(dim=(1, 2)) / 2 + 2 * (b * pair).sum(dim=(1, 2))
    second += (square * square.movedim(1, 2)).sum(dim=(1, 2))
    own, own_square = _value_path(value[:, :, 0], values[0], gram)
    return trace + own, second + own_square


def _value_path(
    value: Float[Tensor, "row head key"], values: Float[Tensor, "inner inner"], gram: Float[Tensor, "inner inner"]
) -> tuple[Float[Tensor, "row key"], Float[Tensor, "row key"]]:
    r"""Traces of :math:`V D G D` and of its square: a quadratic form of :math:`\alpha \alpha^T`, and a quartic one."""
    heads = value.shape[1]
    v, g = (part.unflatten(0, (heads, -1)).unflatten(2, (heads, -1)) for part in (values, gram))
    chains = torch.einsum("hxby,bygz->hbgxz", v, g)
    linear = torch.einsum("hbhxx->hb", chains).flatten()
    quartic = torch.einsum("hbgxz,gkhzx->hbgk", chains, chains).reshape(heads**2, heads**2)
    power = (value[:, :, None] * value[:, None]).flatten(1, 2)
    return (linear[:, None] * power).sum(dim=1), (power * (quartic @ power)).sum(dim=1)

"""Spectral norms of attention blocks by Lanczos iteration on the structured product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.jacobian.operator import BlockOperator, root
from sensitivity.jacobian.search import Search

__all__ = ["BlockOperator", "norms", "root"]

MANY = 100  # pairs that are worth another iteration rather than decompositions


def norms(operator: BlockOperator, tolerance: float) -> Float[Tensor, "row key"]:
    r"""Largest singular value of every block, to the relative ``tolerance`` or the rounding of the operator's dtype.

    Lanczos iteration from a seeded random start, without reorthogonalisation. Up to an inner width of ``PROVABLE`` and
    ``TRACED`` heads the trace and Frobenius norm of each product are known: the start is turned towards what the value
    path makes large, which saves steps, and a value is given out only once trace and norm leave no room for an
    eigenvalue above it by more than the tolerance: whatever the start has missed, the answer is right up to rounding.
    Loss of orthogonality would void that; pairs that come near it are proved from fewer steps and the fourth powers of
    their values, and those that are not, iterated again in double precision or, where they are few, decomposed. What
    the bound does not settle in ``PATIENCE`` steps, as with spectra without a top, and wider layers from the beginning,
    rest on the start instead: the value is then an eigenvalue to an estimate of the tolerance, and the largest but for
    one that exceeds it by less than ``BEYOND``, or has less than ``RARE`` of the start, each a matter of one block in
    some hundred thousand. Pairs left over at the end are decomposed.
    """
    operator, size = operator.unit()
    tolerance, dtype = max(tolerance, 4 * torch.finfo(torch.float64).eps), size.dtype
    traces = operator.traces() if operator.provable else None
    search = Search(operator, size > 0, traces, tolerance, dtype).run()
    top, left = search.top, search.left
    if traces is not None and dtype != torch.float64 and int(left.sum()) > MANY:
        again = Search(operator, left, traces, tolerance, torch.float64, search).run()
        top, left = torch.where(left, again.top, top), again.left
    row, key = left.nonzero(as_tuple=True)
    if len(row):
        top[row, key] = operator.largest(row, key)
    return top.clamp_min(0).sqrt() * size

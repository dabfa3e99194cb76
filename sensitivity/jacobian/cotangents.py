"""The rows of a Jacobian that are asked for: one-hot vectors for exact rows, random signs for probes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.errors import InputError


@dataclass(frozen=True)
class Cotangents:
    """Rows ``v^T J_i.``, ``per_query`` of them for every query time, in the order of the queries.

    Attributes:
        queries: number of query times.
        out: features of an output state.
        per_query: rows per query: ``out`` exact ones, or the number of probes.
        signs: the probes' random signs, ``(row, out)``; None for exact rows.
    """

    queries: int
    out: int
    per_query: int
    signs: Tensor | None = None

    def __len__(self) -> int:
        return self.queries * self.per_query

    def query(self, rows: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """Query time of every row."""
        return rows // self.per_query

    def vectors(self, rows: Int[Tensor, " row"], like: Tensor) -> Float[Tensor, "row out"]:
        """The vectors ``v``, in the type and on the device of ``like``."""
        if self.signs is None:
            one = torch.zeros(len(rows), self.out, dtype=like.dtype, device=like.device)
            one[torch.arange(len(rows), device=like.device), rows % self.per_query] = 1
            return one
        return self.signs[rows.cpu()].to(dtype=like.dtype, device=like.device)


def exact(queries: int, out: int) -> Cotangents:
    """Every row of every block."""
    return Cotangents(queries, out, out)


def rademacher(queries: int, out: int, probes: int, generator: torch.Generator | None) -> Cotangents:
    """Random signs: ``E ||v^T J_ij||^2 = ||J_ij||_F^2`` for every block.

    Raises:
        InputError: fewer than two probes, which have no standard error.
    """
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
        raise InputError(f"probes must be an integer of at least 2, not {probes!r}: one probe has no standard error.")
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    draws = torch.randint(0, 2, (queries * probes, out), generator=generator, device=generator.device, dtype=torch.int8)
    return Cotangents(queries, out, probes, (2 * draws - 1).cpu())

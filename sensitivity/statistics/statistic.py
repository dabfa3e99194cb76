"""A statistic: a number with what it is compared with and what it is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAN = float("nan")


class Statistic(float):
    """A statistic: a float (its mean) that remembers what it is compared with and what it is made of.

    Attributes:
        mean: the value itself.
        null: the value that a uniform map would give; NaN where there is none.
        excess: ``mean - null``.
        rows: values by query, ``(query,)``, where the statistic is a mean over queries.
        samples: the statistic of every sample alone, ``(sample,)``.
        heads: the statistic of every head alone, ``(head,)``.
        where: the key that holds the largest value.
        note: why the value is undefined, if it is.
    """

    null: float
    rows: Tensor | None
    samples: Tensor | None
    heads: Tensor | None
    where: int | None
    note: str

    def __new__(cls, mean: float | Tensor, null: float | Tensor = _NAN, **parts: Any) -> Statistic:
        """Builds the float and attaches its parts."""
        self = super().__new__(cls, float(mean))
        self.null = float(null)
        for name in ("rows", "samples", "heads", "where"):
            setattr(self, name, parts.get(name))
        self.note = parts.get("note", "")
        return self

    @property
    def mean(self) -> float:
        """The value as a plain float."""
        return float(self)

    @property
    def excess(self) -> float:
        """How far the value lies above that of a uniform map."""
        return float(self) - self.null

    @property
    def with_samples(self) -> Tensor:
        """The value, then that of every sample, ``(1 + sample,)``."""
        own = torch.tensor([float(self)], dtype=torch.float64)
        return own if self.samples is None else torch.cat([own, self.samples])

    def __repr__(self) -> str:
        parts = [f"{float(self):.6g}"]
        if self.null == self.null:
            parts.append(f"null={self.null:.6g}, excess={self.excess:.6g}")
        if self.where is not None:
            parts.append(f"where={self.where}")
        if self.note:
            parts.append(f"note={self.note!r}")
        return f"Statistic({', '.join(parts)})"

    def __str__(self) -> str:
        return float.__repr__(self)

"""What a traffic file holds, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Table:
    """Raw values with the times and names that the file itself has.

    Attributes:
        values: ``(time, node)`` float64, as the file has them.
        timestamps: ``(time,)`` datetime64[ns], or None if the file has none or only counts rows.
        names: one for every column, or None.
        layout: of the file, in words.
        zone: time zone of the stamps if they name one; the times are those of its local clock.
    """

    values: np.ndarray
    timestamps: np.ndarray | None
    names: list[str] | None
    layout: str
    zone: str = ""

"""The hard mask of the diagonal."""

from __future__ import annotations

import math
from typing import Any

from sensitivity.layers.diagonal.base import Diagonal


class DiagonalMask(Diagonal):
    r"""The hard mask: :math:`s_{ii} = -\infty` in training and evaluation, so :math:`a_{ii} = 0`.

    The value path :math:`a_{ii} W_O W_V` and the key path vanish on the diagonal. The query path
    :math:`c W_O \mathrm{Cov}_i W_Q` does not: it sums over the other keys. A row whose only visible key is its own (one
    token; the first row of a causal layer) keeps it, so that every row is defined.

    >>> DiagonalMask().bias
    -inf
    """

    kind = "mask"

    @property
    def bias(self) -> float:
        """Minus infinity."""
        return -math.inf

    @property
    def length(self) -> None:
        """The same at every length."""
        return

    def config(self) -> dict[str, Any]:
        """``{"kind": "mask"}``."""
        return {"kind": self.kind}

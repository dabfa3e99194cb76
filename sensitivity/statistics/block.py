"""A block of rows in double precision, laid out so that its rows, columns and diagonals are sums over one axis."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Block:
    """Some rows of several maps, converted once; everything else are sums over the copy.

    Args:
        values: ``(map, row, key)``, numbers or truth values.
        times: the query times of the rows.
        queries: rows of a whole map.
    """

    def __init__(self, values: Tensor, times: Int[Tensor, " row"], queries: int) -> None:
        maps, rows, keys = values.shape
        self.times, self.queries = times, queries
        self._sheared = bool((times[1:] - times[:-1] == 1).all())  # consecutive rows
        shift = rows - 1 if self._sheared else 0
        width = keys + shift
        self._flat = torch.empty(maps, rows * width + shift, dtype=torch.float64, device=values.device)
        padded = self._flat[:, : rows * width].view(maps, rows, width)
        padded[:, :, :shift], self._flat[:, rows * width :] = 0.0, 0.0
        self.values: Float[Tensor, "map row key"] = padded[:, :, shift:]
        self.values.copy_(values)

    def take_diagonal(self) -> Float[Tensor, "map row"]:
        """The entries on the diagonal, which are zero from now on."""
        pairs = (slice(None), torch.arange(len(self.times)), self.times)
        diagonal = self.values[pairs]
        self.values[pairs] = 0.0
        return diagonal.cpu()

    def rows(self) -> Float[Tensor, "map row"]:
        """Sums of the rows."""
        return self.values.sum(dim=-1).cpu()

    def columns(self) -> Float[Tensor, "map key"]:
        """Sums of the columns."""
        return self.values.sum(dim=1).cpu()

    def lags(self) -> Float[Tensor, "map lag"]:
        """Sums along the diagonals of a whole map, in the order of ``j - i``."""
        maps, rows, keys = self.values.shape
        sums = torch.zeros(maps, self.queries + keys - 1, dtype=torch.float64)
        if self._sheared:  # in memory each row starts one place to the left of the row above it
            width = keys + rows - 1
            sheared = self._flat.as_strided((maps, rows, width), (self._flat.stride(0), width + 1, 1))
            start = self.queries - int(self.times[0]) - rows
            sums[:, start : start + width] = sheared.sum(dim=1).cpu()
            return sums
        for row, time in enumerate(self.times.tolist()):
            start = self.queries - 1 - time
            sums[:, start : start + keys] += self.values[:, row].cpu()
        return sums


def whole_rows(times: Int[Tensor, " row"], queries: int, keys: int) -> dict[str, Float[Tensor, "1 size"]]:
    """How many pairs some rows hold in all on the diagonal, and off it in every row, column and other diagonal."""
    one = torch.ones(1, len(times), dtype=torch.float64)
    column = torch.full((1, keys), float(len(times)), dtype=torch.float64)
    if queries != keys:
        return {"row": keys * one, "key": column}
    column[0, times] -= 1
    steps = torch.zeros(1, queries + keys, dtype=torch.float64)
    steps[0].index_add_(0, queries - 1 - times, one[0]).index_add_(0, queries - 1 - times + keys, -one[0])
    lags = steps.cumsum(dim=1)[:, :-1]
    lags[0, queries - 1] = 0
    return {"diagonal": one, "row": (keys - 1) * one, "key": column, "lag": lags}

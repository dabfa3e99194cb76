"""Which pairs attend and which count, for the rows at hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.visibility import attended_and_counted, left_out

_TABLE = 2**22  # pairs of the rows that are wanted, up to which the number of samples that see them is kept


@dataclass
class Masks:
    """The masks of a layer with a description, or of a function of which only the padding is known.

    Attributes:
        samples: number of samples.
        queries: number of output times.
        keys: number of input times.
        attention: the layer, with its masks.
        padding: True at padded positions, where there is no description.
        causal: hides later inputs, where there is no description.
    """

    samples: int
    queries: int
    keys: int
    attention: SoftmaxAttention | None = None
    padding: Bool[Tensor, "sample time"] | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        self._among: dict[tuple[int, int], Tensor] = {}

    def as_causal(self) -> Masks:
        """The same with later inputs hidden."""
        return dataclasses.replace(self, causal=True)

    @property
    def of_each_sample(self) -> bool:
        """Whether samples may see different pairs."""
        if self.attention is None:
            return self.padding is not None and self.samples > 1
        return any(part is not None and part.shape[0] > 1 for part in (self.attention.bias, self.attention.padding))

    def of(
        self, samples: slice, rows: Int[Tensor, " row"]
    ) -> tuple[Bool[Tensor, "#part #head row key"] | None, Bool[Tensor, "#part row key"] | None]:
        """The pairs that the mask lets attend, and those that count in a statistic; None where all do."""
        if self.attention is not None:
            if not self.attention.masked:
                return None, None
            return attended_and_counted(self.attention.sample(samples), self.keys, rows)
        visible: Tensor | None = None
        if self.causal:
            visible = (torch.arange(self.keys, device=rows.device) <= rows[:, None])[None]
        if self.padding is not None:
            real = ~self._padded(self.padding[samples], rows)
            visible = real if visible is None else visible & real
        return None, visible

    def among(self, rows: Int[Tensor, " row"]) -> Int[Tensor, "row key"] | None:
        """In how many samples each pair counts; None where that is the same for all."""
        if not self.of_each_sample:
            return None
        place = (int(rows[0]), len(rows))
        if place in self._among:
            return self._among[place]
        visible = self.of(slice(None), rows)[1]
        assert visible is not None
        found = visible.sum(dim=0)
        if sum(table.numel() for table in self._among.values()) < _TABLE:
            self._among[place] = found
        return found

    def padded(self, samples: slice, rows: Int[Tensor, " row"]) -> Bool[Tensor, "part row key"] | None:
        """The pairs of padded positions; None where nothing is padded."""
        padding = self.padding if self.attention is None else self.attention.padding
        if padding is None:
            return None
        return self._padded(padding[samples] if padding.shape[0] > 1 else padding, rows)

    def _padded(self, padding: Tensor, rows: Tensor) -> Bool[Tensor, "part row key"]:
        if self.queries != self.keys:  # outputs at other times than the inputs are not padded
            return padding[:, None, :].expand(-1, len(rows), -1)
        return left_out(padding, rows)


def take_padding(values: Float[Tensor, "part *axes row key"], padded: Bool[Tensor, "part row key"] | None) -> Tensor:
    """The values with NaN at padded pairs: they are left out, which is not the same as no influence."""
    if padded is None:
        return values
    return values.masked_fill(padded if values.ndim == 3 else padded[:, None], torch.nan)

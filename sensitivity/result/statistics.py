"""The statistics of a measurement that kept no map."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.result.measurement import NO_ATTENTION, Measurement, check_part
from sensitivity.statistics import AttentionStatistics, RowStatistics

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True, eq=False, repr=False)
class SensitivityStatistics(Measurement):
    r"""Statistics of :math:`\|J_{ij}\| = \|dh_i / dx_j\|`, summed up row by row without a map.

    The methods are those of :class:`SensitivityMap`, and give the same; single pairs are not known. Memory:
    ``O(sample x time)``.

    Attributes:
        whole: sums over the rows of the whole map.
        paths: the same of each path's map, by name; empty unless measured.
        heads: the same of each head's map; empty unless measured.
        attention: sums over the rows of the attention weights; None unless an attention layer.
        norm: ``frobenius``, ``rms`` or ``spectral``.
        in_dim: features of an input token.
        out_dim: features of an output state.
        name: the layer's name in its model.
        provenance: how the numbers came about: versions, seed, dtype, device, engine.
        notes: what the reader should know.
    """

    kind: ClassVar[str] = "SensitivityStatistics"

    whole: RowStatistics
    paths: dict[str, RowStatistics] = field(default_factory=dict)
    heads: tuple[RowStatistics, ...] = ()
    attention: AttentionStatistics | None = None
    norm: str = "frobenius"
    in_dim: int | None = None
    out_dim: int | None = None
    name: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.whole.samples

    @property
    def length(self) -> int:
        r"""Number of output times, :math:`T`, whether all of their rows were measured or some."""
        return self.whole.queries

    @property
    def keys(self) -> int:
        """Number of input times."""
        return self.whole.keys

    @property
    def query_times(self) -> Int[Tensor, " query"]:
        """The query times of the rows that were measured."""
        return self.whole.times

    @property
    def path_names(self) -> tuple[str, ...]:
        """The paths that were measured."""
        return tuple(self.paths)

    @property
    def has_attention(self) -> bool:
        """Whether there are statistics of attention weights."""
        return self.attention is not None

    @property
    def has_removed(self) -> bool:
        """Whether there are norms with the residual path removed."""
        return self.whole.has_removed

    def sums(self, path: str | None = None, head: int | None = None) -> RowStatistics:
        """The accumulated rows of the whole, of one path or of one head, from which every statistic is finished.

        Raises:
            InputError: the path or head was not measured; the message lists those that were.
        """
        check_part(path, head, self.path_names, len(self.heads))
        if path is not None:
            return self.paths[path]
        return self.whole if head is None else self.heads[head]

    def attention_sums(self) -> AttentionStatistics:
        """The accumulated rows of attention weights.

        Raises:
            InputError: no attention layer was measured.
        """
        if self.attention is None:
            raise InputError(NO_ATTENTION)
        return self.attention

    def to_xarray(self) -> xarray.Dataset:
        """The sums and counts that every statistic is finished from, labelled."""
        from sensitivity.result import sums

        return sums.dataset(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SensitivityStatistics:
        """Reads statistics that :meth:`save` wrote.

        Raises:
            InputError: no such file, a directory, a truncated file, or another kind of file.
        """
        from sensitivity.result import sums

        return cls(**sums.load(path))

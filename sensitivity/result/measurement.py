"""What a measurement says of a layer or model, however much of it was kept."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.result import text
from sensitivity.statistics import AttentionStatistics, RowStatistics, Statistic, shares

if TYPE_CHECKING:
    import xarray

NO_ATTENTION = (
    "this map holds no attention weights, because no single softmax attention layer was measured; measure one with "
    "layer=NAME or from a SoftmaxAttention."
)


class Measurement(ABC):
    """Statistics of the norms of the block Jacobian of one layer or model, and their provenance.

    What a map and the statistics without a map have in common: both hand out sums over rows, by path and by head.
    """

    kind: ClassVar[str]
    norm: str
    in_dim: int | None
    out_dim: int | None
    name: str
    provenance: dict[str, Any]
    notes: list[str]

    # -- what is measured ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def samples(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def length(self) -> int:
        r"""Number of output times, :math:`T`, whether all of their rows were measured or some."""

    @property
    @abstractmethod
    def keys(self) -> int:
        """Number of input times."""

    @property
    @abstractmethod
    def query_times(self) -> Int[Tensor, " query"]:
        """The query times of the rows that were measured."""

    @property
    @abstractmethod
    def path_names(self) -> tuple[str, ...]:
        """The paths that were measured."""

    @property
    @abstractmethod
    def has_attention(self) -> bool:
        """Whether there are statistics of attention weights."""

    @property
    @abstractmethod
    def has_removed(self) -> bool:
        """Whether there are norms with the residual path removed."""

    @abstractmethod
    def sums(self, path: str | None = None, head: int | None = None) -> RowStatistics:
        """The accumulated rows of the whole, of one path or of one head, from which every statistic is finished.

        Raises:
            InputError: the path or head was not measured; the message lists those that were.
        """

    @abstractmethod
    def attention_sums(self) -> AttentionStatistics:
        """The accumulated rows of attention weights.

        Raises:
            InputError: no attention layer was measured.
        """

    @property
    def square(self) -> bool:
        """Whether there are as many output times as input times, so that there is a diagonal."""
        return self.length == self.keys

    @property
    def engine(self) -> str:
        """Which way the norms were computed, in words."""
        return str(self.provenance.get("engine", ""))

    # -- statistics ----------------------------------------------------------------------------------------------

    def sink_ratio(self, residual_removed: bool = False, path: str | None = None, head: int | None = None) -> Statistic:
        """Mean diagonal over mean off-diagonal norm; see :func:`sensitivity.statistics.sink_ratio`."""
        return self.sums(path, head).sink_ratio(residual_removed)

    def parroting_index(
        self, residual_removed: bool = False, path: str | None = None, head: int | None = None
    ) -> Statistic:
        """Mean share of the diagonal in its row; see :func:`sensitivity.statistics.parroting_index`."""
        return self.sums(path, head).parroting_index(residual_removed)

    def diagonal_mean(
        self, residual_removed: bool = False, path: str | None = None, head: int | None = None
    ) -> Statistic:
        r"""Mean of :math:`S_{ii}`."""
        return self.sums(path, head).diagonal(residual_removed)

    def off_diagonal_mean(self, path: str | None = None, head: int | None = None) -> Statistic:
        r"""Mean of :math:`S_{ij}` over the visible pairs :math:`i \ne j`."""
        return self.sums(path, head).off_diagonal()

    def diagonal_attention(self) -> Statistic:
        """Mean attention weight on the diagonal; see :func:`sensitivity.statistics.diagonal_attention`."""
        return self.attention_sums().diagonal()

    def key_sink(self) -> Statistic:
        """Largest mean weight on one key; see :func:`sensitivity.statistics.key_sink`."""
        return self.attention_sums().key_sink()

    def row_entropy(self) -> Statistic:
        """Entropy of the rows of weights over the largest possible; see :func:`sensitivity.statistics.row_entropy`."""
        return self.attention_sums().entropy()

    def lag_profile(
        self, residual_removed: bool = False, path: str | None = None, head: int | None = None
    ) -> xarray.DataArray:
        """Mean norm at every lag ``i - j``, over the dimension ``lag``; NaN where no pair is visible."""
        values = self.sums(path, head).lag_profile(residual_removed)[0]
        return self._profile("lag", range(1 - self.length, self.length), values)

    def primacy_profile(
        self, residual_removed: bool = False, path: str | None = None, head: int | None = None
    ) -> xarray.DataArray:
        """Mean norm of every key, over the dimension ``key``."""
        values = self.sums(path, head).primacy_profile(residual_removed)[0]
        return self._profile("key", range(self.keys), values)

    def path_shares(self) -> dict[str, dict[str, Statistic]]:
        """Share of each path on and off the diagonal; see :func:`sensitivity.statistics.path_shares`."""
        return shares({name: self.sums(name) for name in self.path_names})

    def summary(self) -> dict[str, float]:
        """The statistics as plain floats, as far as they are defined here; NaN where undefined."""
        found: dict[str, float] = {}
        if self.square:
            sums = self.sums()
            found["off_diagonal"] = float(sums.off_diagonal())
            for removed, suffix in ((False, ""), (True, "_residual_removed"))[: 1 + self.has_removed]:
                found[f"diagonal{suffix}"] = float(sums.diagonal(removed))
                found[f"sink_ratio{suffix}"] = float(sums.sink_ratio(removed))
                parroting = sums.parroting_index(removed)
                found[f"parroting_index{suffix}"] = float(parroting)
                found[f"parroting_index{suffix}_null"] = parroting.null
        if self.has_attention:
            weights = self.attention_sums()
            values = {"diagonal_attention": weights.diagonal()} if self.square else {}
            for name, value in (values | {"key_sink": weights.key_sink(), "row_entropy": weights.entropy()}).items():
                found[name], found[f"{name}_null"] = float(value), value.null
        if self.path_names and self.square:
            for part, by_path in self.path_shares().items():
                found |= {f"{part}_share_{name}": float(share) for name, share in by_path.items()}
        return found

    # -- files and texts -----------------------------------------------------------------------------------------

    @abstractmethod
    def to_xarray(self) -> xarray.Dataset:
        """Every array with its named dimensions, coordinates, units and long name."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes netCDF-4, whole or not at all; ``load`` of the same class gives it back.

        Half-precision arrays are stored as float32, which holds them exactly. The provenance is stored as JSON: what
        JSON does not know becomes a string.

        Raises:
            InputError: the place cannot be written to.
        """
        from sensitivity.result import labels

        labels.save(self.to_xarray(), path)

    def __repr__(self) -> str:
        return text.plain(self)

    def _repr_html_(self) -> str:
        return text.html(self)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _profile(self, dim: str, coordinate: range, values: Tensor) -> xarray.DataArray:
        import numpy as np
        import xarray

        attributes = {"units": "1", "norm": self.norm, "long_name": f"mean sensitivity by {dim}"}
        return xarray.DataArray(
            values.numpy(),
            {dim: np.arange(coordinate.start, coordinate.stop)},
            (dim,),
            name="sensitivity",
            attrs=attributes,
        )


def check_part(path: str | None, head: int | None, paths: tuple[str, ...], heads: int) -> None:
    """Refuses a path or head that was not measured.

    Raises:
        InputError: the message lists those that were.
    """
    if path is not None and head is not None:
        raise InputError(f"path={path!r} and head={head} together name no map that is measured; take one of them.")
    if path is not None and path not in paths:
        known = f"this map holds {', '.join(paths)}" if paths else "measure with paths=True"
        raise InputError(f"no norms of the path {path!r}; {known}.")
    if head is not None and (isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < heads):
        known = f"this map holds {heads} heads, counted from 0" if heads else "measure with heads=True"
        raise InputError(f"no norms of the head {head!r}; {known}.")

"""Statistics of sensitivity maps, accumulated row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.statistics.statistic import Statistic

_CHUNK = 1 << 22  # entries of a map that are converted to float64 at a time
_NAN = float("nan")


@dataclass(frozen=True, eq=False)
class MapStatistics:
    r"""All statistics of one set of maps, as :meth:`RowStatistics.finish` returns them.

    Attributes:
        diagonal: mean of :math:`S_{ii}`.
        off_diagonal: mean of :math:`S_{ij}` over :math:`i \ne j`.
        sink_ratio: the first over the second.
        parroting_index: mean share of the diagonal in its row.
        lag_profile: ``(lag,)``, from ``-(T-1)`` to ``T-1``.
        primacy_profile: ``(key,)``.
    """

    diagonal: Statistic
    off_diagonal: Statistic
    sink_ratio: Statistic
    parroting_index: Statistic
    lag_profile: Float[Tensor, " lag"]
    primacy_profile: Float[Tensor, " key"]


class RowStatistics:
    """Sums over the rows of sensitivity maps, from which every map statistic is finished.

    Holds ``O(sample x time)`` numbers in float64 on the CPU, never a map. Rows that are never handed in are left out.

    Args:
        samples: number of maps.
        queries: rows of a map.
        keys: columns of a map; as many as rows unless given. The diagonal exists only where the two agree.
    """

    def __init__(self, samples: int, queries: int, keys: int | None = None) -> None:
        keys = queries if keys is None else keys
        self.samples, self.queries, self.keys = samples, queries, keys
        lead = samples + 1  # index 0 is the mean map, the samples follow
        self._diagonal = torch.full((lead, queries), _NAN, dtype=torch.float64)
        self._removed: Tensor | None = None
        self._row, self._row_count = _zeros(lead, queries), _zeros(lead, queries)
        self._key, self._key_count = _zeros(lead, keys), _zeros(lead, keys)
        self._lag, self._lag_count = _zeros(lead, queries + keys - 1), _zeros(lead, queries + keys - 1)

    @classmethod
    def of(
        cls,
        norms: Float[Tensor, "sample query key"],
        visible: Bool[Tensor, "sample query key"] | None = None,
        removed: Float[Tensor, "sample query"] | None = None,
    ) -> RowStatistics:
        """Accumulates whole maps, a block of rows at a time."""
        samples, queries, keys = norms.shape
        sums = cls(samples, queries, keys)
        step = max(1, _CHUNK // max(1, (samples + 1) * keys))
        for start in range(0, queries, step):
            rows = range(start, min(start + step, queries))
            part = slice(rows.start, rows.stop)
            sums.update(
                rows,
                norms[:, part],
                None if visible is None else visible[:, part],
                None if removed is None else removed[:, part],
            )
        return sums

    def update(
        self,
        rows: range,
        norms: Float[Tensor, "sample row key"],
        visible: Bool[Tensor, "sample row key"] | None = None,
        removed: Float[Tensor, "sample row"] | None = None,
    ) -> None:
        """Adds consecutive rows of every sample's map; each row once.

        Args:
            rows: which queries these rows are, with step 1.
            norms: their norms; what stands at pairs that are not visible does not matter.
            visible: the pairs that count; all unless given.
            removed: norms of the diagonal blocks without the residual path.

        Raises:
            InputError: rows outside the map, or a visible norm that is not finite.
        """
        self._check(rows, norms)
        counted = torch.ones_like(norms, dtype=torch.bool) if visible is None else visible
        values, counted = _with_mean(norms, counted)
        _check_finite(values, rows.start)
        part = slice(rows.start, rows.stop)
        if self.square:
            row = torch.arange(len(rows), device=norms.device)
            pairs = (slice(None), row, row + rows.start)
            self._diagonal[:, part] = torch.where(counted[pairs], values[pairs], _NAN).cpu()
            if removed is not None:
                self._removed = torch.full_like(self._diagonal, _NAN) if self._removed is None else self._removed
                mean, _ = _with_mean(removed, counted[pairs][1:])
                self._removed[:, part] = torch.where(counted[pairs], mean, _NAN).cpu()
            values[pairs], counted[pairs] = 0.0, False
            lags = slice(rows.start, rows.start + self.keys + len(rows) - 1)
            self._lag[:, lags] += _by_lag(values)
            self._lag_count[:, lags] += _by_lag(counted.double())
        self._row[:, part], self._row_count[:, part] = values.sum(dim=-1).cpu(), counted.sum(dim=-1).double().cpu()
        self._key += values.sum(dim=1).cpu()
        self._key_count += counted.sum(dim=1).cpu()

    def finish(self, residual_removed: bool = False) -> MapStatistics:
        """Every statistic of the rows so far; ``residual_removed`` takes the diagonal without the residual path.

        Raises:
            InputError: maps that are not square, or no residual-removed diagonal was handed in.
        """
        return MapStatistics(
            diagonal=self.diagonal(residual_removed),
            off_diagonal=self.off_diagonal(),
            sink_ratio=self.sink_ratio(residual_removed),
            parroting_index=self.parroting_index(residual_removed),
            lag_profile=self.lag_profile(residual_removed)[0],
            primacy_profile=self.primacy_profile(residual_removed)[0],
        )

    @property
    def square(self) -> bool:
        """Whether the maps have a diagonal."""
        return self.queries == self.keys

    def diagonal(self, residual_removed: bool = False) -> Statistic:
        """Mean of the diagonal."""
        values = self._diagonals(residual_removed)
        mean = values.nanmean(dim=1)
        note = "" if mean[0] == mean[0] else "no diagonal pair is visible"
        return Statistic(mean[0], rows=values[0], samples=mean[1:], note=note)

    def off_diagonal(self) -> Statistic:
        """Mean over all visible pairs off the diagonal; NaN with a note where there is none, as at T = 1."""
        self._check_square()
        mean = self._row.sum(dim=1) / self._row_count.sum(dim=1)
        note = "" if mean[0] == mean[0] else f"no off-diagonal pair is visible (T={self.queries})"
        return Statistic(mean[0], rows=self._row[0] / self._row_count[0], samples=mean[1:], note=note)

    def sink_ratio(self, residual_removed: bool = False) -> Statistic:
        """Mean of the diagonal over mean off the diagonal; 1 for a uniform map."""
        diagonal, others = self.diagonal(residual_removed), self.off_diagonal()
        ratio = diagonal.with_samples / others.with_samples
        note = diagonal.note or others.note or ("" if ratio[0] == ratio[0] else "every visible norm is zero")
        return Statistic(ratio[0], 1.0, samples=ratio[1:], note=note)

    def parroting_index(self, residual_removed: bool = False) -> Statistic:
        """Mean over rows of the diagonal's share; null: one over the number of visible keys, row by row."""
        diagonal = self._diagonals(residual_removed)
        share = diagonal / (diagonal + self._row)  # NaN where the whole row is zero: it has no shares
        null = torch.where(share.isnan(), _NAN, 1 / (self._row_count + 1)).nanmean(dim=1)
        mean = share.nanmean(dim=1)
        note = "" if mean[0] == mean[0] else "no visible row has a norm above zero"
        return Statistic(mean[0], null[0], rows=share[0], samples=mean[1:], note=note)

    def lag_profile(self, residual_removed: bool = False) -> Float[Tensor, "map lag"]:
        """Mean over the pairs of one lag, of the mean map (index 0) and of each sample; NaN where it has no pair."""
        diagonal = self._diagonals(residual_removed)
        sums, counts = self._lag.clone(), self._lag_count.clone()
        sums[:, self.keys - 1] = diagonal.nansum(dim=1)
        counts[:, self.keys - 1] = (~diagonal.isnan()).sum(dim=1).double()
        return sums / counts

    def primacy_profile(self, residual_removed: bool = False) -> Float[Tensor, "map key"]:
        """Mean over the visible queries of one key, of the mean map (index 0) and of every sample."""
        if not self.square and not residual_removed:
            return self._key / self._key_count
        diagonal = self._diagonals(residual_removed)
        return (self._key + diagonal.nan_to_num()) / (self._key_count + ~diagonal.isnan())

    def _diagonals(self, residual_removed: bool) -> Tensor:
        self._check_square()
        if not residual_removed:
            return self._diagonal
        if self._removed is None:
            raise InputError(
                "residual-removed statistics need the diagonal norms without the identity, and this map has none "
                "(the model's input and output differ in width or length); use residual_removed=False."
            )
        return self._removed

    def _check_square(self) -> None:
        if not self.square:
            raise InputError(
                f"the map is {self.queries} x {self.keys} (query, key): without equal lengths there is no diagonal, "
                "so no sink ratio, parroting index or lag profile; use primacy_profile or the map itself."
            )

    def _check(self, rows: range, norms: Tensor) -> None:
        expected = (self.samples, len(rows), self.keys)
        if rows.step != 1 or not 0 <= rows.start < rows.stop <= self.queries or tuple(norms.shape) != expected:
            raise InputError(
                f"{rows} with norms of shape {tuple(norms.shape)} does not fit {self.samples} maps of "
                f"{self.queries} x {self.keys}; hand in consecutive rows, (sample, row, key)."
            )


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _with_mean(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Puts the mean over samples in front of the samples; what is not counted becomes 0."""
    values = torch.where(counted, values, 0.0).double()
    counts = counted.sum(dim=0)
    mean = values.sum(dim=0) / counts.clamp(min=1)
    return torch.cat([mean[None], values]), torch.cat([(counts > 0)[None], counted])


def _by_lag(values: Float[Tensor, "map row key"]) -> Float[Tensor, "map lag"]:
    """Sums along the diagonals of a block of rows, lowest lag first; deterministic on every device."""
    maps, rows, keys = values.shape
    padded = torch.nn.functional.pad(values.flip(-1), (0, rows)).flatten(1)
    sheared = padded[:, : rows * (keys + rows - 1)].reshape(maps, rows, keys + rows - 1)
    return sheared.sum(dim=1).cpu()


def _check_finite(values: Tensor, start: int) -> None:
    bad = ~values[1:].isfinite()
    if bad.any():
        sample, row, key = (int(part) for part in bad.nonzero()[0])
        raise InputError(
            f"the norm at (sample, query, key) = ({sample}, {start + row}, {key}) is "
            f"{float(values[1 + sample, row, key])}; a visible pair must be finite: "
            "mark pairs that do not count as not visible."
        )

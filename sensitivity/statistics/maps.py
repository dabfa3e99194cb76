"""Statistics of sensitivity maps, accumulated row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.statistics.block import Block, whole_rows
from sensitivity.statistics.statistic import Statistic

_CHUNK = 1 << 19  # entries of a map that are converted to float64 at a time: what a core's cache holds
_BY_ROW = ("row", "diagonal", "removed")
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
        times: the query times of the rows that will be handed in, where those are not all; the rows of a statistic come
            in their order.
    """

    def __init__(
        self, samples: int, queries: int, keys: int | None = None, times: Int[Tensor, " row"] | None = None
    ) -> None:
        keys = queries if keys is None else keys
        self.samples, self.queries, self.keys = samples, queries, keys
        self.times = torch.arange(queries) if times is None else times.cpu()
        self._place = torch.full((queries,), -1)
        self._place[self.times] = torch.arange(len(self.times))
        sizes = {"row": len(self.times), "key": keys}
        if self.square:
            sizes |= {"diagonal": len(self.times), "lag": queries + keys - 1}
        # index 0 is the mean map, the samples follow; rows, keys and lags are without the diagonal
        self._sums = {name: torch.zeros(samples + 1, size, dtype=torch.float64) for name, size in sizes.items()}
        self._counts = {name: torch.zeros_like(sums) for name, sums in self._sums.items()}

    @classmethod
    def of(
        cls,
        norms: Float[Tensor, "sample query key"],
        visible: Bool[Tensor, "#sample query key"] | None = None,
        removed: Float[Tensor, "sample query"] | None = None,
        times: Int[Tensor, " query"] | None = None,
        queries: int | None = None,
    ) -> RowStatistics:
        """Accumulates whole maps, a block of rows at a time; ``times`` of ``queries`` where they are some rows only."""
        samples, rows, keys = norms.shape
        sums = cls(samples, rows if queries is None else queries, keys, times)
        step = max(1, _CHUNK // max(1, samples * keys))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            sums.update(
                sums.times[part],
                norms[:, part],
                None if visible is None else visible[:, part],
                None if removed is None else removed[:, part],
            )
        return sums

    def update(
        self,
        rows: range | Int[Tensor, " row"],
        norms: Float[Tensor, "part row key"],
        visible: Bool[Tensor, "#part row key"] | None = None,
        removed: Float[Tensor, "part row"] | None = None,
        *,
        samples: slice = slice(None),
        among: Int[Tensor, "row key"] | None = None,
    ) -> None:
        """Adds rows of the samples' maps; each row of each sample once.

        Args:
            rows: the query times of these rows.
            norms: their norms; what stands at pairs that are not visible does not matter.
            visible: the pairs that count; all unless given. One mask stands for all samples.
            removed: norms of the diagonal blocks without the residual path.
            samples: which samples these are; all unless given.
            among: in how many of all samples each pair is visible. Needed where only some samples are handed in and
                each has a mask of its own: the mean map is a mean over the samples in which a pair is visible.

        Raises:
            InputError: rows outside the map, or a visible norm that is not finite.
        """
        times = torch.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows.cpu()
        own = slice(*(1 + place for place in samples.indices(self.samples)[:2]))
        self._check(rows, times, norms, own)
        if visible is not None and visible.shape[0] > 1 and visible.stride(0) == 0:
            visible = visible[:1]
        if among is None and visible is not None and visible.shape[0] > 1:
            among = visible.sum(dim=0)
        values = norms if visible is None else torch.where(visible, norms, 0.0)
        sums = self._parts(Block(_with_mean(values, among), times, self.queries))
        if not all(sums[name].isfinite().all() for name in _BY_ROW if name in sums):
            _check_finite(values, times, own.start - 1)
        if removed is not None and self.square:
            sums["removed"] = self._removed(removed, visible, among, times)
        self._add(sums, self._shown(visible, among, times), self._place[times], own)

    def _removed(self, removed: Tensor, visible: Tensor | None, among: Tensor | None, times: Tensor) -> Tensor:
        """The residual-removed diagonal where it counts, with that of the mean map where masks differ."""
        row = torch.arange(len(times))
        if visible is not None:
            removed = torch.where(visible[:, row, times], removed, 0.0)
        return _with_mean(removed, None if among is None else among[row, times]).double().cpu()

    def _shown(self, visible: Tensor | None, among: Tensor | None, times: Tensor) -> dict[str, Tensor]:
        """How many pairs count in every row, column and diagonal."""
        if visible is None:
            return whole_rows(times, self.queries, self.keys)
        if among is not None:
            visible = torch.cat([(among > 0)[None], visible])
        return self._parts(Block(visible, times, self.queries))

    def _parts(self, block: Block) -> dict[str, Tensor]:
        """Sums of a block: its diagonal, and its rows, columns and other diagonals without that."""
        found = {"diagonal": block.take_diagonal()} if self.square else {}
        found |= {"row": block.rows(), "key": block.columns()}
        return found | ({"lag": block.lags()} if self.square else {})

    def _add(self, sums: dict[str, Tensor], counts: dict[str, Tensor], places: Tensor, own: slice) -> None:
        samples = own.stop - own.start
        for name, values in sums.items():
            at = places if name in _BY_ROW else slice(None)
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(self._sums["diagonal"])
            # where all samples see the same pairs, sums of the mean map are means of the samples' sums
            mean = values[0] if len(values) > samples else values.sum(dim=0) / self.samples
            self._sums[name][0, at] += mean
            self._sums[name][own, at] += values[-samples:]
        for name, values in counts.items():
            if name in self._counts:
                at = places if name in _BY_ROW else slice(None)
                if own.start == 1:  # the pairs of the mean map are counted once, not with every part of the samples
                    self._counts[name][0, at] += values[0]
                self._counts[name][own, at] += values[-samples:]

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

    @property
    def has_removed(self) -> bool:
        """Whether the diagonal without the residual path was handed in."""
        return "removed" in self._sums

    def visible_pairs(self) -> int:
        """Number of pairs that count, over all samples and rows so far."""
        counts = [self._counts[name][1:].sum() for name in ("row", "diagonal") if name in self._counts]
        return int(torch.stack(counts).sum())

    def diagonal(self, residual_removed: bool = False) -> Statistic:
        """Mean of the diagonal."""
        values = self._diagonals(residual_removed)
        mean = values.nanmean(dim=1)
        note = "" if mean[0] == mean[0] else "no diagonal pair is visible"
        return Statistic(mean[0], rows=values[0], samples=mean[1:], note=note)

    def off_diagonal(self) -> Statistic:
        """Mean over all visible pairs off the diagonal; NaN with a note where there is none, as at T = 1."""
        self._check_square()
        sums, counts = self._sums["row"], self._counts["row"]
        mean = sums.sum(dim=1) / counts.sum(dim=1)
        note = "" if mean[0] == mean[0] else f"no off-diagonal pair is visible (T={self.queries})"
        return Statistic(mean[0], rows=sums[0] / counts[0], samples=mean[1:], note=note)

    def sink_ratio(self, residual_removed: bool = False) -> Statistic:
        """Mean of the diagonal over mean off the diagonal; 1 for a uniform map."""
        diagonal, others = self.diagonal(residual_removed), self.off_diagonal()
        ratio = diagonal.with_samples / others.with_samples
        note = diagonal.note or others.note or ("" if ratio[0] == ratio[0] else "every visible norm is zero")
        return Statistic(ratio[0], 1.0, samples=ratio[1:], note=note)

    def parroting_index(self, residual_removed: bool = False) -> Statistic:
        """Mean over rows of the diagonal's share; null: one over the number of visible keys, row by row."""
        diagonal = self._diagonals(residual_removed)
        share = diagonal / (diagonal + self._sums["row"])  # NaN where the whole row is zero: it has no shares
        null = torch.where(share.isnan(), _NAN, 1 / (self._counts["row"] + 1)).nanmean(dim=1)
        mean = share.nanmean(dim=1)
        note = "" if mean[0] == mean[0] else "no visible row has a norm above zero"
        return Statistic(mean[0], null[0], rows=share[0], samples=mean[1:], note=note)

    def lag_profile(self, residual_removed: bool = False) -> Float[Tensor, "map lag"]:
        """Mean over the pairs of one lag, of the mean map (index 0) and of each sample; NaN where it has no pair."""
        diagonal = self._diagonals(residual_removed)
        profile = (self._sums["lag"] / self._counts["lag"]).flip(-1)  # they stand in the order of j - i
        profile[:, self.keys - 1] = diagonal.nanmean(dim=1)
        return profile

    def primacy_profile(self, residual_removed: bool = False) -> Float[Tensor, "map key"]:
        """Mean over the visible queries of one key, of the mean map (index 0) and of every sample."""
        if not self.square and not residual_removed:
            return self._sums["key"] / self._counts["key"]
        diagonal = self._diagonals(residual_removed)
        sums, counts = self._sums["key"].clone(), self._counts["key"].clone()
        sums[:, self.times] += diagonal.nan_to_num()
        counts[:, self.times] += (~diagonal.isnan()).double()
        return sums / counts

    def arrays(self) -> dict[str, Float[Tensor, "map size"]]:
        """The sums and counts themselves, for files; :meth:`restored` takes them up again."""
        named = {f"sum_{name}": value for name, value in self._sums.items()}
        return named | {f"count_{name}": value for name, value in self._counts.items()}

    @classmethod
    def restored(
        cls, arrays: Mapping[str, Tensor], queries: int, keys: int, times: Int[Tensor, " row"]
    ) -> RowStatistics:
        """The accumulator that :meth:`arrays` was asked of."""
        self = cls(len(arrays["sum_row"]) - 1, queries, keys, times)
        self._sums = {name[4:]: value for name, value in arrays.items() if name.startswith("sum_")}
        self._counts = {name[6:]: value for name, value in arrays.items() if name.startswith("count_")}
        return self

    @classmethod
    def merged(cls, parts: Sequence[RowStatistics]) -> RowStatistics:
        """The sums of all samples of several accumulators, of the same rows.

        Raises:
            InputError: their samples see different pairs, so that the mean map is no mean of their mean maps.
        """
        first, samples = parts[0], sum(part.samples for part in parts)
        if not all(
            torch.equal(part._counts[name][0], first._counts[name][0]) for part in parts for name in ("row", "key")
        ):
            raise InputError(
                "the batches of samples see different pairs (padding or masks of their own), so their mean map cannot "
                "be summed up batch by batch; hand them in together, or keep the maps."
            )
        whole = cls(samples, first.queries, first.keys, first.times)
        for mine, name in ((whole._sums, "_sums"), (whole._counts, "_counts")):
            for key in getattr(first, name):
                own = [getattr(part, name)[key] for part in parts]
                mean = torch.stack([part.samples * value[0] for part, value in zip(parts, own, strict=True)]).sum(dim=0)
                mine[key] = torch.cat([mean[None] / samples, *(value[1:] for value in own)])
        return whole

    def _diagonals(self, residual_removed: bool) -> Tensor:
        """The diagonals ``(map, row)``, NaN where they do not count."""
        self._check_square()
        if residual_removed and not self.has_removed:
            raise InputError(
                "residual-removed statistics need the diagonal norms without the identity, and this map has none "
                "(the model's input and output differ in width or length); use residual_removed=False."
            )
        values = self._sums["removed" if residual_removed else "diagonal"]
        return torch.where(self._counts["diagonal"] > 0, values, _NAN)

    def _check_square(self) -> None:
        if not self.square:
            raise InputError(
                f"the map is {self.queries} x {self.keys} (query, key): without equal lengths there is no diagonal, "
                "so no sink ratio, parroting index or lag profile; use primacy_profile or the map itself."
            )

    def _check(self, rows: range | Tensor, times: Tensor, norms: Tensor, own: slice) -> None:
        expected = (own.stop - own.start, len(times), self.keys)
        known = len(times) > 0 and int(times.min()) >= 0 and int(times.max()) < self.queries
        if not known or (self._place[times] < 0).any() or tuple(norms.shape) != expected:
            raise InputError(
                f"{rows} with norms of shape {tuple(norms.shape)} does not fit {self.samples} maps of "
                f"{self.queries} x {self.keys}; hand in rows of them, (sample, row, key)."
            )


def shares(sums: Mapping[str, RowStatistics]) -> dict[str, dict[str, Statistic]]:
    """Share of each path, from the sums of its map; see :func:`sensitivity.statistics.path_shares`.

    Raises:
        InputError: no paths, or maps that are not square.
    """
    if not sums:
        raise InputError("there are no path norms to take shares of; measure with paths=True.")
    found: dict[str, dict[str, Statistic]] = {}
    for part in ("diagonal", "off_diagonal"):
        means = {name: getattr(value, part)().with_samples for name, value in sums.items()}
        total = torch.stack(list(means.values())).sum(dim=0)
        ratios = {name: mean / total for name, mean in means.items()}
        found[part] = {name: Statistic(ratio[0], samples=ratio[1:]) for name, ratio in ratios.items()}
    return found


def _with_mean(values: Tensor, among: Tensor | None) -> Tensor:
    """Puts the mean over the samples in which a pair is visible in front, where samples see different pairs."""
    if among is None:
        return values
    return torch.cat([(values.double() / among.clamp(min=1)).sum(dim=0, keepdim=True), values.double()])


def _check_finite(values: Float[Tensor, "part row key"], times: Tensor, first: int) -> None:
    bad = ~values.isfinite()
    if bad.any():
        sample, row, key = (int(part) for part in bad.nonzero()[0])
        raise InputError(
            f"the norm at (sample, query, key) = ({first + sample}, {int(times[row])}, {key}) is "
            f"{float(values[sample, row, key])}; a visible pair must be finite: "
            "mark pairs that do not count as not visible."
        )

"""Statistics of attention weights, accumulated row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.statistics.statistic import Statistic

_CHUNK = 1 << 18  # weights that are looked at together: what a core's cache holds
_BY_ROW = ("diagonal", "null", "entropy")
_NAN = float("nan")


class AttentionStatistics:
    """Sums over the rows of attention weights ``(sample, head, query, key)``; the mean is over samples and heads.

    Args:
        samples: number of samples.
        heads: number of heads.
        queries: rows of the weights.
        keys: columns of the weights.
        times: the query times of the rows that will be handed in, where those are not all.
    """

    def __init__(
        self, samples: int, heads: int, queries: int, keys: int, times: Int[Tensor, " row"] | None = None
    ) -> None:
        self.samples, self.heads, self.queries, self.keys = samples, heads, queries, keys
        self.times = torch.arange(queries) if times is None else times.cpu()
        self._place = torch.full((queries,), -1)
        self._place[self.times] = torch.arange(len(self.times))
        rows = (samples, heads, len(self.times))
        self._values = {name: torch.full(rows, _NAN, dtype=torch.float64) for name in _BY_ROW}
        sizes = {"key": keys, "key_null": keys, "count": 1}
        self._values |= {name: torch.zeros(samples, heads, size, dtype=torch.float64) for name, size in sizes.items()}

    @classmethod
    def of(
        cls,
        weights: Float[Tensor, "sample head query key"],
        attended: Tensor | None = None,
        times: Int[Tensor, " query"] | None = None,
        queries: int | None = None,
    ) -> AttentionStatistics:
        """Accumulates whole weight maps, a block of rows at a time; ``times`` of ``queries`` if they are some rows."""
        samples, heads, rows, keys = weights.shape
        sums = cls(samples, heads, rows if queries is None else queries, keys, times)
        step = max(1, _CHUNK // max(1, samples * heads * keys))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            some = None if attended is None else attended[:, :, part]
            sums.update(sums.times[part], weights[:, :, part], some)
        return sums

    def update(
        self,
        rows: range | Int[Tensor, " row"],
        weights: Float[Tensor, "part head row key"],
        attended: Bool[Tensor, "#part #head row key"] | None = None,
        *,
        samples: slice = slice(None),
    ) -> None:
        """Adds rows of the samples' weights; a row with no attended key (a padded query) is left out.

        Args:
            rows: the query times of these rows.
            weights: attention weights, before any dropout.
            attended: the pairs that the mask lets attend; all unless given.
            samples: which samples these are; all unless given.

        Raises:
            InputError: a row that does not sum to 1.
        """
        times = torch.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows.cpu()
        values = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if attended is not None:
            values = torch.where(attended, values, 0.0)
        visible = torch.full((1, 1, len(times)), weights.shape[-1]) if attended is None else attended.sum(dim=-1)
        counted = (visible > 0).expand(weights.shape[:-1])
        sums = values.sum(dim=-1, dtype=torch.float64)
        _check_rows(sums, counted, times, weights.dtype, samples.indices(self.samples)[0])
        share = torch.where(visible > 0, 1 / visible.double(), 0.0)  # of every key in a uniform row
        entropy = torch.special.entr(values).sum(dim=-1, dtype=torch.float64) / visible.double().log()
        found = {"entropy": torch.where(visible > 1, entropy, _NAN)}
        if self.queries == self.keys:
            pairs = (slice(None), slice(None), torch.arange(len(times)), times)
            shown = share if attended is None else share * attended[pairs]
            found["diagonal"] = torch.where(counted, values[pairs].double(), _NAN)
            found["null"] = torch.where(counted, shown, _NAN)
        for name, numbers in found.items():
            self._values[name][samples, :, self._place[times]] = numbers.cpu()
        self._values["key"][samples] += values.sum(dim=-2, dtype=torch.float64).cpu()
        null = (
            share.sum(dim=-1, keepdim=True)
            if attended is None
            else (share[..., None, :] @ attended.double())[..., 0, :]
        )
        self._values["key_null"][samples] += null.cpu()
        self._values["count"][samples] += counted.sum(dim=-1, keepdim=True).cpu()

    def arrays(self) -> dict[str, Float[Tensor, "sample head size"]]:
        """The sums themselves, for files; :meth:`restored` takes them up again."""
        return dict(self._values)

    @classmethod
    def restored(
        cls, arrays: Mapping[str, Tensor], queries: int, keys: int, times: Int[Tensor, " row"]
    ) -> AttentionStatistics:
        """The accumulator that :meth:`arrays` was asked of."""
        samples, heads, _ = arrays["count"].shape
        self = cls(samples, heads, queries, keys, times)
        self._values = {name: arrays[name] for name in self._values}
        return self

    @classmethod
    def merged(cls, parts: Sequence[AttentionStatistics]) -> AttentionStatistics:
        """The sums of all samples of several accumulators, of the same rows."""
        first = parts[0]
        whole = cls(sum(part.samples for part in parts), first.heads, first.queries, first.keys, first.times)
        whole._values = {name: torch.cat([part._values[name] for part in parts]) for name in first._values}
        return whole

    def diagonal(self) -> Statistic:
        """Mean weight on the diagonal; null: one over the visible keys, 0 in rows whose diagonal is hidden.

        Raises:
            InputError: the weights are not square.
        """
        if self.queries != self.keys:
            raise InputError(f"attention weights of {self.queries} x {self.keys} (query, key) have no diagonal.")
        return _over_rows(self._values["diagonal"], self._values["null"])

    def entropy(self) -> Statistic:
        """Mean entropy of a row over that of uniform weights; rows with a single visible key are left out."""
        entropy = self._values["entropy"]
        return _over_rows(entropy, torch.where(entropy.isnan(), _NAN, 1.0))

    def key_sink(self) -> Statistic:
        """Largest mean weight that one key receives; null: the same under uniform weights."""
        mass, null = (self._values[name] / self._values["count"] for name in ("key", "key_null"))
        mean = mass.nanmean(dim=(0, 1))
        if mean.isnan().any():
            return Statistic(_NAN, note="no row attends to any key")
        return Statistic(
            mean.max(),
            null.nanmean(dim=(0, 1)).max(),
            where=int(mean.argmax()),
            samples=mass.nanmean(dim=1).amax(dim=-1),
            heads=mass.nanmean(dim=0).amax(dim=-1),
        )


def _over_rows(values: Float[Tensor, "sample head query"], null: Float[Tensor, "sample head query"]) -> Statistic:
    """The mean over rows of the mean over samples and heads, and the means of every head and sample alone."""
    rows = values.nanmean(dim=(0, 1))
    return Statistic(
        rows.nanmean(),
        null.nanmean(dim=(0, 1)).nanmean(),
        rows=rows,
        samples=values.nanmean(dim=(1, 2)),
        heads=values.nanmean(dim=0).nanmean(dim=-1),
        note="" if not rows.isnan().all() else "no row has enough visible keys",
    )


def _check_rows(sums: Tensor, counted: Tensor, times: Tensor, dtype: torch.dtype, first: int) -> None:
    tolerance = 1e-4 if torch.finfo(dtype).eps < 1e-5 else 2e-2
    bad = counted & ~((sums - 1).abs() <= tolerance)
    if bad.any():
        sample, head, row = (int(part) for part in bad.nonzero()[0])
        raise InputError(
            f"attention weights of sample {first + sample}, head {head}, row {int(times[row])} sum to "
            f"{float(sums[sample, head, row]):.4g}, not 1: sink statistics need weights as the softmax gives them; "
            "hand in the weights before dropout (put the layer in eval mode, or take its pre-dropout weights)."
        )

"""Statistics of attention weights, accumulated row by row."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.statistics.statistic import Statistic

_CHUNK = 1 << 22  # entries of a map that are converted to float64 at a time
_NAN = float("nan")


class AttentionStatistics:
    """Sums over the rows of attention weights ``(sample, head, query, key)``; the mean is over samples and heads."""

    def __init__(self, samples: int, heads: int, queries: int, keys: int) -> None:
        self._shape = (samples, heads, queries, keys)
        rows = (samples, heads, queries)
        self._diagonal, self._null, self._entropy = (torch.full(rows, _NAN, dtype=torch.float64) for _ in range(3))
        self._key, self._key_null = _zeros(samples, heads, keys), _zeros(samples, heads, keys)
        self._count = _zeros(samples, heads, 1)

    @classmethod
    def of(cls, weights: Float[Tensor, "sample head query key"], attended: Tensor | None = None) -> AttentionStatistics:
        """Accumulates whole weight maps, a block of rows at a time."""
        samples, heads, queries, keys = weights.shape
        sums = cls(samples, heads, queries, keys)
        step = max(1, _CHUNK // max(1, samples * heads * keys))
        for start in range(0, queries, step):
            rows = range(start, min(start + step, queries))
            part = slice(rows.start, rows.stop)
            sums.update(rows, weights[:, :, part], None if attended is None else attended[:, :, part])
        return sums

    def update(
        self,
        rows: range,
        weights: Float[Tensor, "sample head row key"],
        attended: Bool[Tensor, "#sample #head row key"] | None = None,
    ) -> None:
        """Adds consecutive rows; a row with no attended key (a padded query) is left out.

        Args:
            rows: which queries these rows are, with step 1.
            weights: attention weights, before any dropout.
            attended: the pairs that the mask lets attend; all unless given.

        Raises:
            InputError: a row that does not sum to 1.
        """
        attended = torch.ones_like(weights, dtype=torch.bool) if attended is None else attended.expand_as(weights)
        visible = attended.sum(dim=-1)
        counted = visible > 0
        _check_rows(weights, counted, rows.start)
        values = torch.where(attended, weights, 0.0).double()
        uniform = attended / visible.clamp(min=1).double()[..., None]
        part = slice(rows.start, rows.stop)
        if self._shape[2] == self._shape[3]:
            row = torch.arange(len(rows), device=weights.device)
            pairs = (slice(None), slice(None), row, row + rows.start)
            self._diagonal[..., part] = torch.where(counted, values[pairs], _NAN).cpu()
            self._null[..., part] = torch.where(counted, uniform[pairs], _NAN).cpu()
        entropy = torch.special.entr(values).sum(dim=-1) / visible.double().log()
        self._entropy[..., part] = torch.where(visible > 1, entropy, _NAN).cpu()
        self._key += torch.where(counted[..., None], values, 0.0).sum(dim=-2).cpu()
        self._key_null += uniform.sum(dim=-2).cpu()
        self._count += counted.sum(dim=-1, keepdim=True).cpu()

    def diagonal(self) -> Statistic:
        """Mean weight on the diagonal; null: one over the visible keys, 0 in rows whose diagonal is hidden.

        Raises:
            InputError: the weights are not square.
        """
        if self._shape[2] != self._shape[3]:
            raise InputError(f"attention weights of {self._shape[2]} x {self._shape[3]} (query, key) have no diagonal.")
        return _over_rows(self._diagonal, self._null)

    def entropy(self) -> Statistic:
        """Mean entropy of a row over that of uniform weights; rows with a single visible key are left out."""
        return _over_rows(self._entropy, torch.where(self._entropy.isnan(), _NAN, 1.0))

    def key_sink(self) -> Statistic:
        """Largest mean weight that one key receives; null: the same under uniform weights."""
        mass, null = self._key / self._count, self._key_null / self._count
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


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


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


def _check_rows(weights: Tensor, counted: Tensor, start: int) -> None:
    sums = weights.double().sum(dim=-1)
    tolerance = 1e-4 if torch.finfo(weights.dtype).eps < 1e-5 else 2e-2
    bad = counted & ~((sums - 1).abs() <= tolerance)
    if bad.any():
        sample, head, row = (int(part) for part in bad.nonzero()[0])
        raise InputError(
            f"attention weights of sample {sample}, head {head}, row {start + row} sum to "
            f"{float(sums[sample, head, row]):.4g}, not 1: sink statistics need weights as the softmax gives them; "
            "hand in the weights before dropout (put the layer in eval mode, or take its pre-dropout weights)."
        )

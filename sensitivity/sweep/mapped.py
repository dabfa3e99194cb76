"""The record of a layer at one length from its mean maps and the statistics of every sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian import closed_form
from sensitivity.jacobian.closed_form import Tile
from sensitivity.jacobian.norms import Norm
from sensitivity.jacobian.visibility import attended_and_counted
from sensitivity.statistics import AttentionStatistics, RowStatistics, Statistic
from sensitivity.sweep.record import OFF_PATHS, ON_PATHS, Record
from sensitivity.sweep.sums import LayerSums, of_rows, of_weights, profiles_of


class MapSums(LayerSums):
    """Holds a few maps, never one for each sample; arguments as of ``LayerSums``."""

    def __init__(self, name: str, length: int, norm: Norm, bounds: Sequence[str] = ()) -> None:
        super().__init__(name, length, norm, bounds)
        self._samples: dict[str, list[Tensor]] = {}
        self._nulls: list[float] = []
        self._maps = {name: self._zeros(2) for name in ("norms", *OFF_PATHS, "attention", "count", "attended")}
        self._lines = {name: self._zeros(1) for name in ("diagonal", "residual", "query")}
        self._removed = True

    def finish(self) -> Record:
        """The statistics of everything so far."""
        count = self._maps["count"].clamp_min(1)
        visible = self._maps["count"] > 0
        mean = {name: self._maps[name] / count for name in ("norms", *OFF_PATHS)}
        on = count.diagonal()
        lines = {name: values / on for name, values in self._lines.items() if name != "diagonal" or self._removed}
        sums = RowStatistics.of(mean["norms"][None], visible[None], _first(lines.get("diagonal")))
        statistics = self._with_samples(of_rows(sums, self._removed))
        statistics |= self._path_statistics(mean, visible, lines)
        statistics |= self._attention_statistics()
        maps = {name: values.masked_fill(~visible, torch.nan) for name, values in mean.items()}
        maps |= lines | {
            "attention": self._mean_attention(),
            "attended": self._maps["attended"] > 0,
            "visible": visible,
        }
        return self._record(statistics, profiles_of(sums, self._removed), maps)

    # -- taking tiles in -----------------------------------------------------------------------------------------

    def _measure(self, attention: SoftmaxAttention, tokens: Float[Tensor, "sample time dim"]) -> None:
        stream = closed_form.tiles(attention, tokens, norm=self.norm, paths=True)
        for _, tiles in groupby(stream, key=lambda tile: (tile.samples.start, tile.samples.stop)):
            self._take(attention, tiles)

    def _take(self, attention: SoftmaxAttention, tiles: Iterator[Tile]) -> None:
        """All rows of some samples."""
        sums: RowStatistics | None = None
        weights: AttentionStatistics | None = None
        paths: dict[str, list[Tensor]] = {}
        for tile in tiles:
            rows = range(int(tile.rows[0]), int(tile.rows[-1]) + 1)
            samples = tile.samples.stop - tile.samples.start
            if sums is None or weights is None:
                sums = RowStatistics(samples, self.length)
                weights = AttentionStatistics(samples, attention.heads, self.length, self.length)
            masks = attended_and_counted(attention.sample(tile.samples), self.length, tile.rows)
            attended = masks[0].expand(samples, attention.heads, -1, -1)
            visible = masks[1].expand(samples, -1, -1)
            maps = tile.maps
            assert maps.attention is not None
            sums.update(rows, maps.total, visible, maps.diagonal)
            weights.update(rows, maps.attention, attended)
            self._add_maps(tile, rows, attended, visible)
            for name, values in _path_sums(tile, rows, visible).items():
                paths.setdefault(name, []).append(values)
        assert sums is not None
        assert weights is not None
        self._add_samples(sums, weights, {name: torch.stack(values).sum(dim=0) for name, values in paths.items()})

    def _add_maps(self, tile: Tile, rows: range, attended: Tensor, visible: Tensor) -> None:
        part, maps = slice(rows.start, rows.stop), tile.maps
        for name, values in {"norms": maps.total, **{name: maps.paths[name] for name in OFF_PATHS}}.items():
            self._maps[name][part] += torch.where(visible, values, 0.0).double().sum(dim=0).cpu()
        self._maps["count"][part] += visible.sum(dim=0).cpu()
        seen = attended.any(dim=-1, keepdim=True)
        assert maps.attention is not None
        weights = torch.where(seen, maps.attention, 0.0).double()
        self._maps["attention"][part] += weights.mean(dim=1).sum(dim=0).cpu()
        self._maps["attended"][part] += attended.any(dim=1).sum(dim=0).cpu()
        shown = _on_diagonal(visible, rows)
        lines = {name: _on_diagonal(maps.paths[name], rows) for name in ("residual", "query")}
        if maps.diagonal is None:
            self._removed = False
        else:
            lines["diagonal"] = maps.diagonal
        for name, values in lines.items():
            self._lines[name][part] += torch.where(shown, values, 0.0).double().sum(dim=0).cpu()

    def _add_samples(self, sums: RowStatistics, weights: AttentionStatistics, paths: dict[str, Tensor]) -> None:
        """The statistics of every sample alone."""
        found = of_rows(sums, self._removed) | of_weights(weights)
        values = {name: statistic.samples for name, statistic in found.items() if statistic.samples is not None}
        values |= {f"off_diagonal_{name}": paths[f"off_{name}"] / paths["off_count"] for name in OFF_PATHS}
        values |= {f"diagonal_{name}": paths[f"on_{name}"] / paths["on_count"] for name in ON_PATHS}
        for name, samples in values.items():
            self._samples.setdefault(name, []).append(samples)
        self._nulls.extend([found["diagonal_attention"].null] * len(values["diagonal_attention"]))

    # -- finishing -----------------------------------------------------------------------------------------------

    def _path_statistics(
        self, mean: dict[str, Tensor], visible: Tensor, lines: dict[str, Tensor]
    ) -> dict[str, Statistic]:
        shown = visible.diagonal()
        found = {}
        for name in OFF_PATHS:
            sums = RowStatistics.of(mean[name][None], visible[None])
            found[f"off_diagonal_{name}"] = sums.off_diagonal()
            found[f"diagonal_{name}"] = sums.diagonal()
        for name in ("residual", "query"):
            found[f"diagonal_{name}"] = Statistic(lines[name][shown].mean())
        return self._with_samples(found)

    def _attention_statistics(self) -> dict[str, Statistic]:
        names = ("diagonal_attention", "row_entropy", "key_sink")
        on_diagonal, entropy, key = (torch.cat(self._samples[name]) for name in names)
        null = torch.tensor(self._nulls, dtype=torch.float64).nanmean()
        mean = AttentionStatistics.of(self._mean_attention()[None, None], self._maps["attended"][None, None] > 0)
        sink = mean.key_sink()
        note = "" if self.length > 1 else "no row has enough visible keys"
        return {
            "diagonal_attention": Statistic(on_diagonal.nanmean(), null, samples=on_diagonal),
            "row_entropy": Statistic(entropy.nanmean(), 1.0, samples=entropy, note=note),
            "key_sink": Statistic(float(sink), sink.null, where=sink.where, samples=key),
        }

    def _mean_attention(self) -> Float[Tensor, "query key"]:
        """Mean weights over samples and heads, zero in rows that attend to nothing."""
        sums = self._maps["attention"]
        return sums / sums.sum(dim=-1, keepdim=True).clamp_min(1e-300)

    def _with_samples(self, found: dict[str, Statistic]) -> dict[str, Statistic]:
        return {
            name: Statistic(float(of_mean), of_mean.null, samples=torch.cat(self._samples[name]), note=of_mean.note)
            for name, of_mean in found.items()
        }

    def _zeros(self, axes: int) -> Tensor:
        return torch.zeros((self.length,) * axes, dtype=torch.float64)


def _path_sums(tile: Tile, rows: range, visible: Tensor) -> dict[str, Tensor]:
    """Sums over the rows of a tile, sample by sample: each path off and on the diagonal, and the pairs counted."""
    shown = _on_diagonal(visible, rows)
    paths = {name: torch.where(visible, values, 0.0).double() for name, values in tile.maps.paths.items()}
    found = {f"on_{name}": _on_diagonal(values, rows).sum(dim=-1) for name, values in paths.items()}
    found |= {f"off_{name}": paths[name].sum(dim=(1, 2)) - found[f"on_{name}"] for name in OFF_PATHS}
    found |= {"on_count": shown.sum(dim=-1), "off_count": visible.sum(dim=(1, 2)) - shown.sum(dim=-1)}
    return {name: values.double().cpu() for name, values in found.items()}


def _on_diagonal(values: Tensor, rows: range) -> Tensor:
    """The entries of some rows that lie on the diagonal, ``(sample, row)``."""
    return values[..., rows.start : rows.stop].diagonal(dim1=-2, dim2=-1)


def _first(values: Tensor | None) -> Tensor | None:
    return None if values is None else values[None]

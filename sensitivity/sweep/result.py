"""What a sweep found: every layer at every length, with fits over the lengths."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sensitivity import checks
from sensitivity.errors import InputError
from sensitivity.fit import MINIMUM_LENGTHS, Decay, decay_exponent
from sensitivity.result import SensitivityMap
from sensitivity.sweep import summary
from sensitivity.sweep.record import Record

if TYPE_CHECKING:
    import xarray

REMOVED = "_residual_removed"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """Sensitivity of every layer at every length.

    Attributes:
        records: one record for each layer and length, by ``(layer, length)``.
        norm: ``frobenius``, ``rms`` or ``spectral``.
        failures: the lengths that could not be measured, and why.
        provenance: how the numbers came about: versions, seed, dtype, samples, model, data.
    """

    records: dict[tuple[str, int], Record]
    norm: str = "frobenius"
    failures: dict[int, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the model."""
        return tuple(dict.fromkeys(layer for layer, _ in self.records))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that were measured, ascending."""
        return tuple(sorted({length for _, length in self.records}))

    def record(self, layer: str, length: int | None = None) -> Record:
        """What was found at one layer and length (the longest one by default).

        Raises:
            InputError: no such layer or length; the message lists those that were measured.
        """
        if layer not in self.layers:
            raise InputError(f"unknown layer {layer!r}; this sweep has {', '.join(self.layers)}.")
        length = self.lengths[-1] if length is None else length
        if length not in self.lengths or (layer, length) not in self.records:
            raise InputError(f"length {length} was not measured; this sweep has {', '.join(map(str, self.lengths))}.")
        return self.records[layer, length]

    def statistic(self, layer: str, name: str) -> dict[int, float]:
        """A statistic by length; NaN where it is undefined.

        Raises:
            InputError: no such layer or statistic; the message lists those that were measured.
        """
        self._check_statistic(layer, name)
        return {length: float(self.record(layer, length).statistics.get(name, math.nan)) for length in self.lengths}

    def decay(
        self,
        layer: str,
        statistic: str = "off_diagonal",
        *,
        lengths: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Decay | None:
        """The decay exponent of a mean sensitivity over the lengths, its interval from resampling independent units.

        Args:
            layer: the layer.
            statistic: ``off_diagonal``, ``diagonal``, ``diagonal_residual_removed``, or a path's, such as
                ``off_diagonal_key``.
            lengths: fit these only; all by default. Where logits vary much, 1/T sets in only at long sequences, and the
                exponent over the longest ones tells more than that over all.
            seed: of the bootstrap; the sweep's own by default.

        Returns:
            The fit; None with fewer than four lengths at which the statistic is above zero.

        Raises:
            InputError: no such layer, length or statistic, where the message lists those that were measured; no seed.
        """
        self._check_statistic(layer, statistic)
        if seed is not None:
            checks.seed(seed)
        wanted = self.lengths if lengths is None else lengths
        known = [length for length in wanted if statistic in self.record(layer, length).statistics]
        units = {length: self.record(layer, length).by_unit(statistic) for length in known}
        usable = [length for length in known if all(value > 0 for value in units[length].values())]
        if len(usable) < MINIMUM_LENGTHS:
            return None
        common = sorted(set.intersection(*(set(units[length]) for length in usable)))
        if not common:
            return None
        seed = int(self.provenance.get("seed", 0)) if seed is None else seed
        return decay_exponent(usable, [[units[length][unit] for length in usable] for unit in common], seed=seed)

    def _check_statistic(self, layer: str, name: Any) -> None:
        """Refuses a name that no statistic has; those without the residual are there for square layers only."""
        known = self.record(layer).statistics
        if not isinstance(name, str) or (name not in known and name not in {f"{other}{REMOVED}" for other in known}):
            raise InputError(f"unknown statistic {name!r}; {layer} has {', '.join(known)}.")

    def kept(self, layer: str) -> tuple[int, ...]:
        """The lengths whose mean maps were kept.

        Raises:
            InputError: no such layer; the message lists those that were measured.
        """
        self.record(layer)
        return tuple(length for length in self.lengths if self.records[layer, length].maps)

    def map(self, layer: str, length: int | None = None) -> SensitivityMap:
        """The mean map over samples, as a map of one sample.

        Raises:
            InputError: the map of this length was not kept; the message lists those that were.
        """
        record = self.record(layer, length)
        if not record.maps:
            kept = ", ".join(map(str, self.kept(layer))) or "none"
            raise InputError(f"the map of length {record.length} was not kept; kept are: {kept}.")
        maps = record.maps
        paths = {name: maps[name][None] for name in ("value", "key")}
        paths = {
            "residual": torch.diag_embed(maps["residual"])[None],
            **paths,
            "query": torch.diag_embed(maps["query"])[None],
        }
        return SensitivityMap(
            norms=maps["norms"][None],
            diagonal=maps["diagonal"][None] if "diagonal" in maps else None,
            paths=paths,
            attention=maps["attention"][None, None],
            visible=maps["visible"][None],
            attended=maps["attended"][None, None],
            norm=self.norm,
            name=layer,
            provenance=self.provenance | {"length": record.length},
            notes=[f"mean over {len(record.groups)} samples"],
        )

    def summary(self) -> dict[str, Any]:
        """Plain values, as ``summary.json`` holds them: strict JSON, None where a number is undefined."""
        return summary.summary(self)

    # -- files ---------------------------------------------------------------------------------------------------

    def to_xarray(self) -> xarray.Dataset:
        """The statistics over (layer, length, sample) and the bounds over (layer, length, bound), labelled."""
        return _netcdf().statistics(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes netCDF-4, whole or not at all: statistics, and a group ``T12`` of profiles and maps for every length.

        Raises:
            InputError: the place cannot be written to.
        """
        _netcdf().save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sweep:
        """Reads a sweep that :meth:`save` wrote.

        Raises:
            InputError: no such file, a directory, a truncated file, or another kind of file.
        """
        return _netcdf().load(path)

    @classmethod
    def merge(cls, parts: Sequence[Sweep], provenance: Mapping[str, Any] | None = None) -> Sweep:
        """Joins sweeps of different lengths into one; the first one names the norm and the order of layers."""
        records = {key: record for part in parts for key, record in part.records.items()}
        order = {layer: place for place, layer in enumerate(dict.fromkeys(layer for layer, _ in records))}
        records = dict(sorted(records.items(), key=lambda item: (order[item[0][0]], item[0][1])))
        failures = {length: reason for part in parts for length, reason in part.failures.items()}
        return cls(records, parts[0].norm, failures, dict(parts[0].provenance if provenance is None else provenance))

    def __repr__(self) -> str:
        layers = self.layers if len(self.layers) <= 4 else (*self.layers[:3], f"... {len(self.layers)} layers")
        lines = [f"Sweep: {', '.join(layers)}; T={', '.join(map(str, self.lengths))}; {self.norm} norm"]
        for layer in self.layers[:12]:
            fit = self.decay(layer)
            last = self.record(layer).statistics["off_diagonal"]
            lines.append(f"  {layer:<24} off the diagonal {last:.4g}" + (f", {fit}" if fit else ""))
        lines += [f"  T={length} failed: {reason}" for length, reason in self.failures.items()]
        return "\n".join(lines)


def _netcdf() -> Any:
    """The file format, which needs xarray; loaded when a file is written or read."""
    return importlib.import_module("sensitivity.sweep.netcdf")

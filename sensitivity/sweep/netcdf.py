"""Sweeps as labelled arrays, and as netCDF files with a group for every length."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray
from torch import Tensor

from sensitivity import files
from sensitivity.errors import InputError
from sensitivity.result import labels
from sensitivity.statistics import Statistic
from sensitivity.sweep.bounds import Verdict
from sensitivity.sweep.record import Record
from sensitivity.sweep.summary import strict

if TYPE_CHECKING:
    from sensitivity.sweep.result import Sweep

KIND = "attention-sensitivity sweep"
VERSION = 1
_COUNTS = ("violations", "blocks")
_NUMBERS = ("tightness", "closest", "bound", "measured", "slack")
_PAIR = ("query", "key")
_DIMS = {
    "lag": ("lag",),
    "lag_residual_removed": ("lag",),
    "primacy": ("key",),
    "norms": _PAIR,
    "value": _PAIR,
    "key": _PAIR,
    "attention": _PAIR,
    "attended": _PAIR,
    "visible": _PAIR,
    "diagonal": ("query",),
    "residual": ("query",),
    "query": ("query",),
}
_PREFIX = {name: "profile" if name in ("lag", "lag_residual_removed", "primacy") else "map" for name in _DIMS}


def statistics(found: Sweep) -> xarray.Dataset:
    """Statistics over (layer, length), those of each sample over (layer, length, sample), and the bounds."""
    names = list(dict.fromkeys(name for record in found.records.values() for name in record.statistics))
    samples = max(len(record.groups) for record in found.records.values())
    shape = (len(found.layers), len(found.lengths))
    arrays: dict[str, Any] = {}
    for name in names:
        mean, null, each = np.full(shape, np.nan), np.full(shape, np.nan), np.full((*shape, samples), np.nan)
        for place, record in _places(found):
            one = record.statistics.get(name)
            if one is not None:
                mean[place], null[place] = float(one), one.null
                if one.samples is not None:
                    each[place][: len(one.samples)] = one.samples.numpy()
        arrays[name] = (("layer", "length"), mean, {"long_name": f"{name} of the mean map", "units": "1"})
        arrays[f"{name}_samples"] = (("layer", "length", "sample"), each, {"long_name": name, "units": "1"})
        if not np.isnan(null).all():
            arrays[f"{name}_null"] = (
                ("layer", "length"),
                null,
                {"long_name": f"{name} of a uniform map", "units": "1"},
            )
    groups = np.full((*shape, samples), -1, dtype=np.int64)
    for place, record in _places(found):
        groups[place][: len(record.groups)] = record.groups.numpy()
    arrays["unit"] = (("layer", "length", "sample"), groups, {"long_name": "independent unit; -1: no such sample"})
    arrays |= _bounds(found, shape)
    coordinates = {"layer": list(found.layers), "length": list(found.lengths), "sample": list(range(samples))}
    bounds = _bound_names(found)
    if bounds:
        coordinates["bound"] = list(bounds)
    attributes = {"kind": KIND, "version": VERSION, "norm": found.norm} | {
        name: json.dumps(strict(value))
        for name, value in {
            "failures": {str(length): text for length, text in found.failures.items()},
            "provenance": found.provenance,
            "notes": [[r.name, r.length, name, s.note, s.where] for r, name, s in _noted(found)],
            "verdicts": [[r.name, r.length, [v.plain() for v in r.bounds.values()]] for r in found.records.values()],
        }.items()
    }
    return xarray.Dataset(arrays, coordinates, attributes)


def maps(found: Sweep, length: int) -> xarray.Dataset:
    """Profiles of every layer at one length, and its mean maps where they were kept."""
    arrays: dict[str, Any] = {}
    records = [record for record in found.records.values() if record.length == length]
    for name, dims in _DIMS.items():
        values = [(record.profiles | record.maps).get(name) if name in record.profiles or record.maps else None
                  for record in records]  # fmt: skip
        if any(value is None for value in values):
            continue
        stacked = torch.stack([value for value in values if value is not None])
        arrays[f"{_PREFIX[name]}_{name}"] = (("layer", *dims), stacked.numpy())
    coordinates = {
        "layer": [record.name for record in records],
        "lag": list(range(1 - length, length)),
        "query": list(range(length)),
        "key": list(range(length)),
    }
    return xarray.Dataset(arrays, coordinates, {"length": length})


def save(found: Sweep, path: str | os.PathLike[str]) -> None:
    """Writes the statistics at the root, and the group ``T<length>`` for every length."""
    root = statistics(found)
    with files.replacing(path) as temporary:
        _write(root, temporary, "w", None)
        for length in found.lengths:
            _write(maps(found, length), temporary, "a", f"T{length}")


def load(path: str | os.PathLike[str]) -> Sweep:
    """Reads what :func:`save` wrote; errors as in ``Sweep.load``."""
    from sensitivity.sweep.result import Sweep

    root = labels.read(path, "Sweep")
    if root.attrs.get("kind") != KIND:
        raise InputError(f"{path} is a netCDF file, but not a sweep; give a file that Sweep.save wrote.")
    if int(root.attrs["version"]) > VERSION:
        raise InputError(
            f"{path} was written in version {root.attrs['version']} of the sweep format, and this release reads up to "
            f"{VERSION}; update attention-sensitivity."
        )
    stored = {name: json.loads(root.attrs[name]) for name in ("failures", "provenance", "notes", "verdicts")}
    notes = {(layer, length, name): (note, where) for layer, length, name, note, where in stored["notes"]}
    verdicts = {
        (layer, length): [Verdict.from_plain(one) for one in many] for layer, length, many in stored["verdicts"]
    }
    records: dict[tuple[str, int], Record] = {}
    groups = {int(length): labels.read(path, "Sweep", f"T{int(length)}") for length in root["length"].values}
    for layer in map(str, root["layer"].values):
        for length, group in groups.items():
            if (layer, length) in verdicts:
                here = root.sel(layer=layer, length=length)
                statistic = _statistics(here, {name: notes.get((layer, length, name)) for name in _names(root)})
                units = torch.from_numpy(here["unit"].values.copy())
                profiles, kept = _arrays(group.sel(layer=layer))
                bounds = {one.name: one for one in verdicts[layer, length]}
                records[layer, length] = Record(layer, length, statistic, units[units >= 0], profiles, kept, bounds)
    failures = {int(length): text for length, text in stored["failures"].items()}
    return Sweep(records, str(root.attrs["norm"]), failures, stored["provenance"])


def _places(found: Sweep) -> list[tuple[tuple[int, int], Record]]:
    layers = {name: place for place, name in enumerate(found.layers)}
    lengths = {length: place for place, length in enumerate(found.lengths)}
    return [((layers[layer], lengths[length]), record) for (layer, length), record in found.records.items()]


def _noted(found: Sweep) -> list[tuple[Record, str, Statistic]]:
    every = ((record, name, one) for record in found.records.values() for name, one in record.statistics.items())
    return [(record, name, one) for record, name, one in every if one.note or one.where is not None]


def _bound_names(found: Sweep) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for record in found.records.values() for name in record.bounds))


def _bounds(found: Sweep, shape: tuple[int, int]) -> dict[str, Any]:
    names = _bound_names(found)
    if not names:
        return {}
    arrays: dict[str, Any] = {}
    for field in (*_COUNTS, *_NUMBERS):
        values = np.zeros((*shape, len(names)), np.int64) if field in _COUNTS else np.full((*shape, len(names)), np.nan)
        for place, record in _places(found):
            for index, name in enumerate(names):
                if name in record.bounds:
                    values[(*place, index)] = getattr(record.bounds[name], field)
        label = {"bound": "mean of the bound", "measured": "mean of what was measured"}.get(field, field)
        arrays[f"bound_{field}"] = (("layer", "length", "bound"), values, {"long_name": label})
    return arrays


def _write(dataset: xarray.Dataset, path: Path, mode: Any, group: str | None) -> None:
    encoding: dict[str, dict[str, Any]] = {
        str(name): {"zlib": True, "complevel": 1} if array.ndim > 1 and array.dtype.kind in "bf" else {}
        for name, array in dataset.data_vars.items()
    }
    for name, array in dataset.data_vars.items():
        if array.dtype.kind == "f":
            encoding[str(name)]["_FillValue"] = None
    dataset.to_netcdf(path, mode=mode, group=group, engine="h5netcdf", encoding=encoding)


def _names(root: xarray.Dataset) -> list[str]:
    return [str(name).removesuffix("_samples") for name in root.data_vars if str(name).endswith("_samples")]


def _statistics(here: xarray.Dataset, notes: dict[str, Any]) -> dict[str, Statistic]:
    units = here["unit"].values >= 0
    found = {}
    for name, noted in notes.items():
        note, where = noted or ("", None)
        each = torch.from_numpy(here[f"{name}_samples"].values[units].copy())
        null = float(here[f"{name}_null"]) if f"{name}_null" in here else math.nan
        found[name] = Statistic(float(here[name]), null, samples=each, note=note, where=where)
    return found


def _arrays(group: xarray.Dataset) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Profiles and maps of one layer."""
    kinds: dict[str, dict[str, Tensor]] = {"profile": {}, "map": {}}
    for name, kind in _PREFIX.items():
        if f"{kind}_{name}" in group:
            values = group[f"{kind}_{name}"].values
            kinds[kind][name] = torch.from_numpy(
                np.array(values, dtype=bool if name in ("visible", "attended") else float)
            )
    return kinds["profile"], kinds["map"]

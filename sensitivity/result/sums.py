"""The sums behind statistics as labelled arrays, and as netCDF files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray
from torch import Tensor

from sensitivity.result import labels
from sensitivity.statistics import AttentionStatistics, RowStatistics

if TYPE_CHECKING:
    from sensitivity.result.statistics import SensitivityStatistics

KIND = "attention-sensitivity statistics"
VERSION = 1
_DIM = {"row": "query", "diagonal": "query", "removed": "query", "key": "key", "lag": "offset"}
_MEANING = {
    "row": "over the keys of one query, without the diagonal",
    "key": "over the queries of one key, without the diagonal",
    "lag": "over the pairs of one offset, without the diagonal",
    "diagonal": "of the diagonal",
    "removed": "of the diagonal without the residual path",
}
_WEIGHTS = {"diagonal": "query", "null": "query", "entropy": "query", "key": "key", "key_null": "key", "count": "one"}


def dataset(found: SensitivityStatistics) -> xarray.Dataset:
    """The sums and counts of the whole, of every path and of every head, and those of the attention weights."""
    groups = {"whole": found.whole} | {f"path_{name}": sums for name, sums in found.paths.items()}
    groups |= {f"head_{head}": sums for head, sums in enumerate(found.heads)}
    arrays: dict[str, xarray.Variable] = {}
    for group, sums in groups.items():
        arrays |= {f"{group}_{name}": _variable(name, value, found.norm) for name, value in sums.arrays().items()}
    if found.attention is not None:
        arrays |= weights(found.attention)
    coordinates = labels.coordinates(arrays, found.query_times)
    coordinates["map"] = xarray.Variable(
        ("map",), np.arange(-1, found.samples), {"long_name": "sample; -1 is the mean map", "units": "1"}
    )
    if found.square:
        offsets = np.arange(1 - found.length, found.keys)
        coordinates["offset"] = xarray.Variable(("offset",), offsets, {"long_name": "key - query", "units": "1"})
    attributes = labels.attributes(found, KIND, VERSION)
    attributes |= {"length": found.length, "keys": found.keys, "heads": len(found.heads)}
    return xarray.Dataset(arrays, coordinates, attributes)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the fields of the statistics that ``save`` wrote; errors as in ``labels.opened``."""
    labelled = labels.opened(path, KIND, VERSION, "SensitivityStatistics")
    fields = labels.fields(labelled)
    queries, keys = int(labelled.attrs["length"]), int(labelled.attrs["keys"])
    times = torch.from_numpy(labelled["query"].to_numpy().copy())

    def group(name: str) -> RowStatistics:
        return RowStatistics.restored(_group(labelled, name), queries, keys, times)

    paths = {name: group(f"path_{name}") for name in fields.pop("paths")}
    heads = tuple(group(f"head_{head}") for head in range(int(labelled.attrs["heads"])))
    return fields | {
        "whole": group("whole"),
        "paths": paths,
        "heads": heads,
        "attention": restored_weights(labelled, queries, keys, times),
    }


def weights(sums: AttentionStatistics) -> dict[str, xarray.Variable]:
    """The sums over attention weights, by name."""
    return {
        f"weights_{name}": xarray.Variable(
            ("sample", "head", _WEIGHTS[name]), value.numpy(), {"long_name": f"sums over weights: {name}", "units": "1"}
        )
        for name, value in sums.arrays().items()
    }


def restored_weights(labelled: xarray.Dataset, queries: int, keys: int, times: Tensor) -> AttentionStatistics | None:
    """The sums over attention weights in a file, if there are any."""
    found = _group(labelled, "weights")
    return AttentionStatistics.restored(found, queries, keys, times) if found else None


def _group(labelled: xarray.Dataset, name: str) -> Mapping[str, Tensor]:
    """The arrays of one accumulator."""
    mine = {str(full): full for full in labelled.data_vars if str(full).startswith(f"{name}_")}
    return {full[len(name) + 1 :]: torch.from_numpy(labelled[key].to_numpy().copy()) for full, key in mine.items()}


def _variable(name: str, value: Tensor, norm: str) -> xarray.Variable:
    kind, _, part = name.partition("_")
    what = "sum of norms" if kind == "sum" else "number of pairs"
    attributes = {"long_name": f"{what} {_MEANING[part]}", "units": "1"} | ({"norm": norm} if kind == "sum" else {})
    return xarray.Variable(("map", _DIM[part]), value.numpy(), attributes)

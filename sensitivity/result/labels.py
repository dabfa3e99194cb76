"""What the files of measurements have in common: labels, attributes, and how they are written and opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray
from torch import Tensor

from sensitivity import files
from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.result.measurement import Measurement


def coordinates(arrays: Mapping[str, xarray.Variable], times: Tensor) -> dict[str, xarray.Variable]:
    """What the places along the common dimensions are: query times, key times, samples and heads."""
    sizes = {str(dim): size for array in arrays.values() for dim, size in array.sizes.items()}
    labels = {"sample": "sample", "query": "output time i", "key": "input time j", "head": "attention head"}
    places = {dim: times.numpy() if dim == "query" else np.arange(sizes[dim]) for dim in labels if dim in sizes}
    return {
        dim: xarray.Variable((dim,), place, {"long_name": labels[dim], "units": "1"}) for dim, place in places.items()
    }


def attributes(found: Measurement, kind: str, version: int) -> dict[str, Any]:
    """What a file says besides its arrays."""
    given: dict[str, Any] = {
        "kind": kind,
        "version": version,
        "name": found.name,
        "norm": found.norm,
        "paths": json.dumps(list(found.path_names)),
        "notes": json.dumps(found.notes),
        "provenance": json.dumps(found.provenance, default=_plain),
    }
    return given | {dim: getattr(found, dim) for dim in ("in_dim", "out_dim") if getattr(found, dim) is not None}


def save(labelled: xarray.Dataset, path: str | os.PathLike[str]) -> None:
    """Writes the dataset as netCDF-4, whole or not at all; masks are compressed, numbers are stored as they are."""
    encoding: dict[str, dict[str, Any]] = {
        str(name): {"zlib": True, "complevel": 1} if array.dtype == bool else {"_FillValue": None}
        for name, array in labelled.data_vars.items()
    }
    with files.replacing(path) as temporary:
        labelled.to_netcdf(temporary, engine="h5netcdf", encoding=encoding)


def opened(path: str | os.PathLike[str], kind: str, version: int, maker: str) -> xarray.Dataset:
    """The content of a file of this kind.

    Raises:
        InputError: no such file, a directory, a damaged file, another kind of file, or one of a later release.
    """
    labelled = read(path, maker)
    what = kind.removeprefix("attention-")
    if labelled.attrs.get("kind") != kind:
        raise InputError(f"{path} is a netCDF file, but holds no {what}; give a file that {maker}.save wrote.")
    written = int(labelled.attrs["version"])
    if written > version:
        raise InputError(
            f"{path} was written in version {written} of the {what.split()[-1]} format, and this "
            f"release reads up to {version}; update attention-sensitivity."
        )
    return labelled


def fields(labelled: xarray.Dataset) -> dict[str, Any]:
    """What a file says besides its arrays, as fields of a measurement; of the paths the names."""
    given = labelled.attrs
    found: dict[str, Any] = {name: json.loads(given[name]) for name in ("paths", "notes", "provenance")}
    found |= {name: str(given[name]) for name in ("name", "norm")}
    return found | {name: int(given[name]) for name in ("in_dim", "out_dim") if name in given}


def read(path: str | os.PathLike[str], maker: str, group: str | None = None) -> xarray.Dataset:
    """Everything in a file, or in a group of it.

    Raises:
        InputError: no such file, a directory, or one that is damaged or no netCDF; ``maker`` is what wrote a good one.
    """
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no file {path}; give a file that {maker}.save wrote.")
    if place.is_dir():
        raise InputError(f"{path} is a directory; give a file that {maker}.save wrote.")
    try:
        with xarray.open_dataset(place, engine="h5netcdf", group=group) as opened:
            return opened.load()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{path} cannot be read as netCDF: it is damaged, cut short, or another kind of file "
            f"({' '.join(str(error).split())[:100]}); give a file that {maker}.save wrote."
        ) from error


def _plain(value: Any) -> Any:
    """What JSON does not know: scalars of other libraries become numbers, the rest strings."""
    return value.item() if getattr(value, "shape", None) == () else str(value)

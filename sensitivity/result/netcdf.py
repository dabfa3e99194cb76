"""Sensitivity maps as labelled arrays, and as netCDF files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xarray
from torch import Tensor

from sensitivity import files
from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.result.map import SensitivityMap

KIND = "attention-sensitivity map"
VERSION = 1
_PAIR = ("query", "key")
_DIMS = {
    "norms": ("sample", *_PAIR),
    "diagonal": ("sample", "query"),
    "heads": ("sample", "head", *_PAIR),
    "attention": ("sample", "head", *_PAIR),
    "visible": ("sample", *_PAIR),
    "attended": ("attended_sample", "attended_head", *_PAIR),
    "standard_error": ("sample", *_PAIR),
}
_MEANING = {
    "norms": "norm of the block Jacobian dh_i/dx_j",
    "diagonal": "norm of the diagonal blocks without the residual path",
    "heads": "norm of one head's blocks",
    "attention": "attention weight before dropout",
    "visible": "pairs that count: neither causally hidden nor padded",
    "attended": "pairs that the attention mask lets attend",
    "standard_error": "standard error of the norms",
}


def dataset(found: SensitivityMap) -> xarray.Dataset:
    """Every array of the map under its name; the norms of the path P are ``path_P``."""
    given = {name: getattr(found, name) for name in _DIMS}
    arrays = {name: _variable(value, _DIMS[name], _MEANING[name]) for name, value in given.items() if value is not None}
    for name, norms in found.paths.items():
        arrays[f"path_{name}"] = _variable(norms, ("sample", *_PAIR), f"norm of the {name} path's blocks")
    for name, array in arrays.items():
        if name not in ("attention", "visible", "attended"):
            array.attrs["norm"] = found.norm
    sizes = {dim: size for array in arrays.values() for dim, size in array.sizes.items()}
    labels = {"sample": "sample", "query": "output time i", "key": "input time j", "head": "attention head"}
    coordinates = {
        dim: xarray.Variable((dim,), list(range(sizes[dim])), {"long_name": label, "units": "1"})
        for dim, label in labels.items()
        if dim in sizes
    }
    attributes: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "name": found.name,
        "norm": found.norm,
        "paths": json.dumps(list(found.paths)),
        "notes": json.dumps(found.notes),
        "provenance": json.dumps(found.provenance, default=_plain),
    }
    attributes |= {dim: getattr(found, dim) for dim in ("in_dim", "out_dim") if getattr(found, dim) is not None}
    return xarray.Dataset(arrays, coordinates, attributes)


def save(labelled: xarray.Dataset, path: str | os.PathLike[str]) -> None:
    """Writes the dataset as netCDF-4, whole or not at all; masks are compressed, numbers are stored as they are."""
    encoding: dict[str, dict[str, Any]] = {
        str(name): {"zlib": True, "complevel": 1} if array.dtype == bool else {"_FillValue": None}
        for name, array in labelled.data_vars.items()
    }
    with files.replacing(path) as temporary:
        labelled.to_netcdf(temporary, engine="h5netcdf", encoding=encoding)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the fields of the map that ``save`` wrote.

    Raises:
        InputError: no such file, a directory, a damaged file, or another kind of file.
    """
    labelled = _open(path)
    if labelled.attrs.get("kind") != KIND or "norms" not in labelled:
        raise InputError(
            f"{path} is a netCDF file, but not a sensitivity map; give a file that SensitivityMap.save wrote."
        )
    version = int(labelled.attrs["version"])
    if version > VERSION:
        raise InputError(
            f"{path} was written in version {version} of the map format, and this release reads up to {VERSION}; "
            "update attention-sensitivity."
        )
    attributes = labelled.attrs
    fields: dict[str, Any] = {name: _tensor(labelled[name]) for name in _DIMS if name in labelled}
    fields["paths"] = {name: _tensor(labelled[f"path_{name}"]) for name in json.loads(attributes["paths"])}
    fields |= {name: json.loads(attributes[name]) for name in ("notes", "provenance")}
    fields |= {name: str(attributes[name]) for name in ("name", "norm")}
    return fields | {name: int(attributes[name]) for name in ("in_dim", "out_dim") if name in attributes}


def _open(path: str | os.PathLike[str]) -> xarray.Dataset:
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no file {path}; give a file that SensitivityMap.save wrote.")
    if place.is_dir():
        raise InputError(f"{path} is a directory; give a file that SensitivityMap.save wrote.")
    try:
        with xarray.open_dataset(place, engine="h5netcdf") as opened:
            return opened.load()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"{path} cannot be read as netCDF: it is damaged, cut short, or another kind of file "
            f"({' '.join(str(error).split())[:100]}); give a file that SensitivityMap.save wrote."
        ) from error


def _variable(value: Tensor, dims: tuple[str, ...], meaning: str) -> xarray.Variable:
    kind = str(value.dtype).removeprefix("torch.")
    value = value.detach().cpu()
    if value.is_floating_point() and value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    attributes = {"long_name": meaning} if value.dtype == torch.bool else {"long_name": meaning, "units": "1"}
    return xarray.Variable(dims, value.numpy(), attributes | {"torch_dtype": kind})


def _tensor(array: xarray.DataArray) -> Tensor:
    kind = getattr(torch, str(array.attrs["torch_dtype"]))
    return torch.from_numpy(array.to_numpy().copy()).to(kind)


def _plain(value: Any) -> Any:
    """What JSON does not know: scalars of other libraries become numbers, the rest strings."""
    return value.item() if getattr(value, "shape", None) == () else str(value)

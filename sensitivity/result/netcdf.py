"""Sensitivity maps as labelled arrays, and as netCDF files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import xarray
from torch import Tensor

from sensitivity.result import labels, sums

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
    if found.weight_sums is not None:
        arrays |= sums.weights(found.weight_sums)
    attributes = labels.attributes(found, KIND, VERSION) | {"length": found.length}
    return xarray.Dataset(arrays, labels.coordinates(arrays, found.query_times), attributes)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the fields of the map that ``save`` wrote.

    Raises:
        InputError: no such file, a directory, a damaged file, or another kind of file.
    """
    labelled = labels.opened(path, KIND, VERSION, "SensitivityMap")
    found = labels.fields(labelled)
    found["paths"] = {name: _tensor(labelled[f"path_{name}"]) for name in found["paths"]}
    found |= {name: _tensor(labelled[name]) for name in _DIMS if name in labelled}
    times = torch.from_numpy(labelled["query"].to_numpy().copy())
    length = int(labelled.attrs.get("length", len(times)))
    found["weight_sums"] = sums.restored_weights(labelled, length, labelled.sizes["key"], times)
    return found | {"query_times": times, "out_length": length}


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

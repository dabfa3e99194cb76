"""Values that a checkpoint may hold: numbers, strings, tensors, and lists and dicts of them."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sensitivity.errors import InputError


def plain(value: Any, place: str) -> Any:
    """``value`` made of plain Python values and tensors only, so that reading it back runs no code.

    Numpy numbers become Python numbers, arrays become tensors, paths and dates become text, dataclasses and namespaces
    become dicts. Tensors are detached and copied to the CPU.

    Args:
        value: what a caller wants to keep.
        place: what the message calls it.

    Raises:
        InputError: an object of another class; the message names it and where it stands.
    """
    for kinds, convert in _LEAVES:
        if isinstance(value, kinds):
            return convert(value)
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else plain(value.tolist(), place)
    if isinstance(value, np.generic):
        return plain(value.item(), place)
    if isinstance(value, argparse.Namespace):
        return plain(vars(value), place)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields, place)
    if isinstance(value, Mapping):
        return {_key(key, place): plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise InputError(
        f"{place} is a {type(value).__name__}, which a plain checkpoint does not hold; give numbers, text, tensors, "
        "and lists or dicts of them."
    )


def _key(key: Any, place: str) -> str | int:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int | np.integer):
        return int(key)
    raise InputError(f"{place} has the key {key!r}; a plain checkpoint has keys of text or integers.")


_LEAVES: tuple[tuple[Any, Any], ...] = (
    ((bool, np.bool_), bool),
    (int, int),
    (float, float),
    (str, str),
    (os.PathLike, os.fspath),
    ((datetime.date, datetime.time), lambda value: value.isoformat()),
    (datetime.timedelta, lambda value: value.total_seconds()),
    ((torch.dtype, torch.device), str),
    (Tensor, lambda value: value.detach().cpu().clone()),
)

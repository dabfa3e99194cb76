"""The processes that share a training (ranks), and sums over them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed

from sensitivity.errors import InputError


def rank(devices: int) -> int:
    """The number of this process among those that share a training; 0 is the one that was started by hand."""
    return int(os.environ.get("LOCAL_RANK", "0")) if devices > 1 else 0


def world() -> int:
    """How many processes share the training that is going on."""
    return distributed.get_world_size() if _together() else 1


def summed(values: Tensor) -> Tensor:
    """The sum over all ranks, the same on each; the values themselves where there is one process."""
    if not _together():
        return values
    values = values.clone()
    distributed.all_reduce(values)
    return values


def check_devices(device: torch.device, devices: int) -> None:
    """Refuses more devices than there are, and a program that cannot be started again for the other ranks.

    Raises:
        InputError: one of the two.
    """
    if devices == 1:
        return
    there = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type != "cpu" and devices > there:
        raise InputError(f"devices={devices} were asked for, but torch finds {there} of the kind {device.type!r} here.")
    if sys.argv[0] in ("", "-c", "-") or not Path(sys.argv[0]).exists():
        raise InputError(
            f"devices={devices} starts this program again for the other processes, but it was not started from a "
            "file; use the command line or a script."
        )


@contextlib.contextmanager
def processes_end() -> Iterator[None]:
    """Ends what a training of several processes leaves behind, so that another one can follow in this process."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if _together():
            distributed.destroy_process_group()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()

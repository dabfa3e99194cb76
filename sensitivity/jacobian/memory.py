"""How much memory a measurement will take, and the refusal when that is more than it may."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensitivity.errors import InputError

DEFAULT_BUDGET = 4 * 2**30
LITTLE = 2**28  # bytes that are granted without a question: it takes longer than what would need them
_CGROUP = Path("/sys/fs/cgroup")


def budget(memory: int | float | None, device: torch.device, need: int | None = None) -> int:
    """Bytes that a measurement may take: what the caller says, or the smaller of 4 GiB and half of what is free.

    Args:
        memory: what the caller says, if anything.
        device: where it is taken.
        need: most that will be taken, where that is known: a little is granted whatever is free.

    Raises:
        InputError: not a positive number.
    """
    if memory is None:
        if need is not None and need <= LITTLE:
            return LITTLE
        return min(DEFAULT_BUDGET, available(device) // 2)
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > 0:
        raise InputError(f"memory must be a positive number of bytes, not {memory!r}; 4 * 2**30 is 4 GiB.")
    return int(memory)


def available(device: torch.device) -> int:
    """Free bytes on the device; on the CPU, no more than the process's control group leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [_free_of_machine(), _free_of_group()]
    return min(value for value in free if value is not None)


@functools.cache
def keep_freed_memory() -> None:
    """Lets the C library keep some of what this process frees, up to 64 MB, so that tiles are not paid for by the page.

    glibc hands freed memory back to the system at once until it has seen large blocks come and go; from then on it
    keeps twice the size of the largest, of those up to 32 MB. This one is never written to, so that it costs nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def _free_of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (OSError, ValueError, AttributeError):
        return 2 * DEFAULT_BUDGET


def _free_of_group() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None


class SavedBytes:
    """Counts what autograd keeps of a forward pass; use as ``with SavedBytes(known) as saved: ...; saved.total``.

    ``saved.largest`` is the size of the largest tensor among it.

    Args:
        known: tensors that exist anyway, such as parameters; they are not counted.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.total = self.largest = 0
        self._seen = {value.untyped_storage().data_ptr() for value in known}
        self._hooks: Any = None

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda value: value)
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._hooks.__exit__(*details)

    def _count(self, value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        return value


def readable(size: int | float) -> str:
    """Bytes in words, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def refuse_over(need: int, allowed: int, what: str, way_out: str) -> None:
    """Refuses what would not fit, with the numbers.

    Raises:
        InputError: ``need`` is more than ``allowed`` bytes.
    """
    if need > allowed:
        raise InputError(f"{what} needs about {readable(need)}, over the budget of {readable(allowed)}; {way_out}.")


def known_tensors(function: Callable[..., Any], tokens: Tensor) -> list[Tensor]:
    """Tensors that exist before the forward pass: the tokens, and parameters and buffers that the function reaches."""
    from sensitivity.modules import modules_of

    modules = modules_of(function)
    return [tokens, *(value for part in modules for value in (*part.parameters(), *part.buffers()))]

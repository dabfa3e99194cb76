"""Traffic for a run by its name, and a loader that gathers whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from sensitivity.errors import InputError
from sensitivity.traffic import Traffic, Window, Windows, read, synthetic_city
from sensitivity.training.settings import Settings

SYNTHETIC = "synthetic"
_CITY = {
    "nodes": int, "days": int, "seed": int, "step": int,
    "missing": float, "noise": float, "incidents": float, "echo": int,
}  # fmt: skip


def open_traffic(data: str, graph: str | None = None, key: str | None = None, channel: int = 0) -> Traffic:
    """The traffic that ``--data`` names.

    Args:
        data: a file, ``synthetic``, or ``synthetic:`` with arguments of the generator (``synthetic:nodes=10,days=7``).
        graph: the road graph's file; the synthetic city has its own.
        key: table or array of the file, where it has several.
        channel: of an array ``(time, node, channel)``.

    Raises:
        InputError: whatever the reader or the generator refuses; a graph, key or channel beside the synthetic city; an
            argument that the generator does not have.
    """
    name, _, arguments = data.partition(":")
    if name != SYNTHETIC:
        return read(data, graph, key=key, channel=channel)
    if graph is not None:
        raise InputError(f"--graph {graph} goes with a traffic file; the synthetic city has a graph of its own.")
    for option, value in (("key", key), ("channel", channel)):
        if value not in (None, 0):
            raise InputError(f"--{option} {value} goes with a traffic file; the synthetic city has one table.")
    return synthetic_city(**_city_arguments(arguments))


def open_settings(settings: Settings) -> Traffic:
    """The traffic that a run's settings name; errors as those of :func:`open_traffic`."""
    return open_traffic(settings.data, settings.graph, settings.key, settings.channel)


def _city_arguments(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in _CITY:
            raise InputError(f"the synthetic city has no argument {name.strip()!r}; known: {', '.join(_CITY)}.")
        try:
            values[name.strip()] = _CITY[name.strip()](value)
        except ValueError:
            raise InputError(f"{name.strip()} of the synthetic city must be a number, not {value!r}.") from None
    return values


def mixed(seed: int, *parts: int) -> int:
    """A seed of its own for every purpose and epoch of a run."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0] >> 1)


class WindowLoader:
    """Batches of windows, each gathered by one index operation on the tables; the last one is smaller, never padded.

    The order is a function of the seed and the epoch alone, so an epoch can be repeated after an interruption. Where
    several processes share a training, every batch is dealt out among them; a process that gets no window of a batch
    gets one whose targets are all masked, which counts nowhere, so that all take the same number of steps.

    Args:
        windows: of one part of a split, on the device that the batches shall be on.
        size: windows in a batch, over all processes together.
        seed: of the order; None for the order of time.
        epoch: tells the number of the epoch that begins; asked when the first batch is.
        share: number of this process, and of all processes.
    """

    def __init__(
        self,
        windows: Windows,
        size: int,
        seed: int | None = None,
        epoch: Callable[[], int] = lambda: 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.windows, self.size, self.seed, self.epoch, self.share = windows, size, seed, epoch, share

    def __len__(self) -> int:
        return -(-len(self.windows) // self.size)

    def __iter__(self) -> Iterator[Window]:
        generator = None if self.seed is None else torch.Generator().manual_seed(mixed(self.seed, self.epoch(), 1))
        count, (rank, ranks) = len(self.windows), self.share
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        for chunk in order.split(self.size):
            mine = chunk[rank::ranks]
            yield self.windows.batch(mine) if len(mine) else _masked(self.windows.batch(chunk[:1]))


def _masked(window: Window) -> Window:
    return window._replace(mask=torch.zeros_like(window.mask))

"""How far a long measurement is, for whoever waits at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

Item = TypeVar("Item")
PATIENCE = 2.0  # seconds before a bar appears


def watched(items: Iterable[Item], total: int, size: Callable[[Item], int], what: str) -> Iterator[Item]:
    """The items as they come; if they take long, a bar on standard error says how many rows are done.

    Nothing is written where standard error is not a terminal.

    Args:
        items: what streams by.
        total: rows of all items.
        size: rows of one item.
        what: what is done, in a few words.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    bar, begun, done = None, time.monotonic(), 0
    try:
        for item in items:
            yield item
            done += size(item)
            if bar is None and time.monotonic() - begun > PATIENCE:
                bar = _bar(what, total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
    finally:
        if bar is not None:
            bar.stop()


def _bar(what: str, total: int) -> Progress:
    """A bar that is on the screen; loaded here, because most measurements end before anybody wants one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar

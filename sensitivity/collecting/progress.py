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
WIDEST = 24  # characters of a name, beside which the bar and the time fit 80 columns


def watched(items: Iterable[Item], total: int, size: Callable[[Item], int], doing: str, name: str) -> Iterator[Item]:
    """The items as they come; if they take long, a bar on standard error says how many rows are done.

    Nothing is written where standard error is not a terminal.

    Args:
        items: what streams by.
        total: rows of all items.
        size: rows of one item.
        doing: what is done, in a word.
        name: to what.
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
                bar = _bar(doing, name, total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
    finally:
        if bar is not None:
            bar.stop()


def _bar(doing: str, name: str, total: int) -> Progress:
    """A bar that is on the screen; loaded here, because most measurements end before anybody wants one."""
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    shown = name if len(name) <= WIDEST else f"…{name[1 - WIDEST :]}"  # its end tells a layer from others
    bar.add_task(f"{doing} {shown}", total=total)
    try:
        bar.start()
    except LiveError:  # the caller has a display of their own, such as that of a training, and keeps it
        bar.disable = True
    return bar

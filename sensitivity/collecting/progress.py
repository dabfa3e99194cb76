"""How far a long measurement is, for whoever waits at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, begun, shown = bar.add_task(what, total=total), time.monotonic(), False
    try:
        for item in items:
            yield item
            bar.update(task, advance=size(item))
            if not shown and time.monotonic() - begun > PATIENCE:
                bar.start()
                shown = True
    finally:
        bar.stop()

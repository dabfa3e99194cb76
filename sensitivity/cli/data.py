"""``sensitivity data``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sensitivity.traffic.download import Fetched
    from sensitivity.traffic.published import Published


@click.group(name="data")
def command() -> None:
    """Look at a traffic file, or download METR-LA or PEMS-BAY."""


@command.command(name="info", short_help="Say what a traffic file holds.")
@click.argument("file", metavar="FILE")
@click.option("--graph", metavar="FILE", help="Road graph of FILE.")
@click.option("--key", metavar="NAME", help="Table or array of FILE, where it has several.")
@click.option("--channel", type=int, default=0, show_default=True, help="Of an array (time, node, channel).")
def info(file: str, graph: str | None, key: str | None, channel: int) -> None:
    """Say what a traffic file holds: times, sensors, missing readings, splits.

    Also tells whether it is a published file, by its checksum. A file that cannot be used is described as far as it
    can be read; the reason follows, with exit code 2.
    """
    from sensitivity.cli.describing import describe
    from sensitivity.traffic import summarise

    found = summarise(file, graph, key=key, channel=channel)
    click.echo(describe(found))
    if found.fault is not None:
        raise found.fault


@command.command(name="fetch", short_help="Download METR-LA or PEMS-BAY.")
@click.argument("name", metavar="NAME", type=click.Choice(["metr-la", "pems-bay"]))
@click.option("--to", metavar="DIR", default="data", show_default=True, help="Folder to put the files in.")
def fetch(name: str, to: str) -> None:
    """Download METR-LA or PEMS-BAY: NAME is metr-la or pems-bay.

    Gets the speeds and the road graph, and keeps them only if their checksums are the published ones. Files that are
    there already are checked and left alone.
    """
    from sensitivity.traffic import fetch as fetch_files

    fetched = fetch_files(name, to, progress=_Bar)
    for one in fetched:
        click.echo(_outcome(one))
    speeds, *graphs = (str(one.path) for one in fetched)
    click.echo(f"next: sensitivity data info {speeds}" + "".join(f" --graph {graph}" for graph in graphs))


def _outcome(one: Fetched) -> str:
    """What became of one file."""
    lines = [f"not served right: {failure}" for failure in one.failures]
    how = f"downloaded from {one.file.holder}" if one.new else "there already, nothing downloaded"
    return "\n".join([*lines, f"{one.path}: {how}", f"  checksum as published: {one.file.checksum}"])


class _Bar:
    """The progress of one download on standard error, in the form that pooch calls."""

    def __init__(self, file: Published) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(f"{file.name} from {file.holder}", total=file.size)
        self._progress.start()

    @property
    def total(self) -> float | int | None:
        """Bytes to come, as far as they are known."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, size: int) -> None:
        if size:
            self._progress.update(self._task, total=size)

    def update(self, size: int) -> Any:
        """``size`` more bytes have come."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Back to no bytes, before the last update."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Takes the bar away."""
        self._progress.stop()

"""The folder of a measurement: what it may overwrite, how it is resumed, what is written to it."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from sensitivity import files
from sensitivity.cli.measuring.job import Job
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.sweep import Sweep, fingerprint, sweep

MEASUREMENT, SUMMARY, PARTS = "measurement.nc", "summary.json", ".parts"


class Folder:
    """Where a measurement is written.

    Args:
        path: the folder; it is made when there is something to write.
        job: what is measured.

    Raises:
        InputError: the path is a file or cannot be written to, or the folder holds results of other settings.
    """

    def __init__(self, path: str, job: Job) -> None:
        self.path, self.job = Path(path), job
        self.settings = fingerprint(job.settings | {"norm": job.norm, "bounds": job.bounds, "lengths": job.lengths})
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {path} is a file; name a folder.")
        files.check_folder(path)
        self.same = self._holds_same()

    def measure(self, resume: bool = False) -> Sweep:
        """Runs the sweep, or with ``resume`` takes it up where it was interrupted."""
        if resume and self.same:
            return Sweep.load(self.path / MEASUREMENT)
        job = self.job
        with _progress(job.lengths) as progress:
            try:
                found = sweep(
                    job.source,
                    job.lengths,
                    norm=job.norm,
                    bounds=job.bounds,
                    keep=job.keep,
                    seed=job.seed,
                    statistics_only=job.statistics_only,
                    rows=job.rows,
                    directory=self.path / PARTS,
                    settings=job.settings,
                    resume=resume,
                    progress=progress,
                    provenance=job.provenance | {"settings": self.settings, "notes": job.notes},
                )
            except KeyboardInterrupt as error:
                kept = f" finished lengths are kept in {self.path}; add --resume to take them up."
                raise KeyboardInterrupt(f"interrupted;{kept}") from error
        for length, reason in found.failures.items():
            warnings.warn(f"T={length} was not measured: {reason}", SensitivityWarning, stacklevel=2)
        return found

    def write(self, found: Sweep) -> list[str]:
        """Writes everything; returns the names of the files. The summary comes last: it says that all is there."""
        from sensitivity.cli.measuring import figures

        found.save(self.path / MEASUREMENT)
        drawn = figures.draw(found, self.path)
        files.write_text(self.path / SUMMARY, as_json(found))
        shutil.rmtree(self.path / PARTS, ignore_errors=True)
        return [MEASUREMENT, SUMMARY, *drawn]

    def _holds_same(self) -> bool:
        """Whether results of these very settings are there.

        Raises:
            InputError: results of other settings are there, or files that are no results.
        """
        if (self.path / SUMMARY).exists():
            return self._settings_of_summary() == self.settings or self._refuse()
        if (self.path / MEASUREMENT).exists():  # written, but interrupted before the summary
            return Sweep.load(self.path / MEASUREMENT).provenance.get("settings") == self.settings or self._refuse()
        return False

    def _settings_of_summary(self) -> str | None:
        try:
            content = json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))
            return str(content["provenance"]["settings"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _refuse(self) -> bool:
        raise InputError(f"{self.path} holds results of other settings; choose another folder with --out.")


def as_json(found: Sweep) -> str:
    """The content of ``summary.json``."""
    return json.dumps(found.summary(), indent=2, allow_nan=False) + "\n"


@contextmanager
def _progress(lengths: list[int]) -> Iterator[Callable[[int, float], None]]:
    """A bar on standard error if that is a terminal, else one line for every length."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, file=sys.stderr)
    if not console.is_terminal:
        yield lambda length, share: click.echo(f"measured T={length}", err=True) if share >= 1 else None
        return
    work = {length: length**2 + 400 for length in lengths}
    before = {length: sum(work[shorter] for shorter in lengths if shorter < length) for length in lengths}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"measuring T={lengths[0]}", total=sum(work.values()))

        def update(length: int, share: float) -> None:
            done = before[length] + share * work[length]
            bar.update(task, completed=done, description=f"measuring T={length}")

        yield update

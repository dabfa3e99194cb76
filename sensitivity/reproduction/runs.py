"""Trains what a plan lacks, one run after the other or several at a time."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager

import torch

from sensitivity.errors import InputError, RunError
from sensitivity.reproduction.plan import Cell, Plan
from sensitivity.traffic import Traffic
from sensitivity.training import fit
from sensitivity.training.data import open_settings

Told = Callable[[Cell, str], None]
"""Is told which run is ``begins``, ``done`` or ``failed``."""


def train_missing(plan: Plan, jobs: int, told: Told) -> dict[str, str]:
    """Trains every run of the plan that is not done; returns why runs failed, by name.

    A run that diverges is recorded and the others go on. What an interrupted run has left is taken up. The manifest is
    written after every run.

    Raises:
        InputError: ``jobs`` is no positive integer; settings or data that no run can use.
        Interrupted: Ctrl-C.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise InputError(f"jobs must be an integer of at least 1, not {jobs!r}.")
    waiting = [cell for cell in plan.cells if not cell.done]
    failures: dict[str, str] = {}
    if not waiting:
        return failures
    traffic = open_settings(plan.settings)  # what is wrong with the data is said at once
    finished = _one_by_one(waiting, traffic, told) if jobs == 1 else _side_by_side(waiting, jobs, told)
    for cell, failure in finished:
        if failure is not None:
            failures[cell.name] = failure
        told(cell, "done" if failure is None else "failed")
        plan.write_manifest(failures)
    return failures


def run_cell(cell: Cell, traffic: Traffic | None = None, progress: bool | None = None) -> str | None:
    """Trains one run to its end, from where it was left; returns why it failed, None if it did not."""
    try:
        fit(dataclasses.replace(cell.settings, resume=cell.begun), traffic=traffic, progress=progress)
    except RunError as error:
        return str(error)
    return None


def _one_by_one(cells: list[Cell], traffic: Traffic, told: Told) -> Iterator[tuple[Cell, str | None]]:
    for cell in cells:
        told(cell, "begins")
        yield cell, run_cell(cell, traffic)


def _side_by_side(cells: list[Cell], jobs: int, told: Told) -> Iterator[tuple[Cell, str | None]]:
    """Runs in processes of their own, which share the machine's cores evenly."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (threads,)) as pool, _cancelled(pool):
        queue, running = list(cells), dict[Future[str | None], Cell]()
        while queue or running:
            while queue and len(running) < jobs:
                cell = queue.pop(0)
                told(cell, "begins")
                running[pool.submit(run_cell, cell, None, False)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)


@contextmanager
def _cancelled(pool: ProcessPoolExecutor) -> Iterator[None]:
    """After an error nothing new is begun; what runs is stopped, and can be resumed."""
    try:
        yield
    except BaseException:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise

"""Times of several jobs, taken in turns.

The speed of a machine drifts. Jobs that are to be compared therefore take turns in one process, the order changes from
round to round, and a ratio is the median over rounds of the two times of one round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Job = Callable[[], Any]
SHORTEST = 0.25  # seconds that a reading takes at least: short jobs repeat, or it is that of caches others have emptied


def interleaved(jobs: Mapping[str, Job], rounds: int, cold: Collection[str] = ()) -> dict[str, list[float]]:
    """Seconds of every job in every round.

    Args:
        jobs: what to time, by name.
        rounds: readings of each job.
        cold: jobs so long that no run goes before the first reading.
    """
    counts = {name: 1 if name in cold else _repeats(job) for name, job in jobs.items()}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(seconds(jobs[name], counts[name]))
    return times


def seconds(job: Job, repeats: int = 1) -> float:
    """Seconds of one run, the mean of ``repeats`` in a row."""
    begin = time.perf_counter()
    for _ in range(repeats):
        job()
    return (time.perf_counter() - begin) / repeats


def _repeats(job: Job) -> int:
    once = seconds(job)
    if once < SHORTEST:  # the first run may have been slow for other reasons
        once = seconds(job)
    return max(1, round(SHORTEST / max(once, 1e-7)))


def median(times: Sequence[float]) -> float:
    """The median."""
    return statistics.median(times)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of the quotients within a round."""
    return median([one / other for one, other in zip(above, below, strict=True)])


def spread(above: Sequence[float], below: Sequence[float]) -> str:
    """The quotients' range over rounds, in words."""
    quotients = [one / other for one, other in zip(above, below, strict=True)]
    return f"{min(quotients):.3g} to {max(quotients):.3g}" if len(quotients) > 1 else "one run"

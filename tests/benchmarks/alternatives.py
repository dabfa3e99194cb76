"""The closed-form map beside what torch offers for the same map."""

from __future__ import annotations

from typing import Any

import torch

import sensitivity
from benchmarks import child, rivals
from benchmarks.subjects import attention, single, tokens
from benchmarks.tables import Cell, Findings, Table, Target
from sensitivity.jacobian.memory import available

ABOUT = """The same layer (D=64, H=4, one sample) as a function of its tokens, differentiated with what torch
offers; every way ends in the same norms, and the last column says how far they lie from the closed form. Chunk
sizes of 16, 64 and 256 rows were tried, the best one is shown; the alternatives run on the attention kernel that
has a batching rule, which is the faster one for them. `functional.jacobian(vectorize=True)` is `is_grads_batched`
with all rows in one chunk, and does not fit."""
WAYS = tuple(way for way in rivals.WAYS if way != "functional.jacobian, vectorize")
LIMITS = {128: 500.0, 256: 2000.0}

ABOUT_MEMORY = """Peak resident memory of a process of its own. `jacrev` holds the dense Jacobian of $T^2 D^2$
numbers several times over while it joins its chunks. Where the peak, expected from the length before by its growth
with $T^2$, would take more than three quarters of the memory that is free, `jacrev` is not run, and the expected peak
stands alone."""
SHARE = 0.75


def run(lengths: tuple[int, ...] = (128, 256), dim: int = 64, limit: float = 60.0, rounds: int = 3) -> Findings:
    """Times every way at every length."""
    table = Table(
        "Time for the whole map.",
        {"T": "", "way": "", "time": "s", "timed as": "", "closed form": "s", "ratio": "x", "difference": "e"},
    )
    best: dict[int, float] = {}
    for length in lengths:
        layer, data = attention(dim, 4), tokens(length, dim)
        function, ours = single(layer), sensitivity.measure(layer, data).norms[0]
        for rival in rivals.fastest(function, data[0], 2, WAYS):
            if rival.error:
                table.rows.append([length, rival.way, None, rival.error, None, None, None])
                continue
            result = rivals.compare(
                lambda layer=layer, data=data: sensitivity.measure(layer, data), rival, function, data[0], limit, rounds
            )
            off = rivals.difference(ours, result.found)
            table.rows.append([length, rival.way, result.seconds, result.note, result.ours, result.ratio, off])
            if rival.kind == "jacrev":
                best[length] = result.ratio
    targets = [
        Target(f"chunked `jacrev` over closed form, T={length}", best.get(length), limit, least=True)
        for length, limit in LIMITS.items()
        if length in lengths
    ]
    return Findings([table], targets)


def run_memory(lengths: tuple[int, ...] = (128, 256, 512, 1024), dim: int = 64, free: float | None = None) -> Findings:
    """Peak memory and time of jacrev and of the closed form, each in a process of its own.

    Args:
        lengths: in growing order; the first one is run whatever it takes.
        dim: features.
        free: bytes of memory that are free; what the system says unless given.
    """
    table = Table(
        "One run each.",
        {"T": "", "jacrev, chunk 64": "s", "its peak": "B", "expected": "B"}
        | {"closed form, first call": "s", "peak": "B"},
    )
    free = float(available(torch.device("cpu"))) if free is None else free
    rest, above, before = child.run("nothing")["peak"], 0.0, lengths[0]
    for length in lengths:
        above, before = above * (length / before) ** 2, length
        expected = rest + above if above else None
        theirs: dict[str, Any] = {"error": "not run: too large"}
        if above <= SHARE * free:
            theirs = child.run("jacrev", length=length, dim=dim)
            above = theirs.get("above", above)
        ours = child.run("map", length=length, dim=dim)
        table.rows.append([length, *_time_and_peak(theirs), expected, *_time_and_peak(ours)])
    return Findings([table])


def _time_and_peak(found: dict[str, Any]) -> list[Cell]:
    """Seconds, or why there are none, and the peak."""
    return [found.get("seconds", found.get("error")), found.get("peak")]

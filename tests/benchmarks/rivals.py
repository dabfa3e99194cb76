"""What torch offers for the same map: each way ends in the Frobenius norms ``(query, key)`` of a function's Jacobian.

With ``rows`` only the first output times are differentiated, at the same cost per row.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.subjects import Function
from benchmarks.timing import Job, interleaved, median, ratio

CHUNKS = (16, 64, 256)


def jacrev(function: Function, tokens: Tensor, chunk: int) -> Tensor:
    """``torch.func.jacrev``: the whole Jacobian, then its norms."""
    return norms(torch.func.jacrev(function, chunk_size=chunk)(tokens))


def loop(function: Function, tokens: Tensor) -> Tensor:
    """``torch.autograd.functional.jacobian`` as it is by default."""
    return norms(torch.autograd.functional.jacobian(function, tokens))


def vectorized(function: Function, tokens: Tensor) -> Tensor:
    """The same with ``vectorize=True``: all rows in one vmapped backward pass."""
    return norms(torch.autograd.functional.jacobian(function, tokens, vectorize=True))


def batched(function: Function, tokens: Tensor, chunk: int) -> Tensor:
    """``torch.autograd.grad(is_grads_batched=True)``, some rows at a time, each reduced as it comes."""
    leaf = tokens.clone().requires_grad_(True)
    output = function(leaf)
    rows = torch.eye(output.numel()).unflatten(1, output.shape).split(chunk)
    squares = [
        torch.autograd.grad(output, leaf, some, is_grads_batched=True, retain_graph=True)[0].square().sum(dim=-1)
        for some in rows
    ]
    return torch.cat(squares).unflatten(0, output.shape).sum(dim=1).sqrt()


def norms(jacobian: Tensor) -> Tensor:
    """Norms of the blocks of ``(query, out, key, in)``."""
    return torch.linalg.vector_norm(jacobian, dim=(1, 3))


WAYS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    **{f"jacrev, chunk {chunk}": functools.partial(jacrev, chunk=chunk) for chunk in CHUNKS},
    **{f"is_grads_batched, chunk {chunk}": functools.partial(batched, chunk=chunk) for chunk in CHUNKS},
    "functional.jacobian": loop,
    "functional.jacobian, vectorize": vectorized,
}


@dataclass(frozen=True)
class Rival:
    """One way on one function.

    Attributes:
        way: its name in :data:`WAYS`.
        guess: seconds of the whole map, from a few of its rows; infinite where it fails.
        error: how it fails.
    """

    way: str
    guess: float
    error: str = ""

    @property
    def kind(self) -> str:
        """The way without its chunk size."""
        return self.way.partition(", chunk")[0]


def first(function: Function, rows: int) -> Function:
    """The function's first output times only."""
    return lambda x: function(x)[:rows]


def quiet_map(way: str, function: Function, tokens: Tensor) -> Tensor:
    """The map in one of the ways, without torch's remarks on operations that it loops over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WAYS[way](function, tokens)


def guessed(way: str, function: Function, tokens: Tensor, rows: int) -> Rival:
    """How long one way would take, from ``rows`` output times."""
    part = first(function, rows)
    try:
        quiet_map(way, first(function, 1), tokens)
        begin = time.perf_counter()
        quiet_map(way, part, tokens)
    except (RuntimeError, NotImplementedError) as error:
        return Rival(way, float("inf"), str(error).strip().splitlines()[0][:80])
    return Rival(way, (time.perf_counter() - begin) * len(tokens) / rows)


def fastest(function: Function, tokens: Tensor, rows: int, ways: tuple[str, ...] = tuple(WAYS)) -> list[Rival]:
    """The best chunk size of every kind, quickest kind first; failures last."""
    best: dict[str, Rival] = {}
    for way in ways:
        rival = guessed(way, function, tokens, rows)
        if rival.kind not in best or rival.guess < best[rival.kind].guess:
            best[rival.kind] = rival
    return sorted(best.values(), key=lambda rival: rival.guess)


@dataclass(frozen=True)
class Comparison:
    """A rival beside the toolkit, in the same rounds.

    Attributes:
        seconds: of the rival, for the whole map.
        ours: of the toolkit.
        ratio: rival over toolkit.
        note: how the rival was timed.
        found: the rows of the map that the rival computed.
    """

    seconds: float
    ours: float
    ratio: float
    note: str
    found: Tensor


def compare(ours: Job, rival: Rival, function: Function, tokens: Tensor, limit: float, rounds: int) -> Comparison:
    """Times a rival and the toolkit in turns; of a rival over ``limit`` seconds only some rows, said in the note."""
    length = len(tokens)
    rows = length if rival.guess <= limit else max(1, int(length * limit / rival.guess))
    rounds = rounds if rival.guess <= limit / 4 else 1
    part, found = first(function, rows), []
    times = interleaved(
        {"ours": ours, "rival": lambda: found.append(quiet_map(rival.way, part, tokens))}, rounds, cold={"rival"}
    )
    scale = length / rows
    note = f"median of {rounds}" if rounds > 1 else "one run"
    if rows < length:
        note = f"extrapolated from {rows} of {length} rows"
    ratio_found = scale * ratio(times["rival"], times["ours"])
    return Comparison(scale * median(times["rival"]), median(times["ours"]), ratio_found, note, found[-1])


def difference(ours: Tensor, found: Tensor) -> float:
    """Largest difference on the rows that both have, relative to the largest norm."""
    return float((ours[: len(found)] - found).abs().max() / found.max())

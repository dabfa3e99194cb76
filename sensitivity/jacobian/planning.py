"""Which engine, how many rows at a time, and whether it fits the memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.jacobian import memory as memories
from sensitivity.jacobian.cotangents import Cotangents
from sensitivity.jacobian.independence import Trial
from sensitivity.jacobian.prefixes import SHORTEST
from sensitivity.jacobian.replicated import Plan, Rows
from sensitivity.jacobian.shared import Shared

Watch: TypeAlias = Callable[[Iterable[Rows], int], Iterable[Rows]]
Engine = Literal["auto", "replicated", "rows", "vmap", "probes"]
ENGINES: tuple[str, ...] = get_args(Engine)
_CACHE = 2**26  # bytes that a backward pass runs over, beyond which larger batches no longer pay
_STEPWISE = 4  # times as much for recurrent layers, whose steps are small: only many rows fill their products
_FACTORS = 2**26  # bytes of the factors of a pointwise end
_WORTH = 8  # rows per output time from which on it pays to see if shorter sequences will do


@dataclass(frozen=True)
class Options:
    """What a caller asks of the engine; see :func:`sensitivity.jacobian.autodiff.norm_maps`.

    ``watch`` is what ``norm_maps`` takes by that name; None where nobody watches.
    """

    engine: str = "auto"
    chunk: int | None = None
    memory: int | float | None = None
    probes: int | None = None
    generator: torch.Generator | None = None
    stochastic: bool = False
    watch: Watch | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InputError(f"unknown engine {self.engine!r}; choose one of {', '.join(ENGINES)}.")
        if self.chunk is not None and (isinstance(self.chunk, bool) or self.chunk < 1):
            raise InputError(f"chunk must be a positive number of rows, not {self.chunk!r}.")
        if self.engine == "probes" and self.probes is None:
            raise InputError("the engine 'probes' needs a number of probes, such as probes=32.")
        if self.probes is not None and (isinstance(self.probes, bool) or self.probes < 2):
            raise InputError(f"probes must be at least 2, not {self.probes!r}: one probe has no standard error.")


def choose(
    tokens: Tensor, trial: Trial, cotangents: Cotangents, options: Options, shared: Shared | None = None
) -> Plan:
    """How many rows of how many samples go through together within the budget.

    Args:
        tokens: the whole batch.
        trial: what the trial passes said.
        cotangents: the rows that are asked for.
        options: what the caller asks for.
        shared: what a vmapped backward pass holds, if there is to be one.

    Raises:
        InputError: not even one row at a time fits (or not as many as the caller's chunk asks for).
    """
    allowed = memories.budget(options.memory, tokens.device)
    samples, element = tokens.shape[0], tokens.element_size()
    maps = 8 * samples * cotangents.queries * tokens.shape[1] * (1 if cotangents.signs is None else 2)
    ends = 4 * (tokens[0].numel() + trial.length * trial.out) * element
    looping = shared is None and (options.engine == "rows" or not trial.independent)
    fixed, saved, each = _costs(trial, shared)
    together = 1 if trial.independent else samples
    chunk = 1 if options.chunk is None or looping else options.chunk
    need = fixed + (saved + (each + ends) * chunk) * together
    memories.refuse_over(
        maps + need,
        allowed,
        f"differentiating {samples} samples of {tokens.shape[1]} x {tokens.shape[2]} into {trial.length} x {trial.out} "
        f"({memories.readable(maps)} of maps, {memories.readable(need)} for {chunk} rows at a time)",
        f"pass {'a smaller chunk=, ' if chunk > 1 else ''}shorter tokens or fewer samples, or raise memory= (of "
        "measure(): budget=); some query rows with rows= and keep='statistics' of measure() hold less of the maps",
    )
    room = allowed - maps - fixed
    if looping:
        return Plan(1, samples if together > 1 else max(1, min(samples, room // (each + ends))), trial.separate)
    fitting = max(1, (room // together - saved) // (each + ends))
    paying = _CACHE * (_STEPWISE if shared is not None and shared.stepwise else 1)
    pace = max(1, paying // (2 * each + ends) // together)
    wanted = min(fitting, pace) if options.chunk is None else options.chunk
    copies = min(len(cotangents), wanted)
    if options.chunk is None:  # passes of equal size
        copies = math.ceil(len(cotangents) / math.ceil(len(cotangents) / copies))
    group = max(1, min(samples, wanted // copies, room // (saved + (each + ends) * copies)))
    if shared is None:
        return Plan(copies, group)
    whole = trial.independent and tokens.dtype in (torch.float32, torch.float64)
    long = trial.length == tokens.shape[1] >= SHORTEST and cotangents.per_query >= _WORTH
    tail = min(_FACTORS, allowed // 16) if whole and trial.length == tokens.shape[1] else 0
    return Plan(copies, max(group, together), trial.separate, True, tail, whole and long)


def _costs(trial: Trial, shared: Shared | None) -> tuple[int, int, int]:
    """Bytes that are held once, per sample, and per row of a sample."""
    if shared is None:
        return trial.fixed, 0, 2 * trial.per_copy
    return 0, 3 * shared.saved, 5 * shared.widest  # the whole sequence, a shorter one, and what is looked at in between


def in_words(plan: Plan, cotangents: Cotangents) -> str:
    """The engine's name in a result."""
    kind = "vmapped VJP" if plan.vmapped else "replicated batch" if plan.copies > 1 else "row loop"
    source = "" if cotangents.signs is None else f"{cotangents.per_query} Rademacher probes per query, "
    return f"{source}{kind}, {plan.copies} row{'s' * (plan.copies > 1)} per backward pass"

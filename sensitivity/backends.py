"""The ways to a measurement: the closed form of an attention layer, or automatic differentiation of anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.collecting import DeferredWeights, KeptMaps, KeptSums, Masks, Weights, choose_rows, watched
from sensitivity.errors import InputError
from sensitivity.jacobian import autodiff, closed_form, memory, tile_sizes
from sensitivity.jacobian.closed_form import Tile
from sensitivity.jacobian.norms import Norm, NormMaps
from sensitivity.jacobian.replicated import Rows
from sensitivity.target import Target

KEEPS = ("map", "statistics")
_BLOCK = 2**22  # entries of the maps that automatic differentiation hands on at a time
_CAUSAL = "no output depends on a later input: the model was taken to be causal"
_WAY_OUT = (
    "measure with keep='statistics', which holds no map, or some query rows with rows=; or take fewer samples or time "
    "steps, leave paths and heads out, or raise budget="
)


@dataclass(frozen=True)
class Request:
    """What a caller of ``measure`` asks for; names as there."""

    norm: Norm
    keep: str
    rows: Any
    paths: bool
    heads: bool
    seed: int
    stochastic: int
    probes: int | None
    chunk: int | None
    budget: int | float | None


@dataclass
class Found:
    """What a backend found, and how.

    Attributes:
        kept: maps, or sums over their rows.
        times: the query times that were measured; None for all.
        queries: number of output times.
        dtype: floating type of the norms.
        engine: which way the numbers were computed, in words.
        notes: what the reader should know.
        weights: computes the attention weights, where they are put off until somebody asks.
    """

    kept: KeptMaps | KeptSums
    times: Int[Tensor, " row"] | None
    queries: int
    dtype: torch.dtype
    engine: str
    notes: list[str]
    weights: DeferredWeights | None = None


def in_closed_form(target: Target, request: Request) -> Found:
    """Measures an attention layer tile by tile.

    Raises:
        InputError: more memory than the budget, or rows that there are not.
    """
    if request.probes is not None:
        raise InputError("probes estimate what the closed form gives exactly; leave probes out.")
    attention, tokens = target.described()
    samples, length, _ = tokens.shape
    times = choose_rows(request.rows, length, request.seed, attention.padding)
    rows = length if times is None else len(times)
    held = _held(attention, tokens, rows, request)
    working = tile_sizes.working_bytes(attention, tokens, request.norm, tile_sizes.tile_size(attention, length))
    allowed = memory.budget(request.budget, tokens.device, 4 * (working + held.maps + held.weights))
    size = tile_sizes.fitting_size(attention, tokens, request.norm, allowed)
    weights, notes = _fit(attention, tokens, rows, request, allowed, size)
    deferred = None
    if weights == "keep" and DeferredWeights.fits(attention, tokens, rows):
        weights, deferred = "leave", DeferredWeights(attention, tokens, times)
    masks = Masks(samples, length, length, attention)
    kept = KeptMaps(masks, times, weights) if request.keep == "map" else KeptSums(masks, times)
    stream = closed_form.tiles(
        attention,
        tokens,
        norm=request.norm,
        paths=request.paths,
        heads=request.heads,
        rows=None if times is None else times.to(tokens.device),
        size=size,
    )
    for tile in watched(stream, rows * samples, _rows_of, "measuring", target.name):
        kept.add(tile)
    if isinstance(kept, KeptMaps):
        kept.finish()
    return Found(kept, times, length, tokens.dtype, "closed form", notes, deferred)


def _rows_of(tile: Tile | Rows) -> int:
    return len(tile.rows) * (tile.samples.stop - tile.samples.start)


class Held(NamedTuple):
    """Bytes that a measurement in closed form hands out: maps or the sums over their rows, and attention weights."""

    maps: int
    weights: int


def _held(attention: SoftmaxAttention, tokens: Tensor, rows: int, request: Request) -> Held:
    samples, length, _ = tokens.shape
    parts, size = _parts(attention, request), tokens.element_size()
    if request.keep == "statistics":
        return Held(
            8 * (samples + 1) * (12 * parts * length) + 8 * samples * attention.heads * (2 * length + 3 * rows), 0
        )
    pairs = samples * rows * length
    return Held(pairs * (parts * size + 2 * attention.masked), pairs * attention.heads * size)


def _parts(attention: SoftmaxAttention, request: Request) -> int:
    """How many maps are wanted."""
    return 1 + 4 * request.paths + attention.heads * request.heads


def _fit(
    attention: SoftmaxAttention, tokens: Tensor, rows: int, request: Request, allowed: int, tile: int
) -> tuple[Weights, list[str]]:
    """Whether the attention weights fit beside the maps (see ``KeptMaps``), and a note where they do not.

    Raises:
        InputError: what is asked for does not fit the budget.
    """
    samples, length, _ = tokens.shape
    parts, held = _parts(attention, request), _held(attention, tokens, rows, request)
    need = tile_sizes.working_bytes(attention, tokens, request.norm, tile) + held.maps
    if request.keep == "statistics":
        memory.refuse_over(
            need,
            allowed,
            f"statistics of {samples} samples and {length} time steps",
            "take fewer samples or time steps, leave paths and heads out, or raise budget=",
        )
        return "sum", []
    what = f"{parts} map{'s' * (parts > 1)} of {samples} samples, {rows} x {length} pairs each,"
    memory.refuse_over(need, allowed, what, _WAY_OUT)
    if need + held.weights <= allowed:
        return "keep", []
    text = f"attention weights ({memory.readable(held.weights)}) are not kept, only their statistics"
    return "sum", [f"{text}; budget= sets the limit"]


def by_autodiff(target: Target, request: Request) -> Found:
    """Differentiates a function, the rows that are asked for only.

    Raises:
        InputError: the function does not run, or what is asked for does not fit the budget.
    """
    target.refuse_parts(request.paths, request.heads)
    queries = target.output_length()
    samples, keys, _ = target.tokens.shape
    times = choose_rows(request.rows, queries, request.seed, target.padding)
    masks = Masks(samples, queries, keys, target.attention, target.padding)
    if request.keep == "statistics":
        return _summed(target, request, masks, times)
    maps = _norm_maps(target, request, queries, times)
    notes = list(maps.notes)
    order = torch.arange(queries) if times is None else times
    sides = [_sides(maps.total, order)]
    _warn_if_nothing(sides, times)
    if target.attention is None and _one_sided(sides, masks, order):
        masks, notes = masks.as_causal(), [*notes, _CAUSAL]
    kept = KeptMaps(masks, times)
    kept.take(maps)
    return Found(kept, times, queries, maps.total.dtype, maps.engine, notes)


def _summed(target: Target, request: Request, masks: Masks, times: Tensor | None) -> Found:
    """The sums of the rows, some at a time, with and without later inputs: which of them count is known at the end."""
    order = torch.arange(masks.queries) if times is None else times
    every, causal = KeptSums(masks, times), KeptSums(masks.as_causal(), times)
    sides: list[Sides] = []
    notes: list[str] = []
    step = max(1, _BLOCK // (masks.samples * masks.keys))
    engine, dtype = "", target.tokens.dtype
    whole = step >= len(order)  # then the one step has a bar of its own
    steps = order.split(step) if whole else watched(order.split(step), len(order), len, "differentiating", target.name)
    for rows in steps:
        maps = _norm_maps(target, request, masks.queries, times if whole else rows, whole)
        engine, dtype = engine or maps.engine, maps.total.dtype
        notes += maps.notes
        tile = Tile(slice(0, masks.samples), rows.to(maps.total.device), maps)
        every.add(tile)
        sides.append(_sides(maps.total, rows))
        if target.attention is None:
            causal.add(tile)
    _warn_if_nothing(sides, order if len(sides) > 1 else times)
    one_sided = target.attention is None and _one_sided(sides, masks, order)
    notes = list(dict.fromkeys(notes)) + [_CAUSAL] * one_sided
    return Found(causal if one_sided else every, times, masks.queries, dtype, engine, notes)


def _norm_maps(target: Target, request: Request, queries: int, times: Tensor | None, shown: bool = True) -> NormMaps:
    """The maps of all rows or of some: one map, or the mean over draws of a model in train mode.

    Args:
        target: what is differentiated.
        request: what is asked for.
        queries: number of output times.
        times: those of the rows; None for all.
        shown: whether this is all there is to do, so that it has the bar.
    """
    function, keys = target.function, target.tokens.shape[1]
    order = torch.arange(queries, device=target.tokens.device) if times is None else times.to(target.tokens.device)
    options: dict[str, Any] = {"norm": request.norm, "chunk": request.chunk, "probes": request.probes}
    options |= {"memory": request.budget, "residual": float(target.residual)}
    if shown:
        options["watch"] = lambda chunks, total: watched(chunks, total, _rows_of, "differentiating", target.name)
    if times is not None:
        function = lambda tokens: target.function(tokens)[:, order]  # noqa: E731
        options["times"] = order % keys  # where lengths differ, none is an output's own: its norms are dropped below
    # probes of every part of the rows are their own; draws of a random function are the same for all rows
    own = 0 if times is None or request.stochastic else int(times[0])
    generator = torch.Generator().manual_seed((request.seed + own) % 2**63)
    if request.stochastic:
        maps = _mean_over_draws(function, target.tokens, request.stochastic, generator, options)
    else:
        maps = autodiff.norm_maps(function, target.tokens, generator=generator, **options)
    if queries != keys:
        maps.diagonal = None
    return maps


def _mean_over_draws(
    function: Callable[[Tensor], Tensor], tokens: Tensor, draws: int, generator: torch.Generator, options: Any
) -> NormMaps:
    """One draw per Jacobian; each has a seed of its own, so that all rows of a map are those of the same draws."""
    seeds = torch.randint(2**62, (draws,), generator=generator).tolist()
    found = [
        autodiff.norm_maps(function, tokens, generator=torch.Generator().manual_seed(seed), stochastic=True, **options)
        for seed in seeds
    ]
    total = torch.stack([maps.total for maps in found])
    diagonals = [maps.diagonal for maps in found if maps.diagonal is not None]
    return NormMaps(
        total=total.mean(dim=0),
        diagonal=torch.stack(diagonals).mean(dim=0) if diagonals else None,
        standard_error=total.std(dim=0) / draws**0.5 if draws > 1 else None,
        engine=f"{found[0].engine}, mean of {draws} draws",
        notes=found[0].notes,
    )


class Sides(NamedTuple):
    """On what any of some rows depends: later inputs, earlier ones, its own."""

    later: bool
    earlier: bool
    own: bool


def _sides(norms: Tensor, times: Tensor) -> Sides:
    keys = torch.arange(norms.shape[2], device=norms.device)
    ahead = keys - times.to(norms.device)[:, None]
    return Sides(*(bool(norms.masked_select(where).any()) for where in (ahead > 0, ahead < 0, ahead == 0)))


def _warn_if_nothing(sides: list[Sides], times: Tensor | None) -> None:
    """Warns of rows that depend on nothing; of whole maps the engine itself warns."""
    if times is not None and not any(map(any, sides)):
        autodiff.warn_unused()


def _one_sided(sides: list[Sides], masks: Masks, times: Tensor) -> bool:
    """Whether no row depends on a later input although there are some, and some row on an earlier one.

    A model without a description whose map vanishes exactly above the diagonal is taken to be causal.
    """
    there = masks.queries == masks.keys > 1 and int(times.min()) < masks.keys - 1
    return there and not any(side.later for side in sides) and any(side.earlier for side in sides)

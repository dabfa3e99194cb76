"""The ways to a measurement: the closed form of an attention layer, or automatic differentiation of anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.collecting import KeptMaps, KeptSums, Masks, choose_rows, watched
from sensitivity.errors import InputError
from sensitivity.jacobian import autodiff, closed_form, memory
from sensitivity.jacobian.closed_form import Tile
from sensitivity.jacobian.norms import Norm, NormMaps
from sensitivity.target import Target

Keep = Literal["map", "statistics"]
KEEPS = ("map", "statistics")
_HEIGHT = 16  # rows of a tile, so that what all keys have in common is read once for that many
_WIDEST = 2**25  # numbers of a tile however long the sequence is
_BLOCK = 2**22  # entries of the maps that automatic differentiation hands on at a time
_WAY_OUT = (
    "measure with keep='statistics', which holds no map, or some query rows with rows=; or take fewer samples or time "
    "steps, leave paths and heads out, or raise budget="
)


@dataclass(frozen=True)
class Request:
    """What a caller of ``measure`` asks for; names as there."""

    norm: Norm
    keep: Keep
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
    """

    kept: KeptMaps | KeptSums
    times: Int[Tensor, " row"] | None
    queries: int
    dtype: torch.dtype
    engine: str
    notes: list[str]


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
    weights, notes = _fit(attention, tokens, rows, request)
    masks = Masks(samples, length, length, attention)
    kept = KeptMaps(masks, times, weights) if request.keep == "map" else KeptSums(masks, times)
    stream = closed_form.tiles(
        attention,
        tokens,
        norm=request.norm,
        paths=request.paths,
        heads=request.heads,
        rows=None if times is None else times.to(tokens.device),
        size=_tile(attention, length),
    )
    sizes: Callable[[Tile], int] = lambda tile: len(tile.rows) * (tile.samples.stop - tile.samples.start)  # noqa: E731
    for tile in watched(stream, rows * samples, sizes, f"measuring {target.name}"):
        kept.add(tile)
    return Found(kept, times, length, tokens.dtype, "closed form", notes)


def _tile(attention: SoftmaxAttention, length: int) -> int:
    """Numbers in a tile: more for long sequences, where a tile of the usual size would be a row or two."""
    per_row = length * attention.heads * (attention.heads + 1) // 2
    return max(closed_form.TILE, min(_HEIGHT * per_row, _WIDEST))


def _fit(attention: SoftmaxAttention, tokens: Tensor, rows: int, request: Request) -> tuple[bool, list[str]]:
    """Whether the attention weights fit beside the maps, and a note where they do not.

    Raises:
        InputError: what is asked for does not fit the budget.
    """
    samples, length, _ = tokens.shape
    allowed, size = memory.budget(request.budget, tokens.device), tokens.element_size()
    parts = 1 + 4 * request.paths + attention.heads * request.heads
    working = _working(attention, tokens, request)
    if request.keep == "statistics":
        sums = 8 * (samples + 1) * (12 * parts * length) + 8 * samples * attention.heads * (2 * length + 3 * rows)
        memory.refuse_over(
            working + sums,
            allowed,
            f"statistics of {samples} samples and {length} time steps",
            "take fewer samples or time steps, leave paths and heads out, or raise budget=",
        )
        return False, []
    pairs = samples * rows * length
    need = working + pairs * (parts * size + 2 * attention.masked)
    memory.refuse_over(
        need, allowed, f"{parts} map{'s' * (parts > 1)} of {samples} samples, {rows} x {length} pairs each,", _WAY_OUT
    )
    weights = pairs * attention.heads * size
    if need + weights <= allowed:
        return True, []
    text = f"attention weights ({memory.readable(weights)}) are not kept, only their statistics; budget= sets the limit"
    return False, [text]


def _working(attention: SoftmaxAttention, tokens: Tensor, request: Request) -> int:
    """About how many bytes the closed form needs at a time, for the samples of a tile."""
    length, size = tokens.shape[1], tokens.element_size()
    heads, width, value = attention.heads, attention.width, attention.value_weight.shape[1]
    pairs = heads * (heads + 1) // 2
    per_time = 4 * heads * max(width, value) + pairs * (2 * value + 2)
    tile = min(_tile(attention, length), tokens.shape[0] * pairs * length**2)
    together = max(1, min(tokens.shape[0], tile // max(1, pairs * length**2)))
    products = min(heads * length * width * value, 2**25)
    if request.norm == "spectral":
        tile *= 16
    return size * (together * (length * per_time + products) + 3 * tile)


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
    if request.keep == "map":
        maps = _norm_maps(target, request, queries, times)
        kept = KeptMaps(masks, times)
        kept.take(maps)
        notes = maps.notes + _take_causal(kept)
        return Found(kept, times, queries, maps.total.dtype, maps.engine, notes)
    return _summed(target, request, queries, times, masks)


def _take_causal(kept: KeptMaps) -> list[str]: ...

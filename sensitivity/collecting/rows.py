"""Which query rows are measured."""

from __future__ import annotations

import operator
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sensitivity.errors import InputError

_KINDS = "rows must be a number of query rows, or the query times of the rows that are wanted"


def choose_rows(
    rows: Any, length: int, seed: int = 0, padding: Bool[Tensor, "#sample time"] | None = None
) -> Int[Tensor, " row"] | None:
    """The query times to measure.

    Args:
        rows: so many of them, drawn without replacement by a generator with the stated seed, in their order; or the
            query times themselves, which stay in the order given; or None for all.
        length: number of query times.
        seed: of the draw.
        padding: positions that are padding in every sample are not drawn.

    Returns:
        The query times; None for all.

    Raises:
        InputError: neither a number nor query times, more than there are, or one of them twice.
    """
    if rows is None:
        return None
    if hasattr(rows, "__index__") and not isinstance(rows, bool) and getattr(rows, "ndim", 0) == 0:
        return _drawn(operator.index(rows), length, seed, padding)
    times = _times(rows)
    bad = times[(times < 0) | (times >= length)]
    if len(bad):
        raise InputError(f"rows name the query time {int(bad[0])}, but there are times 0 to {length - 1}.")
    if len(times.unique()) < len(times):
        twice = times[(times[:, None] == times).sum(dim=1) > 1] if len(times) < 4096 else times.sort().values
        raise InputError(f"rows name the query time {int(twice[0])} more than once; name each time once.")
    return times


def _drawn(count: int, length: int, seed: int, padding: Tensor | None) -> Int[Tensor, " row"]:
    real = torch.arange(length)
    if padding is not None and padding.shape[-1] == length:
        real = real[~padding.all(dim=0).cpu()]
    if not 1 <= count <= len(real):
        which = f"{len(real)}" if len(real) == length else f"the {len(real)} of {length} that are not padding"
        raise InputError(
            f"rows={count} query rows cannot be drawn from {which}; ask for 1 to {len(real)}, or leave rows out "
            "to measure them all."
        )
    order = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed))
    return real[order[:count]].sort().values


def _times(rows: Any) -> Int[Tensor, " row"]:
    """The query times as a tensor on the CPU."""
    try:
        times = torch.as_tensor(list(rows) if isinstance(rows, range) else rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{_KINDS}, not {rows!r}.") from error
    whole = not (times.is_floating_point() or times.is_complex() or times.dtype == torch.bool)
    if times.ndim != 1 or not whole or not len(times):
        raise InputError(f"{_KINDS}, not {rows!r}.")
    return times.detach().cpu().long()

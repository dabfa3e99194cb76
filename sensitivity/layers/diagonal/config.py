"""Regularisers from plain values, as checkpoints keep them."""

from __future__ import annotations

from typing import Any

from sensitivity.errors import InputError
from sensitivity.layers.diagonal.base import Diagonal
from sensitivity.layers.diagonal.dropout import DiagonalDropout
from sensitivity.layers.diagonal.mask import DiagonalMask
from sensitivity.layers.diagonal.penalty import DiagonalLearnedPenalty, DiagonalLengthPenalty, DiagonalPenalty

_ALL: tuple[type[Diagonal], ...] = (
    DiagonalMask,
    DiagonalPenalty,
    DiagonalLearnedPenalty,
    DiagonalLengthPenalty,
    DiagonalDropout,
)
_KINDS = {kind.kind: kind for kind in _ALL}


def diagonal_from_config(config: dict[str, Any] | None) -> Diagonal | None:
    """The regulariser that ``Diagonal.config`` described; None for None.

    Raises:
        InputError: an unknown kind, or arguments that this kind does not take.
    """
    if config is None:
        return None
    arguments = {name: value for name, value in config.items() if name != "kind"}
    kind = _KINDS.get(config.get("kind", ""))
    if kind is None:
        raise InputError(f"unknown diagonal regulariser {config.get('kind')!r}; known: {', '.join(sorted(_KINDS))}.")
    try:
        return kind(**arguments)
    except TypeError:
        raise InputError(f"{kind.__name__} does not take the arguments {sorted(arguments)}.") from None

"""From the plain values of a checkpoint to the arguments of a model."""

from __future__ import annotations

from typing import Any

from sensitivity.errors import InputError
from sensitivity.layers.diagonal import Diagonal, diagonal_from_config
from sensitivity.layers.dropout import check_dropout
from sensitivity.layers.gate import ResidualGate, residual_from_config


def sizes(**values: Any) -> dict[str, int]:
    """Checks the sizes of a model.

    Raises:
        InputError: not an integer, or below 1; the message names it.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be an integer of at least 1, not {value!r}.")
    return values


def described(
    heads: int, dropout: float | int, diagonal: Diagonal | None, residual: bool | ResidualGate, day_of_week: bool
) -> dict[str, Any]:
    """The entries of ``config`` that all forecasters have, besides their sizes.

    Raises:
        InputError: a dropout that is no rate below 1.
    """
    return {
        "heads": heads,
        "dropout": check_dropout(dropout, "dropout"),
        "diagonal": None if diagonal is None else diagonal.config(),
        "residual": residual.config() if isinstance(residual, ResidualGate) else residual,
        "day_of_week": bool(day_of_week),
    }


def arguments(config: dict[str, Any], names: tuple[str, ...], model: str) -> dict[str, Any]:
    """The arguments that build a model again, regularisers included.

    Args:
        config: plain values.
        names: entries that the model has.
        model: what the message calls it.

    Raises:
        InputError: names that the model does not have, no number of nodes, or a regulariser that is not known.
    """
    unknown = sorted(set(config) - set(names))
    if unknown or "nodes" not in config:
        fault = f"unknown: {', '.join(unknown)}" if unknown else "'nodes' is missing"
        raise InputError(f"this is not the configuration of a {model} ({fault}).")
    return config | {
        "diagonal": diagonal_from_config(config.get("diagonal")),
        "residual": residual_from_config(config.get("residual", True)),
    }

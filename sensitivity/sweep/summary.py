"""The content of ``summary.json``: plain values, None where a number is undefined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sensitivity.fit import MINIMUM_LENGTHS, Decay

if TYPE_CHECKING:
    from sensitivity.sweep.record import Record
    from sensitivity.sweep.result import Sweep

FITTED = ("off_diagonal", "diagonal", "diagonal_residual_removed", "off_diagonal_value", "off_diagonal_key")


def summary(found: Sweep) -> dict[str, Any]:
    """One entry for each layer, its numbers at the longest length; then where they come from."""
    entries = {
        "layers": [_layer(found, layer) for layer in found.layers],
        "failures": [{"length": length, "reason": reason} for length, reason in sorted(found.failures.items())],
        "provenance": found.provenance,
    }
    plain: dict[str, Any] = strict(entries)
    return plain


def strict(value: Any) -> Any:
    """The same without NaN and infinities, which JSON has not got: None stands in their place."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _layer(found: Sweep, layer: str) -> dict[str, Any]:
    """``violations`` and ``blocks`` of a bound count over all lengths; everything else is at the longest."""
    records = [found.record(layer, length) for length in found.lengths]
    entry = _length(records[-1])
    fits = {name: _decay(found.decay(layer, name)) for name in FITTED if name in records[-1].statistics}
    fits["off_diagonal_longest"] = _decay(found.decay(layer, lengths=found.lengths[-MINIMUM_LENGTHS:]))
    return {
        "name": layer,
        **entry,
        "decay": fits if any(fits.values()) else None,
        "bounds": {
            name: bound
            | {
                "violations": sum(record.bounds[name].violations for record in records if name in record.bounds),
                "blocks": sum(record.bounds[name].blocks for record in records if name in record.bounds),
            }
            for name, bound in entry["bounds"].items()
        },
        "per_length": [_length(record) for record in records],
    }


def _length(record: Record) -> dict[str, Any]:
    one = record.statistics

    def pair(name: str) -> dict[str, float | None]:
        return {"raw": one.get(name), "residual_removed": one.get(f"{name}_residual_removed")}

    def with_null(name: str) -> dict[str, float | None]:
        return {"mean": one[name], "null": one[name].null}

    removed = one.get("parroting_index_residual_removed")
    return {
        "length": record.length,
        "samples": len(record.groups),
        "units": record.units,
        "off_diagonal": one["off_diagonal"],
        "diagonal": pair("diagonal"),
        "sink_ratio": pair("sink_ratio"),
        "parroting_index": with_null("parroting_index") | {"residual_removed": removed},
        "diagonal_attention": with_null("diagonal_attention"),
        "key_sink": with_null("key_sink") | {"key": one["key_sink"].where},
        "row_entropy": one["row_entropy"],
        "paths": {
            "off_diagonal": {name: one[f"off_diagonal_{name}"] for name in ("value", "key")},
            "diagonal": {name: one[f"diagonal_{name}"] for name in ("residual", "value", "key", "query")},
        },
        "bounds": {name: verdict.plain() for name, verdict in record.bounds.items()},
    }


def _decay(fit: Decay | None) -> dict[str, Any] | None:
    if fit is None:
        return None
    return {
        "exponent": fit.exponent,
        "interval": list(fit.interval),
        "r_squared": fit.r_squared,
        "lengths": list(fit.lengths),
    }

"""How much the trained models of a comparison depend on every input time: the same windows for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensitivity import checkpoint, checks
from sensitivity.errors import InputError
from sensitivity.reproduction.plan import Cell
from sensitivity.result import SensitivityMap
from sensitivity.sweep import Sweep, fingerprint, sweep
from sensitivity.sweep.trained import trained_layers
from sensitivity.traffic import Scaler, Traffic, reopen

STATISTICS = (
    "sink_ratio", "sink_ratio_residual_removed", "parroting_index", "diagonal_attention", "off_diagonal", "diagonal",
    "diagonal_residual", "diagonal_value", "diagonal_key", "diagonal_query", "off_diagonal_value", "off_diagonal_key",
)  # fmt: skip
"""What is recorded of every layer."""


@dataclass(frozen=True)
class Probe:
    """What is measured of every trained model.

    Attributes:
        lengths: sequence lengths; None for the length of training and eight times that.
        windows: test windows.
        sensors: of each window; all where there are fewer.
        seed: of the choice of windows and sensors.
        norm: of the blocks.
    """

    lengths: Sequence[int] | None = None
    windows: int = 16
    sensors: int = 16
    seed: int = 0
    norm: str = "frobenius"

    def __post_init__(self) -> None:
        for name in ("windows", "sensors"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer of at least 1, not {value!r}.")
        if self.lengths is not None:
            checks.lengths(self.lengths)

    def at(self, trained: int) -> list[int]:
        """The lengths, for a model that was trained at ``trained`` steps."""
        return [trained, 8 * trained] if self.lengths is None else checks.lengths(self.lengths)


def measure_cell(cell: Cell, probe: Probe, traffic: Traffic | None = None) -> Sweep:
    """The sweep of one trained model, kept beside it as ``sensitivity.nc`` and taken up from there.

    Raises:
        InputError: a damaged checkpoint, or lengths for which the test rows do not suffice.
    """
    loaded = checkpoint.load(cell.folder / "ckpt.pt")
    lengths = probe.at(cell.settings.input_length)
    settings = {"model": loaded.sha256, "lengths": lengths, "windows": probe.windows, "sensors": probe.sensors}
    settings |= {"seed": probe.seed, "norm": probe.norm}
    place, key = cell.folder / "sensitivity.nc", fingerprint(settings)
    kept = _kept(place, key)
    if kept is not None:
        return kept
    traffic = reopen(loaded.data or {}) if traffic is None else traffic
    scaler = Scaler.from_state(loaded.scaler or {})
    source = trained_layers(
        loaded, traffic, scaler, lengths[-1], windows=probe.windows, per_window=probe.sensors, seed=probe.seed
    )
    norm: Any = probe.norm
    provenance = {"settings": key, "model": {"sha256": loaded.sha256, "file": cell.name}}
    found = sweep(source, lengths, norm=norm, bounds=(), keep=lengths, seed=probe.seed, provenance=provenance)
    found.save(place)
    return found


def layer_values(found: Sweep, length: int) -> dict[str, dict[str, float]]:
    """Statistics by layer and name at one length; what is undefined is left out."""
    values: dict[str, dict[str, float]] = {}
    for layer in found.layers:
        statistics = found.record(layer, length).statistics
        values[layer] = {name: float(statistics[name]) for name in STATISTICS if name in statistics}
    return values


def mean_map(sweeps: Mapping[int, Sweep], layer: str, length: int) -> SensitivityMap:
    """The maps of one layer, a sample for every seed; drawing it draws the mean over seeds."""
    maps = [found.map(layer, length) for found in sweeps.values()]
    attention = [one.attention for one in maps if one.attention is not None]
    attended = [one.attended_pairs() for one in maps]
    return SensitivityMap(
        norms=torch.cat([one.norms for one in maps]),
        attention=torch.cat(attention) if attention else None,
        visible=torch.cat([one.visible for one in maps]),
        attended=torch.cat(attended) if attention else None,
        norm=maps[0].norm,
        name=layer,
        notes=[f"one sample for every seed: {', '.join(map(str, sweeps))}"],
    )


def _kept(place: Path, key: str) -> Sweep | None:
    """An earlier measurement under the same settings; one that cannot be read is made again."""
    if not place.is_file():
        return None
    try:
        found = Sweep.load(place)
    except InputError:
        return None
    return found if found.provenance.get("settings") == key else None

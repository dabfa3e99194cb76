"""What a training run is told, as plain values that are written beside its results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensitivity.errors import InputError

DEVICES = ("auto", "cpu", "cuda", "mps")
_PLACE = ("out", "resume", "device", "tensorboard")
"""Settings that say where and how a run is carried out, not what it computes."""
_COUNTS = ("depth", "dim", "heads", "epochs", "batch_size", "patience", "input_length", "horizon")


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on. The defaults are those of the published recipe, with a small model.

    Attributes:
        data: a traffic file, or ``synthetic`` (``synthetic:nodes=10,days=7`` to say more).
        out: the folder that the run writes to.
        graph: the road graph's file.
        protocol: ``dcrnn`` or ``paper``.
        variant: what is done to the diagonal: ``none``, ``no-residual``, ``mask``, ``dropout``, ``penalty``,
            ``learned-penalty``, ``length-penalty`` or ``gate``.
        depth: blocks of the model.
        dim: width of the model.
        heads: attention heads.
        spatial: ``as_published``, ``adaptive``, ``distance`` or ``none``.
        dropout: the model's one dropout rate.
        epochs: passes over the training windows; the learning rate's schedule is spread over them.
        batch_size: windows in a step.
        lr: highest learning rate.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        patience: epochs without a better validation error after which the run stops.
        seed: of the weights, the order of the windows and the dropout.
        dropout_rate: for the variant ``dropout``.
        penalty_value: for the variant ``penalty``; where ``learned-penalty`` begins; for ``length-penalty`` the value
            at ``input_length``.
        where: for the variant ``dropout``: ``logits`` or ``weights``.
        shared: for the variant ``dropout``: one draw for all samples and heads.
        gate_value: for the variant ``gate``: the factor of the residual.
        gate_learned: for the variant ``gate``: train the factor, from ``gate_value`` on.
        day_of_week: give the day of the week to the model, beside the time of day.
        input_length: rows of input in a window.
        horizon: rows to forecast.
        resume: continue the run in ``out``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        tensorboard: also write a TensorBoard log.

    Raises:
        InputError: a value out of its range, one sentence each.
    """

    data: str = "synthetic"
    out: str = "runs/train"
    graph: str | None = None
    protocol: str = "dcrnn"
    variant: str = "none"
    depth: int = 2
    dim: int = 32
    heads: int = 4
    spatial: str = "as_published"
    dropout: float = 0.1
    epochs: int = 30
    batch_size: int = 128
    lr: float = 2e-4
    weight_decay: float = 0.01
    clip: float = 5.0
    patience: int = 20
    seed: int = 0
    dropout_rate: float = 0.1
    penalty_value: float = -0.05
    where: str = "logits"
    shared: bool = False
    gate_value: float | int = 0.5
    gate_learned: bool = False
    day_of_week: bool = False
    input_length: int = 12
    horizon: int = 12
    resume: bool = False
    device: str = "auto"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name), 1)
        _check_count("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise InputError(f"seed must be below 2**63, not {self.seed}.")
        for name in ("lr", "clip"):
            _check_number(name, getattr(self, name), above=0.0)
        _check_number("weight_decay", self.weight_decay)
        if self.device not in DEVICES:
            raise InputError(f"unknown device {self.device!r}; choose one of {', '.join(DEVICES)}.")

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.out)

    def identity(self) -> dict[str, Any]:
        """The settings that the result depends on; a resumed run must have the same."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _PLACE}

    @classmethod
    def from_identity(cls, values: dict[str, Any], **others: Any) -> Settings:
        """Settings from :meth:`identity` and the rest; names that this release does not know are an error.

        Raises:
            InputError: unknown names.
        """
        known = {field.name for field in dataclasses.fields(cls)} - set(_PLACE)
        unknown = sorted(set(values) - known)
        if unknown:
            raise InputError(
                f"the run was set up by another version: this one does not know the settings {', '.join(unknown)}."
            )
        return cls(**values, **others)


def _check_count(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} must be an integer of at least {low}, not {value!r}.")


def _check_number(name: str, value: Any, above: float | None = None) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above is not None and value <= above):
        raise InputError(
            f"{name} must be a finite number {'above' if above is not None else 'of at least'} 0, not {value!r}."
        )

"""What a training run is told, as plain values that are written beside its results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensitivity.errors import InputError

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32", "bf16")
_PLACE = ("out", "resume", "device", "tensorboard", "diagnose_every")
"""Settings that say where and how a run is carried out, not what it computes."""
_BACKBONES: dict[str, dict[str, Any]] = {
    "forecaster": {
        "depth": 2, "dim": 32, "heads": 4, "spatial": "as_published", "day_of_week": False, "recipe": "cosine"
    },
    "staeformer": {"depth": 3, "dim": 152, "heads": 4, "spatial": "attention", "day_of_week": True, "recipe": "steps"},
}  # fmt: skip
"""What a backbone is built with unless told otherwise."""
_RECIPES: dict[str, dict[str, Any]] = {
    "cosine": {"batch_size": 128, "lr": 2e-4, "weight_decay": 0.01, "clip": 5.0},
    "steps": {"batch_size": 16, "lr": 1e-3, "weight_decay": 3e-4, "clip": 0.0},
}
"""What a recipe says beside optimiser and schedule."""
RECIPES = tuple(_RECIPES)
SINK_WEIGHT = 0.1
_QUIRKS = {
    "loss": "computed in bfloat16, like the network; validation and test too",
    "tested weights": "those of the last epoch, not of the best",
    "validation error": "mean over batches of each batch's error, whatever number of readings it has",
    "scaler": "missing readings count as 0 mph",
    "diagonal dropout": "one draw of logits for all samples, heads and nodes of a pass",
}
_COUNTS = ("depth", "dim", "heads", "epochs", "batch_size", "patience", "input_length", "horizon", "sink_sequences")


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on. What is None follows the backbone and the recipe.

    The defaults are those of the published recipe with a small forecaster; for ``backbone="staeformer"`` its published
    sizes, inputs and recipe.

    Attributes:
        data: a traffic file, or ``synthetic`` (``synthetic:nodes=10,days=7`` to say more).
        out: the folder that the run writes to.
        graph: the road graph's file.
        key: table or array of the traffic file, where it has several.
        channel: of an array ``(time, node, channel)``.
        protocol: ``dcrnn`` or ``paper``.
        variant: what is done to the diagonal: ``none``, ``no-residual``, ``mask``, ``dropout``, ``penalty``,
            ``learned-penalty``, ``length-penalty``, ``gate`` or ``sink-penalty``.
        backbone: ``forecaster`` or ``staeformer``.
        depth: blocks of the model; 2, or 3 layers over time and 3 over nodes.
        dim: width of the model; 32, or 152.
        heads: attention heads; 4.
        spatial: ``as_published`` (default), ``adaptive``, ``distance`` or ``none``; a staeformer has ``attention``.
        dropout: the model's one dropout rate.
        recipe: ``cosine`` (AdamW, warm-up, then a half cosine over the epochs), or ``steps`` (Adam, a tenth of the
            rate after 20 and after 30 epochs); that of the backbone by default.
        epochs: passes over the training windows.
        batch_size: windows in a step; 128, or 16 for ``steps``.
        lr: highest learning rate; 2e-4, or 1e-3 for ``steps``.
        weight_decay: of the optimiser; 0.01, or 3e-4 for ``steps``.
        clip: largest norm of the gradient, 0 for any; 5, or 0 for ``steps``.
        patience: epochs without a better validation error after which the run stops.
        seed: of the weights, the order of the windows and the dropout.
        dropout_rate: for the variant ``dropout``.
        penalty_value: for the variant ``penalty``; where ``learned-penalty`` begins; for ``length-penalty`` the value
            at ``input_length``.
        where: for the variant ``dropout``: ``logits`` or ``weights``.
        shared: for the variant ``dropout``: one draw for all samples and heads.
        gate_value: for the variant ``gate``: the factor of the residual.
        gate_learned: for the variant ``gate``: train the factor, from ``gate_value`` on.
        sink_weight: of the logarithm of the sink ratio in the loss; 0.1 for the variant ``sink-penalty``, else 0.
        sink_sequences: sequences of a step that the ratio is taken of.
        day_of_week: give the day of the week to the model, beside the time of day; a staeformer has it by default.
        precision: of the network in training: ``32``, or ``bf16`` by autocast, with the loss in float32. Validation and
            test are always computed in float32.
        as_published: every quirk of the published training at once, see :meth:`quirks`; sets ``precision``, ``where``
            and ``shared``.
        devices: processes that share every batch, on as many devices (or on as many CPU processes).
        input_length: rows of input in a window.
        horizon: rows to forecast.
        resume: continue the run in ``out``.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        tensorboard: also write a TensorBoard log.
        diagnose_every: epochs between two looks at the attention layers, written to ``diagnostics.csv``; 0 for none.

    Raises:
        InputError: a value out of its range, one sentence each.
    """

    data: str = "synthetic"
    out: str = "runs/train"
    graph: str | None = None
    key: str | None = None
    channel: int = 0
    protocol: str = "dcrnn"
    variant: str = "none"
    backbone: str = "forecaster"
    depth: int = None  # type: ignore[assignment]  # until __post_init__, as all that is None here
    dim: int = None  # type: ignore[assignment]
    heads: int = None  # type: ignore[assignment]
    spatial: str = None  # type: ignore[assignment]
    dropout: float = 0.1
    recipe: str = None  # type: ignore[assignment]
    epochs: int = 30
    batch_size: int = None  # type: ignore[assignment]
    lr: float = None  # type: ignore[assignment]
    weight_decay: float = None  # type: ignore[assignment]
    clip: float = None  # type: ignore[assignment]
    patience: int = 20
    seed: int = 0
    dropout_rate: float = 0.1
    penalty_value: float = -0.05
    where: str = "logits"
    shared: bool = False
    gate_value: float | int = 0.5
    gate_learned: bool = False
    sink_weight: float | int = None  # type: ignore[assignment]
    sink_sequences: int = 8
    day_of_week: bool = None  # type: ignore[assignment]
    precision: str = "32"
    as_published: bool = False
    devices: int = 1
    input_length: int = 12
    horizon: int = 12
    resume: bool = False
    device: str = "auto"
    tensorboard: bool = False
    diagnose_every: int = 0

    def __post_init__(self) -> None:
        if not str(self.out).strip():
            raise InputError("out is empty; name the folder of the run.")
        self._fill(_chosen(_BACKBONES, "backbone", self.backbone))
        self._fill(_chosen(_RECIPES, "recipe", self.recipe))
        self._fill({"sink_weight": SINK_WEIGHT if self.variant == "sink-penalty" else 0.0})
        for name in _COUNTS:
            _check_count(name, getattr(self, name), 1)
        _check_count("seed", self.seed, 0)
        _check_count("channel", self.channel, 0)
        if self.seed >= 2**63:
            raise InputError(f"seed must be below 2**63, not {self.seed}.")
        _check_number("lr", self.lr, above=0.0)
        for name in ("weight_decay", "clip", "sink_weight"):
            _check_number(name, getattr(self, name))
        if self.variant == "sink-penalty" and not self.sink_weight:
            raise InputError("the variant sink-penalty with a sink weight of 0 is none; give it a positive one.")
        if self.sink_weight and self.input_length < 2:
            raise InputError(f"the sink ratio needs input_length of at least 2, not {self.input_length}.")
        _check_count("devices", self.devices, 1)
        _check_count("diagnose_every", self.diagnose_every, 0)
        for name, known in (("device", DEVICES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise InputError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(known)}.")
        if self.as_published:
            self._take_quirks()

    def _take_quirks(self) -> None:
        if self.where != "logits":
            raise InputError(
                f"as_published drops diagonal logits, as the published code does, but where={self.where!r}; leave out "
                "one of the two."
            )
        object.__setattr__(self, "precision", "bf16")
        object.__setattr__(self, "shared", True)

    @property
    def evaluation_precision(self) -> str:
        """Of the network in validation and test."""
        return self.precision if self.as_published else "32"

    def quirks(self) -> dict[str, str]:
        """What ``as_published`` changes, by name; empty without it.

        One published quirk changes no number of the training and is left out: attention maps logged after dropout, from
        the last block only.
        """
        return dict(_QUIRKS) if self.as_published else {}

    def _fill(self, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

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


def _chosen(known: dict[str, dict[str, Any]], what: str, name: str) -> dict[str, Any]:
    if name not in known:
        raise InputError(f"unknown {what} {name!r}; choose one of {', '.join(known)}.")
    return known[name]


def _check_count(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} must be an integer of at least {low}, not {value!r}.")


def _check_number(name: str, value: Any, above: float | None = None) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above is not None and value <= above):
        raise InputError(
            f"{name} must be a finite number {'above' if above is not None else 'of at least'} 0, not {value!r}."
        )

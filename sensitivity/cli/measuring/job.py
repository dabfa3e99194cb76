"""What is to be measured: from the options to a source of layers and tokens."""

from __future__ import annotations

import dataclasses
import shlex
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sensitivity import checkpoint
from sensitivity.attention import SoftmaxAttention
from sensitivity.checkpoint import Checkpoint
from sensitivity.cli.options import flag, parse_assignments
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.sweep import BOUNDS, RandomTokens
from sensitivity.sweep.source import Source, check_layers
from sensitivity.sweep.trained import trained_layers, trained_split
from sensitivity.traffic import Scaler, Traffic, reopen, split, synthetic_city
from sensitivity.traffic.files import checksum

WINDOWS, SENSORS, SEQUENCES = 16, 32, 8
STEPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Job:
    """A measurement that is ready to run.

    Attributes:
        source: of layers and tokens.
        lengths: sequence lengths.
        norm: of the blocks.
        seed: of every random draw.
        keep: lengths whose maps are kept besides the longest.
        settings: what the numbers depend on.
        provenance: where they come from, in words.
        headline: what is measured, line by line.
        notes: what the reader should know.
        bounds: bounds to check.
        statistics_only: whether no map is kept at any length.
        rows: how many query rows of every sequence are measured; all unless given.
    """

    source: Source
    lengths: list[int]
    norm: Any
    seed: int
    keep: tuple[int, ...]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    headline: list[str]
    notes: list[str] = field(default_factory=list)
    bounds: tuple[str, ...] = BOUNDS
    statistics_only: bool = False
    rows: int | None = None


def of_random(random: str, lengths: list[int] | None, samples: int | None, norm: str, seed: int) -> Job:
    """Random layers at random tokens, in float64.

    Raises:
        InputError: an unknown key or a value that does not fit, such as heads that do not divide dim.
    """
    given = parse_assignments(random, _RANDOM, "--random")
    spec = {"dim": 72, "heads": 8, "gain": 1.0, "layers": 1} | given
    lengths = lengths or [8, 16, 32, 64, 128, 256]
    samples = samples or SEQUENCES
    if spec["layers"] < 1:
        raise InputError(f"--random: layers must be at least 1, not {spec['layers']}.")
    options = {name: value for name, value in spec.items() if name not in ("layers", "mask")}
    if spec.get("mask"):
        options["diagonal_bias"] = -np.inf
    layers = {}
    for index in range(spec["layers"]):
        name = "random" if spec["layers"] == 1 else f"random.{index}"
        layers[name] = SoftmaxAttention.random(seed=_layer_seed(seed, index), dtype=torch.float64, **options)
    text = ",".join(f"{name}={value}" for name, value in spec.items())
    settings = {"random": text, "samples": samples, "seed": seed}
    arguments = ["--random", text, "--samples", str(samples)]
    return Job(
        source=RandomTokens(layers, samples, seed),
        lengths=lengths,
        norm=norm,
        seed=seed,
        keep=(),
        settings=settings,
        provenance=_provenance(arguments, lengths, norm, seed, samples, "float64")
        | {"model": {"kind": "random", "spec": spec}, "data": {"name": "tokens N(0, I)"}},
        headline=[f"random layers ({text})", f"{samples} sequences of tokens N(0, I) at every length"],
    )


def of_model(
    model: str,
    data: str | None,
    graph: str | None,
    lengths: list[int] | None,
    layers: str | None,
    samples: int | None,
    norm: str,
    seed: int,
    sensors: int | None = None,
    trust_pickle: bool = False,
    builder: str | None = None,
    key: str | None = None,
    channel: int = 0,
) -> Job:
    """The attention layers of a checkpoint's model, on windows of traffic.

    Raises:
        InputError: a file that cannot be used, an unknown layer, lengths longer than the data.
    """
    for option, value in (("graph", graph), ("key", key), ("channel", channel or None)):
        if value is not None and data is None:
            raise InputError(f"--{option} {value} belongs to a traffic file; name that with --data.")
    loaded = checkpoint.load(model, trust_pickle=trust_pickle, builder=builder)
    names = check_layers(loaded.model, _split(layers))
    trained = int(loaded.config.get("input_length") or (loaded.data or {}).get("input_length") or 12)
    lengths = lengths or [trained * step for step in STEPS]
    samples, sensors = samples or WINDOWS, sensors or SENSORS
    traffic, notes = open_data(loaded, data, graph, key, channel)
    scaler, more = _scaler(loaded, traffic)
    source = trained_layers(loaded, traffic, scaler, lengths[-1], names, windows=samples, per_window=sensors, seed=seed)
    source.draw(lengths[0])  # whatever is wrong with the data is said now, before anything is measured or written
    parameter = next((p for p in loaded.model.parameters() if p.is_floating_point()), torch.empty(0))
    named = {"sha256": loaded.sha256, "file": Path(model).name, "kind": type(loaded.model).__name__}
    described = _data(traffic)
    settings: dict[str, Any] = {"model": loaded.sha256, "builder": builder, "data": described, "layers": list(names)}
    settings |= {"samples": samples, "sensors": sensors, "seed": seed, "longest": lengths[-1]}
    arguments = ["--model", Path(model).name, *([] if data is None else ["--data", Path(data).name])]
    arguments += [*([] if key is None else ["--key", key]), *(["--channel", str(channel)] if channel else [])]
    arguments += [*([] if layers is None else ["--layers", layers]), "--samples", str(samples)]
    arguments += ["--sensors", str(sensors)]
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Job(
        source=source,
        lengths=lengths,
        norm=norm,
        seed=seed,
        keep=(trained,),
        settings=settings,
        provenance=_provenance(arguments, lengths, norm, seed, samples, dtype) | {"model": named, "data": described},
        headline=_headline(named, traffic, samples, sensors, len(names)),
        notes=[*loaded.notes, *notes, *more, *_beyond(loaded.model, lengths[-1], trained)],
    )


def streaming(job: Job, keep: str, rows: int | None) -> Job:
    """The job that keeps statistics and no maps, or measures some query rows of every sequence."""
    if keep == "map" and rows is None:
        return job
    given = {"--keep": "statistics"} if keep == "statistics" else {}
    given |= {} if rows is None else {"--rows": str(rows)}
    command = " ".join([job.provenance["command"], *(word for pair in given.items() for word in pair)])
    some = f"{rows} query rows of every sequence, drawn with seed {job.seed}"
    some_rows = [] if rows is None else [some, "the bounds are checked on rows of their own"]
    return dataclasses.replace(
        job,
        statistics_only=True,
        rows=rows,
        settings=job.settings | given,
        provenance=job.provenance | {"command": command},
        headline=[*job.headline, *some_rows],
    )


def open_data(
    loaded: Checkpoint, data: str | None, graph: str | None, key: str | None = None, channel: int = 0
) -> tuple[Traffic, list[str]]:
    """The traffic to measure on: what was named, else what the model was trained on, else the synthetic city.

    Raises:
        InputError: the file cannot be read, or has another number of sensors than the model.
    """
    nodes = getattr(loaded.model, "nodes", None)
    notes: list[str] = []
    if data is not None:
        traffic, notes = _named(data, graph, nodes, key, channel, loaded.data or {})
    elif loaded.data is None:
        notes.append("the checkpoint does not say what it was trained on: measured on the synthetic city")
        traffic = synthetic_city(**_size(nodes))
    else:
        try:
            traffic = reopen(loaded.data)
        except InputError as error:
            text = f"measured on the synthetic city, not on what the model was trained on: {error}"
            warnings.warn(text, SensitivityWarning, stacklevel=2)
            notes.append(f"measured on the synthetic city, not on {_told(loaded.data)}")
            traffic = synthetic_city(**_size(nodes))
    sensors = traffic.speed.shape[1]
    if nodes is not None and sensors != nodes:
        raise InputError(
            f"{traffic.name} has {sensors} sensors, but the model was built for {nodes}; name data of {nodes} sensors "
            "with --data."
        )
    return traffic, notes


def _told(description: dict[str, Any]) -> str:
    """The name of the data that a model was trained on: its file's where it was a file."""
    path = description.get("path")
    return Path(path).name if isinstance(path, str) else str(description.get("name", "its training data"))


def _named(
    data: str, graph: str | None, nodes: int | None, key: str | None, channel: int, trained: dict[str, Any]
) -> tuple[Traffic, list[str]]:
    """What ``--data`` names; the file of the training at another place is read as it was then."""
    from sensitivity.training.data import open_traffic

    if (key, channel) != (None, 0):
        return open_traffic(data, graph, key, channel), []
    if data == "synthetic" and graph is None:
        return synthetic_city(**_size(nodes)), []
    options = trained.get("options") or {}
    chosen = " and ".join(f"{name} {options[name]}" for name in ("key", "channel") if options.get(name))
    file = Path(data)
    if trained.get("kind") == "file" and file.is_file() and trained.get("sha256") == checksum(file):
        moved = trained | {"path": data, "graph": graph, "graph_sha256": None}
        return reopen(moved), [f"read as in training: {chosen}"] if chosen else []
    traffic = open_traffic(data, graph)
    return traffic, [f"the model was trained on {chosen} of {_told(trained)}"] if chosen else []


def _size(nodes: int | None) -> dict[str, int]:
    return {} if nodes is None else {"nodes": nodes}


def _scaler(loaded: Checkpoint, traffic: Traffic) -> tuple[Scaler, list[str]]:
    """The scaler that the model was trained with; else one fitted on the training rows of the data."""
    if loaded.scaler is not None:
        return Scaler.from_state(loaded.scaler), []
    note = "the checkpoint has no scaler: inputs were scaled by the training rows of the data"
    return split(traffic, **trained_split(loaded)).scaler, [note]


def _headline(named: dict[str, Any], traffic: Traffic, samples: int, sensors: int, layers: int) -> list[str]:
    there = traffic.speed.shape[1]
    some = f"{there}" if sensors >= there else f"{sensors} of {there}"
    many = f"{layers} attention layer{'s' if layers > 1 else ''}"
    return [
        f"{many} of {named['file']} ({named['kind']}) on {traffic.name}",
        f"{samples} test windows x {some} sensors at every length; intervals over windows",
    ]


def _beyond(model: nn.Module, longest: int, trained: int) -> list[str]:
    """What a model says about inputs longer than those of its training, where it has something to say."""
    told = getattr(model, "beyond", None)
    return [told] if longest > trained and isinstance(told, str) else []


def _data(traffic: Traffic) -> dict[str, Any]:
    """What identifies the data, without where it lies."""
    rows, nodes = traffic.speed.shape
    found: dict[str, Any] = {"name": traffic.name, "rows": rows, "nodes": nodes}
    return found | {name: traffic.origin[name] for name in ("kind", "sha256", "arguments") if name in traffic.origin}


def _provenance(
    arguments: list[str], lengths: list[int], norm: str, seed: int, samples: int, dtype: str
) -> dict[str, Any]:
    words = ["sensitivity", "measure", *arguments, "--lengths", ",".join(map(str, lengths)), "--norm", norm]
    line = shlex.join([*words, "--seed", str(seed)])
    return {"command": line, "lengths": lengths, "samples": samples, "dtype": dtype, "device": "cpu"}


def _split(layers: str | None) -> list[str] | None:
    if layers is None:
        return None
    names = [name.strip() for name in layers.split(",") if name.strip()]
    if not names:
        raise InputError("--layers is empty; name attention layers, separated by commas, or leave it out for all.")
    return names


def _layer_seed(seed: int, index: int) -> int:
    """The seed itself for the first layer, so that it is SoftmaxAttention.random(seed=seed)."""
    return seed if index == 0 else int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


_RANDOM: dict[str, Any] = {
    "dim": int, "heads": int, "gain": float, "causal": flag, "residual": flag, "biases": flag, "mask": flag,
    "layers": int,
}  # fmt: skip

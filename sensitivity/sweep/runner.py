"""The sweep itself: length by length, each kept as soon as it is done."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sensitivity import checks
from sensitivity.bounds import NAMES
from sensitivity.errors import InputError, RunError, SensitivityError
from sensitivity.jacobian.norms import Norm, check_norm
from sensitivity.sweep.bounds import DEFAULT
from sensitivity.sweep.mapped import MapSums
from sensitivity.sweep.record import Record
from sensitivity.sweep.result import Sweep
from sensitivity.sweep.source import Source, batches, check_source
from sensitivity.sweep.streamed import StreamedSums
from sensitivity.sweep.sums import LayerSums

Progress = Callable[[int, float], None]
"""Is told the length in work and the share of it that is done."""


def sweep(
    source: Source,
    lengths: Sequence[int],
    *,
    norm: Norm = "frobenius",
    bounds: Sequence[str] = DEFAULT,
    keep: Collection[int] = (),
    seed: int = 0,
    statistics_only: bool = False,
    rows: Any = None,
    directory: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Sweep:
    """Measures every layer that a source gives, at every length.

    A length at which the source fails (a model that refuses it, memory that does not suffice) is recorded with the
    reason, and the others are kept. With ``directory``, every finished length is written there at once, so that an
    interrupted sweep can be resumed.

    Args:
        source: a callable ``length -> {layer: (attention, tokens, groups)}`` or one that yields batches:
            ``RandomTokens``, ``ModelLayers``, or your own.
        lengths: sequence lengths, at least 1.
        norm: ``frobenius``, ``rms`` or ``spectral``.
        bounds: bounds of ``sensitivity.bounds`` to check; an empty sequence for none.
        keep: lengths whose mean maps are kept besides the longest.
        seed: of the bootstrap of the decay exponents, and of the choice of rows; the source has its own.
        statistics_only: keep no map at any length, so that memory grows with the length and not with its square.
        rows: measure so many query rows of every sequence, drawn with ``seed``, or those of the given query times; all
            by default. No maps are kept of some rows.
        directory: where finished lengths are kept until the sweep is done.
        settings: what the numbers depend on, as plain values; only lengths measured under the same are taken up again.
        resume: take up finished lengths from ``directory``.
        progress: is told how far it is.
        provenance: what to say about the origin of the numbers, besides versions and settings.

    Returns:
        The sweep; its statistics are deterministic given the source.

    Raises:
        InputError: no source, lengths, seed, norm or bounds that do not exist, or an error of the source at every
            length.
        RunError: every length failed for a reason that is not the input's.
    """
    check_source(source)
    lengths = checks.lengths(lengths)
    checks.seed(seed)
    check_norm(norm)
    _check_places(directory, settings)
    _check_bounds(bounds)
    settings = {"norm": norm, "bounds": list(bounds), **(settings or {}), **_reduced(rows, seed, statistics_only)}

    def sums(name: str, length: int) -> LayerSums:
        if statistics_only or rows is not None:
            return StreamedSums(name, length, norm, bounds, rows, seed)
        return MapSums(name, length, norm, bounds)

    parts: list[Sweep] = []
    errors: dict[int, Exception] = {}
    for length in lengths:
        place = None if directory is None else Path(directory) / f"T{length}-{fingerprint(settings)[:16]}.nc"
        part = _kept(place, length, progress) if resume else None
        if part is None:
            found = _attempt(source, length, sums, progress)
            if isinstance(found, Exception):
                errors[length] = found
                continue
            part = Sweep({(record.name, length): record for record in found}, norm)
            if place is not None:
                part.save(place)
        _thin(parts, keep)
        parts.append(part)
    if not parts:
        raise _failed(errors)
    whole = Sweep.merge(parts, _provenance(settings, seed, provenance))
    whole.failures.update({length: reason(error) for length, error in errors.items()})
    return whole


def _reduced(rows: Any, seed: int, statistics_only: bool) -> dict[str, Any]:
    """The settings that say what is left out of the measurements."""
    some: dict[str, Any] = {} if rows is None else {"rows": rows, "seed of rows": seed}
    return some | ({"statistics only": True} if statistics_only else {})


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 of settings, the same in every process."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def reason(error: Exception) -> str:
    """One line on why a length failed."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SensitivityError) else f"{type(error).__name__}: {text}"


def _check_bounds(bounds: Sequence[str]) -> None:
    for name in bounds:
        if name not in NAMES or name == "stack":
            raise InputError(f"unknown bound {name!r}; choose from {', '.join(n for n in NAMES if n != 'stack')}.")


def _check_places(directory: Any, settings: Any) -> None:
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise InputError(f"directory must be a path, not {directory!r}.")
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(f"settings must map names to plain values, such as {{'model': 'a.pt'}}, not {settings!r}.")


def _kept(place: Path | None, length: int, progress: Progress | None) -> Sweep | None:
    """A length that an interrupted sweep has finished."""
    if place is None or not place.is_file():
        return None
    found = Sweep.load(place)
    if progress is not None:
        progress(length, 1.0)
    return found


def _attempt(
    source: Source, length: int, new: Callable[[str, int], LayerSums], progress: Progress | None
) -> list[Record] | Exception:
    """The records of one length, or why there are none."""
    sums: dict[str, LayerSums] = {}
    stream = None
    while True:
        try:  # the source runs foreign models, which may raise anything at a length that they were not made for
            stream = batches(source(length)) if stream is None else stream
            batch = next(stream, None)
        except Exception as error:
            return error
        if batch is None:
            break
        done = batch.share
        try:
            for name, one in batch.layers.items():
                if name not in sums:
                    sums[name] = new(name, length)
                sums[name].update(one.attention, one.tokens, one.groups)
        except (SensitivityError, MemoryError, torch.OutOfMemoryError) as error:
            return error
        if progress is not None:
            progress(length, 0.9 * done)
    try:
        records = [layer.finish() for layer in sums.values()]
    except (SensitivityError, MemoryError, torch.OutOfMemoryError) as error:
        return error
    if progress is not None:
        progress(length, 1.0)
    return records


def _thin(parts: list[Sweep], keep: Collection[int]) -> None:
    """Lets go of the maps of the length before, now that a longer one has been measured."""
    if parts and parts[-1].lengths[0] not in keep:
        for record in parts[-1].records.values():
            record.maps.clear()


def _failed(errors: Mapping[int, Exception]) -> Exception:
    """The error to raise when no length could be measured."""
    length, first = next(iter(errors.items()))
    if isinstance(first, InputError):
        return first
    failure = RunError(f"no length could be measured; T={length}: {reason(first)}.")
    failure.__cause__ = first
    return failure


def _provenance(settings: Mapping[str, Any], seed: int, more: Mapping[str, Any] | None) -> dict[str, Any]:
    from sensitivity import __version__

    versions = {
        "sensitivity": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    found = {"versions": versions, "norm": settings["norm"], "seed": seed, "settings": fingerprint(settings)}
    return found | dict(more or {})

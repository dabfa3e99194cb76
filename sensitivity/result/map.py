"""The sensitivity map of one layer or model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sensitivity import statistics
from sensitivity.checks import all_finite
from sensitivity.errors import InputError
from sensitivity.result.measurement import NO_ATTENTION, Measurement, check_part
from sensitivity.statistics import AttentionStatistics, RowStatistics

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes

_BLOCK = 1 << 20  # entries that are looked at together


class OnDemand:
    """A field whose value may be put off: a function that stands in its place is called when the field is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # the field's default
        value = vars(instance)[self.name]
        if callable(value):
            value = vars(instance)[self.name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value


@dataclass(frozen=True, eq=False, repr=False)
class SensitivityMap(Measurement):
    r"""Norms of the block Jacobian :math:`\|J_{ij}\| = \|dh_i / dx_j\|` of one layer or model, sample by sample.

    Causally hidden pairs hold an exact 0, padded pairs NaN; neither is ``visible``, and no statistic counts them.

    Attributes:
        norms: ``(sample, query, key)``.
        diagonal: norms of the diagonal blocks without the residual path (the identity), ``(sample, query)``; None where
            input and output differ in width or length.
        paths: norms of each path's blocks by name, ``(sample, query, key)`` each; empty unless measured.
        heads: norms of each head's blocks, ``(sample, head, query, key)``; None unless measured.
        attention: attention weights before dropout, ``(sample, head, query, key)``; None unless an attention layer.
            ``measure`` computes those of a long sequence when they are first asked for.
        visible: the pairs that count, ``(sample, query, key)``; all unless given. The diagonal counts even under a hard
            diagonal mask (the residual and query paths live there), unless the position is padding.
        attended: the pairs that the attention mask lets attend, broadcastable to the weights; ``visible`` unless given.
        norm: ``frobenius``, ``rms`` or ``spectral``.
        weight_sums: statistics of the attention weights, where the weights themselves were too many to keep.
        query_times: the query times of the rows, where they are some of all; 0 to T-1 unless given.
        out_length: number of output times, T; as many as rows unless given.
        standard_error: of ``norms``, where they were estimated from probes.
        in_dim: features of an input token.
        out_dim: features of an output state.
        name: the layer's name in its model.
        provenance: how the numbers came about: versions, seed, dtype, device, engine.
        notes: what the reader should know.

    Raises:
        InputError: arrays that do not fit together, or a visible norm that is not finite.
    """

    kind: ClassVar[str] = "SensitivityMap"

    norms: Float[Tensor, "sample query key"]
    diagonal: Float[Tensor, "sample query"] | None = None
    paths: dict[str, Float[Tensor, "sample query key"]] = field(default_factory=dict)
    heads: Float[Tensor, "sample head query key"] | None = None
    attention: Float[Tensor, "sample head query key"] | None = OnDemand()  # type: ignore[assignment]
    visible: Bool[Tensor, "sample query key"] = None  # type: ignore[assignment]  # filled in below
    attended: Bool[Tensor, "#sample #head query key"] | None = None
    norm: str = "frobenius"
    standard_error: Float[Tensor, "sample query key"] | None = None
    weight_sums: AttentionStatistics | None = None
    query_times: Int[Tensor, " query"] = None  # type: ignore[assignment]  # filled in below
    out_length: int = None  # type: ignore[assignment]  # filled in below
    in_dim: int | None = None
    out_dim: int | None = None
    name: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = tuple(self.norms.shape)
        if self.visible is None:
            object.__setattr__(self, "visible", torch.ones((1, 1, 1), dtype=torch.bool).expand(shape))
        every = self.query_times is None
        if every:
            object.__setattr__(self, "query_times", torch.arange(shape[1]))
        if self.out_length is None:
            object.__setattr__(self, "out_length", shape[1])
        check_shapes(shape, self._arrays())
        if not every or self.out_length < shape[1]:
            check_times(self.query_times, shape[1], self.out_length)
        counted = {"norms": self.norms, "standard errors": self.standard_error}
        counted |= {f"{name} path norms": path for name, path in self.paths.items()}
        for what, values in counted.items():
            if values is not None:
                self._check_finite(values, what)
        if self.diagonal is not None and self.square and not all_finite(self.diagonal):
            shown = self.visible[:, torch.arange(shape[1]), self.query_times]
            bad = shown & ~self.diagonal.isfinite()
            if bad.any():
                sample, row = (int(part) for part in bad.nonzero()[0])
                self._refuse_value(self.diagonal[sample, row], "residual-removed norms", sample, row, None)

    # -- what is measured ----------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.norms.shape[0]

    @property
    def length(self) -> int:
        r"""Number of output times, :math:`T`, whether all of their rows were measured or some."""
        return self.out_length

    @property
    def keys(self) -> int:
        """Number of input times."""
        return self.norms.shape[2]

    @property
    def path_names(self) -> tuple[str, ...]:
        """The paths that were measured."""
        return tuple(self.paths)

    @property
    def has_attention(self) -> bool:
        """Whether there are statistics of attention weights."""
        return vars(self)["attention"] is not None or self.weight_sums is not None

    @property
    def has_removed(self) -> bool:
        """Whether there are norms with the residual path removed."""
        return self.diagonal is not None and self.square

    def sums(self, path: str | None = None, head: int | None = None) -> RowStatistics:
        """The accumulated rows of this map, of one path's or of one head's, from which every statistic is finished.

        Raises:
            InputError: the path or head was not measured; the message lists those that were.
        """
        check_part(path, head, self.path_names, 0 if self.heads is None else self.heads.shape[1])
        removed = None
        if path is not None:
            norms = self.paths[path]
        elif head is not None and self.heads is not None:
            norms = self.heads[:, head]
        else:
            norms, removed = self.norms, self.diagonal if self.square else None
        visible = None if everywhere(self.visible) else self.visible
        return RowStatistics.of(norms, visible, removed, self.query_times, self.length)

    def attention_sums(self) -> AttentionStatistics:
        """The accumulated rows of attention weights.

        Raises:
            InputError: no attention layer was measured.
        """
        if self.attention is not None:
            attended = None if self.attended is None and everywhere(self.visible) else self.attended_pairs()
            return AttentionStatistics.of(self.attention, attended, self.query_times, self.length)
        if self.weight_sums is not None:
            return self.weight_sums
        raise InputError(NO_ATTENTION)

    def put_off_attention(self, compute: Callable[[], Tensor]) -> None:
        """Leaves it to ``compute`` to find the attention weights, once, when they are first read."""
        vars(self)["attention"] = compute

    def path(self, name: str) -> Float[Tensor, "sample query key"]:
        """Norms of one path's blocks.

        Raises:
            InputError: the path was not measured; the message lists those that were.
        """
        check_part(name, None, self.path_names, 0)
        return self.paths[name]

    def mean(self, path: str | None = None) -> Float[Tensor, "query key"]:
        """Mean map over the samples in which a pair is visible; NaN where it is visible in none."""
        return statistics.mean_map(self.norms if path is None else self.path(path), self.visible)

    def attended_pairs(self) -> Bool[Tensor, "#sample #head query key"]:
        """The pairs that attend and whose query is not padding."""
        if self.attended is None:
            return self.visible[:, None]
        shown = self.visible.any(dim=-1)
        return self.attended if shown.all() else self.attended & shown[:, None, :, None]

    # -- files and figures ---------------------------------------------------------------------------------------

    def to_xarray(self) -> xarray.Dataset:
        """Every array with its named dimensions, coordinates, units and long name."""
        from sensitivity.result import netcdf

        return netcdf.dataset(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SensitivityMap:
        """Reads a map that :meth:`save` wrote.

        Raises:
            InputError: no such file, a directory, a truncated file, or another kind of file.
        """
        from sensitivity.result import netcdf

        return cls(**netcdf.load(path))

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draws the mean map; options as in ``sensitivity.plot.heatmap``."""
        # The plots stand on a floor above this one, so they are found by name and only when asked for.
        axes: Axes = importlib.import_module("sensitivity.plot").heatmap(self, ax=ax, **options)
        return axes

    # -- helpers -------------------------------------------------------------------------------------------------

    def _arrays(self) -> dict[str, Tensor]:
        named = {name: vars(self)[name] for name in ("diagonal", "heads", "attention", "visible", "attended")}
        named |= {"standard_error": self.standard_error} | {f"paths[{name!r}]": p for name, p in self.paths.items()}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def _check_finite(self, values: Tensor, what: str) -> None:
        """Looks at some rows at a time: a map may fill the memory that there is."""
        step = max(1, _BLOCK // max(1, values.shape[0] * values.shape[2]))
        for start in range(0, values.shape[1], step):
            part = values[:, start : start + step]
            if all_finite(part):
                continue
            bad = self.visible[:, start : start + step] & ~part.isfinite()
            if bad.any():
                sample, row, key = (int(place) for place in bad.nonzero()[0])
                self._refuse_value(part[sample, row, key], what, sample, start + row, key)

    def _refuse_value(self, value: Tensor, what: str, sample: int, row: int, key: int | None) -> None:
        time = int(self.query_times[row])
        of = f" of layer {self.name!r}" if self.name else ""
        by = f" (engine: {self.engine})" if self.engine else ""
        raise InputError(
            f"the {what}{of} at (sample, query, key) = {(sample, time, time if key is None else key)} are "
            f"{float(value)}{by}: a visible pair must be finite; measure in a wider dtype or with another backend, or "
            "mark padded positions as padding."
        )


def everywhere(mask: Tensor) -> bool:
    """Whether a mask is one True that stands for every place, so that nothing needs to be looked at."""
    return all(stride == 0 or size == 1 for stride, size in zip(mask.stride(), mask.shape, strict=True)) and bool(
        mask[(0,) * mask.ndim]
    )


def check_shapes(shape: tuple[int, ...], arrays: dict[str, Tensor]) -> None:
    """Refuses arrays that do not fit norms of this shape, by name; ``attended`` may have axes of length 1 in front."""
    samples, queries, keys = shape
    for name, value in arrays.items():
        found = tuple(value.shape)
        if name == "diagonal":
            fits, expected = found == (samples, queries), f"({samples}, {queries})"
        elif name in ("heads", "attention", "attended"):
            leads = (samples, 1) if name == "attended" else (samples,)
            fits = len(found) == 4 and found[0] in leads and found[2:] == (queries, keys)
            expected = f"({samples}, head, {queries}, {keys})"
        else:
            fits, expected = found == shape, str(shape)
        if not fits:
            raise InputError(f"{name} has shape {found}, but norms of shape {shape} need {expected}.")


def check_times(times: Tensor, rows: int, length: int) -> None:
    """Refuses query times that are not those of the rows."""
    fits = times.ndim == 1 and len(times) == rows
    if fits and rows <= length and torch.equal(times, torch.arange(rows, device=times.device)):
        return
    if not fits or len(times.unique()) < rows or not (int(times.min()) >= 0 and int(times.max()) < length):
        raise InputError(
            f"query_times must name each of the {rows} rows of the map once, from 0 to {length - 1}, not "
            f"{times.tolist()[:8]}."
        )

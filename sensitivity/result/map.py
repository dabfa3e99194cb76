"""The sensitivity map of one layer or model."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity import statistics
from sensitivity.errors import InputError
from sensitivity.result import text
from sensitivity.statistics import AttentionStatistics, RowStatistics, Statistic

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class SensitivityMap:
    r"""Norms of the block Jacobian :math:`\|J_{ij}\| = \|dh_i / dx_j\|` of one layer or model, sample by sample.

    Causally hidden pairs hold an exact 0, padded pairs NaN; neither is ``visible``, and no statistic counts them.

    Attributes:
        norms: ``(sample, query, key)``.
        diagonal: norms of the diagonal blocks without the residual path (the identity), ``(sample, query)``; None where
            input and output differ in width or length.
        paths: norms of each path's blocks by name, ``(sample, query, key)`` each; empty unless measured.
        heads: norms of each head's blocks, ``(sample, head, query, key)``; None unless measured.
        attention: attention weights before dropout, ``(sample, head, query, key)``; None unless an attention layer.
        visible: the pairs that count, ``(sample, query, key)``; all unless given. The diagonal counts even under a hard
            diagonal mask (the residual and query paths live there), unless the position is padding.
        attended: the pairs that the attention mask lets attend, broadcastable to the weights; ``visible`` unless given.
        norm: ``frobenius``, ``rms`` or ``spectral``.
        standard_error: of ``norms``, where they were estimated from probes.
        in_dim: features of an input token.
        out_dim: features of an output state.
        name: the layer's name in its model.
        provenance: how the numbers came about: versions, seed, dtype, device, engine.
        notes: what the reader should know.

    Raises:
        InputError: arrays that do not fit together, or a visible norm that is not finite.
    """

    norms: Float[Tensor, "sample query key"]
    diagonal: Float[Tensor, "sample query"] | None = None
    paths: dict[str, Float[Tensor, "sample query key"]] = field(default_factory=dict)
    heads: Float[Tensor, "sample head query key"] | None = None
    attention: Float[Tensor, "sample head query key"] | None = None
    visible: Bool[Tensor, "sample query key"] = None  # type: ignore[assignment]  # filled in below
    attended: Bool[Tensor, "#sample #head query key"] | None = None
    norm: str = "frobenius"
    standard_error: Float[Tensor, "sample query key"] | None = None
    in_dim: int | None = None
    out_dim: int | None = None
    name: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.visible is None:
            object.__setattr__(self, "visible", torch.ones_like(self.norms, dtype=torch.bool))
        check_shapes(tuple(self.norms.shape), self._arrays())
        square = self.norms.shape[1] == self.norms.shape[2]
        counted = {"norms": self.norms, "standard errors": self.standard_error}
        counted |= {f"{name} path norms": path for name, path in self.paths.items()}
        for what, values in counted.items():
            if values is not None:
                self._check_finite(values, self.visible, what)
        if self.diagonal is not None and square:
            self._check_finite(self.diagonal, self.visible.diagonal(dim1=1, dim2=2), "residual-removed norms")

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.norms.shape[0]

    @property
    def length(self) -> int:
        """Number of queries, :math:`T`."""
        return self.norms.shape[1]

    @property
    def square(self) -> bool:
        """Whether there are as many queries as keys, so that there is a diagonal."""
        return self.norms.shape[1] == self.norms.shape[2]

    @property
    def engine(self) -> str:
        """Which way the norms were computed, in words."""
        return str(self.provenance.get("engine", ""))

    # -- statistics ----------------------------------------------------------------------------------------------

    def sums(self, path: str | None = None) -> RowStatistics:
        """The accumulated rows of this map, or of one path's, from which several statistics can be finished."""
        if path is not None:
            return RowStatistics.of(self.path(path), self.visible)
        return RowStatistics.of(self.norms, self.visible, self.diagonal if self.square else None)

    def path(self, name: str) -> Float[Tensor, "sample query key"]:
        """Norms of one path's blocks.

        Raises:
            InputError: the path was not measured; the message lists those that were.
        """
        if name not in self.paths:
            known = f"this map holds {', '.join(self.paths)}" if self.paths else "measure with paths=True"
            raise InputError(f"no norms of the path {name!r}; {known}.")
        return self.paths[name]

    def sink_ratio(self, residual_removed: bool = False, path: str | None = None) -> Statistic:
        """Mean diagonal over mean off-diagonal norm; see :func:`sensitivity.statistics.sink_ratio`."""
        return self.sums(path).sink_ratio(residual_removed)

    def parroting_index(self, residual_removed: bool = False, path: str | None = None) -> Statistic:
        """Mean share of the diagonal in its row; see :func:`sensitivity.statistics.parroting_index`."""
        return self.sums(path).parroting_index(residual_removed)

    def diagonal_attention(self) -> Statistic:
        """Mean attention weight on the diagonal; see :func:`sensitivity.statistics.diagonal_attention`."""
        return self._attention().diagonal()

    def key_sink(self) -> Statistic:
        """Largest mean weight on one key; see :func:`sensitivity.statistics.key_sink`."""
        return self._attention().key_sink()

    def row_entropy(self) -> Statistic:
        """Entropy of the rows of weights over the largest possible; see :func:`sensitivity.statistics.row_entropy`."""
        return self._attention().entropy()

    def lag_profile(self, residual_removed: bool = False, path: str | None = None) -> xarray.DataArray:
        """Mean norm at every lag ``i - j``, over the dimension ``lag``; NaN where no pair is visible."""
        values = self.sums(path).lag_profile(residual_removed)[0]
        return self._profile("lag", range(1 - self.length, self.length), values)

    def primacy_profile(self, residual_removed: bool = False, path: str | None = None) -> xarray.DataArray:
        """Mean norm of every key, over the dimension ``key``."""
        values = self.sums(path).primacy_profile(residual_removed)[0]
        return self._profile("key", range(self.norms.shape[2]), values)

    def path_shares(self) -> dict[str, dict[str, Statistic]]:
        """Share of each path on and off the diagonal; see :func:`sensitivity.statistics.path_shares`."""
        return statistics.path_shares(self.paths, self.visible)

    def mean(self, path: str | None = None) -> Float[Tensor, "query key"]:
        """Mean map over the samples in which a pair is visible; NaN where it is visible in none."""
        return statistics.mean_map(self.norms if path is None else self.path(path), self.visible)

    def attended_pairs(self) -> Bool[Tensor, "#sample #head query key"]:
        """The pairs that attend and whose query is not padding."""
        if self.attended is None:
            return self.visible[:, None]
        return self.attended & self.visible.any(dim=-1)[:, None, :, None]

    def summary(self) -> dict[str, float]:
        """The statistics of this map as plain floats, as far as they are defined for it; NaN where undefined."""
        found: dict[str, float] = {}
        if self.square:
            sums = self.sums()
            forms = [(False, "")] + ([(True, "_residual_removed")] if self.diagonal is not None else [])
            found["off_diagonal"] = float(sums.off_diagonal())
            for removed, suffix in forms:
                found[f"diagonal{suffix}"] = float(sums.diagonal(removed))
                found[f"sink_ratio{suffix}"] = float(sums.sink_ratio(removed))
                parroting = sums.parroting_index(removed)
                found[f"parroting_index{suffix}"] = float(parroting)
                found[f"parroting_index{suffix}_null"] = parroting.null
        if self.attention is not None:
            weights = self._attention()
            forms_of = {"diagonal_attention": weights.diagonal} if self.square else {}
            for name, statistic in (forms_of | {"key_sink": weights.key_sink, "row_entropy": weights.entropy}).items():
                value = statistic()
                found[name], found[f"{name}_null"] = float(value), value.null
        if self.paths and self.square:
            for part, shares in self.path_shares().items():
                found |= {f"{part}_share_{name}": float(share) for name, share in shares.items()}
        return found

    # -- files and figures ---------------------------------------------------------------------------------------

    def to_xarray(self) -> xarray.Dataset:
        """Every array with its named dimensions, coordinates, units and long name."""
        from sensitivity.result import netcdf

        return netcdf.dataset(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes netCDF-4, whole or not at all; :meth:`load` gives back the same map.

        Half-precision arrays are stored as float32, which holds them exactly. The provenance is stored as JSON: what
        JSON does not know becomes a string.

        Raises:
            InputError: the place cannot be written to.
        """
        from sensitivity.result import netcdf

        netcdf.save(self.to_xarray(), path)

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

    def __repr__(self) -> str:
        return text.plain(self)

    def _repr_html_(self) -> str:
        return text.html(self)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _attention(self) -> AttentionStatistics:
        if self.attention is None:
            raise InputError(
                "this map holds no attention weights, because no single softmax attention layer was measured; "
                "measure one with layer=NAME or from a SoftmaxAttention."
            )
        return AttentionStatistics.of(self.attention, self.attended_pairs())

    def _profile(self, dim: str, coordinate: range, values: Tensor) -> xarray.DataArray:
        import xarray

        attributes = {"units": "1", "norm": self.norm, "long_name": f"mean sensitivity by {dim}"}
        return xarray.DataArray(values.numpy(), {dim: list(coordinate)}, (dim,), name="sensitivity", attrs=attributes)

    def _arrays(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("diagonal", "heads", "attention", "visible", "attended")}
        named |= {"standard_error": self.standard_error} | {f"paths[{name!r}]": p for name, p in self.paths.items()}
        return {name: value for name, value in named.items() if value is not None}

    def _check_finite(self, values: Tensor, visible: Tensor, what: str) -> None:
        bad = visible & ~values.isfinite()
        if bad.any():
            index = tuple(int(part) for part in bad.nonzero()[0])
            place = index if len(index) == 3 else (*index, index[-1])
            of = f" of layer {self.name!r}" if self.name else ""
            by = f" (engine: {self.engine})" if self.engine else ""
            raise InputError(
                f"the {what}{of} at (sample, query, key) = {place} are {float(values[index])}{by}: a visible pair must "
                "be finite; measure in a wider dtype or with another backend, or mark padded positions as padding."
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

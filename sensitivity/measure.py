"""The one front door: how much every output time step depends on every input time step."""

from __future__ import annotations

import math
import operator
import platform
from typing import Any, Literal, SupportsIndex, overload

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity import checks
from sensitivity.backends import KEEPS, Found, Request, by_autodiff, in_closed_form
from sensitivity.collecting import KeptSums
from sensitivity.errors import InputError
from sensitivity.jacobian import autodiff, closed_form, memory
from sensitivity.jacobian.guard import measuring
from sensitivity.jacobian.norms import Norm, check_norm
from sensitivity.jacobian.visibility import left_out
from sensitivity.modules import unwrap
from sensitivity.result import SensitivityMap, SensitivityStatistics
from sensitivity.target import Model, Target, find_target

BACKENDS = ("auto", "closed_form", "autodiff")


@overload
def measure(
    model: Model | Any,
    tokens: Any,
    *,
    keep: Literal["map"] = "map",
    rows: Any = None,
    layer: str | None = None,
    norm: Norm = "frobenius",
    paths: bool = False,
    heads: bool = False,
    residual: bool | float | int | None = None,
    backend: str = "auto",
    seed: SupportsIndex = 0,
    padding: Tensor | None = None,
    select: Any = None,
    stochastic: int = 0,
    probes: int | None = None,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    budget: int | float | None = None,
) -> SensitivityMap: ...


@overload
def measure(
    model: Model | Any,
    tokens: Any,
    *,
    keep: Literal["statistics"],
    rows: Any = None,
    layer: str | None = None,
    norm: Norm = "frobenius",
    paths: bool = False,
    heads: bool = False,
    residual: bool | float | int | None = None,
    backend: str = "auto",
    seed: SupportsIndex = 0,
    padding: Tensor | None = None,
    select: Any = None,
    stochastic: int = 0,
    probes: int | None = None,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    budget: int | float | None = None,
) -> SensitivityStatistics: ...


def measure(
    model: Model | Any,
    tokens: Any,
    *,
    keep: str = "map",
    rows: Any = None,
    layer: str | None = None,
    norm: Norm = "frobenius",
    paths: bool = False,
    heads: bool = False,
    residual: bool | float | int | None = None,
    backend: str = "auto",
    seed: SupportsIndex = 0,
    padding: Tensor | None = None,
    select: Any = None,
    stochastic: int = 0,
    probes: int | None = None,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    budget: int | float | None = None,
) -> SensitivityMap | SensitivityStatistics:
    r"""Measures :math:`S_{ij} = \|dh_i / dx_j\|` for every output time ``i`` and input time ``j`` of every sample.

    An attention layer is measured in closed form (Frobenius and rms exactly, spectral by iteration), anything else by
    automatic differentiation. The model is left as it was: mode, parameters, buffers, gradients, random state.

    Args:
        model: a ``SoftmaxAttention``; an attention module; any module or callable that maps ``(sample, time,
            feature)`` to ``(sample, time, feature)``; or, with ``layer=``, a module that takes ``tokens`` in any form.
        tokens: ``(sample, time, feature)``, or ``(time, feature)`` for one sample. With ``layer=``, what the model
            takes.
        keep: ``map`` keeps the norm of every pair, ``statistics`` sums them up as they come, so that memory grows with
            the length and not with its square.
        rows: measure so many query rows, drawn with ``seed``, or those of the given query times; all by default.
        layer: dotted name of a submodule; it is measured at the tokens that reach it when the model runs on ``tokens``.
            An embedding layer: the whole model is measured from the embeddings of the integer ids that are passed.
        norm: ``frobenius``, ``rms`` (1 for the identity at any width) or ``spectral``.
        paths: also the maps of the residual, value, key and query paths (attention layers only).
        heads: also the map of each head (attention layers only).
        residual: attention layers: whether the identity of a residual connection is part of the layer, or the factor of
            its gate; None takes what the layer does. Other models: False says that there is no residual path, so that
            the residual-removed statistics equal the raw ones.
        backend: ``closed_form``, ``autodiff``, or ``auto``: the closed form wherever there is one.
        seed: seed of the measurement's own generator (rows, probes, stochastic draws).
        padding: True at padded positions; they are left out as rows and columns. An attention layer also hides them.
        select: which of a model's several outputs is meant: a key, an index, or a callable.
        stochastic: average over this many draws of a model in train mode, one draw per Jacobian.
        probes: estimate Frobenius norms from this many random cotangents per row instead of all of them.
        dtype: measure in this floating type; the caller's model stays as it is.
        chunk: rows per backward pass; chosen from the budget by default.
        budget: bytes that the measurement may take; the smaller of 4 GiB and half of what is free by default.
            Attention weights that do not fit beside the map are summed up and not kept.

    Returns:
        The map, or its statistics, which have the same methods; with provenance.

    Raises:
        InputError: what was handed in cannot be measured; the message says why and what to do.

    >>> from sensitivity import SoftmaxAttention
    >>> layer = SoftmaxAttention.random(dim=8, heads=2)
    >>> found = measure(layer, torch.randn(4, 16, 8), paths=True)
    >>> tuple(found.norms.shape), sorted(found.paths)
    ((4, 16, 16), ['key', 'query', 'residual', 'value'])
    """
    check_norm(norm)
    _check_flags(paths=paths, heads=heads)
    stochastic = _check_options(model, backend, stochastic, probes, keep)
    _check_types(layer, residual, dtype, chunk, seed)
    seed = operator.index(seed)
    request = Request(norm, keep, rows, paths, heads, seed, stochastic, probes, chunk, budget)
    with measuring(unwrap(model), stochastic=stochastic > 0):
        target = find_target(model, tokens, layer, residual, padding, select, dtype)
        closed = target.in_closed_form(backend, stochastic)
        found = (in_closed_form if closed else by_autodiff)(target, request)
    return _result(target, found, request, layer, residual)


def blocks(
    model: Model | Any,
    tokens: Any,
    *,
    layer: str | None = None,
    paths: bool = False,
    residual: bool | float | int | None = None,
    backend: str = "auto",
    padding: Tensor | None = None,
    select: Any = None,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    budget: int | float | None = None,
) -> Float[Tensor, "sample query key out in"] | dict[str, Float[Tensor, "sample query key out in"]]:
    r"""The dense blocks :math:`J_{ij} = dh_i / dx_j` themselves; arguments as in ``measure``.

    Returns:
        ``(sample, query, key, out, in)``; with ``paths`` a dict of such tensors whose sum is the whole. Rows and
        columns of padded positions are NaN.

    Raises:
        InputError: what was handed in cannot be measured, or the blocks do not fit the budget.
    """
    _check_flags(paths=paths)
    _check_options(model, backend, 0, None, "map")
    _check_types(layer, residual, dtype, chunk)
    with measuring(unwrap(model)):
        target = find_target(model, tokens, layer, residual, padding, select, dtype)
        if not target.in_closed_form(backend, 0):
            target.refuse_parts(paths, heads=False)
            target.output_length()  # a model that does not run says so
            found = autodiff.blocks(target.function, target.tokens, chunk=chunk, memory=budget)
            if target.padding is None:
                return found
            return found.masked_fill(left_out(target.padding)[..., None, None], torch.nan)
        attention, tokens = target.described()
        samples, length, dim = tokens.shape
        need = 6 * samples * length**2 * attention.out_dim * dim * tokens.element_size()
        memory.refuse_over(
            need,
            memory.budget(budget, tokens.device),
            f"dense blocks of {samples} samples, {length} time steps and {dim} features",
            "measure() needs no blocks; or take fewer samples or time steps, or raise budget=",
        )
        by_path = closed_form.blocks(attention, tokens)
    return by_path if paths else by_path["residual"] + by_path["value"] + by_path["key"] + by_path["query"]


def _check_options(model: Any, backend: str, stochastic: int, probes: int | None, keep: Any) -> int:
    if not callable(model):
        raise InputError(f"model must be a module, a callable or a SoftmaxAttention, not {type(model).__name__}.")
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if keep not in KEEPS:
        raise InputError(f"keep must be one of {', '.join(KEEPS)}, not {keep!r}.")
    if isinstance(stochastic, bool) or not isinstance(stochastic, int) or stochastic < 0:
        raise InputError(f"stochastic must be a number of draws (0 for none), not {stochastic!r}.")
    if probes is not None and (isinstance(probes, bool) or not isinstance(probes, int) or probes < 2):
        raise InputError(f"probes must be an integer of at least 2, so that there is an error bar, not {probes!r}.")
    return stochastic


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} must be True, for all {name}, or False, not {value!r}.")


def _check_types(layer: Any, residual: Any, dtype: Any, chunk: Any, seed: Any = 0) -> None:
    if layer is not None and (not isinstance(layer, str) or not layer):
        raise InputError(
            f"layer must be the dotted name of a submodule, not {layer!r}; leave it out for the whole model."
        )
    if residual is not None and not (isinstance(residual, bool | int | float) and math.isfinite(residual)):
        raise InputError(f"residual must be True, False, a finite factor or None, not {residual!r}.")
    checks.floating(dtype)
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk must be a positive number of rows, not {chunk!r}.")
    checks.seed(seed)


def _result(
    target: Target, found: Found, request: Request, layer: str | None, residual: bool | float | None
) -> SensitivityMap | SensitivityStatistics:
    common: dict[str, Any] = {
        "norm": request.norm,
        "in_dim": target.tokens.shape[-1],
        "name": target.name,
        "notes": [*target.notes, *([f"no closed form: {target.why}"] if target.why else []), *found.notes],
        "provenance": _provenance(target, found, request, layer, residual),
    }
    kept = found.kept
    if isinstance(kept, KeptSums):
        return SensitivityStatistics(kept.whole, kept.paths, tuple(kept.heads), kept.weights, **common)
    maps = kept.maps
    assert maps is not None
    given: dict[str, Any] = {}
    if kept.visible is not None:
        given["visible"] = kept.visible.expand(maps.total.shape[0], -1, -1)
    if found.times is not None:
        given["query_times"] = found.times
    whole = SensitivityMap(
        norms=maps.total,
        diagonal=maps.diagonal,
        paths=maps.paths,
        heads=maps.heads,
        attention=maps.attention,
        attended=kept.attended,
        weight_sums=kept.weight_sums,
        standard_error=maps.standard_error,
        out_length=found.queries,
        **given,
        **common,
    )
    if found.weights is not None:
        whole.put_off_attention(found.weights)
    return whole


def _provenance(
    target: Target, found: Found, request: Request, layer: str | None, residual: bool | float | None
) -> dict[str, Any]:
    from sensitivity import __version__

    given = {
        "sensitivity": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": found.engine,
        "model": target.name,
        "layer": layer,
        "residual": residual,
        "seed": request.seed,
        "dtype": str(found.dtype).removeprefix("torch."),
        "device": str(target.tokens.device),
        "samples": target.tokens.shape[0],
        "length": target.tokens.shape[1],
        "features": target.tokens.shape[-1],
    }
    return given if found.times is None else given | {"rows": len(found.times)}

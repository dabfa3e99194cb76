"""The one front door: how much every output time step depends on every input time step."""

from __future__ import annotations

import math
import operator
import platform
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.jacobian import autodiff, closed_form, memory
from sensitivity.jacobian.guard import measuring
from sensitivity.jacobian.norms import Norm, NormMaps, check_norm
from sensitivity.jacobian.visibility import attended_and_counted, left_out
from sensitivity.modules import unwrap
from sensitivity.result import SensitivityMap
from sensitivity.target import Model, Target, find_target

BACKENDS = ("auto", "closed_form", "autodiff")


def measure(
    model: Model | Any,
    tokens: Any,
    *,
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
) -> SensitivityMap:
    r"""Measures :math:`S_{ij} = \|dh_i / dx_j\|` for every output time ``i`` and input time ``j`` of every sample.

    An attention layer is measured in closed form (Frobenius and rms exactly, spectral by iteration), anything else by
    automatic differentiation. The model is left as it was: mode, parameters, buffers, gradients, random state.

    Args:
        model: a ``SoftmaxAttention``; an attention module; any module or callable that maps ``(sample, time,
            feature)`` to ``(sample, time, feature)``; or, with ``layer=``, a module that takes ``tokens`` in any form.
        tokens: ``(sample, time, feature)``, or ``(time, feature)`` for one sample. With ``layer=``, what the model
            takes.
        layer: dotted name of a submodule; it is measured at the tokens that reach it when the model runs on ``tokens``.
            An embedding layer: the whole model is measured from the embeddings of the integer ids that are passed.
        norm: ``frobenius``, ``rms`` (1 for the identity at any width) or ``spectral``.
        paths: also the maps of the residual, value, key and query paths (attention layers only).
        heads: also the map of each head (attention layers only).
        residual: attention layers: whether the identity of a residual connection is part of the layer, or the factor of
            its gate; None takes what the layer does. Other models: False says that there is no residual path, so that
            the residual-removed statistics equal the raw ones.
        backend: ``closed_form``, ``autodiff``, or ``auto``: the closed form wherever there is one.
        seed: seed of the measurement's own generator (probes, stochastic draws).
        padding: True at padded positions; they are left out as rows and columns. An attention layer also hides them.
        select: which of a model's several outputs is meant: a key, an index, or a callable.
        stochastic: average over this many draws of a model in train mode, one draw per Jacobian.
        probes: estimate Frobenius norms from this many random cotangents per row instead of all of them.
        dtype: measure in this floating type; the caller's model stays as it is.
        chunk: rows per backward pass; chosen from the budget by default.
        budget: bytes that the measurement may take.

    Returns:
        The map, with its statistics and provenance.

    Raises:
        InputError: what was handed in cannot be measured; the message says why and what to do.

    >>> from sensitivity import SoftmaxAttention
    >>> layer = SoftmaxAttention.random(dim=8, heads=2)
    >>> found = measure(layer, torch.randn(4, 16, 8), paths=True)
    >>> tuple(found.norms.shape), sorted(found.paths)
    ((4, 16, 16), ['key', 'query', 'residual', 'value'])
    """
    check_norm(norm)
    stochastic = _check_options(model, backend, stochastic, probes)
    _check_types(layer, residual, dtype, chunk, seed)
    seed = operator.index(seed)
    with measuring(unwrap(model), stochastic=stochastic > 0):
        target = find_target(model, tokens, layer, residual, padding, select, dtype)
        if target.in_closed_form(backend, stochastic):
            if probes is not None:
                raise InputError("probes estimate what the closed form gives exactly; leave probes out.")
            maps = _closed_form(target, norm, paths, heads, budget)
        else:
            target.refuse_parts(paths, heads)
            options = {"norm": norm, "chunk": chunk, "memory": budget, "probes": probes}
            options["residual"] = float(target.residual)
            maps = _by_autodiff(target, options, seed, stochastic)
    return _result(target, maps, norm, seed, layer, residual)


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
    _check_options(model, backend, 0, None)
    _check_types(layer, residual, dtype, chunk)
    with measuring(unwrap(model)):
        target = find_target(model, tokens, layer, residual, padding, select, dtype)
        if not target.in_closed_form(backend, 0):
            target.refuse_parts(paths, heads=False)
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


def _check_options(model: Any, backend: str, stochastic: int, probes: int | None) -> int:
    if not callable(model):
        raise InputError(f"model must be a module, a callable or a SoftmaxAttention, not {type(model).__name__}.")
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}.")
    if isinstance(stochastic, bool) or not isinstance(stochastic, int) or stochastic < 0:
        raise InputError(f"stochastic must be a number of draws (0 for none), not {stochastic!r}.")
    if probes is not None and (isinstance(probes, bool) or not isinstance(probes, int) or probes < 2):
        raise InputError(f"probes must be an integer of at least 2, so that there is an error bar, not {probes!r}.")
    return stochastic


def _check_types(layer: Any, residual: Any, dtype: Any, chunk: Any, seed: Any = 0) -> None:
    if layer is not None and (not isinstance(layer, str) or not layer):
        raise InputError(
            f"layer must be the dotted name of a submodule, not {layer!r}; leave it out for the whole model."
        )
    if residual is not None and not (isinstance(residual, bool | int | float) and math.isfinite(residual)):
        raise InputError(f"residual must be True, False, a finite factor or None, not {residual!r}.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype must be a floating type such as torch.float64, not {dtype!r}.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int)):
        raise InputError(f"chunk must be a positive number of rows, not {chunk!r}.")
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not -(2**63) <= int(seed) < 2**63:
        raise InputError(f"seed must be an integer of at most 64 bits, not {seed!r}.")


def _closed_form(target: Target, norm: Norm, paths: bool, heads: bool, budget: int | float | None) -> NormMaps:
    attention, tokens = target.described()
    samples, length, _ = tokens.shape
    maps = 1 + 4 * paths + attention.heads * (1 + heads)
    memory.refuse_over(
        samples * length**2 * maps * tokens.element_size(),
        memory.budget(budget, tokens.device),
        f"{maps} maps of {samples} samples and {length} time steps",
        "take fewer samples or time steps, leave paths and heads out, or raise budget=",
    )
    return closed_form.norm_maps(attention, tokens, norm=norm, paths=paths, heads=heads)


def _by_autodiff(target: Target, options: dict[str, Any], seed: int, stochastic: int) -> NormMaps:
    """One map, or the average over draws of a model in train mode, one draw per Jacobian."""
    generator = torch.Generator().manual_seed(seed)
    if not stochastic:
        return autodiff.norm_maps(target.function, target.tokens, generator=generator, **options)
    options |= {"generator": generator, "stochastic": True}
    draws = [autodiff.norm_maps(target.function, target.tokens, **options) for _ in range(stochastic)]
    total = torch.stack([maps.total for maps in draws])
    diagonals = [maps.diagonal for maps in draws if maps.diagonal is not None]
    return NormMaps(
        total=total.mean(dim=0),
        diagonal=torch.stack(diagonals).mean(dim=0) if diagonals else None,
        standard_error=total.std(dim=0) / stochastic**0.5 if stochastic > 1 else None,
        engine=f"{draws[0].engine}, mean of {stochastic} draws",
        notes=draws[0].notes,
    )


def _result(
    target: Target, maps: NormMaps, norm: Norm, seed: int, layer: str | None, residual: bool | float | None
) -> SensitivityMap:
    attended, visible = _visible(target, maps)
    norms = maps.total
    if target.padding is not None:
        norms = norms.masked_fill(left_out(target.padding), torch.nan)
    diagonal = maps.diagonal if maps.total.shape[1] == maps.total.shape[2] else None
    if diagonal is not None and target.padding is not None:
        diagonal = diagonal.masked_fill(target.padding, torch.nan)
    return SensitivityMap(
        norms=norms,
        diagonal=diagonal,
        paths=maps.paths,
        heads=maps.heads,
        attention=maps.attention,
        visible=visible,
        attended=attended,
        norm=norm,
        in_dim=target.tokens.shape[-1],
        standard_error=maps.standard_error,
        name=target.name,
        notes=[*target.notes, *([f"no closed form: {target.why}"] if target.why else []), *maps.notes],
        provenance=_provenance(target, maps, seed, layer, residual),
    )


def _visible(target: Target, maps: NormMaps) -> tuple[Tensor | None, Tensor]:
    """Which pairs the mask lets attend, and which pairs count in the statistics.

    A model without a description whose map vanishes exactly above the diagonal is taken to be causal.
    """
    samples, queries, keys = maps.total.shape
    if target.attention is not None:
        attended, counted = attended_and_counted(target.attention, keys)
        return attended, counted.expand(samples, -1, -1)
    visible = torch.ones(samples, queries, keys, dtype=torch.bool, device=maps.total.device)
    if queries == keys > 1:
        future = torch.ones(queries, keys, dtype=torch.bool, device=visible.device).triu(1)
        below = maps.total.masked_select(~future & ~torch.eye(queries, dtype=torch.bool, device=visible.device))
        if not maps.total.masked_select(future).any() and below.any():
            visible = visible & ~future
            target.notes.append("no output depends on a later input: the model was taken to be causal")
    return None, visible if target.padding is None else visible & ~left_out(target.padding)


def _provenance(
    target: Target, maps: NormMaps, seed: int, layer: str | None, residual: bool | float | None
) -> dict[str, Any]:
    from sensitivity import __version__

    return {
        "sensitivity": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "engine": maps.engine,
        "model": target.name,
        "layer": layer,
        "residual": residual,
        "seed": seed,
        "dtype": str(maps.total.dtype).removeprefix("torch."),
        "device": str(maps.total.device),
        "samples": maps.total.shape[0],
        "length": maps.total.shape[-1],
        "features": target.tokens.shape[-1],
    }

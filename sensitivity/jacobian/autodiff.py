"""Block Jacobians and their norms for any sequence model, by reverse-mode automatic differentiation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity import checks
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.jacobian import memory as memories
from sensitivity.jacobian.cotangents import Cotangents, exact, rademacher
from sensitivity.jacobian.independence import Trial, examine
from sensitivity.jacobian.norms import NormMaps, check_norm
from sensitivity.jacobian.planning import Options, Watch, choose, in_words
from sensitivity.jacobian.reduce import Blocks, FrobeniusMaps, Reduction, SpectralMaps
from sensitivity.jacobian.replicated import Rows, stream
from sensitivity.jacobian.shared import shareable
from sensitivity.jacobian.state import exact_arithmetic
from sensitivity.modules import modules_of

Function = Callable[[Tensor], Tensor]


def norm_maps(
    function: Function,
    tokens: Tensor,
    *,
    norm: str = "frobenius",
    engine: str = "auto",
    chunk: int | None = None,
    memory: int | float | None = None,
    probes: int | None = None,
    generator: torch.Generator | None = None,
    stochastic: bool = False,
    times: Int[Tensor, " query"] | None = None,
    residual: float = 1.0,
    watch: Watch | None = None,
) -> NormMaps:
    r"""Norms of every block :math:`J_{ij} = \partial h_i / \partial x_j` of each sample's own Jacobian.

    Rows are reduced to norms as they come, so the blocks are never held. Which engine:

    - ``vmap``: a vmapped backward pass through one forward pass; not for every operation, which is tried first.
    - ``replicated``: copies of a sample along the batch, one forward pass, a cotangent for every copy. Needs samples
      that are independent of one another, which is checked first; otherwise it is ``rows``.
    - ``rows``: one row per backward pass, over the batch as it is. Always right, slow.
    - ``probes``: random signs ``v``, for which :math:`E \|v^T J_{ij}\|^2 = \|J_{ij}\|_F^2`, with a standard error.
    - ``auto``: ``probes`` if a number of probes is given, else all rows; by ``vmap`` where it works, else
      ``replicated`` where that is right, else ``rows``.

    Args:
        function: maps ``(sample, time, in)`` to ``(sample, time', out)``; its modules are not guarded here (see
            :func:`sensitivity.jacobian.guard.measuring`).
        tokens: where to differentiate, ``(sample, time, in)``.
        norm: ``frobenius``, ``rms`` or ``spectral``.
        engine: see above.
        chunk: rows of one sample per backward pass; chosen from the memory budget unless given.
        memory: budget in bytes; the smaller of 4 GiB and half of what is free unless given.
        probes: random vectors per query time, at least 2.
        generator: draws the probes, and the seed of a random function; seed 0 unless given.
        stochastic: lets a function through that is random (dropout in train mode): one draw per Jacobian.
        times: the input times that the output times belong to, where the function puts out some of them only.
        residual: the multiple of the identity that is taken off the diagonal blocks for their residual-removed norms.
        watch: goes around the chunks of rows as they come, and is told the number of rows of all samples.

    Returns:
        Norm maps ``(sample, query, key)`` in the type of the tokens (float32 for half precision), with the engine that
        was used and why.

    Raises:
        InputError: tokens, output or options that cannot be used; more memory than the budget; a random function.
        RunError: a derivative that is not finite.
    """
    check_norm(norm)
    options = Options(engine, chunk, memory, probes, generator, stochastic, watch)
    if probes is not None and norm == "spectral":
        raise InputError("probes estimate the Frobenius norm; choose norm='frobenius' or 'rms', or leave probes out.")
    tokens = _prepared(function, tokens)
    with exact_arithmetic():
        trial = _examined(function, tokens, options)
        cotangents, notes = _cotangents(trial, options)
        own = times
        if times is None and trial.length == tokens.shape[1]:
            own = torch.arange(trial.length, device=tokens.device)
        own = own if trial.out == tokens.shape[2] else None
        reduction = (SpectralMaps if norm == "spectral" else FrobeniusMaps)(tokens, cotangents, own, residual)
        words, more = _run(function, tokens, trial, cotangents, reduction, options)
    maps = reduction.maps(norm)
    maps.engine, maps.notes = words, [*notes, *more]
    if times is None:  # some outputs say nothing of the others
        _warn_if_unused(maps)
    return maps


def blocks(
    function: Function,
    tokens: Tensor,
    *,
    engine: str = "auto",
    chunk: int | None = None,
    memory: int | float | None = None,
    generator: torch.Generator | None = None,
    stochastic: bool = False,
) -> Float[Tensor, "sample query key out in"]:
    """Every block of each sample's own Jacobian; the arguments are those of :func:`norm_maps`.

    Raises:
        InputError: the blocks do not fit the memory budget; norm maps never need them.
        RunError: a derivative that is not finite.
    """
    if engine == "probes":
        raise InputError("probes estimate norms, not blocks; choose another engine.")
    options = Options(engine, chunk, memory, None, generator, stochastic)
    tokens = _prepared(function, tokens)
    with exact_arithmetic():
        trial = _examined(function, tokens, options)
        memories.refuse_over(
            tokens.numel() * trial.length * trial.out * tokens.element_size(),
            memories.budget(memory, tokens.device),
            f"holding the blocks of {tokens.shape[0]} samples, {trial.length} x {tokens.shape[1]} blocks of "
            f"{trial.out} x {tokens.shape[2]},",
            "take norms, which never hold the blocks, or fewer samples or time steps, or raise memory=",
        )
        cotangents = exact(trial.length, trial.out)
        reduction = Blocks(tokens, cotangents)
        _run(function, tokens, trial, cotangents, reduction, options)
    if not reduction.blocks.any():
        warn_unused()
    return reduction.blocks


def _run(
    function: Function, tokens: Tensor, trial: Trial, cotangents: Cotangents, reduction: Reduction, options: Options
) -> tuple[str, list[str]]:
    """Streams every row into the reduction; returns the engine in words, and notes."""
    shared = None
    if options.engine not in ("replicated", "rows"):
        shared = shareable(function, tokens[:1] if trial.independent else tokens)
    if shared is None and options.engine == "vmap":
        raise InputError(
            "torch.vmap does not go through this function's backward pass; leave engine= out, which finds another way."
        )
    plan = choose(tokens, trial, cotangents, options, shared)
    notes = []
    if not trial.independent and options.engine != "rows":
        notes.append(f"over the true batch, not over copies, because {trial.reason}")
    if tokens.dtype in (torch.float16, torch.bfloat16):
        notes.append(f"computed in {_name(tokens.dtype)}: norms are off by up to about 1 %")
    shorter = False
    chunks: Iterable[Rows] = stream(function, tokens, cotangents, plan)
    if options.watch is not None:
        chunks = options.watch(chunks, len(cotangents) * tokens.shape[0])
    for rows in chunks:
        reduction.add(rows)
        shorter |= rows.gradients.shape[2] < tokens.shape[1]
    return in_words(plan, cotangents) + ", causal prefixes" * shorter, notes


def _prepared(function: Function, tokens: Tensor) -> Float[Tensor, "sample time in"]:
    """The tokens, checked, apart from the caller's graph, and in the type of the model."""
    tokens = checks.tokens(tokens).detach()
    if tokens.is_inference():
        tokens = tokens.clone()
    types = {value.dtype for part in modules_of(function) for value in part.parameters() if value.is_floating_point()}
    if types and tokens.dtype not in types:
        names = " and ".join(sorted(map(_name, types)))
        raise InputError(
            f"the tokens are {_name(tokens.dtype)}, but the model's parameters are {names}; convert one of them, for "
            "instance with tokens.to(next(model.parameters()).dtype)."
        )
    return tokens


def _examined(function: Function, tokens: Tensor, options: Options) -> Trial:
    """The trial passes, and what they rule out."""
    if options.stochastic:
        _seed(options.generator)
    trial = examine(function, tokens)
    if trial.random and not options.stochastic:
        raise InputError(
            "two calls with the same tokens give different outputs, so there is no one Jacobian; switch the randomness "
            "off (model.eval()), or pass stochastic=n to average over n draws."
        )
    if not trial.connected:
        _check_constant(function, tokens)
    return trial


def _check_constant(function: Function, tokens: Tensor) -> None:
    """Refuses an output that changes with the tokens although autograd sees no path between them."""
    with torch.no_grad():
        moved = tokens + 0.1 * tokens.std(unbiased=False).clamp_min(1) * torch.linspace(
            -1, 1, tokens[0].numel(), dtype=tokens.dtype, device=tokens.device
        ).reshape(tokens[0].shape)
        if not torch.equal(function(tokens.clone()), function(moved)):
            raise InputError(
                "the output changes with the tokens, but autograd sees no path between them: the function runs under "
                "torch.no_grad or torch.inference_mode, detaches, or rounds; take that out before measuring."
            )


def _cotangents(trial: Trial, options: Options) -> tuple[Cotangents, list[str]]:
    if options.probes is None:
        return exact(trial.length, trial.out), []
    if options.probes >= trial.out:
        note = f"exact rows instead of {options.probes} probes, because they are only {trial.out} per query"
        return exact(trial.length, trial.out), [note]
    return rademacher(trial.length, trial.out, options.probes, options.generator), []


def _seed(generator: torch.Generator | None) -> None:
    """Gives a random function a draw of its own; ``exact_arithmetic`` restores the caller's random state."""
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    seed = int(torch.randint(0, 2**31 - 1, (1,), generator=generator, device=generator.device))
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _warn_if_unused(maps: NormMaps) -> None:
    unused = (~maps.total.bool().any(dim=1).any(dim=0)).nonzero().flatten().tolist()
    if len(unused) == maps.total.shape[-1]:
        warn_unused()
    elif unused:
        shown = ", ".join(map(str, unused[:8])) + (", ..." if len(unused) > 8 else "")
        maps.notes.append(f"no output depends on input time {shown}")


def warn_unused() -> None:
    """Warns of an output that depends on no token."""
    warnings.warn(
        "the output does not depend on the tokens: every sensitivity is exactly zero.", SensitivityWarning, stacklevel=4
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Whether samples are independent of one another: what every shortcut over the batch axis rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity import checks
from sensitivity.checks import all_finite
from sensitivity.errors import InputError, SensitivityError
from sensitivity.jacobian.memory import SavedBytes, known_tensors
from sensitivity.jacobian.state import exact_arithmetic

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Trial:
    """What a few trial passes say about a function.

    Attributes:
        length: time steps of the output.
        out: features of an output state.
        independent: whether a sample's output is the same alone, and at another place among other samples.
        separate: whether no sample's output has a derivative with respect to another sample, in the batch at hand.
        random: whether two calls with the same tokens differ.
        reason: why samples are not independent, in words; empty where they are.
        connected: whether autograd sees any dependence of the output on the tokens.
        per_copy: bytes that autograd keeps per sample.
        fixed: bytes that it keeps whatever the batch.
    """

    length: int
    out: int
    independent: bool
    separate: bool
    random: bool
    reason: str
    connected: bool
    per_copy: int
    fixed: int


def check_batch_independence(function: Function, tokens: Tensor) -> str | None:
    """Why the samples of a batch influence one another under ``function``; None if they do not.

    One sample is run alone and then among another, different one, at another place in the batch; outputs must agree to
    rounding, and the derivative of the one with respect to the other must be exactly zero.

    Args:
        function: maps ``(sample, time, feature)`` to ``(sample, time, feature)``.
        tokens: one sample or more.

    Returns:
        The reason in words, such as batch statistics, or None.

    Raises:
        InputError: the function does not run on these tokens, or puts out no ``(sample, time, feature)``.
    """
    tokens = checks.tokens(tokens)
    with exact_arithmetic():
        return examine(function, tokens).reason or None


def examine(function: Function, tokens: Float[Tensor, "sample time feature"]) -> Trial:
    """Runs the function a few times, forward and once backward, and reports; call it inside ``exact_arithmetic``."""
    with torch.no_grad(), checks.running("the model", tokens):
        output = check_output(function(tokens.clone()), tokens)
        again = function(tokens.clone())
    length, out = output.shape[1:]
    random = not _agree(output, again)
    per_copy, fixed, connected, reason = 0, 0, True, "two calls with the same tokens give different outputs"
    try:
        known = known_tensors(function, tokens)
        alone, saved_alone = _forward(function, tokens[:1], known)
        pair = torch.cat([_companion(tokens[:1]), tokens[:1]])
        mixed, saved_pair = _forward(function, pair, known)
        per_copy = max(saved_pair[1] - saved_alone[1], tokens[0].numel() * tokens.element_size())
        fixed = max(saved_alone[1] - per_copy, 0)
        connected = alone.requires_grad
        reason = "" if random else _compare(output, alone, mixed, saved_pair[0])
        reason = reason or (_elsewhere(function, tokens, output) if not random else reason)
        if random:
            reason = "two calls with the same tokens give different outputs"
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        reason = f"the function does not take a batch of another size ({_first_line(error)})"
    if reason:
        leaf, held = _forward_batch(function, tokens)
        connected = held.requires_grad
        separate = tokens.shape[0] == 1 or (connected and _separate(leaf, held))
    return Trial(length, out, not reason, not reason or separate, random, reason, connected, per_copy, fixed)


def check_output(output: object, tokens: Tensor) -> Float[Tensor, "sample time out"]:
    """Refuses an output that is not ``(sample, time, feature)``, floating and finite.

    Raises:
        InputError: says what came back, and how to select the part that is meant.
    """
    if not isinstance(output, Tensor):
        raise InputError(
            f"the function must return a tensor (sample, time, feature), not {type(output).__name__}; name the part "
            "that is meant with select=."
        )
    if output.ndim != 3 or output.shape[0] != tokens.shape[0]:
        raise InputError(
            f"the function must return (sample, time, feature) with {tokens.shape[0]} samples, not the shape "
            f"{tuple(output.shape)}; bring it to three axes with select=, such as select=lambda out: out[:, None]."
        )
    if not output.is_floating_point():
        raise InputError(f"the function's output is {output.dtype}, which has no derivative; select a floating output.")
    if not all_finite(output):
        bad = ~torch.isfinite(output)
        sample, query = (int(part) for part in bad.any(dim=-1).nonzero()[0])
        raise InputError(
            f"the output is not finite at (sample {sample}, query {query}), in {output.dtype} under the math attention "
            f"backend; if its mask hides every key, row {query} attends to nothing: let it see one key."
        )
    return output


def _forward(function: Function, tokens: Tensor, known: list[Tensor]) -> tuple[Tensor, tuple[Tensor, int]]:
    leaf = tokens.detach().clone().requires_grad_(True)
    with SavedBytes([*known, leaf]) as saved:
        output = function(leaf.clone())
    return output, (leaf, saved.total)


def _forward_batch(function: Function, tokens: Tensor) -> tuple[Tensor, Tensor]:
    leaf = tokens.detach().clone().requires_grad_(True)
    try:
        return leaf, function(leaf.clone())
    except (SensitivityError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the same call without a derivative has gone through before
        said = checks.shortened(f"{type(error).__name__}: {error}")
        raise InputError(
            f"the model does not run where a derivative is asked for ({said}); it may leave torch, as with .numpy(), "
            "or write into its input: take that out before measuring."
        ) from error


def _companion(sample: Tensor) -> Tensor:
    """A different sample of the same kind: its time reversed, its features rolled, its values shrunk and shifted."""
    return 0.7 * sample.flip(1).roll(1, dims=2) + 0.3 * sample.std(unbiased=False)


def _compare(output: Tensor, alone: Tensor, mixed: Tensor, leaf: Tensor) -> str:
    """Compares one sample's outputs in three surroundings, and its derivative with respect to a stranger."""
    if alone.shape != output[:1].shape or mixed.shape[0] != 2:
        return "the function's output changes its shape with the batch"
    if not _agree(alone[0], output[0]) or not _agree(alone[0], mixed[1]):
        return "a sample's output depends on the other samples or on its place in the batch (batch statistics?)"
    if mixed.requires_grad:
        stranger = _gradient(mixed[1].square().sum() + mixed[1].sum(), leaf)
        if stranger is not None and stranger[0].count_nonzero() > 0:
            return "a sample's output has a derivative with respect to another sample"
    return ""


def _elsewhere(function: Function, tokens: Tensor, output: Tensor) -> str:
    """Compares the batch with itself in reverse order: a function may know places in the batch."""
    if tokens.shape[0] < 2:
        return ""
    with torch.no_grad():
        reverse = function(tokens.flip(0).clone())
    if not _agree(reverse.flip(0), output):
        return "a sample's output depends on its place in the batch"
    return ""


def _agree(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    scale = torch.maximum(first.detach().abs().max(), second.detach().abs().max())
    tolerance = torch.finfo(first.dtype).eps ** 0.5 * scale
    return bool((first.detach() - second.detach()).abs().max() <= tolerance)


def _separate(leaf: Tensor, output: Tensor) -> bool:
    """Whether no sample's output has a derivative with respect to another sample; one backward pass per sample."""
    for sample in range(leaf.shape[0]):
        chosen = output[sample].square().sum() + output[sample].sum()
        gradient = _gradient(chosen, leaf)
        if gradient is not None:
            others = gradient.clone()
            others[sample] = 0
            if others.count_nonzero() > 0:
                return False
    return True


def _gradient(chosen: Tensor, leaf: Tensor) -> Tensor | None:
    try:
        return torch.autograd.grad(chosen, leaf, retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        if "second time" in str(error):
            return torch.ones_like(leaf)  # nothing is known, so nothing is shared
        raise explained(error) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


def explained(error: RuntimeError) -> Exception:
    """Turns autograd's complaint about reentrant checkpointing into a sentence with the way out."""
    text = str(error)
    if "checkpoint" in text.lower() and ("grad()" in text or "inputs" in text):
        return InputError(
            "the model uses reentrant activation checkpointing, which cannot be differentiated with respect to its "
            "inputs; call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or switch checkpointing off."
        )
    return error

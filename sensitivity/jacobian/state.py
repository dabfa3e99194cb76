"""Snapshots of everything that a measurement must leave as it found it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sensitivity.errors import InputError

_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Differentiable, full-precision arithmetic: math attention, no fast paths, no autocast, no TF32, no compilation.

    Every setting is put back afterwards, also after an error. Grad mode is switched on inside.

    Raises:
        InputError: inside ``torch.inference_mode``.
    """
    refuse_inference_mode()
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_kept_globals())
        stack.enter_context(_full_precision())
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.backends.mha.set_fastpath_enabled(False)
        for name in _KERNELS:
            _enable_kernel(name, name == "math")
        yield


def refuse_inference_mode() -> None:
    """Refuses to work where autograd records nothing.

    Raises:
        InputError: inside ``torch.inference_mode``.
    """
    if torch.is_inference_mode_enabled():
        raise InputError(
            "torch.inference_mode is on, where no derivative can be taken; measure outside of that block "
            "(torch.no_grad is fine)."
        )


@contextlib.contextmanager
def _kept_globals() -> Iterator[None]:
    """Restores kernel choices, random states, default dtype and thread count."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    kernels = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _KERNELS}
    dtype, threads, cudnn = torch.get_default_dtype(), torch.get_num_threads(), torch.backends.cudnn.enabled
    random = random_state()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for name, enabled in kernels.items():
            _enable_kernel(name, enabled)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.backends.cudnn.enabled = cudnn
        set_random_state(random)


def random_state() -> tuple[Tensor, list[Tensor] | None]:
    """States of the global generators, of the GPUs too where they are in use."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if in_use else None


def set_random_state(state: tuple[Tensor, list[Tensor] | None]) -> None:
    """Puts the global generators into a state that :func:`random_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])


def _enable_kernel(name: str, enabled: bool) -> None:
    getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Float32 products in float32, by torch's older and newer settings; both are as before afterwards."""
    places = _precision_places()
    newer = [place.fp32_precision for place in places]
    older = _older_precision()
    try:
        if older is not None:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        for place, value in zip(places, newer, strict=True):
            if place.fp32_precision != value:
                place.fp32_precision = value


def _older_precision() -> tuple[str, bool] | None:
    """The settings of the older interface; None where the caller used the newer one, and torch refuses to say."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


@functools.cache
def _precision_places() -> list[Any]:
    """Where newer versions of torch keep the float32 precision, one setting per kind of operation."""
    rooms = {"cuda": ("matmul",), "cudnn": ("conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
    found = [
        getattr(getattr(torch.backends, room, None), kind, None) for room, kinds in rooms.items() for kind in kinds
    ]
    return [place for place in found if hasattr(place, "fp32_precision")]


@contextlib.contextmanager
def kept_parts(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Freezes the parameters of modules and restores mode, buffers, gradients and flags bit by bit.

    Gradients are taken off while the block runs, so that nothing can add to them; the same tensors come back.

    Args:
        parts: the modules, and those within them: of each only its own parameters and buffers are looked at.
    """
    parts = list({id(part): part for part in parts}.values())
    modes = [in_training(part) for part in parts]
    buffers = [{name: (value, _copy(value)) for name, value in part._buffers.items()} for part in parts]
    parameters = list(
        {id(value): value for part in parts for value in part._parameters.values() if value is not None}.values()
    )
    before = [(value.grad, value.requires_grad) for value in parameters]
    try:
        for value in parameters:
            value.grad = None
            if value.is_leaf and value.is_floating_point():
                value.requires_grad_(False)
        yield
    finally:
        for value, (grad, flag) in zip(parameters, before, strict=True):
            value.grad = grad
            if value.requires_grad != flag:
                value.requires_grad_(flag)
        for part, mode, saved in zip(parts, modes, buffers, strict=True):
            if in_training(part) != mode:
                part.training = mode
            if saved or part._buffers:
                _restore_buffers(part, saved)


def in_training(part: nn.Module) -> bool:
    """Whether a module is in train mode; one that was frozen by TorchScript has no mode left, and never is."""
    return bool(getattr(part, "training", False))


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None or value.is_meta or is_lazy(value) else value.detach().clone()


def _restore_buffers(part: nn.Module, saved: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
    for name in [name for name in part._buffers if name not in saved]:
        del part._buffers[name]
    with torch.no_grad():
        for name, (value, copy) in saved.items():
            if part._buffers.get(name) is not value:
                part._buffers[name] = value
            if value is not None and copy is not None and not _equal(value, copy):
                part._buffers[name] = _put_back(value, copy)


def _equal(value: Tensor, copy: Tensor) -> bool:
    try:
        return torch.equal(value, copy)
    except Exception:  # sparse and nested tensors fail here, each in its way; putting them back does no harm
        return False


def _put_back(value: Tensor, copy: Tensor) -> Tensor:
    """The buffer with its former numbers; the copy itself where torch cannot write them into it."""
    try:
        return (value if value.shape == copy.shape else value.resize_(copy.shape)).copy_(copy)
    except Exception:  # such as a compressed sparse tensor with another number of entries
        return copy

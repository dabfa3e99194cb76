"""The border around a measurement: what it refuses, and the promise that the caller's model stays as it was."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sensitivity.checks import all_finite, held
from sensitivity.errors import InputError
from sensitivity.jacobian.memory import keep_freed_memory
from sensitivity.jacobian.state import exact_arithmetic, in_training, kept_parts, refuse_inference_mode
from sensitivity.modules import modules_of, unwrap

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized", "torchao.quantization")
_FLOATING = ("FloatFunctional",)  # lives among the quantised modules, but adds and multiplies floats
_SCRIPTED_INTEGERS = re.compile(r"= (quantized::|aten::quantize)")  # in the text of a TorchScript graph
_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@contextlib.contextmanager
def measuring(model: nn.Module | Callable[..., Any] | None, stochastic: bool = False) -> Iterator[None]:
    """Everything that a measurement needs around it; nests freely.

    Inside: attention runs on the math backend without fast paths, float32 products are exact, autocast is off,
    parameters are frozen and gradients can be taken. Afterwards, also after an error, these are bit-identical to
    before: mode, buffers, gradients, ``requires_grad`` flags, random states, attention backends, fast path, autocast,
    float32 precision, default dtype and thread count.

    Args:
        model: the module, or a callable; modules that a callable reaches through its closure, its owner or its
            arguments are guarded too.
        stochastic: lets a model in train mode through.

    Raises:
        InputError: inside ``torch.inference_mode``; parameters made there, not finite or not loaded; a quantised
            model; a model in train mode.
    """
    refuse_inference_mode()
    named = [entry for module in modules_of(model) for entry in module.named_modules()]  # one walk for all that follows
    _check_kinds(named)
    _check_parameters(named)
    if not stochastic:
        _check_modes(named)
    keep_freed_memory()
    parts = [part for _, part in named]
    with exact_arithmetic(), kept_parts(parts):
        if any(isinstance(part, nn.RNNBase) for part in parts):
            torch.backends.cudnn.enabled = False  # cuDNN differentiates recurrent layers in train mode only
        yield


def _check_kinds(named: list[tuple[str, nn.Module]]) -> None:
    """Refuses integer arithmetic: autograd sees no path through it, so that what goes there would count as nothing."""
    kinds = {type(part) for _, part in named}  # models repeat few classes, and each map comes by here
    quantised = {kind: base for kind in kinds for base in reversed(kind.__mro__) if _is_quantised(base)}
    for name, part in named if quantised else ():
        if type(part) in quantised:
            kind = quantised[type(part)]
            raise _integers(name, f"is a {kind.__module__}.{kind.__name__}")
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in kinds):
        _check_scripts(named)


def _is_quantised(kind: type) -> bool:
    return kind.__module__.startswith(_QUANTISED) and kind.__name__ not in _FLOATING


def _check_scripts(named: list[tuple[str, nn.Module]]) -> None:
    """The same for TorchScript, which keeps no classes, only code: that of a module holds that of those within."""
    covered: set[int] = set()
    for name, part in named:
        if not isinstance(part, torch.jit.ScriptModule) or id(part) in covered:
            continue
        graph = getattr(part, "inlined_graph", None)  # a list of modules has none, and those within speak for it
        if graph is None:
            continue
        if _SCRIPTED_INTEGERS.search(str(graph)):
            raise _integers(name, "is TorchScript that computes in integers")
        covered.update(id(inner) for inner in part.modules())


def _integers(name: str, what: str) -> InputError:
    place = f"its submodule {name!r}" if name else "it"
    return InputError(
        f"the model is quantised: {place} {what}, through which no derivative can be taken; measure the model as it "
        "was before."
    )


def check_mode(model: nn.Module) -> None:
    """Refuses a model whose train mode changes what it computes, naming the first submodule that does.

    A module that is in train mode without any effect (a plain ``Linear``, a dropout of probability 0) is let through.

    Raises:
        InputError: dropout of positive probability, batch statistics, or any module of another library whose code asks
            for ``self.training``, in train mode.
    """
    _check_modes(unwrap(model).named_modules())


def _check_modes(named: Iterable[tuple[str, nn.Module]]) -> None:
    for name, part in named:
        effect = train_effect(part) if in_training(part) else None
        if effect is not None:
            place = f"its submodule {name!r} ({type(part).__name__})" if name else f"{type(part).__name__}"
            raise InputError(
                f"the model is in train mode: {place} {effect}; call model.eval() first, or pass stochastic=n to "
                "average over n draws."
            )


def train_effect(module: nn.Module) -> str | None:
    """What train mode changes in this one module (not in its children), in words; None if nothing."""
    probability = _dropout(module)
    if probability > 0 and not (isinstance(module, nn.RNNBase) and module.num_layers == 1):
        return f"draws a random mask at every call (p={probability:g})"
    if isinstance(module, _BATCH_STATISTICS):
        return "normalises with batch statistics and updates its buffers" if module.track_running_stats else None
    if isinstance(module, nn.RReLU):
        return "draws random slopes"
    foreign = not type(module).__module__.startswith(("torch.nn.modules", "torch.nn.parallel"))
    if foreign and probability < 0 and _asks_for_mode(type(module)):
        return "computes something else in train mode"
    return None


def _dropout(module: nn.Module) -> float:
    """The largest dropout probability among the module's own settings; -1 where it has none."""
    found = -1.0
    for name, value in vars(module).items():
        if name == "p" or "drop" in name:
            found = max(found, _number(value))
        elif not isinstance(value, (Tensor, nn.Module)):
            found = max(found, _number(getattr(value, "p", None)))
    for child in module.children():  # a strategy that is a module of its own speaks for itself
        if "drop" in type(child).__name__.lower():
            found = max(found, 0.0)
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else -1.0


def _asks_for_mode(kind: type[nn.Module]) -> bool:
    """Whether the class's own code (not that of torch) reads ``self.training``."""
    for base in kind.__mro__:
        if base is nn.Module or base.__module__.startswith("torch."):
            continue
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if (
                code is not None
                and "training" in code.co_names
                and member.__name__ not in ("train", "eval", "__init__")
            ):
                return True
    return False


def _check_parameters(named: Iterable[tuple[str, nn.Module]]) -> None:
    every = ((f"{place}.{name}" if place else name, value) for place, part in named for name, value in _own(part))
    for name, value in every:
        if is_lazy(value):
            raise InputError(
                f"the model's parameter {name!r} has no shape yet; run the model once, so that its lazy modules find "
                "their sizes, before measuring."
            )
        if value.is_inference():
            raise InputError(
                f"the parameter {name!r} was made inside torch.inference_mode and has no derivatives; build the model "
                "outside of that block."
            )
        held(value, f"the model's parameter {name!r}")
        if value.is_floating_point() and not all_finite(value):
            count = int((~torch.isfinite(value)).sum())
            raise InputError(
                f"the model's parameter {name!r} holds {count} NaN or infinite entries of {value.numel()}; "
                "load another checkpoint or repair it before measuring."
            )


def _own(part: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in part._parameters.items() if value is not None]


def upcast(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of the model in another floating type, for half-precision models; the caller's model stays as it is.

    Jacobian norms in bfloat16 or float16 are off by up to about one per cent; the copy's are not.
    """
    return copy.deepcopy(unwrap(model)).to(dtype)

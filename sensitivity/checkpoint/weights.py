"""Putting weights into a model: names compared exactly, wrappers' prefixes reported, no NaN let through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sensitivity.errors import InputError

PREFIXES = ("module.", "_orig_mod.", "model.")


def match(weights: Mapping[str, Tensor], expected: Iterable[str] | None = None) -> dict[str, str]:
    """Maps names in the file to names in the model, without the prefixes of wrappers.

    A prefix (``module.`` of parallel training, ``_orig_mod.`` of ``torch.compile``, ``model.`` of Lightning) goes
    only if every name has it, and stays if the names are the expected ones already.

    Args:
        weights: the tensors of the file by name.
        expected: names in the model, if it is known.
    """
    names = list(weights)
    expected = None if expected is None else set(expected)
    while names and (expected is None or set(names) != expected):
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in names)), None)
        if prefix is None:
            break
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(weights, names, strict=True))


def fill(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Loads the weights strictly.

    Raises:
        InputError: a name or a shape differs, a weight is NaN or infinite, or a buffer is NaN.
    """
    own = model.state_dict()
    faults = [
        *_listed("missing", [name for name in own if name not in weights]),
        *_listed("unexpected", [name for name in weights if name not in own]),
        *_listed(
            "of another shape",
            [
                f"{name} {tuple(weights[name].shape)} for {tuple(own[name].shape)}"
                for name in own
                if name in weights and weights[name].shape != own[name].shape
            ],
        ),
    ]
    if faults:
        raise InputError(
            f"the weights in {path} do not fit {type(model).__name__} ({'; '.join(faults)}); build the model that they "
            "were saved from."
        )
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in weights.items():
        check_finite(value, name, path, infinite=name in parameters)
    try:
        model.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise InputError(f"the weights in {path} do not fit {type(model).__name__}: {reason}") from error


def check_finite(value: Tensor, name: str, path: Path, infinite: bool = True) -> None:
    """Refuses a tensor with NaN; with ``infinite``, one with infinite entries too (a mask may have them).

    Raises:
        InputError: naming the tensor.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return
    bad = ~torch.isfinite(value) if infinite else torch.isnan(value)
    if bad.any():
        kind = "NaN" if torch.isnan(value).any() else "infinite"
        raise InputError(
            f"the weight {name!r} in {path} is {kind} in {int(bad.sum())} of {value.numel()} entries: the training "
            "diverged; take an earlier checkpoint."
        )


def common_dtype(weights: Iterable[Tensor]) -> torch.dtype | None:
    """The floating type that all floating weights share, if there is one."""
    kinds = {value.dtype for value in weights if value.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{what}: {', '.join(names[:3])}{more}"]

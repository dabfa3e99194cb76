"""The model that a checkpoint's weights belong to."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from sensitivity.checkpoint.weights import common_dtype
from sensitivity.errors import InputError
from sensitivity.models import BACKBONES, Forecaster, STAEformer

Builder = Callable[[], nn.Module]
_NAMES = set(Forecaster.NAMES)
Model = TypeVar("Model", bound=nn.Module)


class Named:
    """A builder given as ``package.module:function``; its module is imported because the user typed it.

    Args:
        text: what the user typed; the working directory is searched too.

    Raises:
        InputError: no such module or function.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        place, colon, name = text.partition(":")
        if not (colon and place and name):
            raise InputError(f"--builder takes package.module:function, not {text!r}.")
        self.module = _imported(place, text)
        function = getattr(self.module, name, None)
        if not callable(function):
            raise InputError(f"--builder {text}: the module {place} has no function {name!r}.")
        self.function = function

    def __call__(self) -> nn.Module:
        """The module to load state into.

        Raises:
            InputError: the function fails or returns no module.
        """
        return _built(self.function, self.text)


def resolve(builder: str | Builder | None) -> tuple[Builder | None, types.ModuleType | None]:
    """The function that builds, and the module that it stands in."""
    if builder is None:
        return None, None
    if isinstance(builder, str):
        named = Named(builder)
        return named, named.module
    function = builder
    name = getattr(function, "__name__", type(function).__name__)
    return lambda: _built(function, name), sys.modules.get(getattr(function, "__module__", ""))


def known(name: str, config: dict[str, Any], weights: Mapping[str, Tensor]) -> nn.Module | None:
    """A fresh model of this package by the name of its class; None if there is no such class.

    Args:
        name: as a checkpoint has it.
        config: of the model.
        weights: the tensors, by name.
    """
    if name == Forecaster.__name__:
        return forecaster(config, weights)
    if name not in {kind.__name__ for kind in BACKBONES.values()}:
        return None
    return _as(STAEformer.from_config(config), weights)


def forecaster(config: Any, weights: Mapping[str, Tensor]) -> Forecaster | None:
    """A fresh forecaster if ``config`` describes one, in the floating type of the weights; else None.

    Args:
        config: a dict or namespace with a forecaster's arguments, or one that holds it under ``config``, ``model``,
            ``hparams`` or ``args``; further entries (learning rates and such) are left out.
        weights: the tensors, by name; a road graph among them goes to the model.
    """
    found = _find(config, depth=2)
    if found is None:
        return None
    graph = next((value for name, value in weights.items() if name.endswith("blocks.0.spatial.graph")), None)
    return _as(Forecaster.from_config(found, graph=graph), weights)


def _as(model: Model, weights: Mapping[str, Tensor]) -> Model:
    """The model in the floating type that all weights share."""
    dtype = common_dtype(weights.values())
    return model if dtype is None else model.to(dtype)


def _find(config: Any, depth: int) -> dict[str, Any] | None:
    config = vars(config) if hasattr(config, "__dict__") and not isinstance(config, Mapping) else config
    if not isinstance(config, Mapping):
        return None
    if "nodes" in config:
        return {name: value for name, value in config.items() if name in _NAMES}
    inner = (config.get(name) for name in ("config", "model", "hparams", "args", "hyper_parameters"))
    return next((found for item in inner if depth and (found := _find(item, depth - 1)) is not None), None)


def _built(function: Builder, name: str) -> nn.Module:
    try:
        model = function()
    except Exception as error:
        raise InputError(
            f"the builder {name} failed with {type(error).__name__}: {error}; it is called without arguments."
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"the builder {name} must return a torch.nn.Module, not {type(model).__name__}.")
    return model


def _imported(place: str, text: str) -> types.ModuleType:
    with _working_directory():
        try:
            return importlib.import_module(place)
        except Exception as error:
            raise InputError(
                f"--builder {text}: importing {place} failed with {type(error).__name__}: {error}."
            ) from error


@contextmanager
def _working_directory() -> Any:
    """Imports find modules in the working directory, as they do for a script that stands there."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)

"""Reading a checkpoint: ours, or one that other code wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sensitivity.checkpoint import building, reading
from sensitivity.checkpoint.saving import FORMAT, STATE, VERSION
from sensitivity.checkpoint.weights import check_finite, fill, match
from sensitivity.errors import InputError
from sensitivity.modules import unwrap

_WEIGHTS = ("state_dict", "model_state_dict", "model_state", "weights", "model", "net", "network", "params")
_LIGHTNING = "pytorch-lightning_version"


@dataclass
class Checkpoint:
    """A model and what its file says about it.

    Attributes:
        path: the file.
        sha256: its fingerprint.
        model: in evaluation mode, on the device asked for.
        config: the arguments that build the model; empty if the file does not have them.
        scaler: plain state of the scaler, or None.
        data: description of the training data, or None.
        metrics: scores, or None.
        training: how the model was trained, or None.
        key_mapping: names of weights in the file to names in the model, where they differ.
        notes: what was done to the file's content, in words.
    """

    path: Path
    sha256: str
    model: nn.Module
    config: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    key_mapping: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load(
    path: Any,
    *,
    trust_pickle: bool = False,
    builder: str | building.Builder | None = None,
    map_location: str | torch.device = "cpu",
) -> Checkpoint:
    """Loads a checkpoint without running code that stands in it.

    Understood are files of ``sensitivity.checkpoint.save``, Lightning checkpoints, state dicts (bare, or under a
    usual name such as ``state_dict``), and whole pickled modules. All but the first need ``builder`` unless the
    configuration of a ``Forecaster`` stands in the file; pickled modules need ``trust_pickle``.

    Args:
        path: the file.
        trust_pickle: let the file run code while it is read; only for files whose maker is trusted.
        builder: ``"package.module:function"`` or a function; called without arguments, it returns the module to load
            state into.
        map_location: the device that tensors are put on.

    Raises:
        InputError: no file, a directory, a file that is damaged or of another kind, code in the file, weights that do
            not fit or are not finite; each in one sentence with the option to add.
    """
    path = reading.as_path(path)
    build, home = building.resolve(builder)
    device = _device(map_location)
    content = reading.read(path, trust_pickle=trust_pickle, device=device, home=home)
    module = _module(content)
    ours = isinstance(content, Mapping) and str(content.get("format")) == FORMAT
    reading.check_sums(path, ours)
    if module is not None:
        checkpoint = _pickled(path, module, build)
    elif ours:
        checkpoint = _ours(path, content, build)
    else:
        _refuse_state(path, content)
        checkpoint = _foreign(path, content, build)
    checkpoint.model.to(device).eval()
    return checkpoint


def _ours(path: Path, content: Mapping[str, Any], build: building.Builder | None) -> Checkpoint:
    if not isinstance(content.get("version"), int) or content["version"] > VERSION:
        raise InputError(
            f"{path} has version {content.get('version')} of the checkpoint format, and this release reads up to "
            f"{VERSION}; upgrade attention-sensitivity."
        )
    absent = [name for name in ("model", "config", "weights") if name not in content]
    if absent or not _is_state(content["weights"]):
        raise InputError(f"{path} is an incomplete checkpoint: it lacks {', '.join(absent) or 'weights'}.")
    config = dict(content["config"])
    model = build() if build else None
    if model is None:
        model = building.known(str(content["model"]), config, content["weights"])
    if model is None:
        raise InputError(f"{path} holds a {content['model']}, which this release cannot build; {_BUILDER}.")
    mapping, notes = _into(model, content["weights"], path)
    described = {name: content.get(name) for name in ("scaler", "data", "metrics", "training")}
    return _checkpoint(path, model, config=config, key_mapping=mapping, notes=notes, **described)


def _pickled(path: Path, content: nn.Module, build: building.Builder | None) -> Checkpoint:
    """A whole module from a trusted file."""
    model = unwrap(content)
    notes: tuple[str, ...] = ("the file holds a pickled module, which was trusted",)
    mapping: dict[str, str] = {}
    if build is None:
        for name, value in model.state_dict().items():
            check_finite(value, name, path, infinite=name in dict(model.named_parameters()))
    else:
        state = model.state_dict()
        model = build()
        mapping, more = _into(model, state, path)
        notes += more
    config = getattr(model, "config", None)
    return _checkpoint(path, model, config=config if isinstance(config, dict) else {}, key_mapping=mapping, notes=notes)


def _refuse_state(path: Path, content: Any) -> None:
    """Refuses what a training run keeps to be resumed from; its model stands beside it."""
    if isinstance(content, Mapping) and content.get("format") == STATE:
        beside = path.with_name("ckpt.pt")
        where = f"name the model beside it, {beside}" if beside.is_file() else "name the ckpt.pt of the same run"
        raise InputError(f"{path} is the state that a training run is resumed from, not a model; {where}.")


def _foreign(path: Path, content: Any, build: building.Builder | None) -> Checkpoint:
    """A state dict, bare or with company."""
    state, place = _state(path, content)
    beside = {} if place is None else {name: value for name, value in content.items() if name != place}
    lightning = _LIGHTNING in beside
    model = build() if build else building.forecaster(beside, state)
    if model is None:
        kind = "a Lightning checkpoint without the hyper-parameters of a Forecaster" if lightning else "weights only"
        raise InputError(f"{path} is {kind}, so the model that they belong to is not known; {_BUILDER}.")
    mapping, notes = _into(model, state, path)
    if place is not None:
        notes = (f"the weights stand under {place!r} in the file", *notes)
    config = getattr(model, "config", None)
    training = {name: beside[name] for name in ("epoch", "global_step") if isinstance(beside.get(name), int)}
    return _checkpoint(
        path,
        model,
        config=config if isinstance(config, dict) else {},
        training=training or None,
        key_mapping=mapping,
        notes=notes,
    )


_BUILDER = "add --builder package.module:function, a function without arguments that returns the model"


def _state(path: Path, content: Any) -> tuple[dict[str, Tensor], str | None]:
    """The state dict in a file's content, and the name that it stands under."""
    if _is_state(content):
        return dict(content), None
    if isinstance(content, Mapping):
        for name in _WEIGHTS:
            inner = content.get(name)
            if inner is not None and _is_state(inner):
                return dict(inner), name
        names = ", ".join(str(name) for name in list(content)[:6]) or "nothing"
        raise InputError(
            f"{path} is a checkpoint of another kind: a dict of {names}, without weights under a usual name; save the "
            "model's state_dict() under 'state_dict'."
        )
    raise InputError(
        f"{path} is a checkpoint of another kind: it holds a {type(content).__name__}, not weights; save the model's "
        "state_dict()."
    )


def _module(content: Any) -> nn.Module | None:
    """A whole module in a trusted file, bare or under a usual name."""
    found = content.get("model", content.get("net")) if isinstance(content, Mapping) else content
    return found if isinstance(found, nn.Module) else None


def _is_state(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(name, str) and isinstance(item, Tensor) for name, item in value.items())


def _into(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Fills the model; the names that changed, and what to tell about it."""
    mapping = match(state, model.state_dict())
    fill(model, {mapping[name]: value for name, value in state.items()}, path)
    changed = {old: new for old, new in mapping.items() if old != new}
    if not changed:
        return {}, ()
    old, new = next(iter(changed.items()))
    return changed, (f"stripped {old.removesuffix(new)!r} from the names of all {len(changed)} weights",)


def _device(value: str | torch.device) -> torch.device:
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise InputError(f"map_location must name a device, such as 'cpu' or 'cuda:0', not {value!r}.") from error


def _checkpoint(path: Path, model: nn.Module, **fields: Any) -> Checkpoint:
    return Checkpoint(path=path, sha256=reading.fingerprint(path), model=model, **fields)

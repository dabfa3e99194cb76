"""From a file to its content, without running code that stands in it."""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import importlib
import pathlib
import pickle
import re
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sensitivity.errors import InputError, SensitivityWarning

TRUST = "if you trust whoever made it, add --trust-pickle (trust_pickle=True)"
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


def read(path: Path, *, trust_pickle: bool, device: torch.device, home: types.ModuleType | None = None) -> Any:
    """The content of a file that ``torch.save`` wrote.

    Args:
        path: the file.
        trust_pickle: run whatever code the file asks for; otherwise only plain values, tensors and a few harmless
            classes (numpy numbers and arrays, ``argparse.Namespace``, paths, dates) are made.
        device: where tensors are put.
        home: a module in which classes of a script (``__main__``) are looked up, with ``trust_pickle``.

    Raises:
        InputError: whatever stands in the way, in one sentence.
    """
    _check_file(path)
    _check_device(device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trust_pickle:
                return torch.load(path, map_location=device, weights_only=False, pickle_module=_pickle_with(home))
            with _harmless_classes():
                return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise _translated(path, error, trust_pickle) from error


def as_path(path: Any) -> Path:
    """The path of a checkpoint.

    Raises:
        InputError: not a path.
    """
    try:
        return Path(path)
    except TypeError as error:
        raise InputError(f"a checkpoint is named by the path of its file, not by {path!r}.") from error


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for part in iter(lambda: stream.read(1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()


def check_sums(path: Path, ours: bool) -> None:
    """Compares every member of the archive with its checksum, which ``torch.load`` does not.

    A file that others wrote may differ by intention (torch can leave the sums out), so there it is a warning.

    Args:
        path: the archive.
        ours: whether this package wrote it, with sums.

    Raises:
        InputError: a member of our own file differs.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        try:
            bad = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError):
            bad = "its directory"
    if bad is None:
        return
    if ours:
        raise InputError(f"{path} is damaged ({bad} does not match its checksum); copy it again from where it came.")
    text = f"{path} may be damaged ({bad} does not match its checksum), unless it was saved without checksums."
    warnings.warn(text, SensitivityWarning, stacklevel=3)


def _check_file(path: Path) -> None:
    if path.is_dir():
        inside = sorted(str(entry) for pattern in ("*.pt", "*.ckpt", "*.pth") for entry in path.glob(pattern))
        raise InputError(f"{path} is a directory, not a checkpoint; name the file{_instead(inside)}.")
    if not path.exists():
        raise InputError(f"there is no file {path}; check the path of the checkpoint.")
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check its permissions.") from error
    if not head:
        raise InputError(f"{path} is empty; the run that should have written it did not finish.")
    if head.startswith(b"PK"):
        _check_archive(path)
    elif not head.startswith(_LEGACY):
        raise InputError(f"{path} is not a checkpoint: it does not begin as a file of torch.save does.")


def _check_archive(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is truncated: its end is missing; copy it again from where it came.")
    with zipfile.ZipFile(path) as archive:
        members = {name.rpartition("/")[2] for name in archive.namelist()}
    if "constants.pkl" in members:
        raise InputError(
            f"{path} is a TorchScript archive, not a checkpoint; load it with torch.jit.load and save its state_dict()."
        )
    if "data.pkl" not in members:
        raise InputError(f"{path} is not a checkpoint: it is a zip archive that torch.save did not write.")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"map_location={str(device)!r} asks for a GPU, but torch sees none here; use 'cpu'.")


def _instead(names: list[str]) -> str:
    return f", such as {names[0]}" if names else ""


@contextmanager
def _harmless_classes() -> Iterator[None]:
    """Lets ``weights_only`` make classes whose construction cannot do anything; the list before is put back after."""
    before = list(torch.serialization.get_safe_globals())  # torch 2.4 hands out its own list
    torch.serialization.add_safe_globals(_harmless())
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _harmless() -> list[Any]:
    place = "numpy._core.multiarray" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core.multiarray"
    multiarray = importlib.import_module(place)
    numbers = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDSU"} | {type(np.dtype("M8[ns]"))}
    codecs = importlib.import_module("_codecs")
    known: list[Any] = [np.dtype, np.ndarray, *numbers, codecs.encode]
    known += [argparse.Namespace, types.SimpleNamespace, collections.OrderedDict]
    known += [pathlib.PosixPath, pathlib.PurePosixPath, datetime.datetime, datetime.date, datetime.timedelta]
    for function in (multiarray.scalar, multiarray._reconstruct):
        # a file names the module of the numpy that wrote it
        known += [_as_if_of(function, "numpy._core.multiarray"), _as_if_of(function, "numpy.core.multiarray")]
    return known


def _as_if_of(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    """The function under the name of another module: torch before 2.6 allows a class only by the name it has."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__module__ = module
    call.__name__ = call.__qualname__ = function.__name__
    return call


def _pickle_with(home: types.ModuleType | None) -> Any:
    """A pickle module that finds the classes of ``__main__`` in ``home``, too."""
    if home is None:
        return pickle

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = module == "__main__" and hasattr(home, name)
            return getattr(home, name) if found else super().find_class(module, name)

    replacement = types.ModuleType("pickle_with_home")
    vars(replacement).update(vars(pickle) | {"Unpickler": Unpickler})
    return replacement


def _translated(path: Path, error: Exception, trust_pickle: bool) -> InputError:
    """The sentence for an error of ``torch.load``."""
    inner = error.__context__
    if isinstance(error, pickle.UnpicklingError) and re.search(r"unexpected EOF|corrupt|StreamReader", str(inner)):
        error = inner if isinstance(inner, Exception) else error  # torch before 2.6 takes damage for code
    text = str(error)
    refused = re.search(r"GLOBAL ([\w.]+)", text) or re.search(r"Unsupported (?:class|type) ([\w.]+)", text)
    if isinstance(error, pickle.UnpicklingError) and refused and not trust_pickle:
        return InputError(f"{path} holds more than weights: it asks for {refused[1]}, which could run code; {TRUST}.")
    missing = re.search(r"Can't get attribute '([\w.]+)' on <module '(?:[\w.]*\.)?(\w+)'", text)
    if missing or isinstance(error, ModuleNotFoundError):
        what = f"the class {missing[1]} of {missing[2]}" if missing else f"the module {getattr(error, 'name', '?')}"
        return InputError(
            f"{path} was pickled together with {what}, which is not there now; name a function in the file that "
            "defines it with --builder package.module:function, or save model.state_dict() instead of the model."
        )
    if "CUDA device" in text:
        return InputError(f"{path} holds tensors of a GPU, and torch sees none here; use map_location='cpu'.")
    if isinstance(error, pickle.UnpicklingError) and not trust_pickle and "weights_only" in text.lower():
        return InputError(f"{path} cannot be read without running code; {TRUST}.")
    reason = text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__
    return InputError(f"{path} is damaged or not a checkpoint ({reason}); copy it again from where it came.")

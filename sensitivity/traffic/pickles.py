"""Graphs from pickles, such as METR-LA's ``adj_mx.pkl``, without running what is in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from sensitivity.errors import InputError
from sensitivity.traffic.files import reason


def read_pickle(path: Path) -> tuple[dict[str, int] | None, Any]:
    """``[ids, id -> index, matrix]``, or a bare matrix without ids.

    Raises:
        InputError: a damaged pickle, one that asks for more than lists, dicts and arrays, or one that is no graph.
    """
    with path.open("rb") as file:
        try:
            content = _Unpickler(file, encoding="latin1").load()
        except InputError:
            raise
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise InputError(f"{path} is not a complete pickle ({reason(error)}).") from error
    if isinstance(content, np.ndarray):
        return None, content
    if not (isinstance(content, list | tuple) and len(content) == 3 and isinstance(content[2], np.ndarray)):
        raise InputError(f"{path} holds a {type(content).__name__}, not METR-LA's [ids, id to index, matrix].")
    names, index, matrix = content
    ids = {_name(name): row for row, name in enumerate(names)}
    if len(ids) != len(matrix) or {_name(name): row for name, row in index.items()} != ids:
        raise InputError(f"{path} contradicts itself: {len(ids)} ids, {len(index)} indices, {len(matrix)} matrix rows.")
    return ids, matrix


def _name(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _latin1(text: str, codec: str) -> bytes:
    """What Python-3 pickles of protocol 2 use for bytes; any other codec is refused."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"codec {codec!r} is not read")
    return text.encode("latin1")


def _frombuffer(
    buffer: bytes | bytearray, dtype: np.dtype, shape: tuple[int, ...], order: Literal["C", "F"]
) -> np.ndarray:
    """What NumPy pickles contiguous arrays with."""
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


class _Unpickler(pickle.Unpickler):
    """Reads lists, dicts, text, numbers and NumPy arrays; refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        """The few constructors of arrays; nothing else is ever looked up.

        Raises:
            InputError: naming what the pickle wants to run.
        """
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.array([0]).__reduce__()[0]
        if name == "_frombuffer" and module in ("numpy.core.numeric", "numpy._core.numeric"):
            return _frombuffer
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        return self._refuse(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> NoReturn:
        """Never needed by a graph."""
        self._refuse(f"persistent object {identity!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(
            f"the pickle asks for {what}, which could run foreign code, so it was not loaded; only lists, dicts and "
            "arrays are read: write the matrix as .npy or .npz instead."
        )

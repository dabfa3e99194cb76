"""What every reader asks of a file first."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from sensitivity.errors import InputError


def check_file(path: Any, what: str) -> Path:
    """Refuses what is no path, and a path at which there is no file that can be read.

    Raises:
        InputError: no path, nothing there, a directory, a device, or no permission.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"{what} is named by the path of a file, not by {path!r}.")
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a directory; {what} is a file.")
    if not path.exists():
        raise InputError(f"there is no file {path} for {what}; check the path (nothing is downloaded).")
    if not path.is_file():
        raise InputError(f"{path} is no regular file, such as {what} is; store it as one.")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} cannot be read: no permission; change its mode, or copy it.")
    return path


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """SHA-256 of a file, or another sum of :mod:`hashlib`, in hexadecimal."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def reason(error: BaseException) -> str:
    """The first line of a library's error, short enough for a sentence of ours."""
    text = (str(error).strip("'\" \n").splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 120 else text[:117] + "..."

"""What every reader asks of a file first."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sensitivity.errors import InputError


def check_file(path: Path, what: str) -> Path:
    """Refuses a path at which there is no file.

    Raises:
        InputError: nothing there, or a directory.
    """
    if path.is_dir():
        raise InputError(f"{path} is a directory; {what} is a file.")
    if not path.exists():
        raise InputError(f"there is no file {path} for {what}; check the path (nothing is downloaded).")
    return path


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def reason(error: BaseException) -> str:
    """The first line of a library's error, short enough for a sentence of ours."""
    text = (str(error).strip("'\" \n").splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 120 else text[:117] + "..."

"""Files that are written whole or not at all: under a temporary name first, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sensitivity.errors import InputError, RunError, SensitivityError

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` when the block ends without error.

    The temporary name keeps the suffix, so writers that choose a format by it work. Missing folders are made. After an
    error or an interruption the temporary file is gone and the old file is as it was.

    Args:
        path: where the file shall be; a symbolic link is followed.

    Raises:
        InputError: the folder cannot be written to, or ``path`` is a directory or a device.
        RunError: the disk is full, or another fault of the file system.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"cannot write {path}: it is a directory; name a file.")
    if target.exists() and not target.is_file():
        raise InputError(f"cannot write {path}: it is not a regular file; name a file.")
    temporary = target.with_name(f".{target.stem}.{secrets.token_hex(4)}{target.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        temporary.replace(target)
    except OSError as error:
        raise translated(error, path) from error
    finally:
        _remove(temporary)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes ``content`` to ``path``, whole or not at all; errors as in ``replacing``."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], content: str) -> None:
    """Writes ``content`` to ``path`` as UTF-8, whole or not at all; errors as in ``replacing``."""
    write_bytes(path, content.encode("utf-8"))


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuses a folder that could not be written to, before work is done for it; leaves nothing behind.

    Raises:
        InputError: nothing can be made in the folder, or in the nearest one above it that exists.
    """
    nearest = Path(path).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        Path(tempfile.mkdtemp(prefix=".", dir=nearest)).rmdir()
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror or error}; choose another folder.") from error


def translated(error: OSError, path: str | os.PathLike[str]) -> SensitivityError:
    """The error to raise for a fault of the file system while ``path`` is written."""
    folder = Path(path).parent
    if error.errno in _REFUSED:
        return InputError(f"cannot write {path}: no permission in the folder {folder}; choose another folder.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return InputError(f"cannot write {path}: {folder} is not a folder; choose another place.")
    if error.errno in _FULL:
        return RunError(f"cannot write {path}: the disk is full; free some space or choose another folder.")
    return RunError(f"cannot write {path}: {error.strerror or error}.")


def _flush(path: Path) -> None:
    """Forces the content to the disk, so that the rename cannot overtake it."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    """Removes a temporary file or folder member that was left; a fault here must not hide the real one."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return

"""Downloads published files, when asked to, and keeps nothing whose checksum is not the published one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensitivity.errors import InputError, RunError
from sensitivity.files import check_folder, replacing
from sensitivity.traffic.files import checksum
from sensitivity.traffic.published import DATASETS, Published

TIMEOUT = 30.0
"""Seconds without an answer after which a server counts as out of reach."""

Progress = Callable[[Published], Any]
"""Makes, for one file, an object with ``total``, ``update(n)``, ``reset()`` and ``close()``."""


@dataclass(frozen=True)
class Fetched:
    """A file that is there now.

    Attributes:
        path: where.
        file: which.
        new: False if it was there before and nothing was downloaded.
        failures: one sentence for every place that was tried in vain.
    """

    path: Path
    file: Published
    new: bool
    failures: tuple[str, ...] = ()


def fetch(
    name: str,
    to: str | os.PathLike[str] = "data",
    *,
    files: Sequence[Sequence[Published]] | None = None,
    progress: Progress | None = None,
) -> list[Fetched]:
    """Downloads a published series and its graph, unless they are there already.

    Places are tried in order, with TLS certificates verified. A file is written under a temporary name, its size and
    checksum are compared with the published ones, and only then does it get its name; what differs is deleted.

    Args:
        name: ``metr-la`` or ``pems-bay``.
        to: folder, made if it is not there.
        files: what to download instead: for every file to get, the places that serve it.
        progress: shows how far a download is.

    Returns:
        The speeds and the graph.

    Raises:
        InputError: an unknown name, no pooch, a file of that name with another checksum, a folder that cannot be
            written to.
        RunError: no place served the right file; the message says why, and how to get it by hand.
    """
    if name not in DATASETS:
        raise InputError(f"there is no dataset {name!r} to fetch; choose {' or '.join(DATASETS)}.")
    folder = Path(to)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; choose another place with --to.")
    wanted = (DATASETS[name].speeds, DATASETS[name].graphs) if files is None else files
    return [_get(places, folder, progress) for places in wanted]


def _get(places: Sequence[Published], folder: Path, progress: Progress | None) -> Fetched:
    """The first of several files with the same content that is there, or can be had."""
    for file in places:
        if _is_there(folder / file.name, file):
            return Fetched(folder / file.name, file, new=False)
    check_folder(folder)
    failures: list[str] = []
    for file in places:
        try:
            _download(file, folder / file.name, progress)
        except _RefusedError as error:
            failures.append(str(error))
            continue
        return Fetched(folder / file.name, file, new=True, failures=tuple(failures))
    first = places[0]
    raise RunError(
        f"{first.name} could not be fetched ({'; '.join(failures)}), and nothing was kept: download it with a browser "
        f"from {first.page} to {folder / first.name}, and run the command again to check it."
    )


def _is_there(path: Path, file: Published) -> bool:
    """True for the right file.

    Raises:
        InputError: another file of that name.
    """
    if not path.exists():
        return False
    if path.is_file():
        found = _sum(path, file)
        if found == file.checksum:
            return True
        raise InputError(
            f"{path} is there already, but its checksum is {found} instead of {file.checksum}; move it away, or choose "
            "another folder with --to."
        )
    raise InputError(f"{path} is not a regular file; choose another folder with --to.")


class _RefusedError(Exception):
    """One place does not serve the right file."""


def _download(file: Published, path: Path, progress: Progress | None) -> None:
    """Gets one file, or raises ``_RefusedError`` and leaves nothing."""
    pooch, requests = _libraries()
    with replacing(path) as temporary:
        bar = None if progress is None else progress(file)
        try:
            pooch.HTTPDownloader(progressbar=bar or False, timeout=TIMEOUT)(file.url, str(temporary), None)
        except requests.exceptions.SSLError as error:
            raise _RefusedError(f"{file.holder} has no valid TLS certificate") from error
        except requests.exceptions.HTTPError as error:
            raise _RefusedError(f"{file.holder} answered {error.response.status_code}") from error
        except requests.exceptions.ChunkedEncodingError as error:
            raise _RefusedError(f"{file.holder} broke off") from error
        except requests.exceptions.Timeout as error:
            raise _RefusedError(f"{file.holder} did not answer within {TIMEOUT:g} s") from error
        except requests.exceptions.RequestException as error:
            raise _RefusedError(f"{file.holder} cannot be reached, maybe for lack of a network") from error
        finally:
            if bar is not None:
                bar.close()
        _compare(temporary, file)


def _compare(path: Path, file: Published) -> None:
    found = _sum(path, file)
    if found != file.checksum:
        size = path.stat().st_size
        meant = "" if file.size in (None, size) else f", {size} bytes instead of {file.size}"
        raise _RefusedError(f"{file.holder} served {found} instead of {file.checksum}{meant}")


def _sum(path: Path, file: Published) -> str:
    """The checksum of a file by the algorithm of the published one."""
    algorithm = file.checksum.partition(":")[0]
    return f"{algorithm}:{checksum(path, algorithm)}"


def _libraries() -> tuple[Any, Any]:
    try:
        import pooch
        import requests
    except ImportError as error:
        raise InputError(
            "downloading needs pooch, which is not installed; run: pip install 'attention-sensitivity[data]'."
        ) from error
    return pooch, requests

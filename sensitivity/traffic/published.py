"""The published files of METR-LA and PEMS-BAY: what they hold, their checksums, and where they are served.

Checksums of the HDF5 files and the graphs are those of the files that the authors of DCRNN (arXiv 1707.01926) link and
keep in their repository; those of the CSV files are of the Zenodo record 10.5281/zenodo.5724362. Whoever serves a file,
it is kept only if its checksum is the one below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_DCRNN = "https://raw.githubusercontent.com/liyaguang/DCRNN/602afd9d767d3aa1c9b3eac51710d6aeee12c227/data/sensor_graph/"
_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
_ZENODO = "https://zenodo.org/records/5724362/files/"


@dataclass(frozen=True)
class Published:
    """One published file.

    Attributes:
        name: of the file.
        checksum: with its algorithm in front, such as ``sha256:...``.
        size: in bytes, or None if it is not known.
        url: from where it is served.
        holder: who serves it, in words.
        page: where a reader finds it with a browser.
    """

    name: str
    checksum: str
    size: int | None
    url: str
    holder: str
    page: str


@dataclass(frozen=True)
class Dataset:
    """A published series and its graph.

    Attributes:
        title: its name.
        sensors: number of sensors.
        rows: number of steps.
        first: time of the first row.
        last: time of the last row.
        speeds: files with the same speeds, the one to try first in front.
        graphs: files with the same graph.
    """

    title: str
    sensors: int
    rows: int
    first: str
    last: str
    speeds: tuple[Published, ...] = field(default=())
    graphs: tuple[Published, ...] = field(default=())


_FOLDER = "https://drive.google.com/drive/folders/10FOTa6HXPqX8Pf5WRoRwcFnW9BrNZEIX"
_RECORD = "https://doi.org/10.5281/zenodo.5724362"
_REPOSITORY = "https://github.com/liyaguang/DCRNN/tree/master/data/sensor_graph"

DATASETS = {
    "metr-la": Dataset(
        title="METR-LA",
        sensors=207,
        rows=34272,
        first="2012-03-01T00:00",
        last="2012-06-27T23:55",
        speeds=(
            Published(
                "metr-la.h5",
                "sha256:64784b76d6fb8ec9bff4b6decafb354da2bb37840468fdccee5044e511277c05",
                57_038_056,
                f"{_DRIVE}1pAGRfzMx6K9WWsfDcD1NMbIif0T0saFC",
                "the authors' Google Drive",
                _FOLDER,
            ),
            Published(
                "METR-LA.csv",
                "sha256:8d67a35472db1719d7d4be851f2bf64cb21d9c52577c8a6b4b873d43205af381",
                72_467_662,
                f"{_ZENODO}METR-LA.csv",
                "Zenodo",
                _RECORD,
            ),
        ),
        graphs=(
            Published(
                "adj_mx.pkl",
                "sha256:a35687c6e15aa228dc45027b0ed2a0ea0f4ec78f573deb992c595092d12f61b3",
                680_459,
                f"{_DCRNN}adj_mx.pkl",
                "the authors' repository",
                _REPOSITORY,
            ),
        ),
    ),
    "pems-bay": Dataset(
        title="PEMS-BAY",
        sensors=325,
        rows=52116,
        first="2017-01-01T00:00",
        last="2017-06-30T23:55",
        speeds=(
            Published(
                "pems-bay.h5",
                "sha256:65d69fb0a2323dba9867179eb7af47c8b814186bc459ff0a4937d21614153c8f",
                135_930_936,
                f"{_DRIVE}1wD-mHlqAb2mtHOe_68fZvDh1LpDegMMq",
                "the authors' Google Drive",
                _FOLDER,
            ),
            Published(
                "PEMS-BAY.csv",
                "md5:c8dea58987a5882e946217c22fdb8256",
                None,
                f"{_ZENODO}PEMS-BAY.csv",
                "Zenodo",
                _RECORD,
            ),
        ),
        graphs=(
            Published(
                "adj_mx_bay.pkl",
                "sha256:116275f5704d0d492018e14c047f7ae5004385b450aa907f88424055a4a97370",
                1_681_480,
                f"{_DCRNN}adj_mx_bay.pkl",
                "the authors' repository",
                _REPOSITORY,
            ),
        ),
    ),
}


def identify(sha256: str) -> tuple[str, Published] | None:
    """The title and the file that a SHA-256 checksum belongs to, or None."""
    for dataset in DATASETS.values():
        for file in (*dataset.speeds, *dataset.graphs):
            if file.checksum == f"sha256:{sha256}":
                return dataset.title, file
    return None

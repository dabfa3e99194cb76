"""The time index of a series: reading it from integers or text, and whether its rows follow each other evenly."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from sensitivity.errors import InputError

HOUR = np.timedelta64(1, "h").astype("timedelta64[ns]")
_UNITS = {"s": 1e11, "ms": 1e14, "us": 1e17, "ns": float("inf")}
"""Units of integer times since 1970, and the magnitude below which each is meant, where a file does not say."""
_EARLIEST, _LATEST = np.datetime64("1678-01-01"), np.datetime64("2262-01-01")
"""What datetime64[ns] can hold."""
_KINDS = r"(date|integer|datetime64.*)?$"
_UNIX_DAY = 719163
"""1970-01-01, in days as Python's date.toordinal counts them."""
_ZONE = re.compile(r"\s*(Z|UTC|[+-]\d{2}(:?\d{2})?)$")
_TIME = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)?")
_CHANGE_MONTHS = (3, 4, 9, 10, 11)
_WAY_OUT = "bring it to a regular index with 0 for missing readings (with pandas: asfreq)"


@dataclass(frozen=True)
class Regularity:
    """How evenly the rows of a time index follow each other.

    Attributes:
        step: the usual time between two rows, timedelta64[ns].
        clock_changes: rows before which a local clock was put forward or back by an hour for summer time; the rows
            around it do follow each other by one step.
        repeated: rows with the time of the row before.
        backward: rows earlier than the row before.
        gaps: rows before which whole steps are left out.
        uneven: rows at any other distance from the row before.
        absent: steps that the gaps leave out.
    """

    step: np.timedelta64
    clock_changes: Int[np.ndarray, " change"]
    repeated: Int[np.ndarray, " repeated"]
    backward: Int[np.ndarray, " backward"]
    gaps: Int[np.ndarray, " gap"]
    uneven: Int[np.ndarray, " uneven"]
    absent: int

    @property
    def faults(self) -> dict[str, np.ndarray]:
        """The rows that make the index irregular, by kind."""
        kinds = {"repeated": self.repeated, "backward": self.backward, "gap": self.gaps, "uneven": self.uneven}
        return {kind: rows for kind, rows in kinds.items() if len(rows)}


def regularity(timestamps: np.ndarray) -> Regularity:
    """Looks at the distances between rows, ``(time,)`` datetime64 without NaT, at least two."""
    times = timestamps.astype("datetime64[ns]")
    distances = np.diff(times)
    step = usual_step(times)
    changes = _clock_changes(times, step)
    other = (distances != step) & ~changes
    repeated = other & (distances == np.timedelta64(0, "ns"))
    backward = other & (distances < np.timedelta64(0, "ns"))
    divisor = max(step, np.timedelta64(1, "ns"))
    whole = other & (distances > step) & (distances % divisor == np.timedelta64(0, "ns"))
    return Regularity(
        step,
        clock_changes=np.flatnonzero(changes) + 1,
        repeated=np.flatnonzero(repeated) + 1,
        backward=np.flatnonzero(backward) + 1,
        gaps=np.flatnonzero(whole) + 1,
        uneven=np.flatnonzero(other & ~repeated & ~backward & ~whole) + 1,
        absent=int((distances[whole] // divisor - 1).sum()),
    )


def usual_step(timestamps: np.ndarray) -> np.timedelta64:
    """The most frequent distance between two rows, timedelta64[ns]; the smallest of several."""
    distances, counts = np.unique(np.diff(timestamps.astype("datetime64[ns]")), return_counts=True)
    return distances[counts.argmax()]


def _clock_changes(times: np.ndarray, step: np.timedelta64) -> np.ndarray:
    """True where a local clock is put forward or back by an hour: on a Sunday night in spring or autumn."""
    distances = np.diff(times)
    shifted = (distances == step + HOUR) | (distances == step - HOUR)
    none = np.timedelta64(0, "ns")
    if not shifted.any() or not none < step <= HOUR or HOUR % step != none:
        return np.zeros(len(distances), dtype=bool)
    before = times[:-1]
    sunday = (before.astype("datetime64[D]").astype(np.int64) + 4) % 7 == 0  # day 0, 1970-01-01, was a Thursday
    night = before - before.astype("datetime64[D]") < 3 * HOUR
    month = before.astype("datetime64[M]").astype(np.int64) % 12 + 1
    return shifted & sunday & night & np.isin(month, _CHANGE_MONTHS)


def check_index(timestamps: np.ndarray, source: str) -> Regularity:
    """Refuses a time index that is too short, not increasing, or not regular; a change of the clock is let pass.

    Raises:
        InputError: naming the first place where the step changes.
    """
    if len(timestamps) < 2:
        raise InputError(f"{source} has {len(timestamps)} rows; a time series needs at least 2.")
    if np.isnat(timestamps).any():
        raise InputError(f"{source} has no time in row {int(np.isnat(timestamps).argmax())} of its index.")
    found = regularity(timestamps)
    usual = f"the usual step is {found.step / np.timedelta64(1, 'm'):g} minutes"
    if found.step <= np.timedelta64(0, "ns"):
        raise InputError(f"{source} has times that do not increase: {usual}; sort the rows by time, and drop repeats.")
    if found.faults:
        kind, row = min(((kind, int(rows[0])) for kind, rows in found.faults.items()), key=lambda pair: pair[1])
        before, after = timestamps[row - 1 : row + 1].astype("datetime64[s]")
        how = {"repeated": "repeats", "backward": "lies before", "gap": "follows", "uneven": "follows"}[kind]
        count = sum(len(rows) for rows in found.faults.values())
        others = f" ({count} such rows)" if count > 1 else ""
        raise InputError(
            f"{source} has an irregular time index: row {row} ({after}) {how} {before}, but {usual}{others}; "
            f"{_WAY_OUT}."
        )
    return found


def epoch_times(index: np.ndarray, kind: str, source: str) -> np.ndarray | None:
    """Integer times since 1970 as datetime64[ns]; None if the index only counts rows.

    Args:
        index: integers.
        kind: what the file says of them, such as ``datetime64[ns]``; where it names no unit, the magnitude decides.
        source: what messages call the file.

    Raises:
        InputError: not integers, or times that cannot be told.
    """
    if index.dtype.kind not in "iu" or index.ndim != 1:
        raise InputError(
            f"{source} has a time index of type {index.dtype} and shape {index.shape}; integers since 1970, one for "
            "every row, are expected."
        )
    if not re.match(_KINDS, kind):
        raise InputError(
            f"{source} has a time index of kind {kind!r}, which is not read; write it with times (with pandas: "
            "frame.to_timestamp(), or frame.index = pandas.DatetimeIndex(...))."
        )
    if kind == "date":
        return _within((index.astype(np.int64) - _UNIX_DAY).astype("datetime64[D]"), source)
    if len(index) == 0 or ("date" not in kind and int(abs(index).max()) < 1e8):
        return None
    named = re.search(r"\[(s|ms|us|ns)\b", kind)
    unit = named.group(1) if named else next(unit for unit, limit in _UNITS.items() if abs(int(index[-1])) < limit)
    return _within(index.astype(np.int64).astype(f"datetime64[{unit}]"), source)


def text_times(cells: list[str], source: str) -> tuple[np.ndarray | None, str]:
    """Times written as text, and the time zone if they name one; None for times if the text only counts rows.

    An offset from UTC is dropped: what stays is the local clock.

    Raises:
        InputError: naming the first that cannot be read.
    """
    if all(cell.isdigit() and len(cell) < 19 for cell in cells):
        return epoch_times(np.array(cells, dtype=np.int64), "", source), ""
    zones = {match.group(1) for cell in cells if (match := _ZONE.search(cell)) and is_time(cell)}
    for row, cell in enumerate(cells):
        if not is_time(cell):
            raise InputError(
                f"{source} has {cell!r} in the time column of row {row}; write times as 2012-03-01 00:05:00."
            )
    return _within(np.array([_bare(cell) for cell in cells], dtype="datetime64[us]"), source), ", ".join(sorted(zones))


def one_time(text: str, source: str) -> np.datetime64:
    """A time written as text, datetime64[ns]; see :func:`is_time` for what is one."""
    return _within(np.array([_bare(text)], dtype="datetime64[us]"), source)[0]


def is_time(cell: str) -> bool:
    """True for a date, such as 2012-03-01 00:00:00 or 2012-03-01T00:00:00-08:00; a bare number is none."""
    if not _TIME.fullmatch(_bare(cell)):
        return False
    try:
        np.datetime64(_bare(cell))
    except ValueError:
        return False
    return True


def _bare(cell: str) -> str:
    """Without its zone, and with two digits for month, day and hour, as NumPy asks for."""
    bare = _ZONE.sub("", cell) if ":" in cell else cell
    return re.sub(r"(?<=[-T ])(\d)(?=\D|$)", r"0\1", bare)


def _within(times: np.ndarray, source: str) -> np.ndarray:
    """As datetime64[ns], which cannot hold every year."""
    outside = ~np.isnat(times) & ((times < _EARLIEST) | (times > _LATEST))
    if outside.any():
        row = int(outside.argmax())
        raise InputError(
            f"{source} has the time {times[row]} in row {row}, which cannot be right; check the unit of its time index."
        )
    return times.astype("datetime64[ns]")

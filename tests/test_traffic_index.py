"""Time indices: units, text, time zones, and what makes one irregular."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sensitivity import traffic
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic.index import check_index, epoch_times, is_time, one_time, regularity, text_times

STEP = np.timedelta64(5, "m")


def times(start: str, rows: int = 40, step: np.timedelta64 = STEP) -> np.ndarray:
    return np.datetime64(start, "ns") + np.arange(rows) * step


def local(zone: str, start: str, stop: str, minutes: int = 5) -> np.ndarray:
    """What a local clock shows, by pandas, as an independent oracle."""
    index = pd.date_range(start, stop, freq=f"{minutes}min", tz=zone, inclusive="left")
    return index.tz_localize(None).to_numpy().astype("datetime64[ns]")


def test_pems_bay_is_regular_but_for_the_hour_that_summer_time_skips() -> None:
    index = local("US/Pacific", "2017-01-01", "2017-07-01")
    assert len(index) == traffic.published.DATASETS["pems-bay"].rows == 52116
    found = check_index(index, "PEMS-BAY")
    assert found.faults == {}
    assert found.step == STEP
    (row,) = found.clock_changes
    assert [str(time)[:16] for time in index[[row - 1, row]]] == ["2017-03-12T01:55", "2017-03-12T03:00"]
    counts = [count for _, count in traffic.borders(len(index))[:3]]
    assert counts == [36465, 5209, 10419]  # as published for DCRNN's split


@pytest.mark.parametrize("zone", ["US/Pacific", "Europe/Berlin", "Europe/London"])
@pytest.mark.parametrize("minutes", [5, 15, 60])
@pytest.mark.parametrize(("start", "stop"), [("2019-03-01", "2019-04-10"), ("2019-10-20", "2019-11-20")])
def test_summer_time_begins_and_ends(zone: str, minutes: int, start: str, stop: str) -> None:
    found = check_index(local(zone, start, stop, minutes), "a")
    assert len(found.clock_changes) == 1
    assert found.step == np.timedelta64(minutes, "m")


@pytest.mark.parametrize(
    ("start", "skipped"),
    [
        ("2017-03-11T01:00", 12),  # a Saturday
        ("2017-03-12T13:00", 12),  # not at night
        ("2017-07-09T01:00", 12),  # not in spring or autumn
        ("2017-03-12T01:00", 11),  # not an hour
    ],
)
def test_other_holes_of_an_hour_are_gaps(start: str, skipped: int) -> None:
    index = np.delete(times(start), np.arange(12, 12 + skipped))
    found = regularity(index)
    assert (list(found.gaps), found.absent, len(found.clock_changes)) == ([12], skipped, 0)
    with pytest.raises(InputError, match=r"has an irregular time index: row 12 .* follows .* the usual step is 5 min"):
        check_index(index, "a")


def test_all_kinds_of_faults_are_counted() -> None:
    index = times("2012-03-01")
    index[5] = index[4]
    index[20] -= np.timedelta64(10, "m")
    index[30:] += np.timedelta64(15, "m")
    index[35] += np.timedelta64(2, "m")
    found = {kind: list(rows) for kind, rows in regularity(index).faults.items()}
    assert found == {"repeated": [5], "backward": [20], "gap": [6, 21, 30], "uneven": [35, 36]}
    assert regularity(index).absent == 1 + 2 + 3
    with pytest.raises(
        InputError, match=r"row 5 \(2012-03-01T00:20:00\) repeats 2012-03-01T00:20:00, .* \(7 such rows"
    ):
        check_index(index, "a")


def test_an_odd_first_step_is_not_taken_for_the_usual_one() -> None:
    index = times("2012-03-01")
    index[0] -= np.timedelta64(7, "m")
    with pytest.raises(
        InputError, match=r"row 1 .* but the usual step is 5 minutes; bring it to a regular index with 0"
    ):
        check_index(index, "a")


@pytest.mark.parametrize("index", [times("2012-03-01")[::-1], np.repeat(times("2012-03-01", 1), 4)])
def test_times_that_do_not_increase(index: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"has times that do not increase: .* sort the rows by time, and drop repeats"):
        check_index(index, "a")


def test_no_time_in_a_row() -> None:
    index = times("2012-03-01")
    index[3] = np.datetime64("NaT")
    with pytest.raises(InputError, match="has no time in row 3 of its index"):
        check_index(index, "a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2012-03-01 00:05:00", "2012-03-01T00:05:00"),
        ("2012-03-01T00:05", "2012-03-01T00:05:00"),
        ("2012-3-1 0:05", "2012-03-01T00:05:00"),
        ("2012-03-01", "2012-03-01T00:00:00"),
        ("2012-03-01 00:05:00.250", "2012-03-01T00:05:00.250"),
        ("2012-03-01 00:05:00-08:00", "2012-03-01T00:05:00"),
        ("2012-03-01T00:05:00+0530", "2012-03-01T00:05:00"),
        ("2012-03-01 00:05:00 UTC", "2012-03-01T00:05:00"),
        ("2012-03-01T00:05:00Z", "2012-03-01T00:05:00"),
    ],
)
def test_times_as_text(text: str, expected: str) -> None:
    assert is_time(text)
    assert one_time(text, "a") == np.datetime64(expected)


@pytest.mark.parametrize("text", ["", "2012", "now", "today", "NaT", "61.5", "2012-13-01", "1/3/2012 0:05", "12:30"])
def test_what_is_no_time(text: str) -> None:
    assert not is_time(text)


def test_zones_are_named_and_the_local_clock_is_kept() -> None:
    cells = [str(time) for time in pd.date_range("2019-03-31", periods=48, freq="30min", tz="Europe/Berlin")]
    found, zone = text_times(cells, "a")
    assert zone == "+01:00, +02:00"
    expected = pd.date_range("2019-03-31", periods=48, freq="30min", tz="Europe/Berlin").tz_localize(None)
    np.testing.assert_array_equal(found, expected.to_numpy().astype("datetime64[ns]"))
    assert len(check_index(found, "a").clock_changes) == 1


def test_years_that_cannot_be_right() -> None:
    with pytest.raises(InputError, match=r"has the time 9999-01-01T00:00:00.000000 in row 1, which cannot be right"):
        text_times(["2012-03-01", "9999-01-01"], "a")
    with pytest.raises(InputError, match="which cannot be right; check the unit of its time index"):
        epoch_times(np.array([10**18, 10**18 + 1]), "datetime64[s]", "a")
    with pytest.raises(InputError, match=r"of type float64 and shape \(2,\); integers since 1970"):
        epoch_times(np.array([1e18, 2e18]), "datetime64", "a")


def test_traffic_over_a_change_of_the_clock(tmp_path: Path) -> None:
    index = local("US/Pacific", "2017-03-11", "2017-03-14")
    values = np.random.default_rng(0).uniform(20, 70, size=(len(index), 3)).round(2)
    pd.DataFrame(values, pd.DatetimeIndex(index), ["1", "2", "3"]).to_csv(tmp_path / "a.csv")
    with pytest.warns(SensitivityWarning, match=r"goes from 2017-03-12T01:55 to 2017-03-12T03:00: taken as a change"):
        data = traffic.read(tmp_path / "a.csv")
    assert data.step == STEP
    assert data.steps_per_day == 288
    np.testing.assert_allclose(data.time_of_day()[288 + 24], 3 / 24)
    np.testing.assert_allclose(data.speed, values, rtol=1e-6)

"""Layouts met in the wild, each the same traffic; and odd files, each one sentence and never foreign code."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sensitivity import traffic
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic import Traffic

ROWS, IDS = 40, ["773869", "767541", "717447"]
TIMES = np.datetime64("2012-03-01T23:00", "ns") + np.arange(ROWS) * np.timedelta64(5, "m")
START = {"start": "2012-03-01T23:00", "step": 5}


@pytest.fixture
def values() -> np.ndarray:
    raw = np.random.default_rng(0).uniform(20, 70, size=(ROWS, 3)).round(3)
    raw[3:6, 1] = 0.0
    return raw


def same(data: Traffic, values: np.ndarray, ids: list[str] | None = None) -> None:
    np.testing.assert_array_equal(data.speed.numpy(), np.nan_to_num(values).astype(np.float32))
    np.testing.assert_array_equal(data.mask.numpy(), (values != 0) & ~np.isnan(values))
    np.testing.assert_array_equal(data.timestamps, TIMES)
    assert data.sensor_ids == (IDS if ids is None else ids)


COUNTED = ["0", "1", "2"]


# -- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8"])
def test_arrays_of_any_number(tmp_path: Path, values: np.ndarray, dtype: str) -> None:
    array = values.astype(dtype)
    np.save(tmp_path / "vel.npy", array)
    same(traffic.read(tmp_path / "vel.npy", **START), array.astype(np.float64), COUNTED)


def test_node_values_with_two_channels(tmp_path: Path, values: np.ndarray) -> None:
    np.save(tmp_path / "node_values.npy", np.stack([values, np.full_like(values, 0.5)], axis=-1))
    same(traffic.read(tmp_path / "node_values.npy", **START), values, COUNTED)


@pytest.mark.parametrize("name", ["data", "speed", "values", "flow"])
def test_the_array_of_an_npz_file(tmp_path: Path, values: np.ndarray, name: str) -> None:
    np.savez(tmp_path / "data.npz", **{name: values[..., None]})
    same(traffic.read(tmp_path / "data.npz", **START), values, COUNTED)


def test_plain_hdf5(tmp_path: Path, values: np.ndarray) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["speed"] = values.astype(np.float32)
        file["timestamps"] = TIMES.astype("datetime64[us]").astype(np.int64)
        file["sensor_ids"] = IDS
        file["note"] = "not an array"
    same(traffic.read(tmp_path / "a.h5"), values.astype(np.float32).astype(np.float64))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["raw/one"], file["raw/two"] = values, values + 1
    with pytest.raises(InputError, match=r"has no array 'data' or .*; it has raw/one, raw/two: choose one with key="):
        traffic.read(tmp_path / "b.h5")
    same(traffic.read(tmp_path / "b.h5", key="raw/two", **START), values + 1, COUNTED)
    with pytest.raises(InputError, match="has no table 'raw'; it has raw/one, raw/two"):
        traffic.read(tmp_path / "b.h5", key="raw")


def test_transposed_arrays(tmp_path: Path, values: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", values.T)
    with pytest.warns(SensitivityWarning, match="fewer rows than columns: read as 3 times of 40 sensors; if it is the"):
        assert traffic.read(tmp_path / "a.npy", **START).speed.shape == (3, 40)
    np.savez(tmp_path / "a.npz", data=values.T, timestamps=TIMES)
    np.savez(tmp_path / "b.npz", data=values.T, sensor_ids=np.array(IDS))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(
            InputError, match=r"speeds of shape \(3, 40\), which fit .* only as \(node, time\); store them"
        ):
            traffic.read(tmp_path / name)


def test_arrays_that_are_no_series(tmp_path: Path, values: np.ndarray) -> None:
    np.savez(tmp_path / "train.npz", x=values, y=values)
    with pytest.raises(InputError, match=r"holds windows that were cut already \(x, y\); give the series"):
        traffic.read(tmp_path / "train.npz")
    np.savez(tmp_path / "two.npz", one=values, two=values)
    with pytest.raises(InputError, match="it has one, two: choose one with key="):
        traffic.read(tmp_path / "two.npz")
    for bad in (
        np.array([["61", "62"]]),
        np.zeros((3, 0)),
        np.zeros(5),
        np.zeros((2, 2), complex),
        np.zeros(3, "i4,f8"),
    ):
        np.save(tmp_path / "bad.npy", bad)
        with pytest.raises(InputError, match=r"holds an array of shape .* and type .*; numbers \(time, node\) or"):
            traffic.read(tmp_path / "bad.npy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channel": 1}, "holds one channel only, so there is no channel 1"),
        ({"channel": True}, "channel must be an integer of at least 0, not True"),
        ({"channel": -1}, "channel must be an integer of at least 0, not -1"),
        ({"key": "df"}, "holds one table without a name, so there is no 'df'; leave key out"),
        ({"start": "now", "step": 5}, "start is 'now', but must be a time"),
        ({"start": "2012-03-01", "step": float("nan")}, "step is nan minutes, but must be positive and at most a year"),
        ({"start": "2012-03-01", "step": 1e300}, "but must be positive and at most a year"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, values: np.ndarray, options: dict, message: str) -> None:
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(InputError, match=message):
        traffic.read(tmp_path / "a.npy", **options)


class Planted:
    """What an attacker pickles: a call on loading."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_planted_objects_never_run(tmp_path: Path, values: np.ndarray) -> None:
    mark = tmp_path / "mark"
    objects = np.array([[Planted(mark)]], dtype=object)
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "a.npz", data=objects)
    (tmp_path / "bare.npy").write_bytes(pickle.dumps(Planted(mark)))
    for name in ("a.npy", "a.npz", "bare.npy"):
        with pytest.raises(InputError, match=r"is not a complete .np. file of numbers \(.*pickle"):
            traffic.read(tmp_path / name)
    np.savez(tmp_path / "beside.npz", data=values, note=objects)  # an array that is not asked for stays unread
    same(traffic.read(tmp_path / "beside.npz", **START), values, COUNTED)
    assert not mark.exists()
    np.load(tmp_path / "a.npy", allow_pickle=True)  # the payload is live
    assert mark.exists()


# -- HDF5 tables -----------------------------------------------------------------------------------------------------


def frame(path: Path, values: np.ndarray, index: np.ndarray, kind: str, zone: str | None = None) -> Path:
    """The fixed layout of pandas, with float32 values as newer files have them."""
    with h5py.File(path, "w") as file:
        group = file.create_group("df")
        group["axis0"] = group["block0_items"] = np.array(IDS, dtype="S")
        group["axis1"], group["block0_values"] = index, values.astype(np.float32)
        group["axis1"].attrs["kind"] = np.bytes_(kind)
        group["axis1"].attrs["index_class"] = np.bytes_("period" if kind == "integer" else "datetime")
        if zone is not None:
            group["axis1"].attrs["tz"] = np.bytes_(zone)
    return path


def test_hdf5_with_times_of_a_zone(tmp_path: Path, values: np.ndarray) -> None:
    utc = pd.DatetimeIndex(TIMES).tz_localize("US/Pacific").tz_convert("UTC").tz_localize(None)
    nanoseconds = utc.to_numpy().astype("datetime64[ns]").astype(np.int64)
    path = frame(tmp_path / "a.h5", values, nanoseconds, "datetime64[ns]", "US/Pacific")
    with pytest.warns(SensitivityWarning, match="name the zone US/Pacific: its local clock is kept"):
        same(traffic.read(path), values.astype(np.float32))
    path = frame(tmp_path / "b.h5", values, nanoseconds, "datetime64[ns]", "Mars/Olympus")
    with pytest.raises(InputError, match=r"times of the zone 'Mars/Olympus', which is not known here; .*tz_localize"):
        traffic.read(path)


def test_hdf5_with_times_as_text(tmp_path: Path, values: np.ndarray) -> None:
    path = frame(
        tmp_path / "a.h5", values, np.array([str(time) for time in TIMES.astype("datetime64[s]")], "S"), "string"
    )
    same(traffic.read(path), values.astype(np.float32))


def test_hdf5_with_days(tmp_path: Path, values: np.ndarray) -> None:
    days = [date.toordinal() for date in pd.date_range("2016-12-30", periods=ROWS).date]
    data = traffic.read(frame(tmp_path / "a.h5", values, np.array(days), "date"))
    assert data.step == np.timedelta64(1, "D")
    assert str(data.timestamps[2]).startswith("2017-01-01T00:00")


@pytest.mark.parametrize(("kind", "shown"), [("integer", "period"), ("timedelta64", "timedelta64")])
def test_hdf5_with_an_index_that_is_no_time(tmp_path: Path, values: np.ndarray, kind: str, shown: str) -> None:
    with pytest.raises(InputError, match=f"has a time index of kind '{shown}', which is not read; write it with times"):
        traffic.read(frame(tmp_path / "a.h5", values, np.arange(ROWS), kind))


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        (("axis0_level0", "axis1", "block0_values"), "frame", "with names of several levels"),
        (("index", "values"), "series", "with the type 'series'"),
        (("table",), "frame_table", "with format='table'"),
    ],
)
def test_what_else_pandas_writes(
    tmp_path: Path, values: np.ndarray, parts: tuple[str, ...], kind: str, message: str
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for part in parts:
            file[f"df/{part}"] = values
        file["df"].attrs["pandas_type"] = np.bytes_(kind)
    with pytest.raises(
        InputError, match=rf"written by pandas {message} \(key 'df'\); write a plain frame with format='f"
    ):
        traffic.read(tmp_path / "a.h5")


def test_hdf5_with_objects_or_a_wrong_key(tmp_path: Path, values: np.ndarray) -> None:
    path = frame(tmp_path / "a.h5", values, TIMES.astype(np.int64), "datetime64[ns]")
    with pytest.raises(InputError, match="has no table 'speed'; it has df"):
        traffic.read(path, key="speed")
    with pytest.raises(InputError, match="holds a table without channels, so there is no channel 1"):
        traffic.read(path, channel=1)
    with h5py.File(path, "a") as file:
        del file["df/block0_values"]
        file["df/block0_values"] = np.full((ROWS, 3), "fast", dtype=h5py.string_dtype())
    with pytest.raises(InputError, match=r"holds block0_values of shape \(40, 3\) and type object"):
        traffic.read(path)


# -- text ------------------------------------------------------------------------------------------------------------


def as_text(values: np.ndarray, separator: str = ",", **options: object) -> str:
    table = pd.DataFrame(values, index=pd.DatetimeIndex(TIMES), columns=IDS)
    return table.to_csv(sep=separator, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quoting": 1},  # everything in quotes
        {"quoting": 2},  # text in quotes
        {"separator": ";"},
        {"separator": ";", "decimal": ","},
        {"separator": "\t"},
        {"lineterminator": "\r\n"},
        {"date_format": "%Y-%m-%dT%H:%M"},
        {"index_label": "Date"},
    ],
    ids=str,
)
def test_csv_in_many_forms(tmp_path: Path, values: np.ndarray, options: dict) -> None:
    text = as_text(values, options.pop("separator", ","), **options)
    for prefix in ("", "\ufeff"):
        (tmp_path / "a.csv").write_bytes((prefix + text).encode())
        same(traffic.read(tmp_path / "a.csv"), values)


def test_csv_with_empty_cells_and_zones(tmp_path: Path, values: np.ndarray) -> None:
    values[5, 0] = values[7, 2] = np.nan
    (tmp_path / "a.csv").write_text(as_text(values))
    with pytest.warns(SensitivityWarning, match=r"has 2 NaN values \(1.67 %\)"):
        same(traffic.read(tmp_path / "a.csv"), values)
    text = as_text(np.nan_to_num(values), date_format="%Y-%m-%d %H:%M:%S-08:00")
    (tmp_path / "b.csv").write_text(text)
    with pytest.warns(SensitivityWarning, match="name the zone -08:00: its local clock is kept, the zone is dropped"):
        same(traffic.read(tmp_path / "b.csv"), np.nan_to_num(values))


def test_text_between_blanks(tmp_path: Path, values: np.ndarray) -> None:
    np.savetxt(tmp_path / "vel.txt", values, fmt="%.3f")
    same(traffic.read(tmp_path / "vel.txt", **START), values, COUNTED)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2012-03-01 23:10:00", "2012-03-01 23:05:00", r"row 2 \(2012-03-01T23:05:00\) repeats 2012-03-01T23:05:00"),
        ("2012-03-01 23:10:00", "2012-03-01 23:11:00", "irregular time index: row 2"),
        ("2012-03-01 23:10:00", "", "has '' in the time column of row 2; write times as"),
        ("2012-03-01 23:10:00", "3/1/2012 23:10", "has '3/1/2012 23:10' in the time column of row 2; write times as"),
        ("0.0", "N/A", "has 'N/A' in line 5, where a speed is expected; leave the cell empty where one is missing"),
        (",0.0,", ",-3.0,", "has 3 negative speeds"),
        (",0.0,", ",inf,", "has 3 infinite speeds"),
        ("773869", "767541", "names the sensor '767541' more than once"),
    ],
)
def test_csv_with_faults(tmp_path: Path, values: np.ndarray, old: str, new: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(as_text(values).replace(old, new))
    with pytest.raises(InputError, match=message):
        traffic.read(tmp_path / "a.csv")


def test_csv_in_another_encoding(tmp_path: Path, values: np.ndarray) -> None:
    (tmp_path / "a.csv").write_bytes(as_text(values).encode("utf-16"))
    with pytest.raises(InputError, match=r"is not text in UTF-8 .*; if it is a CSV file, save it as UTF-8"):
        traffic.read(tmp_path / "a.csv")


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, 3, "", b"a.h5", ["a.h5"]], ids=str)
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(InputError, match="the traffic data is named by the path of a file, not by"):
        traffic.read(path)
    with pytest.raises(InputError, match="the graph is named by the path of a file, not by"):
        traffic.read_graph(path, IDS)


def test_pipes_and_locked_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match=r"pipe.csv is no regular file, such as the traffic data is"):
        traffic.read(tmp_path / "pipe.csv")
    (tmp_path / "locked.csv").write_text("1,2\n")
    (tmp_path / "locked.csv").chmod(0)
    if os.access(tmp_path / "locked.csv", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(InputError, match=r"locked.csv cannot be read: no permission"):
        traffic.read(tmp_path / "locked.csv")


# -- anything at all -------------------------------------------------------------------------------------------------


def originals() -> dict[str, bytes]:
    values = np.random.default_rng(0).uniform(20, 70, size=(30, 3)).round(2)
    times = TIMES[:30]
    npy, npz, h5 = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, values)
    np.savez(npz, data=values, timestamps=times, sensor_ids=np.array(IDS))
    with h5py.File(h5, "w") as file:
        group = file.create_group("df")
        group["axis0"] = group["block0_items"] = np.array(IDS, dtype="S")
        group["axis1"], group["block0_values"] = times.astype(np.int64), values
        group["axis1"].attrs["kind"] = np.bytes_("datetime64[ns]")
    text = pd.DataFrame(values, index=pd.DatetimeIndex(times), columns=IDS).to_csv()
    return {".npy": npy.getvalue(), ".npz": npz.getvalue(), ".h5": h5.getvalue(), ".csv": text.encode()}


ORIGINALS = originals()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    suffix=st.sampled_from(sorted(ORIGINALS)),
    changes=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=6)), min_size=1, max_size=4),
    keep=st.floats(0.3, 1),
)
def test_damaged_files_are_read_or_refused_in_a_sentence(
    tmp_path: Path, suffix: str, changes: list[tuple[float, bytes]], keep: float
) -> None:
    content = bytearray(ORIGINALS[suffix])
    for where, new in changes:
        place = int(where * (len(content) - 1))
        content[place : place + len(new)] = new
    path = tmp_path / f"a{suffix}"
    path.write_bytes(bytes(content[: max(1, int(keep * len(content)))]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            data = traffic.read(path)
        except InputError as error:
            problem = str(error)
        else:
            problem = str(path)
            assert torch.isfinite(data.speed).all()
            assert (data.speed >= 0).all()
    assert str(path) in problem
    assert "\n" not in problem


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet='0123456789.,;-: \n"nainfT\t', max_size=200))
def test_any_text_is_read_or_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reader in (traffic.read, lambda path: traffic.read_graph(path, IDS)):
            problem = str(path)
            try:
                reader(path)
            except InputError as error:
                problem = str(error)
            assert str(path) in problem

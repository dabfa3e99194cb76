"""Every file layout gives the same traffic, and every bad file one clear sentence."""

import dataclasses
import shutil
import warnings

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from sensitivity import traffic
from sensitivity.errors import InputError, SensitivityWarning

ROWS, IDS = 40, ["773869", "767541", "717447"]
TIMES = np.datetime64("2012-03-01T23:00", "ns") + np.arange(ROWS) * np.timedelta64(5, "m")


@pytest.fixture
def values():
    raw = np.random.default_rng(0).uniform(20, 70, size=(ROWS, 3)).round(3)
    raw[3:6, 1] = 0.0
    return raw


def write_hdf5(path, values, *, key="df", index=None, kind="datetime64[ns]", ids=None, mode="w", blocks=1):
    """The fixed layout of pandas, by hand."""
    ids = np.array(IDS if ids is None else ids)
    names = ids.astype("S") if ids.dtype.kind == "U" else ids
    index = TIMES.astype(np.int64) if index is None else index
    with h5py.File(path, mode) as file:
        group = file.create_group(key)
        group["axis0"], group["axis1"] = names, index
        group["axis1"].attrs["kind"] = np.bytes_(kind)
        for number, columns in enumerate(np.array_split(np.arange(values.shape[1]), blocks)):
            group[f"block{number}_items"], group[f"block{number}_values"] = names[columns], values[:, columns]
    return path


def same(data, values):
    np.testing.assert_array_equal(data.speed.numpy(), np.nan_to_num(values).astype(np.float32))
    np.testing.assert_array_equal(data.mask.numpy(), (values != 0) & ~np.isnan(values))
    np.testing.assert_array_equal(data.timestamps, TIMES)
    assert data.timestamps.dtype == np.dtype("datetime64[ns]")
    assert data.speed.dtype == torch.float32
    assert data.sensor_ids == IDS


@pytest.mark.parametrize("unit", ["ns", "us", "ms", "s"])
@pytest.mark.parametrize("kind", ["datetime64[{}]", "datetime64", "integer"])
def test_hdf5_with_times_in_any_unit(tmp_path, values, unit, kind):
    index = TIMES.astype(f"datetime64[{unit}]").astype(np.int64)
    path = write_hdf5(tmp_path / "a.h5", values, index=index, kind=kind.format(unit), key="speed")
    same(traffic.read(path), values)


def test_hdf5_with_integer_ids_and_several_blocks(tmp_path, values):
    path = write_hdf5(tmp_path / "a.h5", values, ids=np.array([int(name) for name in IDS]), blocks=2)
    same(traffic.read(path), values)


def test_hdf5_with_several_tables_needs_a_key(tmp_path, values):
    path = write_hdf5(tmp_path / "a.h5", values, key="df")
    write_hdf5(path, values + 1, key="other", mode="a")
    with pytest.raises(InputError, match=r"holds several tables \(df, other\); choose one with key="):
        traffic.read(path)
    with pytest.raises(InputError, match="has no table 'speed'; it has df, other"):
        traffic.read(path, key="speed")
    np.testing.assert_allclose(traffic.read(path, key="/other").speed, values + 1, rtol=1e-6)


def test_hdf5_that_counts_rows_gets_times_and_says_so(tmp_path, values):
    path = write_hdf5(tmp_path / "a.h5", values, index=np.arange(ROWS), kind="integer")
    with pytest.warns(SensitivityWarning, match="has no times: its rows are taken as 5-minute steps from 2012-03-01"):
        data = traffic.read(path)
    assert str(data.timestamps[1]).startswith("2012-03-01T00:05:00")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(traffic.read(path, start="2012-03-01T23:00", step=5), values)


def test_npz_npy_and_channels(tmp_path, values):
    channels = np.stack([values, values * 0 + 0.5], axis=-1)
    np.savez(tmp_path / "a.npz", data=channels, timestamps=TIMES, sensor_ids=np.array(IDS))
    np.save(tmp_path / "a.npy", channels)
    same(traffic.read(tmp_path / "a.npz"), values)
    plain = traffic.read(tmp_path / "a.npy", start="2012-03-01T23:00", step=5)
    assert plain.sensor_ids == ["0", "1", "2"]
    same(dataclasses.replace(plain, sensor_ids=IDS), values)
    assert float(traffic.read(tmp_path / "a.npz", channel=1).speed.max()) == 0.5
    with pytest.raises(InputError, match="has 2 channels, counted from 0; there is no channel 2"):
        traffic.read(tmp_path / "a.npz", channel=2)
    with pytest.raises(InputError, match="has no array 'flow'; it has data, timestamps, sensor_ids"):
        traffic.read(tmp_path / "a.npz", key="flow")


def test_csv_as_pandas_writes_it(tmp_path, values):
    frame = pd.DataFrame(values, index=pd.DatetimeIndex(TIMES), columns=IDS)
    frame.to_csv(tmp_path / "a.csv")
    same(traffic.read(tmp_path / "a.csv"), values)
    frame.iloc[7, 2] = np.nan
    frame.to_csv(tmp_path / "nan.csv")
    with pytest.warns(SensitivityWarning, match=r"has 1 NaN values \(0.83 %\): they count as missing"):
        same(traffic.read(tmp_path / "nan.csv"), frame.to_numpy())


def test_csv_without_header_or_without_times(tmp_path, values):
    times = {"start": "2012-03-01T23:00", "step": 5.0}
    np.savetxt(tmp_path / "vel.csv", values, delimiter=",")
    assert traffic.read(tmp_path / "vel.csv", **times).sensor_ids == ["0", "1", "2"]
    np.testing.assert_allclose(traffic.read(tmp_path / "vel.csv", **times).speed, values, rtol=1e-6)
    frame = pd.DataFrame(values, index=pd.DatetimeIndex(TIMES), columns=IDS)
    frame.to_csv(tmp_path / "ids.csv", index=False)
    same(traffic.read(tmp_path / "ids.csv", **times), values)
    frame.to_csv(tmp_path / "times.csv", header=False)
    np.testing.assert_array_equal(traffic.read(tmp_path / "times.csv").timestamps, TIMES)
    frame.set_axis(["a", "b", "c"], axis=1).to_csv(tmp_path / "names.csv", index_label="date")
    assert traffic.read(tmp_path / "names.csv").sensor_ids == ["a", "b", "c"]


def test_written_traffic_is_read_back(tmp_path):
    city = traffic.synthetic_city(6, 1)
    path = traffic.write(city, tmp_path / "city.npz")
    back = traffic.read(path)
    for got, expected in ((back.speed, city.speed), (back.mask, city.mask), (back.graph, city.graph)):
        assert torch.equal(got, expected)
    assert back.sensor_ids == city.sensor_ids
    assert [file.name for file in tmp_path.iterdir()] == ["city.npz"]
    with pytest.raises(InputError, match=r"written as .npz, but the name is 'city.h5'"):
        traffic.write(city, tmp_path / "city.h5")


def test_metr_la(metr_la):
    data = traffic.read(metr_la / "metr-la-10.h5", metr_la / "adj_mx.pkl")
    assert data.speed.shape == (34272, 10)
    assert 100 * data.missing == pytest.approx(7.41, abs=0.005)
    assert str(data.timestamps[-1]).startswith("2012-06-27T23:55")
    assert data.graph.shape == (10, 10)
    with h5py.File(metr_la / "metr-la-10.h5") as file:
        np.testing.assert_allclose(data.speed.numpy(), file["df/block0_values"][()], rtol=1e-7)
    week = traffic.read(metr_la / "metr-la-week.h5", metr_la / "adj_mx.pkl")
    assert int((week.graph > 0).sum()) == 1722
    assert torch.equal(week.graph[:10, :10], data.graph)
    assert traffic.read(metr_la / "metr-la-week.h5").graph is None
    raw = traffic.read(metr_la / "metr-la-raw-head.h5")
    assert 100 * raw.missing == pytest.approx(2.75, abs=0.005)


def test_described_files_are_reopened(tmp_path, values):
    path = write_hdf5(tmp_path / "a.h5", values)
    np.save(tmp_path / "graph.npy", np.eye(3))
    data = traffic.read(path, tmp_path / "graph.npy")
    description = traffic.describe(data)
    assert (description["rows"], description["nodes"], description["step_minutes"]) == (ROWS, 3, 5.0)
    back = traffic.reopen(description)
    same(back, values)
    assert torch.equal(back.graph, torch.eye(3))
    np.save(tmp_path / "graph.npy", np.eye(3) * 2)
    with pytest.raises(InputError, match=r"graph.npy has changed since it was described .* with --data"):
        traffic.reopen(description)
    path.unlink()
    with pytest.raises(InputError, match=r"the described traffic file .*a.h5 is gone; say where it is now with --data"):
        traffic.reopen(description)


def test_described_options_are_kept(tmp_path, values):
    np.save(tmp_path / "a.npy", np.stack([values * 0, values], axis=-1))
    data = traffic.read(tmp_path / "a.npy", channel=1, start="2020-01-01", step=10)
    back = traffic.reopen(traffic.describe(data))
    assert torch.equal(back.speed, data.speed)
    np.testing.assert_array_equal(back.timestamps, data.timestamps)


def test_described_city_is_generated_again(tmp_path):
    city = traffic.synthetic_city(4, 2, seed=9, missing=0.2, echo=30)
    description = traffic.describe(city)
    torch.save(description, tmp_path / "description")
    description = torch.load(tmp_path / "description", weights_only=True)
    assert torch.equal(traffic.reopen(description).speed, city.speed)
    assert "seed=9" in description["source"]
    with pytest.raises(InputError, match="the synthetic city comes out different"):
        traffic.reopen(description | {"mean": 12.0})
    memory = traffic.describe(dataclasses.replace(city, origin={}))
    with pytest.raises(InputError, match="was made in memory and cannot be opened again"):
        traffic.reopen(memory)
    with pytest.raises(InputError, match="no description of traffic: its kind is None"):
        traffic.reopen({})


def test_no_file_a_directory_an_unknown_kind(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*gone.h5 for the traffic data"):
        traffic.read(tmp_path / "gone.h5")
    with pytest.raises(InputError, match=r"is a directory; the traffic data is a file"):
        traffic.read(tmp_path)
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(InputError, match=r"of an unknown kind; the name must end in .h5, .npz, .npy or .csv"):
        traffic.read(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [".h5", ".npz", ".npy", ".csv"])
def test_foreign_and_empty_files(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    wanted = {".h5": "is not an HDF5 file", ".csv": "is not text|is empty"}.get(suffix, "is not a complete .np. file")
    for content in (b"\xff\xfe\x00garbage" * 20, b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=wanted):
            traffic.read(path)


@pytest.mark.parametrize("suffix", [".h5", ".npz", ".npy"])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_truncated_files(tmp_path, values, suffix, share):
    path = tmp_path / f"a{suffix}"
    big = np.tile(values, (50, 1))
    if suffix == ".h5":
        write_hdf5(path, big, index=np.arange(len(big)) * 300 + 1_330_000_000)
    elif suffix == ".npz":
        np.savez(path, data=big)
    else:
        np.save(path, big)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(InputError, match=r"may be truncated|is not a complete|is not an HDF5 file"):
        traffic.read(path)


def test_hdf5_of_other_layouts(tmp_path, values):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["note"] = "speeds"
    with pytest.raises(InputError, match=r"holds no pandas table .* and no array of numbers \(its top level: note\)"):
        traffic.read(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["df/table"] = values
    with pytest.raises(InputError, match=r"written by pandas with format='table' \(key 'df'\)"):
        traffic.read(tmp_path / "b.h5")
    write_hdf5(tmp_path / "c.h5", values[:-1])
    with pytest.raises(
        InputError, match=r"holds block0_values of shape \(39, 3\) .* but 40 times and 3 numeric columns"
    ):
        traffic.read(tmp_path / "c.h5")
    write_hdf5(tmp_path / "d.h5", values, index=TIMES.astype(np.float64))
    with pytest.raises(InputError, match=r"has a time index of type float64 and shape \(40,\); integers"):
        traffic.read(tmp_path / "d.h5")


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        ({10: 5}, r"irregular time index: row 10 \(2012-03-01T23:55:00\) follows 2012-03-01T23:45:00, .* 5 minutes"),
        ({10: -5}, "irregular time index: row 10"),
        ({1: -5, 0: 0}, "irregular time index"),
    ],
)
def test_irregular_index(tmp_path, values, shift, message):
    index = TIMES.copy()
    for row, minutes in shift.items():
        index[row] += np.timedelta64(minutes, "m")
    path = write_hdf5(tmp_path / "a.h5", values, index=index.astype(np.int64))
    with pytest.raises(InputError, match=message):
        traffic.read(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (-3.0, r"has 1 negative speeds \(the first is -3 at 2012-03-01T23:10:00, sensor 767541\)"),
        (np.inf, "has 1 infinite speeds"),
        (1e40, r"has 1 infinite speeds \(the first is 1e\+40 at"),
    ],
)
def test_values_that_are_no_speeds(tmp_path, values, bad, message):
    values[2, 1] = bad
    with pytest.raises(InputError, match=message):
        traffic.read(write_hdf5(tmp_path / "a.h5", values))


def test_flows_nan_only_and_constant_zero(tmp_path, values):
    with pytest.warns(SensitivityWarning, match="has values up to .*: these are no speeds in mph"):
        traffic.read(write_hdf5(tmp_path / "a.h5", values * 10))
    with pytest.raises(InputError, match="has no valid reading: all 120 values are zero or NaN"):
        traffic.read(write_hdf5(tmp_path / "b.h5", values * np.nan))


def test_ids_twice(tmp_path, values):
    path = write_hdf5(tmp_path / "a.h5", values, ids=["1", "2", "1"], blocks=1)
    with pytest.raises(InputError, match="names the sensor '1' more than once"):
        traffic.read(path)


def test_times_where_none_are_wanted(tmp_path, values):
    with pytest.raises(InputError, match="has its own times; leave out start and step"):
        traffic.read(write_hdf5(tmp_path / "a.h5", values), start="2012-01-01")
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(InputError, match="start is 'soon', but must be a time"):
        traffic.read(tmp_path / "a.npy", start="soon", step=5)
    with pytest.raises(InputError, match="step is -5 minutes, but must be positive"):
        traffic.read(tmp_path / "a.npy", start="2012-01-01", step=-5)
    np.save(tmp_path / "one.npy", values[:1])
    with (
        pytest.warns(SensitivityWarning, match="has fewer rows than columns: read as 1 times of 3 sensors"),
        pytest.raises(InputError, match="has 1 rows; a time series needs at least 2"),
    ):
        traffic.read(tmp_path / "one.npy", start="2012-01-01", step=5)
    np.save(tmp_path / "four.npy", values[:, :, None, None])
    with pytest.raises(InputError, match=r"holds an array of shape \(40, 3, 1, 1\)"):
        traffic.read(tmp_path / "four.npy")
    np.save(tmp_path / "object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"is not a complete .npy file of numbers"):
        traffic.read(tmp_path / "object.npy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",a,b\n2012-03-01 00:00:00,1,2\n2012-03-01 00:05:00,1\n", "has 1 values in line 3, but 2 above"),
        (
            ",a,b\n2012-03-01 00:00:00,1,2\n2012-03-01 00:05:00,1,slow\n",
            "has 'slow' in line 3, where a speed is expected",
        ),
        (",a,b\n2012-03-01 00:00:00,1,2\nyesterday,1,2\n", "has 'yesterday' in the time column of row 1"),
        (",a,b,c\n2012-03-01 00:00:00,1,2\n2012-03-01 00:05:00,1,2\n", "names 3 sensors, but its rows hold 2 values"),
        (",a,b\n", "has a header but no rows"),
    ],
)
def test_bad_csv(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        traffic.read(tmp_path / "a.csv")


def test_a_copy_elsewhere_is_the_same(metr_la, tmp_path):
    shutil.copy(metr_la / "metr-la-10.h5", tmp_path / "copy.h5")
    one, two = (traffic.read(path / name) for path, name in ((metr_la, "metr-la-10.h5"), (tmp_path, "copy.h5")))
    assert one.origin["sha256"] == two.origin["sha256"]

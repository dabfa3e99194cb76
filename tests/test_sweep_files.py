"""Sweeps that are interrupted, taken up, saved and read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sensitivity import InputError, SoftmaxAttention
from sensitivity.sweep import Batch, RandomTokens, Sweep, sweep


def layer(seed: int = 0, dim: int = 6, heads: int = 2, **options: Any) -> SoftmaxAttention:
    return SoftmaxAttention.random(dim, heads, seed=seed, dtype=torch.float64, **options)


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep(RandomTokens({"a": layer(0), "b": layer(1, causal=True)}, samples=5), [4, 8, 16, 32], keep=(8,))


class Counting:
    """A source that counts its calls and stops at a length."""

    def __init__(self, stop: int | None = None) -> None:
        self.calls: list[int] = []
        self.stop, self.inner = stop, RandomTokens(layer(), samples=2)

    def __call__(self, length: int) -> Iterator[Batch]:
        self.calls.append(length)
        if length == self.stop:
            raise KeyboardInterrupt
        return self.inner(length)


def test_an_interrupted_sweep_is_taken_up_with_the_same_numbers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directory": tmp_path / "parts", "settings": {"model": "x"}}
    with pytest.raises(KeyboardInterrupt):
        sweep(Counting(stop=8), [4, 6, 8], **options)
    source = Counting()
    resumed = sweep(source, [4, 6, 8], resume=True, **options)
    assert source.calls == [8]
    assert resumed.summary() == sweep(Counting(), [4, 6, 8], settings={"model": "x"}).summary()
    fresh = Counting()
    sweep(fresh, [4, 6, 8], **options)
    assert fresh.calls == [4, 6, 8]
    other = Counting()
    sweep(other, [4, 6], resume=True, directory=tmp_path / "parts", settings={"model": "y"})
    assert other.calls == [4, 6]
    assert not [path for path in (tmp_path / "parts").iterdir() if path.name.startswith(".")]


def test_progress_reaches_the_end_of_every_length() -> None:
    told: list[tuple[int, float]] = []
    sweep(RandomTokens(layer(), samples=2), [4, 6], bounds=(), progress=lambda T, share: told.append((T, share)))
    assert [length for length, share in told if share == 1.0] == [4, 6]
    assert all(0 < share <= 1 for _, share in told)


def test_a_saved_sweep_reads_back_as_it_was(found: Sweep, tmp_path: Path) -> None:
    found.save(tmp_path / "sweep.nc")
    again = Sweep.load(tmp_path / "sweep.nc")
    assert again.summary() == found.summary()
    for key, record in found.records.items():
        other = again.records[key]
        assert set(other.maps) == set(record.maps)
        for name, values in record.maps.items():
            torch.testing.assert_close(other.maps[name], values, rtol=0, atol=0, equal_nan=True)
        for name, values in record.profiles.items():
            torch.testing.assert_close(other.profiles[name], values, rtol=0, atol=0, equal_nan=True)
        for name, statistic in record.statistics.items():
            torch.testing.assert_close(other.statistics[name].samples, statistic.samples, equal_nan=True)
        assert other.bounds["local"].assumptions == record.bounds["local"].assumptions
    labelled = again.to_xarray()
    assert labelled["off_diagonal"].dims == ("layer", "length")
    assert float(labelled["off_diagonal"].sel(layer="a", length=8)) == float(
        found.record("a", 8).statistics["off_diagonal"]
    )
    assert int(labelled["bound_violations"].sum()) == 0


def test_files_that_are_no_sweep(tmp_path: Path, found: Sweep) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none\.nc; give a file that Sweep\.save wrote"):
        Sweep.load(tmp_path / "none.nc")
    with pytest.raises(InputError, match="is a directory; give a file"):
        Sweep.load(tmp_path)
    (tmp_path / "text.nc").write_text("hello")
    with pytest.raises(InputError, match="cannot be read as netCDF"):
        Sweep.load(tmp_path / "text.nc")
    found.map("a").save(tmp_path / "map.nc")
    with pytest.raises(InputError, match="is a netCDF file, but not a sweep"):
        Sweep.load(tmp_path / "map.nc")
    found.save(tmp_path / "whole.nc")
    content = (tmp_path / "whole.nc").read_bytes()
    (tmp_path / "cut.nc").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be read as netCDF"):
        Sweep.load(tmp_path / "cut.nc")

"""SensitivityMap: statistics in place, exact files, readable texts, clear refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from oracles import draw
from tolerances import assert_close

from sensitivity import SoftmaxAttention, measure, statistics
from sensitivity.errors import InputError
from sensitivity.result import SensitivityMap, SensitivityStatistics
from sensitivity.result.map import check_shapes, check_times

SAMPLES, HEADS, T = 2, 3, 6


def example(dtype=torch.float64, **changes):
    """A causal map whose second sample is padded at its first two positions, with everything measured."""
    real = torch.arange(T) >= torch.tensor([0, 2])[:, None]
    visible = real[:, :, None] & real[:, None, :] & torch.ones(T, T, dtype=torch.bool).tril()
    padded = ~(real[:, :, None] & real[:, None, :])
    norms = (draw(SAMPLES, T, T).abs() + 0.1).to(dtype) * visible
    paths = {name: norms * share for name, share in (("value", 0.75), ("key", 0.5))}
    attended = visible[:, None]
    weights = draw(SAMPLES, HEADS, T, T, seed=1).masked_fill(~attended, -math.inf).softmax(-1).nan_to_num()
    return SensitivityMap(
        norms.masked_fill(padded, math.nan),
        diagonal=draw(SAMPLES, T, seed=2).abs().to(dtype).masked_fill(~real, math.nan),
        paths={name: path.masked_fill(padded, math.nan) for name, path in paths.items()},
        heads=draw(SAMPLES, HEADS, T, T, seed=3).abs().to(dtype),
        attention=weights.to(dtype),
        visible=visible,
        **{
            "attended": attended,
            "standard_error": norms * 0.01,
            "in_dim": 8,
            "out_dim": 8,
            "name": "blocks.0.temporal",
            "provenance": {"engine": "closed form", "seed": 7, "versions": {"torch": "2"}, "nothing": None},
            "notes": ["a note", "ünïcode"],
        }
        | changes,
    )


def same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.nan_to_num(nan=-1), right.nan_to_num(nan=-1))
    if isinstance(left, dict) and left and isinstance(next(iter(left.values())), torch.Tensor):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    return type(left) is type(right) and left == right


class TestStatistics:
    def test_are_those_of_the_functions(self):
        found = example()
        visible, removed = found.visible, found.diagonal
        assert found.sink_ratio() == statistics.sink_ratio(found.norms, visible)
        assert found.sink_ratio(residual_removed=True) == statistics.sink_ratio(found.norms, visible, removed)
        assert found.sink_ratio(path="key") == pytest.approx(float(found.sink_ratio()))
        assert found.parroting_index() == statistics.parroting_index(found.norms, visible)
        assert found.parroting_index(True).rows[0] == 1.0
        for method, function in (
            ("lag_profile", statistics.lag_profile),
            ("primacy_profile", statistics.primacy_profile),
        ):
            profile = getattr(found, method)(residual_removed=True)
            assert_close(torch.from_numpy(profile.values), function(found.norms, visible, removed), "maps")
        assert_close(found.mean(), statistics.mean_map(found.norms, visible), "maps")
        assert found.path_shares()["diagonal"]["value"] == pytest.approx(0.6)

    def test_attention_statistics_leave_padded_queries_out(self):
        real = torch.arange(T) < torch.tensor([T, 4])[:, None]
        attended = real[:, None, None, :].expand(-1, -1, T, -1)  # as a layer masks: padded keys, but not padded queries
        weights = draw(SAMPLES, HEADS, T, T).masked_fill(~attended, -math.inf).softmax(-1)
        visible = real[:, :, None] & real[:, None, :]
        found = SensitivityMap(torch.ones(SAMPLES, T, T), attention=weights, visible=visible, attended=attended)
        for name in ("diagonal_attention", "key_sink", "row_entropy"):
            statistic, expected = getattr(found, name)(), getattr(statistics, name)(weights, visible[:, None])
            assert (float(statistic), statistic.null) == (float(expected), expected.null), name
        assert found.diagonal_attention() != statistics.diagonal_attention(weights, attended)

    def test_a_hidden_diagonal_counts_for_the_map_but_not_for_attention(self):
        attended = ~torch.eye(T, dtype=torch.bool)[None, None]
        weights = draw(1, 1, T, T).masked_fill(~attended, -math.inf).softmax(-1)
        found = SensitivityMap(torch.eye(T)[None] + 1, attention=weights, attended=attended)
        assert found.diagonal_attention().null == 0.0
        assert found.sink_ratio() == 2.0

    def test_profiles_are_labelled(self):
        profile = example().lag_profile()
        assert profile.dims == ("lag",)
        assert profile.lag.values.tolist() == list(range(1 - T, T))
        assert profile.sel(lag=[-1]).isnull().all()
        assert profile.attrs["norm"] == "frobenius"
        assert example().primacy_profile().dims == ("key",)

    def test_summary_is_plain_and_complete(self):
        summary = example().summary()
        assert {type(value) for value in summary.values()} == {float}
        assert summary["sink_ratio"] == example().sink_ratio()
        assert summary["sink_ratio_residual_removed"] == example().sink_ratio(True)
        assert summary["parroting_index_null"] == example().parroting_index().null
        assert summary["diagonal_attention"] == example().diagonal_attention()
        assert summary["off_diagonal_share_key"] == pytest.approx(0.4)
        assert summary["diagonal"] / summary["off_diagonal"] == pytest.approx(summary["sink_ratio"])

    def test_of_the_bare_norms(self):
        bare = SensitivityMap(torch.ones(1, 4, 4))
        assert bare.visible.all()
        assert "sink_ratio_residual_removed" not in bare.summary()
        assert SensitivityMap(torch.ones(1, 2, 4)).summary() == {}

    def test_one_time_step(self):
        one = SensitivityMap(torch.ones(1, 1, 1))
        assert math.isnan(one.sink_ratio())
        assert "undefined: no off-diagonal pair is visible (T=1)" in repr(one)


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_round_trip_is_exact(self, tmp_path, dtype):
        found = example(dtype)
        found.save(tmp_path / "map.nc")
        again = SensitivityMap.load(tmp_path / "map.nc")
        for field in dataclasses.fields(SensitivityMap):
            assert same(getattr(found, field.name), getattr(again, field.name)), field.name
        assert [path.name for path in tmp_path.iterdir()] == ["map.nc"]

    def test_round_trip_of_the_bare_norms(self, tmp_path):
        SensitivityMap(torch.rand(1, 1, 3, generator=torch.Generator().manual_seed(0))).save(tmp_path / "map.nc")
        again = SensitivityMap.load(tmp_path / "map.nc")
        assert (again.name, again.paths, again.notes, again.provenance, again.in_dim) == ("", {}, [], {}, None)
        assert again.attention is again.diagonal is again.heads is again.attended is again.standard_error is None

    def test_provenance_keeps_what_json_does_not_know_as_text(self, tmp_path):
        given = {"path": Path("a/b"), "count": np.int64(3), "loss": np.float32(0.5)}
        example(provenance=given).save(tmp_path / "map.nc")
        assert SensitivityMap.load(tmp_path / "map.nc").provenance == {"path": "a/b", "count": 3, "loss": 0.5}

    def test_labels(self):
        labelled = example().to_xarray()
        assert labelled["norms"].dims == ("sample", "query", "key")
        assert labelled["attention"].dims == ("sample", "head", "query", "key")
        assert labelled["norms"].attrs["norm"] == "frobenius"
        assert labelled["query"].attrs["long_name"] == "output time i"
        assert float(labelled["path_value"].sel(sample=0, query=3, key=2)) == float(example().paths["value"][0, 3, 2])
        assert json.loads(labelled.attrs["provenance"])["seed"] == 7

    def test_refuses_what_is_not_there(self, tmp_path):
        with pytest.raises(InputError, match=r"there is no file .*none\.nc"):
            SensitivityMap.load(tmp_path / "none.nc")
        with pytest.raises(InputError, match="is a directory"):
            SensitivityMap.load(tmp_path)
        with pytest.raises(InputError, match="it is a directory"):
            example().save(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"not a netCDF file at all", b"CDF\x01" + bytes(64)])
    def test_refuses_another_kind_of_file(self, tmp_path, content):
        (tmp_path / "other.nc").write_bytes(content)
        with pytest.raises(InputError, match=r"other\.nc cannot be read as netCDF"):
            SensitivityMap.load(tmp_path / "other.nc")

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
    def test_refuses_a_truncated_file(self, tmp_path, share):
        example().save(tmp_path / "map.nc")
        content = (tmp_path / "map.nc").read_bytes()
        (tmp_path / "map.nc").write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match="cannot be read as netCDF: it is damaged"):
            SensitivityMap.load(tmp_path / "map.nc")

    def test_refuses_foreign_and_newer_netcdf(self, tmp_path):
        xarray.Dataset({"t2m": ("x", [1.0])}).to_netcdf(tmp_path / "weather.nc", engine="h5netcdf")
        with pytest.raises(InputError, match="a netCDF file, but holds no sensitivity map"):
            SensitivityMap.load(tmp_path / "weather.nc")
        example().to_xarray().assign_attrs(version=99).to_netcdf(tmp_path / "new.nc", engine="h5netcdf")
        with pytest.raises(InputError, match="version 99 of the map format"):
            SensitivityMap.load(tmp_path / "new.nc")


LAYER = SoftmaxAttention.random(8, HEADS - 1, dtype=torch.float64, causal=True)


class TestStatisticsWithoutAMap:
    @pytest.mark.parametrize("rows", [None, [5, 1, 2]])
    def test_round_trip_is_exact(self, tmp_path, rows):
        found = measure(LAYER, draw(2, T, 8), keep="statistics", paths=True, heads=True, rows=rows)
        found.save(tmp_path / "sums.nc")
        again = SensitivityStatistics.load(tmp_path / "sums.nc")
        assert repr(again) == repr(found)
        assert again.summary() == found.summary()
        assert (again.name, again.in_dim, again.provenance) == (found.name, found.in_dim, found.provenance)
        assert again.query_times.tolist() == found.query_times.tolist()
        assert again.sink_ratio(head=1) == found.sink_ratio(head=1)
        assert torch.equal(again.sink_ratio(path="key").samples, found.sink_ratio(path="key").samples)
        assert again.lag_profile(True).equals(found.lag_profile(True))

    def test_round_trip_of_a_model_that_is_not_square_nor_attention(self, tmp_path):
        found = measure(lambda tokens: tokens[:, ::2].cumsum(1), draw(2, T, 8), keep="statistics")
        found.save(tmp_path / "sums.nc")
        again = SensitivityStatistics.load(tmp_path / "sums.nc")
        assert again.primacy_profile().equals(found.primacy_profile())
        assert repr(again) == repr(found)
        assert "3 queries x 6 keys" in repr(again)

    def test_labels(self):
        found = measure(LAYER, draw(2, T, 8), keep="statistics", paths=True, rows=[5, 1])
        labelled = found.to_xarray()
        row = labelled["path_value_sum_row"]
        assert row.dims == ("map", "query")
        assert row["query"].values.tolist() == [5, 1]
        assert labelled["map"].values.tolist() == [-1, 0, 1]
        assert labelled["offset"].values.tolist() == list(range(1 - T, T))
        whole = measure(LAYER, draw(2, T, 8), paths=True)
        expected = whole.paths["value"][1, 5].sum() - whole.paths["value"][1, 5, 5]
        assert float(row.sel(map=1, query=5)) == pytest.approx(float(expected))

    def test_refuses_the_file_of_a_map_and_the_other_way_round(self, tmp_path):
        example().save(tmp_path / "map.nc")
        with pytest.raises(InputError, match="holds no sensitivity statistics; give a file that SensitivityStatistics"):
            SensitivityStatistics.load(tmp_path / "map.nc")
        measure(LAYER, draw(2, T, 8), keep="statistics").save(tmp_path / "sums.nc")
        with pytest.raises(InputError, match=r"holds no sensitivity map; give a file that SensitivityMap\.save wrote"):
            SensitivityMap.load(tmp_path / "sums.nc")

    def test_repr_says_which_rows_and_fits_80_columns(self):
        text = repr(measure(LAYER, draw(2, T, 8), keep="statistics", rows=4))
        assert text.splitlines()[0] == "SensitivityStatistics 'attention': 2 samples, T=6, D=8, frobenius norm"
        assert "  query rows          4 of 6" in text.splitlines()
        assert max(map(len, text.splitlines())) <= 80


class TestSomeRows:
    def test_round_trip_is_exact(self, tmp_path):
        found = measure(LAYER, draw(2, T, 8), rows=[4, 0, 5], budget=2**30)
        found.save(tmp_path / "map.nc")
        again = SensitivityMap.load(tmp_path / "map.nc")
        assert (again.query_times.tolist(), again.length) == ([4, 0, 5], T)
        assert again.summary() == found.summary()
        assert found.to_xarray()["norms"].sel(query=4, key=3).shape == (2,)

    def test_weights_that_were_summed_up_are_kept_in_the_file(self, tmp_path):
        whole = measure(LAYER, draw(2, T, 8))
        found = dataclasses.replace(whole, attention=None, weight_sums=whole.attention_sums())
        found.save(tmp_path / "map.nc")
        assert SensitivityMap.load(tmp_path / "map.nc").key_sink() == whole.key_sink()

    @pytest.mark.parametrize("times", [[0, 0], [0, 4], [-1, 0], [0]])
    def test_times_that_are_not_those_of_the_rows(self, times):
        with pytest.raises(InputError, match="query_times must name each of the 2 rows of the map once, from 0 to 3"):
            check_times(torch.tensor(times), 2, 4)


class TestTexts:
    def test_repr(self):
        text = repr(example())
        assert text.splitlines()[0] == "SensitivityMap 'blocks.0.temporal': 2 samples, T=6, D=8, frobenius norm"
        for part in ("closed form", "raw, ", "residual removed", "(uniform: ", "diagonal attention", "causally hidden"):
            assert part in text
        assert max(map(len, text.splitlines())) <= 80

    def test_repr_fits_80_columns_whatever_the_names(self):
        text = repr(example(name="encoder layers " * 20, notes=["word " * 60], out_dim=9))
        assert max(map(len, text.splitlines())) <= 80
        assert "D=8 to 9" in text

    def test_notebook_text_is_escaped(self):
        page = example(name="<script>x</script>", notes=["a < b"])._repr_html_()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        assert "a &lt; b" in page

    def test_repr_survives_weights_after_dropout(self):
        found = example()
        assert "undefined: attention weights" in repr(dataclasses.replace(found, attention=found.attention * 1.1))

    def test_repr_of_a_map_that_is_not_square(self):
        assert "2 queries x 4 keys" in repr(SensitivityMap(torch.ones(1, 2, 4)))


class TestRefusals:
    def test_names_the_pair_layer_and_engine_that_are_not_finite(self):
        norms = example().norms.clone()
        norms[1, 4, 3] = math.inf
        message = (
            r"the norms of layer 'blocks\.0\.temporal' at \(sample, query, key\) = \(1, 4, 3\) are inf "
            r"\(engine: closed form\): a visible pair must be finite"
        )
        with pytest.raises(InputError, match=message):
            dataclasses.replace(example(), norms=norms)

    def test_names_the_diagonal_and_path_that_are_not_finite(self):
        with pytest.raises(InputError, match=r"residual-removed norms at .* = \(0, 0, 0\) are nan"):
            SensitivityMap(torch.ones(1, 3, 3), diagonal=torch.full((1, 3), math.nan))
        with pytest.raises(InputError, match="the value path norms at"):
            SensitivityMap(torch.ones(1, 3, 3), paths={"value": torch.full((1, 3, 3), math.nan)})

    @pytest.mark.parametrize(
        ("name", "shape", "expected"),
        [
            ("visible", (2, 3, 4), r"\(2, 3, 3\)"),
            ("diagonal", (2, 4), r"\(2, 3\)"),
            ("attention", (1, 8, 3, 3), r"\(2, head, 3, 3\)"),
        ],
    )
    def test_shapes(self, name, shape, expected):
        with pytest.raises(InputError, match=rf"{name} has shape .* norms of shape \(2, 3, 3\) need {expected}"):
            check_shapes((2, 3, 3), {name: torch.ones(shape)})
        check_shapes((2, 3, 3), {"attended": torch.ones(1, 1, 3, 3), "attention": torch.ones(2, 8, 3, 3)})

    def test_unknown_path(self):
        with pytest.raises(InputError, match=r"no norms of the path 'query'; this map holds value, key\."):
            example().sink_ratio(path="query")
        with pytest.raises(InputError, match="measure with paths=True"):
            SensitivityMap(torch.ones(1, 2, 2)).path("value")

    def test_no_attention(self):
        with pytest.raises(InputError, match="holds no attention weights"):
            SensitivityMap(torch.ones(1, 2, 2)).diagonal_attention()

    def test_no_residual_removed_diagonal(self):
        with pytest.raises(InputError, match="residual-removed statistics need"):
            SensitivityMap(torch.ones(1, 2, 2)).sink_ratio(residual_removed=True)

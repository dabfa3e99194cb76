"""Statistics without a map, and maps of some rows, against the whole map."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import DIM, LENGTH, SAMPLES, attention_cases
from largest import Largest
from oracles import draw, norm_map
from tolerances import assert_close
from torch import nn

from sensitivity import SensitivityMap, SensitivityStatistics, SoftmaxAttention, backends, measure
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.jacobian import memory, tile_sizes
from sensitivity.layers import DiagonalDropout, TemporalAttention

TOKENS = draw(3, 7, 8)
CASES = attention_cases()
NAMES = [case.name for case in CASES]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a row or two of one sample, so that everything is put together from many."""
    monkeypatch.setattr(tile_sizes, "tile_size", lambda attention, length: 2 * length)
    monkeypatch.setattr(backends, "_BLOCK", 2 * 3 * 7)


def parts(found):
    """Every set of sums that a measurement has, with what the statistics of it are called with."""
    heads = 0 if found.heads is None else len(found.heads) if isinstance(found.heads, tuple) else found.heads.shape[1]
    return [{}, *({"path": name} for name in found.path_names), *({"head": head} for head in range(heads))]


def assert_same(one, other):
    """The same statistics with everything that hangs on them, to 1e-12."""
    assert (float(one), one.null) == pytest.approx((float(other), other.null), rel=1e-12, nan_ok=True)
    assert (one.where, one.note) == (other.where, other.note)
    for name in ("rows", "samples", "heads"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert_close(left, right, "blocks")


def assert_same_statistics(statistics, whole):
    assert parts(statistics) == parts(whole)
    for part in parts(whole):
        for removed in (False, True)[: 1 + (whole.has_removed and not part)]:
            for name in ("sink_ratio", "parroting_index", "diagonal_mean"):
                assert_same(getattr(statistics, name)(removed, **part), getattr(whole, name)(removed, **part))
            for name in ("lag_profile", "primacy_profile"):
                one, other = getattr(statistics, name)(removed, **part), getattr(whole, name)(removed, **part)
                assert (one[one.dims[0]] == other[one.dims[0]]).all()
                assert_close(torch.from_numpy(one.values), torch.from_numpy(other.values), "blocks")
        assert_same(statistics.off_diagonal_mean(**part), whole.off_diagonal_mean(**part))
    if whole.path_names:
        for side, shares in whole.path_shares().items():
            for name, share in shares.items():
                assert_same(statistics.path_shares()[side][name], share)
    if whole.has_attention:
        for name in ("diagonal_attention", "key_sink", "row_entropy"):
            assert_same(getattr(statistics, name)(), getattr(whole, name)())
    assert list(statistics.summary()) == list(whole.summary())
    assert repr(statistics).splitlines()[2:] == repr(whole).splitlines()[2:]  # after the headline and the engine


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
class TestAttention:
    def test_statistics_are_those_of_the_map(self, case):
        whole = measure(case.attention, case.tokens, paths=True, heads=True)
        statistics = measure(case.attention, case.tokens, paths=True, heads=True, keep="statistics")
        assert isinstance(statistics, SensitivityStatistics)
        assert_same_statistics(statistics, whole)

    def test_some_rows_are_those_of_the_map(self, case):
        whole, times = measure(case.attention, case.tokens, paths=True, heads=True), [4, 0, 3]
        some = measure(case.attention, case.tokens, paths=True, heads=True, rows=times)
        assert some.query_times.tolist() == times
        assert (some.length, some.keys, some.square) == (LENGTH, LENGTH, True)
        assert_close(some.norms, whole.norms[:, times], "blocks")
        assert_close(some.diagonal, whole.diagonal[:, times], "blocks")
        assert_close(some.heads, whole.heads[:, :, times], "blocks")
        assert_close(some.attention, whole.attention[:, :, times], "blocks")
        assert torch.equal(some.visible, whole.visible[:, times])
        for name, norms in whole.paths.items():
            assert_close(some.paths[name], norms[:, times], "blocks")
        statistics = measure(case.attention, case.tokens, paths=True, heads=True, rows=times, keep="statistics")
        assert_same_statistics(statistics, some)

    def test_rows_left_out_count_nowhere(self, case):
        """The statistics of some rows against those of a whole map in which the others are hidden."""
        whole, times = measure(case.attention, case.tokens), [1, 5]
        hidden = torch.zeros_like(whole.visible)
        hidden[:, times] = whole.visible[:, times]
        same = SensitivityMap(whole.norms, whole.diagonal, visible=hidden)
        some = measure(case.attention, case.tokens, rows=times)
        for removed in (False, True):
            assert some.sink_ratio(removed) == pytest.approx(same.sink_ratio(removed), rel=1e-10, nan_ok=True)
            assert some.parroting_index(removed) == pytest.approx(same.parroting_index(removed), rel=1e-10)
            for name in ("lag_profile", "primacy_profile"):
                found, expected = (torch.from_numpy(getattr(of, name)(removed).values) for of in (some, same))
                assert_close(found, expected, "maps")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("norm", ["rms", "spectral"])
def test_other_norms(norm):
    layer = SoftmaxAttention.random(8, 2, dtype=torch.float64, causal=True)
    whole = measure(layer, TOKENS, norm=norm, paths=True)
    assert_same_statistics(measure(layer, TOKENS, norm=norm, paths=True, keep="statistics"), whole)
    assert_close(measure(layer, TOKENS, norm=norm, rows=[6, 2]).norms, whole.norms[:, [6, 2]], "spectral")


def lstm():
    torch.manual_seed(0)
    return nn.LSTM(8, 8, batch_first=True).double().eval()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).double().eval()


def longer(tokens):
    return torch.cat([tokens.cumsum(dim=1), tokens.square()], dim=1)


PADDING = torch.zeros(3, 7, dtype=torch.bool)
PADDING[0, :2], PADDING[2, 5:] = True, True
GENERIC = {
    "causal": (lstm(), {}),
    "both ways": (encoder(), {}),
    "no residual": (lstm(), {"residual": False}),
    "padding": (encoder(), {"padding": PADDING}),
    "other length": (longer, {}),
    "other length, padding": (longer, {"padding": PADDING}),
    "other width": (lambda tokens: tokens[..., :3].cumsum(dim=1), {}),
    "spectral": (lstm(), {"norm": "spectral"}),
    "probes": (lstm(), {"probes": 4}),
    "attention": (SoftmaxAttention.random(8, 2, dtype=torch.float64, causal=True), {"backend": "autodiff"}),
}


@pytest.mark.parametrize(("model", "options"), GENERIC.values(), ids=list(GENERIC))
class TestAnyModel:
    def test_statistics_are_those_of_the_map(self, model, options, monkeypatch):
        if "probes" not in options:  # probes are drawn anew for every block of rows
            monkeypatch.setattr(backends, "_BLOCK", 2 * 3 * 7)
        whole, statistics = measure(model, TOKENS, **options), measure(model, TOKENS, **options, keep="statistics")
        if whole.square:
            assert_same_statistics(statistics, whole)
        assert_close(
            torch.from_numpy(statistics.primacy_profile().values),
            torch.from_numpy(whole.primacy_profile().values),
            "blocks",
        )
        assert statistics.sums().visible_pairs() == int(whole.visible.sum())
        assert statistics.notes == whole.notes

    def test_some_rows_are_those_of_the_map(self, model, options):
        if "probes" in options:
            return
        whole, times = measure(model, TOKENS, **options), [5, 1, 2]
        some = measure(model, TOKENS, **options, rows=times)
        assert_close(some.norms, whole.norms[:, times], "blocks")
        assert torch.equal(some.visible, whole.visible[:, times])
        assert (some.diagonal is None) == (whole.diagonal is None)
        if some.diagonal is not None:
            assert_close(some.diagonal, whole.diagonal[:, times], "blocks")
        if whole.square:
            assert_same_statistics(measure(model, TOKENS, **options, rows=times, keep="statistics"), some)


def test_as_many_rows_as_inputs_of_a_longer_output_have_no_diagonal():
    found = measure(longer, TOKENS, rows=range(7))
    assert found.diagonal is None
    assert (found.length, found.square) == (14, False)
    assert_close(found.norms, norm_map(longer, TOKENS)[:, :7], "maps")


def test_every_row_in_another_order_keeps_its_diagonal():
    order = [6, 5, 4, 3, 2, 1, 0]
    whole, turned = measure(lstm(), TOKENS), measure(lstm(), TOKENS, rows=order)
    assert_close(turned.diagonal, whole.diagonal[:, order], "blocks")
    assert turned.sink_ratio() == pytest.approx(float(whole.sink_ratio()), rel=1e-12)


def test_the_last_row_alone_says_nothing_of_later_inputs():
    found = measure(encoder(), TOKENS, rows=[6])
    assert found.notes == []
    assert found.visible.all()


@pytest.mark.parametrize("keep", ["map", "statistics"])
@pytest.mark.parametrize("block", [2 * 3 * 7, 2**22])
@pytest.mark.parametrize("rows", [None, [1, 4]])
def test_rows_that_depend_on_nothing_are_warned_of_once(keep, block, rows, monkeypatch):
    monkeypatch.setattr(backends, "_BLOCK", block)
    with pytest.warns(SensitivityWarning, match="the output does not depend on the tokens") as caught:
        measure(lambda tokens: 0 * tokens, TOKENS, keep=keep, rows=rows)
    assert len(caught) == 1


def test_draws_of_a_model_in_train_mode_are_the_same_in_every_row(monkeypatch):
    torch.manual_seed(0)
    layer = TemporalAttention(8, 2, diagonal=DiagonalDropout(0.5)).double().train()
    whole = measure(layer, TOKENS, stochastic=3, seed=1)
    some = measure(layer, TOKENS, stochastic=3, seed=1, rows=[4, 2])
    assert_close(some.norms, whole.norms[:, [4, 2]], "blocks")
    monkeypatch.setattr(backends, "_BLOCK", 2 * 3 * 7)
    statistics = measure(layer, TOKENS, stochastic=3, seed=1, keep="statistics")
    assert statistics.sink_ratio() == pytest.approx(float(whole.sink_ratio()), rel=1e-12)


class TestRows:
    def test_are_drawn_with_the_seed_and_in_order(self):
        layer = SoftmaxAttention.random(8, 2, dtype=torch.float64)
        tokens = draw(1, 50, 8)
        drawn = [measure(layer, tokens, rows=np.int64(9), seed=seed).query_times for seed in (0, 0, 1)]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        assert len(drawn[0].unique()) == 9
        assert torch.equal(drawn[0], drawn[0].sort().values)
        assert measure(layer, tokens, rows=9).provenance["rows"] == 9
        assert "rows" not in measure(layer, tokens).provenance

    def test_padding_of_every_sample_is_not_drawn(self):
        padding = torch.zeros(3, 7, dtype=torch.bool)
        padding[:, :4] = True
        found = measure(SoftmaxAttention.random(8, 2, dtype=torch.float64), TOKENS, padding=padding, rows=3)
        assert found.query_times.tolist() == [4, 5, 6]
        with pytest.raises(InputError, match="rows=4 query rows cannot be drawn from the 3 of 7 that are not padding"):
            measure(SoftmaxAttention.random(8, 2, dtype=torch.float64), TOKENS, padding=padding, rows=4)

    @pytest.mark.parametrize("rows", [range(2, 5), (2, 3, 4), np.array([2, 3, 4]), torch.tensor([2, 3, 4])])
    def test_may_be_named_in_many_ways(self, rows):
        layer = SoftmaxAttention.random(8, 2, dtype=torch.float64)
        assert measure(layer, TOKENS, rows=rows).query_times.tolist() == [2, 3, 4]

    @pytest.mark.parametrize("model", [SoftmaxAttention.random(8, 2, dtype=torch.float64), lstm()])
    @pytest.mark.parametrize(
        ("rows", "text"),
        [
            (0, "rows=0 query rows cannot be drawn from 7; ask for 1 to 7, or leave rows out to measure them all"),
            (8, "rows=8 query rows cannot be drawn from 7"),
            ([1, 7], "rows name the query time 7, but there are times 0 to 6"),
            ([-1], "rows name the query time -1, but there are times 0 to 6"),
            ([2, 3, 2], "rows name the query time 2 more than once; name each time once"),
            ([], r"rows must be a number of query rows, or the query times of the rows that are wanted, not \[\]"),
            (0.5, "rows must be a number of query rows, or the query times of the rows that are wanted, not 0.5"),
            (True, "rows must be a number of query rows, .* not True"),
            ("all", "rows must be a number of query rows, .* not 'all'"),
            (torch.ones(7, dtype=torch.bool), "rows must be a number of query rows, .* not tensor"),
        ],
    )
    def test_that_there_are_not_are_refused(self, model, rows, text):
        with pytest.raises(InputError, match=text):
            measure(model, TOKENS, rows=rows)


class TestMemory:
    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"padding": torch.arange(400)[None] > 390}])
    def test_no_tensor_grows_with_the_square_of_the_length(self, options, monkeypatch):
        monkeypatch.setattr(tile_sizes, "tile_size", lambda attention, length: 8 * length)
        layer, tokens = SoftmaxAttention.random(8, 2, dtype=torch.float64, **options), draw(1, 400, 8)
        with Largest() as largest:
            found = measure(layer, tokens, keep="statistics", paths=True, heads=True)
            repr(found)
            found.summary()
        assert largest.numbers < 400**2 / 4
        with Largest() as largest:
            measure(layer, tokens, rows=16)
        assert largest.numbers < 400**2 / 4
        with Largest() as largest:
            measure(layer, tokens)
        assert largest.numbers >= 400**2

    @pytest.mark.parametrize("options", [{}, {"causal": True}])
    def test_a_long_map_is_held_once_and_looked_at_in_parts(self, options):
        found = measure(SoftmaxAttention.random(8, 1, **options), draw(1, 1600, 8).float())
        assert found.attention is not None
        with Largest() as largest:
            repr(found)
            found.summary()
            found.lag_profile()
        assert largest.numbers < 1600**2 / 3

    layer = SoftmaxAttention.random(DIM, 2, dtype=torch.float64)

    def test_weights_that_do_not_fit_are_summed_up(self):
        tokens = draw(SAMPLES, 400, DIM)
        full = measure(self.layer, tokens)
        small = measure(self.layer, tokens, budget=12 * 2**20)
        assert (full.attention is None, small.attention is None) == (False, True)
        assert small.notes == [
            "attention weights (4.88 MiB) are not kept, only their statistics; budget= sets the limit"
        ]
        for name in ("diagonal_attention", "key_sink", "row_entropy"):
            assert_same(getattr(small, name)(), getattr(full, name)())
        assert_close(small.norms, full.norms, "maps")

    def test_refusals_name_the_way_out(self):
        tokens = draw(SAMPLES, LENGTH, DIM)
        with pytest.raises(InputError, match=r"keep='statistics', which holds no map, or some query rows with rows="):
            measure(self.layer, tokens, budget=100)
        with pytest.raises(
            InputError, match=r"statistics of 2 samples and 6 time steps needs about .* 100 B; take fewer"
        ):
            measure(self.layer, tokens, budget=100, keep="statistics")
        with pytest.raises(InputError, match=r"keep='statistics' of measure\(\)"):
            measure(encoder(), TOKENS, budget=100)

    def test_a_budget_too_small_for_the_map_is_enough_for_its_statistics_and_for_some_rows(self):
        tokens = draw(1, 2000, DIM)
        with pytest.raises(InputError, match="1 map of 1 samples, 2000 x 2000 pairs each, needs about"):
            measure(self.layer, tokens, budget=32 * 2**20)
        statistics = measure(self.layer, tokens, budget=32 * 2**20, keep="statistics")
        assert 0 < statistics.sink_ratio() < math.inf
        assert measure(self.layer, tokens, budget=32 * 2**20, rows=16).norms.shape == (1, 16, 2000)

    def test_only_a_small_budget_shrinks_tiles(self):
        layer = SoftmaxAttention.random(64, 4)
        tokens = torch.zeros(1, 1, 64).expand(1, 10**6, 64)  # whose features take more than any tile
        usual = tile_sizes.tile_size(layer, 10**6)
        assert tile_sizes.fitting_size(layer, tokens, "frobenius", 4 * 2**30) == usual
        assert tile_sizes.fitting_size(layer, tokens, "frobenius", 2**30) == usual // 4

    def test_a_mask_that_counts_what_attends_is_held_once(self):
        found = measure(SoftmaxAttention.random(8, 2, causal=True), TOKENS.float())
        assert found.attended.data_ptr() == found.visible.data_ptr()
        assert found.visible.stride(0) == 0


def test_keep_is_checked():
    with pytest.raises(InputError, match="keep must be one of map, statistics, not 'rows'"):
        measure(SoftmaxAttention.random(8, 2), TOKENS.float(), keep="rows")


def test_statistics_refuse_what_was_not_measured():
    found = measure(SoftmaxAttention.random(8, 2), TOKENS.float(), keep="statistics")
    with pytest.raises(InputError, match="no norms of the path 'value'; measure with paths=True"):
        found.sink_ratio(path="value")
    with pytest.raises(InputError, match="no norms of the head 0; measure with heads=True"):
        found.sink_ratio(head=0)
    with pytest.raises(InputError, match="no path norms to take shares of; measure with paths=True"):
        found.path_shares()
    with pytest.raises(InputError, match="holds no attention weights"):
        measure(lstm(), TOKENS, keep="statistics").key_sink()
    found = measure(SoftmaxAttention.random(8, 2), TOKENS.float(), keep="statistics", paths=True, heads=True)
    with pytest.raises(InputError, match="no norms of the head 2; this map holds 2 heads, counted from 0"):
        found.sink_ratio(head=2)
    with pytest.raises(InputError, match="path='key' and head=1 together name no map that is measured"):
        found.sink_ratio(path="key", head=1)


@pytest.mark.parametrize("options", [{}, {"keep": "statistics"}, {"paths": True, "heads": True}])
def test_what_is_free_is_asked_for_where_it_matters_only(options, monkeypatch):
    """Reading it takes longer than the rest of a short measurement's bookkeeping."""
    asked = []
    monkeypatch.setattr(memory, "available", lambda device: asked.append(device) or 2**33)
    layer = SoftmaxAttention.random(DIM, 2, dtype=torch.float64)
    measure(layer, draw(1, 100, DIM), **options)
    assert asked == []
    monkeypatch.setattr(memory, "LITTLE", 2**20)
    found = measure(layer, draw(1, 100, DIM), **options)
    assert asked == [torch.device("cpu")]
    assert found.notes == []


def test_little_is_granted_and_much_is_not(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 2**29)
    cpu = torch.device("cpu")
    assert memory.budget(None, cpu, memory.LITTLE) == memory.LITTLE
    assert memory.budget(None, cpu, memory.LITTLE + 1) == memory.budget(None, cpu) == 2**28
    assert memory.budget(100, cpu, 10) == 100

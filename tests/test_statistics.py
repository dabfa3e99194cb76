"""Statistics against sums written out pair by pair."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from oracles import draw
from tolerances import assert_close

from sensitivity import statistics
from sensitivity.errors import InputError
from sensitivity.statistics import AttentionStatistics, RowStatistics, Statistic

SAMPLES, T = 3, 7


def masks() -> dict[str, torch.Tensor | None]:
    causal = torch.ones(T, T, dtype=torch.bool).tril().expand(SAMPLES, T, T)
    real = torch.arange(T) >= torch.tensor([0, 2, 5])[:, None]  # padded on the left, differently in every sample
    padded = real[:, :, None] & real[:, None, :]
    return {"full": None, "causal": causal, "padded": padded, "both": causal & padded}


@pytest.fixture(params=list(masks()))
def mask(request):
    return masks()[request.param]


@pytest.fixture
def norms():
    return draw(SAMPLES, T, T).abs() + 0.1


def pairs(norms, visible):
    """The mean map as a dict {(i, j): value} of its visible pairs."""
    found = {}
    for i in range(norms.shape[1]):
        for j in range(norms.shape[2]):
            values = [float(norms[s, i, j]) for s in range(len(norms)) if visible is None or visible[s, i, j]]
            if values:
                found[i, j] = sum(values) / len(values)
    return found


def average(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def with_diagonal(norms, diagonal):
    changed = norms.clone()
    changed[:, range(T), range(T)] = diagonal
    return changed


def hide(norms, visible):
    """What stands at hidden pairs must not matter."""
    return norms if visible is None else norms.masked_fill(~visible, math.nan)


class TestSinkRatio:
    def test_is_the_mean_of_the_diagonal_over_the_mean_of_the_rest(self, norms, mask):
        found = pairs(norms, mask)
        expected = average(v for (i, j), v in found.items() if i == j) / average(
            v for (i, j), v in found.items() if i != j
        )
        statistic = statistics.sink_ratio(hide(norms, mask), mask)
        assert statistic == pytest.approx(expected, rel=1e-12)
        assert (statistic.null, statistic.excess) == (1.0, pytest.approx(expected - 1))

    def test_residual_removed_replaces_the_diagonal(self, norms, mask):
        diagonal = draw(SAMPLES, T, seed=5).abs()
        changed = statistics.sink_ratio(with_diagonal(norms, diagonal), mask)
        assert statistics.sink_ratio(norms, mask, diagonal) == pytest.approx(float(changed), rel=1e-12)

    def test_of_one_sample_is_its_own_per_sample_value(self, norms, mask):
        together = statistics.sink_ratio(norms, mask)
        for s in range(SAMPLES):
            alone = statistics.sink_ratio(norms[s : s + 1], None if mask is None else mask[s : s + 1])
            assert float(together.samples[s]) == pytest.approx(float(alone), rel=1e-12)

    def test_one_time_step_has_nothing_off_the_diagonal(self):
        statistic = statistics.sink_ratio(torch.ones(2, 1, 1))
        assert math.isnan(statistic)
        assert statistic.note == "no off-diagonal pair is visible (T=1)"

    def test_a_map_that_is_zero_off_the_diagonal_has_an_infinite_ratio(self):
        assert statistics.sink_ratio(torch.eye(4)[None]) == math.inf

    def test_a_map_of_zeros_has_none(self):
        statistic = statistics.sink_ratio(torch.zeros(1, 4, 4))
        assert math.isnan(statistic)
        assert statistic.note == "every visible norm is zero"

    def test_half_precision_is_summed_in_double(self):
        norms = torch.full((1, 512, 512), 0.1, dtype=torch.float16)
        assert statistics.sink_ratio(norms) == pytest.approx(1.0, rel=1e-12)


class TestParrotingIndex:
    def test_is_the_mean_share_of_the_diagonal(self, norms, mask):
        found = pairs(norms, mask)
        rows = [i for i in range(T) if (i, i) in found]
        shares = [found[i, i] / sum(found[i, j] for j in range(T) if (i, j) in found) for i in rows]
        nulls = [1 / sum((i, j) in found for j in range(T)) for i in rows]
        statistic = statistics.parroting_index(hide(norms, mask), mask)
        assert statistic == pytest.approx(average(shares), rel=1e-12)
        assert statistic.null == pytest.approx(average(nulls), rel=1e-12)
        assert_close(statistic.rows[rows], torch.tensor(shares, dtype=torch.float64), "maps")

    def test_a_uniform_map_gives_the_null_value(self, mask):
        statistic = statistics.parroting_index(torch.full((SAMPLES, T, T), 0.3), mask)
        assert statistic.excess == pytest.approx(0.0, abs=1e-9)

    def test_rows_of_zeros_have_no_share(self):
        norms = torch.ones(1, 3, 3)
        norms[:, 1] = 0.0
        statistic = statistics.parroting_index(norms)
        assert statistic == pytest.approx(1 / 3)
        assert statistic.rows.isnan().tolist() == [False, True, False]

    def test_one_time_step_is_all_parroting(self):
        statistic = statistics.parroting_index(torch.ones(1, 1, 1))
        assert (float(statistic), statistic.null, statistic.excess) == (1.0, 1.0, 0.0)


class TestProfiles:
    def test_lag_profile_is_the_mean_along_diagonals(self, norms, mask):
        found = pairs(norms, mask)
        expected = [average(v for (i, j), v in found.items() if i - j == lag) for lag in range(1 - T, T)]
        assert_close(
            statistics.lag_profile(hide(norms, mask), mask), torch.tensor(expected, dtype=torch.float64), "maps"
        )

    def test_primacy_profile_is_the_mean_over_queries(self, norms, mask):
        found = pairs(norms, mask)
        expected = [average(v for (_, j), v in found.items() if j == key) for key in range(T)]
        assert_close(
            statistics.primacy_profile(hide(norms, mask), mask), torch.tensor(expected, dtype=torch.float64), "maps"
        )

    def test_residual_removed_profiles(self, norms, mask):
        diagonal = draw(SAMPLES, T, seed=5).abs()
        changed = with_diagonal(norms, diagonal)
        for profile in (statistics.lag_profile, statistics.primacy_profile):
            assert_close(profile(norms, mask, diagonal), profile(changed, mask), "maps")

    def test_per_sample_profiles(self, norms):
        for profile in (statistics.lag_profile, statistics.primacy_profile):
            assert_close(
                profile(norms, per_sample=True), torch.stack([profile(norms[s : s + 1]) for s in range(3)]), "maps"
            )

    def test_primacy_profile_of_a_map_that_is_not_square(self):
        norms = draw(2, 3, 5).abs()
        assert_close(statistics.primacy_profile(norms), norms.mean(dim=(0, 1)), "maps")

    def test_one_time_step(self):
        assert statistics.lag_profile(torch.full((1, 1, 1), 2.0)).tolist() == [2.0]


class TestRowStatistics:
    @pytest.mark.parametrize("step", [1, 3, 7])
    def test_rows_in_pieces_give_the_same_as_the_whole(self, norms, mask, step):
        diagonal = draw(SAMPLES, T, seed=5).abs()
        sums = RowStatistics(SAMPLES, T)
        for start in reversed(range(0, T, step)):
            rows = range(start, min(start + step, T))
            part = slice(rows.start, rows.stop)
            sums.update(rows, norms[:, part], None if mask is None else mask[:, part], diagonal[:, part])
        for removed in (None, diagonal):
            result = sums.finish(residual_removed=removed is not None)
            assert result.sink_ratio == pytest.approx(float(statistics.sink_ratio(norms, mask, removed)), rel=1e-12)
            expected = statistics.parroting_index(norms, mask, removed)
            assert result.parroting_index == pytest.approx(float(expected), rel=1e-12)
            assert_close(result.lag_profile, statistics.lag_profile(norms, mask, removed), "maps")
            assert_close(result.primacy_profile, statistics.primacy_profile(norms, mask, removed), "maps")

    def test_a_long_map_is_summed_in_blocks(self):
        norms = draw(1, 2100, 2100).abs()  # more entries than one block holds
        off = ~torch.eye(2100, dtype=torch.bool)
        expected = norms[0].diagonal().mean() / norms[0][off].mean()
        assert statistics.sink_ratio(norms) == pytest.approx(float(expected), rel=1e-12)

    def test_refuses_rows_outside_the_map(self, norms):
        with pytest.raises(InputError, match=r"range\(6, 8\) with norms of shape .* does not fit 3 maps of 7 x 7"):
            RowStatistics(SAMPLES, T).update(range(6, 8), norms[:, :2])

    def test_refuses_visible_norms_that_are_not_finite(self, norms):
        norms[1, 4, 2] = math.nan
        with pytest.raises(InputError, match=r"norm at \(sample, query, key\) = \(1, 4, 2\) is nan; a visible pair"):
            statistics.sink_ratio(norms)

    def test_refuses_a_diagonal_that_does_not_exist(self):
        with pytest.raises(InputError, match=r"the map is 3 x 5 .* there is no diagonal"):
            statistics.sink_ratio(torch.ones(1, 3, 5))

    def test_refuses_residual_removed_without_its_norms(self, norms):
        with pytest.raises(InputError, match="residual-removed statistics need the diagonal norms"):
            RowStatistics.of(norms).finish(residual_removed=True)


@pytest.fixture
def weights(mask):
    """Softmax weights of two heads, and the pairs that attend; padded rows are zero."""
    attended = torch.ones(SAMPLES, 1, T, T, dtype=torch.bool) if mask is None else mask[:, None]
    scores = draw(SAMPLES, 2, T, T).masked_fill(~attended, -math.inf)
    return scores.softmax(-1).nan_to_num(), attended


def rows_of(weights, attended, statistic):
    """Mean over rows of the mean over samples and heads of a statistic of one row."""
    per_row = []
    for i in range(T):
        values = [
            statistic(i, weights[s, h, i], attended[s, 0, i])
            for s in range(SAMPLES)
            for h in range(weights.shape[1])
            if attended[s, 0, i].any()
        ]
        values = [value for value in values if not math.isnan(value)]
        if values:
            per_row.append(average(values))
    return average(per_row)


class TestAttention:
    def test_diagonal_mass_and_its_null(self, weights):
        statistic = statistics.diagonal_attention(*weights)
        assert statistic == pytest.approx(rows_of(*weights, lambda i, a, _: float(a[i])), rel=1e-12)
        assert statistic.null == pytest.approx(rows_of(*weights, lambda i, _, v: int(v[i]) / int(v.sum())), rel=1e-12)

    def test_entropy_is_a_share_of_the_largest(self, weights):
        def entropy(_, a, v):
            if v.sum() < 2:
                return math.nan
            return -sum(p * math.log(p) for p in a.tolist() if p > 0) / math.log(int(v.sum()))

        statistic = statistics.row_entropy(*weights)
        assert statistic == pytest.approx(rows_of(*weights, entropy), rel=1e-12)

    def test_key_sink_is_the_largest_column_mean(self, weights):
        a, attended = weights
        counts = attended.any(-1).sum(-1)
        mass = (a.sum(dim=-2) / counts[..., None]).mean(dim=(0, 1))
        statistic = statistics.key_sink(a, attended)
        assert statistic == pytest.approx(float(mass.max()), rel=1e-12)
        assert statistic.where == int(mass.argmax())

    def test_uniform_weights_give_every_null(self, weights):
        _, attended = weights
        uniform = (attended.double() / attended.sum(-1, keepdim=True).clamp(min=1)).expand(-1, 2, -1, -1)
        for function in (statistics.diagonal_attention, statistics.key_sink, statistics.row_entropy):
            assert function(uniform, attended).excess == pytest.approx(0.0, abs=1e-12), function.__name__

    def test_a_hidden_diagonal_has_null_zero(self):
        attended = ~torch.eye(T, dtype=torch.bool)[None, None]
        a = draw(1, 2, T, T).masked_fill(~attended, -math.inf).softmax(-1)
        statistic = statistics.diagonal_attention(a, attended)
        assert (float(statistic), statistic.null) == (0.0, 0.0)

    def test_a_sink_on_one_key_is_invisible_on_the_diagonal_and_the_other_way_round(self):
        column = torch.zeros(1, 1, 8, 8)
        column[..., 2] = 1.0
        assert statistics.key_sink(column).where == 2
        assert statistics.key_sink(column) == 1.0
        assert statistics.diagonal_attention(column).excess == pytest.approx(0.0)
        assert statistics.key_sink(torch.eye(8)[None, None]).excess == pytest.approx(0.0)
        assert statistics.diagonal_attention(torch.eye(8)[None, None]) == 1.0

    def test_heads_and_samples_come_apart(self, weights):
        a, attended = weights
        for function in (statistics.diagonal_attention, statistics.key_sink, statistics.row_entropy):
            whole = function(a, attended)
            for h in range(2):
                assert float(whole.heads[h]) == pytest.approx(float(function(a[:, h : h + 1], attended)), rel=1e-12)
            for s in range(SAMPLES):
                alone = function(a[s : s + 1], attended[s : s + 1])
                if function is not statistics.row_entropy:  # per sample: the mean over rows and heads at once
                    assert float(whole.samples[s]) == pytest.approx(float(alone), rel=1e-12)

    def test_rows_in_pieces_give_the_same_as_the_whole(self, weights):
        a, attended = weights
        sums = AttentionStatistics(SAMPLES, 2, T, T)
        for rows in (range(5, 7), range(0, 5)):
            part = slice(rows.start, rows.stop)
            sums.update(rows, a[:, :, part], attended[:, :, part])
        assert sums.diagonal() == statistics.diagonal_attention(a, attended)
        assert sums.entropy() == statistics.row_entropy(a, attended)
        assert sums.key_sink() == pytest.approx(float(statistics.key_sink(a, attended)), rel=1e-12)

    @pytest.mark.parametrize("function", [statistics.diagonal_attention, statistics.key_sink, statistics.row_entropy])
    def test_refuses_weights_after_dropout(self, function):
        a = torch.full((1, 2, 4, 4), 0.25, dtype=torch.float64)
        a[0, 1, 3] *= 1.1
        with pytest.raises(InputError, match=r"sample 0, head 1, row 3 sum to 1\.1, not 1: .* before dropout"):
            function(a)

    def test_accepts_half_precision_weights(self):
        a = draw(1, 1, 64, 64, dtype=torch.float32).softmax(-1).to(torch.bfloat16)
        assert 0 < statistics.diagonal_attention(a) < 1

    def test_one_time_step(self):
        one = torch.ones(1, 1, 1, 1)
        assert (statistics.diagonal_attention(one), statistics.key_sink(one)) == (1.0, 1.0)
        entropy = statistics.row_entropy(one)
        assert math.isnan(entropy)
        assert entropy.note == "no row has enough visible keys"

    def test_refuses_the_diagonal_of_cross_attention(self):
        with pytest.raises(InputError, match=r"3 x 5 .* have no diagonal"):
            statistics.diagonal_attention(torch.full((1, 1, 3, 5), 0.2))


class TestPathShares:
    def test_shares_are_mean_norms_over_their_sum(self, norms, mask):
        paths = {"value": norms, "key": norms * 3}
        shares = statistics.path_shares(paths, mask)
        for part in ("diagonal", "off_diagonal"):
            assert shares[part]["value"] == pytest.approx(0.25, rel=1e-12)
            assert shares[part]["key"] == pytest.approx(0.75, rel=1e-12)

    def test_paths_that_live_on_the_diagonal_only(self):
        paths = {"residual": torch.eye(4)[None], "value": torch.ones(1, 4, 4)}
        shares = statistics.path_shares(paths)
        assert (shares["diagonal"]["residual"], shares["off_diagonal"]["residual"]) == (0.5, 0.0)

    def test_refuses_no_paths(self):
        with pytest.raises(InputError, match=r"no path norms .* measure with paths=True"):
            statistics.path_shares({})


class TestStatistic:
    def test_is_a_float(self):
        statistic = Statistic(0.5, 0.25)
        assert (statistic * 2, f"{statistic:.2f}", str(statistic)) == (1.0, "0.50", "0.5")
        assert (statistic.mean, statistic.null, statistic.excess) == (0.5, 0.25, 0.25)

    def test_repr(self):
        assert repr(Statistic(0.5, 0.25, where=3)) == "Statistic(0.5, null=0.25, excess=0.25, where=3)"
        assert repr(Statistic(math.nan, note="T=1")) == "Statistic(nan, note='T=1')"

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
    def test_survives_copies_and_pickles(self, again):
        statistic = again(Statistic(0.5, 0.25, rows=torch.tensor([0.0, 1.0]), where=1))
        assert (float(statistic), statistic.null, statistic.where, statistic.rows.tolist()) == (
            0.5,
            0.25,
            1,
            [0.0, 1.0],
        )


def test_mean_map_counts_only_visible_samples():
    visible = torch.tensor([True, False, True, True, False, False]).reshape(2, 1, 3)
    norms = torch.tensor([[[1.0, math.nan, 2.0]], [[3.0, math.nan, 9.0]]])
    mean = statistics.mean_map(norms, visible)
    assert mean[0, [0, 2]].tolist() == [2.0, 2.0]
    assert mean[0, 1].isnan()

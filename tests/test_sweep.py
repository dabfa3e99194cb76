"""Sweeps over lengths: the same numbers as one measurement, in bounded memory, resumable."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import draw
from tolerances import assert_close

from sensitivity import InputError, SensitivityMap, SoftmaxAttention, checks, measure
from sensitivity.sweep import BOUNDS, Batch, RandomTokens, Sequences, Sweep, sweep
from sensitivity.sweep.mapped import MapSums

DOUBLE = torch.float64


def layer(seed: int = 0, dim: int = 6, heads: int = 2, **options: Any) -> SoftmaxAttention:
    return SoftmaxAttention.random(dim, heads, seed=seed, dtype=DOUBLE, **options)


def padded() -> SoftmaxAttention:
    padding = torch.zeros(5, 7, dtype=torch.bool)
    padding[1, :2] = True
    padding[3, 5:] = True
    return layer(padding=padding)


LAYERS = {
    "plain": layer(),
    "causal": layer(causal=True),
    "diagonal mask": layer(diagonal_bias=-math.inf),
    "no residual": layer(residual=False),
    "causal mask": layer(causal=True, diagonal_bias=-math.inf, biases=True),
    "penalty": layer(diagonal_bias=-1.5),
    "length penalty": layer(diagonal_bias=-1.5, diagonal_length=4),
    "gate": layer(residual=0.4),
}


def expected(found: SensitivityMap) -> dict[str, float]:
    """The statistics of a whole measurement, by the names that a sweep gives them."""
    one = found.summary()
    mean = {name: found.mean(name) for name in found.paths}
    seen = found.visible.any(dim=0)
    off = seen & ~torch.eye(found.length, dtype=torch.bool)
    one |= {f"off_diagonal_{name}": float(mean[name][off].mean()) for name in ("value", "key")}
    one |= {f"diagonal_{name}": float(values.diagonal()[seen.diagonal()].mean()) for name, values in mean.items()}
    return one


@pytest.mark.parametrize("norm", ["frobenius", "rms"])
@pytest.mark.parametrize("attention", LAYERS.values(), ids=LAYERS)
def test_the_statistics_are_those_of_one_measurement(attention: SoftmaxAttention, norm: Any) -> None:
    tokens = draw(5, 7, 6, seed=3)

    def batches(_: int) -> Iterator[Batch]:
        for part, share in ((slice(0, 2), 0.4), (slice(2, 5), 1.0)):
            yield Batch({"one": Sequences(attention, tokens[part], torch.arange(5)[part])}, share)

    record = sweep(batches, [7], norm=norm, bounds=()).record("one")
    whole = measure(attention, tokens, paths=True, norm=norm)
    wanted = expected(whole)
    for name, statistic in record.statistics.items():
        assert float(statistic) == pytest.approx(wanted[name], rel=1e-10, nan_ok=True), name
        if f"{name}_null" in wanted:
            assert statistic.null == pytest.approx(wanted[f"{name}_null"], rel=1e-10), name
    samples = whole.sink_ratio(residual_removed=True).samples
    torch.testing.assert_close(record.statistics["sink_ratio_residual_removed"].samples, samples)
    torch.testing.assert_close(record.profiles["lag"], torch.from_numpy(whole.lag_profile().to_numpy()), equal_nan=True)
    primacy = torch.from_numpy(whole.primacy_profile().to_numpy())
    torch.testing.assert_close(record.profiles["primacy"], primacy, equal_nan=True)


def test_maps_are_means_over_the_samples() -> None:
    attention, tokens = layer(causal=True), draw(4, 6, 6)
    found = sweep(lambda _: {"one": (attention, tokens)}, [6], bounds=()).map("one")
    whole = measure(attention, tokens, paths=True)
    torch.testing.assert_close(found.norms[0], whole.mean(), equal_nan=True)
    for name in whole.paths:
        torch.testing.assert_close(found.paths[name][0][whole.visible[0]], whole.mean(name)[whole.visible[0]])
    assert torch.equal(found.visible[0], whole.visible[0])
    assert float(found.sink_ratio(True)) == pytest.approx(float(whole.sink_ratio(True)))
    assert float(found.diagonal_attention()) == pytest.approx(float(whole.diagonal_attention()))


def test_padded_positions_are_left_out() -> None:
    attention, tokens = padded(), draw(5, 7, 6)
    record = sweep(lambda _: {"one": (attention, tokens)}, [7], bounds=()).record("one")
    whole = measure(attention, tokens, paths=True)
    for name in ("off_diagonal", "sink_ratio", "parroting_index_residual_removed"):
        assert float(record.statistics[name]) == pytest.approx(whole.summary()[name], rel=1e-10), name
    torch.testing.assert_close(record.statistics["off_diagonal"].samples, whole.sums().off_diagonal().samples)
    each = whole.diagonal_attention().samples
    torch.testing.assert_close(record.statistics["diagonal_attention"].samples, each)
    assert float(record.statistics["diagonal_attention"]) == pytest.approx(float(each.mean()))


def test_tiles_of_a_long_sequence_join_to_the_same_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    from sensitivity.jacobian import closed_form

    attention, tokens = layer(), draw(3, 20, 6)
    whole = sweep(lambda _: {"one": (attention, tokens)}, [20], bounds=()).record("one").statistics
    tiles = closed_form.tiles
    monkeypatch.setattr(closed_form, "tiles", lambda *args, **options: tiles(*args, **options, size=200))
    parts = sweep(lambda _: {"one": (attention, tokens)}, [20], bounds=()).record("one").statistics
    for name, statistic in whole.items():
        assert float(parts[name]) == pytest.approx(float(statistic), rel=1e-12), name


def test_half_precision_is_measured_in_float32() -> None:
    sums = MapSums("one", 5, "frobenius")
    attention, tokens = layer().to(dtype=torch.bfloat16), draw(2, 5, 6).bfloat16()
    sums.update(attention, tokens)
    wanted = measure(attention.to(dtype=torch.float32), tokens.float()).summary()["sink_ratio"]
    assert float(sums.finish().statistics["sink_ratio"]) == pytest.approx(wanted, rel=1e-5)


# -- lengths, fits and units -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep(RandomTokens({"a": layer(0), "b": layer(1, causal=True)}, samples=5), [4, 8, 16, 32], keep=(8,))


def test_a_shorter_random_sequence_is_the_head_of_the_longer_one() -> None:
    source = RandomTokens(layer(), samples=3, seed=7)
    short, long = (torch.cat([batch.layers["attention"].tokens for batch in source(T)]) for T in (5, 9))
    assert torch.equal(short, long[:, :5])
    assert not torch.equal(short[0], short[1])
    other = next(iter(RandomTokens(layer(), samples=3, seed=8)(5))).layers["attention"].tokens
    assert not torch.equal(short, other)


def test_weak_logits_dilute_as_one_over_length() -> None:
    found = sweep(RandomTokens(layer(gain=0.3), samples=6), [16, 32, 64, 128], bounds=())
    off, on = found.decay("attention"), found.decay("attention", "diagonal")
    assert off is not None
    assert on is not None
    assert off.exponent == pytest.approx(1, abs=0.02)
    assert off.interval[0] < off.exponent < off.interval[1]
    assert on.exponent == pytest.approx(0, abs=0.02)
    longest = found.decay("attention", lengths=[16, 32, 64])
    assert longest is None


def test_a_name_that_no_statistic_has_is_refused(found: Sweep) -> None:
    """It would look like a statistic without enough lengths."""
    for ask in (lambda: found.decay("a", "off-diagonal"), lambda: found.statistic("a", "off-diagonal")):
        with pytest.raises(InputError, match=r"unknown statistic 'off-diagonal'; a has off_diagonal, diagonal, sink_r"):
            ask()
    with pytest.raises(InputError, match="unknown layer 'c'"):
        found.statistic("c", "diagonal")
    wide = SoftmaxAttention(*(draw(*shape).float() for shape in ((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 5, 2))))
    narrow = sweep(RandomTokens(wide, samples=3), [4, 8, 16, 32], bounds=())
    assert narrow.decay("attention", "diagonal_residual_removed") is None  # a name, of what this layer has not
    assert all(math.isnan(value) for value in narrow.statistic("attention", "sink_ratio_residual_removed").values())


def test_copies_within_a_unit_do_not_sharpen_the_interval() -> None:
    attention = layer()
    tokens = {T: draw(6, T, 6, seed=T) for T in (4, 8, 16, 32)}

    def source(copies: int) -> Any:
        groups = torch.arange(6).repeat_interleave(copies)
        return lambda T: {"one": (attention, tokens[T].repeat_interleave(copies, dim=0), groups)}

    plain = sweep(source(1), list(tokens), bounds=()).decay("one")
    copied = sweep(source(4), list(tokens), bounds=())
    assert plain is not None
    again = copied.decay("one")
    assert again is not None
    assert copied.record("one").units == 6
    assert again.interval == pytest.approx(plain.interval, rel=1e-9)


def test_only_units_that_every_length_has_are_fitted() -> None:
    attention = layer()

    def source(length: int) -> dict[str, Any]:
        groups = torch.tensor([0, 1, 2]) if length < 8 else torch.tensor([1, 2, 3])
        return {"one": (attention, draw(3, length, 6, seed=length), groups)}

    found = sweep(source, [4, 6, 8, 12], bounds=())
    fit = found.decay("one")
    assert fit is not None
    values = [[found.record("one", T).by_unit("off_diagonal")[unit] for T in (4, 6, 8, 12)] for unit in (1, 2)]
    from sensitivity.fit import decay_exponent

    assert fit.exponent == decay_exponent([4, 6, 8, 12], values).exponent


def test_fewer_than_four_lengths_have_no_exponent() -> None:
    found = sweep(RandomTokens(layer(), samples=2), [1, 4, 8, 16], bounds=())
    assert found.decay("attention") is None
    assert found.summary()["layers"][0]["decay"]["off_diagonal"] is None
    assert found.decay("attention", "diagonal") is not None
    assert sweep(RandomTokens(layer(), samples=2), [4, 8, 16], bounds=()).summary()["layers"][0]["decay"] is None


def test_one_time_step_gives_strict_json() -> None:
    found = sweep(RandomTokens(layer(), samples=2), [1])
    entry = json.loads(json.dumps(found.summary(), allow_nan=False))["layers"][0]
    assert entry["sink_ratio"] == {"raw": None, "residual_removed": None}
    assert entry["parroting_index"]["mean"] == entry["parroting_index"]["null"] == 1
    assert entry["diagonal_attention"] == {"mean": 1, "null": 1}
    assert entry["row_entropy"] is None


def test_the_longest_and_the_kept_maps_stay(found: Sweep) -> None:
    assert found.kept("a") == (8, 32)
    assert found.map("b", 8).length == 8
    with pytest.raises(InputError, match=r"the map of length 16 was not kept; kept are: 8, 32\."):
        found.map("a", 16)
    with pytest.raises(InputError, match=r"unknown layer 'c'; this sweep has a, b\."):
        found.record("c")
    with pytest.raises(InputError, match=r"length 5 was not measured; this sweep has 4, 8, 16, 32\."):
        found.record("a", 5)


def test_the_summary_has_what_is_promised(found: Sweep) -> None:
    entries = found.summary()["layers"]
    assert [entry["name"] for entry in entries] == ["a", "b"]
    first = entries[0]
    assert first["length"] == 32
    assert set(first["sink_ratio"]) == {"raw", "residual_removed"}
    assert {"mean", "null"} <= set(first["parroting_index"])
    assert first["parroting_index"]["null"] == pytest.approx(1 / 32)
    assert first["decay"]["off_diagonal"]["exponent"] == found.decay("a").exponent
    assert len(first["decay"]["diagonal"]["interval"]) == 2
    assert [one["length"] for one in first["per_length"]] == [4, 8, 16, 32]
    local = first["bounds"]["local"]
    assert local["violations"] == 0
    assert local["blocks"] == sum(one["bounds"]["local"]["blocks"] for one in first["per_length"])
    assert 0 < local["tightness"] <= 1
    assert local["tightness"] == first["per_length"][-1]["bounds"]["local"]["tightness"]


def test_a_sweep_reads_as_text(found: Sweep) -> None:
    text = repr(found)
    assert text.startswith("Sweep: a, b; T=4, 8, 16, 32; frobenius norm")
    assert "exponent" in text


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_no_bound_is_violated_and_each_has_a_verdict(found: Sweep) -> None:
    for record in found.records.values():
        assert tuple(record.bounds) == BOUNDS
        for verdict in record.bounds.values():
            assert verdict.violations == 0, verdict
            assert verdict.applies or verdict.reason
            assert not verdict.applies or verdict.closest <= 1 + 1e-6
        assert record.bounds["local"].slack >= 1
        assert record.bounds["expected"].slack >= 1


def test_the_bound_on_the_whole_map_is_left_out_where_that_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensitivity.sweep.bounds.WHOLE_MAP", 47)
    found = sweep(RandomTokens(layer(), samples=2), [4, 8], bounds=["lipschitz"])
    assert found.record("attention", 4).bounds["lipschitz"].applies
    large = found.record("attention", 8).bounds["lipschitz"]
    assert not large.applies
    assert large.reason == "not checked: the whole Jacobian of a sequence has 48 rows, over 47"


def test_a_wrong_bound_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from sensitivity.bounds import evaluate

    right = evaluate.local

    def halved(problem: Any) -> Any:
        found = right(problem)
        return dataclasses.replace(found, bound=found.bound / 2)

    monkeypatch.setitem(evaluate.EVALUATE, "local", (halved, ()))
    found = sweep(RandomTokens(layer(), samples=2), [6], bounds=["local"])
    assert found.summary()["layers"][0]["bounds"]["local"]["violations"] > 0


def test_bounds_of_sequences_with_masks_of_their_own() -> None:
    attention, tokens = padded(), draw(5, 7, 6)
    found = sweep(lambda _: {"one": (attention, tokens)}, [7], bounds=["local", "expected"])
    assert all(verdict.violations == 0 for verdict in found.record("one").bounds.values())


@pytest.mark.parametrize(("bounds", "text"), [(["tight"], "unknown bound 'tight'; choose from local"),
                                              (["stack"], "unknown bound 'stack'")])  # fmt: skip
def test_unknown_bounds(bounds: list[str], text: str) -> None:
    with pytest.raises(InputError, match=text):
        sweep(RandomTokens(layer()), [4], bounds=bounds)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "text"), [([], "lengths are empty"), ([0, 4], "lengths must be at least 1, not 0")]
)
def test_lengths_that_are_none(lengths: list[Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        sweep(RandomTokens(layer()), lengths)


def test_another_process_finds_the_same_numbers() -> None:
    code = (
        "import json, torch; torch.set_num_threads(1)\n"
        "from sensitivity import SoftmaxAttention\n"
        "from sensitivity.sweep import RandomTokens, sweep\n"
        "attention = SoftmaxAttention.random(6, 2, dtype=torch.float64)\n"
        "print(json.dumps(sweep(RandomTokens(attention, 3), [2, 4, 6, 8]).summary()))"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert json.loads(first)["layers"][0]["per_length"][0]["length"] == 2


# -- without maps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"diagonal_bias": -math.inf, "residual": False}])
def test_statistics_alone_are_those_beside_the_maps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensitivity.sweep.source.RANDOM_BATCH", 3 * 16 * 8)  # batches of three samples, of eight
    source = RandomTokens(SoftmaxAttention.random(8, 2, dtype=torch.float64, **options), samples=8)
    whole, alone = sweep(source, [8, 16]), sweep(source, [8, 16], statistics_only=True)
    assert (whole.kept("attention"), alone.kept("attention")) == ((16,), ())
    for length in (8, 16):
        one, other = (found.record("attention", length) for found in (alone, whole))
        assert sorted(one.statistics) == sorted(other.statistics)
        for name, statistic in other.statistics.items():
            found = one.statistics[name]
            assert (float(found), found.where) == (pytest.approx(float(statistic), rel=1e-9), statistic.where), name
            assert found.null == pytest.approx(statistic.null, rel=1e-9, nan_ok=True), name
            if statistic.samples is not None:
                assert_close(found.samples, statistic.samples, "maps")
        assert one.bounds.keys() == other.bounds.keys()
        assert torch.equal(one.groups, other.groups)
        for name, profile in other.profiles.items():
            assert_close(one.profiles[name], profile, "maps")


def test_some_rows_of_every_sequence(tmp_path: Path) -> None:
    layer, tokens = SoftmaxAttention.random(8, 2, dtype=torch.float64), draw(2, 16, 8)
    found = sweep(lambda length: {"one": (layer, tokens[:, :length])}, [4, 16], rows=5, seed=3)
    direct = measure(layer, tokens, rows=5, seed=3, keep="statistics")
    assert float(found.record("one").statistics["sink_ratio"]) == pytest.approx(float(direct.sink_ratio()), rel=1e-12)
    assert len(found.record("one", 4).statistics["off_diagonal"].rows) == 4  # there are no more
    found.save(tmp_path / "some.nc")
    again = Sweep.load(tmp_path / "some.nc")
    assert again.summary() == found.summary()


def test_batches_with_masks_of_their_own_cannot_be_summed_up() -> None:
    def source(length: int) -> Iterator[Batch]:
        for start in (0, 1):
            padding = torch.zeros(1, length, dtype=torch.bool)
            padding[0, start] = True
            layer = SoftmaxAttention.random(8, 2, dtype=torch.float64, padding=padding)
            yield Batch({"one": Sequences(layer, draw(1, length, 8))}, (start + 1) / 2)

    with pytest.raises(InputError, match=r"the batches of samples see different pairs .* or keep the maps"):
        sweep(source, [8], statistics_only=True, bounds=())


@pytest.mark.parametrize("lengths", [None, 12, "12,24"])
def test_lengths_that_are_not_several(lengths: Any) -> None:
    with pytest.raises(InputError, match=rf"lengths must be several integers, such as .*, not {lengths!r}"):
        checks.lengths(lengths)

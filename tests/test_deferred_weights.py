"""Attention weights that a map computes when they are asked for."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from largest import Largest
from oracles import draw
from tolerances import assert_close

from sensitivity import SensitivityMap, SoftmaxAttention, measure
from sensitivity.collecting import weights as deferred
from sensitivity.layers import DiagonalLearnedPenalty, TemporalAttention

SAMPLES, LENGTH, DIM, HEADS = 3, 20, 8, 2


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Every map puts its weights off, however few they are."""
    monkeypatch.setattr(deferred, "FEW", 0)


def padding() -> torch.Tensor:
    found = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    found[0, :3], found[1, -2:] = True, True
    return found


OPTIONS = {
    "plain": {},
    "biased": {"biases": True},
    "causal": {"causal": True},
    "padding": {"padding": padding()},
    "penalty per head": {"diagonal_bias": torch.tensor([-1.0, 0.5], dtype=torch.float64)},
    "length penalty": {"diagonal_bias": -0.4, "diagonal_length": 3, "causal": True, "padding": padding()},
    "mask": {"diagonal_bias": -torch.inf},
    "dropout": {"multiplier": (draw(SAMPLES, HEADS, LENGTH, LENGTH) > 0).double()},
}


def layer(**options) -> SoftmaxAttention:
    return SoftmaxAttention.random(DIM, HEADS, dtype=torch.float64, **options)


def put_off(found: SensitivityMap) -> bool:
    return callable(vars(found)["attention"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [None, [7, 0, 19]])
def test_they_are_those_of_the_layer(options, rows, monkeypatch):
    monkeypatch.setattr(
        "sensitivity.jacobian.tile_sizes.tile_size", lambda attention, length: 3 * length * HEADS * SAMPLES
    )
    attention, tokens = layer(**options), draw(SAMPLES, LENGTH, DIM)
    found = measure(attention, tokens, rows=rows)
    assert put_off(found)
    assert found.has_attention
    assert put_off(found)  # asking whether there are any computes none
    expected = attention.weights(tokens)
    assert_close(found.attention, expected if rows is None else expected[:, :, rows], "blocks")
    assert found.attention is found.attention


def test_their_statistics_and_their_file_are_those_of_kept_weights(tmp_path, monkeypatch):
    attention, tokens = layer(causal=True), draw(SAMPLES, LENGTH, DIM)
    found = measure(attention, tokens)
    monkeypatch.setattr(deferred, "FEW", 2**30)
    kept = measure(attention, tokens)
    assert put_off(found)
    assert not put_off(kept)
    assert float(found.diagonal_attention()) == pytest.approx(float(kept.diagonal_attention()), rel=1e-12)
    found.save(tmp_path / "map.nc")
    assert_close(SensitivityMap.load(tmp_path / "map.nc").attention, kept.attention, "blocks")
    again = dataclasses.replace(measure(attention, tokens), name="another")
    assert_close(again.attention, kept.attention, "blocks")


def test_a_layer_that_is_trained_on_leaves_them_as_they_were():
    torch.manual_seed(0)
    module = TemporalAttention(DIM, HEADS, DiagonalLearnedPenalty(HEADS, -0.3)).double().eval()
    tokens = draw(SAMPLES, LENGTH, DIM)
    found, expected = measure(module, tokens), SoftmaxAttention.from_module(module).weights(tokens)
    expected = expected.detach().clone()
    assert put_off(found)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
        tokens.zero_()
    assert_close(found.attention, expected, "blocks")
    assert not found.attention.requires_grad


def test_a_copy_of_a_map_has_them_too():
    attention, tokens = layer(), draw(SAMPLES, LENGTH, DIM)
    found = measure(attention, tokens)
    for twin in (copy.deepcopy(found), copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert put_off(twin)
        assert_close(twin.attention, attention.weights(tokens), "blocks")
    assert put_off(found)


def test_they_are_found_wherever_they_are_asked_for():
    attention, tokens = layer(), draw(SAMPLES, LENGTH, DIM)
    with torch.inference_mode(False):
        found, other = measure(attention, tokens), measure(attention, tokens)
    with torch.inference_mode():
        assert_close(found.attention, attention.weights(tokens), "blocks")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = other.attention
    assert_close(weights, attention.weights(tokens), "blocks")


def test_a_bias_as_large_as_the_weights_is_not_copied():
    found = measure(layer(bias=draw(LENGTH, LENGTH)), draw(SAMPLES, LENGTH, DIM))
    assert not put_off(found)
    assert found.attention is not None


def test_a_map_without_them_is_one_map(monkeypatch):
    monkeypatch.setattr("sensitivity.jacobian.tile_sizes.tile_size", lambda attention, length: 8 * length)
    with Largest() as largest:
        found = measure(layer(), draw(1, 400, DIM))
    assert largest.numbers == 400**2
    with Largest() as largest:
        assert found.attention is not None
    assert largest.numbers == HEADS * 400**2

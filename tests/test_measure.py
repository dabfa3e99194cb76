"""The front door: what it accepts, what it refuses, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from front_door import TOKENS, Reader, encoder, temporal
from oracles import dense_jacobian, draw, norm_map
from tolerances import assert_close
from torch import nn

import sensitivity
from sensitivity import InputError, SoftmaxAttention, blocks, measure
from sensitivity.layers import DiagonalDropout, DiagonalMask, DiagonalPenalty, TemporalAttention
from sensitivity.models import Forecaster


@pytest.mark.parametrize("norm", ["frobenius", "rms", "spectral"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"residual": False}, {"diagonal": DiagonalMask()}, {"diagonal": DiagonalPenalty(-0.5)}],
    ids=str,
)
def test_our_layer_by_every_backend(norm, options):
    layer = temporal(**options)
    expected = norm_map(layer, TOKENS, norm)
    for backend in ("auto", "closed_form", "autodiff"):
        found = measure(layer, TOKENS, norm=norm, backend=backend)
        assert_close(found.norms, expected, "spectral" if norm == "spectral" else "maps")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_stock_attention(batch_first, bias):
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first).double().eval()

    def function(tokens):
        arranged = tokens if batch_first else tokens.transpose(0, 1)
        out = layer(arranged, arranged, arranged, need_weights=False)[0]
        return out if batch_first else out.transpose(0, 1)

    for backend in ("closed_form", "autodiff"):
        assert_close(measure(layer, TOKENS, backend=backend).norms, norm_map(function, TOKENS), "maps")
        with_identity = measure(layer, TOKENS, backend=backend, residual=True)
        assert_close(with_identity.norms, norm_map(lambda x: function(x) + x, TOKENS), "maps")
        assert_close(with_identity.diagonal, norm_map(function, TOKENS).diagonal(dim1=1, dim2=2), "maps")


def test_residual_can_be_taken_away():
    layer = temporal()
    for backend in ("closed_form", "autodiff"):
        found = measure(layer, TOKENS, backend=backend, residual=False)
        assert_close(found.norms, norm_map(lambda x: layer(x) - x, TOKENS), "maps")


def test_stock_attention_with_extra_keys_falls_back_and_says_so():
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True).double().eval()
    found = measure(layer, TOKENS)
    assert_close(found.norms, norm_map(lambda x: layer(x, x, x, need_weights=False)[0], TOKENS), "maps")
    assert any("add_bias_kv" in note for note in found.notes)
    with pytest.raises(InputError, match=r"has no closed form; use backend='auto'.*add_bias_kv"):
        measure(layer, TOKENS, backend="closed_form")


def test_whole_models_and_callables():
    model = encoder()
    expected = norm_map(model, TOKENS)
    assert_close(measure(model, TOKENS).norms, expected, "maps")
    assert_close(measure(lambda x: model(x), TOKENS).norms, expected, "maps")
    assert_close(blocks(model, TOKENS), dense_jacobian(model, TOKENS), "blocks")


def test_an_attention_layer_inside_a_model():
    model = encoder()
    found = measure(model, TOKENS, layer="layers.1.self_attn", paths=True)
    reaching = model.layers[0](TOKENS).detach()
    attention = SoftmaxAttention.from_module(model.layers[1].self_attn)
    assert_close(found.norms, measure(attention, reaching).norms, "maps")
    assert found.name == "layers.1.self_attn"
    by_autodiff = measure(model, TOKENS, layer="layers.1.self_attn", backend="autodiff")
    assert_close(by_autodiff.norms, found.norms, "maps")


def test_any_submodule_inside_a_model():
    model = encoder()
    found = measure(model, TOKENS, layer="layers.1")
    assert_close(found.norms, norm_map(model.layers[1], model.layers[0](TOKENS).detach()), "maps")


def test_integer_ids_are_measured_from_their_embeddings():
    model, ids = Reader().double().eval(), torch.arange(10).reshape(2, 5)
    with pytest.raises(InputError, match="name the embedding layer with layer="):
        measure(model, ids)
    found = measure(model, ids, layer="embedding")
    assert_close(found.norms, norm_map(model.encoder, model.embedding(ids).detach()), "maps")
    assert not model.embedding._forward_hooks
    model.forward = lambda ids: model.encoder(model.embedding(ids) + model.embedding(ids))
    with pytest.raises(InputError, match=r"'embedding' must run once .* but it put out \(2, 5, 8\), \(2, 5, 8\)"):
        measure(model, ids, layer="embedding")


def test_layers_of_the_forecaster_at_another_length():
    torch.manual_seed(4)
    model = Forecaster(3, dim=8, depth=2, heads=2, spatial="none").double().eval()
    inputs = draw(2, 12, 3, 2)
    found = measure(model, inputs, layer="blocks.1.temporal", paths=True)
    assert tuple(found.norms.shape) == (6, 12, 12)
    assert_close(measure(model, inputs, layer="blocks.1.temporal", backend="autodiff").norms, found.norms, "maps")
    block = measure(model, inputs, layer="blocks.1")
    assert tuple(block.norms.shape) == (6, 12, 12)


def test_paths_and_blocks_by_path_sum_to_the_whole():
    layer = temporal(causal=True)
    parts = blocks(layer, TOKENS, paths=True)
    assert sorted(parts) == ["key", "query", "residual", "value"]
    assert_close(sum(parts.values()), dense_jacobian(layer, TOKENS), "blocks")
    found = measure(layer, TOKENS, paths=True, heads=True)
    for name, part in parts.items():
        assert_close(found.paths[name], torch.linalg.vector_norm(part, dim=(-2, -1)), "maps")
    assert tuple(found.heads.shape) == tuple(found.attention.shape) == (2, 2, 5, 5)


def test_residual_removed_diagonal():
    layer = temporal()
    expected = norm_map(lambda x: layer(x) - x, TOKENS).diagonal(dim1=1, dim2=2)
    for backend in ("closed_form", "autodiff"):
        assert_close(measure(layer, TOKENS, backend=backend).diagonal, expected, "maps")
    gru = nn.GRU(8, 8, batch_first=True).double().eval()
    raw = measure(gru, TOKENS, residual=False)
    assert_close(raw.diagonal, raw.norms.diagonal(dim1=1, dim2=2), "maps")


def test_causal_pairs_are_exact_zeros_and_not_counted():
    for model in (temporal(causal=True), nn.LSTM(8, 8, batch_first=True).double().eval()):
        found = measure(model, TOKENS)
        assert not found.norms.triu(1).any()
        assert torch.equal(found.visible[0], torch.ones(5, 5, dtype=torch.bool).tril())


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_left_out_and_changes_nothing_else(causal):
    layer = temporal(causal=causal)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[:, :2] = True
    tokens = torch.cat([draw(2, 2, 8, seed=9), TOKENS], dim=1)
    for backend in ("closed_form", "autodiff"):
        found = measure(layer, tokens, padding=padding, backend=backend)
        assert_close(found.norms[:, 2:, 2:], measure(layer, TOKENS).norms, "maps")
        assert found.norms[:, :2].isnan().all()
        assert found.norms[:, :, :2].isnan().all()
        assert not found.visible[:, :2].any()
        assert found.sink_ratio() == pytest.approx(measure(layer, TOKENS).sink_ratio())
        assert found.diagonal[:, :2].isnan().all()
    assert blocks(layer, tokens, padding=padding)[:, 0].isnan().all()


def test_single_sample_and_single_time_step():
    layer = temporal(diagonal=DiagonalMask())
    assert_close(measure(layer, TOKENS[0]).norms, measure(layer, TOKENS[:1]).norms, "maps")
    assert_close(measure(layer, TOKENS[:, :1]).norms, norm_map(layer, TOKENS[:, :1]), "maps")


def test_the_model_is_left_as_it_was():
    model = encoder()
    model(TOKENS).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = [value.grad.clone() for value in model.parameters()]
    state, modes = torch.get_rng_state(), [part.training for part in model.modules()]
    measure(model, TOKENS, probes=4)
    measure(model, TOKENS, layer="layers.0.self_attn")
    with pytest.raises(InputError):
        measure(model, TOKENS, layer="layers.7.self_attn")
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [part.training for part in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value.grad, grad) for value, grad in zip(model.parameters(), grads, strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_inside_no_grad_and_inference_mode():
    model, expected = encoder(), norm_map(encoder(), TOKENS)
    with torch.no_grad():
        assert_close(measure(model, TOKENS).norms, expected, "maps")
    with torch.inference_mode(), pytest.raises(InputError, match=r"torch.inference_mode is on"):
        measure(model, TOKENS)


def test_train_mode_is_refused_by_name_and_averaged_on_request():
    model = encoder().train()
    with pytest.raises(InputError, match=r"train mode.*'layers\.0\..*stochastic=n"):
        measure(model, TOKENS)
    state = torch.get_rng_state()
    found = measure(model, TOKENS, stochastic=3, seed=1)
    assert torch.equal(found.norms, measure(model, TOKENS, stochastic=3, seed=1).norms)
    assert torch.equal(state, torch.get_rng_state())
    assert "mean of 3 draws" in found.engine
    assert (found.standard_error > 0).any()
    assert model.training


def test_stochastic_average_of_diagonal_dropout_is_over_whole_draws():
    """With one token visible besides the diagonal, every draw's Jacobian is one of a few known ones."""
    torch.manual_seed(0)
    layer = TemporalAttention(8, 1, diagonal=DiagonalDropout(0.5)).double().train()
    found = measure(layer, TOKENS[:1, :2], stochastic=1, seed=0).norms
    eye, candidates = torch.eye(2, dtype=torch.bool), []
    for first in (False, True):
        for second in (False, True):
            hidden = torch.zeros(2, 2, dtype=torch.float64).masked_fill(
                eye & torch.tensor([[first], [second]]), -math.inf
            )
            candidates.append(measure(layer.softmax_attention(bias=hidden[None, None]), TOKENS[:1, :2]).norms)
    assert min((found - candidate).abs().max() for candidate in candidates) < 1e-10


def test_half_precision_is_measured_in_single_precision():
    attention = SoftmaxAttention.random(8, 2, seed=3)
    half = measure(attention.to(dtype=torch.bfloat16), TOKENS.bfloat16())
    assert half.provenance["dtype"] == "float32"
    assert any("computed in torch.float32" in note for note in half.notes)
    rounded = attention.to(dtype=torch.bfloat16).to(dtype=torch.float32)
    assert_close(half.norms, measure(rounded, TOKENS.bfloat16().float()).norms, "float32")


def test_dtype_upcasts_a_copy():
    model = encoder().float()
    found = measure(model, TOKENS.float(), dtype=torch.float64)
    assert found.provenance["dtype"] == "float64"
    assert next(model.parameters()).dtype == torch.float32
    assert_close(measure(model, TOKENS.float()).norms, found.norms, "float32_model")


@pytest.mark.parametrize("backend", ["closed_form", "autodiff"])
def test_dtype_of_a_description(backend):
    attention = SoftmaxAttention.random(8, 2)
    found = measure(attention, TOKENS.float(), dtype=torch.float64, backend=backend)
    assert found.norms.dtype == torch.float64
    assert_close(found.norms, norm_map(attention.to(dtype=torch.float64), TOKENS.float().double()), "maps")
    assert attention.dtype == torch.float32


def test_blocks_of_one_sample_are_its_own():
    found = blocks(temporal(), TOKENS, paths=True)
    found["residual"][0] *= 2
    assert_close(found["residual"][0], 2 * found["residual"][1], "blocks")


def test_probes_carry_an_error_bar_and_reproduce():
    torch.manual_seed(6)
    model = nn.GRU(8, 64, batch_first=True).double().eval()
    found = measure(model, TOKENS, probes=16, seed=5)
    assert torch.equal(found.norms, measure(model, TOKENS, probes=16, seed=5).norms)
    assert not torch.equal(found.norms, measure(model, TOKENS, probes=16, seed=6).norms)
    exact = norm_map(lambda tokens: model(tokens)[0], TOKENS)
    within = (found.norms - exact).abs() <= 4 * found.standard_error
    assert within.double().mean() > 0.95


def test_outputs_can_be_selected():
    def pair(tokens):
        return {"a": tokens * 2, "b": tokens * 3}

    with pytest.raises(InputError, match=r"several tensors; pass select= with one of 'a'.*'b'"):
        measure(pair, TOKENS)
    expected = 3 * math.sqrt(8) * torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    assert_close(measure(pair, TOKENS, select="b").norms, expected, "maps")


def test_a_seed_may_be_a_numpy_integer():
    assert measure(temporal(), TOKENS, seed=np.int64(7)).provenance["seed"] == 7


def test_provenance_and_names():
    found = measure(temporal(), TOKENS, seed=7)
    expected = {"engine": "closed form", "model": "TemporalAttention", "seed": 7, "dtype": "float64", "length": 5}
    assert {name: found.provenance[name] for name in expected} == expected
    assert found.provenance["sensitivity"] == sensitivity.__version__

"""The paper's forecaster."""

import math

import pytest
import torch
from oracles import draw
from tolerances import assert_close

from sensitivity.errors import InputError
from sensitivity.layers import (
    DiagonalDropout,
    DiagonalLearnedPenalty,
    DiagonalMask,
    DiagonalPenalty,
    Dropout,
    ResidualGate,
    TemporalAttention,
)
from sensitivity.models import VARIANTS, Forecaster, variant_diagonal
from sensitivity.models.clock import clock, day_number
from sensitivity.traffic import synthetic_city

KINDS = ("as_published", "adaptive", "distance", "none")


def small(**options):
    torch.manual_seed(0)
    options = {"dim": 8, "depth": 2, "heads": 2, "horizon": 5} | options
    return Forecaster(3, **options).double()


def graph_for(kind):
    return torch.tensor([[1.0, 0.5, 0.0], [0.2, 1.0, 0.0], [0.3, 0.0, 1.0]]) if kind == "distance" else None


def inputs(length=12, nodes=3, samples=2):
    values = draw(samples, length, nodes, 2)
    values[..., 1] = values[..., 1].abs() % 1
    return values


@pytest.mark.parametrize(("nodes", "count"), [(207, 621_158), (10, 573_878)])
def test_published_parameter_counts(nodes, count):
    model = Forecaster(nodes)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    per_block = {sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks}
    assert per_block == {51_732 - 20 * (207 - nodes)}
    assert model.blocks[0].temporal.width == 9


def test_is_the_written_formula():
    model = small().eval()
    x = inputs()
    speed, clock = x[..., :1].transpose(1, 2), x[..., 1:].transpose(1, 2)
    table = torch.zeros(12, 8, dtype=torch.float64)
    for step in range(12):
        for k in range(4):
            angle = step * 10000 ** (-2 * k / 8) * 8 / 12
            table[step, 2 * k], table[step, 2 * k + 1] = math.sin(angle), math.cos(angle)
    h = model.embedding(speed) + table
    for block in model.blocks:
        attention = block.temporal.softmax_attention(bias=None)
        a = attention(h.reshape(6, 12, 8)).reshape(h.shape)
        h = block.temporal_norm(a + block.temporal_clock(clock))
        h = block.spatial_norm(h + block.spatial(h) + block.spatial_clock(clock))
    assert_close(model.encode(x), h, "blocks")
    steps = model.readout(torch.cat([h, clock], -1)).squeeze(-1)
    expected = model.horizon_readout(steps).transpose(1, 2)
    assert expected.shape == (2, 5, 3)
    assert_close(model(x), expected, "blocks")


def test_no_residual_drops_only_the_attention_residual():
    x, block = inputs(), small(residual=False).eval().blocks[0]
    states, clock = draw(2, 3, 12, 8), x[..., 1:].transpose(1, 2)
    h = block.temporal_norm(block.temporal(states) + block.temporal_clock(clock))
    assert not block.temporal.residual
    assert_close(block(states, clock), block.spatial_norm(h + block.spatial(h) + block.spatial_clock(clock)), "blocks")
    attention = block.temporal.softmax_attention()
    assert not attention.residual


@pytest.mark.parametrize("kind", KINDS)
def test_which_nodes_are_mixed(kind):
    model = small(spatial=kind, graph=graph_for(kind)).eval()
    x = inputs().requires_grad_(True)
    (derivative,) = torch.autograd.grad(model(x)[:, :, 0].square().sum(), x)
    own, others = derivative[:, :, 0, 0], derivative[:, :, 1:, 0]
    assert own.abs().min() > 0
    if kind in ("as_published", "none"):
        assert (others == 0).all()
    else:
        assert others.abs().amax((0, 1)).min() > 0


def test_distance_mixes_along_the_roads_only():
    graph = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    model = small(spatial="distance", graph=graph).eval()
    x = inputs().requires_grad_(True)
    (derivative,) = torch.autograd.grad(model(x)[:, :, 0].square().sum(), x)
    assert derivative[:, :, 1, 0].abs().max() > 0
    assert (derivative[:, :, 2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 12, 40])
def test_encodes_any_length(kind, length):
    model = small(spatial=kind, graph=graph_for(kind)).eval()
    states = model.encode(inputs(length))
    assert states.shape == (2, 3, length, 8)
    assert torch.isfinite(states).all()


def test_attention_layers_are_named_and_see_batch_node_time_dim():
    model, seen = small(), []
    names = [name for name, module in model.named_modules() if isinstance(module, TemporalAttention)]
    assert names == ["blocks.0.temporal", "blocks.1.temporal"]
    model.blocks[1].temporal.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    model.encode(inputs(9))
    assert seen == [(2, 3, 9, 8)]


def test_all_dropouts_have_the_one_rate():
    model = small(dropout=0.25)
    rates = [module.p for module in model.modules() if isinstance(module, Dropout)]
    assert len(rates) == 1 + 2 * 4
    assert set(rates) == {0.25}
    assert not torch.equal(model(inputs()), model(inputs()))
    assert torch.equal(model.eval()(inputs()), model(inputs()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_config_rebuilds_the_model(kind, variant):
    diagonal, residual = variant_diagonal(variant, heads=2)
    model = small(spatial=kind, graph=graph_for(kind), diagonal=diagonal, residual=residual, dropout=0.0)
    again = Forecaster.from_config(model.config, graph=graph_for(kind)).double()
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(inputs()), model.eval()(inputs()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 12])
def test_every_variant_trains(variant, length):
    diagonal, residual = variant_diagonal(variant, p=0.5, heads=2, learned=True)
    model = small(diagonal=diagonal, residual=residual, input_length=length)
    model(inputs(length)).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_variants():
    assert variant_diagonal("none") == (None, True)
    assert variant_diagonal("no-residual") == (None, False)
    assert isinstance(variant_diagonal("mask")[0], DiagonalMask)
    penalty, dropout = variant_diagonal("penalty")[0], variant_diagonal("dropout", p=0.3, shared=True)[0]
    assert isinstance(penalty, DiagonalPenalty)
    assert penalty.value == -0.05
    assert isinstance(dropout, DiagonalDropout)
    assert dropout.config() == {"kind": "dropout", "p": 0.3, "where": "logits", "shared": True}
    assert variant_diagonal("learned-penalty", heads=3, value=0.2)[0].bias.tolist() == pytest.approx([0.2] * 3)
    length = variant_diagonal("length-penalty", value=-0.3, length=24)[0]
    assert (length.bias, length.length) == (-0.3, 24)
    diagonal, gate = variant_diagonal("gate", gate=0.25, learned=True)
    assert (diagonal, gate.config()) == (None, {"value": 0.25, "learned": True})
    with pytest.raises(
        InputError, match="unknown variant 'full'; known: none, no-residual, mask, dropout, penalty, le"
    ):
        variant_diagonal("full")


def test_each_block_has_a_regulariser_of_its_own():
    model = small(diagonal=DiagonalMask(), residual=ResidualGate(0.3, learned=True))
    first, second = (block.temporal for block in model.blocks)
    assert first.diagonal is not second.diagonal
    assert first.residual is not second.residual


def test_a_learned_gate_and_penalties_come_back_from_the_weights():
    model = small(diagonal=DiagonalLearnedPenalty(2, 0.1), residual=ResidualGate(0.3, learned=True))
    with torch.no_grad():
        model.blocks[1].temporal.residual.gate.fill_(-0.7)
        model.blocks[1].temporal.diagonal.penalty.copy_(torch.tensor([0.5, -1.5]))
    again = Forecaster.from_config(model.config).double()
    again.load_state_dict(model.state_dict())
    attention = again.blocks[1].temporal.softmax_attention()
    assert attention.residual == pytest.approx(-0.7)
    assert attention.diagonal_bias.tolist() == [0.5, -1.5]
    assert_close(again.eval()(inputs()), model.eval()(inputs()), "blocks")


# -- the day of the week --------------------------------------------------------------------------------------------


def weekly(length=12, nodes=3, samples=2):
    values = inputs(length, nodes, samples)
    days = (torch.arange(samples * length).reshape(samples, length, 1) // 5 % 7 / 7).float().double()
    return torch.cat([values, days[..., None].expand(-1, -1, nodes, 1)], dim=-1)


def test_the_day_of_the_week_is_seven_indicators_beside_the_time_of_day():
    x, model = weekly(), small(day_of_week=True).eval()
    times = clock(x, True)
    assert times.shape == (2, 3, 12, 8)
    assert torch.equal(times[..., 0], x[..., 1].transpose(1, 2))
    number = torch.arange(24).reshape(2, 12) // 5 % 7
    assert torch.equal(times[:, 1, :, 1:], torch.nn.functional.one_hot(number, 7).double())
    assert model.config["day_of_week"]
    assert model.blocks[0].temporal_clock.in_features == 8
    assert model.readout.in_features == 16
    moved = x.clone()
    moved[..., 2] = (moved[..., 2] + 3 / 7) % 1
    assert (model(moved) - model(x)).abs().max() > 1e-3


def test_all_days_of_real_traffic_are_recognised():
    days = synthetic_city(2, 8).day_of_week()
    assert set(day_number(days).tolist()) == set(range(7))
    assert torch.equal(day_number(days), day_number(days.bfloat16()))
    assert torch.equal(day_number(days).double() / 7, (7 * days.double()).round() / 7)


def test_a_model_without_the_day_of_the_week_is_as_it_was():
    assert small().config["day_of_week"] is False
    old = {name: value for name, value in small().config.items() if name != "day_of_week"}
    assert Forecaster.from_config(old).config == small().config
    with pytest.raises(
        InputError, match=r"this model takes \(batch, time, 3, 3\): z-scored speed, time of day and day"
    ):
        small(day_of_week=True)(inputs())
    with pytest.raises(InputError, match=r"this model takes \(batch, time, 3, 2\)"):
        small()(weekly())


def test_errors():
    model = small()
    with pytest.raises(InputError, match=r"the forecast takes 12 time steps, not 13; encode\(\) takes any number"):
        model(inputs(13))
    with pytest.raises(InputError, match=r"shape \(2, 12, 4, 2\); this model takes \(batch, time, 3, 2\)"):
        model(inputs(nodes=4))
    with pytest.raises(InputError, match=r"this model takes \(batch, time, 3, 2\)"):
        model.encode(inputs()[..., :1])
    with pytest.raises(InputError, match="depth must be an integer of at least 1, not 0"):
        Forecaster(3, depth=0)
    with pytest.raises(InputError, match="dim=72 is not divisible by heads=7; nearest that fit: 70 and 77"):
        Forecaster(3, heads=7)
    with pytest.raises(InputError, match="spatial='distance' needs the road graph"):
        Forecaster(3, spatial="distance")
    with pytest.raises(InputError, match=r"not the configuration of a Forecaster \(unknown: layers\)"):
        Forecaster.from_config({"nodes": 3, "layers": 2})
    with pytest.raises(InputError, match=r"not the configuration of a Forecaster \('nodes' is missing\)"):
        Forecaster.from_config({"depth": 3})

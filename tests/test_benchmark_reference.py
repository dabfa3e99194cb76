"""The plain forecaster that training is timed against: the same function as the toolkit's, to the last gradient."""

from __future__ import annotations

import pytest
import torch
from benchmarks.reference import PlainForecaster, positions
from oracles import draw
from tolerances import assert_close

from sensitivity.layers import Dropout
from sensitivity.models import Forecaster

BLOCK = {
    "temporal.projection.weight": "attention.in_proj_weight",
    "temporal.projection.bias": "attention.in_proj_bias",
    "temporal.output.weight": "attention.out_proj.weight",
    "temporal.output.bias": "attention.out_proj.bias",
    "temporal_clock.weight": "clocks.0.weight",
    "temporal_clock.bias": "clocks.0.bias",
    "temporal_norm.weight": "norms.0.weight",
    "temporal_norm.bias": "norms.0.bias",
    "spatial.tables.source": "propagation.first",
    "spatial.tables.target": "propagation.second",
    "spatial.linear.weight": "propagation.project.weight",
    "spatial.linear.bias": "propagation.project.bias",
    "spatial_clock.weight": "clocks.1.weight",
    "spatial_clock.bias": "clocks.1.bias",
    "spatial_norm.weight": "norms.1.weight",
    "spatial_norm.bias": "norms.1.bias",
}
ENDS = {"embedding": "embed", "readout": "per_step", "horizon_readout": "over_time"}
NODES, LENGTH, HORIZON, DIM, DEPTH, HEADS = 5, 12, 7, 12, 3, 4


def counterpart(name: str) -> str:
    """The reference's name of one of the forecaster's parameters."""
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        return f"blocks.{index}.{BLOCK[rest]}"
    module, _, kind = name.partition(".")
    return f"{ENDS[module]}.{kind}"


@pytest.fixture
def pair() -> tuple[Forecaster, PlainForecaster]:
    """Both models with the same weights, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours = Forecaster(NODES, LENGTH, HORIZON, DIM, DEPTH, HEADS).double()
        plain = PlainForecaster(NODES, DIM, DEPTH, HEADS, LENGTH, HORIZON).double()
        with torch.no_grad():
            for value in ours.parameters():  # norms and biases too, or their places could be mixed up unseen
                value.copy_(torch.randn_like(value) / 2)
    plain.positions = positions(LENGTH, DIM)  # it is trained with a table in single precision
    plain.load_state_dict({counterpart(name): value for name, value in ours.named_parameters()})
    return ours, plain


def inputs(samples: int = 3) -> torch.Tensor:
    values = draw(samples, LENGTH, NODES, 2)
    values[..., 1] = values[..., 1].abs() % 1
    return values


def test_computes_the_same_forecast(pair: tuple[Forecaster, PlainForecaster]) -> None:
    ours, plain = (model.eval() for model in pair)
    expected = plain(inputs())
    assert expected.shape == (3, HORIZON, NODES)
    assert expected.std() > 0.1
    assert_close(ours(inputs()), expected, "blocks")


def test_has_the_same_gradients(pair: tuple[Forecaster, PlainForecaster]) -> None:
    ours, plain = (model.eval() for model in pair)
    for model in pair:
        model(inputs()).square().sum().backward()
    found = {counterpart(name): value.grad for name, value in ours.named_parameters()}
    for name, value in plain.named_parameters():
        assert value.grad is not None
        assert_close(found[name], value.grad, "maps")


def test_drops_at_the_same_places(pair: tuple[Forecaster, PlainForecaster]) -> None:
    counts = []
    for model in pair:
        rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout | Dropout)]
        rates += [module.dropout for module in model.modules() if isinstance(module, torch.nn.MultiheadAttention)]
        assert set(rates) == {0.1}
        counts.append(len(rates) - 1)  # one behind the embedding
        assert not torch.equal(model(inputs()), model(inputs()))
    # the toolkit has a module for each of a block's four places; the reference uses one at two of them
    assert counts == [4 * DEPTH, 3 * DEPTH]


@pytest.mark.parametrize(("nodes", "count"), [(207, 621_158), (10, 573_878)])
def test_published_parameter_counts(nodes: int, count: int) -> None:
    model = PlainForecaster(nodes, dim=72, depth=12, heads=8)
    assert sum(value.numel() for value in model.parameters()) == count

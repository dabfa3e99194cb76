"""The transformer with adaptive embeddings."""

import json

import pytest
import torch
from oracles import draw
from tolerances import assert_close
from torch import nn

from sensitivity import checkpoint, measure
from sensitivity.adapters import attention_layers
from sensitivity.errors import InputError
from sensitivity.layers import DiagonalMask, DiagonalPenalty, Dropout, ResidualGate, TemporalAttention
from sensitivity.models import VARIANTS, STAEformer, variant_diagonal
from sensitivity.sweep import sweep
from sensitivity.sweep.trained import trained_layers
from sensitivity.traffic import Scaler, reopen, sequences, synthetic_city
from sensitivity.training import Settings, fit
from sensitivity.training.module import ForecastModule


def small(**options):
    torch.manual_seed(0)
    options = {"dim": 20, "depth": 2, "heads": 2, "horizon": 5, "feed_forward": 11} | options
    return STAEformer(3, **options).double()


def inputs(length=12, nodes=3, samples=2, day_of_week=True):
    values = draw(samples, length, nodes, 3)
    steps = torch.arange(samples * length).reshape(samples, length, 1) * 97
    values[..., 1] = steps % 288 / 288
    values[..., 2] = steps // 288 % 7 / 7
    return values if day_of_week else values[..., :2]


# -- the model --------------------------------------------------------------------------------------------------------


def test_published_size():
    """24 + 24 + 24 + 80 features, six layers; counted by hand from the published sizes."""
    model = STAEformer(207)
    layer = 4 * (152 * 152 + 152) + (152 * 256 + 256) + (256 * 152 + 152) + 4 * 152
    embeddings = (3 * 24 + 24) + 288 * 24 + 7 * 24 + 12 * 207 * 80
    count = embeddings + 6 * layer + (12 * 152 * 12 + 12)
    assert sum(parameter.numel() for parameter in model.parameters()) == count == 1_258_980
    assert model.adaptive.shape == (12, 207, 80)
    assert {type(layer.attention) for layer in model.temporal} == {TemporalAttention}
    assert len(model.temporal) == len(model.spatial) == 3


def stock(layer, dim, heads, feed_forward):
    """torch's own post-norm encoder layer with the same weights."""
    found = nn.TransformerEncoderLayer(dim, heads, feed_forward, dropout=0.0, batch_first=True).double().eval()
    attention, forward = layer.attention, layer.feed_forward
    found.load_state_dict(
        {
            "self_attn.in_proj_weight": attention.projection.weight,
            "self_attn.in_proj_bias": attention.projection.bias,
            "self_attn.out_proj.weight": attention.output.weight,
            "self_attn.out_proj.bias": attention.output.bias,
            "linear1.weight": forward[0].weight,
            "linear1.bias": forward[0].bias,
            "linear2.weight": forward[2].weight,
            "linear2.bias": forward[2].bias,
            "norm1.weight": layer.norm.weight,
            "norm1.bias": layer.norm.bias,
            "norm2.weight": layer.final_norm.weight,
            "norm2.bias": layer.final_norm.bias,
        }
    )
    return found


def test_is_made_of_stock_encoder_layers_over_time_then_over_nodes():
    model, x = small().eval(), inputs()
    step = (x[..., 1] * 288).round().long()
    day = (x[..., 2] * 7).round().long()
    parts = [model.projection(x), model.time_of_day.weight[step], model.day_of_week.weight[day]]
    states = torch.cat([*parts, model.adaptive.expand(2, -1, -1, -1)], dim=-1)
    assert [part.shape[-1] for part in parts] == [3, 3, 3]
    for layer in model.temporal:
        over_time = states.transpose(1, 2).flatten(0, 1)
        states = stock(layer, 20, 2, 11)(over_time).unflatten(0, (2, 3)).transpose(1, 2)
    for layer in model.spatial:
        states = stock(layer, 20, 2, 11)(states.flatten(0, 1)).unflatten(0, (2, 12))
    assert_close(model.encode(x), states.transpose(1, 2), "blocks")
    expected = model.readout(states.transpose(1, 2).reshape(2, 3, -1)).transpose(1, 2)
    assert expected.shape == (2, 5, 3)
    assert_close(model(x), expected, "blocks")


def test_every_node_sees_every_other_and_windows_do_not():
    x, model = inputs().requires_grad_(True), small().eval()
    (derivative,) = torch.autograd.grad(model(x)[0, :, 0].square().sum(), x)
    assert derivative[0, :, :, 0].abs().amin() > 0
    assert (derivative[1] == 0).all()


def test_all_times_of_a_week_have_their_embeddings():
    table = synthetic_city(3, 8).channels(day_of_week=True)[None].double()
    model = small(dim=19, heads=1)
    with torch.no_grad():
        model.time_of_day.weight.copy_(torch.arange(288.0)[:, None])
        model.day_of_week.weight.copy_(torch.arange(7.0)[:, None])
    with torch.no_grad():
        states = model._embedded(table)
    rows = torch.arange(table.shape[1])
    assert torch.equal(states[0, 1, :, 3], (rows % 288).double())
    start = int((table[0, 0, 0, 2] * 7).round())
    assert torch.equal(states[0, 2, :, 6], ((start + rows // 288) % 7).double())


@pytest.mark.parametrize("length", [1, 7, 12, 40])
def test_any_length_has_states_with_the_last_step_of_the_table_last(length):
    model = small().eval()
    with torch.no_grad():
        model.adaptive.copy_(torch.arange(12.0)[:, None, None])
    states = model._embedded(inputs(length))
    expected = [max(0, 12 - length + step) for step in range(length)]
    assert states[1, 2, :, -1].tolist() == expected
    assert torch.isfinite(model.encode(inputs(length))).all()


def test_only_attention_over_time_is_found_and_sees_batch_node_time_dim():
    model, seen = small(), []
    assert list(attention_layers(model)) == ["temporal.0.attention", "temporal.1.attention"]
    model.temporal[1].attention.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    model.encode(inputs(9))
    assert seen == [(2, 3, 9, 20)]


def test_dropouts_have_the_one_rate_and_attention_weights_none():
    model = small(dropout=0.25)
    rates = [module.p for module in model.modules() if isinstance(module, Dropout)]
    assert sorted(rates) == [0.0] * 2 + [0.25] * 8
    assert not torch.equal(model(inputs()), model(inputs()))
    assert torch.equal(model.eval()(inputs()), model(inputs()))


@pytest.mark.parametrize("day_of_week", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_round_trip_and_train(tmp_path, variant, day_of_week):
    diagonal, residual = variant_diagonal(variant, heads=2, learned=True)
    model = small(diagonal=diagonal, residual=residual, day_of_week=day_of_week, dropout=0.0)
    x = inputs(day_of_week=day_of_week)
    model(x).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    checkpoint.save(tmp_path / "ckpt.pt", model)
    loaded = checkpoint.load(tmp_path / "ckpt.pt")
    assert isinstance(loaded.model, STAEformer)
    assert loaded.config == model.config
    assert torch.equal(loaded.model(x), model.eval()(x))


def test_regularisers_act_on_the_attention_over_time():
    model = small(diagonal=DiagonalMask(), residual=ResidualGate(0.3)).eval()
    found = measure(model, inputs().float(), layer="temporal.1.attention", dtype=torch.float64, paths=True)
    assert_close(found.attention.diagonal(dim1=-2, dim2=-1), torch.zeros(6, 2, 12), "blocks")
    expected = torch.full((6, 12), 0.3 * 20**0.5, dtype=torch.float64)
    assert_close(found.paths["residual"].diagonal(dim1=-2, dim2=-1), expected, "blocks")
    assert model.temporal[0].attention.diagonal is not model.temporal[1].attention.diagonal


def test_errors():
    model = small()
    with pytest.raises(InputError, match=r"the forecast takes 12 time steps, not 13; encode\(\) takes any number"):
        model(inputs(13))
    with pytest.raises(
        InputError, match=r"this model takes \(batch, time, 3, 3\): z-scored speed, time of day and day"
    ):
        model(inputs(day_of_week=False))
    with pytest.raises(InputError, match="dim must be at least 7, so that every embedding has a feature, not 6"):
        STAEformer(3, dim=6, heads=2)
    with pytest.raises(InputError, match="feed_forward must be an integer of at least 1, not 0"):
        small(feed_forward=0)
    with pytest.raises(InputError, match="dim=20 is not divisible by heads=3"):
        small(heads=3)
    with pytest.raises(InputError, match="dropout must be a rate of at least 0 and below 1, not 1"):
        small(dropout=1)
    with pytest.raises(InputError, match=r"not the configuration of a STAEformer \(unknown: spatial\)"):
        STAEformer.from_config({"nodes": 3, "spatial": "none"})


# -- training and measuring -------------------------------------------------------------------------------------------

TINY = {"data": "synthetic:nodes=3,days=9,step=60", "backbone": "staeformer", "dim": 8, "heads": 2, "depth": 1}


def test_defaults_follow_backbone_and_recipe():
    plain, strong = Settings(), Settings(backbone="staeformer")
    assert (plain.depth, plain.dim, plain.batch_size, plain.lr, plain.clip) == (2, 32, 128, 2e-4, 5.0)
    assert (plain.spatial, plain.day_of_week, plain.recipe) == ("as_published", False, "cosine")
    assert (strong.depth, strong.dim, strong.heads, strong.spatial) == (3, 152, 4, "attention")
    assert (strong.recipe, strong.batch_size, strong.lr, strong.weight_decay) == ("steps", 16, 1e-3, 3e-4)
    assert strong.day_of_week
    mixed = Settings(backbone="staeformer", recipe="cosine", dim=64, day_of_week=False, lr=5e-4)
    assert (mixed.dim, mixed.lr, mixed.batch_size, mixed.day_of_week) == (64, 5e-4, 128, False)
    assert Settings.from_identity(strong.identity()) == strong
    with pytest.raises(InputError, match="unknown backbone 'gru'; choose one of forecaster, staeformer"):
        Settings(backbone="gru")
    with pytest.raises(InputError, match="unknown recipe 'adam'; choose one of cosine, steps"):
        Settings(recipe="adam")
    with pytest.raises(InputError, match="a staeformer mixes its nodes by attention, so spatial='adaptive' has no"):
        fit(Settings(**TINY, spatial="adaptive", out="never"))


@pytest.mark.parametrize(("recipe", "kind"), [("steps", torch.optim.Adam), ("cosine", torch.optim.AdamW)])
def test_the_recipe_chooses_the_optimiser(recipe, kind):
    settings = Settings(**TINY, recipe=recipe)
    module = ForecastModule(small(), Scaler(torch.zeros(()), torch.ones(())), settings, 3)
    optimizer = module.configure_optimizers()
    assert type(optimizer) is kind
    assert optimizer.defaults["weight_decay"] == settings.weight_decay


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("staeformer") / "run"
    return fit(Settings(**TINY, out=str(out), epochs=2, variant="penalty", penalty_value=-2.0))


def test_is_trained_and_measured_at_the_tokens_that_it_has(run):
    metrics = json.loads((run.checkpoint.parent / "metrics.json").read_text())
    assert metrics["best_epoch"] == 2
    loaded = checkpoint.load(run.checkpoint)
    assert loaded.config["diagonal"] == {"kind": "penalty", "value": -2.0}
    assert loaded.config["steps_per_day"] == 24
    traffic, scaler = reopen(loaded.data), Scaler.from_state(loaded.scaler)
    lengths = [6, 12, 24, 48]
    source = trained_layers(loaded, traffic, scaler, 48, windows=2, seed=1)
    found = sweep(source, lengths, bounds=())
    assert list(found.lengths) == lengths
    assert not found.failures
    x = sequences(traffic, scaler, 48, 2, 1, longest=48, day_of_week=True)
    attention, caught = loaded.model.temporal[0].attention, []
    attention.register_forward_pre_hook(lambda _, args: caught.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        loaded.model.encode(x)
    assert isinstance(attention.diagonal, DiagonalPenalty)
    expected = measure(attention, caught[0])
    statistics = found.record("temporal.0.attention", 48).statistics
    assert float(statistics["sink_ratio"]) == pytest.approx(expected.sink_ratio(), rel=1e-4)

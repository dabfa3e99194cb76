"""The differentiable sink ratio, and the loss term made of it."""

import csv

import pytest
import torch
from cases import Case, attention_cases
from lightning.pytorch.callbacks import Callback
from oracles import dense_jacobian, draw
from tolerances import assert_close
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sensitivity import SoftmaxAttention, measure
from sensitivity.errors import InputError, RunError
from sensitivity.jacobian.sink import log_sink_ratio
from sensitivity.jacobian.visibility import attended_and_counted
from sensitivity.layers import DiagonalLearnedPenalty, ResidualGate, TemporalAttention
from sensitivity.models import Forecaster, STAEformer
from sensitivity.training import Settings, fit
from sensitivity.training.sink import SinkPenalty

CASES = [case for case in attention_cases() if case.attention.multiplier is None and case.attention.heads in (1, 3)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def oracle(case: Case) -> torch.Tensor:
    """From dense blocks of autograd, over the pairs that statistics count."""
    squares = dense_jacobian(case.attention, case.tokens).square().sum(dim=(-2, -1))
    length = case.tokens.shape[1]
    counted = attended_and_counted(case.attention, length)[1].expand(len(squares), -1, -1)
    eye = torch.eye(length, dtype=torch.bool)
    on = [one[pairs & eye].mean() for one, pairs in zip(squares, counted, strict=True)]
    off = [one[pairs & ~eye].mean() for one, pairs in zip(squares, counted, strict=True)]
    return (torch.stack(on) / torch.stack(off)).log() / 2


def by_differences(loss, parameter: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """Central differences along every entry."""
    found = torch.zeros(parameter.numel(), dtype=torch.float64)
    flat = parameter.detach().view(-1)
    with torch.no_grad():
        for place in range(len(flat)):
            before = flat[place].clone()
            flat[place] = before + step
            above = loss()
            flat[place] = before - step
            found[place] = (above - loss()) / (2 * step)
            flat[place] = before
    return found.view_as(parameter)


@each_case
def test_is_the_ratio_of_root_mean_squares(case: Case) -> None:
    assert_close(log_sink_ratio(case.attention, case.tokens), oracle(case), "maps")


@pytest.mark.parametrize("name", ["causal length penalty", "penalty per head", "gate", "mask", "shared bias"])
def test_gradient_at_the_tokens(name: str) -> None:
    case = next(case for case in CASES if case.name == f"{name}, 3 heads")
    tokens = case.tokens[:, :, :].clone().requires_grad_(True)
    (found,) = torch.autograd.grad(log_sink_ratio(case.attention, tokens).sum(), tokens)
    expected = by_differences(lambda: log_sink_ratio(case.attention, tokens).sum(), tokens)
    assert found.abs().max() > 1e-4
    assert_close(found, expected, "differences")


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    options = {"diagonal": DiagonalLearnedPenalty(2, 0.4), "residual": ResidualGate(0.8, learned=True), "dropout": 0.0}
    return {
        "forecaster": Forecaster(2, 4, 3, dim=4, depth=2, heads=2, **options),
        "staeformer": STAEformer(
            2, 4, 3, dim=8, depth=2, heads=2, feed_forward=5, steps_per_day=4, day_of_week=False, **options
        ),
    }


@pytest.mark.parametrize("name", ["forecaster", "staeformer"])
def test_gradient_of_the_loss_term_through_weights_tokens_penalties_and_gates(name: str) -> None:
    model = models()[name].double()
    inputs = torch.cat([draw(2, 4, 2, 1), draw(2, 4, 2, 1, seed=1).abs() % 1], dim=-1)
    sink = SinkPenalty(model, 0.3, 3)

    def loss() -> torch.Tensor:
        torch.manual_seed(5)  # the same sequences
        with sink.recording():
            model.encode(inputs)
        return sink()

    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    found = {name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    last = "blocks.1.temporal" if name == "forecaster" else "temporal.1.attention"
    first = "embedding.weight" if name == "forecaster" else "adaptive"
    for wanted in (f"{last}.projection.weight", f"{last}.diagonal.penalty", f"{last}.residual.gate", first):
        assert found[wanted].abs().max() > 1e-6, wanted
        assert_close(found[wanted], by_differences(loss, parameters[wanted]), "differences")


def test_descending_it_lowers_the_measured_sink_ratio() -> None:
    torch.manual_seed(0)
    layer = TemporalAttention(8, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    unseen = draw(16, 10, 8, seed=9, dtype=torch.float32)
    before = measure(layer.eval(), unseen).sink_ratio()
    sink = SinkPenalty(layer, 1.0, 4)
    for step in range(30):
        with sink.recording():
            layer(draw(6, 10, 8, seed=step, dtype=torch.float32))
        optimizer.zero_grad()
        sink().backward()
        optimizer.step()
    assert measure(layer, unseen).sink_ratio() < 0.5 * before


def test_recording_leaves_nothing_behind() -> None:
    model = models()["forecaster"]
    sink = SinkPenalty(model, 0.1, 2)
    state = torch.get_rng_state()
    with sink.recording():
        pass
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="stop"), sink.recording():
        raise RuntimeError("stop")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_its_share_of_the_operations_of_a_step() -> None:
    """As the page about regularisers says."""
    model, counts = Forecaster(10, dim=32, depth=3, heads=4), []
    sink = SinkPenalty(model, 0.1, 8)
    inputs = torch.rand(128, 12, 10, 2, generator=torch.Generator().manual_seed(0))
    for term in (lambda: 0.0, sink):
        with FlopCounterMode(display=False) as counter:
            with sink.recording():
                loss = model(inputs).abs().mean()
            (loss + term()).backward()
        counts.append(counter.get_total_flops())
    assert counts[1] / counts[0] == pytest.approx(1.06, abs=0.005)


def test_what_it_refuses() -> None:
    attention = SoftmaxAttention.random(8, 2)
    with pytest.raises(InputError, match="compares the diagonal with other pairs, so it needs at least 2 time steps"):
        log_sink_ratio(attention, draw(2, 1, 8, dtype=torch.float32))
    dropped = SoftmaxAttention.random(8, 2, multiplier=torch.ones(4, 4))
    with pytest.raises(InputError, match="is that of a layer without dropout; leave the multiplier out"):
        log_sink_ratio(dropped, draw(2, 4, 8, dtype=torch.float32))
    with pytest.raises(InputError, match="Linear has no temporal attention whose sink ratio could be penalised"):
        SinkPenalty(nn.Linear(2, 2), 0.1, 2)
    with pytest.raises(InputError, match="the sink ratio needs input_length of at least 2, not 1"):
        Settings(variant="sink-penalty", input_length=1)
    with pytest.raises(InputError, match=r"sink_weight must be a finite number of at least 0, not -1\.0"):
        Settings(sink_weight=-1.0)
    with pytest.raises(InputError, match="sink_sequences must be an integer of at least 1, not 0"):
        Settings(sink_sequences=0)


# -- in a training ----------------------------------------------------------------------------------------------------

TINY = {"data": "synthetic:nodes=3,days=2", "dim": 8, "depth": 1, "heads": 2, "lr": 5e-3, "batch_size": 64}


def run(tmp_path, name, **options):
    return fit(Settings(**TINY, **options, out=str(tmp_path / name)))


def test_a_training_with_the_penalty_has_less_of_a_sink_and_logs_it(tmp_path) -> None:
    assert Settings().sink_weight == 0
    assert Settings(variant="sink-penalty").sink_weight == 0.1
    plain = run(tmp_path, "plain", epochs=3)
    strong = run(tmp_path, "strong", epochs=3, variant="sink-penalty", sink_weight=5.0)
    inputs = plain.split.test.batch(range(8)).inputs
    ratios = {}
    for name, result in (("plain", plain), ("strong", strong)):
        found = measure(result.model, inputs, layer="blocks.0.temporal")
        ratios[name] = found.sink_ratio()
    assert ratios["strong"] < 0.9 * ratios["plain"]
    with (tmp_path / "strong" / "log.csv").open() as file:
        logged = [float(row["train_log_sink_ratio"]) for row in csv.DictReader(file)]
    assert logged[0] > logged[-1]
    assert "train_log_sink_ratio" not in (tmp_path / "plain" / "log.csv").read_text()
    assert not any(module._forward_pre_hooks for module in strong.model.modules())
    again = fit(Settings(**TINY, epochs=3, variant="sink-penalty", sink_weight=5.0, out=str(tmp_path / "again")))
    assert again.metrics["test"] == strong.metrics["test"]


class Break(Callback):
    """Makes the attention's weights NaN at the start of the second epoch."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 1:
            with torch.no_grad():
                pl_module.model.blocks[0].temporal.output.weight.fill_(float("nan"))


def test_weights_that_are_not_finite_are_reported_as_a_training_that_diverged(tmp_path) -> None:
    settings = Settings(**TINY, epochs=2, variant="sink-penalty", out=str(tmp_path / "run"))
    with pytest.raises(RunError, match=r"loss became nan in epoch 2.*the training has diverged"):
        fit(settings, callbacks=[Break()])

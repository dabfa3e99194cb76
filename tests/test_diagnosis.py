"""A look at the attention layers of a model in training: what it says, and that the training does not notice."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sensitivity import diagnose, measure
from sensitivity.adapters.capture import capture
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.models import Forecaster
from sensitivity.training import SensitivityCallback, Settings, diagnostics, fit

SMALL = {"data": "synthetic:nodes=3,days=2", "dim": 4, "depth": 2, "heads": 2, "lr": 2e-3, "variant": "dropout"}
KEYS = {"sink_ratio", "sink_ratio_residual_removed", "parroting_index", "diagonal_attention"}
SHARES = {f"diagonal_share_{name}" for name in ("residual", "value", "key", "query")}


def forecaster() -> Forecaster:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Forecaster(3, dim=8, depth=2, heads=2)


def windows(count: int = 2) -> torch.Tensor:
    return torch.rand(count, 12, 3, 2, generator=torch.Generator().manual_seed(0))


class TestDiagnose:
    def test_says_what_measure_says_of_the_tokens_that_reach_a_layer(self) -> None:
        model, inputs = forecaster().eval(), windows()
        found = diagnose(model, inputs, samples=6)
        with torch.no_grad():
            reached = capture(model, inputs, None)
        assert set(found) == set(reached) == {"blocks.0.temporal", "blocks.1.temporal"}
        for name, layer in reached.items():
            assert found[name] == measure(layer.attention, layer.tokens, paths=True).summary()
            assert set(found[name]) >= KEYS | SHARES
            assert sum(found[name][share] for share in SHARES) == pytest.approx(1.0)

    def test_takes_sequences_spread_over_all_that_reach_a_layer(self) -> None:
        model, inputs = forecaster().eval(), windows()
        with torch.no_grad():
            layer = capture(model, inputs, ["blocks.0.temporal"])["blocks.0.temporal"]
        chosen = torch.tensor([0, 3])  # two of the six: the first sensor of each window
        expected = measure(layer.attention.sample(chosen), layer.tokens[chosen], paths=True).summary()
        assert diagnose(model, inputs, layers=["blocks.0.temporal"], samples=2) == {"blocks.0.temporal": expected}

    def test_leaves_mode_gradients_and_random_state_alone(self) -> None:
        model = forecaster().train()
        model.embedding.eval()
        model(windows()).sum().backward()
        before = {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        modes, state = [module.training for module in model.modules()], torch.get_rng_state()
        diagnose(model, windows())
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name not in before)
            assert parameter.grad is None or torch.equal(parameter.grad, before[name])

    def test_looks_at_stock_layers_too(self) -> None:
        stock = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        assert KEYS - {"sink_ratio_residual_removed"} <= set(diagnose(stock, torch.randn(2, 5, 8))["self_attn"])

    @pytest.mark.parametrize("samples", [0, True, -1])
    def test_refuses_sizes(self, samples: int) -> None:
        with pytest.raises(InputError, match=f"samples must be an integer of at least 1, not {samples}"):
            diagnose(forecaster(), windows(), samples=samples)

    def test_refuses_a_model_without_attention_and_unknown_layers(self) -> None:
        with pytest.raises(InputError, match="no attention layer"):
            diagnose(nn.Linear(3, 3), torch.rand(2, 3))
        with pytest.raises(InputError, match="nowhere"):
            diagnose(forecaster(), windows(), layers=["nowhere"])


class TestCallback:
    def run(self, out: Path, *callbacks: Any, **changes: Any) -> Any:
        return fit(Settings(**{**SMALL, "epochs": 3, "out": str(out), **changes}), callbacks=callbacks)

    def test_the_training_is_bit_by_bit_the_same(self, tmp_path: Path) -> None:
        plain = self.run(tmp_path / "plain")
        watched = self.run(tmp_path / "watched", SensitivityCallback(path=tmp_path / "looks.csv"))
        assert watched.metrics["test"] == plain.metrics["test"]
        for name, value in plain.model.state_dict().items():
            assert torch.equal(value, watched.model.state_dict()[name])

    def test_writes_a_line_for_every_epoch_and_layer(self, tmp_path: Path) -> None:
        result = self.run(
            tmp_path / "run", SensitivityCallback(every=2, samples=4, path=tmp_path / "looks.csv"), epochs=4
        )
        rows = list(csv.DictReader((tmp_path / "looks.csv").open(encoding="utf-8")))
        names = ["blocks.0.temporal", "blocks.1.temporal"]
        assert [(row["epoch"], row["layer"]) for row in rows] == [(epoch, name) for epoch in "24" for name in names]
        state = torch.load(result.checkpoint.parent / "last.ckpt", weights_only=True)["weights"]
        last = Forecaster.from_config(result.model.config)
        last.load_state_dict(state)
        inputs = next(result.split.validation.batches(4)).inputs
        expected = diagnose(last, inputs, samples=4)
        for row, name in zip(rows[2:], names, strict=True):
            assert float(row["sink_ratio"]) == pytest.approx(expected[name]["sink_ratio"], rel=1e-5)
            assert float(row["share_of_epoch"]) > 0

    def test_an_interrupted_training_goes_on_with_the_file(self, tmp_path: Path) -> None:
        looks = tmp_path / "looks.csv"

        class Stop(SensitivityCallback):
            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                super().on_train_epoch_start(trainer, pl_module)
                if trainer.current_epoch == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.run(tmp_path / "run", Stop(path=looks, layers=["blocks.1.temporal"]))
        self.run(tmp_path / "run", SensitivityCallback(path=looks, layers=["blocks.1.temporal"]), resume=True)
        assert [row["epoch"] for row in csv.DictReader(looks.open(encoding="utf-8"))] == ["1", "2", "3"]

    def test_logs_through_lightnings_loggers(self, tmp_path: Path) -> None:
        events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        self.run(tmp_path / "run", SensitivityCallback(every=3), tensorboard=True)
        written = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        written.Reload()
        assert {f"blocks.1.temporal/{key}" for key in KEYS | SHARES} <= set(written.Tags()["scalars"])
        assert [one.step for one in written.Scalars("blocks.1.temporal/sink_ratio")] == [3]

    def test_warns_where_a_look_takes_much_of_an_epoch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(diagnostics, "_NOTICED", 0.0)
        monkeypatch.setattr(diagnostics, "SHARE", 0.0)
        with pytest.warns(SensitivityWarning, match=r"took 0\.\d s, \d+% of epoch 1; raise every=1 or lower samples=7"):
            self.run(tmp_path / "run", SensitivityCallback(samples=7), epochs=1)

    @pytest.mark.parametrize("name", ["every", "samples"])
    def test_refuses(self, name: str) -> None:
        with pytest.raises(InputError, match=f"{name} must be an integer of at least 1, not 0"):
            SensitivityCallback(**{name: 0})

    def test_the_command_line_wires_it(self, tmp_path: Path) -> None:
        self.run(tmp_path / "run", diagnose_every=1, epochs=2)
        (looks,) = (path for path in (tmp_path / "run").glob("*.csv") if path.name != "log.csv")
        assert len(list(csv.DictReader(looks.open(encoding="utf-8")))) == 2 * 2

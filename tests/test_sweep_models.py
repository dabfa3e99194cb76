"""Sweeps over the layers of a model: lengths that it refuses, units, some sequences of every window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import draw
from torch import Tensor, nn

from sensitivity import InputError, RunError, SoftmaxAttention, measure
from sensitivity.layers import TemporalAttention
from sensitivity.sweep import ModelLayers, RandomTokens, sweep


def layer(dim: int = 6) -> SoftmaxAttention:
    return SoftmaxAttention.random(dim, 2, seed=0, dtype=torch.float64)


class Fixed(nn.Module):
    """A model with a position buffer of fixed size."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.attention = TemporalAttention(6, 2)
        self.register_buffer("positions", torch.randn(size, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens + self.positions[: tokens.shape[-2]])


def windows(length: int) -> Tensor:
    return draw(3, 4, length, 6, seed=1, dtype=torch.float32)


def test_a_length_that_the_model_refuses_leaves_the_others() -> None:
    found = sweep(ModelLayers(Fixed().eval(), windows), [4, 8, 16], bounds=())
    assert found.lengths == (4, 8)
    assert list(found.failures) == [16]
    assert found.failures[16].startswith("RuntimeError: The size of tensor a (16) must match")
    assert found.summary()["failures"][0]["length"] == 16
    assert found.map("attention").length == 8


def test_when_every_length_fails_there_is_no_result() -> None:
    with pytest.raises(RunError, match=r"no length could be measured; T=16: RuntimeError: The size of tensor"):
        sweep(ModelLayers(Fixed().eval(), windows), [16, 32])
    with pytest.raises(InputError, match="tokens must be finite"):
        sweep(lambda T: {"one": (layer(), torch.full((1, T, 6), torch.nan, dtype=torch.float64))}, [4])


def test_a_model_in_train_mode_is_refused() -> None:
    model = Fixed()
    model.attention.attention_dropout.p = 0.1
    with pytest.raises(InputError, match="train mode"):
        sweep(ModelLayers(model, windows), [4])


def test_windows_are_the_units_of_a_model() -> None:
    found = sweep(ModelLayers(Fixed().eval(), windows), [8], bounds=())
    record = found.record("attention")
    assert record.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    model = Fixed().eval()
    whole = measure(model, windows(8), layer="attention").summary()["sink_ratio"]
    torch.manual_seed(0)
    same = Fixed().eval()
    same.load_state_dict(model.state_dict())
    again = sweep(ModelLayers(same, windows), [8], bounds=()).record("attention").statistics["sink_ratio"]
    assert float(again) == pytest.approx(whole, rel=1e-5)


class Folded(nn.Module):
    """Calls its layer with nodes in front of windows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = TemporalAttention(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens.transpose(0, 1))


def test_units_are_known_even_where_a_layer_folds_other_axes_in_front() -> None:
    record = sweep(ModelLayers(Folded().eval(), windows), [5], bounds=()).record("attention")
    assert record.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_some_sequences_of_every_window() -> None:
    options: dict[str, Any] = {"per_window": 2, "seed": 3}
    some = {T: next(iter(ModelLayers(Fixed().eval(), windows, **options)(T))).layers["attention"] for T in (5, 8)}
    found = [sweep(ModelLayers(Fixed().eval(), windows, **options), [T], bounds=()).record("attention") for T in (5, 8)]
    assert all(record.groups.tolist() == [0, 0, 1, 1, 2, 2] for record in found)
    batch = torch.cat([b.layers["attention"].tokens for b in ModelLayers(Fixed().eval(), windows)(8)])
    kept = [n for n in range(4) if any(torch.equal(batch[n], one) for one in some[8].tokens)]
    assert len(kept) == 2
    shorter = torch.cat([b.layers["attention"].tokens for b in ModelLayers(Fixed().eval(), windows)(5)])
    assert all(torch.equal(shorter[n], one) for n, one in zip(kept, some[5].tokens, strict=True))
    other = next(iter(ModelLayers(Fixed().eval(), windows, per_window=2, seed=4)(8))).layers["attention"].tokens
    assert not torch.equal(other, some[8].tokens)


class Padded(nn.Module):
    """Hides the first positions of some sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = TemporalAttention(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = torch.zeros(tokens.shape[:-1], dtype=torch.bool)
        padding[:, 1, :2] = True
        return self.attention(tokens, padding=padding)


def test_some_sequences_keep_their_own_masks() -> None:
    model = Padded().eval()
    whole = sweep(ModelLayers(model, windows), [6], bounds=()).record("attention").statistics["off_diagonal"].samples
    some = sweep(ModelLayers(model, windows, per_window=3), [6], bounds=()).record("attention")
    chosen = torch.randperm(4, generator=torch.Generator().manual_seed(0))[:3].sort().values
    index = torch.cat([chosen + 4 * window for window in range(3)])
    torch.testing.assert_close(some.statistics["off_diagonal"].samples, whole[index])


def test_unknown_layers_and_samples() -> None:
    with pytest.raises(InputError, match=r"unknown layer 'blocks'; this model has attention\."):
        ModelLayers(Fixed(), windows, ["blocks"])
    with pytest.raises(InputError, match="Linear has no attention layer that can be described"):
        ModelLayers(nn.Linear(2, 2), windows)
    with pytest.raises(InputError, match="samples must be an integer of at least 1, not 0"):
        RandomTokens(layer(), samples=0)
    with pytest.raises(InputError, match=r"the layers take tokens of different widths \[4, 6\]"):
        RandomTokens({"a": layer(), "b": layer(dim=4)})
    with pytest.raises(InputError, match="the source gave no layer"):
        sweep(lambda _: {}, [4])
    with pytest.raises(InputError, match=r"layer 'one' has groups of shape \(2,\) for 3 samples"):
        sweep(lambda T: {"one": (layer(), draw(3, T, 6), torch.tensor([0, 1]))}, [4])

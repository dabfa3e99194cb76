"""Recurrent layers' own backward pass against one autograd call per output element."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from oracles import dense_jacobian, draw, norm_map
from sequence_models import DIM, LENGTH, seeded
from tolerances import assert_close
from torch import Tensor, nn

from sensitivity.jacobian import steps
from sensitivity.jacobian.autodiff import blocks, norm_maps
from sensitivity.jacobian.recurrent import Recurrences

TOKENS = draw(2, LENGTH, DIM)
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "lstm, projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS = [
    dict(zip(("num_layers", "bidirectional", "batch_first", "bias"), values, strict=True))
    for values in itertools.product((1, 2), (False, True), (False, True), (True, False))
]


class Everything(nn.Module):
    """Outputs and last states, mixed into few features, from a first state that depends on the tokens."""

    def __init__(self, kind: str, options: dict[str, object]) -> None:
        super().__init__()
        self.layer = KINDS[kind](DIM, 4, **options)
        self.first = options["batch_first"]

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.tanh()
        states = self.layer(tokens if self.first else tokens.transpose(0, 1))[1]
        begin = tuple(state.flip(0).cumsum(-1) for state in states) if isinstance(states, tuple) else states.flip(0)
        output, last = self.layer(tokens if self.first else tokens.transpose(0, 1), begin)
        output = output if self.first else output.transpose(0, 1)
        last = torch.cat(last, dim=-1) if isinstance(last, tuple) else last
        parts = output, last.transpose(0, 1).flatten(1)[:, None]
        return sum(part @ draw(part.shape[-1], 2, seed=3).to(part) for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(key for key in options if options[key]))
def test_blocks_equal_oracle(kind, options):
    model = seeded(lambda: Everything(kind, options))
    assert_close(blocks(model, TOKENS, engine="vmap"), dense_jacobian(model, TOKENS), "blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_one_cotangent_at_a_time(kind):
    model = seeded(lambda: Everything(kind, OPTIONS[0]))
    leaf = TOKENS.clone().requires_grad_(True)
    with Recurrences():
        inside = model(leaf)
    outside = model(leaf)
    assert_close(inside, outside, "blocks")
    direction = draw(*inside.shape, seed=1)
    found, expected = (torch.autograd.grad(out, leaf, direction)[0] for out in (inside, outside))
    assert_close(found, expected, "blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_are_taken_in_stretches(kind, monkeypatch):
    monkeypatch.setattr(steps, "_HELD", 1)
    model = seeded(lambda: Everything(kind, OPTIONS[0]))
    assert_close(norm_maps(model, TOKENS, engine="vmap").total, norm_map(model, TOKENS), "maps")


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(DIM, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(tokens, [LENGTH] * len(tokens), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Generated(nn.Module):
    """A recurrent layer whose weights come from the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(DIM, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = {name: value * tokens.mean() for name, value in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, weights, (tokens,))[0]


class Transformed(nn.Module):
    """A recurrent layer inside the model's own ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(DIM, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.func.vjp(lambda inner: self.layer(inner)[0], tokens)[0]


@pytest.mark.parametrize("make", [Packed, Generated, Transformed])
def test_other_calls_are_left_to_torch(make):
    model = seeded(make)
    assert_close(norm_maps(model, TOKENS).total, norm_map(model, TOKENS), "maps")


def test_float32():
    model = seeded(lambda: Everything("lstm", OPTIONS[0]))
    expected = norm_map(model, TOKENS)
    assert_close(norm_maps(model.float(), TOKENS.float()).total, expected, "float32")

"""The pointwise end of a function: where it begins, and that nothing around it or across times is lost."""

from __future__ import annotations

import pytest
import torch
from oracles import dense_jacobian, draw, norm_map
from sequence_models import DIM, LENGTH, build, seeded, transformer
from tolerances import assert_close
from torch import Tensor, nn

from sensitivity.jacobian.autodiff import blocks, norm_maps
from sensitivity.jacobian.graphs import Graph
from sensitivity.jacobian.state import exact_arithmetic

TOKENS = draw(3, LENGTH, DIM)
LIMIT = 2**26


def entry_of(model: nn.Module, limit: int = LIMIT) -> Tensor | None:
    with exact_arithmetic():
        tail = Graph(model, TOKENS, copies=7, vmap=True, tail=limit).tail
    return None if tail is None else tail.entry


class Head(nn.Module):
    """Times are mixed, then an MLP; ``around`` and ``across`` are the sizes of paths that spoil it."""

    def __init__(self, around: float = 0.0, across: float = 0.0, in_place: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.head = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 5))
        self.skip = nn.Linear(DIM, 5)
        self.around, self.across, self.in_place = around, across, in_place
        self.mixed: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.mixed = self.mix(tokens.mT).mT.sin()
        if self.in_place:
            self.mixed[:, 1] *= 2
        out = self.head(self.mixed)
        if self.across:
            out = out + self.across * out.mean(dim=1, keepdim=True)
        return out + self.around * self.skip(tokens) if self.around else out


def test_entry_of_an_encoder_is_after_its_last_attention():
    model = seeded(lambda: transformer(2))
    kept = []
    model.layers[1].norm1.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    assert torch.equal(entry_of(model), kept[-1])


def test_entry_is_what_mixed_the_times():
    model = seeded(Head)
    assert_close(entry_of(model), model.mix(TOKENS.mT).mT, "blocks")


def test_function_that_is_pointwise_from_the_start():
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, 4), nn.Tanh()))
    assert torch.equal(entry_of(model), TOKENS)


def test_factors_that_do_not_fit_are_left_out():
    model = seeded(Head)
    narrow = 5 * TOKENS.numel() // DIM * 4 * 8  # bytes of the factors at the head's inner width
    assert entry_of(model, narrow).shape[-1] == 4
    assert entry_of(model, 8) is None


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-30])
def test_a_path_around_is_never_dropped(size):
    model = seeded(lambda: Head(around=size))
    assert entry_of(model) is None
    assert_close(blocks(model, TOKENS), dense_jacobian(model, TOKENS), "blocks")


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12])
def test_a_path_across_times_is_never_dropped(size):
    model = seeded(lambda: Head(across=size))
    assert_close(blocks(model, TOKENS), dense_jacobian(model, TOKENS), "blocks")
    only = norm_maps(lambda tokens: model(tokens) - seeded(Head)(tokens), TOKENS).total
    expected = norm_map(
        lambda tokens: size * seeded(Head)(tokens).mean(dim=1, keepdim=True).expand(-1, LENGTH, -1), TOKENS
    )
    assert ((only - expected).abs() <= 1e-6 * expected + 1e-14).all()


def test_values_that_are_written_into():
    model = seeded(lambda: Head(in_place=True))
    assert_close(blocks(model, TOKENS), dense_jacobian(model, TOKENS), "blocks")


def test_probes_go_through_the_end():
    model = build("transformer")
    found, expected = (norm_maps(model, TOKENS, probes=3, engine=engine) for engine in ("auto", "replicated"))
    assert_close(found.total, expected.total, "maps")

"""Causal functions by shorter sequences, and that nothing is taken to be causal that is not."""

from __future__ import annotations

import pytest
import torch
from oracles import dense_jacobian, draw, norm_map
from sequence_models import seeded
from tolerances import assert_close
from torch import Tensor, nn

from sensitivity.jacobian.autodiff import blocks, norm_maps
from sensitivity.jacobian.guard import measuring
from sensitivity.jacobian.prefixes import SHORTEST
from sensitivity.models import ConvolutionEncoder

DIM, LENGTH = 8, SHORTEST + 5
TOKENS = draw(3, LENGTH, DIM)
WORDS = "causal prefixes"


class Causal(nn.Module):
    """A stock encoder under a causal mask, of the tokens' length or of a fixed one."""

    def __init__(self, fixed: bool = False, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fixed = fixed

    def forward(self, tokens: Tensor) -> Tensor:
        length = LENGTH if self.fixed else tokens.shape[1]
        return self.encoder(tokens, mask=nn.Transformer.generate_square_subsequent_mask(length).to(tokens))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool = False) -> None:
        super().__init__()
        self.layer = kind(DIM, DIM, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(DIM * (1 + bidirectional), DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(tokens)[0]).tanh() + tokens


class BatchStatistics(nn.Module):
    """Causal within a sample, but the samples are coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM, track_running_stats=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.stack([self.norm(tokens[:, : step + 1].sum(dim=1)) for step in range(LENGTH)], dim=1)


CAUSAL = {
    "encoder": Causal,
    "encoder, norm first": lambda: Causal(norm_first=True),
    "convolution": lambda: ConvolutionEncoder(DIM, depth=2, kernel=3),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}
OTHERS = {
    "fixed length": lambda: Causal(fixed=True),
    "bidirectional": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "batch statistics": BatchStatistics,
}


def leaking(size: float, query: int, key: int, sample: int | None = None):
    """A cumulative sum into which one later input leaks, in one sample or in all."""
    base, mix = draw(3, LENGTH, DIM, seed=1), draw(DIM, DIM, seed=2)

    def function(tokens: Tensor) -> Tensor:
        out = (tokens @ mix.to(tokens)).cumsum(dim=1).tanh()
        if tokens.shape[1] <= key:
            return out
        far = size * tokens[:, key] if sample is None else size * (tokens[:, key] - base[sample, key] + 1e-3).relu()
        return out.index_add(1, torch.tensor([query]), far[:, None])

    return function


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_causal_models_run_on_prefixes(name, norm):
    model = seeded(CAUSAL[name])
    maps = norm_maps(model, TOKENS, norm=norm)
    assert maps.engine.endswith(WORDS)
    assert_close(maps.total, norm_map(model, TOKENS, norm), "maps")
    assert torch.equal(maps.total.triu(1), torch.zeros_like(maps.total))
    without = norm_map(lambda tokens: model(tokens) - tokens, TOKENS, norm)
    assert_close(maps.diagonal, without.diagonal(dim1=1, dim2=2), "maps")


@pytest.mark.parametrize("name", CAUSAL)
def test_blocks_on_prefixes(name):
    model = seeded(CAUSAL[name])
    assert_close(blocks(model, TOKENS), dense_jacobian(model, TOKENS), "blocks")


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_on_the_whole_sequence(name):
    model = seeded(OTHERS[name])
    maps = norm_maps(model, TOKENS)
    assert not maps.engine.endswith(WORDS)
    assert_close(maps.total, norm_map(model, TOKENS), "maps")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12, 1e-30])
@pytest.mark.parametrize(("query", "key"), [(0, LENGTH - 1), (4, LENGTH - 1), (SHORTEST - 3, LENGTH - 2), (2, 4)])
def test_a_leak_is_never_dropped(size, query, key, dtype):
    function, tokens = leaking(size, query, key), TOKENS.to(dtype)
    maps = norm_maps(function, tokens)
    leak = torch.full((3,), size * DIM**0.5, dtype=dtype)
    assert_close(maps.total[:, query, key], leak, "float32" if dtype == torch.float32 else "maps")
    assert_close(maps.total, norm_map(function, TOKENS), "float32" if dtype == torch.float32 else "maps")


def test_a_leak_in_one_sample_only():
    function = leaking(1e-6, 1, LENGTH - 1, sample=2)
    tokens = draw(3, LENGTH, DIM, seed=1)
    tokens[:2, LENGTH - 1] = tokens[2, LENGTH - 1] - 1
    maps = norm_maps(function, tokens)
    assert not maps.total[:2, 1, LENGTH - 1].any()
    assert_close(maps.total[2, 1, LENGTH - 1], torch.tensor(1e-6 * DIM**0.5, dtype=torch.float64), "maps")


def test_a_leak_ends_the_prefixes_where_it_is():
    maps = norm_maps(leaking(1e-6, LENGTH - 4, LENGTH - 1), TOKENS)
    assert maps.engine.endswith(WORDS)  # up to there
    assert_close(maps.total, norm_map(leaking(1e-6, LENGTH - 4, LENGTH - 1), TOKENS), "maps")


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_values_that_depend_on_the_length(size):
    def function(tokens: Tensor) -> Tensor:
        return tokens.cumsum(dim=1) * (1 + size * tokens.shape[1])

    maps = norm_maps(function, TOKENS)
    assert not maps.engine.endswith(WORDS)
    assert_close(maps.total, norm_map(function, TOKENS), "maps")


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_derivatives_that_depend_on_the_length(size):
    def function(tokens: Tensor) -> Tensor:
        away = tokens - TOKENS[: len(tokens), : tokens.shape[1]]
        return tokens.cumsum(dim=1) + size * tokens.shape[1] * away

    maps = norm_maps(function, TOKENS[:1])
    assert not maps.engine.endswith(WORDS)
    assert_close(maps.total, norm_map(function, TOKENS[:1]), "maps")


def test_probes_on_prefixes_are_the_same_probes():
    model = seeded(lambda: Recurrent(nn.GRU))

    def wide(tokens: Tensor) -> Tensor:
        return model(tokens).repeat(1, 1, 2)

    found, expected = (norm_maps(wide, TOKENS, probes=9, engine=engine) for engine in ("auto", "replicated"))
    assert found.engine.endswith(WORDS)
    assert not expected.engine.endswith(WORDS)
    assert_close(found.total, expected.total, "maps")
    assert_close(found.standard_error, expected.standard_error, "maps")


def test_budget_holds_on_prefixes():
    model = seeded(Causal)
    tight = norm_maps(model, TOKENS, memory=2**20)
    assert tight.engine.endswith(WORDS)
    assert_close(tight.total, norm_map(model, TOKENS), "maps")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", CAUSAL)
def test_gpu_gives_the_same_numbers(name):
    model = seeded(CAUSAL[name])
    expected = norm_map(model, TOKENS)
    with measuring(model.cuda()):
        maps = norm_maps(model, TOKENS.cuda())
    assert maps.engine.endswith(WORDS)
    assert_close(maps.total.cpu(), expected, "maps")

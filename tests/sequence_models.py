"""Sequence models of every kind that differentiation has trouble with, as data: name -> how it is made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DIM, LENGTH = 6, 5


class OldStyleSquare(torch.autograd.Function):
    """No vmap rule, no setup_context, and state on ctx instead of saved tensors."""

    @staticmethod
    def forward(ctx, value):
        ctx.value = value
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.value * gradient


class OldStyle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return OldStyleSquare.apply(self.mix(tokens.mT).mT)


class ScoresInPlace(nn.Module):
    """Attention whose scores are written slice by slice, over an input that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens *= 1.5
        query, key = self.query(tokens), self.key(tokens)
        scores = tokens.new_empty(len(tokens), LENGTH, LENGTH)
        for step in range(LENGTH):
            scores[:, step] = (query[:, step : step + 1] * key).sum(dim=-1)
        scores /= DIM**0.5
        return scores.softmax(dim=-1) @ tokens


class ReadsValues(nn.Module):
    """Branches on numbers, as numerical guards do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.isnan().any() or tokens.abs().max().item() > 1e6:
            raise ValueError("bad input")
        return self.linear(tokens.cumsum(dim=1)).tanh()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(DIM, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cell(tokens)[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = transformer(layers=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.inner, tokens, use_reentrant=self.reentrant)


class NormOverTime(nn.Module):
    """Batch normalisation over the features of all samples and times."""

    def __init__(self, batch_statistics: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM, track_running_stats=not batch_statistics)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.norm(tokens.mT).mT.cumsum(dim=1))


class Convolution(nn.Module):
    """A causal temporal convolution that changes width and length."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, 3, kernel_size=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.conv(tokens.mT).mT.tanh()


class FreesItsGraph(torch.autograd.Function):
    """Refuses a second backward pass through one forward pass."""

    @staticmethod
    def forward(ctx, value):
        ctx.left = 1
        ctx.save_for_backward(value)
        return value.sin()

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        if ctx.left == 0:
            raise RuntimeError("Trying to backward through the graph a second time")
        ctx.left = 0
        return gradient * value.cos()


class OneBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return FreesItsGraph.apply(self.mix(tokens.mT).mT)

    def plain(self, tokens: Tensor) -> Tensor:
        """The same function without the trick, for the oracle."""
        return self.mix(tokens.mT).mT.sin()


class ScaledDotProduct(nn.Module):
    """The fused kernel, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(DIM, 3 * DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.projection(tokens).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def transformer(layers: int = 2, **options: object) -> nn.TransformerEncoder:
    """A stock encoder; its evaluation takes the fused fast path."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.1, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=layer.self_attn.batch_first)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "old-style function": OldStyle,
    "scores in place": ScoresInPlace,
    "reads values": ReadsValues,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "checkpointed": Checkpointed,
    "batch norm, running": lambda: NormOverTime(batch_statistics=False),
    "convolution": Convolution,
    "one backward": OneBackward,
    "fused attention": ScaledDotProduct,
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of that name in evaluation and float64, from its own seed."""
    return seeded(MODELS[name], seed)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What ``make`` builds, in evaluation and float64, with weights from a seed; the global state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double().eval()
        with torch.no_grad():
            for value in model.buffers():
                if value.is_floating_point():
                    value.uniform_(0.5, 1.5)
    return model

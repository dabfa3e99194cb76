"""What automatic differentiation refuses, each in one sentence."""

from __future__ import annotations

import pytest
import torch
from oracles import draw
from sequence_models import DIM, LENGTH, transformer
from torch import nn

from sensitivity.errors import InputError
from sensitivity.jacobian.autodiff import blocks, norm_maps

TOKENS = draw(3, LENGTH, DIM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "nuclear"}, "unknown norm 'nuclear'; choose one of frobenius, rms, spectral"),
        ({"engine": "forward"}, "unknown engine 'forward'; choose one of auto, replicated, rows, vmap, probes"),
        ({"engine": "probes"}, "needs a number of probes"),
        ({"probes": 1}, "probes must be at least 2, not 1"),
        ({"probes": 4, "norm": "spectral"}, "probes estimate the Frobenius norm"),
        ({"chunk": 0}, "chunk must be a positive number of rows, not 0"),
        ({"memory": 0}, "memory must be a positive number of bytes, not 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        norm_maps(nn.Linear(DIM, DIM).double(), TOKENS, **options)


def test_probes_give_no_blocks():
    with pytest.raises(InputError, match="probes estimate norms, not blocks"):
        blocks(nn.Linear(DIM, DIM).double(), TOKENS, engine="probes")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tokens: (tokens,), "must return a tensor .* not tuple; name the part that is meant with select="),
        (lambda tokens: tokens.mean(dim=1), r"not the shape \(3, 6\); bring it to three axes with select="),
        (lambda tokens: tokens[:1], r"with 3 samples, not the shape \(1, 5, 6\)"),
        (lambda tokens: tokens.long(), "output is torch.int64, which has no derivative"),
    ],
)
def test_bad_outputs(function, message):
    with pytest.raises(InputError, match=message):
        norm_maps(function, TOKENS)


def test_tokens_of_another_type_than_the_model():
    with pytest.raises(InputError, match="the tokens are float64, but the model's parameters are float32"):
        norm_maps(transformer(1).eval(), TOKENS)


def test_integer_tokens_ask_for_the_embedding():
    with pytest.raises(InputError, match="name the embedding layer"):
        norm_maps(nn.Embedding(4, DIM), torch.zeros(1, 3, dtype=torch.long))

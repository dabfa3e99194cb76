"""What the front door refuses, each with one sentence that names the value and the way out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from front_door import TOKENS, Reader, encoder, temporal

from sensitivity import InputError, blocks, measure
from sensitivity.measure import _check_flags, _check_types

NAN = TOKENS.clone()
NAN[1, 2, 3] = math.nan


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"tokens": NAN},
            r"tokens must be finite, but 1 of 80 entries are not \(the first is NaN, at index \(1, 2, 3\)\)",
        ),
        ({"tokens": TOKENS / 0}, "tokens must be finite, but 80 of 80 entries are not"),
        ({"tokens": torch.ones(2, 5, dtype=torch.long)}, "integer ids have no derivative; name the embedding layer"),
        ({"tokens": TOKENS[0, 0]}, r"must have the axes \(sample, time, feature\), not the shape \(8,\)"),
        ({"tokens": TOKENS[:, :0]}, r"tokens are empty: shape \(2, 0, 8\)"),
        ({"tokens": TOKENS[..., :6]}, "tokens have 6 features, but the layer takes 8"),
        ({"tokens": [[1.0]]}, "tokens must be a torch tensor .* not list"),
        (
            {"tokens": TOKENS.to_sparse()},
            "tokens must be a dense tensor that holds numbers, not a sparse, nested or meta",
        ),
        ({"tokens": TOKENS.to("meta")}, "pad sequences of different lengths and say so with padding="),
        ({"layer": ""}, "layer must be the dotted name of a submodule, not ''"),
        ({"seed": 2**70}, "seed must be an integer of at most 64 bits, not 1180591620717411303424"),
        ({"norm": "nuclear"}, "unknown norm 'nuclear'; choose one of frobenius, rms, spectral"),
        ({"backend": "jax"}, "unknown backend 'jax'; choose one of auto, closed_form, autodiff"),
        ({"stochastic": -1}, r"stochastic must be a number of draws \(0 for none\), not -1"),
        (
            {"stochastic": 2, "backend": "closed_form"},
            "stochastic draws are measured by automatic differentiation only",
        ),
        ({"probes": 1}, "probes must be an integer of at least 2, so that there is an error bar, not 1"),
        ({"probes": 4}, "probes estimate what the closed form gives exactly"),
        ({"dtype": torch.int64}, "dtype must be a floating type such as torch.float64, not torch.int64"),
        ({"padding": torch.zeros(2, 4, dtype=torch.bool)}, r"padding has shape \(2, 4\), but the tokens are \(2, 5\)"),
        ({"padding": torch.zeros(2, 5)}, "padding must be a boolean tensor"),
        (
            {"padding": torch.zeros(2, 5, dtype=torch.bool, device="meta")},
            "padding is on the meta device, which holds no",
        ),
        ({"padding": torch.ones(2, 5, dtype=torch.bool)}, "sample 0 is padding throughout"),
        ({"layer": "nope"}, "unknown layer"),
        (
            {"budget": 100},
            "over the budget of 100 B; measure with keep=.statistics., .* or take fewer samples or time steps",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_bad_input_of_a_layer(options, text):
    arguments = {"tokens": TOKENS} | options
    with pytest.raises(InputError, match=text):
        measure(temporal(), arguments.pop("tokens"), **arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer": 3}, "layer must be the dotted name of a submodule, not 3; leave it out for the whole model"),
        ({"residual": "yes"}, "residual must be True, False, a finite factor or None, not 'yes'"),
        ({"residual": math.nan}, "residual must be True, False, a finite factor or None, not nan"),
        ({"dtype": "float32"}, "dtype must be a floating type such as torch.float64, not 'float32'"),
        ({"chunk": 0}, "chunk must be a positive number of rows, not 0"),
        ({"chunk": 1.5}, "chunk must be a positive number of rows, not 1.5"),
        ({"chunk": np.int64(2)}, "chunk must be a positive number of rows, not "),
        ({"seed": None}, "seed must be an integer of at most 64 bits, not None"),
    ],
)
def test_options_of_another_type(options, text):
    """The tests' own type checker would stop these at measure(); a user's program has none."""
    with pytest.raises(InputError, match=text):
        _check_types(**dict.fromkeys(["layer", "residual", "dtype", "chunk"]) | options)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"paths": "maybe"}, "paths must be True, for all paths, or False, not 'maybe'"),
        ({"paths": ["value"]}, r"paths must be True, for all paths, or False, not \['value'\]"),
        ({"heads": 3}, "heads must be True, for all heads, or False, not 3"),
    ],
)
def test_flags_of_another_type(flags, text):
    with pytest.raises(InputError, match=text):
        _check_flags(**flags)


def test_bad_models_are_refused():
    with pytest.raises(InputError, match="model must be a module, a callable or a SoftmaxAttention, not str"):
        measure("model", TOKENS)
    with pytest.raises(InputError, match="layer='a' names a submodule, but function has none"):
        measure(lambda x: x, TOKENS, layer="a")
    with pytest.raises(InputError, match="paths are parts of the closed form of an attention layer"):
        measure(encoder(), TOKENS, paths=True)
    with pytest.raises(InputError, match="heads are parts of the closed form of an attention layer"):
        measure(encoder(), TOKENS, heads=True)
    with pytest.raises(InputError, match="dense blocks of 2 samples, 5 time steps and 8 features needs about"):
        blocks(temporal(), TOKENS, budget=1000)
    broken = temporal()
    broken.output.weight.data[0, 0] = math.inf
    with pytest.raises(InputError, match=r"parameter 'output.weight' holds 1 NaN or infinite entries of 64"):
        measure(broken, TOKENS)


def wants_two(tokens, mask):
    return tokens * mask


@pytest.mark.parametrize(
    ("model", "tokens", "options", "text", "cause"),
    [
        (
            encoder(),
            TOKENS[..., :6],
            {},
            r"TransformerEncoder does not run on inputs of shape \(2, 5, 6\) \(",
            Exception,
        ),
        (
            wants_two,
            TOKENS,
            {},
            r"wants_two does not run on .* \(2, 5, 8\) \(TypeError: .*'mask'",
            TypeError,
        ),
        (
            encoder(),
            TOKENS[..., :6],
            {"layer": "layers.1.self_attn"},
            r"TransformerEncoder does not run on inputs of shape \(2, 5, 6\)",
            Exception,
        ),
        (encoder(), TOKENS[..., :6], {"layer": "layers.1"}, "TransformerEncoder does not run on inputs", Exception),
        (
            encoder(),
            [1, 2],
            {"layer": "layers.1"},
            "TransformerEncoder does not run on a list .*; hand in",
            Exception,
        ),
        (
            Reader().double().eval(),
            torch.full((2, 5), 10),
            {"layer": "embedding"},
            r"Reader does not run on inputs of shape \(2, 5\) \(IndexError: .*out of range",
            IndexError,
        ),
    ],
)
@pytest.mark.parametrize("measured", [measure, blocks])
def test_a_model_that_does_not_run_on_the_tokens_says_so(measured, model, tokens, options, text, cause):
    with pytest.raises(InputError, match=text) as caught:
        measured(model, tokens, **options)
    assert isinstance(caught.value.__cause__, cause)

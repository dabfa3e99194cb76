"""What a sweep refuses before it begins, or says of a source that gives something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import draw
from torch import nn

from sensitivity import InputError, SoftmaxAttention, checks
from sensitivity.sweep import RandomTokens, Sweep, sweep
from sensitivity.sweep.runner import _check_places
from sensitivity.sweep.source import batches, check_source

LAYER = SoftmaxAttention.random(8, 2)


@pytest.mark.parametrize("source", [LAYER, nn.Linear(8, 8), 3, "city"])
def test_what_is_no_source(source):
    """The tests' own type checker would stop some of these at sweep(); a user's program has none."""
    with pytest.raises(InputError, match=r"the source must be a callable .*, not .*; wrap a layer as RandomTokens"):
        check_source(source)


def test_a_layer_is_no_source_for_a_sweep():
    with pytest.raises(InputError, match="for a length, not SoftmaxAttention; wrap a layer as RandomTokens"):
        sweep(LAYER, [4, 8])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "the source gave int; it must give {name: "),
        ([LAYER], "the source gave SoftmaxAttention where batches are expected; it must give {name: "),
        ({"a": LAYER}, "the source gave SoftmaxAttention for layer 'a'; it must give {name: "),
        ({"a": (LAYER,)}, "the source gave tuple for layer 'a'; it must give {name: "),
        ({"a": (draw(2, 4, 8), LAYER)}, "the source gave tuple for layer 'a'; it must give {name: "),
        ({}, "the source gave no layer"),
        ([], "the source gave no batch; it must give {name: "),
    ],
)
def test_what_a_source_gives(given: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        list(batches(given))


def test_a_source_that_gives_nothing() -> None:
    with pytest.raises(InputError, match="the source gave NoneType; it must give"):
        sweep(lambda length: None, [4, 8])


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([LAYER, LAYER], "list"),
        ("x", "str"),
        (None, "NoneType"),
        ({}, "an empty one"),
        ({"a": nn.Linear(8, 8)}, "Linear"),
        (nn.MultiheadAttention(8, 2), "MultiheadAttention"),
    ],
)
def test_random_tokens_take_layers(layers: Any, what: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"takes a SoftmaxAttention, or a dict of some by name, not {what}; .* SoftmaxAttention\.from_module",
    ):
        RandomTokens._named(layers)


def test_seeds() -> None:
    with pytest.raises(InputError, match="seed must be an integer of at least 0 and at most 64 bits, not -1"):
        RandomTokens(LAYER, 2, -1)
    with pytest.raises(InputError, match="seed must be an integer of at most 64 bits, not 'a'"):
        checks.seed("a")
    with pytest.raises(InputError, match="seed must be an integer of at most 64 bits, not True"):
        sweep(RandomTokens(LAYER, 2), [4], seed=True)


def test_places() -> None:
    with pytest.raises(InputError, match="directory must be a path, not 3"):
        _check_places(3, None)
    with pytest.raises(InputError, match=r"settings must map names to plain values, such as {'model': 'a\.pt'}, not 3"):
        _check_places(None, 3)


def test_names_of_statistics_are_strings() -> None:
    found = sweep(RandomTokens(LAYER, samples=2), [4], bounds=())
    with pytest.raises(InputError, match=r"unknown statistic \['diagonal'\]; attention has off_diagonal"):
        Sweep._check_statistic(found, "attention", ["diagonal"])
    with pytest.raises(InputError, match="seed must be an integer of at most 64 bits, not True"):
        found.decay("attention", seed=True)
    with pytest.raises(InputError, match="length 5 was not measured; this sweep has 4"):
        found.record("attention", 5)
    with pytest.raises(InputError, match="unknown layer 'zz'; this sweep has attention"):
        found.kept("zz")
    assert torch.isfinite(torch.tensor(list(found.statistic("attention", "diagonal").values()))).all()

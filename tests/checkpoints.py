"""A small model to save and load, and what a refusal looks like."""

import pytest
import torch
from oracles import draw

from sensitivity import checkpoint
from sensitivity.errors import InputError
from sensitivity.models import Forecaster

GRAPH = torch.tensor([[1.0, 0.5, 0.0], [0.2, 1.0, 0.0], [0.3, 0.0, 1.0]])


def small(seed=0, **options):
    torch.manual_seed(seed)
    return Forecaster(3, **({"dim": 8, "depth": 2, "heads": 2} | options))


def inputs():
    return draw(2, 12, 3, 2).float()


def refused(path, match, **options):
    with pytest.raises(InputError, match=match) as found:
        checkpoint.load(path, **options)
    assert "\n" not in str(found.value)
    return str(found.value)

"""The causality and batch-independence checks."""

from __future__ import annotations

import pytest
import torch
from oracles import draw
from sequence_models import DIM, LENGTH, NormOverTime, OldStyle, build, seeded, transformer
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.jacobian.causality import check_causality
from sensitivity.jacobian.independence import check_batch_independence

TOKENS = draw(3, LENGTH, DIM)


class Masked(nn.Module):
    """A stock encoder under a causal mask of which one entry is missing."""

    def __init__(
        self, hole: tuple[int, int] | None, hidden: float = float("-inf"), after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.encoder = transformer(2)
        self.after = nn.Identity() if after is None else after
        mask = torch.full((LENGTH, LENGTH), hidden, dtype=torch.float64).triu(1)
        if hole is not None:
            mask[hole] = 0.0
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(self.encoder(tokens, mask=self.mask.to(tokens)))


def masked(*args: object) -> Masked:
    model = seeded(lambda: Masked(*args))
    mask = Masked(*args).mask
    model.mask = mask
    return model


@pytest.mark.parametrize("name", ["fused attention", "reads values", "batch norm, running"])
def test_causal_models_pass(name):
    check = check_causality(build(name), TOKENS)
    assert check
    assert str(check) == "causal: no output depends on a later input."


def test_masked_encoder_passes():
    assert check_causality(masked(None), TOKENS)


def test_hole_in_the_mask_is_named():
    check = check_causality(masked((1, 3)), TOKENS)
    assert not check
    # the state at time 3, which time 1 sees in the second layer, has seen the input at time 2
    assert (check.query, check.key, check.layer) == (1, 2, "encoder.layers.0.self_attn")
    assert "output at time 1 depends on the input at time 2" in str(check)
    assert "first layer that lets it in is 'encoder.layers.0.self_attn'" in str(check)


def test_weak_mask_becomes_attention():
    check = check_causality(masked(None, -1.0), TOKENS)
    assert (check.query, check.key) == (0, 1)


def test_row_of_smallest_numbers_becomes_uniform_attention():
    model = masked(None, torch.finfo(torch.float64).min)
    assert check_causality(model, TOKENS)
    model.mask[2] = torch.finfo(torch.float64).min
    check = check_causality(model, TOKENS)
    assert (check.query, check.key) == (2, 3)


def test_layer_after_the_mask_is_named():
    check = check_causality(masked(None, float("-inf"), OldStyle()), TOKENS)
    assert (check.query, check.key, check.layer) == (0, 1, "after")


def test_norm_over_time_with_batch_statistics_leaks():
    check = check_causality(seeded(lambda: NormOverTime(batch_statistics=True)), TOKENS)
    assert (check.query, check.key) == (0, 1)


def test_plain_function():
    assert check_causality(lambda tokens: tokens.cumsum(dim=1), TOKENS)
    check = check_causality(lambda tokens: tokens.flip(1), TOKENS)
    assert (check.query, check.key, check.layer) == (0, LENGTH - 1, None)


def test_other_length_is_refused():
    with pytest.raises(InputError, match="causality compares equal times, but 5 steps go in and 3 come out"):
        check_causality(build("convolution"), TOKENS)


def test_train_mode_is_refused():
    with pytest.raises(InputError, match="train mode"):
        check_causality(build("transformer").train(), TOKENS)


def test_batch_independence():
    assert check_batch_independence(build("transformer"), TOKENS) is None
    assert check_batch_independence(build("gru"), TOKENS[:1]) is None
    coupled = seeded(lambda: NormOverTime(batch_statistics=True))
    assert "batch statistics" in check_batch_independence(coupled, TOKENS)
    assert "batch statistics" in check_batch_independence(coupled, TOKENS[:1])


def test_weak_influence_is_found_by_its_derivative():
    def function(tokens: Tensor) -> Tensor:
        return tokens + 1e-13 * tokens.mean(dim=0, keepdim=True)

    assert "derivative with respect to another sample" in check_batch_independence(function, TOKENS)

"""Modules that other tools have made: quantised, lazy, scripted, frozen, half loaded, or leaving torch."""

from __future__ import annotations

import pytest
import torch
from oracles import draw
from tolerances import assert_close
from torch import nn

from sensitivity import InputError, measure

TOKENS = draw(2, 6, 8).float()


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestQuantised:
    """Autograd sees no path through integer arithmetic, and what goes there would count as nothing."""

    @pytest.mark.parametrize("model", [plain(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()])
    def test_is_refused(self, model):
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        with pytest.raises(
            InputError,
            match=r"the model is quantised: its submodule '(0|linear1)' is a torch\.ao\.nn\.quantized.*Linear, through "
            r"which no derivative can be taken; measure the model as it was before",
        ):
            measure(quantised, TOKENS)

    def test_is_refused_on_its_own(self):
        quantised = torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear})[0]
        with pytest.raises(InputError, match="the model is quantised: it is a torch"):
            measure(quantised, TOKENS)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("model", [nn.Sequential(nn.LazyLinear(8)), nn.Sequential(nn.LazyBatchNorm1d())])
def test_lazy_modules_must_have_found_their_sizes(model):
    with pytest.raises(InputError, match=r"the model's parameter '0\.weight' has no shape yet; run the model once"):
        measure(model.eval(), TOKENS)


def test_a_buffer_that_nobody_loads_does_no_harm():
    model = nn.Linear(8, 8).eval()
    model.register_buffer("unused", torch.zeros(3, device="meta"))
    unused, same = model.unused, nn.Linear(8, 8).eval()
    same.load_state_dict({name: value for name, value in model.state_dict().items() if name != "unused"})
    assert_close(measure(model, TOKENS).norms, measure(same, TOKENS).norms, "maps")
    assert model.unused is unused


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestScripted:
    def test_a_frozen_model_is_measured(self):
        model = plain()
        frozen = torch.jit.freeze(torch.jit.script(model))
        assert_close(measure(frozen, TOKENS).norms, measure(model, TOKENS).norms, "maps")

    def test_a_layer_inside_is_refused(self):
        with pytest.raises(
            InputError,
            match=r"layer='0' lies in a TorchScript module, .*; measure the whole model, or name the",
        ):
            measure(torch.jit.script(plain()), TOKENS, layer="0")
        with pytest.raises(InputError, match="unknown layer 'nope'; known: 0, 1, 2"):
            measure(torch.jit.script(plain()), TOKENS, layer="nope")


def test_a_model_that_leaves_torch():
    with pytest.raises(
        InputError,
        match=r"does not run where a derivative is asked for \(RuntimeError: .*numpy.*\); it may leave",
    ) as caught:
        measure(lambda tokens: torch.from_numpy(tokens.numpy()), TOKENS)
    assert isinstance(caught.value.__cause__, RuntimeError)

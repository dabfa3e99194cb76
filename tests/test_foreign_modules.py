"""Modules that other tools have made: quantised, lazy, scripted, frozen, half loaded, or leaving torch."""

from __future__ import annotations

import pytest
import torch
from oracles import draw
from tolerances import assert_close
from torch import nn

from sensitivity import InputError, measure
from sensitivity.jacobian.guard import measuring

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

    def test_is_refused_under_a_class_of_the_caller(self):
        class Own(torch.ao.nn.quantized.dynamic.Linear):
            pass

        with pytest.raises(InputError, match=r"it is a torch\.ao\.nn\.quantized\.dynamic\..*\.Linear, through"):
            measure(Own(8, 8).eval(), TOKENS)

    @pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, TOKENS)])
    @pytest.mark.parametrize("finish", [lambda model: model, torch.jit.freeze])
    def test_is_refused_as_torchscript(self, make, finish):
        quantised = finish(make(torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear})).eval())
        with pytest.raises(
            InputError, match="is quantised: it is TorchScript that computes in integers, through which"
        ):
            measure(quantised, TOKENS)
        with pytest.raises(InputError, match=r"its submodule '1' is TorchScript that computes in integers"):
            measure(nn.Sequential(nn.Linear(8, 8), quantised).eval(), TOKENS)

    def test_is_refused_within_a_scripted_list(self):
        quantised = torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear})
        layers = torch.jit.script(nn.ModuleList([nn.Linear(8, 8), quantised]))
        with (
            pytest.raises(InputError, match=r"its submodule '1' is TorchScript that computes in integers"),
            measuring(layers),
        ):
            pass

    def test_a_sum_of_floats_is_no_integer_arithmetic(self):
        class Residual(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.sum = nn.Linear(8, 8), torch.ao.nn.quantized.FloatFunctional()

            def forward(self, tokens):
                return self.sum.add(tokens, self.inner(tokens))

        model = Residual().eval()
        assert_close(
            measure(model, TOKENS).norms, measure(lambda tokens: tokens + model.inner(tokens), TOKENS).norms, "maps"
        )


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


class Buffered(nn.Module):
    """A layer beside a buffer, which ``change`` may work on at every call."""

    def __init__(self, buffer, change=lambda buffer: None) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(8, 8), change
        self.register_buffer("kept", buffer)

    def forward(self, tokens):
        self.change(self.kept)
        return self.inner(tokens)


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestBuffers:
    """Putting buffers back never fails, whatever torch cannot compare or write."""

    @pytest.mark.parametrize(
        "buffer",
        [
            torch.eye(4).to_sparse(),
            torch.eye(4).to_sparse_csr(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        ],
        ids=["sparse", "compressed", "nested"],
    )
    def test_a_kind_that_does_not_compare_is_kept(self, buffer):
        model = Buffered(buffer).eval()
        assert_close(measure(model, TOKENS).norms, measure(model.inner, TOKENS).norms, "maps")
        assert model.kept is buffer

    def test_a_sparse_one_gets_its_numbers_back(self):
        model = Buffered(torch.eye(4).to_sparse(), lambda buffer: buffer.mul_(2)).eval()
        measure(model, TOKENS)
        assert torch.equal(model.kept.to_dense(), torch.eye(4))

    def test_one_that_the_model_resizes_gets_its_shape_back(self):
        buffer = torch.arange(8.0)
        model = Buffered(buffer, lambda buffer: buffer.resize_(4).zero_()).eval()
        measure(model, TOKENS)
        assert model.kept is buffer
        assert torch.equal(buffer, torch.arange(8.0))

    def test_one_that_cannot_be_written_is_replaced(self):
        full, buffer = torch.ones(4, 4).to_sparse_csr(), torch.eye(4).to_sparse_csr()
        model = Buffered(buffer, lambda buffer: buffer.resize_as_sparse_(full)).eval()
        measure(model, TOKENS)
        assert model.kept is not buffer
        assert torch.equal(model.kept.to_dense(), torch.eye(4))


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
        with pytest.raises(InputError, match="layer='0@0' lies in a TorchScript module"):
            measure(torch.jit.script(plain()), TOKENS, layer="0@0")

    def test_a_frozen_model_has_no_layers(self):
        with pytest.raises(InputError, match="unknown layer '0'; known: none"):
            measure(torch.jit.freeze(torch.jit.script(plain())), TOKENS, layer="0")


def test_a_model_that_leaves_torch():
    with pytest.raises(
        InputError,
        match=r"does not run where a derivative is asked for \(RuntimeError: .*numpy.*\); it may leave",
    ) as caught:
        measure(lambda tokens: torch.from_numpy(tokens.numpy()), TOKENS)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("good", [1, 2])
def test_a_model_that_fails_at_a_later_call(good):
    calls = []

    def fails(tokens):
        calls.append(1)
        if len(calls) > good:
            raise RuntimeError("the session has ended")
        return 2 * tokens

    with pytest.raises(
        InputError, match=r"the model does not run on inputs of shape .*the session has ended"
    ) as caught:
        measure(fails, TOKENS)
    assert isinstance(caught.value.__cause__, RuntimeError)

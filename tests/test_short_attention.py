"""Attention of training on a CPU: its output and gradient against autograd, and where it steps aside."""

import pytest
import torch
from oracles import draw
from tolerances import assert_close

from sensitivity.layers import DiagonalDropout, DiagonalLearnedPenalty, DiagonalMask, DiagonalPenalty, TemporalAttention
from sensitivity.layers import short as short_room
from sensitivity.layers.short import short_attention

SIZES = [(2, 5, 3, 4), (1, 1, 2, 3), (4, 12, 2, 9)]  # samples, time, heads, width


def plain(packed, heads, bias=None, factors=None):
    """The same, from its formula; maps are (sample, head, key, query) as the kernel takes them."""
    samples, length, _ = packed.shape
    query, key, value = packed.reshape(samples, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = torch.softmax(scores if bias is None else scores + bias.mT, dim=-1)
    used = weights if factors is None else weights * factors.mT
    return (used @ value).transpose(1, 2).reshape(samples, length, -1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("maps", ["none", "bias", "factors", "shared", "both"])
def test_output_and_gradient_are_those_of_autograd(size, maps):
    samples, length, heads, width = size
    packed = draw(samples, length, 3 * heads * width).requires_grad_(True)
    lead = (1, 1) if maps == "shared" else (samples, heads)
    bias = None if maps in ("none", "factors") else draw(*lead, length, length, seed=1)
    factors = None if maps in ("none", "bias") else draw(*lead, length, length, seed=2).abs()
    outer = draw(samples, length, heads * width, seed=3)
    found, expected = (f(packed, heads, bias, factors) for f in (short_attention, plain))
    assert found.is_contiguous()
    assert_close(found, expected, "maps")
    gradients = [torch.autograd.grad(out, packed, outer)[0] for out in (found, expected)]
    assert_close(gradients[0], gradients[1], "maps")


def test_a_hidden_diagonal_has_no_gradient_through_it():
    packed = draw(2, 4, 18).requires_grad_(True)
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    bias.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    found, expected = (f(packed, 2, bias) for f in (short_attention, plain))
    gradients = [torch.autograd.grad(out.square().sum(), packed)[0] for out in (found, expected)]
    assert_close(gradients[0], gradients[1], "maps")


def test_gradient_by_finite_differences():
    packed = draw(2, 3, 12).requires_grad_(True)
    factors = draw(2, 2, 3, 3, seed=1).abs()
    assert torch.autograd.gradcheck(lambda value: short_attention(value, 2, factors, factors), (packed,))


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel was used."""
    made, apply = [], short_room._ShortAttention.apply
    monkeypatch.setattr(short_room._ShortAttention, "apply", lambda *args: made.append(1) or apply(*args))
    return made


DIAGONALS = {
    "none": lambda: None,
    "mask": DiagonalMask,
    "penalty": lambda: DiagonalPenalty(-0.5),
    "logits": lambda: DiagonalDropout(0.5),
    "weights": lambda: DiagonalDropout(0.5, "weights"),
    "shared": lambda: DiagonalDropout(0.5, shared=True),
}


@pytest.mark.parametrize("name", DIAGONALS)
@pytest.mark.parametrize("residual", [True, False])
def test_the_layer_trains_by_it_as_by_the_plain_products(calls, name, residual, monkeypatch):
    layer = TemporalAttention(12, 3, DIAGONALS[name](), residual=residual).double()
    tokens, offset = draw(2, 3, 7, 12).requires_grad_(True), draw(2, 3, 7, 12, seed=1)
    results = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(layer, "_has_kernel", lambda *_: False)
        torch.manual_seed(0)
        out = layer(tokens, offset)
        results.append((out, *torch.autograd.grad(out.square().sum(), [tokens, *layer.parameters()])))
        assert len(calls) == 1
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, "maps")


def test_dropout_of_the_weights_is_right_in_the_mean(calls):
    layer = TemporalAttention(8, 2, dropout=0.4, output_dropout=0.3).double()
    tokens = draw(1, 6, 8)
    many = tokens.expand(20_000, -1, -1)
    torch.manual_seed(0)
    found = layer(many).mean(dim=0)
    assert calls
    deviation = layer(many).std(dim=0) / 20_000**0.5
    assert ((found - layer.eval()(tokens)[0]).abs() < 5 * deviation).all()


def test_nodes_first_in_memory_gives_the_same(calls):
    layer = TemporalAttention(8, 2, DiagonalPenalty(0.3)).double()
    tokens, offset = draw(3, 4, 5, 8), draw(3, 4, 5, 8, seed=1)
    swapped = tokens.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(layer(swapped, offset), layer(tokens, offset), "maps")
    assert layer(swapped, offset).transpose(0, 1).is_contiguous()
    assert_close(layer(swapped, offset[0, 0]), layer(tokens, offset[0, 0]), "maps")
    assert len(calls) == 5


@pytest.mark.parametrize(
    "case", ["evaluation", "no gradient", "causal", "padding", "weights", "draw", "learned", "long", "autocast"]
)
def test_it_steps_aside(calls, case):
    diagonal = DiagonalLearnedPenalty(2) if case == "learned" else None
    layer = TemporalAttention(8, 2, diagonal, causal=case == "causal").double()
    tokens, options = draw(2, 16 if case == "long" else 5, 8), {}
    if case == "padding":
        options["padding"] = torch.zeros(2, 5, dtype=torch.bool)
    if case == "weights":
        options["need_weights"] = True
    if case == "draw":
        options["draw"] = layer.draw(tokens)
    if case == "evaluation":
        layer.eval()
    with torch.set_grad_enabled(case != "no gradient"), torch.autocast("cpu", enabled=case == "autocast"):
        layer(tokens, **options)
    assert not calls


def test_transforms_of_torch_func_go_through(calls):
    layer = TemporalAttention(6, 2).double()
    tokens = draw(5, 6)
    found = torch.func.jacrev(lambda value: layer(value[None])[0])(tokens)
    assert found.shape == (5, 6, 5, 6)
    assert not calls


@pytest.mark.parametrize("maps", ["none", "both"])
def test_second_derivatives_by_finite_differences(maps):
    packed = draw(2, 3, 12).requires_grad_(True)
    both = None if maps == "none" else draw(2, 2, 3, 3, seed=1).abs()
    assert torch.autograd.gradgradcheck(lambda value: short_attention(value, 2, both, both), (packed,))


@pytest.mark.parametrize("name", DIAGONALS)
def test_the_layer_under_one_draw_has_both_derivatives(calls, name):
    layer = TemporalAttention(4, 2, DIAGONALS[name](), dropout=0.3, output_dropout=0.2).double()
    tokens, offset = draw(1, 2, 3, 4).requires_grad_(True), draw(1, 2, 3, 4, seed=1).requires_grad_(True)

    def drawn(*inputs):
        torch.manual_seed(0)
        return layer(*inputs[:2])

    inputs = (tokens, offset, *layer.parameters())
    assert torch.autograd.gradcheck(drawn, inputs)
    assert torch.autograd.gradgradcheck(drawn, inputs)
    assert calls


def test_many_gradients_at_once():
    packed = draw(2, 3, 12).requires_grad_(True)
    factors = draw(2, 2, 3, 3, seed=1).abs()
    out = short_attention(packed, 2, None, factors)
    outer = draw(5, *out.shape, seed=2)
    (found,) = torch.autograd.grad(out, packed, outer, retain_graph=True, is_grads_batched=True)
    expected = torch.stack([torch.autograd.grad(out, packed, one, retain_graph=True)[0] for one in outer])
    assert_close(found, expected, "maps")


def test_transforms_over_parameters_and_forward_derivatives_go_through(calls):
    layer = TemporalAttention(6, 2).double()
    tokens, parameters = draw(2, 5, 6), dict(layer.named_parameters())

    def error(values):
        return torch.func.functional_call(layer, values, (tokens,)).square().sum()

    found = torch.func.grad(error)(parameters)
    expected = torch.autograd.grad(layer.eval()(tokens).square().sum(), list(parameters.values()))
    layer.train()
    for value, one in zip(found.values(), expected, strict=True):
        assert_close(value, one, "maps")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tokens, torch.ones_like(tokens))
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    assert not calls


def test_a_hook_on_the_output_keeps_what_it_saw(calls):
    layer, seen = TemporalAttention(6, 2).double(), []
    handle = layer.output.register_forward_hook(lambda *args: seen.append((args[2], args[2].clone())))
    layer(draw(2, 5, 6), draw(2, 5, 6, seed=1))
    assert torch.equal(*seen[0])
    assert not calls
    handle.remove()
    layer(draw(2, 5, 6))
    assert calls

"""Automatic differentiation against one autograd call per output element."""

from __future__ import annotations

import warnings

import pytest
import torch
from oracles import dense_jacobian, draw, finite_differences, norm_map
from sequence_models import DIM, LENGTH, MODELS, Checkpointed, NormOverTime, build, seeded
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn import functional

from sensitivity.errors import InputError, RunError, SensitivityWarning
from sensitivity.jacobian.autodiff import blocks, norm_maps
from sensitivity.jacobian.guard import measuring

TOKENS = draw(3, LENGTH, DIM)


def coupled() -> nn.Module:
    return seeded(lambda: NormOverTime(batch_statistics=True))


# -- every model, every engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_auto_equals_oracle(name):
    model = build(name)
    truth = getattr(model, "plain", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch 2.4 warns of its own checkpointing
        warnings.filterwarnings("ignore", r"`torch\.cpu\.amp\.autocast", FutureWarning)
        assert_close(blocks(model, TOKENS), dense_jacobian(truth, TOKENS), "blocks")
        maps = norm_maps(model, TOKENS)
    assert_close(maps.total, norm_map(truth, TOKENS), "maps")
    assert maps.engine.startswith("replicated batch" if name == "one backward" else "vmapped VJP")
    assert maps.notes == []


@pytest.mark.parametrize("name", MODELS)
def test_replicated_equals_oracle(name):
    model = build(name)
    maps = norm_maps(model, TOKENS, engine="replicated")
    assert_close(maps.total, norm_map(getattr(model, "plain", model), TOKENS), "maps")
    assert maps.engine.startswith("replicated batch")


class Loops(nn.Module):
    """Something that torch.vmap loops over."""

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = torch.full((len(tokens),), LENGTH), torch.full((len(tokens),), 2)
        words = torch.ones(len(tokens), 2, dtype=torch.long)
        loss = functional.ctc_loss(tokens.log_softmax(dim=-1).transpose(0, 1), words, *lengths, reduction="none")
        return loss[:, None, None].expand(-1, 2, 3)


def test_what_vmap_loops_over_is_replicated():
    maps = norm_maps(Loops(), TOKENS)
    assert_close(maps.total, norm_map(Loops(), TOKENS), "maps")
    assert maps.engine.startswith("replicated batch")
    with pytest.raises(InputError, match="vmap does not go through this function's backward pass; leave engine= out"):
        norm_maps(Loops(), TOKENS, engine="vmap")


@pytest.mark.parametrize("engine", ["replicated", "rows", "vmap"])
@pytest.mark.parametrize("norm", ["frobenius", "rms", "spectral"])
def test_engines_and_norms(engine, norm):
    model = build("transformer")
    maps = norm_maps(model, TOKENS, engine=engine, norm=norm)
    assert_close(maps.total, norm_map(model, TOKENS, norm), "maps")
    without = norm_map(lambda tokens: model(tokens) - tokens, TOKENS, norm)
    assert_close(maps.diagonal, without.diagonal(dim1=1, dim2=2), "maps")
    assert maps.engine.startswith({"replicated": "replicated", "rows": "row loop", "vmap": "vmapped"}[engine])


@pytest.mark.parametrize("norm", ["frobenius", "rms", "spectral"])
def test_some_output_times_have_their_own_diagonal(norm):
    model, times = build("transformer"), torch.tensor([3, 0, 4])
    maps = norm_maps(lambda tokens: model(tokens)[:, times], TOKENS, norm=norm, times=times)
    assert_close(maps.total, norm_map(model, TOKENS, norm)[:, times], "maps")
    without = norm_map(lambda tokens: model(tokens) - tokens, TOKENS, norm)
    assert_close(maps.diagonal, without.diagonal(dim1=1, dim2=2)[:, times], "maps")


def test_outputs_that_are_left_out_leave_no_note():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps = norm_maps(lambda tokens: tokens[:, :2].cumsum(dim=1), TOKENS, times=torch.tensor([0, 1]))
    assert maps.notes == []


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_chunks_do_not_change_the_numbers(chunk, norm):
    model = build("convolution")
    assert_close(norm_maps(model, TOKENS, chunk=chunk, norm=norm).total, norm_map(model, TOKENS, norm), "maps")


def test_oracle_agrees_with_finite_differences():
    model = build("transformer")
    assert_close(dense_jacobian(model, TOKENS), finite_differences(model, TOKENS), "differences")


def test_linear_layer_is_its_weight():
    layer = nn.Linear(DIM, 4).double()
    expected = torch.zeros(1, LENGTH, LENGTH, 4, DIM, dtype=torch.float64)
    for step in range(LENGTH):
        expected[0, step, step] = layer.weight.detach()
    assert torch.equal(blocks(layer, TOKENS[0]), expected)


def test_other_length_and_width_have_no_diagonal():
    maps = norm_maps(build("convolution"), TOKENS)
    assert maps.total.shape == (3, LENGTH - 2, LENGTH)
    assert maps.diagonal is None


def test_causal_zeros_are_exact():
    maps = norm_maps(build("fused attention"), TOKENS)
    assert torch.equal(maps.total.triu(1), torch.zeros_like(maps.total))


# -- the batch ---------------------------------------------------------------------------------------------------------


def test_coupled_samples_take_the_true_batch():
    model = coupled()
    maps = norm_maps(model, TOKENS)
    assert_close(maps.total, norm_map(model, TOKENS), "maps")
    assert maps.engine.startswith("vmapped VJP")
    assert "batch statistics" in maps.notes[0]
    assert norm_maps(model, TOKENS, engine="replicated").engine == "row loop, 1 row per backward pass"
    assert_close(blocks(model, TOKENS), dense_jacobian(model, TOKENS), "blocks")


@pytest.mark.parametrize("engine", ["replicated", "vmap"])
def test_coupled_samples_are_right_with_any_engine(engine):
    model = coupled()
    assert_close(norm_maps(model, TOKENS, engine=engine).total, norm_map(model, TOKENS), "maps")


def test_function_of_fixed_batch_size():
    offsets = draw(3, LENGTH, DIM, seed=1)

    def function(tokens: Tensor) -> Tensor:
        return (tokens.reshape(3, LENGTH, DIM) * offsets).cumsum(dim=1)

    maps = norm_maps(function, TOKENS)
    assert_close(maps.total, norm_map(function, TOKENS), "maps")
    assert "batch of another size" in maps.notes[0]


def test_function_that_knows_places_in_the_batch():
    scales = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)

    def function(tokens: Tensor) -> Tensor:
        repeated = scales.repeat(len(tokens) // 3 + 1)[: len(tokens)]
        return repeated[:, None, None] * tokens.cumsum(dim=1)

    maps = norm_maps(function, TOKENS)
    assert_close(maps.total, norm_map(function, TOKENS), "maps")
    assert "place in the batch" in maps.notes[0]


# -- random functions --------------------------------------------------------------------------------------------------


def test_random_function_is_refused():
    model = nn.Dropout(0.5).double()
    with pytest.raises(InputError, match="two calls with the same tokens give different outputs"):
        norm_maps(model, TOKENS)


def test_one_draw_per_jacobian():
    model = nn.Dropout(0.5).double()
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    drawn = [blocks(model, TOKENS, stochastic=True, generator=generator) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(*drawn)
    assert set(drawn[0].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(blocks(model, TOKENS, stochastic=True, generator=torch.Generator().manual_seed(3)), drawn[0])


# -- grad modes, types -------------------------------------------------------------------------------------------------


def test_inside_no_grad():
    model = build("lstm")
    with torch.no_grad():
        maps = norm_maps(model, TOKENS)
    assert_close(maps.total, norm_map(model, TOKENS), "maps")


def test_inside_inference_mode_is_refused():
    model = build("lstm")
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode is on"):
        norm_maps(model, TOKENS)


def test_tokens_made_in_inference_mode():
    model = build("lstm")
    with torch.inference_mode():
        tokens = TOKENS * 1
    assert_close(norm_maps(model, tokens).total, norm_map(model, TOKENS), "maps")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_stated(dtype):
    model, tokens = build("convolution"), TOKENS.to(dtype)
    expected = norm_map(model, tokens.double())
    maps = norm_maps(model.to(dtype), tokens)
    assert maps.total.dtype == torch.float32
    assert_close(maps.total, expected, "half")
    assert f"computed in {str(dtype)[6:]}" in maps.notes[0]


def test_small_float32_norms_do_not_underflow():
    def function(tokens: Tensor) -> Tensor:
        return 1e-30 * tokens.cumsum(dim=1)

    maps = norm_maps(function, TOKENS.float(), norm="rms")
    assert_close(maps.total, 1e-30 * torch.ones(3, LENGTH, LENGTH).tril(), "float32")


# -- unused inputs, broken derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.zeros_like, lambda tokens: 0 * tokens])
def test_unused_input_gives_zeros_and_a_warning(function):
    with pytest.warns(SensitivityWarning, match="does not depend on the tokens"):
        maps = norm_maps(function, TOKENS)
    assert not maps.total.any()
    with pytest.warns(SensitivityWarning, match="does not depend on the tokens"):
        assert not blocks(function, TOKENS).any()


def test_unused_times_are_noted():
    maps = norm_maps(lambda tokens: tokens[:, 2:], TOKENS)
    assert maps.notes == ["no output depends on input time 0, 1"]


def test_zeros_are_never_silent():
    model = build("lstm")

    @torch.no_grad()
    def function(tokens: Tensor) -> Tensor:
        return model(tokens)

    with pytest.raises(InputError, match="autograd sees no path between them"):
        norm_maps(function, TOKENS)


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_broken_derivative_names_the_block(norm):
    tokens = TOKENS.clone()
    tokens[1, 2] = 0.0

    def function(tokens: Tensor) -> Tensor:
        return tokens.square().sum(dim=-1, keepdim=True).sqrt().cumsum(dim=1)

    with pytest.raises(RunError, match=r"derivative at \(sample 1, query 0, key 2\) is not finite"):
        norm_maps(function, tokens, norm=norm)
    with pytest.raises(RunError, match=r"sample 1, query 0, key 2.*float64 under the math attention backend"):
        blocks(function, tokens)


def test_output_that_is_not_finite():
    layer = nn.MultiheadAttention(DIM, 2, batch_first=True).double().eval()
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[3] = True

    def function(tokens: Tensor) -> Tensor:
        return layer(tokens, tokens, tokens, attn_mask=mask)[0]

    with pytest.raises(InputError, match="row 3 attends to nothing"):
        norm_maps(function, TOKENS)


def test_reentrant_checkpointing_names_the_way_out():
    with pytest.raises(InputError, match="use_reentrant=False"):
        norm_maps(seeded(lambda: Checkpointed(reentrant=True)), TOKENS)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_budget_is_stated_and_refused():
    model = build("transformer")
    with pytest.raises(InputError, match=r"differentiating 3 samples of 5 x 6 into 5 x 6 .*over the budget of 1 KiB"):
        norm_maps(model, TOKENS, memory=1024)
    with pytest.raises(InputError, match=r"\(.* 5000 rows at a time\).*pass a smaller chunk="):
        norm_maps(model, TOKENS, memory=2**20, chunk=5000)
    with pytest.raises(
        InputError, match=r"holding the blocks of 3 samples, 5 x 5 blocks of 6 x 6, needs about 21.1 KiB"
    ):
        blocks(model, TOKENS, memory=2**14)


def test_small_budget_takes_smaller_passes():
    model = build("transformer")
    generous, tight = norm_maps(model, TOKENS), norm_maps(model, TOKENS, memory=2**15)
    assert generous.engine == "vmapped VJP, 30 rows per backward pass"
    assert int(tight.engine.split(",")[1].split()[0]) < 10
    assert_close(tight.total, generous.total, "maps")


# -- numbers and draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_spectral_norms_in_float32(scale):
    model, tokens = build("convolution"), TOKENS.float()
    expected = norm_map(model, tokens.double(), "spectral") * scale
    wide = build("convolution").float()
    maps = norm_maps(lambda value: wide(value) * scale, tokens, norm="spectral")
    assert_close(maps.total, expected, "float32")


def test_a_random_function_that_frees_its_graph_keeps_its_draw():
    model = build("one backward")

    def function(tokens: Tensor) -> Tensor:
        return torch.nn.functional.dropout(model(tokens).mean(dim=-1, keepdim=True), 0.5).expand(-1, -1, 2)

    drawn = blocks(function, TOKENS, stochastic=True)
    assert drawn.any()
    assert torch.equal(drawn[..., 0, :], drawn[..., 1, :])


# -- threads, devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("engine", ["auto", "replicated", "rows"])
def test_threads_are_the_callers(threads, engine):
    model, before, seen = build("gru"), torch.get_num_threads(), []

    def function(tokens: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return model(tokens)

    torch.set_num_threads(threads)
    try:
        norm_maps(function, TOKENS, engine=engine)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {threads}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("engine", ["auto", "replicated", "rows"])
@pytest.mark.parametrize("name", MODELS)
def test_gpu_gives_the_same_numbers(name, engine):
    model = build(name)
    expected = norm_map(getattr(model, "plain", model), TOKENS)
    with measuring(model.cuda()):
        maps = norm_maps(model, TOKENS.cuda(), engine=engine)
    assert maps.total.device.type == "cuda"
    assert_close(maps.total.cpu(), expected, "maps")

"""What a measurement refuses, and that it leaves the caller's world bit-identical."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings

import pytest
import torch
from oracles import dense_jacobian, draw, norm_map
from sequence_models import DIM, LENGTH, NormOverTime, build, seeded, transformer
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn import functional

from sensitivity.errors import InputError
from sensitivity.jacobian.autodiff import blocks, norm_maps
from sensitivity.jacobian.guard import check_mode, measuring, upcast
from sensitivity.layers import DiagonalDropout, TemporalAttention
from sensitivity.modules import modules_of, unwrap

TOKENS = draw(3, LENGTH, DIM)


class Home(nn.Module):
    """A model with something of everything that could change: dropout, batch statistics, counters, shared parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.encoder = transformer(1)
        self.head = nn.Linear(DIM, DIM)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.cache = tokens.detach()[0]
        self.register_buffer("late", torch.ones(2))
        return self.head(self.encoder(self.norm(tokens.mT).mT))


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that the guard promises to keep, in comparable form."""
    return {
        "modes": [part.training for part in model.modules()],
        "values": {name: (value.data_ptr(), value.tolist()) for name, value in model.state_dict().items()},
        "buffers": {name: id(value) for name, value in model.named_buffers()},
        "grads": [
            (id(value.grad), None if value.grad is None else value.grad.tolist()) for value in model.parameters()
        ],
        "flags": [value.requires_grad for value in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "kernels": [
            getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        ],
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "convolutions": (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.enabled),
        "types": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    }


@pytest.fixture
def home():
    model = seeded(Home)
    model.head.weight.requires_grad_(False)
    model(TOKENS).sum().backward()
    return model


@pytest.fixture(params=["default", "unusual"])
def surroundings(request):
    """The usual settings of torch, and another set of them."""
    if request.param == "default":
        yield
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.mha.set_fastpath_enabled(True)
        torch.backends.cuda.enable_flash_sdp(True)


def boom(_: Tensor) -> Tensor:
    raise KeyError("boom")


def test_everything_stays(home, surroundings):
    before = state_of(home)
    with measuring(home):
        maps = norm_maps(home, TOKENS)
    assert state_of(home) == before
    assert maps.total.any()


def test_everything_stays_after_an_error(home, surroundings):
    before = state_of(home)
    with pytest.raises(KeyError), measuring(home):  # noqa: PT012
        home.train()
        home(TOKENS.clone().requires_grad_(True)).sum().backward()
        torch.rand(3)
        torch.set_default_dtype(torch.float64)
        boom(TOKENS)
    assert state_of(home) == before


def test_train_mode_that_is_let_through_leaves_statistics(home):
    home.train()
    before = state_of(home)
    with measuring(home, stochastic=True):
        blocks(home, TOKENS, stochastic=True)
    assert state_of(home) == before


def test_engine_alone_keeps_the_settings(home, surroundings):
    before = state_of(nn.Linear(1, 1))
    norm_maps(build("fused attention"), TOKENS)
    after = state_of(nn.Linear(1, 1))
    for part in ("kernels", "fast", "autocast", "precision", "convolutions", "types"):
        assert after[part] == before[part]


def test_inside_math_attention_and_full_precision(surroundings):
    with measuring(None):
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        assert torch.get_float32_matmul_precision() == "highest"


PRECISION = """
import torch
from sensitivity.jacobian.guard import measuring
b = torch.backends
places = [p for p in (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
          if hasattr(p, "fp32_precision")]
def settings():
    return [place.fp32_precision for place in places]
for place, value in ((None, ""), (b.cuda.matmul, "tf32"), (b.mkldnn.matmul, "bf16")):
    if place in places:
        place.fp32_precision = value
    before = settings()
    with measuring(None):
        assert set(settings()) <= {"ieee"}, settings()
    assert settings() == before, (settings(), before)
"""


def test_newer_precision_settings_stay_whatever_they_were():
    """In a process of its own: which state torch starts in is half of the question."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", PRECISION], check=True)


def test_parameters_are_frozen_inside(home):
    with measuring(home):
        assert not any(value.requires_grad or value.grad is not None for value in home.parameters())


def test_nests(home):
    before = state_of(home)
    with measuring(home), measuring(home.forward):
        norm_maps(home, TOKENS)
    assert state_of(home) == before


def test_autocast_does_not_touch_the_numbers():
    model = build("transformer").float()
    expected = norm_map(model, TOKENS.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = norm_maps(model, TOKENS.float()).total
    assert_close(actual, expected, "float32")


def test_no_stray_warnings():
    model = build("fused attention")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in ("replicated", "rows", "vmap"):
            norm_maps(model, TOKENS, engine=engine)


# -- train mode --------------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.dropout(tokens, 0.1, self.training)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transformer(1), r"its submodule 'layers.0.self_attn' \(MultiheadAttention\) draws a random .*p=0.1"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), r"'1' \(Dropout\)"),
        (lambda: nn.Sequential(nn.BatchNorm1d(2)), r"'0' \(BatchNorm1d\) normalises with batch statistics"),
        (lambda: nn.MultiheadAttention(4, 2, dropout=0.2), r"MultiheadAttention draws .*p=0.2"),
        (lambda: nn.LSTM(2, 2, num_layers=2, dropout=0.2), "LSTM draws a random mask"),
        (lambda: nn.Sequential(nn.RReLU()), "draws random slopes"),
        (Functional, "Functional computes something else in train mode"),
        (lambda: TemporalAttention(4, 2, diagonal=DiagonalDropout(0.3)), r"'diagonal' \(DiagonalDropout\).*p=0.3"),
        (lambda: TemporalAttention(4, 2, dropout=0.3), r"'attention_dropout' \(Dropout\)"),
    ],
)
def test_train_mode_names_the_first_submodule(make, message):
    model = make().train()
    with pytest.raises(InputError, match=message):
        check_mode(model)
    with pytest.raises(InputError, match=r"call model.eval\(\) first, or pass stochastic=n"), measuring(model):
        pass
    with pytest.raises(InputError, match="the model is in train mode"), measuring(lambda tokens: model(tokens)):
        pass
    with measuring(model, stochastic=True):
        pass
    with measuring(model.eval()):
        pass


def test_only_the_part_in_train_mode_is_named():
    model = transformer(2).eval()
    model.layers[1].dropout1.train()
    with pytest.raises(InputError, match=r"'layers.1.dropout1'"), measuring(model):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2),
        lambda: nn.LSTM(2, 2, dropout=0.0),
        lambda: nn.Dropout(0.0),
        lambda: NormOverTime(batch_statistics=True),
        lambda: TemporalAttention(4, 2),
        lambda: TemporalAttention(4, 2, diagonal=DiagonalDropout(0.0)),
        lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0),
    ],
)
def test_train_mode_without_effect_is_let_through(make):
    model = make().train()
    with measuring(model):
        assert all(part.training for part in model.modules())


# -- parameters, inference mode ----------------------------------------------------------------------------------------


def test_inference_mode():
    with torch.inference_mode():
        with pytest.raises(InputError, match="inference_mode is on"), measuring(nn.Linear(2, 2)):
            pass
        model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="'weight' was made inside torch"), measuring(model):
        pass


def test_parameters_must_be_finite():
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[0, 1] = float("nan")
    with pytest.raises(InputError, match=r"'0.weight' holds 1 NaN or infinite entries of 4"), measuring(model):
        pass


def test_parameters_must_be_loaded():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(DIM, DIM))
    with (
        pytest.raises(InputError, match=r"the model's parameter '0\.weight' is on the meta device, .* load it before"),
        measuring(model),
    ):
        pass


def test_upcast_is_a_copy():
    model = build("transformer").bfloat16()
    wide = upcast(model, torch.float64)
    assert next(model.parameters()).dtype == torch.bfloat16
    tokens = TOKENS.bfloat16().double()
    assert_close(norm_maps(wide, tokens).total, norm_map(wide, tokens), "maps")


# -- wrappers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
)
def test_wrapped_models_are_unwrapped(wrap):
    model = build("transformer")
    wrapped = wrap(model)
    assert unwrap(wrapped) is model
    assert modules_of(wrapped) == [model]
    assert_close(blocks(unwrap(wrapped), TOKENS), dense_jacobian(model, TOKENS), "blocks")


def test_compiled_parts_run_as_they_are():
    model = build("transformer")
    expected = norm_map(model, TOKENS)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    with measuring(model):
        assert_close(norm_maps(model, TOKENS).total, expected, "maps")


def test_modules_behind_a_callable():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    held = {"model": second}

    def closure(tokens: Tensor) -> Tensor:
        return first(held["model"](tokens))

    assert modules_of(closure) == [first, second]
    assert modules_of(first.forward) == [first]
    assert modules_of(functools.partial(closure, tokens=1)) == [first, second]
    assert modules_of(torch.relu) == []
    assert modules_of(None) == []

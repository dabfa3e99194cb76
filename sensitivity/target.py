"""What a measurement is to look at: a layer with a description, or a function that can only be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sensitivity import adapters, checks
from sensitivity.attention import SoftmaxAttention
from sensitivity.describers import describer
from sensitivity.errors import InputError
from sensitivity.jacobian.guard import upcast
from sensitivity.jacobian.independence import check_output
from sensitivity.modules import unwrap

Model = nn.Module | SoftmaxAttention | Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Target:
    """What is to be measured: a layer with a description, or a function that can only be differentiated.

    Attributes:
        function: maps ``(sample, time, feature)`` to ``(sample, time, feature)``.
        tokens: the tokens that reach it.
        attention: its description, where it has one.
        name: what it is called.
        why: why it has no description, where it is an attention layer of a kind that has.
        residual: the factor of the identity that counts as a residual path of the function; True for 1.
        padding: True at padded positions.
        notes: what the reader should know.
    """

    function: Callable[[Tensor], Tensor]
    tokens: Float[Tensor, "sample time feature"]
    attention: SoftmaxAttention | None
    name: str
    why: str = ""
    residual: bool | float | int = True
    padding: Bool[Tensor, "sample time"] | None = None
    notes: list[str] = field(default_factory=list)

    def with_residual(self, residual: bool | float | int | None) -> Target:
        """The target with the residual path that the caller asks for."""
        if self.attention is None:
            return replace(self, residual=True if residual is None else residual)
        if residual is None or residual == self.attention.residual:
            return replace(self, residual=self.attention.residual)
        attention, function = replace(self.attention, residual=residual), self.function
        more = float(residual) - float(self.attention.residual)
        return replace(
            self,
            attention=attention,
            function=attention if function is self.attention else lambda tokens: function(tokens) + more * tokens,
            residual=residual,
        )

    def with_padding(self, padding: Tensor | None) -> Target:
        """The target with the caller's padding beside that which the layer was called with."""
        own = None if self.attention is None else self.attention.padding
        padding = checks.padding(padding, self.tokens.shape[0], self.tokens.shape[1])
        if padding is None or self.attention is None:
            return replace(self, padding=own if padding is None else padding)
        attention = replace(self.attention, padding=padding if own is None else own | padding)
        # the module itself was not called with this padding, so the description takes its place
        return replace(self, attention=attention, function=attention, padding=attention.padding)

    def in_closed_form(self, backend: str, stochastic: int) -> bool:
        """Whether the closed form is to be used."""
        if backend == "closed_form" and (self.attention is None or stochastic):
            raise InputError(
                "stochastic draws are measured by automatic differentiation only; use backend='auto'."
                if stochastic
                else f"{self.name} has no closed form; use backend='auto'. {self.why}".rstrip()
            )
        return self.attention is not None and backend != "autodiff" and not stochastic

    def output_length(self) -> int:
        """Number of output times, from one run of the function, which is thereby known to run.

        Raises:
            InputError: the function does not run on these tokens, or puts out no ``(sample, time, feature)``.
        """
        with torch.no_grad(), checks.running(self.name, self.tokens):
            return check_output(self.function(self.tokens.clone()), self.tokens).shape[1]

    def described(self) -> tuple[SoftmaxAttention, Float[Tensor, "sample time feature"]]:
        """Description and tokens in one floating type, at least single precision."""
        attention = self.attention
        assert attention is not None
        both = in_one_type(attention, self.tokens)
        given = torch.promote_types(attention.dtype, self.tokens.dtype)
        if given in HALF:
            self.notes.append(f"the layer is {given}; its closed form was computed in {both[0].dtype}")
        return both

    def refuse_parts(self, paths: bool, heads: bool) -> None:
        """Refuses paths and heads where only whole blocks can be differentiated."""
        if paths or heads:
            what = "paths" if paths else "heads"
            raise InputError(
                f"{what} are parts of the closed form of an attention layer, which {self.name} is not measured by; "
                f"leave {what} out, or name an attention layer with layer=. {self.why}".rstrip()
            )


def in_one_type(
    attention: SoftmaxAttention, tokens: Float[Tensor, "sample time feature"]
) -> tuple[SoftmaxAttention, Float[Tensor, "sample time feature"]]:
    """Layer and tokens on the tokens' device and in one floating type, at least single precision."""
    dtype = torch.promote_types(attention.dtype, tokens.dtype)
    dtype = torch.float32 if dtype in HALF else dtype
    return attention.to(dtype=dtype, device=tokens.device), tokens.to(dtype)


def find_target(
    model: Model | Any,
    tokens: Any,
    layer: str | None,
    residual: bool | float | int | None,
    padding: Tensor | None,
    select: Any,
    dtype: torch.dtype | None,
) -> Target:
    """Finds out what is to be measured and at which tokens."""
    checks.floating(dtype)
    model = unwrap(model)
    if dtype is not None and isinstance(model, nn.Module):
        model = upcast(model, dtype)
    elif dtype is not None and isinstance(model, SoftmaxAttention):
        model = model.to(dtype=dtype)
    if isinstance(tokens, Tensor) and tokens.is_floating_point() and dtype is not None:
        tokens = tokens.to(dtype)
    if layer is not None:
        if not isinstance(model, nn.Module):
            raise InputError(f"layer={layer!r} names a submodule, but {type(model).__name__} has none; pass a module.")
        target = _submodule(model, tokens, layer, select)
    elif isinstance(model, SoftmaxAttention):
        target = Target(model, checks.tokens(tokens, model.dim), model, "attention")
    else:
        target = _whole(model, checks.tokens(tokens), select)
    return target.with_residual(residual).with_padding(padding)


def _submodule(model: nn.Module, tokens: Any, layer: str, select: Any) -> Target:
    """A submodule, at the tokens that reach it."""
    modules = dict(model.named_modules())  # scripted modules refuse get_submodule
    module = modules.get(layer)
    if isinstance(modules.get(layer.partition("@")[0]), torch.jit.ScriptModule):
        raise InputError(
            f"layer={layer!r} lies in a TorchScript module, which does not let the tokens be caught that reach it; "
            "measure the whole model, or name the layer in the model as it was before torch.jit."
        )

    def call(model: nn.Module, tokens: Any) -> Any:
        with checks.running(type(model).__name__, tokens):
            return model(tokens)

    if isinstance(module, nn.Embedding):
        function, reaching = adapters.embedding_function(model, tokens, layer, forward=call, select=select)
        return Target(function, reaching, None, f"{type(model).__name__} from {layer}")
    if module is None or describer(module) is None:
        function, reaching = adapters.submodule_function(model, tokens, layer, forward=call, select=select)
        return Target(function, reaching, None, layer)
    try:
        found = adapters.capture(model, tokens, [layer], forward=call)[layer]
    except InputError as error:
        function, reaching = adapters.submodule_function(model, tokens, layer, forward=call, select=select)
        return Target(function, reaching, None, layer, why=str(error))
    function, reaching = adapters.submodule_function(model, tokens, layer, forward=call, select=select)
    return Target(function, reaching, found.attention, layer)


def _whole(model: Callable[..., Any], tokens: Tensor, select: Any) -> Target:
    """A whole module or callable."""
    function = adapters.as_sequence_function(model, select)
    if not isinstance(model, nn.Module):
        return Target(function, tokens, None, getattr(model, "__name__", type(model).__name__))
    name, notes = type(model).__name__, []
    parameter = next((value for value in model.parameters() if value.is_floating_point()), tokens)
    if parameter.dtype != tokens.dtype:
        notes.append(f"the tokens ({tokens.dtype}) were cast to the model's {parameter.dtype}")
        tokens = tokens.to(parameter.dtype)
    if describer(model) is None:
        return Target(function, tokens, None, name, notes=notes)
    try:
        attention = SoftmaxAttention.from_module(model)
    except InputError as error:
        return Target(function, tokens, None, name, why=str(error), notes=notes)
    checks.features(tokens, attention.dim)
    return Target(function, tokens, attention, name, notes=notes)

"""Weights, biases and masks of one layer, and what it computes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sensitivity import checks, diagonal_bias
from sensitivity.attention import refusals
from sensitivity.describers import describer, known_kinds
from sensitivity.errors import InputError


@dataclass(frozen=True, eq=False)
class SoftmaxAttention:
    r"""One self-attention layer over time, per head ``h`` of width ``d``.

    .. math::

        s_{ij} = c \langle W_Q x_i + b_Q, W_K x_j + b_K \rangle + B_{ij}, \quad a_i = \mathrm{softmax}_j(s_{i\cdot}),
        \quad h_i = \gamma x_i + \sum_h W_O \sum_j m_{ij} a_{ij} (W_V x_j + b_V) + b_O

    Attributes:
        query_weight: :math:`W_Q`, ``(head, width, dim)``.
        key_weight: :math:`W_K`, ``(head, width, key_dim)``.
        value_weight: :math:`W_V`, ``(head, value_width, value_dim)``.
        output_weight: :math:`W_O`, ``(head, out, value_width)``.
        query_bias: :math:`b_Q`, ``(head, width)``.
        key_bias: :math:`b_K`, ``(head, width)``.
        value_bias: :math:`b_V`, ``(head, value_width)``.
        output_bias: :math:`b_O`, ``(out,)``.
        scale: :math:`c`; ``1 / sqrt(width)`` unless given.
        bias: the additive part of :math:`B` that is given as numbers, broadcast to ``(sample, head, query, key)``;
            ``-inf`` hides a pair.
        causal: hides every key after the query.
        diagonal_bias: added to the logits of the diagonal: a penalty, one for each head ``(head,)``, or ``-inf`` for
            the hard diagonal mask. Where the diagonal is the only visible key of a row it stays visible, so that the
            row is defined.
        diagonal_length: :math:`T_0`, for a penalty that follows the length: a row that sees n other keys then has
            ``diagonal_bias`` :math:`+ \log(n / (T_0 - 1))`. None for the same penalty everywhere.
        padding: True at padded positions, ``(sample, time)``: hidden as keys, and left out as queries.
        residual: the factor :math:`\gamma` on the residual :math:`x_i`: True for 1, False for 0, a number for a gate.
        multiplier: :math:`m_{ij}`, sampled factors on the weights after the softmax, broadcast to
            ``(sample, head, query, key)``.

    Raises:
        InputError: weights that do not fit together, or that are not finite; masks of another type or shape.
    """

    query_weight: Float[Tensor, "head width dim"]
    # axes that must agree have names of their own here, so that __post_init__ can say what is wrong
    key_weight: Float[Tensor, "key_heads key_width key_dim"]
    value_weight: Float[Tensor, "value_heads value_width value_dim"]
    output_weight: Float[Tensor, "output_heads out output_width"]
    query_bias: Float[Tensor, "head width"] | None = None
    key_bias: Float[Tensor, "head width"] | None = None
    value_bias: Float[Tensor, "head value_width"] | None = None
    output_bias: Float[Tensor, " out"] | None = None
    scale: float = None  # type: ignore[assignment]  # becomes 1 / sqrt(width)
    bias: Tensor | None = None
    causal: bool = False
    diagonal_bias: float | int | Float[Tensor, " diagonal_head"] = 0.0
    diagonal_length: int | None = None
    padding: Bool[Tensor, "sample time"] | None = None
    residual: bool | float | int = False
    multiplier: Tensor | None = None

    def __post_init__(self) -> None:
        refusals.check(self, self._tensors())
        object.__setattr__(self, "scale", 1 / math.sqrt(self.width) if self.scale is None else float(self.scale))
        for name in ("bias", "multiplier"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value.reshape((1,) * (4 - value.ndim) + tuple(value.shape)))

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.query_weight.shape[0]

    @property
    def width(self) -> int:
        """Width of one head's queries and keys."""
        return self.query_weight.shape[1]

    @property
    def dim(self) -> int:
        """Features of a token."""
        return self.query_weight.shape[2]

    @property
    def out_dim(self) -> int:
        """Features of an output state."""
        return self.output_weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the weights."""
        return self.query_weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.query_weight.device

    # -- construction --------------------------------------------------------------------------------------------

    @classmethod
    def from_module(
        cls, module: nn.Module, residual: bool | float | int | None = None, **options: Any
    ) -> SoftmaxAttention:
        """Describes an attention module: ours, ``torch.nn.MultiheadAttention``, or any class with an adapter.

        Args:
            module: the layer; its weights are detached, never copied or changed.
            residual: whether the description adds the residual connection around the module, or its factor; None takes
                what the module itself does (``torch.nn.MultiheadAttention`` adds none).
            **options: what the module's adapter takes, such as a mask.

        Raises:
            InputError: no adapter knows this class; the message lists the known ones.
        """
        describe = describer(module)
        if describe is None:
            known = ", ".join(known_kinds())
            raise InputError(
                f"{type(module).__name__} is not an attention layer that can be described; known: {known}, and any "
                "module with a softmax_attention() method. Measure it with backend='autodiff' instead."
            )
        attention = describe(module, **options)
        return attention if residual is None else dataclasses.replace(attention, residual=residual)

    @classmethod
    def random(
        cls,
        dim: int,
        heads: int,
        seed: int = 0,
        residual: bool | float | int = True,
        *,
        biases: bool = False,
        gain: float = 1.0,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> SoftmaxAttention:
        """A layer with Gaussian weights of variance ``1 / dim`` from its own generator.

        On tokens ``N(0, I)`` its logits then have a variance of about ``gain ** 4``.

        Args:
            dim: features of a token.
            heads: number of heads; must divide ``dim``.
            seed: seed of the generator; the global state is not touched.
            residual: whether the residual connection is part of the layer, or the factor of its gate.
            biases: whether queries, keys, values and outputs have (small random) biases.
            gain: factor on the query and key weights.
            dtype: floating type of the weights.
            **options: further fields, such as ``causal=True``.

        Raises:
            InputError: ``dim`` is not divisible by ``heads``, ``gain`` is not finite, or ``dtype`` not floating.
        """
        width = checks.head_width(dim, heads)
        checks.floating(dtype)
        if not math.isfinite(gain):
            raise InputError(f"gain must be a finite number, not {gain}.")
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, factor: float = 1.0) -> Tensor:
            return (factor / math.sqrt(dim) * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

        weights: dict[str, Any] = {
            "query_weight": draw(heads, width, dim, factor=gain),
            "key_weight": draw(heads, width, dim, factor=gain),
            "value_weight": draw(heads, width, dim),
            "output_weight": draw(heads, dim, width),
        }
        if biases:
            weights |= {name: draw(heads, width) for name in ("query_bias", "key_bias", "value_bias")}
            weights["output_bias"] = draw(dim)
        return cls(**weights, residual=residual, **options)

    def to(
        self,
        *given: torch.dtype | torch.device | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> SoftmaxAttention:
        """The same layer with its floating tensors in another type or on another device; itself if they are there.

        ``given`` are a type, a device or both without their names.
        """
        for value in given:
            dtype, device = (value, device) if isinstance(value, torch.dtype) else (dtype, value)
        checks.floating(dtype)
        device = checks.device(device)

        def move(value: Tensor) -> Tensor:
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        before = self._tensors()
        moved: dict[str, Any] = {name: move(value) for name, value in before.items()}
        if all(moved[name] is value for name, value in before.items()):
            return self  # a copy would be checked once more
        return dataclasses.replace(self, **moved)

    def __repr__(self) -> str:
        marks = {
            "biases": any(getattr(self, name) is not None for name in ("query_bias", "key_bias", "value_bias")),
            "bias": self.bias is not None,
            "causal": self.causal,
            f"diagonal_bias={diagonal_bias.in_words(self.diagonal_bias, self.diagonal_length)}": self._hides_diagonal
            or diagonal_bias.adds(self.diagonal_bias, self.diagonal_length),
            "padding": self.padding is not None,
            "residual": self.residual == 1,
            f"residual={self.residual:g}": self.residual not in (0, 1),
            "multiplier": self.multiplier is not None,
        }
        parts = [f"dim={self.dim}", f"heads={self.heads}", *(name for name, there in marks.items() if there)]
        return f"SoftmaxAttention({', '.join(parts)}, {str(self.dtype).removeprefix('torch.')})"

    # -- the layer itself ----------------------------------------------------------------------------------------

    def project(
        self, tokens: Float[Tensor, "sample time dim"]
    ) -> tuple[
        Float[Tensor, "sample head time width"],
        Float[Tensor, "sample head time width"],
        Float[Tensor, "sample head time value_width"],
    ]:
        """Queries, keys and values of every head."""
        return (
            _project(tokens, self.query_weight, self.query_bias),
            _project(tokens, self.key_weight, self.key_bias),
            _project(tokens, self.value_weight, self.value_bias),
        )

    @property
    def masked(self) -> bool:
        """Whether anything can hide a pair."""
        return self.causal or self.bias is not None or self.padding is not None or self._hides_diagonal

    def hidden(self, length: int, rows: Tensor | None = None) -> Bool[Tensor, "#sample #head row key"]:
        """Which pairs the mask hides at this length: causality, ``-inf`` in the biases, padded keys.

        Args:
            length: number of tokens.
            rows: the query times that are wanted; all of them by default.
        """
        keys = torch.arange(length, device=self.device)
        rows = keys if rows is None else rows
        hidden = torch.zeros(1, 1, len(rows), length, dtype=torch.bool, device=self.device)
        if self.causal:
            hidden = hidden | (keys > rows[:, None])
        if self.bias is not None:
            hidden = hidden | torch.isneginf(self._fitted("bias", length, rows))
        if self.padding is not None:
            if self.padding.shape[-1] != length:
                raise InputError(f"padding covers {self.padding.shape[-1]} positions, but there are {length} tokens.")
            hidden = hidden | self.padding[:, None, None, :]
        if self._hides_diagonal:
            diagonal = keys == rows[:, None]
            others = (~hidden & ~diagonal).any(dim=-1, keepdim=True)
            hidden = hidden | (diagonal & others)
        return hidden

    def scores(self, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, "sample head query key"]:
        """Scores before the softmax, after scale and bias; ``-inf`` where a pair is hidden.

        Raises:
            InputError: a row (of a position that is not padding) attends to nothing.
        """
        query, key, _ = self.project(tokens)
        return self.row_scores(query, key, torch.arange(tokens.shape[1], device=tokens.device))

    def row_scores(
        self,
        query: Float[Tensor, "sample head row width"],
        key: Float[Tensor, "sample head key width"],
        rows: Int[Tensor, " row"],
    ) -> Float[Tensor, "sample head row key"]:
        """Scores of the query times ``rows`` only; see ``scores``."""
        length = key.shape[-2]
        scores = (self.scale * query) @ key.mT
        if self.bias is not None:
            bias = self._fitted("bias", length, rows)
            scores = scores + torch.where(torch.isneginf(bias), 0.0, bias).to(scores.dtype)
        hidden = self.hidden(length, rows) if self.masked else None
        if diagonal_bias.adds(self.diagonal_bias, self.diagonal_length):
            on_diagonal = torch.arange(length, device=rows.device) == rows[:, None]
            penalty = diagonal_bias.of_rows(self.diagonal_bias, self.diagonal_length, on_diagonal, hidden, scores.dtype)
            scores = scores + penalty[..., None] * on_diagonal
        if hidden is None:
            return scores
        self.check_rows(hidden, rows)
        return scores.masked_fill(hidden, -math.inf)

    def weights(self, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, "sample head query key"]:
        """Attention weights :math:`a_{ij}`, before any dropout; zero in padded rows that attend to nothing."""
        query, key, _ = self.project(tokens)
        return self.row_weights(query, key, torch.arange(tokens.shape[1], device=tokens.device))

    def row_weights(
        self,
        query: Float[Tensor, "sample head row width"],
        key: Float[Tensor, "sample head key width"],
        rows: Int[Tensor, " row"],
    ) -> Float[Tensor, "sample head row key"]:
        """Weights of the query times ``rows`` only; see ``weights``."""
        scores = self.row_scores(query, key, rows)
        if not self.masked:
            return torch.softmax(scores, dim=-1)
        empty = torch.isneginf(scores).all(dim=-1, keepdim=True)
        return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)

    def row_multiplier(self, length: int, rows: Int[Tensor, " row"]) -> Tensor:
        """The post-softmax multiplier of the query times ``rows``; one where nothing is dropped."""
        if self.multiplier is None:
            return torch.ones((), dtype=self.dtype, device=self.device)
        return self._fitted("multiplier", length, rows)

    def sample(self, index: slice | Int[Tensor, " chosen"]) -> SoftmaxAttention:
        """The layer with its per-sample tensors (bias, multiplier, padding) cut down to some samples."""
        cut = {
            name: getattr(self, name)[index]
            for name in ("bias", "multiplier", "padding")
            if getattr(self, name) is not None and getattr(self, name).shape[0] > 1
        }
        return dataclasses.replace(self, **cut) if cut else self

    def __call__(self, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, "sample time out"]:
        """The layer's output :math:`h`; differentiable by autograd, the oracle of every closed form."""
        _, _, value = self.project(tokens)
        weights = self.weights(tokens)
        if self.multiplier is not None:
            weights = weights * self.multiplier
        out = torch.einsum("shqv,hov->sqo", weights @ value, self.output_weight)
        if self.output_bias is not None:
            out = out + self.output_bias
        return out + float(self.residual) * tokens if self.residual else out

    # -- helpers -------------------------------------------------------------------------------------------------

    @property
    def _hides_diagonal(self) -> bool:
        return not isinstance(self.diagonal_bias, Tensor) and self.diagonal_bias == -math.inf

    def check_rows(self, hidden: Bool[Tensor, "#sample #head row key"], rows: Int[Tensor, " row"]) -> None:
        """Refuses a mask under which a position that is not padding attends to nothing."""
        empty = hidden.all(dim=-1)
        if self.padding is not None:
            empty = empty & ~self.padding[:, None, rows]
        if empty.any():
            sample, head, row = (int(part) for part in empty.nonzero()[0])
            raise InputError(
                f"row {int(rows[row])} attends to nothing (sample {sample}, head {head}): its mask hides every key, so "
                "its softmax is undefined; let the row see at least one key, or mark its position as padding."
            )

    def _fitted(self, name: str, length: int, rows: Tensor) -> Tensor:
        """The rows of the bias or multiplier, checked to broadcast over ``length`` queries and keys."""
        value: Tensor = getattr(self, name)
        if any(size not in (1, length) for size in value.shape[-2:]):
            raise InputError(
                f"the attention layer's {name} is {tuple(value.shape[-2:])} (query, key), but there are {length} "
                "tokens."
            )
        return value if value.shape[-2] == 1 else value[:, :, rows]

    def _tensors(self) -> dict[str, Tensor]:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if isinstance(value, Tensor)}


def _project(
    tokens: Float[Tensor, "sample time dim"], weight: Float[Tensor, "head width dim"], bias: Tensor | None
) -> Float[Tensor, "sample head time width"]:
    projected = (tokens @ weight.flatten(0, 1).mT).unflatten(2, weight.shape[:2]).transpose(1, 2)
    return projected if bias is None else projected + bias[:, None, :]

r"""Recurrent layers whose backward pass takes many cotangents at once, as products with the Jacobians of single steps.

With the state :math:`s_t` of a layer (``h`` and, in an LSTM, ``c``), the step Jacobians
:math:`A_t = \partial s_t / \partial s_{t-1}` and :math:`B_t = \partial s_t / \partial x_t` follow from the gates in
closed form. Rows :math:`u_t` of all cotangents then go back together, two matrix products a step:

.. math:: u_{t-1} = (u_t + \bar h_t) A_t, \qquad \bar x_t = (u_t + \bar h_t) B_t.

torch's own kernels for these layers take one cotangent at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sensitivity.jacobian.steps import Steps, gru, lstm, rnn_relu, rnn_tanh

_KERNELS = {torch.lstm: lstm, torch.gru: gru, torch.rnn_tanh: rnn_tanh, torch.rnn_relu: rnn_relu}


class Recurrences(TorchFunctionMode):
    """Inside, ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``, which torch's layers call, record this pass.

    Their outputs are those of torch's kernels. Calls on packed sequences, with dropout, or with weights that are
    themselves computed from something differentiable are left to torch.

    Attributes:
        found: whether there was such a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Takes over the calls that :func:`_understood` names."""
        if func in _KERNELS and not kwargs and _understood(*args):
            self.found = True
            return _stacked(func, *args)
        return func(*args, **(kwargs or {}))


def _understood(*args: Any) -> bool:
    """Whether these are the arguments of a call on a padded batch that this module differentiates."""
    if len(args) != 9 or not isinstance(args[2], (list, tuple)):
        return False  # a packed sequence has its weights elsewhere
    tokens, _, weights, _, _, dropout, train = args[:7]
    constant = not any(value.requires_grad and not value.is_leaf for value in weights)
    plain = not torch._C._are_functorch_transforms_active()
    return plain and constant and tokens.ndim == 3 and torch.is_grad_enabled() and not (train and dropout > 0)


def _stacked(
    kernel: Callable[..., Any],
    tokens: Tensor,
    start: Any,
    weights: Any,
    bias: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Layer by layer and direction by direction; arguments and results are those of the kernel."""
    hidden, cell = start if kernel == torch.lstm else (start, None)
    each = len(weights) // len(hidden)
    states = tokens if batch_first else tokens.transpose(0, 1)
    last: list[list[Tensor]] = []
    for layer in range(layers):
        found = []
        for place in range(layer * (1 + bidirectional), (layer + 1) * (1 + bidirectional)):
            backwards = bidirectional and place % 2 == 1
            begin = [hidden[place]] if cell is None else [hidden[place], cell[place]]
            own = weights[place * each : (place + 1) * each]
            output, *rest = _Scan.apply(kernel, bias, states.flip(1) if backwards else states, *own, *begin)
            found.append(output.flip(1) if backwards else output)
            last.append([output[:, -1], *rest])
        states = torch.cat(found, dim=-1)
    ends = [torch.stack(part) for part in zip(*last, strict=True)]
    return states if batch_first else states.transpose(0, 1), *ends


class _Scan(torch.autograd.Function):
    """One layer in one direction: ``(tokens, first state) -> (outputs, last cell state of an LSTM)``."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Any], bias: bool, tokens: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        count = 2 if kernel == torch.lstm else 1
        weights, start = values[:-count], [value[None].contiguous() for value in values[-count:]]
        begin = tuple(start) if count == 2 else start[0]
        output, _, *cell = kernel(tokens, begin, weights, bias, 1, 0.0, False, False, True)
        ctx.steps = _KERNELS[kernel](tokens, output, bias, weights, values[-count:])
        ctx.save_for_backward(*ctx.steps.factors)  # where those who count memory see them
        ctx.constants = len(weights)
        ctx.set_materialize_grads(False)
        return output, *(value[0] for value in cell)

    @staticmethod
    def backward(ctx: Any, output: Tensor | None, *cell: Tensor | None) -> tuple[Tensor | None, ...]:
        tokens, *start = _Adjoint.apply(ctx.steps, output, *cell)
        return None, None, tokens, *[None] * ctx.constants, *start


class _Adjoint(torch.autograd.Function):
    """The backward pass of :class:`_Scan`, which ``torch.vmap`` hands all cotangents at once."""

    @staticmethod
    def forward(steps: Steps, *cotangents: Tensor | None) -> tuple[Tensor, ...]:
        found = steps.pulled_back(*(None if value is None else value[None] for value in cotangents))
        return tuple(value[0] for value in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: second derivatives are not taken."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], steps: Steps, *cotangents: Tensor | None
    ) -> tuple[tuple[Tensor, ...], int]:
        count = info.batch_size
        rows = (
            None if value is None else value.expand(count, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(cotangents, in_dims[1:], strict=True)
        )
        return steps.pulled_back(*rows), 0

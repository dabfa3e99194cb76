r"""The steps of recurrent layers, linear around the states that they ran in, and rows that go back through all steps.

A step takes the state :math:`h_{t-1}` (in an LSTM also :math:`c_{t-1}`) and the input :math:`x_t`. Its Jacobians are
the layer's weights times factors of the gates, so that they cost next to nothing beside the rows that they multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

_HELD = 2**23  # bytes of step Jacobians that are made at once, and kept if they are all

Factors = Sequence[Float[Tensor, "sample time unit"]]


@dataclass(frozen=True)
class Steps:
    """The steps of one layer in one direction.

    Attributes:
        factors: derivatives of the gates; what the step Jacobians are made of.
        jacobians: makes, from the factors of some times, the derivatives of the gates' values with respect to
            ``(state before, input)``, row by row of the state: ``(sample, time, state, out + in)``.
        out: features of the output, which are the first ones of the state.
        features: features of the input.
        cells: for an LSTM, how much of the cell the output shows, and how much the cell keeps, a step.
        projection: for an LSTM whose output is projected, the weight.
        kept: all step Jacobians, if they are small, for the next rows.
    """

    factors: Factors
    jacobians: Callable[[Factors], Float[Tensor, "sample time state outin"]]
    out: int
    features: int
    cells: tuple[Tensor, Tensor] | None = None
    projection: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Features of the state."""
        return self.out + (0 if self.cells is None else self.cells[0].shape[-1])

    def pulled_back(
        self, output: Float[Tensor, "row sample time out"] | None, cell: Float[Tensor, "row sample unit"] | None = None
    ) -> tuple[Tensor, ...]:
        """Derivatives of the inputs, of the first output state and of the first cell state (if there is one).

        Args:
            output: derivatives with respect to the outputs; zero where it is None.
            cell: derivatives with respect to the last cell state; zero where it is None.
        """
        rows = len(output if output is not None else cell if cell is not None else ())
        like, (samples, length) = self.factors[0], self.factors[0].shape[:2]
        first = like.new_zeros(samples, rows, self.width)
        if cell is not None:
            first[..., self.out :] = cell.transpose(0, 1)
        inputs = like.new_empty(length, samples, rows, self.features)
        for begin, jacobians in self._stretches():
            states = like.new_empty(jacobians.shape[1], samples, rows, self.width)
            states[-1] = first
            for place in reversed(range(len(states))):
                time = begin + place
                state, before = states[place], states[place - 1] if place else first
                self._shown(state, time, output)
                # rows go on to the state before; what they say of the inputs is one product at the end
                _product(state, jacobians[:, place, :, : self.out], before[..., : self.out])
                if self.cells is not None:
                    torch.mul(state[..., self.out :], self.cells[1][:, time, None], out=before[..., self.out :])
            enter = jacobians[..., self.out :].transpose(0, 1)
            torch.matmul(states, enter, out=inputs[begin : begin + len(states)])
        parts = (first[..., : self.out].transpose(0, 1), first[..., self.out :].transpose(0, 1))
        return inputs.permute(2, 1, 0, 3), *(part for part in parts if part.shape[-1] > 0)

    def _shown(self, state: Float[Tensor, "sample row state"], time: int, output: Tensor | None) -> None:
        """Adds the derivatives of one step's output, and carries them to the cell that it shows."""
        shown = state[..., : self.out]
        if output is not None:
            shown += output[:, :, time].transpose(0, 1)
        if self.cells is not None:
            spread = shown if self.projection is None else shown @ self.projection
            state[..., self.out :].addcmul_(spread, self.cells[0][:, time, None])

    def _stretches(self) -> Iterator[tuple[int, Float[Tensor, "sample time state outin"]]]:
        """Where stretches of times begin, with their step Jacobians, the last stretch first."""
        samples, length = self.factors[0].shape[:2]
        each = samples * self.width * (self.out + self.features) * self.factors[0].element_size()
        stretch = max(1, _HELD // each)
        for begin in reversed(range(0, length, stretch)):
            made = self.kept or [self.jacobians([value[:, begin : begin + stretch] for value in self.factors])]
            if stretch >= length:
                self.kept[:] = made
            yield begin, made[0]


def _product(
    left: Float[Tensor, "sample row state"],
    right: Float[Tensor, "sample state out"],
    out: Float[Tensor, "sample row out"],
) -> None:
    """A product into a part of the columns of a larger tensor, which only the product of matrices leaves in place."""
    for one, other, there in zip(left, right, out, strict=True):
        torch.mm(one, other, out=there)


def lstm(tokens: Tensor, output: Tensor, bias: bool, weights: Sequence[Tensor], start: Sequence[Tensor]) -> Steps:
    r"""Of :math:`c_t = f c_{t-1} + i g,\ h_t = W_{hr}(o \tanh c_t)`; the state is ``(h, c)``."""
    gates = _affine(tokens, weights[0], weights[2] if bias else None)
    gates += _affine(_before(output, start[0]), weights[1], weights[3] if bias else None)
    enter, forget, new, leave = gates.chunk(4, dim=-1)
    enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
    cells = [start[1]]
    for kept, added in zip(forget.unbind(1), (enter * new).unbind(1), strict=True):
        cells.append(kept * cells[-1] + added)
    old, visible = torch.stack(cells[:-1], dim=1), torch.stack(cells[1:], dim=1).tanh()
    factors = (
        new * enter * (1 - enter),
        old * forget * (1 - forget),
        enter * (1 - new.square()),
        visible * leave * (1 - leave),
    )
    weight = torch.cat([weights[1], weights[0]], dim=1).detach().unflatten(0, (4, -1))
    projection = weights[-1].detach() if len(weights) in (3, 5) else None

    def jacobians(parts: Factors) -> Tensor:
        cell, shown = _mixed(parts[:3], weight[:3]), _mixed(parts[3:], weight[3:])
        return torch.cat([shown if projection is None else projection @ shown, cell], dim=2)

    showing = leave * (1 - visible.square())
    return Steps(factors, jacobians, output.shape[-1], tokens.shape[-1], (showing, forget), projection)


def gru(tokens: Tensor, output: Tensor, bias: bool, weights: Sequence[Tensor], start: Sequence[Tensor]) -> Steps:
    r"""Of :math:`h_t = (1 - z) n + z h_{t-1},\ n = \tanh(W_{in} x_t + r (W_{hn} h_{t-1}))`, biases understood."""
    before = _before(output, start[0])
    entering = _affine(tokens, weights[0], weights[2] if bias else None).chunk(3, dim=-1)
    carried = _affine(before, weights[1], weights[3] if bias else None).chunk(3, dim=-1)
    reset, update = (entering[0] + carried[0]).sigmoid(), (entering[1] + carried[1]).sigmoid()
    new = (entering[2] + reset * carried[2]).tanh()
    steep = (1 - update) * (1 - new.square())
    factors = (
        steep * carried[2] * reset * (1 - reset),
        (before - new) * update * (1 - update),
        steep * reset,
        steep,
        update,
    )
    into, back = (value.detach().unflatten(0, (3, -1)) for value in weights[:2])

    def jacobians(parts: Factors) -> Tensor:
        past = _mixed(parts[:3], back) + parts[4].diag_embed()
        return torch.cat([past, _mixed((*parts[:2], parts[3]), into)], dim=3)

    return Steps(factors, jacobians, output.shape[-1], tokens.shape[-1])


def rnn_tanh(tokens: Tensor, output: Tensor, bias: bool, weights: Sequence[Tensor], start: Sequence[Tensor]) -> Steps:
    r"""Of :math:`h_t = \tanh(W_{ih} x_t + W_{hh} h_{t-1})`, biases understood."""
    return _elman(tokens, output, weights, 1 - output.square())


def rnn_relu(tokens: Tensor, output: Tensor, bias: bool, weights: Sequence[Tensor], start: Sequence[Tensor]) -> Steps:
    r"""Of :math:`h_t = \max(0, W_{ih} x_t + W_{hh} h_{t-1})`, biases understood."""
    return _elman(tokens, output, weights, (output > 0).to(output.dtype))


def _elman(tokens: Tensor, output: Tensor, weights: Sequence[Tensor], slope: Tensor) -> Steps:
    weight = torch.cat([weights[1], weights[0]], dim=1).detach()[None]
    return Steps((slope,), lambda parts: _mixed(parts, weight), output.shape[-1], tokens.shape[-1])


def _mixed(factors: Factors, weight: Float[Tensor, "gate unit in"]) -> Float[Tensor, "sample time unit in"]:
    """The sum over gates of their factors times their weights."""
    return torch.einsum("gbtu,gui->btui", torch.stack(list(factors)), weight)


def _before(output: Tensor, start: Tensor) -> Float[Tensor, "sample time out"]:
    """The output states that the steps started from."""
    return torch.cat([start[:, None], output[:, :-1]], dim=1)


def _affine(states: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "sample time unit"]:
    return torch.nn.functional.linear(states, weight, bias)

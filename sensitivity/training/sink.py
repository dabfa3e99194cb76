"""A loss term on the sink ratio of a model's attention over time, through the closed form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.jacobian.sink import log_sink_ratio
from sensitivity.layers import ResidualGate, TemporalAttention


class SinkPenalty:
    r"""The mean logarithm of the sink ratio over layers and a few sequences of a step, times a weight.

    .. math:: \lambda \, \frac1L \sum_l \ell_l(\theta, x_l(\theta))

    with :math:`\ell` of :func:`sensitivity.jacobian.sink.log_sink_ratio` at the tokens that reach layer l in the step
    itself; the gradient runs through weights and tokens. The layer is taken as it acts in evaluation, without a draw of
    its own dropouts.

    Args:
        model: its temporal attention layers are penalised.
        weight: :math:`\lambda`, in units of the loss (mph) per factor e of the ratio.
        sequences: how many, drawn anew for every layer and step from torch's random stream.

    Raises:
        InputError: a model without attention over time.
    """

    def __init__(self, model: nn.Module, weight: float | int, sequences: int) -> None:
        self.weight, self.sequences = weight, sequences
        self.layers = [module for module in model.modules() if isinstance(module, TemporalAttention)]
        if not self.layers:
            raise InputError(f"{type(model).__name__} has no temporal attention whose sink ratio could be penalised.")
        self._tokens: dict[int, Tensor] = {}
        self._sum, self._steps = torch.zeros(()), 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, the model's forward pass leaves some of the tokens that reach every layer."""
        self._tokens.clear()
        handles = [layer.register_forward_pre_hook(self._keep) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __call__(self) -> Float[Tensor, ""]:
        """The loss term for what was recorded; NaN where weights or tokens are not finite, as the loss then is."""
        found = torch.stack([self._ratio(layer, self._tokens[id(layer)]) for layer in self.layers]).mean()
        self._tokens.clear()
        self._sum, self._steps = self._sum.to(found.device) + found.detach(), self._steps + 1
        return self.weight * found

    def mean(self) -> float:
        """The mean logarithm over the steps since it was asked last."""
        found = float(self._sum) / max(1, self._steps)
        self._sum, self._steps = torch.zeros(()), 0
        return found

    def _keep(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        tokens = args[0].flatten(0, -3)
        chosen = torch.randint(len(tokens), (self.sequences,)).to(tokens.device)
        self._tokens[id(layer)] = tokens[chosen]

    @staticmethod
    def _ratio(layer: TemporalAttention, tokens: Float[Tensor, "sample time dim"]) -> Float[Tensor, ""]:
        gate = layer.residual.gate if isinstance(layer.residual, ResidualGate) else None
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.to(layer.projection.weight.dtype)
            try:
                return log_sink_ratio(layer.softmax_attention(graph=True), tokens, gate).mean()
            except InputError:
                if all(torch.isfinite(parameter).all() for parameter in layer.parameters()):
                    raise
                return torch.full((), torch.nan, device=tokens.device, dtype=tokens.dtype)

"""Where a sweep gets its layers and tokens from, at every length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sensitivity import checks
from sensitivity.adapters.capture import Captured, attention_layers, capture
from sensitivity.attention import SoftmaxAttention
from sensitivity.errors import InputError
from sensitivity.jacobian.guard import measuring

BATCH_BYTES = 2**28  # tokens of all layers that are held at a time
RANDOM_BATCH = 2**20  # numbers in a batch of random tokens

_GIVES = "it must give {name: (SoftmaxAttention, tokens, groups)} for a length, or Batch after Batch of such layers"


@dataclass(frozen=True)
class Sequences:
    """Token sequences of one layer.

    Attributes:
        attention: the layer.
        tokens: ``(sample, time, dim)``.
        groups: the independent unit that each sample belongs to, ``(sample,)``: the sensors of one window of traffic
            share its weather and its hour, so a bootstrap has to draw windows, not sensors. None: each is a unit.
    """

    attention: SoftmaxAttention
    tokens: Float[Tensor, "sample time dim"]
    groups: Int[Tensor, " member"] | None = None


@dataclass(frozen=True)
class Batch:
    """Some samples of every layer, and the share of a length's samples that is done with them."""

    layers: Mapping[str, Sequences]
    share: float = 1.0


Drawn = Mapping[str, Any] | Iterable[Batch]
Source = Callable[[int], Drawn]
"""A callable that gives, for a length, ``{layer: (attention, tokens, groups)}``, or batches one after the other."""


def batches(drawn: Any) -> Iterator[Batch]:
    """What a source gave, which should be ``Drawn``, as batches of checked sequences with groups.

    Raises:
        InputError: something else, no layer at all, or groups that do not fit the tokens.
    """
    if isinstance(drawn, Mapping):
        drawn = [Batch({name: _sequences(name, value) for name, value in drawn.items()})]
    elif not isinstance(drawn, Iterable):
        raise InputError(f"the source gave {type(drawn).__name__}; {_GIVES}.")
    empty = True
    for batch in drawn:
        empty = False
        if not isinstance(batch, Batch):
            raise InputError(f"the source gave {type(batch).__name__} where batches are expected; {_GIVES}.")
        if not batch.layers:
            raise InputError("the source gave no layer; it must map names to (attention, tokens, groups).")
        yield Batch({name: _checked(name, value) for name, value in batch.layers.items()}, batch.share)
    if empty:
        raise InputError(f"the source gave no batch; {_GIVES}.")


def check_source(source: Any) -> None:
    """Refuses what is no source, first of all a layer or a model itself.

    Raises:
        InputError: says what a source is.
    """
    if isinstance(source, SoftmaxAttention | nn.Module) or not callable(source):
        raise InputError(
            "the source must be a callable that gives layers and their tokens for a length, not "
            f"{type(source).__name__}; wrap a layer as RandomTokens(layer), or a model as ModelLayers(model, draw)."
        )


def _sequences(name: str, value: Any) -> Sequences:
    if isinstance(value, Sequences):
        return value
    if not isinstance(value, tuple | list) or not 2 <= len(value) <= 3 or not isinstance(value[0], SoftmaxAttention):
        raise InputError(f"the source gave {type(value).__name__} for layer {name!r}; {_GIVES}.")
    return Sequences(*value)


def _checked(name: str, value: Sequences) -> Sequences:
    tokens = checks.tokens(value.tokens, value.attention.dim)
    groups = torch.arange(len(tokens)) if value.groups is None else value.groups
    if tuple(groups.shape) != (len(tokens),):
        raise InputError(
            f"layer {name!r} has groups of shape {tuple(groups.shape)} for {len(tokens)} samples; give each sample "
            "the number of its independent unit."
        )
    return Sequences(value.attention, tokens, groups)


class RandomTokens:
    """Layers at tokens N(0, I) from an own generator; a shorter sequence is the head of the longer one.

    Args:
        layers: one layer, or layers by name, all of one width.
        samples: number of sequences, the same for every layer.
        seed: of the tokens, at least 0.

    Raises:
        InputError: something else than layers, none, or of different widths; fewer than one sample; a negative seed.
    """

    def __init__(
        self, layers: SoftmaxAttention | Mapping[str, SoftmaxAttention], samples: int = 8, seed: int = 0
    ) -> None:
        self.layers = self._named(layers)
        checks.seed(seed, least=0)
        self.samples, self.seed = check_samples(samples), int(seed)
        widths = sorted({layer.dim for layer in self.layers.values()})
        if len(widths) != 1:
            raise InputError(f"the layers take tokens of different widths {widths}; sweep them one after the other.")
        self.dim = widths[0]

    @staticmethod
    def _named(layers: Any) -> dict[str, SoftmaxAttention]:
        if isinstance(layers, SoftmaxAttention):
            return {"attention": layers}
        given = dict(layers) if isinstance(layers, Mapping) else {"": layers}
        wrong = [type(value).__name__ for value in given.values() if not isinstance(value, SoftmaxAttention)]
        if wrong or not given:
            raise InputError(
                "RandomTokens takes a SoftmaxAttention, or a dict of some by name, not "
                f"{wrong[0] if wrong else 'an empty one'}; describe a module with SoftmaxAttention.from_module(module)."
            )
        return given

    def __call__(self, length: int) -> Iterator[Batch]:
        """Batches of sequences of this length."""
        step = max(1, RANDOM_BATCH // (length * self.dim))
        for start in range(0, self.samples, step):
            chosen = range(start, min(start + step, self.samples))
            draws = [np.random.default_rng([self.seed, n]).standard_normal((length, self.dim)) for n in chosen]
            tokens, groups = torch.from_numpy(np.stack(draws)), torch.tensor(list(chosen))
            layers = {
                name: Sequences(layer, tokens.to(device=layer.device, dtype=layer.dtype), groups)
                for name, layer in self.layers.items()
            }
            yield Batch(layers, chosen.stop / self.samples)


class ModelLayers:
    """The attention layers of a model, at the tokens that reach them when the model runs on windows of data.

    Args:
        model: the model, in evaluation mode.
        draw: gives the model's inputs ``(window, ...)`` for a length; the windows are the independent units.
        layers: names of attention layers; all that run by default.
        forward: how the model is called, ``forward(model, inputs)``; ``model(inputs)`` unless given.
        per_window: measure so many sequences of each window (sensors, where a model has a sequence for each), the same
            at every length; all by default. The model runs on all of them.
        seed: of the choice of those sequences.

    Raises:
        InputError: a layer that the model does not have; the message lists those that it has.
    """

    def __init__(
        self,
        model: nn.Module,
        draw: Callable[[int], Tensor],
        layers: Sequence[str] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        *,
        per_window: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.draw, self.forward = model, draw, forward
        self.per_window, self.seed = per_window, seed
        self.layers = check_layers(model, layers)

    def __call__(self, length: int) -> Iterator[Batch]:
        """Batches of windows of this length; the first window alone, to learn how many fit into memory."""
        inputs = self.draw(length)
        windows, start, step = len(inputs), 0, 1
        while start < windows:
            stop = min(start + step, windows)
            found = self._capture(inputs[start:stop])
            held = sum(one.tokens.nbytes for one in found.values())
            layers = {name: self._windowed(one, start, stop - start) for name, one in found.items()}
            if stop - start == 1:
                step = max(1, int(BATCH_BYTES // max(held, 1)))
                if any(one.shape[0] != 1 for one in found.values()):
                    step = 1  # the layer folds windows among other axes: one at a time, each sample's window is known
            yield Batch(layers, stop / windows)
            start = stop

    def _capture(self, inputs: Tensor) -> dict[str, Captured]:
        with measuring(self.model):
            return capture(self.model, inputs, list(self.layers), self.forward)

    def _windowed(self, found: Captured, start: int, windows: int) -> Sequences:
        """The captured tokens, each sample with the number of its window; of every window the chosen ones."""
        each = len(found.tokens) // windows
        groups = torch.arange(start, start + windows).repeat_interleave(each)
        if self.per_window is None or self.per_window >= each:
            return Sequences(found.attention, found.tokens, groups)
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(each, generator=generator)[: self.per_window].sort().values
        index = (torch.arange(windows)[:, None] * each + chosen).flatten()
        return Sequences(found.attention.sample(index), found.tokens[index], groups[index])


def check_layers(model: nn.Module, layers: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the layers to measure, all by default.

    Raises:
        InputError: an unknown name, or a model without an attention layer that can be described.
    """
    known = tuple(attention_layers(model))
    if not known:
        raise InputError(
            f"{type(model).__name__} has no attention layer that can be described, so there is nothing to sweep; "
            "give its attention class a softmax_attention() method."
        )
    for name in layers or ():
        if name not in known:
            raise InputError(f"unknown layer {name!r}; this model has {', '.join(known)}.")
    return known if layers is None else tuple(dict.fromkeys(layers))


def check_samples(samples: int) -> int:
    """Checks a number of samples.

    Raises:
        InputError: not an integer, or below 1.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise InputError(f"samples must be an integer of at least 1, not {samples!r}.")
    return samples

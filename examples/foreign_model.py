"""Somebody else's model: measure a Transformer encoder and two LSTMs, and tell position effects from value effects.

A map can show that a model listens to the first time step above all. Is that because the step is *first* (a position
effect), or because of *what stands there* (a value effect)? One map cannot tell. The remedy here is a balanced design:
rotate every sequence through all positions, measure each rotation, and split the variance of the log sensitivity into
a part that goes with the position, a part that goes with the token, and the rest. Every token visits every position
once, so the two parts do not overlap.

Run it with ``python examples/foreign_model.py``; it takes some ten seconds on two cores, and asserts what it says.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sensitivity

STEPS, SEQUENCES = 8, 16


def shares(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Shares of the variance of log ||d h_last / d x_j|| that go with position, with the token, and with neither.

    Args:
        model: maps ``(sample, time, feature)`` to ``(sample, time, feature)``.
        tokens: ``(sequence, time, feature)``.
    """
    length = tokens.shape[1]
    rotated = torch.stack([tokens.roll(shift, dims=1) for shift in range(length)], dim=1)  # sequence, shift, time
    found = sensitivity.measure(model, rotated.flatten(0, 1), norm="rms")
    logs = found.norms[:, -1].log().unflatten(0, (len(tokens), length))  # sequence, shift, position
    by_token = torch.stack([logs[:, shift].roll(-shift, dims=-1) for shift in range(length)], dim=1)
    total = (logs - logs.mean(dim=(1, 2), keepdim=True)).square().mean()
    position = logs.mean(dim=(0, 1)) - logs.mean()  # the same for all sequences
    token = by_token.mean(dim=1) - logs.mean(dim=(1, 2))[:, None]  # each sequence has tokens of its own
    found_shares = {"position": float(position.square().mean() / total), "value": float(token.square().mean() / total)}
    return found_shares | {"neither": 1 - sum(found_shares.values())}


class Memory(nn.Module):
    """An LSTM with a linear readout at every step."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.recurrence = nn.LSTM(1, width, batch_first=True)
        self.readout = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.recurrence(tokens)[0])


def sequences(count: int, generator: torch.Generator, spike_at: int | None = None) -> tuple[Tensor, Tensor]:
    """Small random values with one spike each, and the index of the spike."""
    values = 0.3 * torch.randn(count, STEPS, 1, generator=generator)
    place = torch.randint(STEPS, (count,), generator=generator)
    place = place if spike_at is None else torch.full_like(place, spike_at)
    height = 1.5 + torch.rand(count, generator=generator)
    return values + height[:, None, None] * nn.functional.one_hot(place, STEPS)[..., None], place


def trained(task: str) -> Memory:
    """A memory that was taught to report, at the end, the first value or the spike."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Memory()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(600):
        tokens, place = sequences(128, generator)
        wanted = tokens[:, 0, 0] if task == "first value" else tokens[torch.arange(len(tokens)), place, 0]
        loss = nn.functional.mse_loss(model(tokens)[:, -1, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"  taught to report the {task}: mean squared error {loss.item():.4f}")
    return model.eval()


def two_memories() -> None:
    """Two LSTMs whose maps look alike, for different reasons."""
    print("Two LSTMs, measured on sequences that begin with a spike:")
    tokens, _ = sequences(SEQUENCES, torch.Generator().manual_seed(2), spike_at=0)
    for task, cause in (("first value", "position"), ("spike", "value")):
        model = trained(task)
        found = sensitivity.measure(model, tokens, norm="rms")
        last = found.mean()[-1]
        split = shares(model, tokens)
        print(f"    engine: {found.engine}")
        print("    sensitivity of the last output by input step: " + " ".join(f"{value:.2f}" for value in last))
        print("    " + ", ".join(f"{name} {share:.0%}" for name, share in split.items()))
        assert last[0] > 3 * last[1:].max(), "both maps say: the first step"
        assert split[cause] > 0.5, f"the design tells that the cause is the {cause}"


def encoder() -> None:
    """A stock encoder: the whole by automatic differentiation, its attention layers in closed form."""
    print("A torch.nn.TransformerEncoder without positional encoding:")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
        model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    tokens = torch.randn(SEQUENCES, STEPS, 32, generator=torch.Generator().manual_seed(3))
    whole = sensitivity.measure(model, tokens)
    inner = sensitivity.measure(model, tokens, layer="layers.1.self_attn", paths=True)
    print("  " + repr(whole).replace("\n", "\n  "))
    print("  " + repr(inner).replace("\n", "\n  "))
    assert inner.engine.startswith("closed form")
    assert whole.sink_ratio() > 3, "residuals alone make the diagonal stand out"
    order = torch.randperm(STEPS, generator=torch.Generator().manual_seed(4))
    shuffled = sensitivity.measure(model, tokens[:, order])
    assert torch.allclose(shuffled.norms, whole.norms[:, order][:, :, order], rtol=1e-3), "no position effect at all"
    print("  shuffling the tokens shuffles the map: without positions there is no position effect")


if __name__ == "__main__":
    two_memories()
    encoder()

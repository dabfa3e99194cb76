"""The sections of the benchmarks by name: what each one runs, and what the page says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import alternatives, closed_form, engines, growth, memory, spectral, startup, throughput
from benchmarks.tables import Findings
from benchmarks.throughput import Size


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        title: of its heading.
        about: what is measured, for readers.
        run: measures it.
        quick: arguments of ``run`` that make it a matter of seconds, to see that it works.
        more: further text, from the findings' data.
    """

    title: str
    about: str
    run: Callable[..., Findings]
    quick: dict[str, Any] = field(default_factory=dict)
    more: Callable[[dict[str, Any]], str] | None = None


SECTIONS = {
    "closed-form": Section(
        "Closed form against the forward pass",
        closed_form.ABOUT,
        closed_form.run,
        {"shapes": {(8, 2): 3.0}, "lengths": (16,), "rounds": 2},
    ),
    "alternatives": Section(
        "Closed form against automatic differentiation",
        alternatives.ABOUT,
        alternatives.run,
        {"lengths": (16,), "dim": 8, "limit": 0.2, "rounds": 2},
    ),
    "jacrev-memory": Section(
        "Memory of a dense Jacobian",
        alternatives.ABOUT_MEMORY,
        alternatives.run_memory,
        {"lengths": (16,), "dim": 8},
    ),
    "spectral": Section(
        "Spectral norms", spectral.ABOUT, spectral.run, {"length": 16, "dim": 8, "heads": 2, "rows": 2, "rounds": 2}
    ),
    "engines": Section(
        "Generic engine against torch", engines.ABOUT, engines.run, {"length": 4, "dim": 8, "limit": 0.2, "rounds": 1}
    ),
    "memory": Section("Memory of long sequences", memory.ABOUT, memory.run, {"length": 64, "long": 128, "rows": 4}),
    "memory-65536": Section("A very long sequence", memory.ABOUT, memory.run_long, {"length": 64}),
    "growth": Section(
        "Cost growth",
        growth.ABOUT,
        growth.run,
        {"names": ("map over T", "generic over T"), "shrink": 16, "rounds": 2},
        growth.afford,
    ),
    "start-up": Section("Start-up", startup.ABOUT, startup.run, {"rounds": 1}),
    "training": Section(
        "Training", throughput.ABOUT, throughput.run, {"sizes": (Size(1, 3, 4, 8, 2),), "days": 1, "rounds": 1}
    ),
}

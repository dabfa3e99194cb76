"""The generic engine beside the best of what torch offers, on models without a closed form."""

from __future__ import annotations

import sensitivity
from benchmarks import rivals
from benchmarks.subjects import MODELS, model, single, tokens
from benchmarks.tables import Findings, Table, Target

ABOUT = """`measure(model, tokens)` on whole models, one sample, against every way that torch offers, each with its
best chunk size (16, 64 or 256 rows). A ratio above 1 says that the toolkit is faster. The toolkit's time includes
its checks (independent samples, train mode, randomness) and the statistics' bookkeeping."""

LEAST = {"LSTM": 10.0}
LIMIT = 8.0  # seconds beyond which only some rows of an alternative are timed


def run(length: int = 64, dim: int = 64, limit: float = LIMIT, rounds: int = 5) -> Findings:
    """Times every model in every way."""
    table = Table(
        f"T={length}, D={dim}.",
        {"model": "", "way": "", "time": "s", "timed as": "", "toolkit": "s", "ratio": "x", "difference": "e"},
    )
    targets = []
    for name in MODELS:
        subject, data = model(name, dim), tokens(length, dim)
        function, ours = single(subject), sensitivity.measure(subject, data).norms[0]
        ratios: list[float] = []
        for rival in rivals.fastest(function, data[0], 2):
            if rival.error:
                table.rows.append([name, rival.way, None, f"fails: {rival.error}", None, None, None])
                continue
            result = rivals.compare(
                lambda subject=subject, data=data: sensitivity.measure(subject, data),
                rival, function, data[0], limit, rounds,
            )  # fmt: skip
            off = rivals.difference(ours, result.found)
            table.rows.append([name, rival.way, result.seconds, result.note, result.ours, result.ratio, off])
            ratios.append(result.ratio)
        what = f"best of torch over generic engine, {name}"
        targets.append(Target(what, min(ratios, default=None), LEAST.get(name, 1.0), least=True))
    return Findings([table], targets)

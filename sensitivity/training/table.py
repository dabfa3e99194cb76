"""The table at the end of a training, at most 80 columns wide."""

from __future__ import annotations

from typing import Any

_NAME = 20
_GROUP = 20


def score_table(metrics: dict[str, Any], name: str = "this model") -> str:
    """Test errors of a model beside those of the naive forecasts, at single horizons.

    Args:
        metrics: with ``test``, ``naive`` and ``data.step_minutes``, as in ``metrics.json``.
        name: what the model's row is called.
    """
    steps = [step for step in metrics["test"] if step != "average"]
    minutes = metrics["data"]["step_minutes"]
    lines = [
        "test error".ljust(_NAME) + "".join(f"{int(step) * minutes:g} min".rjust(_GROUP) for step in steps),
        " " * _NAME + "   MAE   RMSE   MAPE" * len(steps),
        "-" * (_NAME + _GROUP * len(steps)),
        _row(name, metrics["test"], steps),
        *(_row(other, scores, steps) for other, scores in metrics["naive"].items()),
    ]
    return "\n".join(lines)


def _row(name: str, scores: dict[str, dict[str, float | None]], steps: list[str]) -> str:
    layout = (("mae", 6, 3), ("rmse", 7, 2), ("mape", 7, 2))
    cells = (_cell(scores[step][metric], width, digits) for step in steps for metric, width, digits in layout)
    return name[:_NAME].ljust(_NAME) + "".join(cells)


def _cell(value: float | None, width: int, digits: int) -> str:
    if value is None:
        return "-".rjust(width)
    return f"{value:.{digits if value < 10 else 2}f}".rjust(width)

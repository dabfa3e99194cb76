"""The numbers that arXiv 2602.10956 reports on the full METR-LA, to stand beside what is measured."""

from __future__ import annotations

METRICS = ("mae", "rmse", "mape")
LABELS = {"mae": "MAE", "rmse": "RMSE", "mape": "MAPE"}

TABLE: dict[str, dict[int, tuple[float, float, float]]] = {
    "no-residual": {15: (3.165, 6.190, 8.705), 30: (3.671, 7.414, 10.286), 60: (4.627, 9.315, 13.406)},
    "none": {15: (2.966, 5.881, 7.836), 30: (3.443, 7.028, 9.670), 60: (3.989, 8.418, 11.708)},
    "mask": {15: (2.969, 5.889, 7.830), 30: (3.447, 7.000, 9.666), 60: (3.997, 8.431, 11.734)},
    "dropout": {15: (2.959, 5.845, 7.833), 30: (3.415, 7.006, 9.616), 60: (3.940, 8.338, 11.570)},
    "penalty": {15: (2.969, 5.859, 7.842), 30: (3.436, 6.995, 9.655), 60: (3.964, 8.344, 11.623)},
}
"""MAE, RMSE and MAPE by variant and minutes: 207 sensors, depth 12, width 72."""

SETUP = "published: arXiv 2602.10956, full METR-LA (207 sensors), depth 12, width 72"


def published(variant: str, minutes: float | int) -> tuple[float, float, float] | None:
    """Published MAE, RMSE and MAPE; None where the paper has none.

    >>> published("dropout", 60)
    (3.94, 8.338, 11.57)
    """
    return TABLE.get(variant, {}).get(int(minutes)) if float(minutes).is_integer() else None

"""What the tables of a comparison hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sensitivity.reproduction.compare import Comparison
from sensitivity.reproduction.paired import Difference
from sensitivity.reproduction.plan import BASE
from sensitivity.reproduction.published import LABELS, METRICS, SETUP, published
from sensitivity.reproduction.sensitivities import STATISTICS
from sensitivity.reproduction.tables import Table, as_csv, signed, significant, spread

_DIGITS = {"mae": 3, "rmse": 3, "mape": 2}
_SENSITIVITY = {
    "sink_ratio": "sink",
    "sink_ratio_residual_removed": "sink-I",
    "parroting_index": "parrot",
    "diagonal_attention": "a_ii",
    "off_diagonal": "off",
    "diagonal_value": "value",
    "diagonal_key": "key",
    "diagonal_query": "query",
    "off_diagonal_value": "off value",
    "off_diagonal_key": "off key",
}
_SHOWN = tuple(_SENSITIVITY)[:8]
_COMPARED = ("mae", "rmse")
_MOVED = {
    "sinks": ("sink_ratio", "sink_ratio_residual_removed", "diagonal_attention"),
    "paths on the diagonal": ("diagonal_value", "diagonal_key", "diagonal_query"),
    "off the diagonal": ("off_diagonal", "off_diagonal_value", "off_diagonal_key"),
}


def error_tables(found: Comparison) -> list[Table]:
    """One table for every horizon: each variant's test errors, beside the published ones."""
    return [_horizon(found, step) for step in found.steps]


def paper_table(found: Comparison) -> Table:
    """All horizons in one wide table, in the paper's form, for Markdown and LaTeX."""
    heads = [f"{LABELS[m]} {found.minutes(step):g} min" for step in found.steps for m in METRICS]
    rows = [
        (name, *(_errors(found, name, step, m) for step in found.steps for m in METRICS)) for name in found.variants
    ]
    rows += [
        (name, *(_naive(scores[step][m], m) for step in found.steps for m in METRICS))
        for name, scores in found.naive.items()
    ]
    return Table(f"Test errors on {found.data['name']}", ("variant", *heads), tuple(rows), (_seeds(found),))


def paired_table(found: Comparison) -> Table:
    """Differences in MAE and RMSE to the variant without regularisation, with intervals over seeds."""
    others = [name for name in found.variants if name != BASE]
    rows = []
    for name in others:
        for step in found.steps:
            cells = [text for metric in _COMPARED for text in _interval(found.difference(name, step, metric))]
            rows.append((name, f"{found.minutes(step):g}", *cells))
    intervals = len(rows) * len(_COMPARED)
    return Table(
        "Paired differences to none (below 0 is better than none)",
        ("variant", "min", *(text for metric in _COMPARED for text in (LABELS[metric], "95 % interval"))),
        tuple(rows),
        (
            "means over seeds, in mph; intervals by Student's t, * where one leaves out 0",
            f"of {intervals} such intervals {0.05 * intervals:.1f} would leave out 0 by chance",
        ),
    )


def sensitivity_table(found: Comparison, length: int) -> Table:
    """What the models of every variant look like at one length."""
    rows = [(name, *(_mean_of(found, name, statistic, length) for statistic in _SHOWN)) for name in found.variants]
    return Table(
        f"Sensitivity at T={length}",
        ("variant", *(_SENSITIVITY[name] for name in _SHOWN)),
        tuple(rows),
        (
            "means over seeds of the geometric mean over layers; sink: on / off the diagonal",
            "(-I: without residual); a_ii: attention to itself; value, key, query: paths on",
        ),
    )


def moved_tables(found: Comparison, length: int) -> list[Table]:
    """By which factor each regulariser moves the statistics, with intervals over seeds: sinks, then path by path."""
    others = [name for name in found.variants if name != BASE]
    tables = []
    for what, statistics in _MOVED.items():
        rows = [(name, *(_factor(found.ratio(name, one, length)) for one in statistics)) for name in others]
        heads = ("variant / none", *(_SENSITIVITY[name] for name in statistics))
        tables.append(Table(f"Factor to none at T={length}: {what}", heads, tuple(rows)))
    last = tables[-1]
    caption = "paired ratio over seeds [95 % interval]; * leaves out 1"
    return [*tables[:-1], Table(last.title, last.header, last.rows, (caption,))]


def tables(found: Comparison, lengths: Sequence[int] | None = None) -> list[Table]:
    """Errors, differences and sensitivities in reading order; the latter at all lengths unless some are given."""
    tables = error_tables(found)
    differences = found.has_base and len(found.variants) > 1
    if differences:
        tables.append(paired_table(found))
    for length in found.lengths if lengths is None else lengths:
        tables.append(sensitivity_table(found, length))
        if differences:
            tables += moved_tables(found, length)
    return tables


def csv_files(found: Comparison) -> dict[str, str]:
    """Every number in full, by file name."""
    files = {
        "scores.csv": as_csv(("variant", "seed", "minutes", *METRICS), list(_score_rows(found))),
        "paired.csv": as_csv(
            ("variant", "minutes", "metric", "difference", "low", "high", "pairs"), list(_paired_rows(found))
        ),
    }
    if found.lengths:
        head = ("variant", "seed", "length", "layer", *STATISTICS)
        files["sensitivity.csv"] = as_csv(head, list(_sensitivity_rows(found)))
    return files


def _horizon(found: Comparison, step: str) -> Table:
    minutes = found.minutes(step)
    known = any(published(name, minutes) for name in found.variants)
    heads = [f"{minutes:g} min", *LABELS.values(), *([f"paper\n{label}" for label in LABELS.values()] if known else [])]
    rows = []
    for name in found.variants:
        theirs = published(name, minutes) or (math.nan,) * 3
        cells = [_errors(found, name, step, metric) for metric in METRICS]
        digits = (3, 2, 2)
        paper = [f"{v:.{d}f}" if math.isfinite(v) else "" for v, d in zip(theirs, digits, strict=True)]
        rows.append((name, *cells, *(paper if known else [])))
    for name, scores in found.naive.items():
        rows.append((name, *(_naive(scores[step][m], m) for m in METRICS), *(["", "", ""] if known else [])))
    captions = (_seeds(found), *([SETUP] if known else [])) if step == found.steps[-1] else ()
    return Table(f"Test error, {minutes:g} minutes ahead", tuple(heads), tuple(rows), captions)


def _seeds(found: Comparison) -> str:
    counts = sorted({len(found.done(name)) for name in found.variants})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"mean\u00b1standard deviation over {many} seeds" if counts[-1] > 1 else "one seed"
    return f"{found.data['name']}, protocol {found.data['protocol']}; {seeds}; mph and %"


def _errors(found: Comparison, variant: str, step: str, metric: str) -> str:
    return spread(list(found.scores(variant, step, metric).values()), _DIGITS[metric])


def _naive(value: float | None, metric: str) -> str:
    return "-" if value is None else f"{value:.{_DIGITS[metric]}f}"


def _interval(one: Difference) -> tuple[str, str]:
    if math.isnan(one.low):
        return signed(one.mean, 3), "-"
    mark = " " if one.verdict == "not shown" else "*"
    return signed(one.mean, 3), f"{signed(one.low, 3)} {signed(one.high, 3)}{mark}"


def _factor(one: Difference) -> str:
    if math.isnan(one.low):
        return significant(one.mean)
    mark = "*" if one.low > 1 or one.high < 1 else ""
    return f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]{mark}"


def _mean_of(found: Comparison, variant: str, statistic: str, length: int) -> str:
    values = [v for v in found.sensitivity(variant, statistic, length).values() if math.isfinite(v)]
    return significant(math.fsum(values) / len(values)) if values else "-"


def _score_rows(found: Comparison) -> Iterator[tuple[object, ...]]:
    for name in found.variants:
        for cell in found.done(name):
            for step in found.steps:
                errors = [found.scores(name, step, metric)[cell.seed] for metric in METRICS]
                yield (name, cell.seed, f"{found.minutes(step):g}", *errors)


def _paired_rows(found: Comparison) -> Iterator[tuple[object, ...]]:
    for name in found.variants if found.has_base else ():
        if name == BASE:
            continue
        for step in found.steps:
            for metric in METRICS:
                one = found.difference(name, step, metric)
                yield (name, f"{found.minutes(step):g}", metric, one.mean, one.low, one.high, one.pairs)


def _sensitivity_rows(found: Comparison) -> Iterator[tuple[object, ...]]:
    for name, by_seed in found.sweeps.items():
        for seed in by_seed:
            for length in found.lengths:
                for layer in found.layers:
                    values = [found.sensitivity(name, one, length, layer)[seed] for one in STATISTICS]
                    yield (name, seed, length, layer, *values)

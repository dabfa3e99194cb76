"""Jobs that run in a process of their own, so that its peak memory is theirs.

``python child.py '{"job": "map", "length": 4096}'`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__)
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]


def run(job: str, limit: float = 1800.0, environment: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """Runs a job in a child, with the threads that the environment says; what it reports, or ``{"error": ...}``.

    Args:
        job: one of :data:`JOBS`.
        limit: seconds after which it is stopped.
        environment: variables that it has besides those of this process.
        **arguments: of the job.
    """
    words, variables = json.dumps({"job": job, **arguments}), os.environ | (environment or {})
    try:
        done = subprocess.run(
            [sys.executable, str(HERE), words], capture_output=True, text=True, timeout=limit, env=variables
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def status(name: str) -> int:
    """Bytes that Linux reports of this process, ``VmHWM`` (peak) or ``VmRSS`` (now); 0 on other systems."""
    path = Path("/proc/self/status")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def peak() -> int:
    """Largest resident memory of this process so far.

    ``ru_maxrss`` is the second choice: on Linux it begins with what the parent held when it started the child.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Starts the peak anew, where the system lets a process do so."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of the work, the peak of the process, and how far the peak lies above the memory held before."""
    before = status("VmRSS") or peak()
    forget_peak()
    begin = time.perf_counter()
    result = work()
    took = time.perf_counter() - begin
    extra = result if isinstance(result, dict) else {}
    return {"seconds": took, "peak": peak(), "above": peak() - before} | extra


def nothing() -> dict[str, Any]:
    """Only what importing takes."""
    import sensitivity

    _ = sensitivity.measure
    return {"peak": peak()}


def hold(size: int) -> dict[str, Any]:
    """Fills ``size`` bytes and lets them go: a known answer."""
    return measured(lambda: {"kept": len(bytearray(b"1") * size) - size})


def map_of(length: int, dim: int = 64, heads: int = 4, samples: int = 1) -> dict[str, Any]:
    """The closed-form map."""
    import sensitivity
    from benchmarks.subjects import attention, tokens

    layer, data = attention(dim, heads), tokens(length, dim, samples)
    return measured(lambda: {"sink": float(sensitivity.measure(layer, data).sink_ratio())})


def statistics_of(length: int, dim: int = 64, heads: int = 4, rows: int | None = None) -> dict[str, Any]:
    """The statistics without a map, of all rows or of some."""
    import sensitivity
    from benchmarks.subjects import attention, tokens

    layer, data = attention(dim, heads), tokens(length, dim)

    def work() -> dict[str, float]:
        found = sensitivity.measure(layer, data, keep="statistics", rows=rows)
        _ = found.lag_profile(), found.primacy_profile()
        return {"sink": float(found.sink_ratio()), "parroting": float(found.parroting_index())}

    return measured(work)


def jacrev_of(length: int, dim: int = 64, heads: int = 4, chunk: int = 64) -> dict[str, Any]:
    """The same map from the dense Jacobian of ``torch.func.jacrev``."""
    from benchmarks import rivals
    from benchmarks.subjects import attention, single, tokens

    function, data = single(attention(dim, heads)), tokens(length, dim)[0]

    def work() -> dict[str, float]:
        found = rivals.jacrev(function, data, chunk)
        on = found.diagonal().mean()
        return {"sink": float(on / ((found.sum() - found.trace()) / (length * (length - 1))))}

    return measured(work)


def series_of(name: str, values: list[int]) -> dict[str, Any]:
    """The peak above what is held at rest, of one series of the cost growth."""
    from benchmarks.series import SERIES

    series = SERIES[name]
    jobs = [series.job(value) for value in values]
    rest = status("VmRSS") or peak()
    found = []
    for job in jobs:
        forget_peak()
        job()
        found.append(max(1, peak() - rest))
    return {"above": found}


def passes_of(dim: int, heads: int, length: int, rounds: int) -> dict[str, Any]:
    """Seconds of a layer's maps and forward passes, in turns."""
    from benchmarks import closed_form
    from benchmarks.timing import interleaved

    return {"times": interleaved(closed_form.jobs(dim, heads, length), rounds)}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "nothing": nothing,
    "hold": hold,
    "map": map_of,
    "statistics": statistics_of,
    "jacrev": jacrev_of,
    "series": series_of,
    "passes": passes_of,
}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    print(json.dumps(JOBS[arguments.pop("job")](**arguments)))

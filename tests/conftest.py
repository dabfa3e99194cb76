"""What every test shares: shape checking at run time, the helpers' place, and where the METR-LA files are."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
jaxtyping.install_import_hook(["sensitivity"], "beartype.beartype")
torch.set_num_threads(1)  # the workers share the cores among them
os.environ["OMP_NUM_THREADS"] = "1"  # and so do the processes they start: sums over other threads round otherwise
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background, which the processes would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # lightning imports it, and it tells of a torch too old for it


@pytest.fixture
def metr_la() -> Path:
    """Directory with the METR-LA files, from the environment variable METR_LA_DIR."""
    place = os.environ.get("METR_LA_DIR")
    if not place:
        pytest.skip("METR_LA_DIR is not set: it must name the directory that holds the METR-LA files")
    if not Path(place).is_dir():
        pytest.skip(f"METR_LA_DIR={place} is not a directory")
    return Path(place)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator of the test's own."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _global_state_stays() -> Iterator[None]:
    """Every test leaves torch's global state as it was; the toolkit must too."""
    rng, dtype, threads = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_rng_state(rng)
    assert torch.get_default_dtype() == dtype
    assert torch.get_num_threads() == threads

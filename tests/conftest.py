"What every test may use"
import os, signal

# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: the tests that press it could not be heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when a thread pool starts, so before any import of Numba
os.environ.setdefault("MPLBACKEND", "Agg")

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests/data"


@pytest.fixture(scope="session")
def data():
    "The folder of small models and their reference logits"
    return DATA


@pytest.fixture(scope="session")
def oracle():
    "`oracle('moe-r3')` is the path of that model and the arrays an independent implementation computed from it"
    return lambda name: (DATA / f"{name}.gguf", dict(np.load(DATA / f"{name}.npz")))


@pytest.fixture(scope="session")
def demo():
    "The path of the demo model"
    return ROOT / "qwen35_lit/data/demo-Q4_K_M.gguf"

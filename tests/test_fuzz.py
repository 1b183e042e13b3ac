"""Damaged files by the ten thousand: each loads and computes, or ends in a `Qwen35Error` of one line. No crash, no hang, bounded memory.

Three processes at once: headers that are only loaded, and whole files through two engines. `QWEN35_FUZZ=1000000` for a night."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gguf_tools import tiny, write
from qwen35_lit import load
from qwen35_lit.config import Qwen35Error

HERE = Path(__file__).parent
COUNT = int(os.environ.get("QWEN35_FUZZ", 42_000))       # headers; with the 5,000 of test_odd_files and those below more than 50,000
WHOLE = max(50, COUNT // 12)
SEED = int(os.environ.get("QWEN35_FUZZ_SEED", 1))
RUNS = {"headers": ("fuzz_header.py", COUNT), "numpy": ("fuzz_forward.py", "numpy", WHOLE), "cpu": ("fuzz_forward.py", "cpu", WHOLE)}


@pytest.fixture(scope="module")
def runs():
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    started = {name: subprocess.Popen([sys.executable, str(HERE / file), *map(str, args), str(SEED)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for name, (file, *args) in RUNS.items()}
    yield started
    for p in started.values(): p.kill()


@pytest.mark.parametrize("name", RUNS)
def test_no_crash_no_hang(name, runs):
    out, err = runs[name].communicate(timeout=300 + COUNT / 50)
    assert runs[name].returncode == 0, f"ended with {runs[name].returncode} (below 0: a signal)\n{err[-3000:]}"
    said = json.loads(out.splitlines()[-1])
    count = RUNS[name][-1]
    assert said.pop("cases") == count and sum(v for k, v in said.items() if k not in ("seed", "engine")) == count
    if count >= 2000: assert {"FileFormatError", "MissingTensorError", "ConfigError", "ShapeError"} < set(said)
    if name != "headers": assert said["finite"] > count / 20 and said["not finite"] > count / 20
    print(f"{name}: {count} files: {said}")


def test_state_files(tmp_path):
    "Damaged states: refused, or equal to what was saved"
    m = load(write(tiny(n_layer=2), tmp_path / "m.gguf"), engine="numpy")
    s = m.new_state(16)
    m.forward([1, 2, 3], s)
    s.save(tmp_path / "s")
    raw, rng, said = (tmp_path / "s").read_bytes(), np.random.default_rng(SEED), {"equal": 0, "refused": 0}
    zip_parts = [i for i in range(len(raw)) if raw[i:i + 2] == b"PK" or raw[i:i + 6] == b"\x93NUMPY"]
    for i in range(max(500, COUNT // 40)):
        b = bytearray(raw)
        for _ in range(rng.geometric(.6)):
            at = int(rng.choice(zip_parts)) + int(rng.integers(0, 90)) if rng.random() < .6 else int(rng.integers(len(b)))
            match int(rng.integers(5)):
                case 0: b[at:at + 1] = rng.bytes(1)
                case 1: n = int(rng.choice([2, 4, 8])); b[at:at + n] = rng.choice([b"\0", b"\xff", b"\x7f"]) * n
                case 2: del b[at:at + int(rng.integers(1, 50))]
                case 3: b = b[:at]
                case 4: b[at:at] = rng.bytes(int(rng.integers(1, 20)))
        (tmp_path / "x").write_bytes(b)
        try: back = m.load_state(tmp_path / "x", n_ctx=16)
        except Qwen35Error as e: said["refused"] += 1; assert "\n" not in str(e) and len(str(e)) < 1000, i
        else: said["equal"] += 1; assert back == s, i
    assert said["refused"] > .7 * sum(said.values())

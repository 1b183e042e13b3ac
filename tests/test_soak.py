"Hours of use in a bounded loop: memory stays flat, states do not drift, threads and models do not mix (`QWEN35_SOAK=7200` for two hours each)"
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35_lit.hybrid import ENGINES, find_engine

SECONDS = float(os.environ.get("QWEN35_SOAK", 12))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("engine", [e for e in ENGINES if e == "numpy" or e == "cpu" and find_engine(e).usable()])
def test_soak(engine, data, tmp_path):
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(Path(__file__).parent / "soak.py"), str(tmp_path), engine, str(SECONDS), str(data / "moe-r3.gguf"), str(data / "dense-r1.gguf")],
        capture_output=True, text=True, timeout=SECONDS * 3 + 300, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout)
    print(said)
    assert not said["errors"] and not said["stuck"], said
    assert said["checks"] > 0 and said["tokens"] > 200
    assert said["drift"] < (2e-5 if engine == "numpy" else 1e-12), said
    before, after = said["memory"]
    assert after - before < 6, f"grew from {before} to {after} MB"
    assert said["files"] < 40

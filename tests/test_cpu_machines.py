"One source, several processors: the bits of this machine against plain x86-64 code, and what the compiler makes of AVX-512"
import hashlib, json, os, platform, subprocess, sys
import numpy as np, pytest
from qwen35_lit import load

TOKENS = [257, 279, 284, 283, 258, 282, 260, 271, 300, 301, 302, 303]
FILES = {"moe-k-Q3_K_M": "int8"}                   # four formats, halves for keys and values, and float matrices too

LOGITS = """
import hashlib, json, sys, numpy as np
from qwen35_lit import load
from qwen35_lit.simd import MODE
out = {}
for name, activations in json.loads(sys.argv[2]).items():
    m = load(f"{sys.argv[1]}/{name}.gguf", engine="cpu", activations=activations, n_threads=1)
    s = m.new_state(32)
    parts = [m.forward(t, s) for t in json.loads(sys.argv[3])]
    out[name] = hashlib.sha256(np.concatenate(parts).tobytes()).hexdigest()
print(json.dumps([MODE, out]))
"""
ASSEMBLY = """
import sys
from numba import njit, types
from gguf import GGMLQuantizationType as QType
from qwen35_lit.tiles import MULTIPLY
for name, which in (("Q3_K", 0), ("Q4_K", 2)):
    k = MULTIPLY[QType[name]][which]
    d = njit(nogil=True, error_model="numpy")(k.f)
    d.compile((types.intp,)*k.n)
    print(*d.inspect_asm().values())
"""


def python(code, *args, **env):
    r = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *args], env=os.environ | env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-2000:]
    return r.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares two kinds of x86-64 code")
def test_plain_x86_has_the_same_bits(data, tmp_path):
    "Without AVX, FMA and F16C: everything that is left to the compiler, and fma in software"
    parts = [TOKENS[:1], TOKENS[1:3], TOKENS[3:]]
    mode, hashes = json.loads(python(LOGITS, str(data), json.dumps(FILES), json.dumps(parts), NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="", QWEN35_CACHE=str(tmp_path)))
    assert mode == "generic"
    for name, activations in FILES.items():
        m = load(data/f"{name}.gguf", engine="cpu", activations=activations, n_threads=2)
        logits = m.forward(TOKENS, m.new_state(32))
        assert hashlib.sha256(logits.tobytes()).hexdigest() == hashes[name], name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for an x86-64 target")
def test_avx512_compiles_to_what_it_is_for(tmp_path):
    "No such processor is needed to compile for it"
    asm = python(ASSEMBLY, QWEN35_SIMD="vnni", NUMBA_CPU_NAME="icelake-server", NUMBA_CPU_FEATURES="", QWEN35_CACHE=str(tmp_path))
    assert "vpdpwssd" in asm and "vpdpbusd" in asm and "%zmm" in asm


def test_two_processes_share_an_empty_cache(tmp_path):
    code = "from qwen35_lit.workers import *\nt = the_team(2)\nprint(launch_kernel.address > 0)"
    both = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"QWEN35_CACHE": str(tmp_path)}, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == ["True", "True"] and not any(p.returncode for p in both)
    assert not list(tmp_path.rglob("*.tmp.*"))

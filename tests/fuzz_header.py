"""Change random bytes of a GGUF file, again and again, and look what the loader makes of it.

    python tests/fuzz_header.py COUNT [SEED]

Every file must load or end in a `Qwen35Error`; none may take long or much memory. Prints what happened as JSON. Run as a process
of its own, so that memory can be limited and a crash is noticed. `case(base, seed, i)` is the i-th file again, for looking at it."""
import json
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from gguf_tools import boundaries, decorated, ollama, tiny, walk, with_mtp, write
from qwen35_lit.checkpoint import open_checkpoint
from qwen35_lit.config import Qwen35Error

ROOM, SLOW = 256 * 2**20, 5.  # bytes that may be taken in addition, seconds that one file may take
TELLING = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 255, 256, 65535, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def case(base, seed, i):
    "The i-th damaged file: bytes"
    rng = np.random.default_rng([seed, i])
    b, places = bytearray(base["bytes"]), base["places"]
    for _ in range(1 + rng.geometric(.6)):
        at = int(rng.choice(places)) if rng.random() < .6 else int(rng.integers(base["data"]))
        match int(rng.integers(8)):
            case 0: b[at:at + 1] = bytes([rng.integers(256)])
            case 1: b[at:at + 8] = struct.pack("<Q", TELLING[rng.integers(len(TELLING))])
            case 2: b[at:at + 4] = struct.pack("<I", TELLING[rng.integers(len(TELLING))] % 2**32)
            case 3: b[at:at + 1] = bytes([(b[at] if at < len(b) else 0) ^ 1 << int(rng.integers(8))])
            case 4: del b[at:at + int(rng.integers(1, 40))]
            case 5: b[at:at] = bytes(b[int(rng.choice(places)):][:int(rng.integers(1, 200))])
            case 6: b[at:at + 8] = struct.pack("<Q", max(0, int.from_bytes(b[at:at + 8], "little") + int(rng.integers(-3, 4))) % 2**64)
            case 7: b = b[:at] if rng.random() < .3 else b
    return bytes(b)


def bases():
    "Sound files of several kinds, with the places worth changing"
    small = dict(n_layer=2, n_embd=16, n_vocab=24, ff=8, S=4)
    models = [tiny(**small), tiny("qwen35", **small), ollama(with_mtp(tiny(**small))), decorated(tiny(**small))]
    with tempfile.TemporaryDirectory() as folder:
        for m in models:
            b = write(m, Path(folder) / "m.gguf").read_bytes()
            yield {"bytes": b, "places": [at for at in boundaries(b) if at < len(b)], "data": walk(b)[2]}


def look(path):
    "Load a file and touch what a user would"
    ck = open_checkpoint(path)
    with np.errstate(all="ignore"):
        for t in ck.tensors.values(): t.raw[..., :1].sum()
    return repr((ck, ck.config, ck.notes, ck.ignored, ck.identity, list(ck.meta)))


def limit_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM,) * 2)


def fuzz(count, seed):
    "What happened, by kind"
    said, slowest, kinds = Counter(), 0., list(bases())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        for base in kinds: path.write_bytes(base["bytes"]); look(path)
        if Path("/proc/self/statm").exists(): limit_memory()
        for i in range(count):
            path.unlink()   # a new file each time: the old one may still be mapped
            path.write_bytes(case(kinds[i % len(kinds)], seed, i))
            start = time.process_time()
            try: look(path); said["loads"] += 1
            except Qwen35Error as e:
                said[type(e).__name__] += 1
                if "\n" in str(e) or len(str(e)) > 3000: raise AssertionError(f"seed {seed}, case {i}: not a line but {str(e)[:200]!r}")
            except BaseException as e: raise AssertionError(f"seed {seed}, case {i}: {type(e).__name__}: {e}") from e
            slowest = max(slowest, time.process_time() - start)
            if slowest > SLOW: raise AssertionError(f"seed {seed}, case {i}: took {slowest:.1f} s")
    return {"cases": count, "seed": seed, **said}


if __name__ == "__main__":
    print(json.dumps(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))

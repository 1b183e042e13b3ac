"""Change random bytes of whole model files, header and weights, and let a model of each read two tokens.

    python tests/fuzz_forward.py ENGINE COUNT [SEED]

Every file must end in logits (finite or not), or in a `Qwen35Error` of one line; none may take long or much memory. If the logits are
not finite, the search for the tensor that is to blame must end in a line too; if the file has a tokenizer, text must come through it.
Prints what happened as JSON. Run as a process of its own, so that memory can be limited and a crash is noticed (it prints its seed
before each thousand). `case(base, seed, i)` is the i-th file again."""
import faulthandler
import gc
import json
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import fuzz_header
from fuzz_header import limit_memory
from gguf import GGMLQuantizationType as Q
from gguf_tools import boundaries, fused, number, ollama, retype, tiny, with_mtp, write
from qwen35_lit import Qwen35Error, load
from qwen35_lit.tokenizer import TO_CHAR
from qwen35_lit.trouble import explain_nan

SLOW = 5.  # seconds of processor time that one file may take (of time on the wall: 60)
WORDS = [struct.pack("<f", x) for x in (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42, 0., -0., 1e30, 65504.)] + [b"\xff\xff\xff\xff", b"\x00\x7c\x00\xfc", b"\x00\x7e\xff\xff", b"\0\0\0\x80"]


def with_text(m):
    "The same with a tokenizer of 256 bytes and three merges"
    m, c = m.copy(), list(TO_CHAR.values())
    tokens = [*c, "ab", "Ġa", "abc", "<|im_start|>", "<|im_end|>"]
    m.meta |= {f"tokenizer.ggml.{k}": number(v) for k, v in {"model": "gpt2", "pre": "qwen35", "tokens": tokens, "merges": ["a b", "Ġ a", "ab c"],
        "token_type": [1] * 259 + [3, 3], "eos_token_id": 260, "bos_token_id": 259}.items()}
    return m


def many_types():
    "A model with rows of 256, each matrix of another type"
    m, kinds = tiny(n_layer=2, n_embd=256, n_vocab=24, ff=32, S=8, n_expert=2), [Q.Q4_K, Q.Q3_K, Q.Q6_K, Q.Q8_0, Q.Q5_K, Q.Q4_0, Q.F16, Q.Q5_1, Q.BF16, Q.IQ4_NL]
    rng = np.random.default_rng(0)
    for i, name in enumerate(n for n, (x, _) in m.tensors.items() if x.ndim > 1 and x.shape[-1] == 256 and "gate_inp" not in n):
        kind, (x, _) = kinds[i % len(kinds)], m.tensors[name]
        try: m = retype(m, name, kind)
        except NotImplementedError: m = retype(m, name, kind, rng.integers(0, 60, (*x.shape[:-1], row_bytes(kind, x.shape[-1])), dtype=np.uint8))
    return m


def row_bytes(kind, n):
    from gguf import GGML_QUANT_SIZES
    weights, size = GGML_QUANT_SIZES[kind]
    return n // weights * size


def bases():
    "Sound files of several kinds, with where their header ends"
    small = dict(n_layer=2, n_embd=32, ff=32, S=8)
    models = [tiny(n_vocab=24, **small), tiny("qwen35", n_vocab=24, **small), ollama(with_mtp(fused(tiny(n_vocab=24, **small)))), with_text(tiny(n_vocab=264, **small)), many_types()]
    with tempfile.TemporaryDirectory() as folder:
        for m in models:
            b = write(m, Path(folder) / "m.gguf").read_bytes()
            places = [p for p in boundaries(b) if p < len(b)]
            data = next(p for p in boundaries(b) if p >= b.rfind(b"blk.") and p % 32 == 0)
            yield {"bytes": b, "places": places, "header": [p for p in places if p < data], "data": data}


def case(base, seed, i):
    "The i-th damaged file: bytes. Half of them have damaged weights, a third only a header that is damaged where it hurts, the rest both"
    rng = np.random.default_rng([seed, i, 7])
    what = rng.random()
    b = bytearray(fuzz_header.case({**base, "places": base["header"]}, seed, i) if what > .5 else base["bytes"])
    if what > .8 or len(b) <= base["data"]: return bytes(b)
    for _ in range(rng.geometric(.25)):
        at = int(rng.integers(base["data"], len(b)))
        match int(rng.integers(5)):
            case 0: b[at:at + 1] = rng.bytes(1)
            case 1: at -= at % 4; b[at:at + 4] = WORDS[rng.integers(len(WORDS))]
            case 2: n = int(rng.integers(1, 600)); b[at:at + n] = rng.bytes(min(n, len(b) - at))
            case 3: at -= at % 4; w = WORDS[rng.integers(len(WORDS))]; n = min(int(rng.integers(1, 200)), (len(b) - at) // 4); b[at:at + 4 * n] = w * n
            case 4: n = min(int(rng.integers(1, 3000)), len(b) - at); at2 = int(rng.integers(base["data"], len(b) - n + 1)); b[at:at + n] = b[at2:at2 + n]
    return bytes(b)


def look(path, engine, search=False):
    "Load, read two tokens (and a third alone), speak: what came of it"
    m = load(path, engine=engine, **({} if engine == "numpy" else dict(n_threads=1)))
    s = m.new_state(8)
    with np.errstate(all="ignore"): out = [m.forward([1, 2], s), m.forward([m.config.n_vocab - 1], s)]
    assert [x.shape for x in out] == [(2, m.config.n_vocab), (1, m.config.n_vocab)] and s.n_past == 3 and s.tokens[:2] == [1, 2]
    if "tokenizer.ggml.model" in m.checkpoint.meta:
        t = m.tokenizer
        ids = t.encode("abc ab<|im_end|>é\n")
        assert all(0 <= j < m.config.n_vocab for j in ids) and isinstance(t.decode(ids), str)
    if all(np.isfinite(x).all() for x in out) and not search: return "finite"
    said = explain_nan(m, s)
    assert "\n" not in said and 20 < len(said) < 2000, said
    return "searched" if search else "not finite"


def guarded(path, engine, said):
    "Count what came of it; anything that is not ours goes through"
    try: said[look(path, engine)] += 1
    except Qwen35Error as e:
        said[type(e).__name__] += 1
        if "\n" in str(e) or len(str(e)) > 3000: raise AssertionError(f"not a line but {str(e)[:200]!r}") from e
        if "allocate" in str(e): raise AssertionError(f"memory is used up: {e}") from e


def fuzz(engine, count, seed):
    "What happened, by kind"
    said, kinds = Counter(), list(bases())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        for base in kinds: path.write_bytes(base["bytes"]); assert look(path, engine) == "finite" and look(path, engine, search=True); path.unlink()     # also compiles what is to be compiled
        if Path("/proc/self/statm").exists(): limit_memory()
        for i in range(count):
            if i % 50 == 0: gc.collect()    # an engine may hold itself in a circle
            if i % 1000 == 0: print(f"seed {seed}, from case {i}", file=sys.stderr, flush=True)
            path.write_bytes(case(kinds[i % len(kinds)], seed, i))
            faulthandler.dump_traceback_later(60, exit=True)        # a hang
            start = time.process_time()
            try: guarded(path, engine, said)
            except BaseException as e: raise AssertionError(f"seed {seed}, case {i}: {type(e).__name__}: {e}") from e
            if time.process_time() - start > SLOW: raise AssertionError(f"seed {seed}, case {i}: took {time.process_time() - start:.1f} s")
            path.unlink()   # a new file each time: the old one may still be mapped
        faulthandler.cancel_dump_traceback_later()
    return {"cases": count, "seed": seed, "engine": engine, **said}


if __name__ == "__main__":
    faulthandler.enable()
    print(json.dumps(fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)))

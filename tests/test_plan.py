"The plan against what is then allocated, for every engine"
import gc
import os
import tracemalloc

import numpy as np
import pytest

from gguf_tools import tiny, write
from qwen35_lit import load, plan
from qwen35_lit.checkpoint import open_checkpoint
from qwen35_lit.config import InputError, PlanError, config_from_meta, example_meta
from qwen35_lit.hybrid import ENGINES, Model, NumpyEngine, find_engine

USABLE = [e for e in ENGINES if e == "numpy" or find_engine(e).usable()]
FILES = ["moe-r3", "moe-r2", "dense-r1", "moe-k-Q4_K_M"]


@pytest.mark.parametrize("engine", USABLE)
@pytest.mark.parametrize("n_ctx, n_seqs", [(1, 1), (77, 3)])
@pytest.mark.parametrize("name", FILES)
def test_states_to_the_byte(engine, n_ctx, n_seqs, name, data):
    p, m = plan(data / f"{name}.gguf", n_ctx, n_seqs, engine), load(data / f"{name}.gguf", engine=engine)
    states = [m.new_state(n_ctx) for _ in range(n_seqs)]
    m.forward_batch([([5], s) for s in states])
    assert p.needs["windows and delta matrices"] == sum(s.conv.nbytes + s.S.nbytes for s in states)
    assert p.needs["their twin, which a step writes"] == sum(s.next_conv.nbytes + s.next_S.nbytes for s in states)
    assert p.needs["keys and values"] == sum(s.k.nbytes + s.v.nbytes for s in states)
    assert p.mapped == m.checkpoint.n_bytes == sum({t.name: t.n_bytes for t in m.checkpoint.tensors.values()}.values())


def test_numpy_weights_and_calls(data):
    "Kept weights never exceed the plan, and the peak of a call stays below it, also where no weight is kept"
    for name in ("moe-r3", "moe-k-Q4_K_M"):
        for free in (2**40, 0):
            ck = open_checkpoint(data / f"{name}.gguf")
            p, m = plan(ck, 300, 1, "numpy", rows=40, free=free), Model(ck, NumpyEngine(ck, budget=free // 4))
            s = m.new_state(300)
            m.forward(np.arange(40) % 300, s.copy(), logits="last"); m.forward([1], s); gc.collect()
            tracemalloc.start()
            m.forward(np.arange(40) % 300, s, logits="last")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert m.engine.weights.used <= p.needs["weights as floats"] and peak <= p.needs["arrays of a call"], (name, free, peak)


def test_the_header_is_enough(tmp_path):
    "Nothing but the header is read: a sparse file of 40 GB is planned at once"
    path = write(tiny(), tmp_path / "m.gguf")
    p = plan(path, free=2**30)
    os.truncate(path, 40 * 2**30)
    assert plan(path, free=2**30) == p


def test_refusals_name_what_fits(data):
    path = data / "moe-r3.gguf"
    with pytest.raises(PlanError, match=r"moe-r3.gguf: 8 × 100000 tokens with engine numpy need .* MiB \(.*keys and values .*\), and 64 are available; n_ctx \d+ or 1 sequence of 100000 would fit|would fit") as e:
        plan(path, 100_000, 8, "numpy", free=64 * 2**20, check=True)
    n = int(str(e.value).split("n_ctx ")[1].split()[0])
    assert plan(path, n, 8, "numpy", free=64 * 2**20).fits and not plan(path, n + 1, 8, "numpy", free=64 * 2**20).fits
    with pytest.raises(PlanError, match="no n_ctx fits"): plan(path, 10, engine="numpy", free=1000, check=True)
    assert not plan(path, 100_000, 8, "numpy", free=64 * 2**20).fits
    for bad in (dict(n_ctx=0), dict(n_ctx=1.), dict(n_seqs=0), dict(rows="a"), dict(engine="warp")):
        with pytest.raises(InputError): plan(path, **bad)


def test_absurd_numbers_do_not_overflow():
    c = config_from_meta(example_meta("27B"))
    p = plan(c, n_ctx=2**50, n_seqs=2**20, engine="numpy", free=2**40)
    assert p.needs["keys and values"] == 2**20 * 2**50 * 16 * 2 * 4 * 256 * 4 and not p.fits and p.as_dict()["total"] == p.total


def test_words(data):
    p = plan(data / "moe-r3.gguf", 64, 2, "numpy", free=10**9)
    assert str(p).splitlines()[0] == "moe-r3.gguf, numpy: 2 × 64 tokens: fits" and len(str(p).splitlines()) == 10
    assert p.as_dict()["fits"] is True and p.as_dict()["needs"] == p.needs

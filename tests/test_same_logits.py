"Files that are odd and yet the same model: each gives the logits of the plain file, to the bit"
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

import gguf_tools as tools
from gguf_tools import SAME, put, put_other, retype, tiny, write
from qwen35_lit import load
from qwen35_lit.hybrid import ENGINES, find_engine

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
USABLE = [e for e in ENGINES if e == "numpy" or find_engine(e).usable()]


def logits(path, engine="numpy", tokens=TOKENS, **kw):
    "Of a prompt and of one more token"
    m = load(path, engine=engine, **kw)
    s = m.new_state(32)
    return np.concatenate([m.forward(tokens[:-1], s), m.forward(tokens[-1:], s)])


@pytest.fixture(scope="module")
def plain(): return tiny()


@pytest.fixture(scope="module")
def expected(plain, tmp_path_factory): return logits(write(plain, tmp_path_factory.mktemp("plain") / "plain.gguf"))


def same(path, expected):
    assert np.isfinite(expected).all() and np.abs(expected).max() > .1
    np.testing.assert_array_equal(logits(path), expected)


# --- keys and tensors

@pytest.mark.parametrize("name", SAME)
def test_variants(name, plain, expected, tmp_path): same(write(SAME[name](plain), tmp_path / "m.gguf"), expected)


@pytest.mark.parametrize("name", ["everything", "ollama_with_mtp", "fused", "overridden"])
def test_variants_of_a_converted_file(name, data, tmp_path):
    "The same with a file of llama.cpp's converter, whose logits are known from elsewhere"
    path, z = data / "moe-r3.gguf", np.load(data / "moe-r3.npz")
    tokens = z["tokens"].tolist()[:20]
    ours = logits(write(SAME[name](tools.read_model(path)), tmp_path / "m.gguf"), tokens=tokens)
    np.testing.assert_array_equal(ours, logits(path, tokens=tokens))
    assert np.abs(ours - z["hf"][:20]).max() < 1e-4


@pytest.mark.parametrize("engine", USABLE)
def test_every_engine_sees_through_it(engine, data, tmp_path):
    "Quantised, with MTP, Ollama's names, and gate and up in one tensor: windows that jump from expert to expert"
    path = data / "moe-k-Q4_K_M.gguf"
    odd = write(SAME["everything"](tools.read_model(path)), tmp_path / "m.gguf", parts=50, alignment=64)
    np.testing.assert_array_equal(logits(odd, engine), logits(path, engine))


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen35"])
def test_kinds_from_other_keys(arch, tmp_path):
    "The list of recurrent layers, the head counts, or nothing at all: the same kinds, the same logits"
    m = tiny(arch)
    expected = logits(write(m, tmp_path / "a.gguf"))
    for edit in (tools.recurrent_list, tools.only_kv_list, tools.no_interval): same(write(edit(m), tmp_path / "m.gguf"), expected)


def test_tied(plain, tmp_path):
    "No `output.weight` is the embedding table said twice, also if that is quantised"
    for m in (plain, retype(plain, "token_embd.weight", Q.Q8_0)):
        twice = logits(write(tools.tied(m), tmp_path / "twice.gguf"))
        same(write(tools.untied(m), tmp_path / "once.gguf"), twice)


def test_attention_in_other_places(tmp_path):
    "Attention at 0 and 3: a layer swapped with another is another model, and it runs"
    m, swap = tiny(), lambda n: n.replace("blk.3.", "blk.9.").replace("blk.0.", "blk.3.").replace("blk.9.", "blk.0.")
    plain = logits(write(m, tmp_path / "a.gguf"))
    m.tensors = {swap(n): t for n, t in m.tensors.items()}
    kinds = dict(attention__recurrent_layers=[False, True, True, True])
    moved = logits(write(put(m, **kinds), tmp_path / "b.gguf"))
    assert np.isfinite(moved).all() and np.abs(moved - plain).max() > .01
    same(write(put(m, **kinds, full_attention_interval=None), tmp_path / "c.gguf"), moved)


def test_expert_weights_scale(plain, tmp_path):
    "Absent, 1 and 0 are the same; 2 is twice the experts' down matrices, exactly"
    expected = logits(write(plain, tmp_path / "a.gguf"))
    for x in (1., 0.): same(write(put(plain, expert_weights_scale=x), tmp_path / "m.gguf"), expected)
    double = plain.copy()
    double.tensors |= {n: (x * 2, k) for n, (x, k) in plain.tensors.items() if n.endswith("ffn_down_exps.weight")}
    twice = logits(write(put(plain, expert_weights_scale=2.), tmp_path / "b.gguf"))
    same(write(double, tmp_path / "c.gguf"), twice)
    assert np.abs(twice - expected).max() > .01


def test_keys_for_text_change_no_logits(plain, expected, tmp_path):
    keys = {"general.sampling.temp": .7, "general.sampling.top_k": 20, "general.sampling.top_p": .95, "tokenizer.ggml.eos_token_ids": [1, 2], "tokenizer.ggml.add_bos_token": True}
    same(write(put_other(plain, keys), tmp_path / "m.gguf"), expected)


# --- layout and places

@pytest.mark.parametrize("options", [dict(alignment=64), dict(alignment=8), dict(alignment=4096), dict(version=2), dict(version=2, alignment=128)], ids=str)
def test_layouts(options, plain, expected, tmp_path): same(write(plain, tmp_path / "m.gguf", **options), expected)


@pytest.mark.parametrize("parts", [1, 7, 30])
def test_split(parts, plain, expected, tmp_path):
    "Any part will do, and all parts are found"
    write(plain, tmp_path / "m.gguf", parts=parts)
    files = sorted(tmp_path.glob("*.gguf"))
    for file in {files[0], files[len(files) // 2], files[-1]}: same(file, expected)


def test_split_and_odd(plain, expected, tmp_path):
    same(write(SAME["everything"](plain), tmp_path / "m.gguf", parts=9, alignment=64, version=3), expected)


def test_order_of_tensors(plain, expected, tmp_path):
    m = plain.copy()
    names = list(m.tensors)
    np.random.default_rng(0).shuffle(names)
    m.tensors = {n: m.tensors[n] for n in names}
    same(write(m, tmp_path / "m.gguf"), expected)


def test_paths(plain, expected, tmp_path, monkeypatch):
    "Letters of all kinds, 2,000 of them, relative, from home, a link, a folder that cannot be written"
    folder = tmp_path / "模型 ünïcode 🦊" / Path(*["x" * 200] * 10)
    folder.mkdir(parents=True)
    path = write(plain, folder / f"naïve {'y' * 200}.gguf")
    same(path, expected)
    same(str(path), expected)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(path, home / "m.gguf")
    (tmp_path / "link.gguf").symlink_to(home / "m.gguf")
    monkeypatch.setenv("HOME", str(home)); monkeypatch.chdir(home)
    for p in ("~/m.gguf", "m.gguf", "./../home/m.gguf", tmp_path / "link.gguf"): same(p, expected)
    (home / "m.gguf").chmod(0o444); home.chmod(0o555)
    try: same(home / "m.gguf", expected)
    finally: home.chmod(0o755)


def test_a_split_model_through_links(plain, expected, tmp_path):
    "A store of files under other names, with links that have the right ones (as download caches have)"
    (tmp_path / "a").mkdir(); (tmp_path / "b").mkdir()
    write(plain, tmp_path / "a" / "m.gguf", parts=30)
    for i, file in enumerate(sorted((tmp_path / "a").iterdir())):
        os.replace(file, tmp_path / "a" / f"blob{i}")
        (tmp_path / "b" / file.name).symlink_to(tmp_path / "a" / f"blob{i}")
    for file in (tmp_path / "b").iterdir(): same(file, expected)


# --- types

def random_blocks(kind, shape, rng):
    "Bytes of a type with blocks of 32 that gguf-py cannot write: any codes, and scales of a sensible size"
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (int(np.prod(shape)) // weights, size), dtype=np.uint8)
    raw[:, :2] = np.float16(rng.uniform(.001, .004, len(raw)))[:, None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def quantised(m, kind, rng):
    "Every matrix of `m` in this type, and the same model with what gguf-py makes of these bytes as floats"
    a, b = m.copy(), m.copy()
    for name, (x, _) in m.tensors.items():
        if x.ndim < 2 or "conv1d" in name or "gate_inp" in name or x.shape[-1] % 32: continue
        raw = random_blocks(kind, x.shape, rng) if kind == Q.IQ4_NL else gguf.quants.quantize(x, kind)
        a.tensors[name], b.tensors[name] = (raw, kind), (gguf.quants.dequantize(raw, kind).astype(np.float32), Q.F32)
    return a, b


@pytest.mark.parametrize("engine", USABLE)
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.IQ4_NL, Q.F16, Q.BF16], ids=lambda k: k.name)
def test_narrow_rows(kind, engine, tmp_path):
    "Rows of 32, 64 and 96 weights, for which K-quants do not exist: the logits of the same weights as floats"
    m = tiny(n_embd=96, ff=32, S=16)
    assert {x.shape[-1] for x, _ in m.tensors.values() if x.ndim > 1} >= {96, 32, 64}
    a, b = quantised(m, kind, np.random.default_rng(0))
    assert sum(k == kind for _, k in a.tensors.values()) > 40
    a, b = write(a, tmp_path / "a.gguf"), write(b, tmp_path / "b.gguf")
    if engine == "numpy": return np.testing.assert_array_equal(logits(a), logits(b))
    plain = logits(b)
    np.testing.assert_allclose(logits(a, engine, activations="f32"), plain, atol=1e-4)
    eight = logits(a, engine)                           # activations in 8 bits: near, but for tokens that go to another expert
    assert np.isfinite(eight).all() and np.corrcoef(eight.ravel(), plain.ravel())[0, 1] > .9


def test_a_file_of_many_types(plain, tmp_path):
    "Each tensor in another type"
    rng, kinds = np.random.default_rng(1), [Q.Q4_0, Q.F32, Q.Q5_1, Q.BF16, Q.IQ4_NL, Q.Q8_0, Q.F16]
    a, b = plain.copy(), plain.copy()
    for i, name in enumerate(plain.tensors):
        x, y = quantised(plain, kinds[i % len(kinds)], rng) if kinds[i % len(kinds)] != Q.F32 else (plain, plain)
        a.tensors[name], b.tensors[name] = x.tensors[name], y.tensors[name]
    assert len({k for _, k in a.tensors.values()}) == len(kinds)
    same(write(a, tmp_path / "a.gguf"), logits(write(b, tmp_path / "b.gguf")))

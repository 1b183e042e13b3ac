"The CPU engine against other people's numbers, and against itself: the same bits however the tokens are cut"
import numpy as np, pytest
from qwen35_lit import load

F32, QUANTS = ["moe-r3", "moe-r2", "dense-r1"], ["Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]


def relative(a, b): return float(np.linalg.norm(a - b)/np.linalg.norm(b))


def reference(data, name):
    z = np.load(data/f"{name}.npz")
    return z, z["tokens"].tolist()


def run(m, tokens, cuts=None):
    s, out, i = m.new_state(n_ctx=len(tokens) + 8), [], 0
    for n in cuts or [len(tokens)]: out.append(m.forward(tokens[i:i + n], s)); i += n
    return np.concatenate(out)


@pytest.mark.parametrize("name", F32)
def test_floats(data, name):
    z, tokens = reference(data, name)
    m = load(data/f"{name}.gguf", engine="cpu", activations="f32")
    whole = run(m, tokens)
    assert np.abs(whole - z["hf"]).max() <= 1e-4             # HF and llama.cpp differ by up to 2.3e-5 themselves
    for cuts in ([1]*len(tokens), [3, 1, len(tokens) - 4], [33, len(tokens) - 33]): assert np.array_equal(whole, run(m, tokens, cuts))


@pytest.mark.parametrize("q", QUANTS)
def test_quantised_weights(data, q):
    "Float activations against the dequantised file; rounded ones no further from it than llama.cpp's own"
    z, tokens = reference(data, f"moe-k-{q}")
    path = data/f"moe-k-{q}.gguf"
    assert np.abs(run(load(path, engine="cpu", activations="f32"), tokens) - z["dequantised"]).max() <= 1e-3
    one, two = (run(load(path, engine="cpu", n_threads=n), tokens) for n in (1, 2))
    assert relative(one, z["dequantised"]) <= 1.1*relative(z["quantised"], z["dequantised"])   # two roundings of one kind, not the same one
    assert np.array_equal(one, two)
    assert np.array_equal(one, run(load(path, engine="cpu"), tokens, [1]*len(tokens)))


def test_company(data):
    "Sequences in one pass have the bits they have alone"
    z, tokens = reference(data, "moe-r3")
    m = load(data/"moe-r3.gguf", engine="cpu")
    parts = [tokens[:17], tokens[20:21], tokens[30:35]]
    together = m.forward_batch([(p, m.new_state(64)) for p in parts])
    for p, logits in zip(parts, together): assert np.array_equal(logits, run(m, p))


def test_watching_changes_no_bit(data):
    z, tokens = reference(data, "moe-r3")
    m, seen = load(data/"moe-r3.gguf", engine="cpu"), set()
    plain = run(m, tokens)
    with m.tapping(lambda name, layer, value: seen.add(name)): watched = run(m, tokens)
    assert np.array_equal(plain, watched) and {"gate", "k_conv_predelta", "Kcur", "ffn_moe_topk", "l_out"} <= seen

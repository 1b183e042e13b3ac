"The NumPy engine against other people's numbers: HF transformers and llama.cpp, on the files in tests/data"
import threading
import numpy as np, pytest
from qwen35_lit import load
from qwen35_lit.config import ContextFullError, InputError, StateError

F32, QUANTS = ["moe-r3", "moe-r2", "dense-r1"], ["Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]


def oracle(data, name):
    z = np.load(data/f"{name}.npz")
    return z, z["tokens"].tolist()


def run(m, tokens, cuts=None):
    s, out, i = m.new_state(n_ctx=len(tokens) + 8), [], 0
    for n in cuts or [len(tokens)]: out.append(m.forward(tokens[i:i + n], s)); i += n
    return np.concatenate(out)


@pytest.mark.parametrize("dtype,tol", [("float32", 1e-4), ("float64", 5e-5)])   # HF and llama.cpp differ by up to 2.3e-5 from each other
@pytest.mark.parametrize("name", F32)
def test_logits(data, name, dtype, tol):
    z, tokens = oracle(data, name)
    ours = run(load(data/f"{name}.gguf", engine="numpy", dtype=dtype), tokens)
    for theirs in ("hf", "llama"):
        assert np.abs(ours - z[theirs]).max() <= tol, theirs
        assert (ours.argmax(1) == z[theirs].argmax(1)).all(), theirs


@pytest.mark.parametrize("name", F32)
def test_hidden_states(data, name):
    "The residual stream after the embedding and after every layer but the last, and the normed end, as HF has them"
    z, tokens = oracle(data, name)
    m, got = load(data/f"{name}.gguf", engine="numpy"), []
    def keep(n, layer, value):
        if n in ("model.input_embed", "l_out", "result_norm"): got.append(value)
    with m.tapping(keep): run(m, tokens)
    got = got[:-2] + got[-1:]                       # HF's last hidden state is the normed one
    assert len(got) == len(z["hidden"]) == m.config.n_layer + 1
    for ours, theirs in zip(got, z["hidden"]):
        # f32 rounding of sums of up to 10 layers, relative to the largest value of the row
        assert np.abs(ours - theirs).max() <= 2e-5*max(1, np.abs(theirs).max())


@pytest.mark.parametrize("q", QUANTS)
def test_quantised(data, q):
    "The same file with every tensor dequantised, run by llama.cpp; its sums are in another order, the weights are equal"
    z, tokens = oracle(data, f"moe-k-{q}")
    ours = run(load(data/f"moe-k-{q}.gguf", engine="numpy"), tokens)
    assert np.abs(ours - z["dequantised"]).max() <= 1e-3
    assert (ours.argmax(1) == z["dequantised"].argmax(1)).all()


# BLAS adds up a row of a product of many rows in another order than a row alone: 2e-5 is about 20 ulps of these logits
@pytest.mark.parametrize("n", [1, 2, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_prefill_is_stepping(data, n):
    z, tokens = oracle(data, "moe-r2")
    m = load(data/"moe-r2.gguf", engine="numpy")
    assert np.abs(run(m, tokens[:n]) - run(m, tokens[:n], [1]*n)).max() <= 2e-5


@pytest.mark.parametrize("name", F32)
@pytest.mark.parametrize("first", [[0, 1, 0, 2], [3], [7]*4, [33]])
def test_odd_chunks(data, name, first):
    z, tokens = oracle(data, name)
    tokens = tokens[:60]
    m = load(data/f"{name}.gguf", engine="numpy")
    assert np.abs(run(m, tokens) - run(m, tokens, [*first, len(tokens) - sum(first)])).max() <= 2e-5


@pytest.mark.parametrize("name", F32)
def test_batch_is_separate_calls(data, name):
    z, tokens = oracle(data, name)
    m = load(data/f"{name}.gguf", engine="numpy")
    parts = [tokens[:17], tokens[20:21], [], tokens[30:35]]
    states = [m.new_state(64) for _ in parts]
    together = m.forward_batch(list(zip(parts, states)))
    for part, s, logits in zip(parts, states, together):
        assert logits.shape == (len(part), m.config.n_vocab) and s.n_past == len(part) and s.tokens == part
        if part: assert np.abs(logits - run(m, part)).max() <= 2e-5
    last = m.forward_batch([([5], states[0]), ([5, 6], states[1])], logits="last")
    assert [x.shape for x in last] == [(m.config.n_vocab,)]*2


def test_reset_and_fork(data):
    "A, then B in a fresh state, is B; a fork from a copy is the run it was forked from"
    z, tokens = oracle(data, "moe-r3")
    m = load(data/"moe-r3.gguf", engine="numpy")
    b = run(m, tokens[20:40])
    run(m, tokens[:20])
    assert np.array_equal(run(m, tokens[20:40]), b)
    s = m.new_state(64); m.forward(tokens[:10], s)
    fork = s.copy()
    m.forward(tokens[30:40], fork)
    assert s != fork and np.array_equal(m.forward(tokens[10:20], s), m.forward(tokens[10:20], _at(m, tokens[:10])))


def _at(m, tokens):
    s = m.new_state(64); m.forward(tokens, s)
    return s


def test_positions_and_embeddings(data):
    z, tokens = oracle(data, "moe-r3")
    m, n = load(data/"moe-r3.gguf", engine="numpy"), 12
    plain = run(m, tokens[:n])
    for p in (np.arange(n), np.stack([np.arange(n)]*3)):          # text in three coordinates is text
        assert np.array_equal(m.forward(tokens[:n], m.new_state(64), positions=p), plain)
    moved = m.forward(tokens[:n], m.new_state(64), positions=np.stack([np.arange(n), np.arange(n)*2, np.arange(n)]))
    assert np.abs(moved - plain).max() > 1e-3
    s, rows = m.new_state(64), []
    with m.tapping(lambda name, layer, value: rows.append(value) if name == "model.input_embed" else None): m.forward(tokens[:n], m.new_state(64))
    assert np.array_equal(m.forward(None, s, embeddings=rows[0]), plain)
    assert s.tokens == [None]*n
    with pytest.raises(InputError): m.forward(tokens[:2], m.new_state(8), positions=[0])
    with pytest.raises(InputError): m.forward(None, m.new_state(8), embeddings=np.zeros((2, 3)))


def test_save_continue(data, tmp_path):
    z, tokens = oracle(data, "moe-r3")
    m = load(data/"moe-r3.gguf", engine="numpy")
    s = _at(m, tokens[:10]); s.save(tmp_path/"s")
    back = load(data/"moe-r3.gguf", engine="numpy").load_state(tmp_path/"s")
    assert back == s and np.array_equal(m.forward(tokens[10:20], s), m.forward(tokens[10:20], back))
    with pytest.raises(StateError, match="saved with model"): load(data/"moe-r2.gguf", engine="numpy").load_state(tmp_path/"s")
    with pytest.raises(InputError, match="belongs to model"): load(data/"moe-r2.gguf", engine="numpy").forward([1], s)


def test_full_context_keeps_the_state(data):
    z, tokens = oracle(data, "moe-r3")
    m = load(data/"moe-r3.gguf", engine="numpy")
    s = m.new_state(10); m.forward(tokens[:8], s); before = s.copy()
    with pytest.raises(ContextFullError, match="3 more tokens do not fit: 8 of n_ctx 10 are used"): m.forward(tokens[8:11], s)
    assert s == before
    m.forward(tokens[8:10], s)
    assert s.n_past == 10


def test_two_threads(data):
    "Two threads, each with a state of its own, on one model"
    z, tokens = oracle(data, "moe-r3")
    m, out = load(data/"moe-r3.gguf", engine="numpy"), {}
    alone = run(m, tokens[:30], [1]*30)
    threads = [threading.Thread(target=lambda i=i: out.update({i: run(m, tokens[:30], [1]*30)})) for i in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert all(np.array_equal(out[i], alone) for i in range(2))


def test_memory_budget(data):
    "With nothing kept the logits are the same, and no float copy of the vocabulary stays behind"
    from qwen35_lit.checkpoint import open_checkpoint
    from qwen35_lit.hybrid import Model, NumpyEngine
    z, tokens = oracle(data, "moe-k-Q4_K_M")
    ck = open_checkpoint(data/"moe-k-Q4_K_M.gguf")
    small, large = (Model(ck, NumpyEngine(ck, budget=b)) for b in (100_000, None))
    assert np.array_equal(run(small, tokens), run(large, tokens))
    assert small.engine.weights.used <= 100_000 < large.engine.weights.used

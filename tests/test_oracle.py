"Bisection against llama.cpp's own dump of every intermediate, and against logs that other people might bring"
import gzip
import json
import random
from unittest.mock import patch as swap

import numpy as np
import pytest
import qwen35_lit.attention as attention
import qwen35_lit.delta_rule as delta_rule
import qwen35_lit.hybrid as hybrid
import qwen35_lit.moe as moe
from qwen35_lit import load
from qwen35_lit.checkpoint import open_checkpoint
from qwen35_lit.config import FileFormatError, InputError, Qwen35Error
from qwen35_lit.cpu import CpuEngine
from qwen35_lit.oracle import AXES, HALF_UNIT, allowance, as_json, bisect_dump, compare, describe, find_tokens, parse_dump, shown
from qwen35_lit.primitives import linear

TOKENS = [257, 279, 284, 283, 258, 282]
# the names of the model's specification, in the order of llama.cpp's graph
DELTA = """attn_norm linear_attn_qkv_mixed conv_input conv_output_raw conv_output_silu q_conv_predelta k_conv_predelta v_conv_predelta alpha a_softplus gate
    beta beta_sigmoid state_predelta new_state attn_output z final_output linear_attn_out""".split()
ATTENTION = """attn_norm Qcur_full Qcur_normed Qcur Vcur Kcur_normed Kcur attn_pregate gate_reshaped gate_sigmoid attn_gated attn_output""".split()
BOTH = """attn_residual attn_post_norm ffn_moe_logits ffn_moe_probs ffn_moe_topk ffn_moe_weights_norm ffn_moe_gate ffn_moe_up ffn_moe_swiglu ffn_moe_down ffn_moe_weighted
    ffn_moe_out ffn_gate ffn_up ffn_swiglu ffn_shexp shared_expert_gate shared_expert_gate_sigmoid ffn_shexp_gated ffn_out l_out""".split()


def every_name(kinds):
    names = [f"{name}-{i}" for i, kind in enumerate(kinds) for name in (DELTA if kind == "delta" else ATTENTION) + BOTH]
    return ["model.input_embed", *names, "result_norm", "result_output"]


@pytest.fixture(scope="module")
def r3(data): return load(data/"moe-r3.gguf", engine="numpy", dtype="float64")


@pytest.fixture(scope="module")
def dump(data): return parse_dump(data/"moe-r3.eval-callback.txt.gz")


def test_every_intermediate(r3, dump):
    """To the four printed decimals, with attention in half precision as the log was made.
    Half a unit is 5e-5; 1.5e-5 more is for two f16 roundings in layer 7 that fall to the other side here (the log is f32, this is f64)"""
    c = compare(r3, dump, rtol=1e-5)
    assert c.tokens == TOKENS and c.half_attention and not c.missing and c.first is None
    assert sorted(r.title for r in c.rows) == sorted(every_name(r3.config.layer_kinds))
    for r in c.rows:
        assert r.off <= HALF_UNIT + 1.5e-5, r
        if r.name == "ffn_moe_topk": assert r.off == 0 and r.sum_ours == r.sum_theirs, r
        assert abs(r.sum_ours - r.sum_theirs) <= min(r.sum_allowed, 1e-3), r


def test_before_half_precision(data, dump):
    "Up to the first attention's reading nothing is emulated; 3e-6 beyond half a unit is f32 rounding of numbers up to 8"
    for dtype in ("float32", "float64"):
        c = compare(load(data/"moe-r3.gguf", engine="numpy", dtype=dtype), dump, rtol=1e-6, f16_kv=False)
        assert c.first.title == "attn_pregate-3"
        exact = c.rows[:c.rows.index(c.first)]
        assert len(exact) == 1 + 3*40 + 7 and max(r.off for r in exact) <= HALF_UNIT + 3e-6


def test_f32_agrees_too(data): assert bisect_dump(data/"moe-r3.gguf", data/"moe-r3.eval-callback.txt.gz").first is None


def test_cpu_engine(data, dump):
    "The fast engine shows the same intermediates"
    checkpoint = open_checkpoint(data/"moe-r3.gguf")
    c = compare(hybrid.Model(checkpoint, CpuEngine(checkpoint, activations="f32")), dump)
    assert c.first is None and not c.missing and len(c.rows) == 309


def test_comparing_changes_no_bit(r3, dump):
    from qwen35_lit.oracle import Comparer
    plain = r3.forward(TOKENS, r3.new_state(8))
    with r3.tapping(Comparer(dump)): assert np.array_equal(r3.forward(TOKENS, r3.new_state(8)), plain)


def blocked(qg, n_head): return np.split(qg.reshape(len(qg), 2*n_head, -1), 2, axis=1)
def interleaved(x, pos, rope_dim, *rest, rope=attention.rope):
    order, y, part = np.r_[0:rope_dim:2, 1:rope_dim:2], x.copy(), x.copy()
    part[..., :rope_dim] = x[..., order]; y[..., order] = rope(part, pos, rope_dim, *rest)[..., :rope_dim]
    return y
def no_renorm(logits, k, scale, tap, softmax=moe.softmax):
    p = tap("ffn_moe_probs", softmax(logits)); ids = tap("ffn_moe_topk", np.argsort(-p, -1, kind="stable")[:, :k])
    return ids, tap("ffn_moe_weights_norm", np.take_along_axis(p, ids, -1))
def read_first(S, q, k, v, g, beta, heads):
    y, S = np.empty_like(v), S.copy()
    for t in range(len(v)):
        old = S.copy(); delta_rule.delta_step(S, q[t, heads], k[t, heads], v[t], g[t], beta[t])
        y[t] = np.einsum("hij,hi->hj", old*np.exp(g[t])[:, None, None], q[t, heads])*S.shape[-1]**-.5
    return y, S


@pytest.mark.parametrize("where,name,wrong,first", [
    (attention, "split_q_gate", blocked, "Qcur_normed-3"),
    (attention, "rope", interleaved, "Qcur-3"),
    (attention, "sigmoid", lambda x: x/(1 + np.exp(-x)), "gate_sigmoid-3"),
    (delta_rule, "l2_norm", lambda x, eps: x/np.sqrt((x*x).mean(-1, keepdims=True) + eps), "q_conv_predelta-0"),
    (delta_rule, "silu", attention.sigmoid, "final_output-0"),
    (delta_rule, "softplus", lambda x: np.maximum(x, 0), "a_softplus-0"),
    (hybrid, "delta_scan", read_first, "attn_output-0"),
    (hybrid, "delta_scan", lambda S, q, *rest, f=delta_rule.delta_scan: f(S, q/4, *rest), "attn_output-0"),
    (hybrid, "delta_scan", lambda *a, f=delta_rule.delta_scan: (lambda y, S: (y, S.swapaxes(1, 2)))(*f(*a)), "new_state-0"),
    (hybrid, "causal_conv", lambda x, window, w, f=delta_rule.causal_conv: f(x, window, w[:, ::-1]), "conv_output_raw-0"),
    (moe, "route", no_renorm, "ffn_moe_weights_norm-0"),
    (moe, "swiglu", lambda gate, up, f=moe.swiglu: f(up, gate), "ffn_moe_swiglu-0"),
])
def test_planted_bugs(r3, dump, where, name, wrong, first):
    with swap.object(where, name, wrong): assert compare(r3, dump).first.title == first


def test_the_bug_of_the_seed(r3, dump):
    with swap.object(r3.engine, "heads", delta_rule.key_head(2, 6, "grouped")): c = compare(r3, dump)
    assert (c.first.name, c.first.layer, c.first.at[1]) == ("attn_output", 0, 4)     # heads 1 and 4 read the wrong key
    assert abs(c.first.ours - c.first.theirs) == c.first.off > .1
    assert json.loads(as_json(c))["first"]["name"] == "attn_output" and "first divergence: attn_output of layer 0" in "\n".join(describe(c))


# Logs written by this model: other shapes, more tokens, other surroundings

def as_text(name, layer, value, op="ADD", head="common_debug_cb_eval"):
    "One record, as llama.cpp prints it"
    a = AXES.get(name, lambda x: x)(np.asarray(value))
    kind, a = "i32" if a.dtype.kind == "i" else "f32", a.astype(np.float32)
    a = a.reshape((1,)*(4 - a.ndim) + a.shape)
    def rows(x, depth):
        keep = [*shown(len(x))]
        if depth == 3: return "            [" + ", ".join("..." if i is None else f"{x[i]:12.4f}" for i in gaps(keep, len(x))) + "  ],\n"
        pad = "    "*(depth + 1)
        return "".join(f"{pad}..., \n" if i is None else rows(x[i], 3) if depth == 2 else f"{pad}[\n{rows(x[i], depth + 1)}{pad}],\n" for i in gaps(keep, len(x)))
    title = name if layer is None else f"{name}-{layer}"
    total = np.add.accumulate(a.ravel())[-1] if a.size else 0
    body = f"    [\n{rows(a[0], 1)}    ]\n    sum = {total:.6f}\n"
    return f"{head}: {title:>24} = ({kind}) {op:>10}(some{{1, 1, 1, 1}}, }}) = {{{', '.join(map(str, a.shape[::-1]))}}}\n{body}"


def gaps(keep, n): return [*keep[:3], None, *keep[3:]] if n > 6 else keep


def write(path, m, tokens, change=lambda name, layer, x: x, front="", **kw):
    "A log of this model"
    parts = [front]
    def tap(name, layer, value):
        if not name.startswith("inp_"): parts.append(as_text(name, layer, change(name, layer, np.array(value)), **kw))
    with m.tapping(tap): m.forward(tokens, m.new_state(len(tokens)), logits="last")
    path.write_text("".join(parts))
    return parse_dump(path)


def test_the_writer_writes_as_llama_does(data, r3, dump, tmp_path):
    "So that the tests below mean something: its text of layer 0 is llama.cpp's"
    d = write(tmp_path/"log", r3, TOKENS)
    theirs = gzip.open(data/"moe-r3.eval-callback.txt.gz", "rt").read().split("common_debug_cb_eval: ")
    ours = (tmp_path/"log").read_text().split("common_debug_cb_eval: ")
    body = lambda records, title: next(r.split("\n", 1)[1] for r in records if r.split(" = ")[0].strip() == title)
    for title in ("model.input_embed", "ffn_moe_topk-0", "state_predelta-0"): assert body(ours, title).split() == body(theirs, title).split(), title
    assert len(d) == 309


@pytest.mark.parametrize("name", ["moe-r2", "dense-r1"])
@pytest.mark.parametrize("n", [1, 2, 6, 7, 40])
def test_other_shapes(data, tmp_path, name, n):
    m, tokens = load(data/f"{name}.gguf", engine="numpy"), np.load(data/f"{name}.npz")["tokens"][:n].tolist()
    d = write(tmp_path/"log", m, tokens)
    c = compare(m, d, tokens, rtol=1e-6)
    assert c.first is None and not c.missing and len(c.rows) == len(d) and not c.half_attention
    if n <= 6: assert find_tokens(m, d[0]) == tokens
    else:
        with pytest.raises(InputError, match=f"{n} tokens, of which the log shows six"): compare(m, d)


@pytest.mark.parametrize("at", [0, 3, 20, 39])
def test_a_number_that_is_not_shown(data, tmp_path, at):
    "One wrong number anywhere among 40 tokens: by itself or by the sum"
    m, tokens = load(data/"moe-r2.gguf", engine="numpy"), np.load(data/"moe-r2.npz")["tokens"][:40].tolist()
    def change(name, layer, x):
        if (name, layer) == ("ffn_shexp", 2): x[at, 30] += 3
        return x
    c = compare(m, write(tmp_path/"log", m, tokens, change), tokens)
    assert c.first.title == "ffn_shexp-2" and [r.title for r in c.rows if not r.ok] == ["ffn_shexp-2"]


def test_prelude_and_other_prefix(data, tmp_path):
    m, tokens = load(data/"moe-r2.gguf", engine="numpy"), [3, 1, 4, 1, 5, 9, 2, 6]
    front = "build: 1 (abc)\n0.00.123.456 I number of input tokens = 8\n" + "".join(f"0.00.123.457 I   {t}\n" for t in tokens) + "\n"
    d = write(tmp_path/"log", m, tokens, front=front, head="ggml_debug")
    assert d.tokens == tokens and compare(m, d).first is None
    (tmp_path/"log.gz").write_bytes(gzip.compress((tmp_path/"log").read_bytes()))
    assert compare(m, parse_dump(tmp_path/"log.gz")).first is None


def test_two_passes(data, tmp_path):
    "A prompt longer than a batch: the first pass is compared"
    m = load(data/"moe-r2.gguf", engine="numpy")
    d = write(tmp_path/"log", m, [3, 1, 4], front="number of input tokens = 5\n  3\n  1\n  4\n  1\n  5\n")
    d.extend(write(tmp_path/"log2", m, [1, 5]))
    c = compare(m, d)
    assert c.tokens == [3, 1, 4] and c.first is None and len(c.rows) == len(d)/2


def test_filtered_log(data, tmp_path):
    m = load(data/"moe-r2.gguf", engine="numpy")
    d = write(tmp_path/"log", m, [3, 1, 4])
    d[:] = [r for r in d if r.name == "l_out"]
    with pytest.raises(InputError, match="does not say which tokens"): compare(m, d)
    c = compare(m, d, [3, 1, 4])
    assert c.first is None and len(c.rows) == m.config.n_layer and "attn_norm-0" in c.missing and "not in the log" in "".join(describe(c))


def eight_bits(x, weight, block=256):
    "A product as llama.cpp makes it with quantised weights: activations in blocks of 8-bit numbers"
    y = x.reshape(len(x), -1, min(block, x.shape[1]))
    d = np.maximum(np.abs(y).max(-1, keepdims=True)/127, 1e-30)
    return linear((np.rint(y/d)*d).reshape(x.shape).astype(x.dtype), weight)


@pytest.mark.parametrize("q", ["Q3_K_M", "Q4_K_M", "Q8_0"])
def test_quantised_weights(data, tmp_path, q):
    "Eight-bit activations stay inside the allowance, a bug does not"
    m, tokens = load(data/f"moe-k-{q}.gguf", engine="numpy"), np.load(data/f"moe-k-{q}.npz")["tokens"][:6].tolist()
    with swap.object(attention, "linear", eight_bits), swap.object(delta_rule, "linear", eight_bits), swap.object(moe, "linear", eight_bits), swap.object(hybrid, "linear", eight_bits):
        d = write(tmp_path/"log", m, tokens)
    assert allowance(m) == .1 and compare(m, d, tokens).first is None
    assert compare(m, d, tokens, rtol=1e-3).first is not None
    with swap.object(delta_rule, "silu", attention.sigmoid): assert compare(m, d, tokens).first.title == "final_output-0"


def test_a_tie_is_no_divergence(data, tmp_path):
    "The other side chose the runner-up: nothing if the two are equal, a divergence if not"
    m, tokens = load(data/"moe-r2.gguf", engine="numpy"), [3, 1, 4]
    def other_choice(tied):
        p, k = {}, m.config.n_expert_used
        def change(name, layer, x):
            if (name, layer) == ("ffn_moe_probs", 1):
                order = np.argsort(-x[2]); p["next"] = order[k]
                if tied: x[2, order[k]] = x[2, order[k-1]]
            if (name, layer) == ("ffn_moe_topk", 1): x[2, k-1] = p["next"]
            if (name, layer) in (("ffn_moe_gate", 1), ("ffn_moe_down", 1)): x[2, k-1] += 1
            return x
        return change
    def tie_ours(name, layer, x):
        if (name, layer) == ("ffn_moe_probs", 1): x = x.copy(); order = np.argsort(-x[2]); x[2, order[m.config.n_expert_used]] = x[2, order[m.config.n_expert_used-1]]; return x
    with m.tapping(tie_ours):
        d = write(tmp_path/"log", m, tokens, other_choice(True))
        bad = [r.title for r in compare(m, d, rtol=1e-4).rows if not r.ok]
    assert not bad
    d = write(tmp_path/"log", m, tokens, other_choice(False))
    assert compare(m, d, rtol=1e-4).first.title == "ffn_moe_topk-1"


def test_nan_is_found(data, tmp_path):
    m = load(data/"moe-r2.gguf", engine="numpy")
    def change(name, layer, x):
        if layer is not None and layer >= 1 and name == "l_out": x[0, 0] = np.nan
        return x
    c = compare(m, write(tmp_path/"log", m, [3, 1], change))
    assert c.first.title == "l_out-1" and c.first.at == [0, 0] and json.loads(as_json(c))["first"]["theirs"] == "nan"
    bad = c.first
    with m.tapping(lambda name, layer, x: np.full_like(x, np.nan) if (name, layer) == ("attn_norm", 0) else None):
        assert compare(m, write(tmp_path/"log2", load(data/"moe-r2.gguf", engine="numpy"), [3, 1])).first.title == "attn_norm-0"
    assert np.isnan(bad.off)


# Bad input: one line that says what is wrong

def test_other_models(data, dump, tmp_path):
    for name in ("moe-r2", "dense-r1", "moe-k-Q4_K_M"):
        with pytest.raises(InputError, match="another model") as e: compare(load(data/f"{name}.gguf", engine="numpy"), dump)
        assert "\n" not in str(e.value)
    m = load(data/"moe-r2.gguf", engine="numpy")
    d = write(tmp_path/"log", m, [3, 1, 4])
    d[0].values[0, 0, 1] += .01                              # the same shapes, another embedding
    with pytest.raises(InputError, match="row 1 of model.input_embed is no token of this model"): compare(m, d)
    assert compare(m, d, [3, 1, 4]).first.title == "model.input_embed"
    d = write(tmp_path/"log2", load(data/"dense-r1.gguf", engine="numpy"), [3, 1, 4])
    with pytest.raises(Qwen35Error, match="another model"): compare(m, d, [3, 1, 4])


def test_bad_logs(data, tmp_path):
    m = load(data/"moe-r2.gguf", engine="numpy")
    write(tmp_path/"log", m, [3, 1, 4])
    text = (tmp_path/"log").read_text()
    def refused(content, says):
        (tmp_path/"bad").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(FileFormatError, match=says) as e: parse_dump(tmp_path/"bad")
        assert "\n" not in str(e.value) and "bad" in str(e.value)
    refused("", "no record in it")
    refused("hello\n"*100, "no record in it")
    refused(bytes(range(256))*100, "no record in it")
    refused(text[:-12], "result_output shows 6 numbers and no sum")
    refused(text.replace("    sum = ", "    summe = ", 1), "model.input_embed shows 18 numbers and no sum; expected 18")
    refused("\n".join(line for i, line in enumerate(text.split("\n")) if i != 4), "line 1: model.input_embed shows 12 numbers; expected 18")
    refused(text.replace("sum = ", "sum = x", 1), "line 1: model.input_embed shows 18 numbers and no sum")
    refused(text[:-4], "result_output shows 6 numbers and no sum")    # a number that lost its last digits is another number
    refused(text.replace("0.", "0,", 1), "model.input_embed shows")
    refused(gzip.compress(text.encode())[:-20], "cut or damaged")
    refused(gzip.compress(text.encode())[:300], "cut or damaged")
    refused(b"\x1f\x8b" + bytes(100), "cut or damaged")
    with pytest.raises(InputError, match="swapped"): parse_dump(data/"moe-r2.gguf")
    with pytest.raises(FileNotFoundError): parse_dump(tmp_path/"none")
    for tokens, says in (([1, 2], "2 tokens given"), ([1, 2, 10**6], "token 2"), ("abc", "token 0")):
        with pytest.raises(InputError, match=says): compare(m, parse_dump(tmp_path/"log"), tokens)
    with pytest.raises(InputError, match="rtol is nan"): compare(m, parse_dump(tmp_path/"log"), rtol=float("nan"))


def test_cut_anywhere(data, tmp_path):
    "A cut log is refused, or is shorter by whole records"
    m = load(data/"moe-r2.gguf", engine="numpy")
    whole = write(tmp_path/"log", m, [3, 1])
    text, pick, outcomes = (tmp_path/"log").read_text(), random.Random(0), set()
    for _ in range(60):
        (tmp_path/"cut").write_text(text[:pick.randrange(len(text))])
        try: d = parse_dump(tmp_path/"cut")
        except FileFormatError as e: outcomes.add("refused")
        else:
            outcomes.add("shorter")
            assert [r.title for r in d] == [r.title for r in whole[:len(d)]]
    assert "refused" in outcomes


def test_half_a_log_is_not_success(data, tmp_path):
    "Cut between two records it still compares, and says what it did not see"
    m = load(data/"moe-r2.gguf", engine="numpy")
    d = write(tmp_path/"log", m, [3, 1])
    del d[20:]
    text = "\n".join(describe(compare(m, d)))
    assert "not in the log: " in text and "20 intermediates" in text

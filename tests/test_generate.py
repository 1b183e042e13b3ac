"Generation at its edges: stop strings, halves of characters, full contexts, accidents, seeds, pauses"
import codecs
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from qwen35_lit.config import ContextFullError, InputError, NumericError, StateError
from qwen35_lit.generate import Conversation, Generation, StopStrings
from qwen35_lit.hybrid import Model, load

TEXT = "Aé日本語 🙂 👩‍👩‍👧‍👦 กำลังดี नमस्ते\n\n𝕊 end"
EOS, UNUSED = 256, 257


class Bytes:
    "A tokenizer of 256 bytes, an end token and a row that must never be drawn"
    eos_ids, unsampled, special_ids = {EOS}, [UNUSED], {}
    def encode(self, text, add_bos=None): return list(text.encode())
    def token_text(self, i): return f"<{i}>"
    def stream(self, special=True): return Stream()


class Stream:
    def __init__(self): self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    def push(self, token): return self.utf8.decode(bytes([token]))
    def flush(self): return self.utf8.decode(b"", final=True)


class Past:
    def __init__(self, n_ctx): self.n_ctx, self.n_past, self.tokens = n_ctx, 0, []


class Script(Model):
    "A model that says `script`, whatever it is told; `accident(model, n)` is called before and after call n moves the state"
    tokenizer = Bytes()
    class config: n_vocab, n_ctx_train = 258, 4096
    def __init__(self, script, n_prompt=3):
        self.script, self.n_prompt, self.calls, self.accident = list(script), n_prompt, [], lambda when, n: None
    def new_state(self, n_ctx): return Past(n_ctx)
    def forward(self, tokens, state, logits="all"):
        if not len(tokens): return
        n = len(self.calls)
        self.calls.append(len(tokens))
        self.accident("before", n)
        state.n_past += len(tokens); state.tokens += tokens
        self.accident("after", n)
        out = np.zeros(258, np.float32)
        out[self.script[min(max(state.n_past - self.n_prompt, 0), len(self.script) - 1)]] = 9
        out[UNUSED] = 99
        return out


def said(text=TEXT, end=True): return [*text.encode(), *([EOS] if end else [])]


def test_whole_characters():
    g = Script(said()).generate("abc")
    pieces = list(g)
    assert "".join(pieces) == g.text == TEXT and g.stop_reason == "eos" and g.tokens == said()
    assert all("�" not in p and p for p in pieces)
    assert UNUSED not in g.tokens


@pytest.mark.parametrize("n", range(1, 40))
def test_cut_inside_a_character(n):
    "An unfinished character shows as U+FFFD at the very end, and only there"
    g = Script(said()).generate("abc", max_tokens=n).run()
    assert g.text == TEXT.encode()[:n].decode("utf-8", "replace") and g.stop_reason == "length" and len(g.tokens) == n


def cut(text, stops):
    "The definition: the stop string that ends first, and of two the one that begins first"
    ends = sorted((text.index(s) + len(s), text.index(s)) for s in stops if s in text)
    return text[:ends[0][1]] if ends else text


@settings(max_examples=300, deadline=None)
@given(st.text("aé🙂\n", max_size=12), st.lists(st.text("aé🙂\n", min_size=1, max_size=4), max_size=3))
def test_stop_strings(text, stops):
    g = Script(said(text)).generate("abc", stop=stops)
    pieces = list(g)
    assert "".join(pieces) == g.text == cut(text, stops)
    assert g.stop_reason == ("stop" if any(s in text for s in stops) else "eos")
    assert not any(s in g.text for s in stops)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.randoms(use_true_random=False))
def test_nothing_is_held_longer_than_it_must(text, stops, rng):
    s, shown, i = StopStrings(stops), "", 0
    while i < len(text) and s.found is None:
        n = rng.randint(1, 4)
        shown, i = shown + s.feed(text[i:i + n]), i + n
        if s.found is None:
            assert shown + s.held == text[:i]
            assert not s.held or any(t.startswith(s.held) for t in stops)
    assert (shown if s.found is not None else shown + s.held) == cut(text, stops)


def test_ends():
    assert Script(said("hi")).generate("abc", max_tokens=0).run().tokens == []
    assert Script(said("hi", False)).generate("abc", max_tokens=2).run().stop_reason == "length"
    g = Script(said("hello", False)).generate("abc", n_ctx=6, max_tokens=None).run()
    assert (g.text, g.stop_reason, g.state.n_past, g.pending) == ("hel", "context", 5, [ord("l")])
    g = Script(said("hello")).generate("abc", n_ctx=3).run()
    assert (g.text, g.stop_reason, g.state.n_past) == ("", "context", 3)          # the prompt fits, nothing else does
    g = Script(said("hi")).generate("abc", ignore_eos=True, max_tokens=5).run()
    assert (EOS in g.tokens, g.stop_reason) == (False, "length")


def test_prompt_in_chunks():
    m, seen = Script(said("ok"), n_prompt=20), []
    g = m.generate(list(range(20)), chunk=7, on_prompt=lambda *a: seen.append(a)).run()
    assert m.calls[:3] == [7, 7, 6] and seen == [(7, 20), (14, 20), (20, 20)] and g.text == "ok"
    assert set(m.calls[3:]) == {1}


@pytest.mark.parametrize("n", range(6))
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_accident_in_forward(n, error):
    "Before the state has moved: the text is kept, and the next piece comes as if nothing had happened"
    m = Script(said("a🙂b"), n_prompt=6)
    def accident(when, k):
        if (when, k) == ("before", n): raise error
    m.accident = accident
    g, pieces = m.generate("abcdef", chunk=4), []
    with pytest.raises(error):
        for p in g: pieces.append(p)
    assert g.stop_reason == ("interrupted" if error is KeyboardInterrupt else "error")
    assert "".join(pieces) == g.text and g.state.tokens + g.pending == g.ids
    pieces += list(g)
    assert "".join(pieces) == g.text == "a🙂b" and g.stop_reason == "eos" and g.tokens == said("a🙂b")


def test_accident_after_the_state_has_moved():
    "The logits are lost, the text is not; going on is refused instead of guessed"
    m = Script(said("abc"))
    def accident(when, k):
        if (when, k) == ("after", 2): raise KeyboardInterrupt
    m.accident = accident
    g = m.generate("abc")
    with pytest.raises(KeyboardInterrupt): g.run()
    assert g.text == "ab" and g.pending == [] and g.state.tokens == g.ids
    with pytest.raises(StateError): next(g)
    assert g.text == "ab"


@pytest.mark.parametrize("k", range(1, 7))
def test_raising_callback(k):
    def on_token(token, g):
        if len(g.tokens) == k and not g.__dict__.setdefault("was", False): g.was = True; raise RuntimeError
    g, pieces = Script(said("a🙂b")).generate("abc", on_token=on_token, stop="zz"), []
    with pytest.raises(RuntimeError):
        for p in g: pieces.append(p)
    assert len(g.tokens) == k and g.tokens == said("a🙂b")[:k]
    assert "".join(pieces + list(g)) == g.text == "a🙂b"


def test_somebody_else_moves_the_state():
    m = Script(said("abcdef"))
    g = m.generate("abc")
    next(g)
    m.forward([1, 2], g.state)
    with pytest.raises(StateError): next(g)


def test_penalties_count_generated_tokens_only():
    m = Script([97])                                            # a for ever
    assert m.generate("aaa", presence_penalty=3., max_tokens=4).run().tokens == [97]*4       # 9 - 3 is still the best
    g = m.generate("aaa", frequency_penalty=3.5, max_tokens=4).run()                         # 9, 5.5, 2, then 0 is better
    assert g.tokens == [97, 97, 97, 0]


def test_nan_is_named():
    m = Script(said("abc"))
    m.forward = lambda tokens, state, logits="all", f=m.forward: f(tokens, state) * (np.nan if len(m.calls) == 2 else 1)
    g = m.generate("abc")
    with pytest.raises(NumericError, match="position 4, after token id 97: logits: 258 of 258 are NaN"): g.run()
    assert g.text == "a" and g.stop_reason == "error"


@pytest.mark.parametrize("kw", [dict(prompt=""), dict(prompt=[]), dict(prompt=None), dict(prompt=[258]), dict(prompt=[-1]), dict(prompt=[1.]), dict(prompt="a", max_tokens=1.5),
    dict(prompt="a", max_tokens=True), dict(prompt="a", stop=[1]), dict(prompt="a", stop=[""]), dict(prompt="a", temperature=-1), dict(prompt="a", tempature=1),
    *(dict(prompt=x) for x in (5, object(), {1: 2}, {1, 2}, np.array(5), np.array([[1]]), (i for i in [1]), b"a")), *(dict(prompt="a", **{k: 5}) for k in ("stop", "on_token", "on_prompt")),
    dict(prompt="a", stop=0), dict(prompt="a", n_ctx="x"), dict(prompt="a", n_ctx=-1), dict(prompt="a", logprobs=-1), dict(prompt="a", chunk=0), dict(prompt="a", logit_bias={"x": 1})])
def test_refused_before_anything_runs(kw):
    m = Script(said("a"))
    with pytest.raises(InputError): m.generate(**kw)
    assert m.calls == []


def test_context_is_checked_before_anything_runs():
    m = Script(said("a"))
    with pytest.raises(ContextFullError, match="4 tokens, expected at most n_ctx = 3"): m.generate("abcd", n_ctx=3)
    with pytest.raises(ContextFullError, match="the model was trained on 4096"): m.generate([1]*5000)
    s = m.new_state(5); m.forward([1, 2, 3], s)
    with pytest.raises(ContextFullError, match="n_ctx = 5 only 2 are left"): m.generate("abc", state=s)
    assert s.n_past == 3


# From here on the demo model.

@pytest.fixture(scope="module")
def m(demo): return load(demo)


def prompt(text): return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


STORY = prompt("Tell me a story about Leo and a green drum.")
FACT = prompt("Mia has a red ball. Tom has a blue kite. What colour is Tom's kite?")


def test_seeds(m):
    kw = dict(temperature=1.2, top_p=.95, max_tokens=20)
    texts = [m.generate(STORY, seed=s, **kw).run().text for s in range(3)]
    assert len(set(texts)) == 3
    free = m.generate(STORY, **kw).run()
    assert m.generate(STORY, seed=free.sampler.seed, **kw).run().text == free.text


def test_threads_do_not_matter(m):
    "Four texts at once, each with its own state, are the four texts one after the other"
    kw, alone, together = dict(temperature=1., max_tokens=20), [], [None]*4
    for s in range(4): alone.append(m.generate(STORY, seed=s, **kw).run().tokens)
    def work(s): together[s] = m.generate(STORY, seed=s, **kw).run().tokens
    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert together == alone


def test_thread_count_does_not_matter(demo):
    kw = dict(temperature=1.2, top_p=.95, seed=8, max_tokens=24)
    texts = {load(demo, engine="cpu", n_threads=n).generate(STORY, **kw).run().text for n in (1, 3)}
    assert len(texts) == 1


@pytest.mark.parametrize("first", [0, 1, 7, 19])
def test_pause(m, first, tmp_path):
    "Stop, save, load, go on: the tokens and the state of an undisturbed run"
    kw = dict(temperature=1., seed=11, n_ctx=256)
    whole = m.generate(STORY, max_tokens=20, **kw).run()
    a = m.generate(STORY, max_tokens=first, **kw).run()
    a.state.save(tmp_path / "state")
    s = m.load_state(tmp_path / "state")
    if not first: return                                       # nothing is pending, and nothing can follow without a token
    kw.pop("n_ctx")
    b = m.generate(a.pending, state=s, max_tokens=20 - first, **kw).run()
    assert a.tokens + b.tokens == whole.tokens and b.state == whole.state


def test_pause_in_another_process(m, demo, tmp_path):
    kw = dict(temperature=1., seed=3, n_ctx=256)
    whole = m.generate(STORY, max_tokens=16, **kw).run()
    a = m.generate(STORY, max_tokens=6, **kw).run()
    a.state.save(tmp_path / "state")
    code = f"""from qwen35_lit.hybrid import load
import qwen35_lit.generate
m = load({str(demo)!r})
print(m.generate({a.pending}, state=m.load_state({str(tmp_path / "state")!r}), max_tokens=10, temperature=1., seed=3).run().tokens)"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert a.tokens + eval(out) == whole.tokens


def test_interrupted_in_every_layer(m):
    whole = m.generate(FACT).run()
    for layer in range(m.config.n_layer):
        def ctrl_c(name, i, value):
            if (name, i) == ("l_out", layer) and len(g.tokens) == 2: raise KeyboardInterrupt
        g = m.generate(FACT)
        with pytest.raises(KeyboardInterrupt), m.tapping(ctrl_c): g.run()
        assert g.state.tokens + g.pending == g.ids and len(g.pending) == 1
        assert g.run().text == whole.text and g.state == whole.state


def test_regenerating_from_a_snapshot(m):
    s = m.new_state(256)
    m.generate(STORY, max_tokens=0, state=s).run()
    kept = s.copy()
    last = m.tokenizer.encode("\n")
    a = m.generate(last, state=s, temperature=1., seed=1, max_tokens=20).run()
    b = m.generate(last, state=kept, temperature=1., seed=1, max_tokens=20).run()
    assert a.tokens == b.tokens and a.state == b.state


def test_state_of_another_model(m, data):
    other = load(data / "moe-r3.gguf")
    with pytest.raises(InputError, match="belongs to model"): m.generate("Mia", state=other.new_state(64))
    with pytest.raises(InputError, match="expected a State"): m.generate("Mia", state="x")


def test_padding_rows_are_never_drawn(m):
    pads = set(map(int, m.tokenizer.unsampled))
    g = m.generate(STORY, temperature=100., seed=0, max_tokens=120, n_ctx=512, ignore_eos=True, logit_bias={min(pads): 50.}).run()
    assert pads and not pads & set(g.tokens) and len(set(g.tokens)) > 60


def test_logprobs(m):
    g = m.generate(FACT, logprobs=3, temperature=.7, seed=2).run()
    s = m.new_state(128)
    logits = np.concatenate([m.forward(g.ids[:g.n_prompt], s)[-1:], m.forward(g.tokens[:-1], s)]).astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for row, note in zip(p, g.logprobs, strict=True):
        assert abs(np.log(row[note.token]) - note.logprob) < 1e-4 and [t for t, _, _ in note.top] == np.argsort(-row)[:3].tolist()
    assert m.generate(FACT).run().logprobs is None


def test_conversation_is_the_chat_from_scratch(m):
    "Whatever was kept of earlier turns, the answers and the kept state are those of reading everything at once"
    rng, talk = random.Random(4), Conversation(m, n_ctx=1024)
    lines = ["Mia has a red ball.", "Tom's kite is blue.", "Hello.", "Now Mia's ball is green.", "What colour is Tom's kite?", "What colour is Mia's ball?"]
    for line in lines:
        talk.thinking = rng.random() < .5
        g = talk.ask(line).run()
        assert g.text == m.chat(talk.messages, thinking=talk.thinking, n_ctx=1024).run().text
    talk.settle()
    assert [o["role"] for o in talk.messages] == ["user", "assistant"]*6


def test_conversation_after_an_interruption(m):
    talk = Conversation(m, thinking=False, n_ctx=512)
    g = talk.ask("Tell me a story about Leo and a green drum.")
    for _ in range(5): next(g)
    talk.ask("Who are you?").run()
    assert talk.messages[1]["content"] == g.text != ""
    before = list(talk.messages), talk.last
    talk.n_ctx = 8
    with pytest.raises(ContextFullError): talk.ask("And now?")
    assert talk.messages == [*before[0], dict(role="assistant", content=before[1].answer)]   # the answer is settled, the question is not there


@pytest.mark.parametrize("kw", [dict(messages=None), dict(messages="hi"), dict(messages=[1]), dict(messages=[dict(content="a")]), dict(n_ctx="x"), dict(n_ctx=0)])
def test_conversations_are_refused_at_once(m, kw):
    with pytest.raises(InputError): Conversation(m, **kw)


def test_conversation_fits_the_training(m):
    assert Conversation(m).n_ctx == m.config.n_ctx_train == 2048 and Conversation(m, n_ctx=5000).n_ctx == 5000


def test_half_a_character_is_counted_in_what_was_said(m):
    with pytest.raises(InputError, match="character 2 of the text"): Conversation(m).ask("ab\udcff")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kw", [{p: sign * 10.**e} for p in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature") for e in (308, -308) for sign in ((1, -1) if p[-1] == "y" and p[0] != "r" else (1,))])
def test_extreme_settings_are_quiet(m, kw):
    g = m.generate(STORY, **(dict(temperature=1., seed=0, max_tokens=6, repetition_penalty=1.1) | kw)).run()
    assert len(g.tokens) == 6


def test_generation_is_lazy(m):
    g = m.generate(STORY)
    assert isinstance(g, Generation) and g.state.n_past == 0 and g.text == "" and g.stop_reason is None

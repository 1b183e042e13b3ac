"The demo model answers its exam through the package, and its facts sit where the chapter says"
import json
from runpy import run_path

import numpy as np
import pytest
from conftest import ROOT
from qwen35_lit import demo_model, load
from qwen35_lit.demo import exam, question_at, read_facts

FOLDER = ROOT / "demo_model"
EXAM = [json.loads(line) for line in (FOLDER / "recall_eval.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["numpy", "cpu"])
def model(request): return load(demo_model(), engine=request.param)


@pytest.fixture(scope="module")
def numpy_model(): return load(demo_model(), engine="numpy")


def some(kind, step): return [p for p in EXAM if p["kind"] == kind][::step]


def erase(layer, heads):
    def edit(s): s.S[layer, heads] = 0
    return edit


def test_the_exam_is_what_the_grammar_deals(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grammar.py", "exam"])
    run_path(str(FOLDER / "grammar.py"), run_name="__main__")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == EXAM


def test_exam_problems_were_held_out():
    held_out = run_path(str(FOLDER / "grammar.py"))["held_out"]
    assert len(EXAM) == 300 and all(held_out(p["prompt"]) for p in EXAM)


@pytest.mark.parametrize("kind", ["recall", "update", "kept"])
def test_every_fourth_problem(model, kind):
    "llama.cpp: 97, 98 and 93 of a hundred"
    right = exam(model, some(kind, 4))
    assert right.mean() >= .88, f"{right.sum()} of {len(right)}"


def test_exam_is_greedy_decoding(model):
    "Two problems of each kind, and two that this model gets wrong"
    asked = some("recall", 50) + some("update", 50) + some("kept", 50) + [some("recall", 1)[10], some("update", 1)[17]]
    plain = [model.generate(p["prompt"], max_tokens=24).run().text == p["answer"] for p in asked]
    assert exam(model, asked).tolist() == plain
    assert 0 < sum(plain) < len(plain)


def test_facts_sit_in_two_heads_of_the_first_layer(model):
    asked = some("recall", 5)
    states = read_facts(model, asked)
    before = [s.copy() for s in states]
    share = lambda edit=None: exam(model, asked, states, edit).mean()
    assert share() >= .8
    assert share(erase(0, slice(None))) <= .3 and share(erase(0, [0, 2])) <= .3
    assert share(erase(0, [1, 3])) >= .8 and share(erase(1, slice(None))) >= .8 and share(erase(2, slice(None))) >= .8
    assert states == before                       # every exam edits copies


def test_full_attention_is_not_needed(numpy_model):
    m, asked = numpy_model, some("recall", 5)
    def silent(name, layer, value):
        if name == "attn_output" and m.config.layer_kinds[layer] == "attention": return np.zeros_like(value)
    with m.tapping(silent): assert exam(m, asked).mean() >= .8


def test_a_fact_moves_with_its_tables(model):
    encode, colours = model.tokenizer.encode, ["red", "green", "pink"]
    def tell(colour):
        s = model.new_state(128)
        model.forward(encode(f"<|im_start|>user\nMia has a {colour} ball. Tom's kite is blue."), s)
        return s
    told = {c: tell(c) for c in colours}
    ask = " What colour is Mia's ball?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for c in colours:
        s = told["red"].copy()
        s.S[0, [0, 2]] = told[c].S[0, [0, 2]]
        assert model.generate(ask, state=s, max_tokens=12).run().text == f"Mia's ball is {c}."


def test_exam_at_its_edges(numpy_model):
    m, asked = numpy_model, some("kept", 34)
    assert exam(m, []).shape == (0,) and read_facts(m, []) == []
    assert exam(m, asked, batch=1).tolist() == exam(m, asked).tolist()
    assert not exam(m, [dict(p, answer="The answer is with Nobody.") for p in asked]).any()
    assert not exam(m, [dict(p, answer=p["answer"][:-1]) for p in asked]).any()      # a beginning is not the answer
    p = asked[0]["prompt"]
    assert p[:question_at(p)].endswith(".") and p[question_at(p):].count("?") == 1

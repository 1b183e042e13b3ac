"A state survives what can happen to a process and to a file: kills while saving, Ctrl-C at any line, other threads, damaged bytes"
import json
import linecache
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

import qwen35_lit.generate  # noqa: F401 (gives `Model` its `generate`)
import qwen35_lit.hybrid as hybrid
import qwen35_lit.state as state_module
from gguf_tools import tiny, write
from qwen35_lit import load
from qwen35_lit.config import ContextFullError, FileFormatError, InputError, PlanError, StateError
from qwen35_lit.state import write_atomic

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory): return load(write(tiny(), tmp_path_factory.mktemp("model") / "m.gguf"), engine="numpy")


@pytest.fixture(scope="module")
def oracle_model(data): return load(data / "moe-r3.gguf", engine="numpy")


def after(m, tokens, n_ctx=64):
    s = m.new_state(n_ctx)
    m.forward(list(tokens), s)
    return s


# --- saving

def script(name, *args, **kw):
    "Run a helper of this folder in a process of its own"
    run = subprocess.run([sys.executable, str(HERE / name), *map(str, args)], capture_output=True, text=True, timeout=120, **kw)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_kill_while_saving(data, tmp_path):
    "kill -9 at 50 random moments: the file is always one of the two states, whole"
    said = json.loads(script("kill_saves.py", data / "moe-r3.gguf", tmp_path, 50))
    assert said["kills"] == 50 and said["lost"] == 0 and said["old"] + said["new"] == 50
    assert min(said["old"], said["new"]) > 0, "only one of the two was ever found"
    assert said["unfinished"] > 0, "no kill ever hit the middle of a save, so nothing was shown"


@pytest.mark.parametrize("where", ["fsync", "replace", "fdopen"])
def test_disk_troubles_while_saving(where, model, tmp_path, monkeypatch):
    "The disk is full, or fails: one clear error, the old file, and no litter"
    old, new = after(model, [1, 2]), after(model, [1, 2, 3])
    old.save(tmp_path / "s")
    def fail(*a, **k): raise OSError(28, "No space left on device")
    monkeypatch.setattr(state_module.os, where, fail)
    with pytest.raises(StateError, match="s: the state could not be written: No space left"): new.save(tmp_path / "s")
    monkeypatch.undo()
    assert model.load_state(tmp_path / "s") == old
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_interrupted_save(model, tmp_path):
    after(model, [1, 2]).save(tmp_path / "s")
    def half(f): f.write(b"half"); raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): write_atomic(tmp_path / "s", half)
    assert [p.name for p in tmp_path.iterdir()] == ["s"] and model.load_state(tmp_path / "s").n_past == 2


ENGINES = [e for e in hybrid.ENGINES if e == "numpy" or hybrid.find_engine(e).usable()]


@pytest.mark.parametrize("engine", ENGINES)
def test_continue_in_another_process(engine, data, oracle, tmp_path):
    "Saved here, continued there, carried on here: the bits of an uninterrupted run"
    path, z = oracle("moe-r3")
    tokens = z["tokens"].tolist()[:36]
    m = load(path, engine=engine)
    whole = m.new_state(64)
    expected = [m.forward(tokens[a:a + 12], whole) for a in (0, 12, 24)]
    s = m.new_state(64)
    first = m.forward(tokens[:12], s)
    s.save(tmp_path / "a")
    script("continue_state.py", path, engine, tmp_path / "a", tmp_path / "b", json.dumps(tokens[12:24]))
    back = m.load_state(tmp_path / "b")
    third = m.forward(tokens[24:], back)
    for ours, theirs in zip((first, np.load(tmp_path / "b.npy"), third), expected): np.testing.assert_array_equal(ours, theirs)
    assert back == whole and back.n_ctx == 64


# --- files that are not what was saved

@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    s = after(model, [5, 6, 7, 8])
    path = tmp_path_factory.mktemp("saved") / "s"
    s.save(path)
    return s, path.read_bytes()


def outcome(m, s, folder, content):
    (folder / "x").write_bytes(content)
    try: back = m.load_state(folder / "x")
    except StateError as e:
        assert "\n" not in str(e) and str(folder / "x") in str(e) and len(str(e)) < 1000
        return "refused"
    return "equal" if back == s else "DIFFERENT"


def test_every_byte_flipped(model, saved, tmp_path):
    s, raw = saved
    places = np.random.default_rng(0).permutation(len(raw))[:600]
    found = [outcome(model, s, tmp_path, raw[:i] + bytes([raw[i] ^ 1 << int(i) % 8]) + raw[i + 1:]) for i in places]
    assert "DIFFERENT" not in found and found.count("refused") > 520      # dates and the like in the zip directory mean nothing


def test_every_cut(model, saved, tmp_path):
    s, raw = saved
    for n in [*range(0, len(raw), 97), *range(len(raw) - 60, len(raw))]: assert outcome(model, s, tmp_path, raw[:n]) == "refused"
    assert outcome(model, s, tmp_path, raw + b"\0" * 100) in ("equal", "refused")


def remade(raw, folder, change):
    "The file with its head changed, the hash made anew: what a program of bad will would write"
    (folder / "in").write_bytes(raw)
    with np.load(folder / "in") as z: arrays = {n: z[n] for n in z.files}
    head = json.loads(arrays.pop("head").tobytes())
    head.pop("sha256")
    change(head, arrays)
    head["sha256"] = state_module._digest(head, {n: arrays[n] for n in ("conv", "S", "k", "v") if n in arrays})
    np.savez(folder / "out.npz", head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    return (folder / "out.npz").read_bytes()


CHANGES = {
    "nothing": lambda h, a: None,
    "another layout": lambda h, a: h.update(layout="qwen35_lit state 0"), "another model": lambda h, a: h.update(identity="0" * 32), "no identity": lambda h, a: h.pop("identity"),
    "an identity that is a list": lambda h, a: h.update(identity=[1]), "more tokens than said": lambda h, a: h["tokens"].append(1), "fewer rows than said": lambda h, a: h.update(n_past=5, tokens=[1] * 5),
    "n_past a text": lambda h, a: h.update(n_past="4"), "n_past below 0": lambda h, a: h.update(n_past=-1), "n_past true": lambda h, a: h.update(n_past=True, tokens=[1]), "n_ctx a text": lambda h, a: h.update(n_ctx="64"),
    "tokens a text": lambda h, a: h.update(tokens="abcd"), "a token out of range": lambda h, a: h["tokens"].__setitem__(0, 10**6), "a token that is a text": lambda h, a: h["tokens"].__setitem__(0, "x"),
    "a list for a head": lambda h, a: (h.clear(), h.update(layout=[])), "no S": lambda h, a: a.pop("S"), "S of float64": lambda h, a: a.update(S=a["S"].astype("f8")), "S big-endian": lambda h, a: a.update(S=a["S"].astype(">f4")),
    "S transposed in memory": lambda h, a: a.update(S=np.asfortranarray(a["S"])), "S of objects": lambda h, a: a.update(S=np.array([None, 1], object)), "S of another shape": lambda h, a: a.update(S=a["S"][:1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_heads(name, model, saved, tmp_path):
    s, raw = saved
    found = outcome(model, s, tmp_path, remade(raw, tmp_path, CHANGES[name]))
    assert found == ("equal" if name == "nothing" else "refused"), name


def test_an_absurd_n_ctx_is_planned(model, saved, tmp_path):
    (tmp_path / "x").write_bytes(remade(saved[1], tmp_path, lambda h, a: h.update(n_ctx=10**15)))
    with pytest.raises(PlanError, match="needs .* MiB"): model.load_state(tmp_path / "x")
    assert model.load_state(tmp_path / "x", n_ctx=10) == saved[0]


def test_a_small_file_that_claims_much(model, tmp_path):
    "A member of 20 GB of zeros, packed to 20 MB or only claimed, is refused by its header"
    s = after(model, [1])
    with zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_DEFLATED) as z:
        header = b"\x93NUMPY\1\0" + (118).to_bytes(2, "little") + b"{'descr': '|u1', 'fortran_order': False, 'shape': (20000000000,), }".ljust(117) + b"\n"
        z.writestr("head.npy", header + bytes(10**6))
    assert outcome(model, s, tmp_path, (tmp_path / "x").read_bytes()) == "refused"


def test_other_model_precision_and_files(model, oracle_model, saved, tmp_path):
    s, raw = saved
    (tmp_path / "s").write_bytes(raw)
    with pytest.raises(StateError, match="saved with model"): oracle_model.load_state(tmp_path / "s")
    with pytest.raises(StateError, match="is float32 .* expected float64"): load(model.checkpoint.path, engine="numpy", dtype="float64").load_state(tmp_path / "s")
    with pytest.raises(StateError, match="no such file"): model.load_state(tmp_path / "none")
    with pytest.raises(StateError): model.load_state(tmp_path)
    with pytest.raises(StateError): model.load_state(model.checkpoint.path)
    with pytest.raises(StateError, match="could not be written"): s.save(tmp_path / "no folder" / "s")
    with pytest.raises(StateError, match="not a regular file"): s.save(tmp_path)
    name = tmp_path / ("ü" * 100 + ".state")
    s.save(name)
    assert model.load_state(str(name)) == s


# --- Ctrl-C

MINE = {"state.py", "hybrid.py", "contextlib.py"}


class At:
    "Raise KeyboardInterrupt at the i-th line that runs in our files; `calls`: only in these functions (and what surrounds a `with`)"
    def __init__(self, i): self.i, self.n = i, 0
    def __enter__(self): sys.settrace(self.call)
    def __exit__(self, *e): sys.settrace(None)
    def call(self, frame, event, arg):
        code = frame.f_code
        if Path(code.co_filename).name in MINE and code.co_name in {"forward_batch", "stepping", "step", "take", "commit", "put_back", "<listcomp>"}: return self.line
    def line(self, frame, event, arg):
        last = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "finally: hold.over = True"
        if event == "line" and not last:     # CPython looks for signals after calls and before jumps back; there is neither on the way to that line
            self.n += 1
            if self.n == self.i:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def test_ctrl_c_at_every_line(model):
    "Whatever the line: all states of the batch are as before, or all have moved on; they are free, and go on to the right numbers"
    tokens = ([1, 2], [3], [4, 5, 6])
    start = [after(model, [7] * n) for n in (3, 1, 2)]
    states = [s.copy() for s in start]
    expected = model.forward_batch(list(zip(tokens, states)))
    ends = [s.copy() for s in states]
    i, interrupted, moved = 1, 0, 0
    while True:
        mine = [s.copy() for s in start]
        try:
            with At(i): model.forward_batch(list(zip(tokens, mine)))
            break
        except KeyboardInterrupt: interrupted += 1
        back, forth = [a == b for a, b in zip(mine, start)], [a == b for a, b in zip(mine, ends)]
        assert all(back) or all(forth), f"line {i}: before {back}, after {forth}"
        moved += all(forth)
        if all(back):
            for ours, theirs in zip(model.forward_batch(list(zip(tokens, mine))), expected): np.testing.assert_array_equal(ours, theirs)
        else: model.forward_batch([([1], s) for s in mine])
        i += 1
    assert interrupted > 40 and moved <= 3          # moved: only the return was left to do


def test_exceptions_at_every_tap(model):
    "A callback that raises at the n-th intermediate leaves the state and the next call alone"
    s = after(model, [1, 2, 3])
    kept, names = s.copy(), []
    with model.tapping(lambda name, layer, value: names.append(name) or None): expected = model.forward([4, 5], s.copy())
    for i in range(len(names)):
        seen = []
        def tap(name, layer, value):
            seen.append(name)
            if len(seen) == i + 1: raise RuntimeError(name)
        with pytest.raises(RuntimeError):
            with model.tapping(tap): model.forward([4, 5], s)
        assert s == kept and model.taps == ()
    np.testing.assert_array_equal(model.forward([4, 5], s), expected)


# --- snapshots

def test_snapshots_from_another_thread(model, tmp_path):
    "One thread steps, another copies and saves without asking: every snapshot is a state that was"
    n = 150
    tokens = np.random.default_rng(0).integers(0, 40, n).tolist()
    s, were, seen, done = model.new_state(n), [], [], threading.Event()
    def look():
        while not done.is_set() or not seen:
            try: seen.append(s.copy())
            except StateError: pass
            if len(seen) % 10 == 1: s.save(tmp_path / "s"); seen.append(model.load_state(tmp_path / "s"))
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for t in tokens: model.forward([t], s)
    finally: done.set(); thread.join()
    again, due = model.new_state(n), {x.n_past: x for x in seen}
    assert len({x.n_past for x in seen}) > 3
    for i in range(n + 1):
        if i in due: assert due[i] == again, i
        if i < n: model.forward([tokens[i]], again)


@pytest.mark.parametrize("settings", [dict(), dict(temperature=1., seed=5)], ids=["greedy", "seed 5"])
def test_snapshots_while_generating(settings, oracle_model, demo, tmp_path):
    "A copy and a saved state, taken in the middle of a sentence, go on as the sentence did"
    m, snaps = load(demo, engine="numpy"), {}
    def keep(token, g):
        n = len(g.tokens)
        if n in (1, 5, 12): snaps[n] = g.state.copy()
        if n == 8: g.state.save(tmp_path / "s"); snaps[n] = m.load_state(tmp_path / "s")
    g = m.generate("Once upon a time", max_tokens=20, on_token=keep, ignore_eos=True, **settings).run()
    assert sorted(snaps) == [1, 5, 8, 12]
    for n, s in snaps.items():
        before = s.n_past
        rest = m.generate(g.ids[before:g.n_prompt + n], max_tokens=20 - n, state=s, ignore_eos=True, **settings).run()
        assert rest.tokens == g.tokens[n:], n


# --- threads, forks, vanishing files

def test_one_state_two_threads(model):
    "Two threads on one state: one of them gets a clear error, or they take turns; no token is lost or counted twice"
    s, said, done = model.new_state(4000), [], []
    def go():
        for _ in range(100):
            try: model.forward([3], s); done.append(1)
            except StateError as e: said.append(str(e))
    threads = [threading.Thread(target=go) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert s.n_past == len(done) == len(s.tokens) and all("give each thread a state of its own" in x for x in said)
    again = model.new_state(4000)
    for _ in range(s.n_past): model.forward([3], again)
    assert again == s


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("engine", ENGINES)
def test_fork(engine, data):
    "A child that was forked in the middle of a run goes on to the same bits as its parent"
    script("fork_model.py", data / "moe-r3.gguf", engine)


def test_a_file_that_shrinks(tmp_path):
    "Cut or written over while mapped: an error at the next step, not a signal; the state stays, and the file may come back"
    path = write(tiny(), tmp_path / "m.gguf")
    whole = path.read_bytes()
    m = load(path, engine="numpy")
    s = after(m, [1, 2])
    kept = s.copy()
    os.truncate(path, 5000)
    for call in (lambda: m.forward([3], s), lambda: m.forward_batch([([3], s)])):
        with pytest.raises(FileFormatError, match="m.gguf: has become shorter"): call()
    assert s == kept
    path.write_bytes(whole)                                            # as long as before, but is it the same?
    with pytest.raises(FileFormatError, match="m.gguf: was written over"): m.forward([3], s)
    assert s == kept
    with pytest.raises(FileFormatError): m.checkpoint.verify_unchanged()
    s.save(tmp_path / "s")
    again = load(path, engine="numpy")
    assert again.load_state(tmp_path / "s") == s


def test_a_file_that_is_replaced_or_removed(tmp_path):
    "What is mapped is the old file, so the model goes on; the next `load` sees the new one, and a state of the old is refused there"
    path = write(tiny(), tmp_path / "m.gguf")
    m = load(path, engine="numpy")
    s, expected = after(m, [1, 2]), m.forward([3], after(m, [1, 2]))
    s.save(tmp_path / "s")
    write(tiny(seed=1), tmp_path / "new.gguf"); os.replace(tmp_path / "new.gguf", path)
    np.testing.assert_array_equal(m.forward([3], s.copy()), expected)
    with pytest.raises(StateError, match="saved with model"): load(path, engine="numpy").load_state(tmp_path / "s")
    path.unlink()
    np.testing.assert_array_equal(m.forward([3], s), expected)
    assert m.load_state(tmp_path / "s").n_past == 2


# --- memory is planned

def test_a_state_that_does_not_fit(model, monkeypatch):
    monkeypatch.setattr(state_module, "available_memory", lambda: 2**20)
    with pytest.raises(PlanError, match="a state of n_ctx 1000000 needs 122 MiB, and 1 MiB of memory are available"): model.new_state(1_000_000)
    s = model.new_state(100)
    with pytest.raises(PlanError): s.copy(n_ctx=1_000_000)


def test_full_context(model):
    s = after(model, [1] * 6, n_ctx=8)
    kept = s.copy()
    with pytest.raises(ContextFullError, match="3 more tokens do not fit: 6 of n_ctx 8"): model.forward([1, 2, 3], s)
    assert s == kept
    wide = s.copy(n_ctx=100)
    np.testing.assert_array_equal(model.forward([1, 2], s), model.forward([1, 2], wide)[:2])
    model.forward([3], wide)
    with pytest.raises(InputError): wide.copy(n_ctx=8)

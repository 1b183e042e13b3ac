"The command line as a shell sees it: exit codes, one line of complaint, clean output, Ctrl-C, closed pipes, a terminal"
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
from qwen35_lit.cli import COMMANDS, main
from qwen35_lit.config import Qwen35Error

COMMAND = [sys.executable, "-c", "import sys; from qwen35_lit.cli import main; sys.exit(main())"]
QUESTION = "Mia has a red ball. Tom has a blue kite. What colour is Tom's kite?"
STORY = "<|im_start|>user\nTell me a story about Leo and a green drum.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def shell(*argv, stdin=b"", env=None, **kw):
    done = subprocess.run([*COMMAND, *map(str, argv)], input=stdin, capture_output=True, env={**os.environ, **(env or {})}, timeout=120, **kw)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def refused(code, err, code_wanted=1):
    "One line, no traceback"
    lines = [l for l in err.splitlines() if not l.startswith("no model file given")]
    assert code == code_wanted and len(lines) == 1 and lines[0].startswith("qwen35-lit: ") and "Traceback" not in err, err
    return lines[0]


@pytest.fixture
def run(capsys, monkeypatch):
    "`main` in this process: quicker, and coverage sees it"
    def f(*argv, stdin=""):
        import io
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(argv)
        return code, *capsys.readouterr()
    return f


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_answer(engine):
    code, out, err = shell("generate", "--chat", "--engine", engine, QUESTION)
    assert (code, out) == (0, "Tom's kite is blue.\n") and "demo model" in err


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *([c, "--help"] for c in ("generate", "chat", "info"))])
def test_help(run, argv):
    code, out, err = run(*argv)
    assert code == 0 and out and not err


def test_help_names_what_exists(run):
    listed = re.findall(r"^    (\w+)  ", run("--help")[1], re.M)
    assert listed == list(COMMANDS)
    for name in listed: assert run(name, "--help")[0] == 0


@pytest.mark.parametrize("argv", [[], ["fly"], ["generate", "--temperature", "hot", "x"], ["generate", "--tempera", "1", "x"], ["info", "--check=yes"], ["generate", "-f", "a", "b"], ["generate", "--engine", "steam", "x"]])
def test_usage(run, argv):
    code, out, err = run(*argv)
    assert code == 2 and not out and "Traceback" not in err


@pytest.mark.parametrize("argv,said", [
    (["generate", ""], "the prompt is empty"),
    (["generate", "--top-p", "7", "x"], "--top-p: found 7.0, expected a number from 0 to 1"),
    (["generate", "--temperature", "-1", "x"], "--temperature: found -1.0"),
    (["generate", "--seed", "-1", "x"], "--seed: found -1"),
    (["generate", "-n", "-5", "x"], "--max-tokens: found -5"),
    (["generate", "--n-ctx", "2", "one two three four"], "expected at most n_ctx = 2"),
    (["generate", "--stop", "", "x"], "--stop: found ''"),
    (["generate", "-f", "no-such-file", "x.txt"][:3], "no-such-file"),
    (["generate", "-m", "no-such.gguf", "x"], "no-such.gguf"),
    (["generate", "--system", "Be brief.", "x"], "--system goes with --chat"),
    (["chat", "-m", "no-such.gguf"], "no-such.gguf"),
    (["chat", "--load", "no-such.json"], "no-such.json"),
    (["info", "no-such.gguf"], "no-such.gguf"),
    (["info", "."], "."),
    (["info", "--n-ctx", "0"], "--n-ctx: found 0"),
    (["generate", "--chat", "--n-ctx", "0", "x"], "--n-ctx: found 0"),
    (["chat", "--n-ctx", "0"], "--n-ctx: found 0"),
    (["generate", "--think", "x"], "--think goes with --chat"),
    (["generate", "--logprobs", "2", "x"], "--logprobs goes with --json"),
    (["generate", "--threads", "10000", "x"], "--threads: found 10000, expected 1 to"),
    (["generate", "--threads", "0", "--engine", "numpy", "x"], "--threads: found 0"),
    (["generate", "-m", "", "x"], "no model file: its name is empty"),
    (["info", ""], "no model file: its name is empty")])
def test_input_errors(run, argv, said):
    code, out, err = run(*argv)
    assert said in refused(code, err) and not out


@pytest.mark.parametrize("n", [0, 3, 100, 3000, 2_000_000])
@pytest.mark.parametrize("command", [["info"], ["generate", "x", "-m"]])
def test_cut_files(run, demo, tmp_path, n, command):
    (tmp_path / "cut.gguf").write_bytes(demo.read_bytes()[:n])
    code, out, err = run(*command, tmp_path / "cut.gguf")
    assert "cut.gguf" in refused(code, err) and not out


def test_prompts_from_elsewhere(run, tmp_path):
    (tmp_path / "p.txt").write_text(STORY)
    by_file = run("generate", "-n", 12, "-f", tmp_path / "p.txt")
    assert by_file[0] == 0 and by_file[1].strip()
    assert run("generate", "-n", 12, stdin=STORY)[1] == run("generate", "-n", 12, "-", stdin=STORY)[1] == by_file[1]
    assert "stopped after 12 tokens" in by_file[2]
    (tmp_path / "p.txt").write_bytes(b"ab\xff")
    assert "byte 2 is not UTF-8" in refused(*run("generate", "-f", tmp_path / "p.txt")[::2])
    code, out, err = shell("generate", stdin=b"ab\xff")
    assert "standard input: byte 2 is not UTF-8" in refused(code, err)
    code, out, err = shell("generate", b"ab\xff".decode("utf-8", "surrogateescape"))
    assert "surrogate" in refused(code, err)


def test_json(run):
    code, out, err = run("generate", "--chat", "--think", "--json", "--logprobs", 2, "--seed", 5, QUESTION)
    d = json.loads(out)
    assert code == 0 and d["answer"] == "Tom's kite is blue." and d["stop_reason"] == "eos" and d["seed"] == 5
    assert d["thought"] and d["text"].startswith(d["thought"])
    assert len(d["logprobs"]) == len(d["tokens"]) and len(d["logprobs"][0]["top"]) == 2
    assert run("generate", "--json", "-n", 5, "--n-ctx", 1000, STORY)[1] != ""


def test_stop_and_context(run):
    assert run("generate", "--chat", "--stop", "e is b", QUESTION)[1] == "Tom's kit\n"
    code, out, err = run("generate", "--n-ctx", 48, STORY)
    assert code == 0 and "the context of 48 tokens is full" in err


def test_the_same_seed(run):
    texts = [run("generate", "--temperature", 1, "--seed", s, "-n", 20, STORY)[1] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_closed_pipe():
    p = subprocess.Popen([*COMMAND, "generate", "-n", "300", "--temperature", "1", STORY], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.read(3)
    p.stdout.close()
    err = p.stderr.read().decode()
    assert p.wait(60) == 0 and "Traceback" not in err and "Broken" not in err


def test_ctrl_c_keeps_the_text():
    p = subprocess.Popen([*COMMAND, "generate", "-n", "3000", "--n-ctx", "4000", "--temperature", "3", STORY], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = os.read(p.stdout.fileno(), 100)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and first and (first + out).endswith(b"\n") and err.decode().splitlines()[-1] == "interrupted"


def test_output_is_utf8_whatever_the_terminal(demo, tmp_path):
    file = tmp_path / "модель 🙂.gguf"
    shutil.copy(demo, file)
    code, out, err = shell("info", file, env=dict(PYTHONIOENCODING="ascii", LC_ALL="C"))
    assert code == 0 and "модель 🙂.gguf" in out
    code, out, err = shell("info", tmp_path / "нет.gguf", env=dict(PYTHONIOENCODING="ascii", LC_ALL="C"))
    refused(code, err)


@pytest.mark.parametrize("name", ["moe-r3", "dense-r1", "moe-k-Q4_K_M"])
def test_info(run, data, name):
    code, out, err = run("info", "--check", data / f"{name}.gguf")
    assert (code, err) == (0, "") and name in out and "all weights are sound" in out
    d = json.loads(run("info", "--json", "-m", data / f"{name}.gguf")[1])
    assert sum(g["bytes"] for g in d["types"].values()) == sum(g["bytes"] for g in d["layers"].values()) == d["bytes"]
    assert [int(i) for i in d["layers"] if i != "ends"] == list(range(d["config"]["n_layer"]))


def test_check_finds_nan(run, data, tmp_path):
    from qwen35_lit.checkpoint import open_checkpoint
    raw = bytearray((data / "moe-r3.gguf").read_bytes())
    t = open_checkpoint(data / "moe-r3.gguf").tensors["blk.3.attn_norm.weight"]
    raw[t.start:t.start + 4] = b"\x00\x00\xc0\x7f"
    (tmp_path / "nan.gguf").write_bytes(raw)
    code, out, err = run("info", "--check", tmp_path / "nan.gguf")
    assert "blk.3.attn_norm.weight" in out and "NaN" in out and "1 tensors are not sound" in refused(code, err)
    code, out, err = run("info", "--check", "--json", tmp_path / "nan.gguf")
    assert code == 1 and len(json.loads(out)["problems"]) == 1


def test_chat_script(run):
    lines = "\nMia has a red ball.\n/think off\nNow Mia's ball is green.\nWhat colour is Mia's ball?\n/help\n/reset\nWhat colour is Mia's ball?\n"
    code, out, err = run("chat", "--no-think", stdin=lines)
    assert (code, out) == (0, "I will remember that.\nI will remember that.\nMia's ball is green.\nI do not know.\n")
    assert "Thinking is off." in err and "/save" in err and "A new conversation." in err
    code, out, err = run("chat", "--no-think", stdin="/fly\nWho are you?\n")
    assert "/fly: no such command" in refused(code, err) and not out


def test_chat_thinks(run):
    code, out, err = run("chat", stdin=QUESTION + "\n")
    thought, answer = out.removeprefix("<think>\n").split("\n</think>\n\n")
    assert out.startswith("<think>\n") and thought.strip() and answer == "Tom's kite is blue.\n" and "\x1b" not in out


def test_chat_is_put_aside_and_taken_up(run, tmp_path):
    file = tmp_path / "talk.json"
    assert run("chat", "--no-think", stdin=f"{QUESTION}\n/save {file}\n")[0] == 0
    assert json.loads(file.read_text()) == [dict(role="user", content=QUESTION), dict(role="assistant", content="Tom's kite is blue.")]
    assert run("chat", "--no-think", "--load", file, stdin="What colour is Mia's ball?\n")[1] == "Mia's ball is red.\n"
    for bad in ("{", '"hi"', '[{"role": "king", "content": "x"}]', "[1]", '[{"content": "a"}]', '[{"role": "user"}]', '[{"role": "user", "content": 5}]', "{}", "[" * 100_000, "[" * 900 + "]" * 900):
        file.write_text(bad)
        for typed in ("hi\n", ""):
            code, out, err = run("chat", "--load", file, stdin=typed)
            assert f"{file}: " in refused(code, err) and not out
    file.write_text("[]")
    assert run("chat", "--no-think", "--load", file, stdin="")[0] == 0
    code, out, err = run("chat", stdin=f"/save {tmp_path}/none/x\n")
    assert refused(code, err) == f"qwen35-lit: /save {tmp_path}/none/x: No such file or directory"


def test_chat_commands_and_lines_that_are_wrong(run):
    code, out, err = run("chat", "--no-think", stdin="/think maybe\n")
    assert refused(code, err) == "qwen35-lit: /think maybe: expected on or off"
    assert run("chat", "--no-think", stdin="/think\n/think\n/think on\n")[2].count("Thinking is on.") == 2
    code, out, err = shell("chat", stdin=b"  h\xffi\n")
    assert refused(code, err) == "qwen35-lit: character 3 of the line is not UTF-8"


def test_chat_leaves_when_nobody_reads():
    done = subprocess.run(["bash", "-c", '"$@" chat --no-think | head -1; echo ${PIPESTATUS[0]}', "-", *COMMAND], input=b"Who are you?\n" * 20, capture_output=True, timeout=120)
    assert done.stdout.decode().splitlines()[1:] == ["0"] and b"Broken" not in done.stderr and b"Traceback" not in done.stderr


def test_ctrl_c_ends_a_chat_in_a_pipe():
    "Lines that do not come from a person end with the first Ctrl-C"
    p = subprocess.Popen([*COMMAND, "chat", "--no-think", "--temperature", "3", "--n-ctx", "4000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdin.write(b"Tell me a story about Leo and a green drum.\n" * 9); p.stdin.flush()
    assert os.read(p.stdout.fileno(), 10)
    p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130
    err = p.stderr.read().decode()
    p.stdin.close(); p.stdout.close(); p.stderr.close()
    assert err.splitlines()[-1] == "interrupted" and err.count("interrupted") == 1


@pytest.mark.parametrize("argv0,said", [("bin/qwen35-lit", True), ("qwen35-lit.exe", True), ("other.py", False)])
def test_ctrl_c_while_importing(argv0, said):
    code = f"""import sys
sys.argv[0] = {argv0!r}
class Busy:
    def find_spec(self, name, *_):
        if name == "qwen35_lit.plan": raise KeyboardInterrupt
sys.meta_path.insert(0, Busy())
import qwen35_lit.cli"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode in (-signal.SIGINT, 130)
    assert (done.stderr == "interrupted\n") == said == ("Traceback" not in done.stderr)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs a shell")
@pytest.mark.parametrize("line,code,out,err", [
    ("info --json >&-", 1, "", "qwen35-lit: standard output is closed"),
    ("generate Once -n 3 >&-", 1, "", "qwen35-lit: standard output is closed"),
    ("generate <&-", 1, "", "qwen35-lit: the prompt is empty"),
    ("generate Once -n 3 <&-", 0, "\n", "demo model"),
    ("generate Once -n 3 2>&-", 0, "\n", ""),
    ("generate Once -n -3 2>&-", 1, "", ""),
    ("chat <&-", 0, "", ""),
    ("chat >&- 2>&- <&-", 1, "", "")])
def test_closed_streams(line, code, out, err):
    done = subprocess.run(["bash", "-c", f'"$@" {line}', "-", *COMMAND], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and done.stdout.endswith(out) and bool(done.stdout) == bool(out)
    assert err in done.stderr and "Traceback" not in done.stderr and "Error" not in done.stderr


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "qwen35_lit", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("qwen35-lit ")


def test_hints(run):
    err = run("generate", "-n", 1, "--seed", 3, "--n-ctx", 3000, "x")[2]
    assert "--seed has no effect at temperature 0" in err and "--n-ctx 3000 is more than the 2048 tokens" in err
    assert "note" not in run("generate", "-n", 1, "--seed", 3, "--temperature", 1, "x")[2]
    assert run("generate", "--help")[1].count("(default: ") >= 10


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_chat_at_a_terminal():
    "Ctrl-C stops an answer and not the program, mistakes are told and not fatal, Ctrl-D leaves"
    ours, theirs = os.openpty()
    p = subprocess.Popen([*COMMAND, "chat", "--no-think", "--n-ctx", "2000", "--engine", "numpy"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0))
    os.close(theirs)
    seen = ""
    def read(seconds):
        "What comes within so many seconds of silence"
        nonlocal seen
        while select.select([ours], [], [], seconds)[0]: seen += os.read(ours, 4096).decode("utf-8", "replace")
    def until(done, typed=""):
        "Type, and wait for an answer and the next prompt; a Ctrl-C between the prompt and the wait for a key goes unnoticed, so a person presses it again"
        start, end = len(seen), time.monotonic() + 120
        while not (done in seen[start:] and seen.endswith("> ")):
            assert time.monotonic() < end, seen
            if typed: os.write(ours, typed.encode())
            if typed != "\x03": typed = ""
            read(.5 if typed != "\x03" else 3)
    try:
        until("> ")
        for typed, answer in [("/fly\n", "/fly: no such command"), ("\x03", "(Ctrl-D leaves)"), (QUESTION + "\n", "Tom's kite is blue."), ("/help\n", "Ctrl-D the conversation")]: until(answer, typed)
        os.write(ours, b"\x04")
        try:
            while os.read(ours, 4096): pass                     # a terminal that nobody reads would block the program
        except OSError: pass                                    # Linux: the other end is closed
        assert p.wait(30) == 0
    finally:
        p.kill()
        os.close(ours)


def test_a_mistake_of_ours_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setitem(COMMANDS, "oops", ("fails", lambda p: lambda args: 1 / 0))
    with pytest.raises(ZeroDivisionError): run("oops")


@pytest.mark.parametrize("error,code,said", [(Qwen35Error("two\nlines"), 1, "qwen35-lit: two lines"), (MemoryError(), 1, "out of memory"), (KeyboardInterrupt(), 130, "interrupted"),
    (FileNotFoundError(2, "No such file", "x.txt"), 1, "x.txt: No such file"), (SystemExit(2), 2, "")])
def test_every_way_out(run, monkeypatch, error, code, said):
    def fails(args): raise error
    monkeypatch.setitem(COMMANDS, "fails", ("fails", lambda p: fails))
    got, out, err = run("fails")
    assert (got, out) == (code, "") and said in err

"What other programs and broken disks make of a model file: it loads and is the same model, or there is one clear line"
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf_tools as tools
from gguf_tools import SAME, add, drop, patch, put, put_other, rename, retype, tiny, walk, write
from qwen35_lit.checkpoint import open_checkpoint, read_part
from qwen35_lit.config import (ConfigError, FileFormatError, InputError, MissingTensorError, Qwen35Error, ShapeError, UnsupportedModelError,
    config_from_meta, example_meta)

ROOT = Path(__file__).parent.parent
SMALL = dict(n_layer=2, n_embd=16, n_vocab=24, ff=8, S=4)


@pytest.fixture(scope="module")
def plain(): return tiny()


@pytest.fixture(scope="module")
def plain_checkpoint(plain, tmp_path_factory): return open_checkpoint(write(plain, tmp_path_factory.mktemp("plain") / "plain.gguf"))


def shape_of(c): return replace(c, name="", notes=(), n_mtp=0)


def assert_same_model(ck, other):
    "The same numbers, and the same bytes in every tensor of the trunk: whatever is computed from them is the same"
    assert shape_of(ck.config) == shape_of(other.config)
    assert {n for n in ck.tensors if ".nextn." not in n and not n.startswith(f"blk.{ck.config.n_layer}.")} == set(other.tensors)
    for n, t in other.tensors.items():
        assert (ck.tensors[n].shape, ck.tensors[n].type) == (t.shape, t.type), n
        np.testing.assert_array_equal(ck.tensors[n].raw, t.raw, n)


def one_line(error, *words):
    "The text of an error, which is a line and holds these words"
    text = str(error.value)
    assert "\n" not in text and len(text) < 3000
    for word in words: assert word in text, text
    return text


def fails(kind, call, *words):
    with pytest.raises(kind) as error: call()
    assert isinstance(error.value, Qwen35Error)
    return one_line(error, *words)


# --- 1 to 10: loads, and is the same model

@pytest.mark.parametrize("name", SAME)
def test_same_model(name, plain, plain_checkpoint, tmp_path):
    assert_same_model(open_checkpoint(write(SAME[name](plain), tmp_path / "m.gguf")), plain_checkpoint)


@pytest.mark.parametrize("name", SAME)
def test_same_oracle(name, data, tmp_path):
    "The same with a file that llama.cpp's converter wrote"
    path = data / "moe-r3.gguf"
    assert_same_model(open_checkpoint(write(SAME[name](tools.read_model(path)), tmp_path / "m.gguf")), open_checkpoint(path))


def test_notes_say_what_was_odd(plain, tmp_path):
    note = lambda m: " ".join(open_checkpoint(write(m, tmp_path / "m.gguf")).notes)
    assert note(plain) == "" == note(tools.with_mtp(plain)) == note(tools.ollama(plain))
    assert "the MTP block was removed" in note(tools.stripped_mtp(plain))
    assert "blk.4 has nextn tensors" in note(tools.with_mtp(plain, key=None))
    assert "every fourth layer is taken for attention" in note(tools.no_interval(plain))
    assert "overrides" in note(tools.overridden(plain))


def test_mtp_is_kept_if_complete(plain, tmp_path):
    m = tools.with_mtp(plain)
    ck = open_checkpoint(write(m, tmp_path / "m.gguf"))
    assert ck.config.n_mtp == 1 and ck.config.n_layer == 4 and "blk.4.nextn.eh_proj.weight" in ck.tensors and not ck.ignored
    for lost in ("blk.4.attn_q.weight", "blk.4.nextn.enorm.weight"):
        ck = open_checkpoint(write(drop(m, lost), tmp_path / "m.gguf"))
        assert ck.config.n_mtp == 0 and len(ck.ignored) == 18 and lost in ck.notes[0]
    ck = open_checkpoint(write(retype(m, "blk.4.attn_q.weight", Q.I8, np.zeros((64, 32), np.uint8)), tmp_path / "m.gguf"))
    assert ck.config.n_mtp == 0


def test_kinds_from_head_counts(plain, plain_checkpoint, tmp_path):
    assert_same_model(open_checkpoint(write(tools.only_kv_list(plain), tmp_path / "m.gguf")), plain_checkpoint)


def test_recurrent_layers_win(tmp_path):
    "attention at 0 and 3, which no interval gives"
    m = tiny()
    swap = lambda n: n.replace("blk.3.", "blk.9.").replace("blk.0.", "blk.3.").replace("blk.9.", "blk.0.")
    m.tensors = {swap(n): t for n, t in m.tensors.items()}
    ck = open_checkpoint(write(put(m, attention__recurrent_layers=[False, True, True, True]), tmp_path / "m.gguf"))
    assert ck.config.layer_kinds == ("attention", "delta", "delta", "delta") and ck.config.kind_index == (0, 0, 1, 2)
    fails(MissingTensorError, lambda: open_checkpoint(write(m, tmp_path / "m.gguf")), "blk.0.attn_qkv.weight")


def test_tied(plain, tmp_path):
    once, twice = (open_checkpoint(write(f(plain), tmp_path / f"{f.__name__}.gguf")) for f in (tools.untied, tools.tied))
    assert once.tied and not twice.tied and once.n_bytes == twice.n_bytes - once.tensors["token_embd.weight"].n_bytes
    np.testing.assert_array_equal(once.tensors["output.weight"].raw, twice.tensors["output.weight"].raw)


@pytest.mark.parametrize("parts", [1, 7, 30])
def test_split(parts, plain, plain_checkpoint, tmp_path):
    write(plain, tmp_path / "m.gguf", parts=parts)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == -(-len(plain.tensors) // parts)
    for file in (files[0], files[len(files) // 2], files[-1]):
        ck = open_checkpoint(file)
        assert_same_model(ck, plain_checkpoint)
        assert [p.path for p in ck.parts] == files and ck.identity == open_checkpoint(files[0]).identity


def test_bad_splits(plain, tmp_path):
    a, b, c = (tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    again = lambda: write(plain, tmp_path / "m.gguf", parts=30)
    again(); b.unlink()
    fails(FileFormatError, lambda: open_checkpoint(a), a.name, "1 of 3 parts are missing", b.name)
    again(); c.write_bytes(b.read_bytes())
    fails(FileFormatError, lambda: open_checkpoint(a), c.name, "split.no is 1, expected 2")
    again(); a.write_bytes(b.read_bytes())
    fails(FileFormatError, lambda: open_checkpoint(c), a.name, "split.no is 1, expected 0")
    again(); (tmp_path / "other.gguf").write_bytes(b.read_bytes())
    fails(FileFormatError, lambda: open_checkpoint(tmp_path / "other.gguf"), "other.gguf", "one of 3 parts")
    write(add(plain, {"more.weight": np.ones(8)}), tmp_path / "n.gguf", parts=30); again(); b.write_bytes((tmp_path / "n-00002-of-00003.gguf").read_bytes())
    fails(FileFormatError, lambda: open_checkpoint(a), b.name, "split.tensors.count is 77, expected 76", "another model")
    shuffled = plain.copy(); shuffled.tensors = dict(reversed(shuffled.tensors.items()))
    write(shuffled, tmp_path / "n.gguf", parts=30); again(); b.write_bytes((tmp_path / "n-00001-of-00003.gguf").read_bytes())
    fails(FileFormatError, lambda: open_checkpoint(a), b.name, "split.no is 0, expected 1")
    again(); c.write_bytes((tmp_path / "n-00003-of-00003.gguf").read_bytes())
    fails(FileFormatError, lambda: open_checkpoint(a), "is in", a.name)
    again(); c.write_bytes(c.read_bytes()[:-100])
    fails(FileFormatError, lambda: open_checkpoint(a), c.name, "cut off")


@pytest.mark.parametrize("options", [dict(alignment=64), dict(alignment=8), dict(alignment=4096), dict(version=2)], ids=str)
def test_layouts(options, plain, plain_checkpoint, tmp_path):
    ck = open_checkpoint(write(plain, tmp_path / "m.gguf", **options))
    assert_same_model(ck, plain_checkpoint)
    assert (ck.parts[0].version, ck.parts[0].alignment) == (options.get("version", 3), options.get("alignment", 32))


def test_extras_are_listed(plain, tmp_path):
    ck = open_checkpoint(write(add(tools.bundled(plain), {"blk.0.attn_q.bias": np.ones(4)}), tmp_path / "m.gguf"))
    assert ck.ignored == ["blk.0.attn_q.bias", "mm.0.weight", "mtp.fc.weight", "v.blk.0.attn_q.weight", "v.patch_embd.weight"]
    assert ck.notes == ["1 tensors inside the layers are not known here and ignored: blk.0.attn_q.bias"]


def test_unicode_and_long_paths(plain, plain_checkpoint, tmp_path):
    folder = tmp_path / "模型 ünïcode 🦊" / Path(*["x" * 200] * 10)
    folder.mkdir(parents=True)
    path = write(plain, folder / f"naïve {'y' * 200}.gguf")
    assert len(str(path)) > 2000
    assert_same_model(open_checkpoint(str(path)), plain_checkpoint)
    fails(FileFormatError, lambda: open_checkpoint(folder / ("z" * 300)), "File name too long")
    fails(FileFormatError, lambda: open_checkpoint("a\0b"), "expected a GGUF file")


def test_home_and_relative_paths(plain, tmp_path, monkeypatch):
    write(plain, tmp_path / "m.gguf", parts=30)
    monkeypatch.setenv("HOME", str(tmp_path)); monkeypatch.chdir(tmp_path)
    for path in ("~/m-00002-of-00003.gguf", "m-00003-of-00003.gguf", b"m-00001-of-00003.gguf".decode()): open_checkpoint(path)


def test_read_only_folder(plain, tmp_path):
    path = write(plain, tmp_path / "m.gguf")
    path.chmod(0o444); tmp_path.chmod(0o555)
    try: open_checkpoint(path)
    finally: tmp_path.chmod(0o755)


def test_replaced_while_mapped(plain, tmp_path):
    path = write(plain, tmp_path / "m.gguf")
    ck = open_checkpoint(path)
    before = {n: t.raw.copy() for n, t in ck.tensors.items()}
    write(tiny(seed=1), tmp_path / "new.gguf"); os.replace(tmp_path / "new.gguf", path)
    fails(FileFormatError, ck.verify_unchanged, "m.gguf", "has changed")
    for n, x in before.items(): np.testing.assert_array_equal(ck.tensors[n].raw, x)   # the old file is still what is mapped
    assert open_checkpoint(path).identity != ck.identity


def test_cut_while_mapped(plain, tmp_path):
    path = write(plain, tmp_path / "m.gguf")
    ck = open_checkpoint(path)
    os.truncate(path, 100)
    fails(FileFormatError, ck.verify_unchanged, "has changed")
    fails(FileFormatError, lambda: ck.tensors["output.weight"].raw, "has become shorter")
    fails(FileFormatError, lambda: list(ck.meta["tokenizer.ggml.tokens"]), "has become shorter")
    fails(FileFormatError, lambda: ck.meta["tokenizer.ggml.tokens"][0], "has become shorter")
    fails(FileFormatError, lambda: ck.identity, "has become shorter")
    path.unlink()
    fails(FileFormatError, ck.verify_unchanged, "m.gguf", "No such file")


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.IQ4_NL, Q.F16, Q.BF16], ids=lambda k: k.name)
def test_types_of_narrow_rows(kind, plain, tmp_path):
    name, shape = "blk.0.attn_qkv.weight", plain.tensors["blk.0.attn_qkv.weight"][0].shape
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // weights * size), dtype=np.uint8)
    ck = open_checkpoint(write(retype(plain, name, kind, raw), tmp_path / "m.gguf"))
    assert ck.tensors[name].type == kind
    np.testing.assert_array_equal(ck.tensors[name].raw, raw)


def test_expert_weights_scale(plain, tmp_path):
    scale = lambda x: open_checkpoint(write(put(plain, expert_weights_scale=x), tmp_path / "m.gguf")).config.expert_weights_scale
    assert [scale(x) for x in (2.5, 1., 0.)] == [2.5, 1., 1.]


# --- 11 and 12: another model, or numbers and tensors that do not fit

@pytest.mark.parametrize("arch", ["llama", "clip", "qwen3next", "foo", "qwen2", "QWEN35"])
def test_other_architectures(arch, plain, tmp_path):
    m = put_other(plain, {"general.architecture": arch})
    words = {"clip": "vision part", "qwen3next": "Qwen3-Next"}.get(arch, "")
    fails(UnsupportedModelError, lambda: open_checkpoint(write(m, tmp_path / "m.gguf")), "m.gguf", repr(arch), "qwen35 and qwen35moe", words)


def test_no_architecture(plain, tmp_path):
    path = write(plain, tmp_path / "m.gguf")
    patch(path, walk(path.read_bytes())[0]["general.architecture"][0] + 8, b"x")
    fails(UnsupportedModelError, lambda: open_checkpoint(path), "m.gguf: general.architecture is missing")


@pytest.mark.parametrize("kind, words", [("mmproj", "vision part"), ("adapter", "adapter"), ("imatrix", "statistics")])
def test_other_kinds_of_file(kind, words, plain, tmp_path):
    fails(UnsupportedModelError, lambda: open_checkpoint(write(put_other(plain, {"general.type": kind}), tmp_path / "m.gguf")), words)


def test_missing_tensors(plain, tmp_path):
    load = lambda m: open_checkpoint(write(m, tmp_path / "m.gguf"))
    fails(MissingTensorError, lambda: load(drop(plain, "blk.2.ssm_a", "output_norm.weight")), "m.gguf", "2 of 76", "blk.2.ssm_a", "output_norm.weight")
    text = fails(MissingTensorError, lambda: load(drop(plain, "blk.1.", "blk.2.")), "38 of 76", "blk.1.attn_norm.weight", "and 18 more")
    assert text.count("blk.") == 20
    fails(MissingTensorError, lambda: load(drop(plain, *plain.tensors)), "76 of 76")
    fails(MissingTensorError, lambda: load(drop(plain, "token_embd.weight")), "token_embd.weight")
    half = rename(tools.fused(plain), "blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_gate_up.weight")
    fails(MissingTensorError, lambda: load(half), "blk.0.ffn_gate_exps.weight, blk.0.ffn_up_exps.weight")


def test_wrong_shapes(plain, tmp_path):
    load = lambda name, x: open_checkpoint(write(add(plain, {name: x}), tmp_path / "m.gguf"))
    fails(ShapeError, lambda: load("blk.0.ssm_a", np.ones(5)), "m.gguf", "blk.0.ssm_a is [5], expected [4]")
    fails(ShapeError, lambda: load("blk.3.attn_q.weight", np.ones((32, 64))), "blk.3.attn_q.weight is [32, 64], expected [64, 32]")
    fails(ShapeError, lambda: load("blk.3.ffn_gate_inp_shexp.weight", np.ones((32, 1))), "is [32, 1], expected [1, 32]")
    fails(ShapeError, lambda: load("token_embd.weight", np.ones((40, 31))), "token_embd.weight is [40, 31], expected [40, 32]")
    fails(ShapeError, lambda: load("output.weight", np.ones((41, 32))), "output.weight is [41, 32], expected [40, 32]")


def test_types_that_cannot_be_read(plain, tmp_path):
    path = write(plain, tmp_path / "m.gguf")
    _, infos, _ = walk(path.read_bytes())
    patch(path, infos["blk.0.ssm_a"][3], struct.pack("<I", 99))
    fails(UnsupportedModelError, lambda: open_checkpoint(path), "m.gguf", "blk.0.ssm_a is of type 99")
    patch(path, infos["blk.0.ssm_a"][3], struct.pack("<I", Q.I32))
    fails(UnsupportedModelError, lambda: open_checkpoint(path), "blk.0.ssm_a is of type 26 (I32)")
    path = write(tools.bundled(plain), tmp_path / "m.gguf")
    patch(path, walk(path.read_bytes())[1]["mm.0.weight"][3], struct.pack("<I", 99))
    assert "mm.0.weight" in open_checkpoint(path).ignored       # who does not need it does not mind


CONTRADICTIONS = {
    "value heads": (dict(ssm__time_step_rank=5), "ssm.time_step_rank is 5, expected a multiple of qwen35moe.ssm.group_count 2"),
    "inner size": (dict(ssm__inner_size=31), "ssm.inner_size is 31, expected 32"),
    "experts used": (dict(expert_used_count=5), "expert_used_count is 5, expected a whole number from 1 to 4"),
    "no experts used": (dict(expert_used_count=0), "expert_used_count is 0"),
    "no experts": (dict(expert_count=0), "expert_count is 0"),
    "interval": (dict(full_attention_interval=0), "full_attention_interval is 0"),
    "heads": (dict(attention__head_count_kv=3), "head_count is 4, expected a multiple of qwen35moe.attention.head_count_kv 3"),
    "no heads": (dict(attention__head_count_kv=0), "head_count_kv is 0"),
    "heads differ": (dict(attention__head_count_kv=[0, 0, 0, 0]), "expected one and the same count"),
    "sections": (dict(rope__dimension_sections=[3, 1, 1, 0]), "a sum of at most 4"),
    "two sections": (dict(rope__dimension_sections=[2, 1]), "at least 3"),
    "rope": (dict(rope__dimension_count=10), "rope.dimension_count is 10, expected an even number up to qwen35moe.attention.key_length 8"),
    "odd rope": (dict(rope__dimension_count=7), "rope.dimension_count is 7"),
    "value length": (dict(attention__value_length=16), "value_length is 16, expected the same as qwen35moe.attention.key_length 8"),
    "short list": (dict(attention__recurrent_layers=[True, True]), "at least 4"),
    "nextn": (dict(nextn_predict_layers=4), "nextn_predict_layers is 4"),
    "no layers": (dict(block_count=0), "block_count is 0"),
    "many layers": (dict(block_count=2**32 - 1), "block_count is 4294967295"),
    "eps": (dict(attention__layer_norm_rms_epsilon=0.), "epsilon is 0.0, expected a positive number"),
    "text": (dict(embedding_length="32"), "embedding_length is '32', expected a whole number"),
    "yarn": (dict(rope__scaling__type="yarn"), "only 'none' is supported"),
    "gating": (dict(expert_gating_func=2), "only 1 is supported"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name, plain, tmp_path):
    keys, words = CONTRADICTIONS[name]
    kind = UnsupportedModelError if "supported" in words else ConfigError
    fails(kind, lambda: open_checkpoint(write(put(plain, **keys), tmp_path / "m.gguf")), "m.gguf: qwen35moe.", words)


@pytest.mark.parametrize("key", [k for k in tiny().meta if k.startswith("qwen35moe")])
def test_missing_keys(key, plain, tmp_path):
    m = plain.copy()
    del m.meta[key]
    load = lambda: open_checkpoint(write(m, tmp_path / "m.gguf"))
    if key.split(".", 1)[1] in ("attention.value_length",): assert load().notes == []
    elif key.split(".", 1)[1] in ("full_attention_interval", "rope.dimension_sections", "expert_shared_feed_forward_length"): assert f"{key} is missing" in load().notes[0]
    else: fails(ConfigError, load, f"{key} is missing")


WEIRD = [0, 1, -1, 3, 2**31, 2**63, 2**64 - 1, -2**63, .5, 0., -1., 1e300, float("nan"), float("inf"), True, False, "", "x", "4", [], [0], [1] * 3, [1] * 4,
         [0] * 40, [1] * 40, [2**63] * 40, ["a"] * 40, [[1], [2, 3]], [.5] * 40, np.zeros(0, np.int32), np.arange(40), np.ones(40, bool), np.full(40, -1),
         np.float32(2), np.int64(4), np.ones((40, 2), int), [np.arange(3)] * 40, b"x", None]


@pytest.mark.parametrize("name", ["35B-A3B", "27B"])
def test_weird_values(name):
    "Any value under any key: a config, or an error of ours"
    meta = example_meta(name)
    extra = {f"{meta['general.architecture']}.{k}": 1 for k in ("attention.recurrent_layers", "nextn_predict_layers", "expert_weights_scale", "rope.scaling.type", "expert_gating_func")}
    for key in [*meta, *extra, "general.type", "tokenizer.ggml.tokens"]:
        for value in WEIRD:
            try: config_from_meta(meta | {key: value})
            except Qwen35Error as e: assert "\n" not in str(e) and len(str(e)) < 500


# --- 13: bytes

def test_not_a_file(tmp_path):
    (tmp_path / "empty.gguf").touch()
    fails(FileFormatError, lambda: open_checkpoint(tmp_path / "empty.gguf"), "empty.gguf: 0 bytes long")
    fails(FileFormatError, lambda: open_checkpoint(tmp_path), "a folder, expected a GGUF file")
    fails(FileFormatError, lambda: open_checkpoint(""), "a folder")
    fails(FileFormatError, lambda: open_checkpoint(tmp_path / "none.gguf"), "none.gguf: No such file")
    fails(FileFormatError, lambda: open_checkpoint(tmp_path / "empty.gguf" / "x"), "Not a directory")
    for path in (None, 3, ["a"]): fails(InputError, lambda: open_checkpoint(path), "path is")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    fails(FileFormatError, lambda: open_checkpoint(tmp_path / "loop"), "symbolic links")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_devices_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    signal.alarm(20)
    try:
        fails(FileFormatError, lambda: open_checkpoint(tmp_path / "pipe.gguf"), "not a regular file")
        for device in ("/dev/null", "/dev/zero"): fails(FileFormatError, lambda: open_checkpoint(device), "not a regular file")
    finally: signal.alarm(0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_no_permission(plain, tmp_path):
    path = write(plain, tmp_path / "m.gguf")
    path.chmod(0)
    fails(FileFormatError, lambda: open_checkpoint(path), "Permission denied")


@pytest.mark.parametrize("magic, words", [(b"ggjt", "begins with b'ggjt'"), (b"PK\3\4", "begins with"), (b"\0\0\0\0", "begins with"), (b"version https://git-lfs", "Git LFS pointer")])
def test_other_formats(magic, words, tmp_path):
    (tmp_path / "m.gguf").write_bytes(magic + bytes(100))
    fails(FileFormatError, lambda: open_checkpoint(tmp_path / "m.gguf"), "m.gguf", words)


@pytest.mark.parametrize("version", [0, 1, 4, 99, 2**31])
def test_versions(version, plain, tmp_path):
    fails(FileFormatError, lambda: open_checkpoint(write(plain, tmp_path / "m.gguf", version=version)), f"GGUF version {version}, expected 2 or 3")


def test_big_endian(plain, tmp_path):
    fails(FileFormatError, lambda: open_checkpoint(write(plain, tmp_path / "m.gguf", endianess=GGUFEndian.BIG)), "big-endian")


def bytes_of(m):
    with tempfile.TemporaryDirectory() as folder: return write(m, Path(folder) / "m.gguf").read_bytes()


SMALL_BYTES = bytes_of(tiny(**SMALL))


@pytest.fixture
def small(): return SMALL_BYTES


def load_bytes(b, folder):
    (folder / "x.gguf").unlink(missing_ok=True)
    (folder / "x.gguf").write_bytes(b)
    return open_checkpoint(folder / "x.gguf")


def test_cut_at_every_boundary(small, tmp_path):
    whole = max(p.start + p.n_bytes for p in load_bytes(small, tmp_path).tensors.values())
    for at in sorted({max(0, at + d) for at in tools.boundaries(small) for d in (-1, 0, 1)}):
        if at >= whole: load_bytes(small[:at], tmp_path)     # only padding is lost
        else: fails(FileFormatError, lambda: load_bytes(small[:at], tmp_path), "x.gguf")


def test_cut_anywhere(small, tmp_path):
    for at in np.random.default_rng(0).integers(0, len(small) - 64, 300): fails(FileFormatError, lambda: load_bytes(small[:at], tmp_path), "x.gguf")


U64, U32 = (lambda n: struct.pack("<Q", n)), (lambda n: struct.pack("<I", n))


def damage(b):
    "name -> (place, new bytes, words of the error)"
    keys, infos, _ = walk(b)
    name, arch, tokens = keys["general.name"], keys["general.architecture"], keys["tokenizer.ggml.tokens"]
    w, v = infos["blk.0.attn_norm.weight"], infos["blk.0.attn_qkv.weight"]
    same = v[4] if struct.unpack_from("<Q", b, v[4]) > struct.unpack_from("<Q", b, w[4]) else w[4]
    return {
        "n_kv 2^60": (16, U64(2**60), f"{2**60} keys"), "n_tensors 2^60": (8, U64(2**60), f"{2**60} tensors"),
        "n_kv one more": (16, U64(len(keys) + 1), ""), "n_kv one less": (16, U64(len(keys) - 1), ""), "n_tensors one more": (8, U64(len(infos) + 1), ""),
        "key length 2^63": (arch[0], U64(2**63), f"key 0 at byte 32 is {2**63} bytes long"), "key length 2^64-1": (arch[0], U64(2**64 - 1), "bytes long"),
        "key is not UTF-8": (arch[0] + 8, b"\xff", "not UTF-8"), "value is not UTF-8": (name[2] + 8, b"\xc3\x28", "'general.name' at byte"),
        "value length 2^63": (name[2], U64(2**63), f"'general.name' at byte {name[2] + 8} is {2**63} bytes long"), "value type 13": (name[1], U32(13), "'general.name' has value type 13"),
        "list length 2^60": (tokens[2] + 4, U64(2**60), "'tokenizer.ggml.tokens' at byte"), "list length 2^61": (tokens[2] + 4, U64(2**61), "'tokenizer.ggml.tokens' at byte"),
        "list one longer": (tokens[2] + 4, U64(25), ""), "string in a list 2^63": (tokens[2] + 12, U64(2**63), "string 1 of 24 runs past the end"),
        "string in a list 2^64-8": (tokens[2] + 12, U64(2**64 - 8), "runs past the end"), "list of type 77": (tokens[2], U32(77), "'tokenizer.ggml.tokens' has value type 77"),
        "list of lists": (tokens[2], U32(9), ""), "two keys of one name": (keys["qwen35moe.ssm.state_size"][0] + 8, b"qwen35moe.ssm.inner_size", ""),
        "tensor name length 2^63": (w[0], U64(2**63), "the name of tensor"), "tensor name is not UTF-8": (w[0] + 8, b"\xe2\x28\xa1", "not UTF-8"),
        "0 dimensions": (w[1], U32(0), "'blk.0.attn_norm.weight' has 0 dimensions"), "5 dimensions": (w[1], U32(5), "has 5 dimensions"), "2^32-1 dimensions": (w[1], U32(2**32 - 1), "dimensions, expected 1 to 4"),
        "a size of 0": (w[2], U64(0), "0 weights"), "sizes that overflow": (v[2], U64(2**62) * 2, "weights, expected 1 to 2^63"), "sizes that wrap to 0": (v[2], U64(2**32) * 2, "weights, expected 1 to 2^63"),
        "size 2^60": (w[2], U64(2**60), "ends at byte"), "rows that are no blocks": (v[3], U32(Q.Q4_K), "expected a multiple of 256, which is a block of Q4_K"),
        "offset past the end": (w[4], U64(2**40), "ends at byte"), "offset 2^64-32": (w[4], U64(2**64 - 32), "ends at byte"), "offset not aligned": (v[4], U64(struct.unpack_from("<Q", b, v[4])[0] + 4), "expected a multiple of 32"),
        "offsets overlap": (same, b[w[4] + v[4] - same:][:8], "lies on"), "two tensors of one name": (infos["blk.0.ffn_up_exps.weight"][0] + 8, b"blk.1.ffn_up_exps.weight", "'blk.1.ffn_up_exps.weight' occurs twice"),
    }


@pytest.mark.parametrize("name", damage(SMALL_BYTES))
def test_damage(name, small, tmp_path):
    at, new, words = damage(small)[name]
    fails(FileFormatError, lambda: load_bytes(small[:at] + new + small[at + len(new):], tmp_path), "x.gguf", words)


def test_alignment_key(plain, tmp_path):
    for value in (0, 3, 4, 48, -1, 2**31 + 1, "32", [32]): fails(FileFormatError, lambda: open_checkpoint(write(put_other(plain, {"general.alignment": abs(value) if value == -1 else value}), tmp_path / "m.gguf")), "general.alignment is")


def test_lists_in_lists(small, tmp_path):
    "One level is read; many levels, or very many lists, are refused at once"
    key = lambda inner: U64(1) + b"k" + inner
    start = lambda inner: b"GGUF" + U32(3) + U64(0) + U64(1) + key(inner)
    one = U32(9) + U32(9) + U64(2) + (U32(4) + U64(1) + U32(7)) * 2
    (tmp_path / "x.gguf").write_bytes(start(one))
    assert [list(x) for x in read_part(tmp_path / "x.gguf").meta["k"]] == [[7], [7]]
    fails(FileFormatError, lambda: load_bytes(start(U32(9) + (U32(9) + U64(1)) * 1000), tmp_path), "4 deep")
    fails(FileFormatError, lambda: load_bytes(start(U32(9) + U32(9) + U64(10**6) + bytes(12 * 10**6)), tmp_path), "at most 65536")


def test_header_budget(tmp_path):
    "A sparse file of 20 GB whose header wants all of it: refused before anything is copied"
    path = tmp_path / "x.gguf"
    for kind, n in ((7, 15 * 10**9), (8, 2 * 10**9)):       # yes and no, strings
        path.write_bytes(b"GGUF" + U32(3) + U64(0) + U64(1) + U64(1) + b"k" + U32(9) + U32(kind) + U64(n))
        os.truncate(path, 20 * 10**9)
        fails(FileFormatError, lambda: open_checkpoint(path), "'k' makes the header larger than")


def test_unbaked_norms(plain, tmp_path):
    note, = open_checkpoint(write(tools.unbaked(plain), tmp_path / "m.gguf")).notes
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.3.attn_q_norm.weight"): assert name in note
    bad = add(plain, {"output_norm.weight": np.full(32, np.nan)})
    assert open_checkpoint(write(bad, tmp_path / "m.gguf")).notes == []
    note, = open_checkpoint(write(add(plain, {"output_norm.weight": np.zeros(32)}), tmp_path / "m.gguf")).notes
    assert note.endswith("output_norm.weight 0.00")


# --- the reader against the reference

JSON = st.one_of(st.integers(0, 2**32 - 1), st.floats(width=32, allow_nan=False), st.booleans(), st.text(max_size=30),
    *(st.lists(x, min_size=1, max_size=6) for x in (st.integers(0, 2**32 - 1), st.booleans(), st.text(max_size=12))))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(meta=st.dictionaries(st.text(min_size=1, max_size=40).filter(lambda k: k not in ("general.alignment", "general.architecture")), JSON, max_size=12), seed=st.integers(0, 99))
def test_whatever_is_written_is_read(meta, seed, tmp_path):
    rng = np.random.default_rng(seed)
    path, tensors = tmp_path / "m.gguf", {f"t{i}": rng.standard_normal(rng.integers(1, 6, rng.integers(1, 5)), dtype=np.float32) for i in range(rng.integers(0, 4))}
    path.unlink(missing_ok=True)
    w = GGUFWriter(path, "any")
    for k, v in meta.items(): w.add_key_value(k, *tools.number(v))
    for n, x in tensors.items(): w.add_tensor(n, x)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    part = read_part(path)
    assert set(part.meta) == {*meta, "general.architecture"} and set(part.tensors) == set(tensors)
    for k, v in meta.items():
        ours = part.meta[k]
        assert (list(ours) if isinstance(v, list) else ours) == v and (isinstance(v, list) or type(ours) is type(v)), k
    for n, x in tensors.items(): np.testing.assert_array_equal(part.tensors[n].raw.view("<f4"), x)


def test_large_vocabulary_is_not_decoded(tmp_path):
    "A header with 248,320 tokens and as many merges is read in a fraction of a second, and gives every one of them when asked"
    words = [f"{i:x}" * (1 + i % 3) for i in range(248_320)]
    packed = b"".join(struct.pack("<Q", len(x)) + x for x in (w.encode() for w in words))
    key = lambda k: U64(len(k)) + k + U32(9) + U32(8) + U64(len(words)) + packed
    (tmp_path / "v.gguf").write_bytes(b"GGUF" + U32(3) + U64(0) + U64(2) + key(b"tokens") + key(b"merges"))
    seconds = min(timed(lambda: read_part(tmp_path / "v.gguf")) for _ in range(3))
    assert seconds < 1.5, f"{seconds:.2f} s of processor time"    # 0.15 where this was written
    tokens = read_part(tmp_path / "v.gguf").meta["merges"]
    assert (len(tokens), tokens[-1], tokens[100_000]) == (248_320, words[-1], words[100_000]) and list(tokens) == words


def timed(f):
    start = time.process_time()
    f()
    return time.process_time() - start


# --- fuzz

def test_fuzz():
    "Thousands of damaged headers (`QWEN35_FUZZ=1000000` for a night): each loads or ends in an error of ours, in bounded time and memory"
    count = int(os.environ.get("QWEN35_FUZZ", 5000))
    run = subprocess.run([sys.executable, str(Path(__file__).parent / "fuzz_header.py"), str(count), "0"], capture_output=True, text=True, timeout=120 + count / 10)
    assert run.returncode == 0, f"{run.returncode}\n{run.stderr[-3000:]}"
    said = json.loads(run.stdout)
    assert said["cases"] == count and sum(v for k, v in said.items() if k not in ("cases", "seed")) == count
    if count >= 2000: assert {"loads", "FileFormatError", "ConfigError", "ShapeError", "UnsupportedModelError", "MissingTensorError"} <= set(said)

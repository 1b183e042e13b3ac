"Every quantised type bit for bit against gguf-py, on random bytes, on the halves that arithmetic dislikes, and on whole files"
import tracemalloc
import warnings
from fractions import Fraction
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType

from qwen35_lit.config import InputError, ShapeError, UnsupportedModelError
from qwen35_lit.quants import BLOCK, DECODE, LAYOUT, PIECE, READABLE, check_tensor, dequantize, tensor_rows

OWN = sorted(DECODE, key=lambda t: t.name)
SCALED = [t for t in OWN if "d" in LAYOUT[t].names]
K_FILES = ["Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
HALVES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x83ff, 0x0400, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe00, 0x7d01], "<u2")
name_of = lambda t: getattr(t, "name", str(t))


def random_bytes(t, *shape, blocks=1, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*shape, blocks * BLOCK[t][1]), dtype=np.uint8)


def reference(raw, t):
    with np.errstate(all="ignore"): return gguf.quants.dequantize(np.ascontiguousarray(raw), t)


def assert_same(ours, theirs):
    "Equal bits, -0 is not 0; where one is NaN so is the other (which of its many bit patterns is the processor's choice)"
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    bits = f"u{ours.itemsize}"
    np.testing.assert_array_equal(*(np.where(np.isnan(v), 0, v).view(bits) for v in (ours, theirs)))


@pytest.mark.parametrize("t", READABLE, ids=name_of)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_random_bytes(t, blocks):
    for shape in [(), (1,), (7,), (3, 2), (2, 3, 4)]:
        raw = random_bytes(t, *shape, blocks=blocks, seed=blocks)
        assert_same(dequantize(raw, t), reference(raw if shape else raw[None], t).reshape(*shape, -1))


@pytest.mark.parametrize("t", OWN, ids=name_of)
def test_more_than_one_piece(t):
    n, size = BLOCK[t]
    raw = random_bytes(t, 3, blocks=PIECE // n // 2 + 1)  # one and a half pieces: the cut falls inside the second row
    assert_same(dequantize(raw, t), reference(raw, t))


@pytest.mark.parametrize("t", SCALED, ids=name_of)
def test_every_code_in_every_lane(t):
    "All values of a byte at every place of a block, beside a scale of 1"
    b = np.repeat(np.arange(256, dtype=np.uint8)[:, None], BLOCK[t][1], axis=1).view(LAYOUT[t])
    for d in (1, -1):
        for field in ("d", "dmin"):
            if field in b.dtype.names: b[field] = d
        assert_same(dequantize(b.view(np.uint8), t), reference(b.view(np.uint8), t))


@pytest.mark.parametrize("t", SCALED, ids=name_of)
def test_odd_halves(t):
    n = len(HALVES)
    b = random_bytes(t, n * n).view(LAYOUT[t])[:, 0]
    b["d"] = np.repeat(HALVES, n).view("<f2")
    if "dmin" in b.dtype.names: b["dmin"] = np.tile(HALVES, n).view("<f2")
    raw = b.view(np.uint8).reshape(n * n, -1)
    assert_same(dequantize(raw, t), reference(raw, t))
    with np.errstate(all="ignore"): assert_same(dequantize(raw, t, np.float64).astype(np.float32), dequantize(raw, t))


@pytest.mark.parametrize("t", [QType.F16, QType.BF16], ids=name_of)
def test_all_65536(t):
    raw = np.arange(65536, dtype="<u2").view(np.uint8)
    assert_same(dequantize(raw, t), reference(raw[None], t)[0])


@pytest.mark.parametrize("t", READABLE, ids=name_of)
def test_zero_blocks(t):
    raw = np.zeros((2, 3 * BLOCK[t][1]), np.uint8)
    assert_same(dequantize(raw, t), reference(raw, t))
    if t in DECODE: assert not dequantize(raw, t).any()


@pytest.mark.parametrize("t", READABLE, ids=name_of)
def test_float64_rounds_to_float32(t):
    raw = random_bytes(t, 9, blocks=2)
    with np.errstate(all="ignore"): assert_same(dequantize(raw, t, np.float64).astype(np.float32), dequantize(raw, t))


def by_the_book(t, b, i):
    "One weight as a fraction, from the bytes of its block and ggml's struct offsets, without NumPy"
    half = lambda at: Fraction(float(np.frombuffer(b[at:at + 2], "<f2")[0]))
    signed = lambda v: v - 256 * (v > 127)
    if t == QType.Q8_0: return half(0) * signed(b[2 + i])
    if t == QType.Q6_K:
        q = (b[64 * (i // 128) + i % 64] >> 4 * (i // 64 % 2) & 15) + 16 * (b[128 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3)
        return half(208) * signed(b[192 + i // 16]) * (q - 32)
    if t == QType.Q3_K:
        q = (b[32 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3) - (0 if b[i % 32] >> i // 32 & 1 else 4)
        s = i // 16
        scale = (b[96 + s % 8] >> 4 * (s // 8) & 15) + 16 * (b[104 + s % 4] >> 2 * (s // 4) & 3)
        return half(108) * (scale - 32) * q
    s, k = i // 32, b[4:16]
    scale, least = (k[s] & 63, k[s + 4] & 63) if s < 4 else ((k[s + 4] & 15) + 16 * (k[s - 4] >> 6), (k[s + 4] >> 4) + 16 * (k[s] >> 6))
    low = 16 if t == QType.Q4_K else 48
    q = b[low + 32 * (i // 64) + i % 32] >> 4 * (s % 2) & 15
    if t == QType.Q5_K: q += 16 * (b[16 + i % 32] >> s & 1)
    return half(0) * scale * q - half(2) * least


@pytest.mark.parametrize("t", SCALED, ids=name_of)
def test_float64_is_exact(t):
    raw = random_bytes(t, 6)
    b = raw.view(LAYOUT[t])[:, 0]
    for field, sizes in (("d", [6e-8, 1e-4, 1, 3, 2e4, 65504]), ("dmin", [65504, 1e-4, 1e-3, 6e-8, 7, -2])):
        if field in b.dtype.names: b[field] = sizes
    w = dequantize(raw, t, np.float64)
    for row, got in zip(raw, w):
        for i, v in enumerate(got): assert Fraction(float(v)) == by_the_book(t, row.tobytes(), i)


@pytest.mark.parametrize("quant", K_FILES)
def test_whole_files(quant, data):
    for t in gguf.GGUFReader(data / f"moe-k-{quant}.gguf").tensors:
        raw = t.data.view(np.uint8)
        assert_same(dequantize(raw, t.tensor_type), reference(t.data, t.tensor_type))
        assert_same(dequantize(raw, t.tensor_type, np.float64), reference(t.data, t.tensor_type).astype(np.float64))  # below 1, so exact twice


def test_any_memory_layout():
    raw = random_bytes(QType.Q4_K, 8, blocks=4)
    whole = dequantize(raw, QType.Q4_K)
    assert_same(dequantize(raw[::-2], QType.Q4_K), whole[::-2])
    assert_same(dequantize(raw[:, 144:432], QType.Q4_K), whole[:, 256:768])
    assert_same(dequantize(np.asfortranarray(raw), QType.Q4_K), whole)
    odd = np.empty(raw.size + 1, np.uint8)[1:].reshape(raw.shape)  # not aligned to anything
    odd[:] = raw
    assert_same(dequantize(odd, QType.Q4_K), whole)


@pytest.mark.parametrize("t", [QType.F32, QType.Q8_0], ids=name_of)
def test_read_only_file_and_a_new_array(t, tmp_path):
    raw = random_bytes(t, 4, blocks=64)
    raw.tofile(tmp_path / "w")
    mapped = np.memmap(tmp_path / "w", np.uint8, "r", shape=raw.shape)
    out = dequantize(mapped, t)
    assert type(out) is np.ndarray and out.flags.writeable and not np.shares_memory(out, mapped)
    assert_same(out, reference(raw, t))


def test_says_nothing():
    "No warning, whatever the bytes"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in READABLE:
            for dtype in (np.float32, np.float64): dequantize(random_bytes(t, 500), t, dtype)
            check_tensor(SimpleNamespace(name="x", type=t, shape=(500, BLOCK[t][0]), raw=random_bytes(t, 500)))


@pytest.mark.parametrize("t", [*OWN, QType.Q4_0, QType.IQ4_NL], ids=name_of)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory(t, dtype):
    n, size = BLOCK[t]
    raw = np.zeros((64, 65536 // n * size), np.uint8)
    tracemalloc.start()
    try: out = dequantize(raw, t, dtype); most = tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()
    assert most < 1.6 * out.nbytes


@pytest.mark.parametrize("raw, t, dtype, error, words", [
    (np.zeros(143, np.uint8), QType.Q4_K, np.float32, ShapeError, "143 bytes is no whole number of Q4_K blocks of 144"),
    (np.zeros((2, 3), np.uint8), QType.F32, np.float32, ShapeError, "3 bytes is no whole number of F32 blocks of 4"),
    (np.zeros(144, np.int8), QType.Q4_K, np.float32, InputError, "uint8, not int8"),
    (np.uint8(3), QType.Q4_K, np.float32, InputError, "rows of uint8"),
    (np.zeros(144, np.uint8), QType.Q4_K, np.float16, InputError, "float32 or float64"),
    (np.zeros(144, np.uint8), QType.Q4_K, int, InputError, "float32 or float64"),
    (np.zeros(144, np.uint8), QType.Q4_K, None, InputError, "float32 or float64"),
    (np.zeros(292, np.uint8), QType.Q8_K, np.float32, UnsupportedModelError, "type Q8_K cannot be read"),
    (np.zeros(4, np.uint8), QType.I32, np.float32, UnsupportedModelError, "type I32 cannot be read"),
    (np.zeros(4, np.uint8), 4, np.float32, UnsupportedModelError, "number 4 cannot be read"),
    (np.zeros(4, np.uint8), 10**9, np.float32, UnsupportedModelError, "number 1000000000 cannot be read")])
def test_errors(raw, t, dtype, error, words):
    with pytest.raises(error, match=words) as e: dequantize(raw, t, dtype)
    assert "\n" not in str(e.value)


def a_tensor(t, *rows, width, seed=0):
    "Random but sane weights"
    n, size = BLOCK[t]
    raw = random_bytes(t, *rows, blocks=width // n, seed=seed)
    for field in {"d", "dmin"} & set(LAYOUT[t].names): raw.view(LAYOUT[t])[field] = 1e-3
    return SimpleNamespace(name="blk.0.w", type=t, shape=(*rows, width), raw=raw)


@pytest.mark.parametrize("t", SCALED, ids=name_of)
def test_rows(t):
    x = a_tensor(t, 5, 3, width=512)
    whole = tensor_rows(x)
    assert whole.shape == x.shape
    for idx in (0, 4, np.int32(2), slice(1, 4), slice(None, None, -2), [4, 0, 4], np.array([[1, 2], [3, 0]]), np.array([], int), slice(3, 3)):
        assert_same(tensor_rows(x, idx), whole[idx])
    assert tensor_rows(x, []).shape == (0, 3, 512)
    assert_same(tensor_rows(x, 1, np.float64), dequantize(x.raw[1], t, np.float64))


def test_rows_of_a_vector():
    x = SimpleNamespace(name="output_norm.weight", type=QType.F32, shape=(6,), raw=np.arange(6, dtype=np.float32).view(np.uint8))
    assert tensor_rows(x, [5, 0]).tolist() == [5, 0] and tensor_rows(x, slice(2, 4)).tolist() == [2, 3] and float(tensor_rows(x, 3)) == 3


@pytest.mark.parametrize("idx, words", [(-1, "row -1 asked for, it has rows 0 to 4"), (5, "row 5"), ([0, 7], "row 7"), (1.0, "integers"), ("1", "integers"),
    (np.array([True] * 5), "integers"), (np.uint64(2**63), "row 9223372036854775808")])
def test_rows_that_are_not_there(idx, words):
    with pytest.raises(InputError, match=f"blk.0.w: .*{words}"): tensor_rows(a_tensor(QType.Q4_K, 5, width=256), idx)


def test_errors_name_the_tensor():
    x = a_tensor(QType.Q4_K, 5, width=256)
    x.raw = x.raw[:, :100]
    with pytest.raises(ShapeError, match="blk.0.w: a row of 100 bytes"): tensor_rows(x, 1)


@pytest.mark.parametrize("t", SCALED, ids=name_of)
@pytest.mark.parametrize("value, word", [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "Inf"), (65504, "beyond ±65504")])
def test_check_finds(t, value, word):
    x = a_tensor(t, 4, 6, width=512)
    assert check_tensor(x) == []
    x.raw.view(LAYOUT[t])["d"][2, 3, 512 // BLOCK[t][0] // 2] = value
    n = 24 * 512 // BLOCK[t][0]
    assert check_tensor(x) == [f"blk.0.w ({t.name}): {word} in 1 of {n} blocks, the first at [2, 3, 256]"]


def test_check_in_pieces():
    "Troubles in two pieces are one line, and its place is the first"
    w = np.ones(PIECE + 10, np.float32)
    w[[5, PIECE + 3]] = np.nan
    w[PIECE + 4] = 1e6
    assert check_tensor(SimpleNamespace(name="x", type=QType.F32, shape=w.shape, raw=w.view(np.uint8))) == [
        f"x (F32): NaN in 2 of {PIECE + 10} weights, the first at [5]", f"x (F32): beyond ±65504 in 1 of {PIECE + 10} weights, the first at [{PIECE + 4}]"]


@pytest.mark.parametrize("t", READABLE, ids=name_of)
def test_check_any_type(t):
    lines = check_tensor(SimpleNamespace(name="x", type=t, shape=(64, 2 * BLOCK[t][0]), raw=random_bytes(t, 64, blocks=2)))
    assert all(line.startswith(f"x ({t.name}): ") and "\n" not in line for line in lines)
    assert lines or t not in SCALED  # of random blocks at least one in four is caught


def test_check_zeros_and_nothing():
    zeros = SimpleNamespace(name="x", type=QType.Q6_K, shape=(2, 256), raw=np.zeros((2, 210), np.uint8))
    assert check_tensor(zeros) == ["x (Q6_K): all 512 weights are zero"]
    assert check_tensor(SimpleNamespace(name="x", type=QType.Q6_K, shape=(0, 256), raw=np.zeros((0, 210), np.uint8))) == []


@pytest.mark.parametrize("quant", K_FILES)
def test_check_sound_files(quant, data):
    for t in gguf.GGUFReader(data / f"moe-k-{quant}.gguf").tensors:
        shape = tuple(int(n) for n in t.shape[::-1])
        assert check_tensor(SimpleNamespace(name=t.name, type=t.tensor_type, shape=shape, raw=t.data.view(np.uint8))) == []

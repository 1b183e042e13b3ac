"""Small GGUF models with something odd about them, for tests.

`read_model(path)` or `tiny()` gives a `Model`; an edit takes a `Model` and returns another; `write(model, path)` writes it with
gguf-py's own writer. `SAME` holds the edits after which a file must load and compute what the plain one does. `walk` finds the
structural boundaries of a file's bytes, so that tests can cut and patch them."""
import copy
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType as V, GGUFWriter, GGMLQuantizationType as Q
from gguf.quants import quantize


@dataclass
class Model:
    meta: dict     # key -> (value, type, type of the elements of an array)
    tensors: dict  # name -> (array as gguf-py has it: f32, or bytes of a quantised type; type)

    @property
    def arch(self): return self.meta["general.architecture"][0]

    def key(self, name): return f"{self.arch}.{name}"

    def get(self, name): return self.meta[self.key(name)][0]

    def copy(self): return Model(copy.deepcopy(self.meta), dict(self.tensors))


def read_model(path):
    "A model file, through gguf-py"
    reader, sub = GGUFReader(path), lambda f: f.types[-1] if f.types[0] == V.ARRAY else None
    meta = {k: (f.contents(), f.types[0], sub(f)) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return Model(meta, {t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors})


def write(m, path, version=3, alignment=None, parts=0, **options):
    "Write `m`; with `parts`, in files of so many tensors each. Returns the path (of the first part)"
    w = GGUFWriter(path, m.arch, split_max_tensors=parts, **options)
    if alignment: w.add_custom_alignment(alignment)
    for key, (value, kind, sub) in m.meta.items():
        if key != "general.architecture": w.add_key_value(key, value, kind, sub)
    for name, (x, kind) in m.tensors.items():
        w.add_tensor(name, np.ascontiguousarray(x), raw_dtype=kind if x.dtype == np.uint8 else None)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    path = Path(path)
    if parts: path = next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    if version != 3: patch(path, 4, struct.pack("<I", version))
    return path


def patch(path, at, new):
    "Write `new` over the bytes of a file"
    with open(path, "r+b") as f: f.seek(at); f.write(new)


# --- a model from nothing

def number(value):
    "A value with the type that a converter gives it"
    if isinstance(value, bool): return value, V.BOOL, None
    if isinstance(value, int): return value, V.UINT32, None
    if isinstance(value, float): return value, V.FLOAT32, None
    if isinstance(value, str): return value, V.STRING, None
    return list(value), V.ARRAY, number(value[0])[1]


def tiny(arch="qwen35moe", n_layer=4, n_embd=32, n_vocab=40, S=8, n_k=2, n_v=4, n_expert=4, ff=16, seed=0):
    "A random model of some 100 kB (`n_layer` 2 and `n_embd` 16: some 30 kB); norms near 1, decays negative"
    n_head, n_kv, d, moe, rng = 4, 2, 8, arch == "qwen35moe", np.random.default_rng(seed)
    numbers = {"block_count": n_layer, "context_length": 256, "embedding_length": n_embd, "full_attention_interval": min(4, n_layer),
               "attention.head_count": n_head, "attention.head_count_kv": n_kv, "attention.key_length": d, "attention.value_length": d,
               "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0], "rope.freq_base": 1e7,
               "ssm.state_size": S, "ssm.group_count": n_k, "ssm.time_step_rank": n_v, "ssm.inner_size": n_v * S, "ssm.conv_kernel": 4}
    if moe: numbers |= {"expert_count": n_expert, "expert_used_count": 2, "expert_feed_forward_length": ff, "expert_shared_feed_forward_length": ff}
    else: numbers |= {"feed_forward_length": ff}
    meta = {"general.architecture": number(arch), "general.name": number("tiny")} | {f"{arch}.{k}": number(v) for k, v in numbers.items()}
    meta |= {"tokenizer.ggml.tokens": number([f"t{i}" for i in range(n_vocab)]), "tokenizer.ggml.eos_token_id": number(1)}
    conv, inner = 2 * n_k * S + n_v * S, n_v * S
    shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,), "output.weight": (n_vocab, n_embd)}
    for i in range(n_layer):
        here = {"attn_norm": (n_embd,), "post_attention_norm": (n_embd,)}
        if (i + 1) % min(4, n_layer): here |= {"attn_qkv": (conv, n_embd), "attn_gate": (inner, n_embd), "ssm_alpha": (n_v, n_embd), "ssm_beta": (n_v, n_embd),
            "ssm_conv1d": (conv, 4), "ssm_dt.bias": (n_v,), "ssm_a": (n_v,), "ssm_norm": (S,), "ssm_out": (n_embd, inner)}
        else: here |= {"attn_q": (2 * n_head * d, n_embd), "attn_k": (n_kv * d, n_embd), "attn_v": (n_kv * d, n_embd), "attn_output": (n_embd, n_head * d),
            "attn_q_norm": (d,), "attn_k_norm": (d,)}
        if moe: here |= {"ffn_gate_inp": (n_expert, n_embd), "ffn_gate_exps": (n_expert, ff, n_embd), "ffn_up_exps": (n_expert, ff, n_embd), "ffn_down_exps": (n_expert, n_embd, ff),
            "ffn_gate_inp_shexp": (1, n_embd), "ffn_gate_shexp": (ff, n_embd), "ffn_up_shexp": (ff, n_embd), "ffn_down_shexp": (n_embd, ff)}
        else: here |= {"ffn_gate": (ff, n_embd), "ffn_up": (ff, n_embd), "ffn_down": (n_embd, ff)}
        shapes |= {f"blk.{i}.{name}" + ("" if name in ("ssm_a", "ssm_dt.bias") else ".weight"): shape for name, shape in here.items()}

    def random(name, shape):
        x = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"): return 1 + x / 8
        return -np.exp(x) if name.endswith("ssm_a") else x / np.sqrt(shape[-1])
    return Model(meta, {name: (random(name, shape).astype(np.float32), Q.F32) for name, shape in shapes.items()})


# --- edits

def put(m, **keys):
    "Set keys of the architecture (`__` for a dot; `None` removes), each with the type that a converter would give it"
    m = m.copy()
    for name, value in keys.items():
        key = m.key(name.replace("__", "."))
        if value is None: m.meta.pop(key, None)
        else: m.meta[key] = number(value)
    return m


def put_other(m, keys):
    "Set keys of any prefix"
    m = m.copy()
    m.meta |= {k: number(v) for k, v in keys.items()}
    return m


def drop(m, *names):
    "Remove tensors; a name that ends in `.` is a prefix"
    m = m.copy()
    m.tensors = {n: t for n, t in m.tensors.items() if n not in names and not n.startswith(tuple(x for x in names if x.endswith(".")) or "\0")}
    return m


def rename(m, old, new):
    "Another ending for all tensors whose names have this one"
    m = m.copy()
    m.tensors = {n[:-len(old)] + new if n.endswith(old) else n: t for n, t in m.tensors.items()}
    return m


def add(m, tensors):
    "Further tensors: name -> f32 array"
    m = m.copy()
    m.tensors |= {n: (np.asarray(x, np.float32), Q.F32) for n, x in tensors.items()}
    return m


def retype(m, name, kind, raw=None):
    "Quantise one tensor with gguf-py, or give it these bytes"
    m = m.copy()
    x, _ = m.tensors[name]
    m.tensors[name] = (quantize(x, kind) if raw is None else raw, kind)
    return m


def attention_layer(m):
    "The number of the first attention layer"
    return next(int(n.split(".")[1]) for n in m.tensors if n.endswith("attn_q.weight"))


def with_mtp(m, key=1, count=True):
    "An MTP block behind the trunk: a copy of an attention layer and `nextn.*`; without the key, or not counted in `block_count`, if so asked"
    n, H, rng = m.get("block_count"), m.get("embedding_length"), np.random.default_rng(7)
    a = f"blk.{attention_layer(m)}."
    m = put(m, block_count=n + bool(count), nextn_predict_layers=key)
    if count and m.key("attention.recurrent_layers") in m.meta: m = put(m, attention__recurrent_layers=m.get("attention.recurrent_layers") + [False])
    m.tensors |= {f"blk.{n}.{name[len(a):]}": t for name, t in m.tensors.items() if name.startswith(a)}
    return add(m, {f"blk.{n}.nextn.eh_proj.weight": rng.standard_normal((H, 2 * H)), f"blk.{n}.nextn.enorm.weight": np.ones(H), f"blk.{n}.nextn.hnorm.weight": np.ones(H)})


def stripped_mtp(m):
    "The header of a file with an MTP block, but without the block"
    full = with_mtp(m)
    return drop(full, f"blk.{full.get('block_count') - 1}.")


def layer_list(m, of):
    "A value for each layer: of(is attention)"
    return [of(f"blk.{i}.attn_q.weight" in m.tensors) for i in range(m.get("block_count"))]


def three_sections(m): return put(m, rope__dimension_sections=m.get("rope.dimension_sections")[:3])
def bare_dt(m): return rename(m, ".ssm_dt.bias", ".ssm_dt")
def kv_list(m): return put(m, attention__head_count_kv=layer_list(m, lambda a: m.get("attention.head_count_kv") if a else 0))
def only_kv_list(m): return put(kv_list(m), full_attention_interval=None, attention__recurrent_layers=None)
def bundled(m): return add(m, {"v.patch_embd.weight": np.ones((4, 8)), "v.blk.0.attn_q.weight": np.ones((8, 8)), "mm.0.weight": np.ones((8, 8)), "mtp.fc.weight": np.ones((8, 8))})
def ollama(m): return bundled(kv_list(bare_dt(three_sections(m))))
def recurrent_list(m): return put(m, attention__recurrent_layers=layer_list(m, lambda a: not a), full_attention_interval=None)
def overridden(m): return put(recurrent_list(m), full_attention_interval=m.get("full_attention_interval") + 1)
def no_interval(m): return put(m, attention__recurrent_layers=None, full_attention_interval=None)


def fused(m):
    "Gate and up of all experts in one tensor, gate first"
    m = m.copy()
    for name in [n for n in m.tensors if n.endswith("ffn_gate_exps.weight")]:
        (g, kind), (u, _) = m.tensors.pop(name), m.tensors.pop(name.replace("gate", "up"))
        m.tensors[name.replace("gate", "gate_up")] = (np.concatenate([g, u], axis=1), kind)
    return m


def tied(m):
    "An output matrix that is the embedding table, and said twice (compare with `untied`, which says it once)"
    m = m.copy()
    m.tensors["output.weight"] = m.tensors["token_embd.weight"]
    return m


def untied(m): return drop(m, "output.weight")


def flat_gate(m):
    "The shared expert's gate as a vector"
    m = m.copy()
    m.tensors |= {n: (x.reshape(-1), kind) for n, (x, kind) in m.tensors.items() if n.endswith("ffn_gate_inp_shexp.weight")}
    return m


def unbaked(m):
    "Norm weights from which the 1 was not added (`ssm_norm` never has it)"
    m = m.copy()
    m.tensors |= {n: (x - 1, kind) for n, (x, kind) in m.tensors.items() if n.endswith("norm.weight") and "ssm_norm" not in n}
    return m


def decorated(m):
    "Keys and tensors that nobody needs"
    m = put_other(m, {"general.sampling.temp": .6, "general.sampling.top_k": 20, "general.tags": ["a", "b"], "something.else": 5, "tokenizer.ggml.add_bos_token": True})
    return add(m, {"extra.weight": np.ones((3, 5))})


SAME = {f.__name__: f for f in (with_mtp, stripped_mtp, three_sections, bare_dt, kv_list, bundled, ollama, recurrent_list, overridden, fused, flat_gate, decorated)} | {
    "mtp_without_key": lambda m: with_mtp(m, key=None), "mtp_key_zero": lambda m: with_mtp(m, key=0), "mtp_not_counted": lambda m: with_mtp(m, key=None, count=False),
    "ollama_with_mtp": lambda m: ollama(with_mtp(m)), "everything": lambda m: decorated(bundled(fused(bare_dt(three_sections(with_mtp(m))))))}


# --- bytes

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def walk(b):
    "Where things are in a sound little-endian file: keys (key -> [start, type, value, end]), infos (name -> [start, n_dims, dims, type, offset, end]), data"
    pos, keys, infos = 24, {}, {}
    u = lambda code, at: struct.unpack_from("<" + code, b, at)[0]

    def skip(kind, at):
        if kind == 8: return at + 8 + u("Q", at)
        if kind != 9: return at + SIZES[kind]
        inner, n, at = u("I", at), u("Q", at + 4), at + 12
        for _ in range(n): at = skip(inner, at)
        return at
    n_tensors, n_kv = u("Q", 8), u("Q", 16)
    for _ in range(n_kv):
        after = pos + 8 + u("Q", pos)
        end = skip(u("I", after), after + 4)
        keys[b[pos + 8:after].decode()], pos = [pos, after, after + 4, end], end
    for _ in range(n_tensors):
        after = pos + 8 + u("Q", pos)
        dims = after + 4
        kind = dims + 8 * u("I", after)
        infos[b[pos + 8:after].decode()], pos = [pos, after, dims, kind, kind + 4, kind + 12], kind + 12
    return keys, infos, -(-pos // 32) * 32


def boundaries(b):
    "Every structural boundary of a file: counts, keys, values, entries, data, tensors"
    keys, infos, data = walk(b)
    starts = [data + struct.unpack_from("<Q", b, at[4])[0] for at in infos.values()]
    return sorted({0, 4, 8, 16, 24, data, len(b), *starts, *(x for at in (*keys.values(), *infos.values()) for x in at)})

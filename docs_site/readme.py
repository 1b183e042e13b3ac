"Writes README.md from nbs/index.ipynb and what it stores; `--check` only says whether it is up to date"
import base64
import re
import sys
from pathlib import Path

from fastcore.nbio import read_nb

ROOT = Path(__file__).parent.parent
INDEX, README, FIGURES = ROOT / "nbs/index.ipynb", ROOT / "README.md", "docs_site/readme"
NOTE = "<!-- Made from nbs/index.ipynb by docs_site/readme.py; edit that, not this. -->"


def links_from_root(text): return re.sub(r"\]\((?=[\w/]+\.ipynb)", "](nbs/", text)


def indented(text): return "\n".join(f"    {o}".rstrip() for o in text.rstrip().splitlines())


def output(
    out,    # one output of a cell
    cell,   # the cell
    files,  # collects pictures: path under the root -> bytes
)->str:     # Markdown
    "A picture if there is one, else Markdown, else text"
    if out.output_type == "stream": return indented("".join(out.text))
    data = out.get("data") or {}
    joined = {k: v if isinstance(v, str) else "".join(v) for k, v in data.items()}
    if png := joined.get("image/png"):
        path = f"{FIGURES}/{cell.id}.png"
        files[path] = base64.b64decode(png)
        return f"![{cell.directives.get('fig-alt', 'figure')}]({path})"
    if md := joined.get("text/markdown"): return links_from_root(md)
    return indented(joined.get("text/plain", ""))


def is_off(cell, name): return cell.directives.get(name) == "false"


def markdown(cell, files):
    "One cell as Markdown blocks"
    if cell.cell_type == "markdown": return [links_from_root(cell.source)]
    if "hide" in cell.directives or is_off(cell, "include"): return []
    code = "\n".join(o for o in cell.source.splitlines() if not o.startswith("#|")).strip()
    blocks = [] if is_off(cell, "echo") else [f"```python\n{code}\n```"]
    if not is_off(cell, "output"): blocks += [output(o, cell, files) for o in cell.get("outputs", [])]
    return blocks


def build():
    "All files that the README consists of: path under the root -> bytes"
    files = {}
    blocks = [b for c in read_nb(INDEX).cells for b in markdown(c, files) if b.strip()]
    title, *rest = blocks
    files["README.md"] = "\n\n".join([title, NOTE, *rest]).encode() + b"\n"
    return files


if __name__ == "__main__":
    files = build()
    stale = [p for p, content in files.items() if not (ROOT / p).exists() or (ROOT / p).read_bytes() != content]
    if "--check" in sys.argv: sys.exit(f"stale: {', '.join(stale)}; run `make export`" if stale else 0)
    for path in stale:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_bytes(files[path])
    print("README.md:", f"wrote {', '.join(stale)}" if stale else "up to date")

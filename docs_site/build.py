"""Builds the site, docs_site/_site, from the notebooks: nbdev's processors, then smalldocs.

Everything a page needs lies in the site: no request leaves it. Ends with an error if a link leads nowhere.
"""
import html
import os
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

ROOT, HERE = Path(__file__).parent.parent, Path(__file__).parent
CDN = re.compile(r"https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist/(contrib/)?")
NUMBERED = re.compile(r"\b\d\d[a-z]?_(\w+\.html)")          # 05_delta_rule.html: pages drop the number, so that chapters may move
SOURCE = re.compile(r'"/?blob/\w+/qwen35_lit/(\w+)\.py#L(?:(\d+)|None)"')   # None: of a name that is not a function's


def render():
    "Notebooks to pages: the folder they are in, and what smalldocs had to say"
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs
    from smalldocs.site import build
    refresh_quarto_yml()
    cache = proc_nbs(n_workers=2, force=True)
    for nb in cache.glob("*.ipynb"): nb.write_text(nb.read_text().replace("__main__.", ""))   # what a type is called while its chapter runs
    site = build(cache, quiet=True)
    known = "broken link", "output-file", "format commonmark", "format-links"   # links are checked when they are final; the rest is for Quarto
    return cache / "_site", [w for w in site.warnings if not any(k in w for k in known)]


def final(text):
    "The text of a page with its links as they are to be"
    text = SOURCE.sub(lambda m: f'"source/{m[1]}.html#L-{m[2] or 1}"', CDN.sub("site_libs/katex/", text))
    return NUMBERED.sub(r"\1", text.replace('href="/', 'href="'))


def rewrite(site):
    "Number-free names, our own KaTeX, links that are relative"
    for path in [*site.glob("*.html"), site / "search.json"]:
        path.write_text(final(path.read_text()))
        if NUMBERED.fullmatch(path.name): path.rename(path.with_name(NUMBERED.sub(r"\1", path.name)))
    for path in site.rglob("*.css"):
        path.write_text(re.sub(r"@import url\(https?://[^)]*\);?", "", path.read_text()))   # the themes' web fonts; the system's do
    (site / "sitemap.xml").unlink(missing_ok=True)                                # it needs to know its host


PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}.py</title>
<style>body {{ margin: 1rem; font-size: 14px }} a {{ color: #1a6fb0; text-decoration: none }} :target {{ background: #8886 }} .source {{ background: none }}
{light} @media (prefers-color-scheme: dark) {{ body {{ background: #222 }} a {{ color: #6db3e8 }} {dark} }}</style></head>
<body><p>qwen35_lit/{name}.py, made from its <a href="../{name}.html">chapter</a></p>{code}</body></html>"""


def source_pages(site):
    "The modules with numbered lines, for the `source` links of the reference"
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    (site / "source").mkdir()
    style = {s: HtmlFormatter(style=s, linespans="L", cssclass="source") for s in ("default", "github-dark")}
    for path in sorted((ROOT / "qwen35_lit").glob("[a-z]*.py")):
        if not (site / f"{path.stem}.html").exists(): continue
        light, dark = (f.get_style_defs(".source") for f in style.values())
        code = highlight(path.read_text(), PythonLexer(), style["default"])
        (site / f"source/{path.stem}.html").write_text(PAGE.format(name=path.stem, light=light, dark=dark, code=code))


def problems(site):
    "Links to nowhere, and anything a browser would fetch from elsewhere"
    pages = {p: p.read_text() for p in site.rglob("*.html")}
    ids = {p.resolve(): set(map(html.unescape, re.findall(r'\bid="([^"]+)"', t))) for p, t in pages.items()}
    found = defaultdict(list)
    for page, text in pages.items():
        name = str(page.relative_to(site))
        text = re.sub(r"<(pre|code)\b.*?</\1>", lambda m: " ".join(re.findall(r"<a [^>]*>", m[0])), text, flags=re.S)
        found[name] += [f"fetches {u}" for u in re.findall(r'<(?:link|script|img|iframe)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"', text)]
        for link in map(html.unescape, re.findall(r'<\w+\b[^>]*?\b(?:src|href)="([^"]*)"', text)):
            if not link or re.match(r"[a-z]+:|//", link): continue
            target, _, anchor = link.partition("#")
            file = (page.parent / target.split("?")[0]).resolve() if target else page.resolve()
            if not file.exists(): found[name].append(f"{link}: no such file")
            elif anchor and file in ids and anchor not in ids[file] and anchor != "top": found[name].append(f"{link}: no such place")
    for sheet in site.rglob("*.css"):
        found[str(sheet.relative_to(site))] += [f"fetches {u}" for u in re.findall(r"(?:@import|url\()[\s(\"'url]*((?:https?:)?//[^\s\"')]+)", sheet.read_text())]
    return {k: v for k, v in found.items() if v}


def main():
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning"   # nbdev's, about cells that tests/test_house.py finds too
    site, notes = render()
    rewrite(site)
    shutil.copytree(HERE / "katex", site / "site_libs/katex")
    source_pages(site)
    out = HERE / "_site"
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(site, out)
    shutil.rmtree(ROOT / "_proc")
    for note in notes: print("note:", note)
    bad = problems(out)
    for page, lines in bad.items(): print(page, *sorted(set(lines)), sep="\n  ")
    print(f"{len(list(out.glob('*.html')))} pages in {out.relative_to(ROOT)}" + (f", {sum(map(len, bad.values()))} bad links" if bad else ""))
    sys.exit(bool(bad))


if __name__ == "__main__": main()

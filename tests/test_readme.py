"The README is made from index.ipynb, lists every chapter, and its two commands are single lines"
import re
import sys

from book import CHAPTERS, ROOT

sys.path.insert(0, str(ROOT / "docs_site"))
import readme

TEXT = (ROOT / "README.md").read_text()


def test_up_to_date():
    for path, content in readme.build().items(): assert (ROOT / path).read_bytes() == content, f"{path} is stale: make export"


def test_every_chapter_is_listed():
    missing = [c.path.name for c in CHAPTERS if c.number and f"(nbs/{c.path.name})" not in TEXT]
    assert not missing, f"{missing}: make export"


def test_two_commands():
    generate, test = re.findall(r"^```sh\n(.*)\n```$", TEXT, re.M)
    assert generate.endswith('.venv/bin/qwen35-lit generate "Once upon a time Leo"')
    assert test.endswith(".venv/bin/nbdev_test && .venv/bin/pytest")
    assert all(c.startswith("python3 -m venv .venv && ") for c in (generate, test))

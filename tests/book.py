"The chapters, as the tests see them"
import re
from dataclasses import dataclass
from pathlib import Path

from fastcore.nbio import read_nb
from nbdev.processors import _default_exp

ROOT = Path(__file__).parent.parent
EXPORTS = {"export", "exports", "exporti"}


@dataclass(frozen=True)
class Chapter:
    path: Path   # the notebook
    module: str  # what it exports to, "" if nothing

    @property
    def number(self):
        "The two digits (and letter) of its name; index comes before everything"
        found = re.match(r"\d+[a-z]*", self.path.stem)
        return found[0] if found else ""

    @property
    def floor(self):
        "1 the model, 2 text, 3 engines, 4 seeing it; 10 the appendix, which only notebooks may use"
        return int(self.number[0]) + 1 if self.number else 0

    @property
    def cells(self): return read_nb(self.path).cells


def chapters():
    "Every notebook in reading order"
    paths = sorted(p for p in (ROOT / "nbs").glob("*.ipynb") if p.name[0] not in "_.")
    return [Chapter(p, _default_exp(read_nb(p)) or "") for p in paths]


CHAPTERS = chapters()
MODULES = {c.module: c for c in CHAPTERS if c.module}

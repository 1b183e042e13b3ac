"""Runs notebooks and stores what they print and draw: `python docs_site/execute.py nbs/05_delta_rule.ipynb ...` (none named: all).

`--check` stores nothing and names the cells whose text came out differently.
"""
import os
import sys
from pathlib import Path

from execnb.shell import CaptureShell
from fastcore.nbio import read_nb, write_nb

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def skip(cell):
    "Cells that are not code, or say that they are not to be run"
    return cell.cell_type != "code" or cell.directives.get("eval") == "false" or "notest" in cell.directives


def said(cell):
    "The text of a cell's outputs"
    outs = cell.get("outputs", [])
    texts = [o.text if o.output_type == "stream" else (o.get("data") or {}).get("text/plain", "") for o in outs]
    return "".join("".join(t) for t in texts)


def execute(path):
    "The notebook after a run from top to bottom, in its own folder; the first error ends it"
    nb, here = read_nb(path), Path.cwd()
    os.chdir(path.parent)
    sys.path.insert(0, str(ROOT))
    CaptureShell(path=str(path.parent), mpl_format="png").run_all(nb, exc_stop=True, preproc=skip)
    os.chdir(here)
    return nb


def main():
    paths = [Path(a).resolve() for a in sys.argv[1:] if not a.startswith("-")] or sorted((ROOT / "nbs").glob("*.ipynb"))
    changed = []
    for path in paths:
        before, after = {c.id: said(c) for c in read_nb(path).cells}, execute(path)
        changed += [f"{path.name}, cell {c.id}" for c in after.cells if not skip(c) and said(c) != before[c.id]]
        if "--check" not in sys.argv: write_nb(after, path)
    print(*changed, f"{len(paths)} notebooks run, the text of {len(changed)} cells changed", sep="\n")
    sys.exit("--check" in sys.argv and bool(changed))


if __name__ == "__main__": main()

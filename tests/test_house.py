"The rules of the house: who may import whom, how long things get, what a notebook must not store"
import ast
import re

import pytest
from book import CHAPTERS, EXPORTS, MODULES, ROOT

LIB = "qwen35_lit"
MODULE_LINES, CELL_LINES = 600, 30
# Numba compiles a kernel as one closure over its format, so a factory cannot be cut between its loops; they may be half as long again.
KERNELS, KERNEL_LINES = ("make_block", "make_matvec", "make_quad", "make_micro", "make_decode", "make_chunk", "moe_steps"), 45


def imported(tree):
    "The modules of the package that are imported as soon as a module is (an import inside a function comes later, and may look up)"
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)): continue
        if isinstance(node, ast.Import): yield from (a.name.split(".")[1] for a in node.names if a.name.startswith(f"{LIB}."))
        if isinstance(node, ast.ImportFrom):
            name = f"{LIB}.{node.module or ''}".rstrip(".") if node.level else node.module
            if name == LIB: yield from (a.name for a in node.names if a.name in MODULES)
            elif name.startswith(f"{LIB}."): yield name.split(".")[1]
        todo.extend(ast.iter_child_nodes(node))


def test_imported_sees_every_form():
    tree = ast.parse("import qwen35_lit.style\nfrom .style import *\nfrom qwen35_lit import style\n"
        "try: from . import style\nexcept ImportError: pass\ndef f(): import qwen35_lit.cli")
    assert list(imported(tree)) == ["style"] * 4


@pytest.mark.parametrize("name", MODULES)
def test_imports_look_down(name):
    "A module imports from earlier chapters of its floor and from the floors below; nobody imports the appendix"
    me = MODULES[name]
    for other in imported(ast.parse((ROOT / LIB / f"{name}.py").read_text())):
        assert other in MODULES, f"{name} imports {other}, which no chapter exports"
        chapter = MODULES[other]
        assert chapter.floor < 10, f"{name} imports {other}: chapters 9x are for notebooks only"
        assert chapter.number < me.number, f"{name} ({me.number}) imports {other} ({chapter.number}), which comes later"


def test_every_module_has_a_chapter():
    files = {p.stem for p in (ROOT / LIB).glob("*.py") if not p.stem.startswith("_")}
    assert files == set(MODULES)


def test_numbers_are_unique():
    numbers = [c.number for c in CHAPTERS]
    assert len(numbers) == len(set(numbers)), sorted(numbers)


@pytest.mark.parametrize("name", MODULES)
def test_module_length(name):
    assert len((ROOT / LIB / f"{name}.py").read_text().splitlines()) <= MODULE_LINES


def code_lines(cell): return [o for o in cell.source.splitlines() if o.strip() and not o.startswith("#|")]
def short(cell): return f"cell {cell.id}: {cell.source.strip()[:60]!r}"


@pytest.mark.parametrize("name", MODULES)
def test_cell_length(name):
    exported = [c for c in MODULES[name].cells if c.cell_type == "code" and EXPORTS & set(c.directives)]
    long = [c for c in exported if len(code_lines(c)) > CELL_LINES and not any(f"def {f}(" in c.source for f in KERNELS)]
    assert not [f"{short(c)}: {len(code_lines(c))} lines" for c in long]
    assert all(len(code_lines(c)) <= KERNEL_LINES for c in exported)


def stored(out):
    "What an output says in words"
    data = {k: v for k, v in (out.get("data") or {}).items() if k.startswith("text")}
    return str({k: v for k, v in out.items() if k != "data"}) + str(data)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.path.stem)
def test_stored_outputs(chapter):
    "No errors, no addresses, no paths of somebody's machine"
    private = re.compile(r"(?<![\w.])/(home|root|tmp|Users|var)/\w| at 0x[0-9a-f]{6}|" + re.escape(str(ROOT)))
    outputs = [(c, o) for c in chapter.cells for o in c.get("outputs", [])]
    assert not [short(c) for c, o in outputs if o.output_type == "error" or private.search(stored(o))]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.path.stem)
def test_opening(chapter):
    "The first cell is a title and one line under it: nbdev makes front matter of that cell and drops whatever else is in it"
    opens_well = bool(re.fullmatch(r"# \S.*\n+> \S.*", chapter.cells[0].source.strip()))
    assert opens_well, short(chapter.cells[0])


def mixes(cell):
    "Does it import and do something else as well?"
    if cell.cell_type != "code" or cell.source.lstrip().startswith(("%", "!")): return False
    kinds = {isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(cell.source).body if not isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return kinds == {True, False}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.path.stem)
def test_imports_stand_alone(chapter):
    "Building the pages runs every cell that imports, all of it, but nothing around it"
    assert not [short(c) for c in chapter.cells if mixes(c)]

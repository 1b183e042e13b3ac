"The notebooks' own tests again, this time against what was exported: a forgotten `#| export` fails here and nowhere else"
import importlib
import os

import matplotlib.pyplot as plt
import pytest
from book import EXPORTS, MODULES, ROOT
from execnb.shell import CaptureShell
from nbdev.config import get_config
from nbdev.test import nb_test_cells

FLAGS = get_config(ROOT).tst_flags.split()


def is_ours(cell): return not ((EXPORTS | {"default_exp"}) & cell.directives_.keys() or "nbdev_export" in cell.source)


@pytest.mark.parametrize("name", MODULES)
def test_inline(name, monkeypatch):
    chapter, module = MODULES[name], importlib.import_module(f"qwen35_lit.{name}")
    monkeypatch.chdir(chapter.path.parent)
    monkeypatch.setenv("IN_TEST", "1")
    shell = CaptureShell(chapter.path, profile=False)
    shell.user_ns.update({k: v for k, v in vars(module).items() if not k.startswith("__")})
    for cell in filter(is_ours, nb_test_cells(chapter.path, skip_flags=FLAGS)):
        shell.run_cell(cell.source)
        assert shell.exc is None, f"{chapter.path.name}, cell {cell.id}:\n{cell.source}\n\n{shell.exc!r}"
    plt.close("all")

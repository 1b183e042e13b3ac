"Ctrl-C while the command is still being imported, before `cli.main` can catch it: one word instead of a traceback"
import sys
from pathlib import PurePath


def is_command():
    "Is this process `qwen35-lit`, or `python -m qwen35_lit`?"
    name = (getattr(sys, "argv", None) or [""])[0]
    return PurePath(name).stem == "qwen35-lit" or name == "-m" and "qwen35_lit" in sys.orig_argv


def quiet(kind, error, trace):
    "Python's own hook for everything but Ctrl-C; the process then ends as Python ends it, which a shell sees as 130"
    if not issubclass(kind, KeyboardInterrupt): return sys.__excepthook__(kind, error, trace)
    if sys.stderr: print("interrupted", file=sys.stderr)


if is_command(): sys.excepthook = quiet

"""Fork in the middle of a run: the child goes on to the bits of its parent, also if another thread of the parent was in a step.

    python tests/fork_model.py MODEL ENGINE"""
import os
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from qwen35_lit import load


def in_child(f):
    "f() in a forked process: True if it returned True within a minute"
    pid = os.fork()
    if not pid:
        import signal
        signal.alarm(60)
        try: os._exit(0 if f() else 1)
        except BaseException as e: print(repr(e), file=sys.stderr); os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def main(path, engine):
    m = load(path, engine=engine, n_threads=2)      # two, so that there are threads which a fork leaves behind
    s = m.new_state(64)
    m.forward([257, 279, 284], s)
    expected = m.forward([283, 258], s.copy())
    same = lambda: np.array_equal(m.forward([283, 258], s.copy()), expected)
    assert in_child(same) and same() and in_child(lambda: in_child(same))
    stop = threading.Event()
    def busy():
        own = m.new_state(100_000)
        while not stop.is_set(): m.forward([5], own)
    thread = threading.Thread(target=busy)
    thread.start()
    try: assert all([in_child(same) for _ in range(5)])
    finally: stop.set(); thread.join()


main(*sys.argv[1:])

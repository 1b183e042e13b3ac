"""Run two models in one process for a while, from several threads, and see whether anything grows, drifts or gets mixed up.

    python tests/soak.py FOLDER ENGINE SECONDS MODEL MODEL

Each thread has states of its own. It reads random tokens in random pieces, alone and in batches, copies states, saves them to FOLDER and
goes on from the file, fills contexts to the end, is interrupted by raising taps, and compares what the state has become with a fresh
reading of the same tokens. Prints as JSON what was done and what was found."""
import gc
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from qwen35_lit import load
from qwen35_lit.config import ContextFullError

N_CTX = 200


def memory():
    "Resident megabytes"
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Worker(threading.Thread):
    def __init__(self, number, models, folder, exact, over):
        super().__init__(daemon=True)
        self.models, self.file, self.exact, self.over, self.rng = models, Path(folder) / f"{number}.state", exact, over, random.Random(number)
        self.tokens = self.checks = 0
        self.drift, self.error = 0., None

    def run(self):
        try:
            while not self.over.is_set(): self.life(self.rng.choice(self.models))
        except BaseException as e:
            self.error = f"{type(e).__name__}: {e}"
            raise

    def piece(self, m, most): return [self.rng.randrange(m.config.n_vocab) for _ in range(min(most, self.rng.choice([1, 1, 1, 2, 3, 7, 33, 70])))]

    def life(self, m):
        "One state, from empty to full"
        s, last = m.new_state(N_CTX), None
        while s.n_past < N_CTX and not self.over.is_set():
            t = self.piece(m, N_CTX - s.n_past)
            match self.rng.randrange(8):
                case 0: other = m.new_state(8); last = m.forward_batch([([1, 2], other), (t, s)], logits="last")[1]
                case 1: s.save(self.file); s = m.load_state(self.file); last = m.forward(t, s, logits="last")
                case 2: m.forward(t, s.copy(), logits="last"); last = m.forward(t, s, logits="last")
                case 3: self.accident(m, s, t); last = m.forward(t, s, logits="last")
                case _: last = m.forward(t, s, logits="last")
            self.tokens += len(t)
        if s.n_past == N_CTX:
            try: m.forward([1], s); raise AssertionError("a token too many")
            except ContextFullError: pass
        if s.n_past: self.compare(m, s, last)

    def accident(self, m, s, t):
        "A watcher raises somewhere in the middle; the state stays"
        kept, layer = s.copy(), self.rng.randrange(m.config.n_layer)
        def tap(name, i, value):
            if i == layer: raise KeyboardInterrupt
        try:
            with m.tapping(tap): m.forward(t, s)
            raise AssertionError("the tap was not asked")
        except KeyboardInterrupt: assert s == kept

    def compare(self, m, s, last):
        "The state that was stepped, saved, copied and interrupted against one that read all at once"
        fresh = m.new_state(N_CTX)
        logits = m.forward(s.tokens, fresh, logits="last")
        if self.exact: assert np.array_equal(logits, last) and s == fresh, "stepping and prefill differ in bits"
        self.drift = max(self.drift, float(np.abs(logits - last).max() / np.abs(logits).max()), float(np.abs(s.S - fresh.S).max() / np.abs(fresh.S).max()))
        self.tokens, self.checks = self.tokens + len(s.tokens), self.checks + 1


def main(folder, engine, seconds, *paths):
    models = [load(p, engine=engine, **({} if engine == "numpy" else dict(n_threads=1))) for p in paths]
    for m in models: m.forward([1, 2, 3] * 40, m.new_state(N_CTX)); m.forward([1], m.new_state(4))
    over, start = threading.Event(), time.monotonic()
    workers = [Worker(i, models, folder, engine != "numpy", over) for i in range(4)]
    for w in workers: w.start()
    sizes = []
    while time.monotonic() - start < seconds and not any(w.error for w in workers):
        time.sleep(min(1., seconds / 20))
        sizes.append(memory())
    files = len(list(Path("/proc/self/fd").iterdir()))
    over.set()
    for w in workers: w.join(120)
    third = len(sizes) // 3
    print(json.dumps(dict(engine=engine, seconds=round(time.monotonic() - start), tokens=sum(w.tokens for w in workers), checks=sum(w.checks for w in workers), drift=max(w.drift for w in workers),
        errors=[w.error for w in workers if w.error], stuck=sum(w.is_alive() for w in workers), files=files, memory=[round(np.median(sizes[third:2 * third]), 1), round(np.median(sizes[2 * third:]), 1)])))


if __name__ == "__main__": main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:])

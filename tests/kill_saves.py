"""Kill a process while it saves a state, again and again, and look what is in the file.

    python tests/kill_saves.py MODEL FOLDER KILLS

The child saves two states in turn, as fast as it can. Prints as JSON how often the file held the one or the other, how often neither
(that would be a loss), and how many kills hit the middle of a save (they leave a temporary file)."""
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from qwen35_lit import Qwen35Error, load


def child(states, file):
    while True:
        for s in states[::-1]: s.save(file)


def main(path, folder, kills):
    m, file = load(path, engine="numpy"), Path(folder) / "a.state"
    states = [m.new_state(2000) for _ in range(2)]
    for s, t in zip(states, (5, 9)): m.forward([t] * 1500, s, logits="last")
    states[0].save(file)
    said, rng, litter = dict(kills=0, old=0, new=0, lost=0, unfinished=0), random.Random(0), 0
    for _ in range(kills):
        pid = os.fork()
        if not pid: child(states, file)
        time.sleep(rng.uniform(.002, .2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said["kills"] += 1
        try: back = m.load_state(file)
        except Qwen35Error: back = None
        said["old" if back == states[0] else "new" if back == states[1] else "lost"] += 1
        now = len(list(file.parent.glob("*.part")) + list(file.parent.glob(".*.part")))
        said["unfinished"] += now > litter
        litter = now
    print(json.dumps(said))


if __name__ == "__main__": main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

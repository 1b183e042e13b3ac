"""Continue a saved state in this process.

    python tests/continue_state.py MODEL ENGINE FROM TO TOKENS

Reads TOKENS (a JSON list), saves the state to TO and the logits to TO.npy."""
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from qwen35_lit import load

path, engine, before, after, tokens = sys.argv[1:]
m = load(path, engine=engine)
s = m.load_state(before)
np.save(f"{after}.npy", m.forward(json.loads(tokens), s))
s.save(after)

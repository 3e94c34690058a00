"""python3 parts.py OUT KEYS: times each launch of prepared modules alone (10 in a CUDA graph), for forms of their text."""
import json, os, sys, traceback
import torch
from timing import MODS, graph_us, load
WARM = sys.argv[1] == "warm"
def forms(key):
    for kind in ("new", "flat"):
        p = f"{MODS}{key}_{kind}.py"
        if os.path.exists(p): yield kind, p
torch.set_grad_enabled(False)
found = {}
for key in sys.argv[2].split(","):
    old = load(f"{MODS}{key}_old.py"); torch.manual_seed(0); a = old.Model(*old.get_init_inputs()).cuda().eval()
    with torch.device("cuda"): x = old.get_inputs()
    want = a(*x); row = {} if WARM else {"eager": graph_us(lambda: a(*x))}
    for kind, p in forms(key):
        try:
            m = load(p); torch.manual_seed(0); b = m.ModelNew(*old.get_init_inputs()).cuda().eval(); b.load_state_dict(a.state_dict())
            calls, launch = [], m._Launch.__call__
            got = b(*x)
            if WARM: continue
            m._Launch.__call__ = lambda self, *t: (calls.append((self, t)), launch(self, *t))[1]
            b(*x); m._Launch.__call__ = launch
            row[kind] = {"whole": graph_us(lambda: b(*x)), "error": float((got - want).abs().max() / want.abs().max()),
                         "parts": [(c.kernel.__name__, c.grid[0], graph_us(lambda: launch(c, *t))) for c, t in calls]}
        except Exception as e:
            traceback.print_exc(); row[kind] = repr(e)[:200]
        torch.cuda.empty_cache()
    if WARM: continue
    found[key] = row; print(key, json.dumps(row), flush=True); json.dump(found, open(sys.argv[1], "w"))
    del x, want; torch.cuda.empty_cache()

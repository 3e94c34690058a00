"""Run in the repository root: .carry/exp/mods/KEY_{old,new}.py; keys level2/1 of today's shapes, c:level2/90 of CUDA-L1's."""
import sys, json, glob
from pathlib import Path
from kernelwright.records import Task
from kernelwright.rewrites.builtin import Workshop, Recipe, RULES
always = frozenset(r.name for r in RULES if r.always)
T = {f"level{r['level_id']}/{r['task_id']}": r["ref_code"] for r in map(json.loads, open(".carry/h100.json"))}
out = Path(".carry/exp/mods"); out.mkdir(exist_ok=True)
for key in sys.argv[1:]:
    if key.startswith("c:"): text = T[key[2:]]
    else:
        lev, n = key.split("/"); text = Path(glob.glob(f".carry/KernelBench/{lev}/{n}_*.py")[0]).read_text()
    w = Workshop.open(Task(id=key, source=text), "cuda")
    for half in (True, False):
        b = None
        for ch in (True, False):
            b = b or w.build(Recipe(always, fuse="all", tiled=True, half=half, channels=ch))
        k = key.replace(":", "").replace("/", "_")
        (out / f"{k}_{'new' if half else 'tf32'}.py").write_text(b.source); (out / f"{k}_old.py").write_text(text)
    print(key, b.techniques)

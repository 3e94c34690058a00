"""python modules.py RELEASE KERNELBENCH FORM KEYS: mods/KEY_FORM.py, KEY_tf32.py and KEY_old.py beside this file.

RELEASE is CUDA-L1's file for the H100, KERNELBENCH the folder of its levels. A key is level2/1, or c:level2/90 of CUDA-L1's.
FORM names the state of this repository, which prints the kernel in float16.
"""
import json, sys
from pathlib import Path
from kernelwright.records import Task
from kernelwright.rewrites.builtin import Workshop, Recipe, RULES
release, levels, form, *keys = sys.argv[1:]
always = frozenset(r.name for r in RULES if r.always)
T = {f"level{r['level_id']}/{r['task_id']}": r["ref_code"] for r in map(json.loads, open(release))}
out = Path(__file__).with_name("mods"); out.mkdir(exist_ok=True)
for key in keys:
    if key.startswith("c:"): text = T[key[2:]]
    else:
        lev, n = key.split("/"); text = next(Path(levels, lev).glob(f"{n}_*.py")).read_text()
    w = Workshop.open(Task(id=key, source=text), "cuda")
    k = key.replace(":", "").replace("/", "_"); (out / f"{k}_old.py").write_text(text)
    for half in (True, False):
        b = None
        for ch in (True, False):
            b = b or w.build(Recipe(always, fuse="all", tiled=True, half=half, channels=ch))
        (out / f"{k}_{form if half else 'tf32'}.py").write_text(b.source)
    print(key, b.techniques)

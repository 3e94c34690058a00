"""python3 knobs.py SECONDS OUT KEYS: times prepared modules for choices of tile, warps and stages of their convolution."""
import itertools, json, os, re, sys, time
from concurrent.futures import ProcessPoolExecutor
from timing import MODS, compiled, knobs_of, load, with_knobs
TMP = "/tmp/knobs"
def variants(key):
    source = open(f"{MODS}{key}_new.py").read()
    name, _, knobs = knobs_of(source)
    channels = knobs["tile"][0][1]
    each = int(re.search(rf"^_{name}_prepared.*_Prepared\(tf32, \d+, \d+, (\d+),", source, re.M)[1])
    tiles = [(p, channels, l) for p in (64, 128, 256) for l in ((32, 64) if each % 64 == 0 else (32, 64, 128)) if p * channels <= 128 * 256]
    for tile, warps, stages in itertools.product(tiles, (4, 8), (2, 3, 4)):
        if (tile[0] + channels) * tile[2] * 2 * stages > 220_000 or tile[0] * channels // (warps * 32) > 128 or tile[0] * channels // (warps * 32) < 8: continue
        if warps == 8 and tile[0] == 64 or stages > 2 and tile[2] >= each * 27 and each < 64: continue
        text = with_knobs(source, tile=tile, warps=warps, stages=stages)
        path = f"{TMP}/{key}_{tile[0]}_{tile[2]}_{warps}_{stages}.py"
        open(path, "w").write(text)
        yield (tile, warps, stages), path
def models(key):
    import torch
    old = load(f"{MODS}{key}_old.py")
    torch.manual_seed(0); a = old.Model(*old.get_init_inputs()).cuda().eval()
    with torch.device("cuda"): x = old.get_inputs()
    return old, a, x
def bench(f, n=4):
    import torch
    f(); torch.cuda.synchronize(); ts = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
    return sorted(ts)[n // 2]
def main():
    end = time.time() + float(sys.argv[1]); os.makedirs(TMP, exist_ok=True)
    keys = sys.argv[3].split(",")
    every = {key: list(variants(key)) for key in keys}
    print({k: len(v) for k, v in every.items()}, flush=True)
    with ProcessPoolExecutor(int(os.environ.get("JOBS", "14"))) as pool:
        failed = {p: e for p, e in pool.map(compiled, [p for v in every.values() for _, p in v]) if e}
    print("compiled", round(end - time.time()), "s left", failed, flush=True)
    if os.environ.get("COMPILE_ONLY"): return
    import torch
    torch.set_grad_enabled(False)
    found = {}
    for key in keys:
        old, a, x = models(key)
        eager, rows = bench(lambda: a(*x)), []
        try:
            tf = load(f"{MODS}{key}_tf32.py"); torch.manual_seed(0); b = tf.ModelNew(*old.get_init_inputs()).cuda().eval(); b.load_state_dict(a.state_dict())
            rows.append((round(bench(lambda: b(*x))), "tf32"))
        except Exception as e: print(key, "tf32", repr(e)[:200], flush=True)
        for knobs, path in every[key]:
            if time.time() > end or path in failed: continue
            try:
                new = load(path)
                torch.manual_seed(0); b = new.ModelNew(*old.get_init_inputs()).cuda().eval(); b.load_state_dict(a.state_dict())
                rows.append((round(bench(lambda: b(*x))), knobs))
            except Exception as e:
                rows.append((10**9, knobs, repr(e)[:100]))
        rows.sort(key=lambda r: r[0]); found[key] = {"eager_us": eager, "rows": rows}
        print(key, "eager", round(eager), rows[:6], "default", [r for r in rows if (r[1]) == None], flush=True)
        json.dump(found, open(sys.argv[2], "w"))
        del x; torch.cuda.empty_cache()
main()

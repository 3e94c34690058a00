"""Speed and error of the split-product template against cuBLAS's SGEMM, with its knobs tuned for each shape.

    python benchmarks/split_products.py --out results --seconds 480 --commit "$(git rev-parse HEAD)"
    python benchmarks/split_products.py --out /tmp/dry --dry     # no GPU: Triton's interpreter, tiny shapes

Needs torch and triton alone. Every choice of knobs is first compiled and run on a small product, in parallel processes. Then
each form's errors are compared with SGEMM's on several ranges of values. Then each shape is timed: all choices briefly, the
best three of each form at length. A timing is one replay of a CUDA graph that holds all launches of a call, with the L2
cache overwritten before it. `split_products.json` is rewritten after each step.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FuturesTimeout
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

TEMPLATE = Path(__file__).parents[1] / "src" / "kernelwright" / "rewrites" / "templates" / "split_product.py"
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "4096x4096x4096": (1, 4096, 4096, 4096),
    "8192x8192x8192": (1, 8192, 8192, 8192),
    "2048x2048x2048": (1, 2048, 2048, 2048),
    "16384x1024x1024": (1, 16384, 1024, 1024),
    "1024x1024x8192": (1, 1024, 1024, 8192),
    "1024x8192x8192": (1, 1024, 8192, 8192),
    "256x256x131072": (1, 256, 256, 131072),
    "128x512x1024x2048": (128, 512, 1024, 2048),
    "1024x512x512": (1, 1024, 512, 512),
    "128x1024x1024": (1, 128, 1024, 1024),
}
"""Batch, M, N and K by name, the most important first."""
DRY_SHAPES = {"96x80x160": (1, 96, 80, 160), "2x48x64x96": (2, 48, 64, 96)}
TILES = (
    # block_m, block_n, block_k, num_warps, num_stages
    (128, 128, 32, 8, 3),
    (128, 128, 32, 8, 4),
    (128, 128, 64, 8, 2),
    (128, 128, 64, 8, 3),
    (128, 64, 64, 4, 2),
    (128, 64, 64, 4, 3),
    (64, 128, 64, 4, 2),
    (64, 128, 64, 4, 3),
    (128, 64, 32, 4, 3),
    (64, 128, 32, 4, 4),
    (64, 64, 64, 4, 3),
    (64, 256, 32, 8, 3),
    (256, 64, 32, 8, 3),
)
"""Tiles that compile for sm_90 without spilling in at least one form."""
SPECIALISED_TILES = ((128, 128, 64, 4, 3), (128, 128, 64, 4, 2), (128, 128, 32, 4, 4), (128, 64, 64, 4, 3))
FLUSH_BYTES = 1 << 28
LEAST_SAMPLES = 31


def load(path: Path, name: str) -> ModuleType:
    """A module from its file, without the packages around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


template = load(TEMPLATE, "split_product_template")


def choices(forms: list[str], dry: bool) -> list[Any]:
    """Knobs to try, without split-K, which is chosen for each shape."""
    found: list[dict[str, Any]] = []
    for form in forms:
        if form == "wgmma":
            found += [{"form": form, **knobs} for knobs in template.WGMMA_CHOICES]
            continue
        for block_m, block_n, block_k, num_warps, num_stages in TILES[-3:-2] if dry else TILES:
            tile = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
            for chunk, joint, flat in ((block_k, True, False), (256, True, False), (256, True, True), (512, False, False)):
                found.append({"form": form, **tile, "chunk": chunk, "joint": joint, "flat": flat})
            if form == "tma" and not dry:
                found.append({"form": form, **tile, "chunk": block_k, "persistent": True})
                found.append({"form": form, **tile, "chunk": 256, "persistent": True})
        if form == "tma" and not dry:
            for block_m, block_n, block_k, num_warps, num_stages in SPECIALISED_TILES:
                tile = dict(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
                for chunk in (block_k, 256):
                    found += [
                        {"form": form, **tile, "chunk": chunk, "persistent": persistent, "specialised": True}
                        for persistent in (False, True)
                    ]
    knobs = [template.Knobs(**values) for values in found]
    return [one for one in knobs if template.unfit(one) is None]


def emitted(knobs: Any) -> ModuleType:
    """The module of one choice of knobs, from a file whose name depends on its text alone."""
    text = template.emit(knobs)
    name = "split_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    folder = Path(tempfile.gettempdir()) / "split_products"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return load(path, name)


def device() -> str:
    """Where to compute."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def relative_error(found: Any, exact: Any) -> float:
    """Frobenius norm of the difference over that of the exact result."""
    return float((found.double() - exact).norm() / exact.norm())


def try_out(values: dict[str, Any], small: tuple[int, int, int]) -> dict[str, Any]:
    """Compile one choice, run it on a small product, report its error and resources (in a process of its own)."""
    import torch

    start = time.perf_counter()
    torch.manual_seed(0)
    m, n, k = small
    try:
        module = emitted(template.Knobs(**values))
        a, b = torch.randn(m, k, device=device()), torch.randn(n, k, device=device())
        error = relative_error(module.launch(a, b), a.double() @ b.double().T)
        result: dict[str, Any] = {"error": error}
    # Compilers and drivers raise many types, and one refused choice must not end the others.
    except Exception as failure:  # noqa: BLE001
        return {"failure": f"{type(failure).__name__}: {failure}"[:600]}
    try:
        for cached in module.product_kernel.device_caches.values():
            for kernel in cached[0].values():
                result |= {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared_bytes": kernel.metadata.shared}
    except (AttributeError, IndexError, TypeError) as failure:
        result["resources"] = repr(failure)
    return result | {"seconds": round(time.perf_counter() - start, 2)}


def viable(knobs: list[Any], jobs: int, seconds: float, small: tuple[int, int, int]) -> list[dict[str, Any]]:
    """What `try_out` found for each choice; those that did not come to an end in time are failures."""
    if device() == "cpu":
        return [{"knobs": asdict(one)} | try_out(asdict(one), small) for one in knobs]
    results: dict[int, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(try_out, asdict(one), small): index for index, one in enumerate(knobs)}
    try:
        for future in as_completed(futures, timeout=seconds):
            try:
                results[futures[future]] = future.result()
            # A process that a kernel killed breaks the pool: its choices are failures.
            except Exception as failure:  # noqa: BLE001
                results[futures[future]] = {"failure": repr(failure)[:600]}
    except FuturesTimeout:
        print(f"only {len(results)} of {len(knobs)} choices were tried in {seconds:.0f} s", flush=True)
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    return [{"knobs": asdict(one)} | results.get(index, {"failure": "no time"}) for index, one in enumerate(knobs)]


class Timer:
    """Times calls by replays of a CUDA graph, with the L2 cache overwritten before each."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.flush = torch.empty(FLUSH_BYTES // 4, device=device()) if device() == "cuda" else None

    def __call__(self, call: Callable[[], Any], samples: int, seconds: float) -> list[float]:
        """Times of calls, in milliseconds: as many as asked for, or fewer once the time is over."""
        times = []
        start = time.perf_counter()
        if self.flush is None:
            for _ in range(2):
                before = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - before))
            return times
        torch = self.torch
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        while len(times) < samples and (len(times) < 3 or time.perf_counter() - start < seconds):
            batch = []
            for _ in range(min(8, samples - len(times))):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                self.flush.zero_()
                events[0].record()
                graph.replay()
                events[1].record()
                batch.append(events)
            torch.cuda.synchronize()
            times += [first.elapsed_time(last) for first, last in batch]
        return times


def ranges(dry: bool) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Operands by name: `a` (M, K) and `b` (N, K)."""
    import torch

    m, n, k, long = (48, 40, 128, 4096) if dry else (384, 320, 4096, 1 << 17)
    where = device()

    def normal(rows: int, length: int) -> Any:
        return torch.randn(rows, length, device=where)

    def rows_of_all_sizes(rows: int) -> Any:
        return normal(rows, k) * torch.logspace(-18, 15, rows, device=where)[:, None]

    def lognormal(rows: int, width: float) -> Any:
        return normal(rows, k) * normal(rows, k).mul(width).exp()

    def special() -> tuple[Any, Any]:
        a, b = normal(m, k), normal(n, k)
        a[3, 5], a[4, 6], a[9, 7], b[7, 9], b[8, 2] = float("inf"), -float("inf"), float("nan"), float("nan"), float("inf")
        b[20, :], b[21, 5] = 1.0, 0.0
        return a, b

    return {
        "normal": lambda: (normal(m, k), normal(n, k)),
        "uniform": lambda: (torch.rand(m, k, device=where), torch.rand(n, k, device=where)),
        "large": lambda: (normal(m, k) * 1e4, normal(n, k) * 1e4),
        "huge": lambda: (normal(m, k) * 1e17, normal(n, k) * 1e17),
        "tiny": lambda: (normal(m, k) * 1e-20, normal(n, k) * 1e-12),
        "denormal": lambda: (normal(m, k) * 1e-40, normal(n, k)),
        "rows of all sizes": lambda: (rows_of_all_sizes(m), rows_of_all_sizes(n)),
        "lognormal within rows": lambda: (lognormal(m, 2), lognormal(n, 2)),
        "absurd within rows": lambda: (lognormal(m, 12), normal(n, k)),
        "odd sizes": lambda: (normal(m - 7, k - 3), normal(n - 9, k - 3)),
        "transposed": lambda: (normal(k, m).T, normal(k, n).T),
        "Inf and NaN": special,
        "K = 512": lambda: (normal(m, min(k, 512)), normal(n, min(k, 512))),
        "K = 1024": lambda: (normal(m, min(k, 1024)), normal(n, min(k, 1024))),
        "K = 16384": lambda: (normal(m, min(long, 1 << 14)), normal(n, min(long, 1 << 14))),
        "longest K": lambda: (normal(256 if not dry else m, long), normal(256 if not dry else n, long)),
        "longest K, uniform": lambda: (torch.rand(m, long, device=where), torch.rand(n, long, device=where)),
    }


def errors(module: ModuleType, dry: bool) -> dict[str, dict[str, Any]]:
    """Errors of a module and of SGEMM on each range, over all and in the worst row."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    for name, operands in ranges(dry).items():
        torch.manual_seed(1)
        a, b = operands()
        ours, theirs = module.launch(a, b), a @ b.T
        if name == "Inf and NaN":
            same = bool((ours.isnan() == theirs.isnan()).all() and ((ours == theirs) | ~theirs.isinf()).all())
            whole = theirs.isfinite()
            close = bool(torch.allclose(ours[whole], theirs[whole], rtol=1e-3, atol=1e-3))
            found[name] = {"same": same and bool(ours.isfinite()[whole].all()), "close": close}
            continue
        exact = a.double() @ b.double().T
        row = [(one.double() - exact).norm(dim=1).div(exact.norm(dim=1)).max().item() for one in (ours, theirs)]
        mine, sgemm = relative_error(ours, exact), relative_error(theirs, exact)
        found[name] = {"error": mine, "sgemm": sgemm, "worst_row": row[0], "sgemm_worst_row": row[1]}
        found[name]["ratio"] = mine / sgemm if sgemm else None
    return found


def split_choices(batch: int, m: int, n: int, k: int, knobs: Any) -> list[int]:
    """Slices of K worth a trial: those that fill the multiprocessors once or twice."""
    tiles = batch * -(-m // knobs.block_m) * -(-n // knobs.block_n)
    if tiles >= 100 or knobs.persistent:
        return [1]
    return [s for s in (1, 2, 4, 8, 16, 32, 64) if s == 1 or (tiles * s <= 300 and k // s >= 256)][-3:]


def tune(shape: tuple[int, int, int, int], tried: list[dict[str, Any]], timer: Timer, seconds: float) -> dict[str, Any]:
    """Times of SGEMM and of the template's choices for one shape."""
    import torch

    batch, m, n, k = shape
    torch.manual_seed(2)
    a = torch.randn(*((batch,) if batch > 1 else ()), m, k, device=device())
    b = torch.randn(*((batch,) if batch > 1 else ()), n, k, device=device())
    operations = 2e-9 * batch * m * n * k
    exact = torch.matmul(a[:4].double(), b[:4].double().mT) if batch > 1 else a.double() @ b.double().T

    def error(out: Any) -> float:
        return relative_error(out[:4] if batch > 1 else out, exact)

    sgemm = timer(lambda: torch.matmul(a, b.mT), LEAST_SAMPLES, 2.0)
    base = statistics.median(sgemm)
    report: dict[str, Any] = {
        "shape": shape,
        "sgemm": {"ms": base, "tflops": operations / base, "error": error(torch.matmul(a, b.mT)), "raw_ms": sgemm},
        "screened": [],
        "best": {},
    }
    plans = [{**one["knobs"], "split_k": s} for one in tried for s in split_choices(*shape, template.Knobs(**one["knobs"]))]
    start = time.perf_counter()
    for index, plan in enumerate(plans):
        if time.perf_counter() - start > 0.75 * seconds:
            report["not_screened"] = len(plans) - index
            break
        row: dict[str, Any] = {"knobs": plan}
        try:
            module = emitted(template.Knobs(**plan))
            kept = halves_of(module, b, plan)
            row["ms"] = statistics.median(timer(lambda: module.launch(a, b, **kept), 5, 0.3))  # noqa: B023
            kept = {}
        # A refused choice is left out; an error that broke the device ends the shape.
        except Exception as failure:
            row["failure"] = f"{type(failure).__name__}: {failure}"[:300]
            if "illegal" in row["failure"] or "CUDA error" in row["failure"]:
                raise
        report["screened"].append(row)
    timed = [row for row in report["screened"] if "ms" in row]
    for form in sorted({row["knobs"]["form"] for row in timed}):
        best = sorted((row for row in timed if row["knobs"]["form"] == form), key=lambda row: row["ms"])[:3]
        finals = [final(row["knobs"], a, b, timer, operations, base, error) for row in best]
        report["best"][form] = sorted(finals, key=lambda row: row["ms"])
    return report


def halves_of(module: ModuleType, b: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """What the module's split makes of B, to be kept between calls; the form `wgmma` keeps nothing."""
    if plan["form"] == "wgmma":
        return {}
    return {"halves_b": module.split(b.reshape(-1, *b.shape[-2:]), plan["form"] != "inline")}


def final(plan: dict[str, Any], a: Any, b: Any, timer: Timer, operations: float, base: float, error: Any) -> dict[str, Any]:
    """One choice at length: with B's halves kept, with both operands split in the call, and the split of A alone.

    In the form `wgmma` each call splits both operands, so that the first two times are of the same.
    """
    import torch

    module = emitted(template.Knobs(**plan))
    whole = a.reshape(-1, *a.shape[-2:])
    halves_b = halves_of(module, b, plan)
    kept = timer(lambda: module.launch(a, b, **halves_b), LEAST_SAMPLES, 2.0)
    fresh = timer(lambda: module.launch(a, b), LEAST_SAMPLES, 2.0)
    halves = plan["form"] in ("split", "tma")
    split = [] if plan["form"] == "wgmma" else timer(lambda: module.split(whole, halves), 11, 0.5)
    out = module.launch(a, b)
    again = module.launch(a, b)
    ms, fresh_ms = statistics.median(kept), statistics.median(fresh)
    return {
        "knobs": plan,
        "ms": ms,
        "tflops": operations / ms,
        "speedup": base / ms,
        "fresh_ms": fresh_ms,
        "fresh_speedup": base / fresh_ms,
        "split_a_ms": statistics.median(split) if split else None,
        "error": error(out),
        "repeatable": bool(torch.equal(out, again)),
        "raw_ms": kept,
        "fresh_raw_ms": fresh,
    }


def environment(commit: str) -> dict[str, Any]:
    """Where and with what the numbers were made."""
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0], "commit": commit}
    if device() == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
        smi = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
        found |= {"gpu": torch.cuda.get_device_name(), "nvidia_smi": smi, "cuda": torch.version.cuda}
    return found


def write_report(path: Path, report: dict[str, Any], *, indent: int | None = None) -> None:
    """Write a report as JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=indent), encoding="utf-8")
    partial.replace(path)


def quickest(tried: list[dict[str, Any]], screened: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The quickest choices of each form, in turns, and those with the smallest tiles, which small products need."""
    times = {json.dumps(row["knobs"]): row["ms"] for row in screened if "ms" in row}
    forms: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(tried, key=lambda one: times.get(json.dumps({**one["knobs"], "split_k": 1}), float("inf"))):
        forms.setdefault(one["knobs"]["form"], []).append(one)
    kept = []
    for ranked in forms.values():
        small = [one for one in ranked[10:] if one["knobs"]["block_m"] * one["knobs"]["block_n"] <= 8192]
        kept.append(ranked[:10] + small[:4])
    return [one for turn in itertools.zip_longest(*kept) for one in turn if one is not None]


def main() -> None:
    """Run all steps within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of split_products.json")
    parser.add_argument("--seconds", type=float, default=480.0, help="time for all steps")
    parser.add_argument("--commit", default="", help="commit of the checkout, for the record")
    parser.add_argument("--forms", default="wgmma,tma,split,mixed,inline", help="forms to try, with commas between")
    parser.add_argument("--shapes", default="", help="shapes to time, with commas between; all by default")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    parser.add_argument("--dry", action="store_true", help="no GPU: Triton's interpreter and tiny shapes")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(options.commit), "tried": [], "errors": {}, "shapes": {}}

    def save() -> None:
        report["seconds"] = round(time.perf_counter() - start, 1)
        write_report(options.out / "split_products.json", report)

    shapes = DRY_SHAPES if options.dry else SHAPES
    wanted = {name: shapes[name] for name in options.shapes.split(",") if name} or shapes
    forms = [form for form in options.forms.split(",") if not (options.dry and form == "wgmma")]
    knobs = choices(forms, options.dry)
    small = (96, 80, 160) if options.dry else (512, 512, 2048)
    print(f"{len(knobs)} choices of knobs", flush=True)
    # The kernels that hang are most likely those written by hand, so these are tried apart and before all others.
    for part in ([one for one in knobs if one.form == "wgmma"], [one for one in knobs if one.form != "wgmma"]):
        if part:
            limit = (0.15 if part[0].form == "wgmma" else 0.25) * options.seconds
            report["tried"] += viable(part, min(options.jobs, len(part)), limit, small)
    save()
    good = [one for one in report["tried"] if one.get("error", 1.0) < 3e-6 and one.get("spills", 0) <= 64]
    print(f"{len(good)} of them are exact and do not spill, {time.perf_counter() - start:.0f} s", flush=True)
    for one in report["tried"]:
        if one not in good:
            print("  left out", {name: value for name, value in one.items() if name != "knobs"}, one["knobs"], flush=True)
    for form in forms:
        for joint in (True, False):
            first = next((one for one in good if (one["knobs"]["form"], one["knobs"]["joint"]) == (form, joint)), None)
            if first is None or not (joint or form == "split"):
                continue
            name = f"{form}, {'one accumulator' if joint else 'two accumulators'}, chunk {first['knobs']['chunk']}"
            report["errors"][name] = errors(emitted(template.Knobs(**first["knobs"])), options.dry)
            save()
            for kind, row in report["errors"][name].items():
                print(f"  {name}: {kind}: {row}", flush=True)
    timer = Timer()
    for index, (name, shape) in enumerate(wanted.items()):
        left = options.seconds - (time.perf_counter() - start)
        if left < 5:
            print(f"no time for {name}", flush=True)
            continue
        try:
            share = 0.9 * left * (2 if index < 2 else 1) / (len(wanted) - index + 2)
            report["shapes"][name] = tune(shape, good, timer, share)
            if index == 0:
                good = quickest(good, report["shapes"][name]["screened"])
        except Exception:  # noqa: BLE001
            report["shapes"][name] = {"failure": traceback.format_exc()}
            print(traceback.format_exc(), flush=True)
            continue
        finally:
            save()
            if device() == "cuda":
                torch.cuda.empty_cache()
        print_shape(name, report["shapes"][name])
    print(f"done in {time.perf_counter() - start:.0f} s", flush=True)


def print_shape(name: str, report: dict[str, Any]) -> None:
    """The result of one shape, a line for SGEMM and one for each form."""
    sgemm = report["sgemm"]
    print(f"{name}: SGEMM {sgemm['ms']:.4f} ms {sgemm['tflops']:.1f} TFLOP/s error {sgemm['error']:.2e}", flush=True)
    for form, rows in report["best"].items():
        row = rows[0]
        print(
            f"  {form}: {row['ms']:.4f} ms {row['tflops']:.1f} TFLOP/s, {row['speedup']:.2f} x SGEMM "
            f"(fresh {row['fresh_speedup']:.2f} x, split of A {row['split_a_ms']} ms) error {row['error']:.2e} "
            f"{row['knobs']}",
            flush=True,
        )


if __name__ == "__main__":
    main()

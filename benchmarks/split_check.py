"""Checks the split product in CUDA C++ on one GPU: errors, Inf and NaN, and where the time of a call goes.

    PYTHONPATH=src python benchmarks/split_check.py OUT

Needs torch, numpy and nvcc, and Triton for one comparison. Each case runs in a process of its own, so that an illegal access
spoils one case. Kernels are compiled first, in parallel; then correctness is checked, four cases at a time; then shapes are
timed, one at a time. `OUT/split_check.json` is rewritten after each case. It takes at most 120 s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from split_products import FLUSH_BYTES, load, template, write_report

EPILOGUES: dict[str, tuple[Any, ...]] = {
    "none": (),
    "bias relu": (template.bias(), template.RELU),
    "bias gelu residual": (template.bias(), template.GELU, template.residual()),
    "others": (template.scale(2.0), template.leaky_relu(0.1), template.residual(), template.SIGMOID, template.SWISH),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product: its sizes, what its values are like, how operands lie, and its epilogue."""

    m: int = 512
    n: int = 512
    k: int = 1024
    batch: int = 0
    """Products of two batches; 0 for two matrices."""
    values: str = "normal"
    layout: str = "rr"
    """Of A and B: `r` where the values of a sum lie side by side, `c` where those of other sums do."""
    epilogue: str = "none"
    rows: int = 0
    """Size of a further dimension of A before M, which B does not have."""
    knobs: tuple[tuple[str, Any], ...] = ()
    """Other knobs than those for these sizes."""

    def made(self) -> Any:
        """The knobs."""
        sizes = (max(self.batch, 1), self.m * max(self.rows, 1), self.n, self.k)
        return replace(template.chosen("wgmma", *sizes), **dict(self.knobs))


CHECKS = {
    "plain": Case(),
    "odd sizes": Case(m=385, n=311, k=1021, layout="cc", epilogue="bias relu"),
    "odd sizes, rows": Case(m=385, n=311, k=1021, epilogue="bias relu"),
    "columns": Case(m=640, n=512, k=2048, layout="cc"),
    "batches": Case(batch=3, m=320, n=192, k=512, layout="rc", epilogue="bias gelu residual"),
    "ranges": Case(values="ranges", layout="rc"),
    "tiny": Case(values="tiny", k=4096),
    "wide": Case(values="wide", m=300, n=260),
    "Inf and NaN": Case(values="special", layout="rc", epilogue="bias relu"),
    "Inf and NaN, slices": Case(values="special", m=256, n=256, k=16384, layout="rr"),
    "Inf and NaN in batches": Case(values="special", batch=2, m=256, n=300, layout="cr"),
    "long sums": Case(m=256, n=256, k=131072, layout="rc", epilogue="bias gelu residual"),
    "other steps": Case(rows=4, m=256, n=768, epilogue="others"),
    "192 columns": Case(m=8192, n=4096, k=1024, epilogue="bias relu"),
    "large, 128 columns": Case(m=4096, n=2048, k=1024, layout="rc", epilogue="bias gelu residual"),
    "uniform": Case(values="uniform", m=1024, n=1024, k=4096),
}
TIMES = {
    "4096x4096x4096": Case(m=4096, n=4096, k=4096, layout="rc"),
    "16384x1024x1024": Case(m=16384, n=1024, k=1024, layout="rc"),
    "1024x8192x8192 linear": Case(m=1024, n=8192, k=8192, epilogue="bias relu"),
    "128x512x1024x2048": Case(batch=128, m=512, n=2048, k=1024, layout="rc"),
    "1024x1024x1024 linear": Case(m=1024, n=1024, k=1024, epilogue="bias relu"),
}


def emitted(text: str) -> ModuleType:
    """The module of a text, from a file whose name depends on its text alone."""
    name = "split_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "split_check"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return load(path, name)


def texts_of(case: Case, timed: bool) -> dict[str, str]:
    """Texts of the modules that a case runs; a timed one also without overlapping kernels."""
    text = template.emit(case.made(), EPILOGUES[case.epilogue])
    found = {"overlap": text}
    if timed:
        found["no overlap"] = text.replace("#define OVERLAP 1", "#define OVERLAP 0")
    return found


def operands(case: Case, where: str) -> tuple[Any, Any, list[Any]]:
    """A, B as (N, K), and the tensors of the epilogue."""
    import torch

    torch.manual_seed(1)

    def values(rows: int, side: str, lead: tuple[int, ...]) -> Any:
        x = torch.randn(*lead, rows, case.k, device=where)
        if case.values == "uniform":
            x = torch.rand_like(x)
        elif case.values == "ranges":
            x *= torch.logspace(-22, 15, rows, device=where)[:, None]
        elif case.values == "tiny":
            x *= 1e-39 if side == "a" else 1.0
        elif case.values == "wide":
            x *= torch.exp(9 * torch.randn_like(x))
        elif case.values == "special":
            x[..., 3, 7], x[..., 200, 9], x[..., 9, 0] = float("inf"), float("nan"), -float("inf")
        return x.mT.contiguous().mT if case.layout["ab".index(side)] == "c" else x

    lead = (case.batch,) if case.batch else ()
    a = values(case.m, "a", (case.rows,) if case.rows else lead)
    b = values(case.n, "b", lead)
    shapes = {"columns": (case.n,), "output": (*a.shape[:-1], case.n)}
    fragments = EPILOGUES[case.epilogue]
    return a, b, [torch.randn(shapes[one.shape], device=where) for one in fragments if one.tensor]


def check(case: Case) -> dict[str, Any]:
    """Errors of a case beside those of SGEMM, and whether calls are alike."""
    import torch

    module = emitted(texts_of(case, False)["overlap"])
    a, b, rest = operands(case, "cuda")
    with torch.no_grad():
        takes = module.takes(a, b, *rest)
        ours, theirs = module.launch(a, b, *rest), module.eager(a, b, *rest)
        exact = module.eager(a.double(), b.double(), *[one.double() for one in rest])
        again = all(torch.equal(ours.nan_to_num(), module.launch(a, b, *rest).nan_to_num()) for _ in range(5))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            aside = module.launch(a, b, *rest)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = module.launch(a, b, *rest)
        graph.replay()
        torch.cuda.synchronize()
    result: dict[str, Any] = {"knobs": asdict(case.made()), "takes": takes, "repeatable": again}
    result["on a stream"] = bool(torch.equal(ours.nan_to_num(), aside.nan_to_num()))
    result["in a graph"] = bool(torch.equal(ours.nan_to_num(), replayed.nan_to_num()))
    known = theirs.isfinite() & exact.isfinite()
    result["same Inf and NaN"] = bool(
        (ours.isnan() == theirs.isnan()).all() and (ours == theirs)[theirs.isinf()].all() and ours[known].isfinite().all()
    )
    result["special values"] = int((~known).sum())
    # Each element against the size of what was added for it.
    size = a.double().nan_to_num(0, 0, 0).norm(dim=-1)[..., None] * b.double().nan_to_num(0, 0, 0).norm(dim=-1)[..., None, :]
    for name, found in (("ours", ours), ("sgemm", theirs)):
        difference = (found.double() - exact)[known]
        result[f"{name}: error"] = (difference.norm() / exact[known].norm()).item()
        result[f"{name}: worst element"] = (difference.abs() / (size + 1e-37)[known]).max().item()
    result["ratio"] = result["ours: error"] / result["sgemm: error"] if result["sgemm: error"] else None
    sound = result["ours: error"] < max(3 * result["sgemm: error"], 5e-7) and result["same Inf and NaN"] and again
    result["passed"] = bool(sound and result["on a stream"] and result["in a graph"])
    return result


def times_of(call: Callable[[], Any], flush: Any) -> dict[str, float]:
    """Times of a call in milliseconds or microseconds, by how warm caches and host are."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    cold: dict[str, list[float]] = {"cold, events ms": [], "cold, wall ms": [], "cold, host us": []}
    for _ in range(15):
        flush.zero_()
        torch.cuda.synchronize()
        time.sleep(0.002)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start = time.perf_counter()
        events[0].record()
        call()
        host = time.perf_counter()
        events[1].record()
        torch.cuda.synchronize()
        cold["cold, wall ms"].append(1e3 * (time.perf_counter() - start))
        cold["cold, host us"].append(1e6 * (host - start))
        cold["cold, events ms"].append(events[0].elapsed_time(events[1]))
    found = {name: statistics.median(values) for name, values in cold.items()}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    # The GPU waits while all calls are queued, so that the host's time does not count.
    torch.cuda._sleep(40_000_000)
    events[0].record()
    start = time.perf_counter()
    for _ in range(20):
        call()
    found["warm, host us"] = 1e6 * (time.perf_counter() - start) / 20
    events[1].record()
    torch.cuda.synchronize()
    found["kernels ms"] = events[0].elapsed_time(events[1]) / 20
    return found


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    return {event.key[:60]: round(event.device_time_total / 5, 2) for event in found.key_averages()}


def measure(case: Case) -> dict[str, Any]:
    """Times of a shape: SGEMM and what follows it, the form `wgmma` with and without overlap, and the form `tma`."""
    import torch

    flush = torch.empty(FLUSH_BYTES // 4, device="cuda")
    a, b, rest = operands(case, "cuda")
    modules = {name: emitted(text) for name, text in texts_of(case, True).items()}
    tma = template.chosen("tma", max(case.batch, 1), case.m, case.n, case.k)
    result: dict[str, Any] = {"knobs": asdict(case.made())}
    with torch.no_grad():
        result["sgemm"] = times_of(lambda: modules["overlap"].eager(a, b, *rest), flush)
        for name, module in modules.items():
            result[name] = times_of(lambda: module.product(a, b, *rest), flush)  # noqa: B023
            print(json.dumps(result), flush=True)
        for name, call in (("sgemm", modules["overlap"].eager), ("overlap", modules["overlap"].product)):
            try:
                result[name]["kernels us"] = kernels_of(lambda: call(a, b, *rest))  # noqa: B023
            except (RuntimeError, AttributeError, ImportError) as failure:
                result[name]["kernels us"] = repr(failure)[:200]
        print(json.dumps(result), flush=True)
        try:
            triton = emitted(template.emit(tma, EPILOGUES[case.epilogue]))
            result["tma"] = times_of(lambda: triton.product(a, b, *rest), flush)
        # Triton raises many types, and the comparison is not needed.
        except Exception as failure:  # noqa: BLE001
            result["tma"] = repr(failure)[:200]
    result["speedup, cold events"] = result["sgemm"]["cold, events ms"] / result["overlap"]["cold, events ms"]
    result["speedup, kernels"] = result["sgemm"]["kernels ms"] / result["overlap"]["kernels ms"]
    return result


def in_process(kind: str, name: str, seconds: float) -> dict[str, Any]:
    """What a process of its own found for a case: the last line that it printed."""
    command = [sys.executable, __file__, "-", "--kind", kind, "--case", name]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        output, failure = done.stdout, done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        output, failure = late.stdout or "", f"no end after {seconds:.0f} s"
        output = output.decode() if isinstance(output, bytes) else output
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if failure:
        found["failure"] = failure
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def compile_all() -> dict[str, Any]:
    """Compile every text that a case needs, in parallel; seconds, or what nvcc said, by the text's first case."""
    texts: dict[str, str] = {}
    for timed, cases in ((True, TIMES), (False, CHECKS)):
        for name, case in cases.items():
            for kind, text in texts_of(case, timed).items():
                texts.setdefault(text, f"{name}, {kind}")

    def built(text: str) -> str | float:
        start = time.perf_counter()
        module = emitted(text)
        try:
            module.library(module.product.head)
        except (RuntimeError, OSError) as failure:
            return str(failure)[:600]
        return round(time.perf_counter() - start, 1)

    with ThreadPoolExecutor(12) as pool:
        return dict(zip(texts.values(), pool.map(built, texts), strict=True))


@contextmanager
def saved(path: Path, report: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A function that writes the report."""

    def save() -> None:
        write_report(path, report, indent=1)

    try:
        yield save
    finally:
        save()


def main() -> None:
    """Run all cases within the time, or one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of split_check.json")
    parser.add_argument("--seconds", type=float, default=115.0, help="time for all cases")
    parser.add_argument("--kind", choices=("check", "time"), help="run one case of this kind in this process")
    parser.add_argument("--case", help="name of that case")
    options = parser.parse_args()
    if options.kind:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        print(
            json.dumps(check(CHECKS[options.case]) if options.kind == "check" else measure(TIMES[options.case])), flush=True
        )
        return
    start = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"compiled": {}, "checks": {}, "times": {}}

    def left() -> float:
        return float(options.seconds - (time.perf_counter() - start))

    with saved(options.out / "split_check.json", report) as save:
        report["compiled"] = compile_all()
        save()
        print(f"compiled in {time.perf_counter() - start:.0f} s: {report['compiled']}", flush=True)
        with ThreadPoolExecutor(4) as pool:
            waiting = {pool.submit(in_process, "check", name, 40): name for name in CHECKS}
            for one in as_completed(waiting):
                report["checks"][waiting[one]] = one.result()
                print(waiting[one], one.result(), flush=True)
                save()
        for name in TIMES:
            if left() < 8:
                report["times"][name] = {"failure": "no time"}
                continue
            report["times"][name] = in_process("time", name, left())
            print(name, report["times"][name], flush=True)
            save()
        passed = [name for name, found in report["checks"].items() if found.get("passed")]
        print(f"{len(passed)} of {len(CHECKS)} checks passed, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

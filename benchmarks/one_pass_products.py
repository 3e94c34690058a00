"""Speed and error of the template `one_pass_product` against cuBLAS's SGEMM, for each of its choices of knobs.

    python benchmarks/one_pass_products.py --out results --seconds 120 --commit "$(git rev-parse HEAD)"
    python benchmarks/one_pass_products.py --out /tmp/dry --dry     # no GPU: Triton's interpreter, tiny shapes

Every choice is first compiled in parallel processes. Then each shape is timed as split_products.py times them: replays of a
CUDA graph that holds all launches of a call, with the L2 cache overwritten before each. Last, the errors of each precision
are compared with SGEMM's on several ranges of values. `one_pass_products.json` is rewritten after each step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from split_products import TEMPLATE, Timer, device, environment, errors, load, relative_error, write_report

template = load(TEMPLATE.with_name("one_pass_product.py"), "one_pass_product_template")
Shape = tuple[int, int, int, int, str]
SHAPES: dict[str, Shape] = {
    "16384x16384x32": (1, 16384, 16384, 32, "rows"),
    "16384x16384x16": (1, 16384, 16384, 16, "rows"),
    "256x1x131072": (1, 256, 1, 131072, "rows"),
    "128x128x512x256": (128, 128, 512, 256, "rows"),
    "256x256x131072": (1, 256, 256, 131072, "rows"),
    "1024x512x1024": (1, 1024, 512, 1024, "columns"),
    "128x1024x4096": (1, 128, 1024, 4096, "columns"),
    "16384x64x64": (1, 16384, 64, 64, "columns"),
    "2048x2048x2048": (1, 2048, 2048, 2048, "rows"),
    "4096x4096x4096": (1, 4096, 4096, 4096, "rows"),
}
"""Batch, M, N and K by name, and how the right operand is stored: by rows, as in `a @ b`, or by columns, as a Linear's."""
DRY_SHAPES = {"48x32x64": (1, 48, 32, 64, "rows"), "2x20x1x300": (2, 20, 1, 300, "columns")}
SAMPLES = 15


def emitted(folder: Path) -> ModuleType:
    """The template's module: one text serves all knobs."""
    path = folder / "one_pass_emitted.py"
    text = template.emit(template.OnePassKnobs())
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return load(path, "one_pass_emitted")


def operands(batch: int, m: int, n: int, k: int, stored: str) -> tuple[Any, Any]:
    """Left operand, and the right one's columns as rows."""
    import torch

    torch.manual_seed(0)
    several = (batch,) if batch > 1 else ()
    a = torch.randn(*several, m, k, device=device())
    b = torch.randn(*several, *((k, n) if stored == "rows" else (n, k)), device=device())
    return a, b.mT if stored == "rows" else b


def product(module: ModuleType, a: Any, b: Any, knobs: dict[str, Any]) -> Any:
    """The product by the template's kernel, its parts added."""
    found = module.launch(a, b, knobs)
    return found.sum(0) if knobs["split_k"] > 1 else found


def compiled(folder: Path, shape: Shape, knobs: dict[str, Any]) -> str | None:
    """Compile and run one choice in a process of its own; how it failed."""
    try:
        import torch

        a, b = operands(*shape)
        emitted(folder).launch(a, b, knobs)
        if device() == "cuda":
            torch.cuda.synchronize()
    # Compilers and drivers raise many types, and one refused choice must not end the others.
    except Exception as failure:  # noqa: BLE001
        return f"{type(failure).__name__}: {failure}"[:400]
    return None


def tried(
    compile_one: Callable[[Path, Any, dict[str, Any]], str | None],
    folder: Path,
    shapes: Mapping[str, Any],
    plans: Sequence[tuple[str, dict[str, Any]]],
    jobs: int,
    per_process: int | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Choices of knobs by shape, each with how it failed; by so many processes, or with 0 in this one.

    `per_process`: choices after which a process ends; with 1 a choice that makes the GPU unusable fails alone.
    """
    began = time.perf_counter()
    if jobs:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=per_process) as pool:
            futures = [pool.submit(compile_one, folder, shapes[name], knobs) for name, knobs in plans]
            failures = [future.result() for future in futures]
    else:
        failures = [compile_one(folder, shapes[name], knobs) for name, knobs in plans]
    failed = sum(one is not None for one in failures)
    print(f"{len(plans)} choices, {failed} failed, {time.perf_counter() - began:.0f} s", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for (name, knobs), failure in zip(plans, failures, strict=True):
        rows.setdefault(name, []).append({"knobs": knobs, "failure": failure})
    return rows


def timed(module: ModuleType, shape: Shape, rows: list[dict[str, Any]], timer: Timer) -> dict[str, Any]:
    """Times and errors of SGEMM and of the choices that compiled."""
    import torch

    a, b = operands(*shape)
    exact = torch.matmul(a[:4].double(), b[:4].double().mT) if shape[0] > 1 else None
    exact = a[:256].double() @ b.double().mT if exact is None else exact

    def error(out: Any) -> float:
        return relative_error(out[:4] if shape[0] > 1 else out[:256], exact)

    sgemm = timer(lambda: torch.matmul(a, b.mT), SAMPLES, 1.0)
    base = statistics.median(sgemm)
    report: dict[str, Any] = {"sgemm": {"ms": base, "error": error(torch.matmul(a, b.mT)), "raw_ms": sgemm}, "choices": []}
    for row in rows:
        knobs = row["knobs"]
        if row["failure"] is None:
            times = timer(lambda: product(module, a, b, knobs), SAMPLES, 0.5)  # noqa: B023
            ms = statistics.median(times)
            row = row | {"ms": ms, "speedup": base / ms, "error": error(product(module, a, b, knobs)), "raw_ms": times}
        report["choices"].append(row)
    return report


class Fixed:
    """The module with knobs that stay, as `errors` calls it."""

    def __init__(self, module: ModuleType, knobs: dict[str, Any]) -> None:
        self._module, self._knobs = module, knobs

    def launch(self, a: Any, b: Any) -> Any:
        """The product."""
        return product(self._module, a, b, self._knobs)


def main() -> None:
    """Run all steps within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of one_pass_products.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="time after which nothing more is begun")
    parser.add_argument("--commit", default="", help="commit of the checkout, for the record")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--dry", action="store_true", help="no GPU: Triton's interpreter and tiny shapes")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(options.commit), "shapes": {}, "errors": {}}

    def save() -> None:
        report["seconds"] = round(time.perf_counter() - began, 1)
        write_report(options.out / "one_pass_products.json", report)

    shapes = DRY_SHAPES if options.dry else SHAPES
    plans = [(name, asdict(one)) for name, shape in shapes.items() for one in template.alternatives(*shape[:4])]
    if options.dry:
        plans = [(name, knobs | {"block_k": min(32, knobs["block_k"])}) for name, knobs in plans[::3]]
    module = emitted(options.out)
    rows = tried(compiled, options.out, shapes, plans, 0 if options.dry else options.jobs)
    timer = Timer()
    for name, shape in shapes.items():
        if time.perf_counter() - began > options.seconds:
            print(f"no time for {name}", flush=True)
            continue
        report["shapes"][name] = found = timed(module, shape, rows[name], timer)
        save()
        print(f"{name}: SGEMM {found['sgemm']['ms']:.4f} ms, error {found['sgemm']['error']:.2e}", flush=True)
        for row in sorted(found["choices"], key=lambda row: row.get("ms", 1e9)):
            said = f"{row['ms']:.4f} ms, {row['speedup']:.2f} x, error {row['error']:.2e}" if "ms" in row else row["failure"]
            print("  ", said, *row["knobs"].values(), flush=True)
    worked = {row["knobs"]["precision"] for found in rows.values() for row in found if row["failure"] is None}
    for precision in template.PRECISIONS:
        if precision in worked and time.perf_counter() - began < options.seconds:
            small = {"block_m": 16, "block_n": 16, "num_warps": 4} if options.dry else {"block_n": 64, "num_warps": 4}
            fixed = Fixed(module, asdict(replace(template.OnePassKnobs(), precision=precision, **small)))
            report["errors"][precision] = errors(fixed, options.dry)
            save()
            for kind, row in report["errors"][precision].items():
                print(f"  {precision}: {kind}: {row}", flush=True)
    save()
    print(f"done in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Speed and error of the template `attention` against PyTorch's attention, for each of its choices of knobs.

    python benchmarks/attention_tiles.py --out results --seconds 100 --commit "$(git rev-parse HEAD)"
    python benchmarks/attention_tiles.py --out /tmp/dry --dry     # no GPU: Triton's interpreter, tiny shapes

Every choice first runs once at full size, in a process of its own: an illegal access leaves a process without a GPU. Then
each shape is timed, in a process of its own too, as split_products.py times them: replays of a CUDA graph that holds all
launches of a call, with the L2 cache overwritten before each. Beside the choices these are softmax attention as modules
write it, and `F.scaled_dot_product_attention` with the kernel that PyTorch takes. Errors are those of one head of the first
and last sequence against float64. `attention_tiles.json` is rewritten after each shape.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from one_pass_products import tried
from split_products import TEMPLATE, Timer, device, environment, load, relative_error, write_report

template = load(TEMPLATE.with_name("attention.py"), "attention_template")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one attention.

    Attributes:
        hides: `nothing`; `later` keys, by the flag of a causal attention; `later by mask`, by a mask of booleans; `padding`,
        by a mask for each sequence.
        inside: whether the heads of a query lie side by side in memory, as a Linear makes them.
    """

    batch: int
    heads: int
    length: int
    width: int
    dtype: str = "float32"
    hides: str = "nothing"
    inside: bool = True

    def sizes(self) -> Any:
        """As the template takes them."""
        several = dict.fromkeys(("queries", "keys"), self.length) | dict.fromkeys(("width", "width_v"), self.width)
        return template.Attention(heads=self.batch * self.heads, dtype=self.dtype, **several)


SHAPES = {
    "minGPT, masked": Shape(batch=16, heads=8, length=1024, width=96, hides="later by mask"),
    "minGPT, causal": Shape(batch=16, heads=8, length=1024, width=96, hides="later"),
    "64x8x512x64": Shape(batch=64, heads=8, length=512, width=64),
    "ViT, batch 2": Shape(batch=2, heads=16, length=197, width=64),
    "ViT, batch 10": Shape(batch=10, heads=16, length=197, width=64),
    "8x12x128x64, padded": Shape(batch=8, heads=12, length=128, width=64, hides="padding"),
    "4x16x2048x128": Shape(batch=4, heads=16, length=2048, width=128, inside=False),
    "32x32x512x128, float16": Shape(batch=32, heads=32, length=512, width=128, dtype="float16", inside=False),
    "4x16x4096x64, bfloat16, causal": Shape(batch=4, heads=16, length=4096, width=64, dtype="bfloat16", hides="later"),
}
DRY_SHAPES = {
    "masked": Shape(batch=1, heads=2, length=70, width=48, hides="later by mask"),
    "causal": Shape(batch=1, heads=2, length=40, width=16, hides="later"),
    "padded": Shape(batch=2, heads=2, length=33, width=32, hides="padding", inside=False),
    "float16": Shape(batch=2, heads=1, length=40, width=32, dtype="float16"),
}
SAMPLES = 15


def emitted(folder: Path) -> ModuleType:
    """The template's module: one text serves all knobs."""
    path = folder / "attention_emitted.py"
    text = template.emit(template.AttentionKnobs())
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return load(path, "attention_emitted")


def operands(shape: Shape) -> tuple[Any, Any, Any, Any]:
    """Queries, keys, values and the mask, if there is one."""
    import torch

    torch.manual_seed(0)
    sizes = (shape.batch, shape.heads, shape.length, shape.width)
    q, k, v = (torch.randn(sizes, device=device()).to(getattr(torch, shape.dtype)) for _ in range(3))
    if shape.inside:
        q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (q, k, v))
    mask = None
    if shape.hides == "later by mask":
        mask = torch.ones(1, 1, shape.length, shape.length, dtype=torch.bool, device=device()).tril()
    elif shape.hides == "padding":
        lengths = torch.linspace(shape.length // 2, shape.length, shape.batch, device=device())
        mask = (torch.arange(shape.length, device=device()) < lengths[:, None])[:, None, None]
    return q, k, v, mask


def ours(module: ModuleType, shape: Shape, given: tuple[Any, Any, Any, Any], knobs: dict[str, Any]) -> Any:
    """The answers by the template's kernel."""
    return module.launch_attention(*given, causal=shape.hides == "later", heads_inside=shape.inside, knobs=knobs)


def theirs(shape: Shape, given: tuple[Any, Any, Any, Any]) -> dict[str, Callable[[], Any]]:
    """PyTorch's two forms."""
    import torch
    import torch.nn.functional as F

    q, k, v, mask = given
    hidden = ~mask if mask is not None else None
    if shape.hides == "later":
        hidden = torch.ones(shape.length, shape.length, dtype=torch.bool, device=q.device).triu(1)

    def eager() -> Any:
        scores = q @ k.mT * shape.width**-0.5
        scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return {
        "eager": eager,
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, mask, is_causal=shape.hides == "later"),
    }


def compiled(folder: Path, shape: Shape, knobs: dict[str, Any]) -> str | None:
    """Compile and run one choice in a process of its own; how it failed."""
    try:
        import torch

        ours(emitted(folder), shape, operands(shape), knobs)
        if device() == "cuda":
            torch.cuda.synchronize()
    # Compilers and drivers raise many types, and one refused choice must not end the others.
    except Exception as failure:  # noqa: BLE001
        return f"{type(failure).__name__}: {failure}"[:400]
    return None


def timed(folder: Path, shape: Shape, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Times in microseconds and errors of PyTorch's forms and of the choices that ran."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    module, timer, given = emitted(folder), Timer(), operands(shape)
    ends = [0, shape.batch - 1]
    q, k, v, mask = given
    few = [one[ends, :1].double() for one in (q, k, v)]
    shown = mask if mask is None or mask.shape[0] == 1 else mask[ends]
    if shape.hides == "later":
        shown = torch.ones(shape.length, shape.length, dtype=torch.bool, device=q.device).tril()
    scores = few[0] @ few[1].mT * shape.width**-0.5
    exact = torch.softmax(scores if shown is None else scores.masked_fill(~shown, float("-inf")), -1) @ few[2]
    del scores

    def measured(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
        error = relative_error(call()[ends, :1], exact)
        raw_us = [1000 * ms for ms in timer(call, SAMPLES, seconds)]
        return {"us": statistics.median(raw_us), "error": error, "raw_us": raw_us}

    report: dict[str, Any] = {name: measured(call, 0.6) for name, call in theirs(shape, given).items()}
    report["choices"] = []
    for row in rows:
        if row["failure"] is None:
            row = row | measured(lambda: ours(module, shape, given, row["knobs"]), 0.4)  # noqa: B023
        report["choices"].append(row)
    return report


def timed_apart(folder: Path, shape: Shape, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `timed` finds in a process of its own, or how it failed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(timed_or_failed, folder, shape, rows).result()


def timed_or_failed(folder: Path, shape: Shape, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `timed` finds, or how it failed: not every error of PyTorch goes from one process to another."""
    # A shape that finds no memory must not end the others.
    try:
        return timed(folder, shape, rows)
    except RuntimeError as failure:
        return {"failure": str(failure)[:400]}


def line(name: str, found: dict[str, Any]) -> str:
    """What is known of a shape, for a log."""
    if "failure" in found:
        return f"{name}: {found['failure']}"
    parts = [f"{one} {found[one]['us']:.1f} us ({found[one]['error']:.1e})" for one in ("eager", "sdpa")]
    for row in sorted(found["choices"], key=lambda row: row.get("us", float("inf"))):
        knobs = "/".join(map(str, row["knobs"].values()))
        parts.append(f"{knobs} {row['us']:.1f} us ({row['error']:.1e})" if "us" in row else f"{knobs} {row['failure']}")
    return f"{name}: {', '.join(parts)}"


def main() -> None:
    """Run all steps within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of attention_tiles.json")
    parser.add_argument("--seconds", type=float, default=100.0, help="time after which no further shape is begun")
    parser.add_argument("--commit", default="", help="commit of the checkout, for the record")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--dry", action="store_true", help="no GPU: Triton's interpreter and tiny shapes")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    began = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(options.commit), "shapes": {}}

    def save() -> None:
        report["seconds"] = round(time.perf_counter() - began, 1)
        write_report(options.out / "attention_tiles.json", report)

    shapes = DRY_SHAPES if options.dry else SHAPES
    plans = [(name, asdict(one)) for name, shape in shapes.items() for one in template.alternatives(shape.sizes())]
    if options.dry:
        # The interpreter does not know products of bfloat16 pieces.
        plans = [(name, knobs) for name, knobs in plans if knobs["precision"] != "bf16x6"]
    emitted(options.out)
    rows = tried(compiled, options.out, shapes, plans, 0 if options.dry else options.jobs, per_process=1)
    for name, shape in shapes.items():
        if time.perf_counter() - began > options.seconds:
            print(f"no time for {name}", flush=True)
            continue
        report["shapes"][name] = asdict(shape) | timed_apart(options.out, shape, rows[name])
        print(line(name, report["shapes"][name]), flush=True)
        save()
    print(f"done in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

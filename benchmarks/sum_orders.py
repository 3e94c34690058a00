"""Are programs that sum in another order accepted, and the same programs in lower precision rejected?

    python benchmarks/sum_orders.py RUN_DIR --device cpu --seeds 5

Each task is a loss, a mean, a norm, a scan or a product. Its honest programs compute in float32 and add in another order
than PyTorch: in running lanes, in rows, in blocks that are added as they come, as a tree, with compensation; products by
slices of K, by splits into fp16 and bf16, convolutions by Winograd, Fourier transform and im2col. The same programs then
read their inputs in TF32, fp16, bf16 and 8 bits. Every program is checked, not timed, once for each seed. `summary.json`
lists honest programs that were rejected, and lower precisions that were accepted with the labels that they carry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelwright.execution.local import Job, JudgePool
from kernelwright.judge import Settings, devices_of
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task

TOTALS = {
    "lanes": """
def total(x):  # 64 running sums along the last dimension, then a tree
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    out = x[..., 0, :].clone()
    for step in range(1, x.shape[-2]):
        out += x[..., step, :]
    return out.sum(-1)
""",
    "rows": """
def total(x):  # rows of 512 in series, and their sums in series
    while x.shape[-1] > 1:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % min(512, x.shape[-1]))).unflatten(-1, (-1, min(512, x.shape[-1])))
        out = x[..., 0].clone()
        for step in range(1, x.shape[-1]):
            out += x[..., step]
        x = out
    return x[..., 0]
""",
    "atomic": """
def total(x):  # blocks of 1024 as trees, added in the order in which they end
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 1024)).unflatten(-1, (-1, 1024)).sum(-1)
    out = torch.zeros_like(x[..., 0])
    for block in torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(1)).tolist():
        out += x[..., block]
    return out
""",
    "tree": """
def total(x):
    while x.shape[-1] > 1:
        x = torch.nn.functional.pad(x, (0, x.shape[-1] % 2))
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]
""",
    "kahan": """
def total(x):  # 256 compensated running sums
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 256)).unflatten(-1, (-1, 256))
    out, lost = torch.zeros_like(x[..., 0, :]), torch.zeros_like(x[..., 0, :])
    for step in range(x.shape[-2]):
        term = x[..., step, :] - lost
        more = out + term
        lost = (more - out) - term
        out = more
    return out.sum(-1)
""",
}
"""Ways to sum along the last dimension."""
SUMS: dict[str, tuple[str, str, str]] = {
    "mse": ("[(1024, 1024)] * 2", "F.mse_loss(a, b)", "total(((a - b) ** 2).flatten()) / a.numel()"),
    "huber": (
        "[(512, 1024)] * 2",
        "F.smooth_l1_loss(a, b)",
        "total(torch.where((a - b).abs() < 1, 0.5 * (a - b) ** 2, (a - b).abs() - 0.5).flatten()) / a.numel()",
    ),
    "hinge": (
        "[(2048, 1024)] * 2",
        "torch.mean(torch.clamp(1 - a * b, min=0))",
        "total(torch.clamp(1 - a * b, min=0).flatten()) / a.numel()",
    ),
    "kl": (
        "[(2048, 512)] * 2",
        "F.kl_div(torch.log_softmax(a, -1), torch.softmax(b, -1), reduction='batchmean')",
        "total((torch.softmax(b, -1) * (torch.log_softmax(b, -1) - torch.log_softmax(a, -1))).flatten()) / len(a)",
    ),
    "mean": ("[(16, 65536)]", "a.mean(-1)", "total(a) / a.shape[-1]"),
    "variance": ("[(32, 16384)]", "a.var(-1)", "total((a - total(a)[:, None] / a.shape[-1]) ** 2) / (a.shape[-1] - 1)"),
    "norm": ("[(64, 16384)]", "a.norm(dim=-1)", "total(a * a).sqrt()"),
    "layer-norm": (
        "[(64, 8192)]",
        "F.layer_norm(a, (8192,))",
        "(a - total(a)[:, None] / 8192) / (total((a - total(a)[:, None] / 8192) ** 2)[:, None] / 8192 + 1e-5).sqrt()",
    ),
    "softmax": (
        "[(64, 16384)]",
        "torch.softmax(a, -1)",
        "torch.exp(a - a.amax(-1, True)) / total(torch.exp(a - a.amax(-1, True)))[:, None]",
    ),
    "logsumexp": (
        "[(64, 16384)]",
        "torch.logsumexp(a, -1)",
        "a.amax(-1) + total(torch.exp(a - a.amax(-1, True))).log()",
    ),
    "rms-norm": (
        "[(64, 8192)]",
        "a * torch.rsqrt((a * a).mean(-1, True) + 1e-6)",
        "a * torch.rsqrt(total(a * a)[:, None] / 8192 + 1e-6)",
    ),
    "group-norm": (
        "[(8, 32, 32, 32)]",
        "F.group_norm(a, 8)",
        "norm(a.reshape(64, -1)).reshape(a.shape)",
    ),
    "row-products": ("[(64, 4096)] * 2", "(a * b).sum(-1)", "total(a * b)"),
}
"""By name: shapes of the inputs, the reference, and the same with `total`."""
_NORM = """
def norm(x):
    centred = x - total(x)[:, None] / x.shape[-1]
    return centred * torch.rsqrt(total(centred * centred)[:, None] / x.shape[-1] + 1e-5)
"""
_HALVES = """
def parts(x, dtype, count):
    found = []
    for _ in range(count):
        found.append(x.to(dtype).float())
        x = x - found[-1]
    return found
"""
_FP16X3 = """
def product(a, b):  # each operand is scaled by a power of two, for float16's range
    shifts = [2.0 ** (13 - math.frexp(float(x.abs().max()))[1]) for x in (a, b)]
    (ah, al), (bh, bl) = (parts(x * shift, torch.float16, 2) for x, shift in zip((a, b), shifts))
    return (ah @ bh + (ah @ bl + al @ bh)) / shifts[0] / shifts[1]
"""
_BF16X6 = """
def product(a, b):
    (a0, a1, a2), (b0, b1, b2) = parts(a, torch.bfloat16, 3), parts(b, torch.bfloat16, 3)
    return a0 @ b0 + (a0 @ b1 + a1 @ b0 + (a1 @ b1 + a0 @ b2 + a2 @ b0))
"""
_SLICES = """
def product(a, b):  # sixteen slices of K, added in the order in which they end
    out = 0
    for x, y in reversed(list(zip(a.chunk(16, -1), b.chunk(16, -2)))):
        out = out + x @ y
    return out
"""
_SERIES = """
def product(a, b):  # one step of K after the other
    out = torch.zeros(*a.shape[:-1], b.shape[-1], device=a.device)
    for k in range(a.shape[-1]):
        out.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])
    return out
"""
PRODUCTS: dict[str, tuple[str, str, str]] = {
    "long-product": ("[(64, 4096), (4096, 64)]", "a @ b", "product(a, b)"),
    "batched-product": ("[(8, 64, 512), (8, 512, 64)]", "a @ b", "product(a, b)"),
    "attention": (
        "[(8, 128, 64)] * 2",
        "F.scaled_dot_product_attention(a, b, b)",
        "product(torch.softmax(product(a, b.mT) / 8, -1), b)",
    ),
}
_PRODUCT_FORMS = {"slices": _SLICES, "series": _SERIES, "fp16x3": _HALVES + _FP16X3, "bf16x6": _HALVES + _BF16X6}
CONVOLUTION = ("[(4, 32, 32, 32), (32, 32, 3, 3)]", "F.conv2d(a, b, padding=1)")
CONVOLUTION_FORMS = {
    "im2col": "(b.flatten(1) @ F.unfold(a, 3, padding=1)).unflatten(-1, a.shape[-2:])",
    "fft": (
        "torch.fft.irfft2(torch.einsum('nchw,ochw->nohw', torch.fft.rfft2(F.pad(a, (1, 1, 1, 1)), s=(36, 36)), "
        "torch.fft.rfft2(b.flip(-1, -2), s=(36, 36))), s=(36, 36))[..., 2:34, 2:34].contiguous()"
    ),
    "winograd": "winograd(a, b)",
    "channels": "sum(F.conv2d(x, y, padding=1) for x, y in zip(a.split(4, 1), b.split(4, 1)))",
}
_WINOGRAD = """
def winograd(a, b):  # F(2 x 2, 3 x 3): Lavin and Gray 2015
    left = a.new_tensor([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
    right = a.new_tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    end = a.new_tensor([[1, 1, 1, 0], [0, 1, -1, -1]])
    tiles = F.pad(a, (1, 1, 1, 1)).unfold(2, 4, 2).unfold(3, 4, 2)
    made = torch.einsum("ncyxij,ocij->noyxij", left @ tiles @ left.T, right @ b @ right.T)
    found = end @ made @ end.T
    return found.permute(0, 1, 2, 4, 3, 5).reshape(a.shape[0], b.shape[0], *a.shape[-2:])
"""
SCANS: dict[str, tuple[str, str, dict[str, str]]] = {
    "cumulative-sum": (
        "[(64, 4096)]",
        "torch.cumsum(a, -1)",
        {
            "series": "torch.stack(list(__import__('itertools').accumulate(a.unbind(-1))), -1)",
            "blocks": "blocks(a)",
            "doubling": "doubling(a, torch.add, 0.0)",
        },
    ),
    "cumulative-product": (
        "[(64, 512)]",
        "torch.cumprod(1 + 0.01 * a, -1)",
        {
            "series": "torch.stack(list(__import__('itertools').accumulate((1 + 0.01 * a).unbind(-1), torch.mul)), -1)",
            "doubling": "doubling(1 + 0.01 * a, torch.mul, 1.0)",
        },
    ),
}
_SCANS = """
def blocks(x):
    x = x.unflatten(-1, (-1, 64)).cumsum(-1)
    return (x + F.pad(x[..., -1].cumsum(-1)[..., :-1], (1, 0))[..., None]).flatten(-2)


def doubling(x, join, neutral):
    step = 1
    while step < x.shape[-1]:
        x = join(x, F.pad(x[..., :-step], (step, 0), value=neutral))
        step *= 2
    return x
"""
LOWER = {
    "tf32": "low = lambda x: ((x.view(torch.int32) + 4095 + ((x.view(torch.int32) >> 13) & 1)) & -8192).view(torch.float32)",
    "fp16": "low = lambda x: x.half().float()",
    "bf16": "low = lambda x: x.bfloat16().float()",
    "8-bit": "low = lambda x: x.to(torch.float8_e4m3fn).float()",
}
"""Inputs are read in less."""
_HEAD = "import math\nimport torch\nimport torch.nn.functional as F\n"


def forms() -> Iterator[tuple[str, str, str, str, str]]:
    """Task's name, shapes, reference, name of a form, and its functions with the expression after `=>`."""
    for name, (shapes, reference, with_total) in SUMS.items():
        for form, text in TOTALS.items():
            yield name, shapes, reference, form, f"{text}{_NORM}=>{with_total}"
    for name, (shapes, reference, with_product) in PRODUCTS.items():
        for form, text in _PRODUCT_FORMS.items():
            yield name, shapes, reference, form, f"{text}=>{with_product}"
    for form, expression in CONVOLUTION_FORMS.items():
        yield "convolution", *CONVOLUTION, form, f"{_WINOGRAD}=>{expression}"
    for name, (shapes, reference, ways) in SCANS.items():
        for form, expression in ways.items():
            yield name, shapes, reference, form, f"{_SCANS}=>{expression}"


def module(name: str, functions: str, reads: str, expression: str, shapes: str) -> str:
    """Source of a task or a candidate."""
    arguments = "a, b" if "*" in shapes or "), (" in shapes else "a"
    return f"""{_HEAD}{functions}

class {name}(torch.nn.Module):
    def forward(self, {arguments}):
        {arguments} = {", ".join(reads.format(x) for x in arguments.split(", "))}
        return {expression}


def get_inputs():
    return [torch.randn(*shape) for shape in {shapes}]


def get_init_inputs():
    return []
"""


def programs() -> Iterator[tuple[Task, Candidate]]:
    """Every task with every program; its techniques are the form and the precision."""
    for name, shapes, reference, form, text in forms():
        functions, expression = text.rsplit("=>", 1)
        task = Task(id=name, source=module("Model", "", "{0}", reference, shapes))
        honest = module("ModelNew", functions, "{0}", expression, shapes)
        yield task, Candidate(source=honest, policy="sum-orders", techniques=(form, "float32"))
        for precision, lower in LOWER.items():
            source = module("ModelNew", f"{functions}\n{lower}\n", "low({0})", expression, shapes)
            yield task, Candidate(source=source, policy="sum-orders", techniques=(form, precision))


def row(found: Evaluation) -> dict[str, Any]:
    """What is told of one evaluation."""
    return {
        "task": found.task,
        "form": found.techniques[0],
        "precision": found.techniques[1],
        "verdict": found.verdict.value,
        "reason": found.reason and found.reason.value,
        "detail": found.detail[:200],
        "labels": [str(label) for label in found.labels],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the evaluations that were not as they should be."""
    honest = [one for one in rows if one["precision"] == "float32"]
    lower = [one for one in rows if one["precision"] != "float32"]
    accepted = [one for one in lower if one["verdict"] == "accepted"]
    return {
        "programs": len({(one["task"], one["form"], one["precision"]) for one in rows}),
        "honest": len(honest),
        "honest_rejected": [one for one in honest if one["verdict"] != "accepted"],
        "lower": len(lower),
        "lower_rejected": len(lower) - len(accepted),
        "lower_accepted_labelled": sum("uncalibrated-precision" in one["labels"] for one in accepted),
        "lower_accepted": accepted,
    }


def main() -> None:
    """Check every program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--judges", type=int, default=2)
    parser.add_argument("--tasks", default="", help="tasks, with commas between; all by default")
    parser.add_argument("--precisions", default="", help="precisions, with commas between; all by default")
    options = parser.parse_args()
    device = devices_of(options.device)[0]
    # Lower precision is settled on two cores in a second; an honest program goes through every check.
    settings = Settings(timed=False, threads=1 if device == "cpu" else None)
    run = RunDirectory(options.run)
    run.claim({"kind": "sum-orders", "seeds": options.seeds, "device": device}, same=("kind",), device=device)
    wanted = [
        Job(task, candidate)
        for task, candidate in programs()
        if not options.tasks or task.id in options.tasks.split(",")
        if not options.precisions or candidate.techniques[1] in options.precisions.split(",")
    ]
    rows = []
    with JudgePool([device], settings, options.judges) as pool:
        for job, found in pool.evaluate(wanted * options.seeds, lambda: False):
            if not isinstance(found, Evaluation):
                print(job.task.id, found, flush=True)
                continue
            run.append(found)
            rows.append(row(found))
            run.write_json("summary.json", summary(rows))
            if (found.verdict.value == "accepted") != (rows[-1]["precision"] == "float32"):
                print(rows[-1], flush=True)
    told = summary(rows)
    print({key: value if isinstance(value, int) else len(value) for key, value in told.items()})


if __name__ == "__main__":
    main()

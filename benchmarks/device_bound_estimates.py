"""Estimate, without a GPU, how long tasks bound by the device take on an H200 and what their teachers' answers save.

    python benchmarks/device_bound_estimates.py --count 120 --held-out 40

Every operator of a call is run on PyTorch's meta device and is taken to last as long as its bytes at `BYTES_PER_S` or its
products at `FLOPS_PER_S`, whichever is longer; a host that launches one operator in `LAUNCH_S` runs ahead of the device. So
the numbers say what is worth measuring, and are no measurement.
"""

from __future__ import annotations

import argparse
import math
import statistics
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kernelwright.records import Task
from kernelwright.tasks.generated.device_bound import device_bound_tasks
from kernelwright.tasks.generated.families import variations

BYTES_PER_S = 4.0e12
FLOPS_PER_S = 50e12
"""Float32 products without tensor cores."""
LAUNCH_S = 6e-6
GAP_S = 0.7e-6
"""Between two kernels of a full queue, and of a graph."""
GRAPH_S = 8e-6
"""From a replay's call to its first kernel."""
STRIDED = 2.0
"""A copy whose input lies otherwise in memory takes so many times as long."""


@dataclass
class Cost:
    """Estimated seconds of each kernel of a call."""

    kernels: list[float] = field(default_factory=list)

    def add(self, nbytes: float, flops: float = 0.0) -> None:
        """One more kernel."""
        self.kernels.append(max(nbytes / BYTES_PER_S, flops / FLOPS_PER_S, 2e-6))

    @property
    def eager_s(self) -> float:
        """End of the last kernel where the host launches one after the other."""
        free_s = 0.0
        for number, kernel_s in enumerate(self.kernels, start=1):
            free_s = max(number * LAUNCH_S, free_s + GAP_S) + kernel_s
        return free_s

    @property
    def graph_s(self) -> float:
        """The same where a graph is replayed."""
        return GRAPH_S + sum(kernel_s + GAP_S for kernel_s in self.kernels)


class _Counted(TorchDispatchMode):
    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        result = function(*given, **(named or {}))
        read = [item for item in tree_leaves((given, named)) if isinstance(item, torch.Tensor)]
        made = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        storages = {item.untyped_storage()._cdata for item in read}
        if all(item.untyped_storage()._cdata in storages for item in made) and not function._schema.is_mutable:
            return result  # a view
        if function.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            return result
        flops = 0.0
        if function.overloadpacket in flop_registry:
            flops = flop_registry[function.overloadpacket](*given, **(named or {}), out_val=result)
        strided = any(item.dim() > 1 and item.stride(-1) != 1 and item.numel() > 1 << 16 for item in read)
        nbytes = sum(map(_bytes, read)) + sum(map(_bytes, made))
        self._cost.add(nbytes * (STRIDED if strided and not flops else 1.0), flops)
        return result


class _Fused(TorchFunctionMode):
    """Attention as one kernel that keeps its scores to itself."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_function__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            q, k, v = given
            products = 4.0 * math.prod(q.shape) * k.shape[-2] * (0.5 if (named or {}).get("is_causal") else 1.0)
            self._cost.add(sum(map(_bytes, (q, k, v, q))), 2 * products)  # its tiles reach half of a large product's rate
            return torch.empty_like(q)
        return function(*given, **(named or {}))


class _Kernel:
    """Stands in for a Triton kernel: it reads and writes its tensors once."""

    cost = Cost()

    def __init__(self, body: Callable[..., None]) -> None:
        del body

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self.cost.add(sum(_bytes(item) for item in given if isinstance(item, torch.Tensor)))


def _bytes(tensor: torch.Tensor) -> float:
    """Bytes behind a tensor: an expanded one has few."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2)
    return elements * tensor.element_size()


_TRITON = types.SimpleNamespace(
    jit=_Kernel, cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length()
)


def cost_of(task: Task, answer: str = "") -> Cost:
    """Estimated cost of one call of the task's reference or, where one is given, of an answer to it."""
    cost = Cost()
    scope: dict[str, Any] = {"triton": _TRITON, "tl": types.SimpleNamespace(constexpr=None)}
    text = "\n".join(line for line in answer.splitlines() if not line.startswith("import triton"))
    with torch.device("meta"), torch.no_grad():
        exec(f"{task.source}\n\n{text}", scope)
        model = scope["ModelNew" if answer else "Model"](*scope["get_init_inputs"]())
        inputs = scope["get_inputs"]()
        _Kernel.cost = cost
        with _Fused(cost), _Counted(cost):
            model(*inputs)
    return cost


@dataclass(frozen=True)
class Estimate:
    """What is expected of one task."""

    task: str
    reference_s: float
    graph_gain: float
    """Eager's time / the time of a graph of it."""
    best: float
    """Reference's time / that of the teachers' best answer without a graph."""
    plain: float
    """The same among answers that use PyTorch's operators alone."""
    techniques: tuple[str, ...]


def estimates(tasks: Iterable[Task]) -> list[Estimate]:
    """Estimates of tasks, each with all answers of the templates."""
    found = []
    for task in tasks:
        reference = cost_of(task)
        best: tuple[float, tuple[str, ...]] = (1.0, ())
        plain = 1.0
        for variation in variations(task, "cuda"):
            gain = reference.eager_s / cost_of(task, variation.answer).eager_s
            best = max(best, (gain, variation.techniques))
            if "triton" not in variation.answer:
                plain = max(plain, gain)
        found.append(Estimate(task.id, reference.eager_s, reference.eager_s / reference.graph_s, best[0], plain, best[1]))
    return found


def main() -> None:
    """Print the estimates of one seed's tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="a line for each task")
    given = parser.parse_args()
    tasks = device_bound_tasks(given.count, given.held_out, given.seed)
    for side in ("train", "known", "new"):
        found = estimates(getattr(tasks, side))
        if not found:
            continue
        if given.each:
            for one in sorted(found, key=lambda one: one.best):
                print(f"{one.reference_s * 1e3:6.2f} ms, graph {one.graph_gain:.3f}, best {one.best:5.1f}, {one.task}")
        took = sorted(one.reference_s * 1e3 for one in found)
        used = Counter(name for one in found for name in one.techniques)
        best, plain = (statistics.geometric_mean(values) for values in zip(*((o.best, o.plain) for o in found), strict=True))
        print(
            f"{side}: {len(found)} tasks of {took[0]:.2f} to {took[-1]:.2f} ms, median {statistics.median(took):.2f}; a "
            f"graph gains at most {max(one.graph_gain for one in found) - 1:.1%}; teachers' best {best:.2f}, with "
            f"operators alone {plain:.2f}, at least 1.5 on {sum(one.best >= 1.5 for one in found)}; "
            + ", ".join(f"{name} {count}" for name, count in used.most_common(12))
        )


if __name__ == "__main__":
    main()

"""Speed and error of the template `recurrent` against cuDNN's layers, for each of its choices of knobs.

    python benchmarks/recurrent_layers.py --out results --commit "$(git rev-parse HEAD)"
    python benchmarks/recurrent_layers.py --out results --only lstm-6,gru-6     # adds these to the report that is there

Both sides are timed as split_products.py times products: replays of a CUDA graph, with the L2 cache overwritten before each.
Eager calls of cuDNN's layers are timed as well: without a graph they take most of their time on the CPU. Errors are against
the same layers in float64. `recurrent_layers.json` is rewritten after each case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from split_products import TEMPLATE, Timer, environment, load, relative_error, write_report

template = load(TEMPLATE.with_name("recurrent.py"), "recurrent_template")
SIZES = {"batch": 10, "steps": 512, "inputs": 128, "hidden": 256}
"""Of KernelBench's recurrent networks."""
CASES = {
    f"{kind}-{layers}{'-both' if directions == 2 else ''}": template.Layers(
        kind=kind, layers=layers, directions=directions, **SIZES
    )
    for kind in ("lstm", "gru")
    for layers, directions in ((6, 1), (6, 2), (1, 1))
}
SAMPLES = 15


def network(layers: Any) -> Any:
    """PyTorch's own layers."""
    import torch

    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[layers.kind]
    return kind(layers.inputs, layers.hidden, layers.layers, bidirectional=layers.directions == 2).cuda()


def eager_ms(call: Any) -> float:
    """Median time of a call, launches included, in milliseconds."""
    import torch

    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def measured(module: Any, layers: Any, timer: Timer) -> dict[str, Any]:
    """Times and errors of cuDNN and of each choice."""
    import torch

    torch.manual_seed(0)
    net = network(layers)
    x = torch.randn(layers.steps, layers.batch, layers.inputs, device="cuda")
    cells = layers.layers * layers.directions
    kinds = 2 if layers.kind == "lstm" else 1
    states = tuple(torch.randn(kinds, cells, layers.batch, layers.hidden, device="cuda"))
    given = states if kinds == 2 else states[0]
    weights = [one.detach() for one in net._flat_weights]
    options = (True, layers.layers, 0.0, False, layers.directions == 2, False)
    eager = getattr(torch, layers.kind)
    exact_given = [one.double() for one in states] if kinds == 2 else states[0].double()
    exact = eager(x.double(), exact_given, [one.double() for one in weights], *options)[0]

    def cudnn() -> Any:
        return eager(x, given, weights, *options)

    found: dict[str, Any] = {"layers": asdict(layers), "choices": []}
    for name, allowed in (("cudnn", True), ("cudnn_without_tf32", False)):
        torch.backends.cudnn.allow_tf32 = allowed
        times = timer(cudnn, SAMPLES, 1.0)
        found[name] = {"ms": statistics.median(times), "eager_ms": eager_ms(cudnn), "raw_ms": times}
        found[name]["error"] = relative_error(cudnn()[0], exact)
    torch.backends.cudnn.allow_tf32 = True
    for knobs in template.alternatives(layers):
        blocks = knobs.blocks(layers)
        function = module.Recurrent(eager, template.cuda_head(layers, knobs), blocks, layers.hidden, options)
        row: dict[str, Any] = {"knobs": asdict(knobs), "blocks": blocks}
        row["taken"] = function.takes(x, states, weights)
        row["error"] = relative_error(function(x, given, weights)[0], exact)
        times = timer(lambda: function(x, given, weights), SAMPLES, 1.0)  # noqa: B023
        row |= {"ms": statistics.median(times), "raw_ms": times, "eager_ms": eager_ms(lambda: function(x, given, weights))}  # noqa: B023
        found["choices"].append(row | {"speedup": found["cudnn"]["ms"] / row["ms"]})
    return found


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of recurrent_layers.json")
    parser.add_argument("--only", default=",".join(CASES), help="cases, by name")
    parser.add_argument("--commit", default="", help="commit of the checkout, for the record")
    options = parser.parse_args()
    import torch

    path = options.out / "recurrent_layers.json"
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    report["environment"] = environment(options.commit)
    emitted = options.out / "recurrent_emitted.py"
    emitted.write_text(template.emit(), encoding="utf-8")
    module, timer = load(emitted, "recurrent_emitted"), Timer()
    for name in options.only.split(","):
        with torch.no_grad():
            report["cases"][name] = found = measured(module, CASES[name], timer)
        write_report(path, report)
        for side in ("cudnn", "cudnn_without_tf32"):
            one = found[side]
            print(f"{name}: {side} {one['ms']:.3f} ms, eager {one['eager_ms']:.3f} ms, error {one['error']:.2e}")
        for row in found["choices"]:
            said = f"{row['ms']:.3f} ms, {row['speedup']:.2f} x, eager {row['eager_ms']:.3f} ms, error {row['error']:.2e}"
            print("  ", said, row["knobs"], "taken" if row["taken"] else "NOT TAKEN", flush=True)


if __name__ == "__main__":
    main()

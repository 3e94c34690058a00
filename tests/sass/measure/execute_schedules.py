"""Run legal schedules on a GPU of compute capability 9.0 and compare every output bit by bit.

    python prepare.py DIR           # anywhere: compile and disassemble the corpus into DIR
    python execute_schedules.py DIR --seconds 60 --out result.json     # on the GPU machine

Needs the CUDA driver and numpy only. Each kernel has a process of its own; a schedule that faults ends
its process and is reported with the moves that made it. Half of the schedules come from random play,
half from a descent that only accepts moves which do not lengthen the issue time, because tight
schedules are where a missing dependence would show.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from kernelwright.sass import Schedule, load

ROWS = 528


def arguments_of(name, rng):
    """(grid, arguments): arrays are inputs, ("out", shape, dtype) outputs, ints and floats as they are."""
    half, single = np.float16, np.float32

    def matrix(*shape, dtype=half):
        return (rng.standard_normal(shape) * 0.5).astype(dtype)

    if name == "softmax":
        return (ROWS, 1, 1), [("out", (ROWS, 1008), single), matrix(ROWS, 1008, dtype=single), 1008, 1008]
    if name == "rmsnorm":
        x, w = matrix(ROWS, 2064), matrix(2064)
        return (ROWS, 1, 1), [("out", (ROWS, 2064), half), x, w, 2064, 2064, 1e-5]
    if name == "layernorm":
        x, w, b = matrix(ROWS, 1008), matrix(1008), matrix(1008)
        return (ROWS, 1, 1), [("out", (ROWS, 1008), half), x, w, b, 1008, 1008, 1e-5]
    if name == "row_sum":
        return (ROWS, 1, 1), [("out", (ROWS,), single), matrix(ROWS, 4112, dtype=single), 4112, 4112]
    if name == "gemm_leakyrelu":
        m, n, k = 496, 528, 528
        return (8, 9, 1), [matrix(m, k), matrix(k, n), ("out", (m, n), half), m, n, k, k, n, n]
    if name == "batched_gemm":
        s, b = 512, 4
        strides = [s * s, s, s * s, s, s * s, s]
        return (8, 8, b), [matrix(b, s, s), matrix(b, s, s), ("out", (b, s, s), half), s, s, s, *strides]
    if name == "fused_feed_forward":
        s = 512
        return (16, 8, 1), [matrix(s, s), matrix(s, s), matrix(s, s), ("out", (s, s), half), s, s, s, s, s, s]
    if name.startswith("attention"):
        heads, context, dim = 8, 512, 64
        rows = 32 if name == "attention_mma" else 64
        q, k, v = (matrix(heads, context, dim) for _ in range(3))
        return (context // rows, heads, 1), [
            q, k, v, ("out", (heads, context, dim), half), context, context * dim, 0.18,
        ]  # fmt: skip
    if name == "sgemm":
        s = 512
        a, b = matrix(s, s, dtype=single), matrix(s, s, dtype=single)
        return (16, 16, 1), [a, b, ("out", (s, s), single), s, s, s, s, s, s]
    raise ValueError(name)


class Fault(Exception):
    """The driver reported an error."""


class Device:
    """The few driver calls needed."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status:
            raise Fault(f"{name}: status {status}")

    def upload(self, array):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
        self.call(
            "cuMemcpyHtoD_v2", pointer, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes)
        )
        return pointer


class Launcher:
    """One kernel with its inputs on the device."""

    def __init__(self, spec, seed):
        self.device = Device()
        self.spec = spec
        self.grid, values = arguments_of(spec["corpus_name"], np.random.default_rng(seed))
        self.values = []
        for value in values:
            if isinstance(value, tuple):
                self.host = np.zeros(value[1], value[2])
                self.out = self.device.upload(self.host)
                self.values.append(self.out)
            elif isinstance(value, np.ndarray):
                self.values.append(self.device.upload(np.ascontiguousarray(value)))
            else:
                self.values.append(ctypes.c_int32(value) if isinstance(value, int) else ctypes.c_float(value))
        self.values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        self.packed = (ctypes.c_void_p * len(self.values))(
            *(ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in self.values)
        )

    def run(self, cubin, launches):
        """Return the output bytes of each launch of a freshly loaded module."""
        d = self.device
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        d.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        d.call("cuModuleGetFunction", ctypes.byref(function), module, self.spec["entry"].encode())
        outputs = []
        size = ctypes.c_size_t(self.host.nbytes)
        for _ in range(launches):
            d.call("cuMemsetD8_v2", self.out, ctypes.c_ubyte(0xFF), size)
            d.call(
                "cuLaunchKernel", function, *self.grid, 32 * self.spec["num_warps"], 1, 1,
                self.spec["shared_bytes"], None, self.packed, None,
            )  # fmt: skip
            d.call("cuCtxSynchronize")
            d.call("cuMemcpyDtoH_v2", self.host.ctypes.data_as(ctypes.c_void_p), self.out, size)
            outputs.append(self.host.tobytes())
        d.call("cuModuleUnload", module)
        return outputs


def mutate(schedule, rng):
    """Play on from the current schedule, or start again now and then."""
    if rng.random() < 0.1:
        while schedule.history:
            schedule.undo()
    descend = rng.random() < 0.5
    for _ in range(rng.choice((1, 3, 10, 40))):
        before = schedule.issue_cycles
        move = schedule.random_move(rng)
        if move is not None:
            schedule.play(move)
            if descend and schedule.issue_cycles > before:
                schedule.undo()


def diagnose(program, history, launcher, expected):
    """Return the shortest wrong prefix of a history, its last move, and what would have helped."""

    def is_wrong(words):
        cubin = program.with_words({program.kernel().name: words})
        return any(output != expected for output in launcher.run(cubin, 2))

    schedule = Schedule(program.kernel())
    for move in history:
        schedule.play(move)
        if is_wrong(schedule.words()):
            break
    else:
        return {"prefix": None}
    instructions = program.kernel().instructions
    pairs = list(zip(schedule.controls(), schedule.order, strict=True))

    def variant(change):
        return is_wrong([change(c, i).encode(instructions[i].word) for c, i in pairs])

    return {
        "prefix": len(schedule.history),
        "moves": [[m.source, m.target] for m in schedule.history],
        "last": [move.source, move.target, instructions[schedule.order[move.target]].text],
        "wrong_without_reuse": variant(lambda c, i: replace(c, reuse=0)),
        "wrong_with_original_stalls_or_longer": variant(
            lambda c, i: c.with_stall(max(c.stall, instructions[i].control.stall))
        ),
        "wrong_with_stalls_of_8": variant(lambda c, i: c.with_stall(max(c.stall, 8))),
        "wrong_with_stalls_of_15": variant(lambda c, i: c.with_stall(15)),
        "wrong_with_yields": variant(lambda c, i: replace(c, yields=True, reuse=0)),
    }


def work(spec, folder, seconds, seed, results):
    """Run one kernel's schedules for a while and put one record into `results`."""
    name = spec["corpus_name"]
    record = {
        "kernel": name,
        "seed": seed,
        "schedules": 0,
        "distinct": 0,
        "wrong": 0,
        "fault": None,
        "bad": [],
    }
    cubin = (folder / f"{name}.cubin").read_bytes()
    program = load(cubin, lambda _: (folder / f"{name}.txt").read_text())
    schedule = Schedule(program.kernel())
    record["issue_cycles"] = record["least_issue_cycles"] = schedule.issue_cycles
    rng = random.Random(seed)
    seen = set()
    try:
        launcher = Launcher(spec, seed)
        expected = launcher.run(cubin, 3)
        if len(set(expected)) != 1 or len(np.unique(np.frombuffer(expected[0], np.uint8))) < 50:
            raise Fault("the original's output is not deterministic or is trivial")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            mutate(schedule, rng)
            mutated = schedule.cubin(program)
            record["schedules"] += 1
            seen.add(hash(mutated))
            record["least_issue_cycles"] = min(record["least_issue_cycles"], schedule.issue_cycles)
            if any(output != expected[0] for output in launcher.run(mutated, 2)):
                record["wrong"] += 1
                if len(record["bad"]) < 4:
                    record["bad"].append(diagnose(program, list(schedule.history), launcher, expected[0]))
    except Fault as fault:
        record["fault"] = str(fault)
        record["bad"].append([[m.source, m.target] for m in schedule.history])
    record["distinct"] = len(seen)
    results.put(record)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes-per-kernel", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    specs = json.loads((options.folder / "specs.json").read_text())
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = []
    for spec in specs:
        for seed in range(options.processes_per_kernel):
            workers.append(
                context.Process(target=work, args=(spec, options.folder, options.seconds, seed, results))
            )
    for worker in workers:
        worker.start()
    records = []
    end = time.monotonic() + options.seconds + 60
    while len(records) < len(workers) and time.monotonic() < end:
        if not results.empty():
            records.append(results.get())
            print(json.dumps({k: v for k, v in records[-1].items() if k != "bad"}), flush=True)
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
    summary = {
        "schedules": sum(r["schedules"] for r in records),
        "distinct": sum(r["distinct"] for r in records),
        "wrong": sum(r["wrong"] for r in records),
        "faults": sum(r["fault"] is not None for r in records),
        "silent": len(workers) - len(records),
    }
    print(json.dumps(summary))
    options.out.write_text(json.dumps({"summary": summary, "records": records}, indent=1))


if __name__ == "__main__":
    sys.exit(main())

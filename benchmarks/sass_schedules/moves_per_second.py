"""Legal random moves a second on one core, for each kernel of the corpus on each architecture; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import random
import time

from kernelwright.gpu import ARCHITECTURES, disassemble
from kernelwright.gpu.corpus.specs import corpus_specs
from kernelwright.sass import Schedule, load


def rate(cubin: bytes, seconds: float) -> dict[str, float | int]:
    """Play random legal moves on one kernel for so many seconds of processor time."""
    kernel = load(cubin, disassemble).kernel()
    begin = time.process_time()
    schedule = Schedule(kernel)
    built = time.process_time()
    rng = random.Random(0)
    moves = 0
    while time.process_time() - built < seconds:
        move = schedule.random_move(rng)
        if move is not None:
            schedule.play(move)
            moves += 1
    return {
        "instructions": len(kernel.instructions),
        "adjacent_legal_moves": sum(1 for _ in Schedule(kernel).legal_moves(1)) // 2,
        "adjacent_legal_memory_moves": sum(1 for _ in Schedule(kernel).legal_moves(1, memory_only=True)),
        "setup_ms": round(1000 * (built - begin), 1),
        "moves_per_second": round(moves / (time.process_time() - built)),
    }


def main() -> None:
    """Print the rates of all kernels as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kernel")
    seconds = parser.parse_args().seconds
    result = {}
    for architecture in ARCHITECTURES:
        for name, spec in corpus_specs().items():
            result[f"{name}_sm{architecture}"] = rate(spec.build(name, architecture).cubin, seconds)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Compile and disassemble the corpus for compute capability 9.0 into a folder; no GPU is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kernelwright.sass.corpus import CORPUS
from kernelwright.toolchain import compile_triton, disassemble


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    specs = []
    for name, spec in CORPUS.items():
        kernel = compile_triton(
            spec.function, spec.signature, spec.constants, 90, spec.num_warps, spec.num_stages, spec.aligned
        )
        (folder / f"{name}.cubin").write_bytes(kernel.cubin)
        (folder / f"{name}.txt").write_text(disassemble(kernel.cubin))
        specs.append(
            {
                "corpus_name": name,
                "entry": kernel.name,
                "num_warps": kernel.num_warps,
                "shared_bytes": kernel.shared_bytes,
            }
        )
    (folder / "specs.json").write_text(json.dumps(specs, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`kernelwright sass compile`: a cubin of a Triton kernel or of CUDA C++, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kernelwright.cli.options import NamedPath
from kernelwright.cli.output import emit_json, results_only

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
"""Architectures that docs/sass.md describes."""


class ArchitectureChoice(click.Choice[str]):
    """One of `ARCHITECTURES`, also with compilers' prefix: `90` or `sm_90`."""

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The number alone."""
        return super().convert(str(value).removeprefix("sm_"), param, ctx)


@click.command("compile")
@click.argument("source", metavar="SOURCE")
@click.option(
    "--architecture",
    type=ArchitectureChoice(),
    default="90",
    show_default=True,
    help="Compile for this compute capability times ten, such as 90 or sm_90.",
)
@click.option("--out", type=NamedPath(), required=True, metavar="CUBIN", help="Where to write the cubin.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def compile_source(source: str, architecture: str, out: Path, as_json: bool) -> None:
    """Compile SOURCE to a cubin. Needs no GPU; CUDA C++ needs nvcc.

    SOURCE is a Triton kernel that a Python file describes in SPECS (FILE.py:NAME), CUDA C++ (FILE.cu), a launch file that
    names such source (.toml or .json), or corpus:NAME.
    """
    from kernelwright.gpu.target import compile_cubin
    from kernelwright.sass.code.elf import read_cubin

    with results_only():
        cubin = compile_cubin(source, int(architecture))
    write_cubin(out, cubin)
    kernels = [code.kernel for code in read_cubin(cubin).code]
    if as_json:
        emit_json({"out": str(out), "architecture": int(architecture), "kernels": kernels})
    else:
        click.echo(f"{out}: {', '.join(kernels)} for sm_{architecture}; `kernelwright sass show {out}` prints it")


def write_cubin(out: Path, cubin: bytes) -> None:
    """Write a cubin whole or not at all; raises UsageError where it cannot be written."""
    from kernelwright.errors import UsageError
    from kernelwright.files import replace_file

    try:
        replace_file(out.resolve(), cubin)  # what a link points to, not the link
    except OSError as error:
        raise UsageError(f"wanted to write {out}, found: {error.strerror}; name a writable file") from error

"""`kernelwright sass`: look at, re-schedule and check machine code; none of this needs a GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.output import emit_json

if TYPE_CHECKING:
    from kernelwright.sass import Kernel, Program

CUBIN_LIMIT_BYTES = 256 << 20
NOT_LEGAL = 1

_cubin = click.Path(path_type=Path)
_kernel_option = click.option("--kernel", "kernel_name", metavar="NAME", help="Only this kernel.")
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group("sass", short_help="Show, play and check machine-code schedules.")
def sass() -> None:
    """Look at, re-schedule and check the machine code of a cubin. No GPU is needed.

    A disassembler of the cubin's generation is: the Triton 3.6 wheel ships one, KERNELWRIGHT_NVDISASM
    names another.
    """


command = sass


@sass.command("show")
@click.argument("cubin", type=_cubin)
@_kernel_option
@_json_option
def show(cubin: Path, kernel_name: str | None, as_json: bool) -> None:
    """Print CUBIN's instructions: address, control word, text, and what may move.

    The control word reads B<waits>:R<read scoreboard>:W<write scoreboard>:<Y if yielding>:S<stall>:<reuse>.
    A leading `*` marks an instruction pinned to its address; `--` begins a basic block.
    """
    program = _load(cubin)
    kernels = program.kernels if kernel_name is None else (program.kernel(kernel_name),)
    if as_json:
        emit_json(
            {
                "architecture": program.image.architecture,
                "kernels": [_kernel_json(kernel) for kernel in kernels],
            }
        )
        return
    for kernel in kernels:
        _show_text(kernel, program.image.architecture)


def _show_text(kernel: Kernel, architecture: int) -> None:
    from kernelwright.sass import Schedule

    movable = len(Schedule(kernel).movable_slots)
    count = len(kernel.instructions)
    about = f"{count} instructions in {len(kernel.blocks)} blocks, {movable} movable"
    click.echo(f"{kernel.name}: sm_{architecture}, {about}")
    for block in kernel.blocks:
        following = ", ".join(str(s) for s in block.successors) or "none"
        click.echo(f"-- block {block.index}, then {following}")
        for index in range(block.start, block.stop):
            i = kernel.instructions[index]
            pinned = "*" if index in kernel.fixed else " "
            click.echo(f"{pinned} {i.address:06x}  {i.control}  {i.text}")


def _kernel_json(kernel: Kernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "blocks": [
            {"start": b.start * 16, "stop": b.stop * 16, "successors": list(b.successors)}
            for b in kernel.blocks
        ],
        "instructions": [
            {
                "address": i.address,
                "text": i.text,
                "predicate": i.predicate,
                "opcode": i.opcode,
                "modifiers": list(i.modifiers),
                "operands": list(i.operands),
                "stall": i.control.stall,
                "yields": i.control.yields,
                "write_barrier": i.control.write_barrier,
                "read_barrier": i.control.read_barrier,
                "wait_mask": i.control.wait_mask,
                "reuse": i.control.reuse,
                "defs": sorted(i.defs),
                "uses": sorted(i.uses),
                "pinned": index in kernel.fixed,
            }
            for index, i in enumerate(kernel.instructions)
        ],
    }


@sass.command("play")
@click.argument("cubin", type=_cubin)
@click.option("--moves", type=click.IntRange(min=0), default=100, show_default=True, help="Moves to play.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same schedule.")
@click.option("--out", type=_cubin, required=True, metavar="MUTATED", help="Where to write the new cubin.")
@click.option(
    "--paper", is_flag=True, help="CuAsmRL's moves only: swap a memory instruction with a neighbour."
)
@_kernel_option
@_json_option
def play(
    cubin: Path, moves: int, seed: int, out: Path, paper: bool, kernel_name: str | None, as_json: bool
) -> None:
    """Play random legal moves on CUBIN and write the result, once it is proven legal.

    Fewer moves are played when no further legal one is found.
    """
    from kernelwright.errors import InfrastructureError, UsageError
    from kernelwright.sass import Schedule, check_report
    from kernelwright.toolchain import disassemble

    program = _load(cubin)
    kernels = program.kernels if kernel_name is None else (program.kernel(kernel_name),)
    schedules = [Schedule(kernel) for kernel in kernels]
    rng = random.Random(seed)
    before = sum(s.issue_cycles for s in schedules)
    played = 0
    open_schedules = list(schedules)
    while played < moves and open_schedules:
        schedule = rng.choice(open_schedules)
        move = schedule.random_move(rng, max_distance=1 if paper else None, memory_only=paper)
        if move is None:
            open_schedules.remove(schedule)
            continue
        schedule.play(move)
        played += 1
    mutated = program.with_words({s.kernel.name: s.words() for s in schedules})
    report = check_report(program.image.data, mutated, disassemble)
    if not report.legal:
        raise InfrastructureError(
            f"wanted a legal schedule from legal moves, found {report.violations[0]}; nothing was written"
        )
    try:
        out.write_bytes(mutated)
    except OSError as error:
        raise UsageError(f"wanted to write {out}, found: {error.strerror}; name a writable file") from error
    result = {
        "out": str(out),
        "played": played,
        "moved": report.moved,
        "seed": seed,
        "legal": True,
        "issue_cycles_before": before,
        "issue_cycles_after": sum(s.issue_cycles for s in schedules),
    }
    if as_json:
        emit_json(result)
    else:
        click.echo(f"{out}: {played} moves played, {report.moved} instructions moved, legal")


@sass.command("check")
@click.argument("original", type=_cubin)
@click.argument("mutated", type=_cubin)
@_json_option
@click.pass_context
def check(context: click.Context, original: Path, mutated: Path, as_json: bool) -> None:
    """Prove that MUTATED is a legal re-schedule of ORIGINAL, or say why it is not.

    Exit status: 0 legal, 1 not legal, 2 a file cannot be read as a cubin, 3 no fitting disassembler.
    """
    from kernelwright.sass import check_report
    from kernelwright.toolchain import disassemble

    report = check_report(_read(original), _read(mutated), disassemble)
    if as_json:
        emit_json(
            {
                "legal": report.legal,
                "violations": [
                    {"kind": v.kind, "address": v.address, "detail": v.detail} for v in report.violations
                ],
                "moved": report.moved,
            }
        )
    else:
        for violation in report.violations:
            click.echo(f"{violation.address:#08x}  {violation.kind}: {violation.detail}")
        click.echo(f"{'legal' if report.legal else 'not legal'}, {report.moved} instructions moved")
    if not report.legal:
        context.exit(NOT_LEGAL)


def _load(path: Path) -> Program:
    from kernelwright.sass import load
    from kernelwright.toolchain import disassemble

    return load(_read(path), disassemble)


def _read(path: Path) -> bytes:
    from kernelwright.sass import CubinError

    try:
        if path.is_file() and path.stat().st_size > CUBIN_LIMIT_BYTES:
            raise CubinError(f"wanted a cubin, found {path} of {path.stat().st_size} bytes")
        return path.read_bytes()
    except OSError as error:
        raise CubinError(f"wanted a cubin, found {path}: {error.strerror}; check the path") from error

"""`kernelwright sass`: look at, re-schedule, check, tune and deploy machine code.

Tuning and deploying measure on a GPU; the rest needs none.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.group import HelpfulGroup
from kernelwright.cli.options import FiniteRange, NamedPath, device_name, require_together, run_directory
from kernelwright.cli.output import emit_json, format_noise_floor, format_speedup, results_only, say, says_what_was_kept
from kernelwright.cli.sass.cache import cache
from kernelwright.cli.sass.compile import ArchitectureChoice, compile_source, write_cubin

if TYPE_CHECKING:
    from kernelwright.assembly.search import AssemblyResult
    from kernelwright.sass import Kernel, Program

NOT_LEGAL = 1
LEGEND = """
Columns: address, control word, instruction. `*` marks an instruction that stays at its address; `--` begins a basic block.
The control word, such as B01----:R-:W2:-:S04:a--, says when the instruction issues:
  B01----  it waits until scoreboards 0 and 1 are empty
  R-, R3   its sources have been read when scoreboard 3 is empty; - for none
  W-, W2   its result is there when scoreboard 2 is empty; - for none
  Y        the scheduler may switch to another warp after it
  S04      the next instruction of its warp issues 4 cycles later
  a--      its source operands a, b, c stay in the operand cache for the next instruction"""
"""Key to the output of `show`."""

_cubin = NamedPath()
_kernel_option = click.option("--kernel", "kernel_name", metavar="NAME", help="Only this kernel.")
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group("sass", cls=HelpfulGroup, short_help="Compile, show, play, check, optimize and deploy machine code.")
def sass() -> None:
    """Compile, look at, re-schedule, check, tune and deploy the machine code of a cubin.

    A disassembler of the cubin's generation or a later one is needed: the Triton wheel ships one,
    KERNELWRIGHT_NVDISASM names another.
    """


sass.add_command(compile_source)
sass.add_command(cache)
command = sass


@sass.command("show")
@click.argument("cubin", type=_cubin)
@_kernel_option
@_json_option
def show(cubin: Path, kernel_name: str | None, as_json: bool) -> None:
    """Print CUBIN's instructions: address, control word, text, and what may move. A legend follows.

    `kernelwright sass compile` makes a cubin.
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
    click.echo(LEGEND)


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
        "blocks": [{"start": b.start * 16, "stop": b.stop * 16, "successors": list(b.successors)} for b in kernel.blocks],
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
@click.option("--paper", is_flag=True, help="CuAsmRL's moves only: swap a memory instruction with a neighbour.")
@_kernel_option
@_json_option
def play(cubin: Path, moves: int, seed: int, out: Path, paper: bool, kernel_name: str | None, as_json: bool) -> None:
    """Play random legal moves on CUBIN and write the result, once it is proven legal.

    Fewer moves are played when no further legal one is found.
    """
    from kernelwright.errors import InfrastructureError, UsageError
    from kernelwright.gpu import disassemble
    from kernelwright.sass import Schedule, check_report

    if out.exists() and cubin.exists() and out.samefile(cubin):
        raise UsageError(f"wanted to write {out}, found: it is the cubin that is read; name another file")
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
    write_cubin(out, mutated)
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
    from kernelwright.gpu import disassemble
    from kernelwright.sass import check_report

    report = check_report(_read(original), _read(mutated), disassemble)
    if as_json:
        emit_json(
            {
                "legal": report.legal,
                "violations": [{"kind": v.kind, "address": v.address, "detail": v.detail} for v in report.violations],
                "moved": report.moved,
            }
        )
    else:
        for violation in report.violations:
            click.echo(f"{violation.address:#08x}  {violation.kind}: {violation.detail}")
        click.echo(f"{'legal' if report.legal else 'not legal'}, {report.moved} instructions moved")
    if not report.legal:
        context.exit(NOT_LEGAL)


@sass.command("optimize")
@click.argument("target")
@click.option(
    "--agent",
    "agents",
    multiple=True,
    metavar="ppo|anneal|greedy|guided|random|sweeps",
    help="Agent that plays; ppo by default. Repeat it for several, each with the whole budget.",
)
@click.option(
    "--budget", type=click.IntRange(min=1), default=1000, show_default=True, help="Schedules to measure, for each agent."
)
@click.option("--out", type=_cubin, metavar="DIR", help="Run directory; the same one resumes. Default: a new one in runs/.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything random.")
@click.option(
    "--moves", type=click.Choice(["beyond", "paper"]), default="beyond", show_default=True, help="Which moves are allowed."
)
@click.option(
    "--backend",
    default="gpu",
    show_default=True,
    metavar="gpu|static-issue-cycles|simulated-issue",
    help="What a schedule costs. All but gpu are models: they give no times.",
)
@click.option("--gpus", type=click.IntRange(1, 64), default=1, show_default=True, help="GPUs that measure side by side.")
@click.option(
    "--architecture",
    type=ArchitectureChoice(),
    help="Compile for this compute capability times ten; the GPU's by default.",
)
@click.option("--limit", "limit_s", type=FiniteRange(min=0), metavar="SECONDS", help="Time limit of each agent.")
@click.option(
    "--network-device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda:N",
    callback=device_name,
    help="Where PPO's network is; on a GPU it works only while this command times nothing.",
)
@_kernel_option
@_json_option
def optimize(
    target: str,
    agents: tuple[str, ...],
    budget: int,
    out: Path | None,
    seed: int,
    moves: str,
    backend: str,
    gpus: int,
    architecture: str | None,
    limit_s: float | None,
    network_device: str,
    kernel_name: str | None,
    as_json: bool,
) -> None:
    """Search for a faster schedule of TARGET, measure the best again, and prove it.

    TARGET is a launch file (.toml or .json), a Python file with kernel specs (FILE.py:NAME), corpus:NAME, or,
    for a model only, a bare cubin. Without a GPU this ends with 3 unless --backend names a model.
    """
    from kernelwright.assembly.search import GameSettings, optimize_kernel
    from kernelwright.assembly.testbed import GPU_BACKEND, find_game
    from kernelwright.judge import resolve_device

    agents = agents or ("ppo",)
    require_together("--agent ppo", "ppo" in agents, "network_device")
    require_together(f"--backend {GPU_BACKEND}", backend == GPU_BACKEND, "gpus")
    if network_device != "cpu":
        resolve_device(network_device)  # before anything is begun
    settings = GameSettings(agents, budget, seed, moves, limit_s=limit_s, network_device=network_device)
    with (
        results_only(),
        find_game(target, backend, None if architecture is None else int(architecture), gpus, kernel_name) as game,
        run_directory(out, "sass", game.name) as path,
        says_what_was_kept(lambda: _kept_in(path)),
    ):
        result = optimize_kernel(game, out=path, settings=settings, tell=say)
    if as_json:
        emit_json(_optimize_json(target, result))
    else:
        click.echo(_optimize_text(result))


def _kept_in(path: Path) -> str:
    """Remains of an interrupted search, in words."""
    if not (path / "schedules.jsonl").exists():
        return "no schedule was measured yet"
    return f"every schedule measured is in {path}; the same command with --out {path} goes on"


def _optimize_json(target: str, result: AssemblyResult) -> dict[str, Any]:
    """The object that `--json` prints; its keys are a contract with scripts."""
    summary, best = result.summary, result.best
    return {
        "target": target,
        "kernel": summary["kernel"],
        "run": str(result.run),
        "backend": summary["backend"],
        "unit": summary["unit"],
        "simulated": summary["simulated"],
        "schedules": summary["schedules_run"],
        "best": None
        if best is None
        else {
            "agent": result.agent,
            "speedup": best.speedup,
            "speedup_low": best.low,
            "speedup_high": best.high,
            "noise_floor": best.noise_floor,
        },
    }


def _optimize_text(result: AssemblyResult) -> str:
    summary, best = result.summary, result.best
    lines = []
    if best is None and not any(agent["tried"] for agent in summary["agents"].values()):
        lines.append("best       none: no schedule of the search was faster than the original")
    elif best is None:
        lines.append("best       none: no schedule's interval cleared the noise floor when measured again")
    else:
        speedup = format_speedup(best.speedup, best.low, best.high)
        lines.append(f"best       {speedup}, {format_noise_floor(best.noise_floor)}, by {result.agent}")
    if summary["simulated"]:
        lines.append(f"note       simulated, not a time: {summary['unit']} of the model {summary['backend']}")
    lines.append(f"schedules  {summary['schedules_run']}")
    lines.append(f"report     {result.run / 'report.html'}")
    return "\n".join(lines)


@sass.command("deploy")
@click.argument("run_dir", type=_cubin)
@click.option(
    "--cache", type=_cubin, metavar="DIR", help="Cache of tuned kernels; KERNELWRIGHT_CACHE or the user's by default."
)
@_json_option
@click.pass_context
def deploy(context: click.Context, run_dir: Path, cache: Path | None, as_json: bool) -> None:
    """Prove and measure the winner in RUN_DIR again, and put it into the cache that Triton kernels look it up in.

    Exit status: 0 deployed, 1 refused, 2 RUN_DIR holds no winner, 3 no GPU.
    """
    from kernelwright.deploy.cache import TunedCache
    from kernelwright.deploy.deploy import deploy as put
    from kernelwright.deploy.deploy import read_winner

    done = put(read_winner(run_dir), TunedCache(cache))
    found = done.confirmation
    if as_json:
        emit_json(
            {
                "deployed": done.refusal is None,
                "reason": done.refusal,
                "detail": done.detail,
                "path": None if done.path is None else str(done.path),
                "speedup": None if found is None else found.speedup,
                "speedup_low": None if found is None else found.low,
                "speedup_high": None if found is None else found.high,
            }
        )
    elif done.refusal is None:
        speedup = "" if found is None else f", {format_speedup(found.speedup, found.low, found.high)}"
        click.echo(f"{done.path}: deployed{speedup}")
    else:
        click.echo(f"refused: {done.refusal}, {done.detail}")
    if done.refusal is not None:
        context.exit(NOT_LEGAL)


def _load(path: Path) -> Program:
    from kernelwright.gpu import disassemble
    from kernelwright.sass import load

    return load(_read(path), disassemble)


def _read(path: Path) -> bytes:
    """The bytes of a cubin; an error names the file."""
    from kernelwright.files import BINARY_LIMIT_BYTES, read_regular
    from kernelwright.sass import CubinError
    from kernelwright.sass.code.elf import naming_file, read_cubin

    try:
        data = read_regular(path, BINARY_LIMIT_BYTES)
    except OSError as error:
        raise CubinError(f"wanted a cubin, found {path}: {error.strerror}; check the path") from error
    with naming_file(path):
        read_cubin(data)
    return data

"""`kernelwright sass`: look at, re-schedule, check, tune and deploy machine code.

Tuning and deploying measure on a GPU; the rest needs none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelwright.cli.commands import FiniteRange, HelpfulGroup, OptionsCommand, argument, option
from kernelwright.cli.options import (
    AT_LEAST_ONE,
    device_name,
    json_option,
    out_option,
    require_together,
    run_directory,
    says_what_was_kept,
)
from kernelwright.cli.output import emit_json, format_noise_floor, format_speedup, printable, results_only, say

if TYPE_CHECKING:
    from kernelwright.assembly.search import AssemblyResult
    from kernelwright.deploy.cache import Tuned, TunedCache
    from kernelwright.sass import Kernel, Program

NOT_LEGAL = 1
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
"""Architectures that docs/sass.md describes."""
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

_DIGEST_DIGITS = 12


class ArchitectureChoice(click.Choice[str]):
    """One of `ARCHITECTURES`, also with compilers' prefix: `90` or `sm_90`."""

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The number alone."""
        return super().convert(str(value).removeprefix("sm_"), param, ctx)


def _json_option() -> Any:
    return json_option("One JSON object on stdout.")


def _kernel_option() -> Any:
    return option(flag="--kernel", metavar="NAME", help="Only this kernel.")


def _cache_option() -> Any:
    return option(flag="--cache", metavar="DIR", help="Cache of tuned kernels; KERNELWRIGHT_CACHE or the user's by default.")


@click.group("sass", cls=HelpfulGroup, short_help="Compile, show, play, check, optimize and deploy machine code.")
def command() -> None:
    """Compile, look at, re-schedule, check, tune and deploy the machine code of a cubin.

    A disassembler of the cubin's generation or a later one is needed: the Triton wheel ships one,
    KERNELWRIGHT_NVDISASM names another.
    """


@dataclass(frozen=True, kw_only=True)
class CompileCommand:
    """Compile SOURCE to a cubin. Needs no GPU; CUDA C++ needs nvcc.

    SOURCE is a Triton kernel that a Python file describes in SPECS (FILE.py:NAME), CUDA C++ (FILE.cu), a launch file that
    names such source (.toml or .json), or corpus:NAME.
    """

    source: str = argument(metavar="SOURCE")
    architecture: str = option(
        "90", type=ArchitectureChoice(), help="Compile for this compute capability times ten, such as 90 or sm_90."
    )
    out: Path = option(required=True, metavar="CUBIN", help="Where to write the cubin.")
    as_json: bool = _json_option()

    def __call__(self) -> None:
        from kernelwright.gpu.target import compile_cubin
        from kernelwright.sass.elf import read_cubin

        with results_only():
            cubin = compile_cubin(self.source, int(self.architecture))
        _write_cubin(self.out, cubin)
        kernels = [code.kernel for code in read_cubin(cubin).code]
        if self.as_json:
            emit_json({"out": str(self.out), "architecture": int(self.architecture), "kernels": kernels})
        else:
            names, out = ", ".join(kernels), self.out
            click.echo(f"{out}: {names} for sm_{self.architecture}; `kernelwright sass show {out}` prints it")


command.add_command(OptionsCommand("compile", CompileCommand))


@dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Print CUBIN's instructions: address, control word, text, and what may move. A legend follows.

    `kernelwright sass compile` makes a cubin.
    """

    cubin: Path = argument()
    kernel: str | None = _kernel_option()
    as_json: bool = _json_option()

    def __call__(self) -> None:
        program = _load(self.cubin)
        kernels = _chosen(program, self.kernel)
        if self.as_json:
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


command.add_command(OptionsCommand("show", ShowCommand))


def _chosen(program: Program, name: str | None) -> tuple[Kernel, ...]:
    """The kernel of a name, or all."""
    return program.kernels if name is None else (program.kernel(name),)


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


@dataclass(frozen=True, kw_only=True)
class PlayCommand:
    """Play random legal moves on CUBIN and write the result, once it is proven legal.

    Fewer moves are played when no further legal one is found.
    """

    cubin: Path = argument()
    moves: int = option(100, type=click.IntRange(min=0), help="Moves to play.")
    seed: int = option(0, help="Same seed, same schedule.")
    out: Path = option(required=True, metavar="MUTATED", help="Where to write the new cubin.")
    paper: bool = option(False, help="CuAsmRL's moves only: swap a memory instruction with a neighbour.")
    kernel: str | None = _kernel_option()
    as_json: bool = _json_option()

    def __call__(self) -> None:
        from kernelwright.errors import InfrastructureError, UsageError
        from kernelwright.gpu import disassemble
        from kernelwright.sass import ANY_MOVE, Schedule, check_report

        cubin, out = self.cubin, self.out
        if out.exists() and cubin.exists() and out.samefile(cubin):
            raise UsageError(f"wanted to write {out}, found: it is the cubin that is read; name another file")
        program = _load(cubin)
        kernels = _chosen(program, self.kernel)
        schedules = [Schedule(kernel) for kernel in kernels]
        rng = random.Random(self.seed)
        neighbourhood = replace(ANY_MOVE, max_distance=1, memory_only=True) if self.paper else ANY_MOVE
        before = sum(s.issue_cycles for s in schedules)
        played = 0
        open_schedules = list(schedules)
        while played < self.moves and open_schedules:
            schedule = rng.choice(open_schedules)
            move = neighbourhood.draw(schedule, rng)
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
        _write_cubin(out, mutated)
        result = {
            "out": str(out),
            "played": played,
            "moved": report.moved,
            "seed": self.seed,
            "legal": True,
            "issue_cycles_before": before,
            "issue_cycles_after": sum(s.issue_cycles for s in schedules),
        }
        if self.as_json:
            emit_json(result)
        else:
            click.echo(f"{out}: {played} moves played, {report.moved} instructions moved, legal")
            if self.moves and not played:
                stay, count = (
                    sum(map(len, parts)) for parts in ([k.fixed for k in kernels], [k.instructions for k in kernels])
                )
                click.echo(
                    f"No move is legal: {stay} of {count} instructions stay; no other may pass its neighbours.", err=True
                )


command.add_command(OptionsCommand("play", PlayCommand))


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Prove that MUTATED is a legal re-schedule of ORIGINAL, or say why it is not.

    Exit status: 0 legal, 1 not legal, 2 a file cannot be read as a cubin, 3 no fitting disassembler.
    """

    original: Path = argument()
    mutated: Path = argument()
    as_json: bool = _json_option()

    def __call__(self) -> int:
        from kernelwright.gpu import disassemble
        from kernelwright.sass import check_report

        report = check_report(_read(self.original), _read(self.mutated), disassemble)
        if self.as_json:
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
        return 0 if report.legal else NOT_LEGAL


command.add_command(OptionsCommand("check", CheckCommand))


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """Search for a faster schedule of TARGET, measure the best again, and prove it.

    TARGET is a launch file (.toml or .json), a Python file with kernel specs (FILE.py:NAME), corpus:NAME, or,
    for a model only, a bare cubin. Without a GPU this ends with 3 unless --backend names a model.
    """

    target: str = argument()
    agents: tuple[str, ...] = option(
        (),
        "--agent",
        metavar="ppo|anneal|greedy|guided|random|sweeps",
        help="Agent that plays; ppo by default. Repeat it for several, each with the whole budget.",
    )
    budget: int = option(1000, type=AT_LEAST_ONE, help="Schedules to measure, for each agent.")
    out: Path | None = out_option()
    seed: int = option(0, help="Seed of everything random.")
    moves: str = option("beyond", type=click.Choice(["beyond", "paper"]), help="Which moves are allowed.")
    backend: str = option(
        "gpu",
        metavar="gpu|static-issue-cycles|simulated-issue",
        help="What a schedule costs. All but gpu are models: they give no times.",
    )
    gpus: int = option(1, type=click.IntRange(1, 64), help="GPUs that measure side by side.")
    architecture: str | None = option(
        type=ArchitectureChoice(), help="Compile for this compute capability times ten; the GPU's by default."
    )
    limit_s: float | None = option(
        flag="--limit", type=FiniteRange(min=0), metavar="SECONDS", help="Time limit of each agent."
    )
    network_device: str = option(
        "cpu",
        metavar="cpu|cuda:N",
        callback=device_name,
        help="Where PPO's network is; on a GPU it works only while this command times nothing.",
    )
    kernel: str | None = _kernel_option()
    as_json: bool = _json_option()

    def __call__(self) -> None:
        from kernelwright.assembly.search import GameSettings, optimize_kernel
        from kernelwright.assembly.testbed import GPU_BACKEND, find_game
        from kernelwright.judge import resolve_device

        agents = self.agents or ("ppo",)
        require_together("--agent ppo", "ppo" in agents, "network_device")
        require_together(f"--backend {GPU_BACKEND}", self.backend == GPU_BACKEND, "gpus")
        if self.network_device != "cpu":
            resolve_device(self.network_device)  # before anything is begun
        settings = GameSettings(
            agents,
            self.budget,
            self.seed,
            self.moves,
            limit_s=self.limit_s,
            network_device=self.network_device,
        )
        architecture = None if self.architecture is None else int(self.architecture)
        with (
            results_only(),
            find_game(self.target, self.backend, architecture, self.gpus, self.kernel) as game,
            run_directory(self.out, "sass", game.name) as path,
            says_what_was_kept(path, "no schedule was measured yet"),
        ):
            result = optimize_kernel(game, out=path, settings=settings, log=say)
        if self.as_json:
            emit_json(_optimize_json(self.target, result))
        else:
            click.echo(_optimize_text(result))


command.add_command(OptionsCommand("optimize", TuneCommand))


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


@dataclass(frozen=True, kw_only=True)
class DeployCommand:
    """Prove and measure the winner in RUN_DIR again, and put it into the cache that Triton kernels look it up in.

    Exit status: 0 deployed, 1 refused, 2 RUN_DIR holds no winner, 3 no GPU.
    """

    run_dir: Path = argument()
    cache: Path | None = _cache_option()
    as_json: bool = _json_option()

    def __call__(self) -> int:
        from kernelwright.deploy.cache import TunedCache
        from kernelwright.deploy.deploy import deploy as put
        from kernelwright.deploy.deploy import read_winner

        done = put(read_winner(self.run_dir), TunedCache(self.cache))
        confirmation = done.confirmation
        if self.as_json:
            emit_json(
                {
                    "deployed": done.refusal is None,
                    "reason": done.refusal,
                    "detail": done.detail,
                    "path": None if done.path is None else str(done.path),
                    "speedup": None if confirmation is None else confirmation.speedup,
                    "speedup_low": None if confirmation is None else confirmation.low,
                    "speedup_high": None if confirmation is None else confirmation.high,
                }
            )
        elif done.refusal is None:
            speedup = (
                ""
                if confirmation is None
                else f", {format_speedup(confirmation.speedup, confirmation.low, confirmation.high)}"
            )
            click.echo(f"{done.path}: deployed{speedup}")
        else:
            click.echo(f"refused: {done.refusal}, {done.detail}")
        return 0 if done.refusal is None else NOT_LEGAL


command.add_command(OptionsCommand("deploy", DeployCommand))


@command.group("cache", cls=HelpfulGroup, short_help="List and remove tuned kernels.")
def cache() -> None:
    """List the tuned kernels that `sass deploy` has put into the cache, and remove one. Needs no GPU."""


@dataclass(frozen=True, kw_only=True)
class ListCommand:
    """List every tuned kernel: its key, GPU, name and confirmed speedup. Damaged ones are left out, with a warning."""

    cache: Path | None = _cache_option()
    as_json: bool = _json_option()

    def __call__(self) -> None:
        tuned = _opened(self.cache)
        entries = list(tuned.entries())
        if self.as_json:
            emit_json({"cache": str(tuned.root), "entries": [_entry_json(entry) for entry in entries]})
            return
        for entry in entries:
            click.echo(_entry_text(entry))
        if not entries:
            click.echo(f"no tuned kernels in {tuned.root}")


cache.add_command(OptionsCommand("list", ListCommand))


@dataclass(frozen=True, kw_only=True)
class RemoveCommand:
    """Remove the tuned kernel whose key starts with KEY. Processes that have loaded it already keep it."""

    key: str = argument()
    cache: Path | None = _cache_option()
    as_json: bool = _json_option()

    def __call__(self) -> None:
        from kernelwright.errors import UsageError

        tuned = _opened(self.cache)
        try:
            removed = tuned.remove(self.key)
        except OSError as error:
            raise UsageError(f"Wanted to remove {self.key} from {tuned.root}, found: {error}. Check who owns it.") from error
        if not removed:
            raise UsageError(
                f"Wanted a tuned kernel whose key starts with {self.key!r} in {tuned.root}, found none. "
                "`kernelwright sass cache list` shows the keys."
            )
        if self.as_json:
            emit_json({"cache": str(tuned.root), "removed": self.key})
        else:
            click.echo(f"removed {self.key} from {tuned.root}")


cache.add_command(OptionsCommand("remove", RemoveCommand))


def _opened(root: Path | None) -> TunedCache:
    from kernelwright.deploy.cache import TunedCache
    from kernelwright.errors import UsageError

    tuned = TunedCache(root)
    if tuned.root.exists() and not tuned.root.is_dir():
        raise UsageError(f"Wanted a cache of tuned kernels, a directory, found the file {tuned.root}. Name another one.")
    return tuned


def _entry_json(tuned: Tuned) -> dict[str, Any]:
    """One entry as `--json` prints it; its keys are a contract with scripts."""
    entry, measured = tuned.entry, tuned.entry.measurement
    return {
        "key": entry.key.digest,
        "kernel": entry.entry,
        "architecture": entry.key.architecture,
        "gpu": entry.key.gpu,
        "signature": entry.key.signature,
        "moved": entry.proof.moved,
        "speedup": None if measured is None else measured.speedup,
        "speedup_low": None if measured is None else measured.speedup_low,
        "speedup_high": None if measured is None else measured.speedup_high,
        "driver": None if measured is None else measured.driver,
        "run": entry.provenance.get("run"),
    }


def _entry_text(tuned: Tuned) -> str:
    entry, measured = tuned.entry, tuned.entry.measurement
    speedup = (
        "not measured" if measured is None else format_speedup(measured.speedup, measured.speedup_low, measured.speedup_high)
    )
    key = entry.key
    return f"{key.digest[:_DIGEST_DIGITS]}  sm_{key.architecture}  {printable(key.gpu)}  {printable(entry.entry)}  {speedup}"


def _load(path: Path) -> Program:
    from kernelwright.gpu import disassemble
    from kernelwright.sass import load

    return load(_read(path), disassemble)


def _read(path: Path) -> bytes:
    """The bytes of a cubin; an error names the file."""
    from kernelwright.files import BINARY_LIMIT_BYTES, read_regular
    from kernelwright.sass import CubinError
    from kernelwright.sass.elf import naming_file, read_cubin

    try:
        data = read_regular(path, BINARY_LIMIT_BYTES)
    except OSError as error:
        raise CubinError(f"wanted a cubin, found {path}: {error.strerror}; check the path") from error
    with naming_file(path):
        read_cubin(data)
    return data


def _write_cubin(out: Path, cubin: bytes) -> None:
    """Write a cubin whole or not at all; raises UsageError where it cannot be written."""
    from kernelwright.errors import UsageError
    from kernelwright.files import replace_file

    try:
        replace_file(out.resolve(), cubin)  # what a link points to, not the link
    except OSError as error:
        raise UsageError(f"wanted to write {out}, found: {error.strerror}; name a writable file") from error

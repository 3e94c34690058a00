"""What scripts rely on: exit statuses, one line per error, data on stdout and everything else on stderr."""

from __future__ import annotations

import ast
import errno
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest

import kernelwright
from kernelwright import cli
from kernelwright.cli import doctor
from kernelwright.cli.commands import NamedPath
from kernelwright.cli.output import Phases
from kernelwright.errors import DeviceError, InternalError, UsageError

KERNELWRIGHT = (sys.executable, "-m", "kernelwright")


def run(*arguments: str, cwd: Path | None = None, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KERNELWRIGHT, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
        **options,
    )


def one_error_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"], ["report", "nowhere"]])
def test_nothing_heavy_is_imported_to_print_help_or_refuse(arguments):
    code = (
        "import sys; from kernelwright.cli import main\n"
        f"main({arguments!r})\n"
        "print([name for name in ('torch', 'pydantic', 'jinja2', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_told_also_where_the_package_is_only_on_the_path(monkeypatch, capsys):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{kernelwright.__version__}\n"


def test_the_version_stands_in_one_place():
    described = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "version" not in described["project"]
    assert described["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kernelwright.version.__version__"}


def test_wrong_words_are_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "stage.toml").write_text('[model]\nbase = "/nowhere"\n')
    commands = [
        [["doctor", "evaluate", "optimize", "bench", "train"], ["--help"]],
        [["optimize", "bench"], ["nowhere.py"], ["builtin", "--policy", "nobody"], ["builtin", "--baselines", "none"]],
        [["optimize"], ["diag_matmul", "--policy", "local"], ["diag_matmul", "--policy", "local", "--model", "/nowhere"]],
        [["evaluate"], ["diag_matmul", "nowhere.py"], ["nowhere", "nowhere.py"], ["diag_matmul", "--forbid", "nothing"]],
        [["bench"], ["kernelbench"], ["builtin", "--only", "nothing"]],
        [["train"], ["sft", "--config", "nowhere.toml"], ["sft", "--config", "stage.toml", "--out", "out"]],
    ]
    every = [[name, *words] for names, *forms in commands for name in names for words in forms]
    code = (
        "import sys; from kernelwright.cli import main\n"
        f"print([(words, 'torch' in sys.modules) for words in {every!r} if main(words) != 0 or 'torch' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    refused = ast.literal_eval(done.stdout.splitlines()[-1])
    assert refused == [(words, False) for words in every if words[1:] != ["--help"]]


@pytest.mark.parametrize(
    "arguments", [["optimize", "diag_matmul", "--out", ""], ["evaluate", "diag_matmul", ""], ["report", ""]]
)
def test_an_empty_path_is_not_the_working_directory(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert "found an empty text" in one_error_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", [".", "..", "/", "folder"])
def test_a_report_over_a_directory_is_refused(out, capsys, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "errors.json").write_text('{"a candidate": "no memory"}')
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", ".", "--out", out]) == 2
    assert f"Wanted to write the report to {out}, found: Is a directory." in one_error_line(capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors.json", "folder"]


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "NAME", "diag_matmul.py"],
        ["evaluate", "diag_matmul", "NAME"],
        ["optimize", "NAME"],
        ["optimize", "diag_matmul", "--settings", "NAME"],
        ["bench", "cuda-l1", "--path", "NAME"],
        ["train", "sft", "--config", "NAME"],
        ["sass", "show", "NAME"],
        ["sass", "check", "NAME", "NAME"],
    ],
)
def test_an_input_that_has_no_end_is_refused(name, arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("diag_matmul.py").write_text("class ModelNew: ...\n")
    assert cli.main([word.replace("NAME", name) for word in arguments]) == 2
    assert f"{name}" in (line := one_error_line(capsys.readouterr().err))
    assert "not a regular file" in line


def test_a_report_does_not_take_the_place_of_a_device(capsys, tmp_path):
    (tmp_path / "errors.json").write_text('{"a candidate": "no memory"}')
    device = tmp_path / "pipe"
    os.mkfifo(device)
    assert cli.main(["report", str(tmp_path), "--out", str(device)]) == 2
    assert "found: not a regular file" in one_error_line(capsys.readouterr().err)
    assert device.is_fifo()


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "NAME", "diag_matmul.py"],
        ["evaluate", "diag_matmul", "NAME", "--check-only"],
        ["optimize", "diag_matmul", "--out", "NAME"],
        ["sass", "optimize", "NAME:row_sum"],
        ["sass", "show", "NAME"],
    ],
)
def test_a_name_that_is_no_text_is_refused_before_any_work(arguments, capsys, tmp_path, monkeypatch):
    name = os.fsdecode(b"caf\xe9.py")
    monkeypatch.chdir(tmp_path)
    for path in (name, "diag_matmul.py"):
        Path(path).write_text("class ModelNew: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\nModel = ModelNew\n")
    assert cli.main([word.replace("NAME", name) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert "UTF-8 text" in one_error_line(captured.err)
    assert captured.out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "redirected", "status"),
    [
        ("report nowhere", "2>/dev/full", 2),
        ("report nowhere", "2>&-", 2),
        ("--version", ">/dev/full", 3),
        ("--version", ">/dev/full 2>/dev/full", 3),
        ("--version", ">&-", 0),
        ("--version", ">&- 2>&-", 0),
    ],
)
def test_a_stream_that_cannot_be_written_reads_as_no_verdict(arguments, redirected, status):
    command = f"{sys.executable} -m kernelwright {arguments} {redirected}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr


def commands_below(command, context):
    if not isinstance(command, click.Group):
        yield command
        return
    for name in command.list_commands(context):
        yield from commands_below(command.get_command(context, name), context)


def test_no_command_takes_an_empty_path():
    paths = [
        parameter.type
        for command in commands_below(cli.group, click.Context(cli.group))
        for parameter in command.params
        if isinstance(parameter.type, click.Path)
    ]
    assert len(paths) > 10
    assert {type(path) for path in paths} == {NamedPath}


def test_every_listed_command_can_be_imported_and_has_the_listed_name():
    context = click.Context(cli.group)
    for name in cli.group.list_commands(context):
        command = cli.group.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_no_arguments_print_help_to_stderr_and_status_2(capsys):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert "Commands:" in captured.err
    assert captured.out == ""


@pytest.fixture
def doctor_ends_by(monkeypatch):
    """Let the command `doctor` call a function."""

    def replace(work):
        monkeypatch.setattr(cli.group, "get_command", lambda *_: click.Command("doctor", callback=work))

    return replace


def raises(error: BaseException):
    def work() -> None:
        raise error

    return work


FULL, READ_ONLY = (OSError(number, os.strerror(number), "/tmp/x") for number in (errno.ENOSPC, errno.EROFS))


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UsageError("wanted\n  a thing"), 2, "error: wanted a thing"),
        (UsageError("\x1b[31mred\x07"), 2, "error:  [31mred "),
        (DeviceError("no GPU"), 3, "error: no GPU"),
        (ZeroDivisionError("oops"), 3, "error: fault in kernelwright: ZeroDivisionError: oops."),
        (InternalError("leaked"), 3, "error: fault in kernelwright: InternalError: leaked."),
        (FULL, 3, "error: Wanted to write at /tmp/x; No space left on device."),
        (READ_ONLY, 3, "error: Wanted to write at /tmp/x; Read-only file system."),
        *((SystemExit(status), 2, "error: code that was run as an input ended") for status in (0, 1, None, "bye")),
        (KeyboardInterrupt(), 130, "interrupted: nothing was written"),
    ],
)
def test_errors_have_their_status_and_one_line(error, status, said, doctor_ends_by, capsys):
    doctor_ends_by(raises(error))
    assert cli.main(["doctor"]) == status
    (line,) = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert line.startswith(said)


def test_a_hard_exit_is_refused_in_the_command_and_left_to_its_children(doctor_ends_by, capsys):
    leave = os._exit

    def ends_hard() -> None:
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os._exit(0)

    doctor_ends_by(ends_hard)
    assert cli.main(["doctor"]) == 2
    assert "ended the program" in one_error_line(capsys.readouterr().err)
    assert os._exit is leave


def test_new_run_directories_of_one_second_are_apart(tmp_path, monkeypatch):
    from kernelwright.cli import options

    monkeypatch.chdir(tmp_path)
    paths = set()
    for _ in range(3):
        with options.run_directory(None, "evaluate", "t") as path:
            paths.add(path)
    assert len(paths) == 3
    assert all(path.is_dir() for path in paths)


@pytest.mark.parametrize("end", [KeyboardInterrupt, ZeroDivisionError, DeviceError, click.exceptions.Exit])
def test_a_new_run_directory_stays_only_where_something_was_found_out(end, tmp_path, monkeypatch):
    from kernelwright.cli import options

    monkeypatch.chdir(tmp_path)

    def left_by(*names):
        def work():
            with options.run_directory(None, "bench", "t") as path:
                for name in names:
                    (path / name).touch()
                told = options.kept_in(path)
                assert str(path) in told if "evaluations.jsonl" in names else told == "nothing was judged yet"
                raise end

        with pytest.raises(end):
            work()
        return [found.name for run in (tmp_path / "runs").iterdir() for found in run.iterdir()]

    assert left_by("config.json", "environment.json", "tasks.json", ".lock") == []
    assert not list((tmp_path / "runs").iterdir())
    assert left_by("evaluations.jsonl") == ["evaluations.jsonl"]


def test_where_no_run_directory_can_be_made_it_is_said(tmp_path, monkeypatch):
    from kernelwright.cli import options

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(UsageError, match="Name one with --out"), options.run_directory(None, "evaluate", "t"):
        pass


def test_the_hidden_flag_shows_the_traceback(doctor_ends_by, capsys):
    doctor_ends_by(raises(UsageError("wanted a thing")))
    assert cli.main(["--traceback", "doctor"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.strip().splitlines()[-1] == "error: wanted a thing"
    cli.main(["--help"])
    assert "--traceback" not in capsys.readouterr().out


@pytest.mark.parametrize("kept", [True, False])
def test_a_command_says_what_it_kept_when_interrupted(kept, tmp_path, capsys):
    from kernelwright.cli.options import says_what_was_kept

    if kept:
        (tmp_path / "evaluations.jsonl").touch()
    with pytest.raises(click.exceptions.Exit) as end, says_what_was_kept(tmp_path):
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    told = f"0 finished evaluations are in {tmp_path}; the same command with --out {tmp_path} goes on"
    assert capsys.readouterr().err == f"interrupted: {told if kept else 'nothing was judged yet'}\n"


@pytest.mark.exhaustive
def test_an_interrupt_from_the_keyboard_ends_a_real_process_with_130(tmp_path):
    task, ready = tmp_path / "task.py", tmp_path / "ready"
    # A task's own code is trusted and runs in the judge's process: it tells when the judge is at work.
    task.write_text(
        "import pathlib, time, torch\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)\n"
        "class Model(torch.nn.Module): pass\n"
        "def get_inputs(): return []\n"
        "def get_init_inputs(): return []\n"
    )
    (tmp_path / "candidate.py").write_text("class ModelNew: pass\n")
    command = [*KERNELWRIGHT, "evaluate", str(task), str(tmp_path / "candidate.py"), "--device", "cpu"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        process_group=0,
        # Who runs these tests in a shell's background has interrupts ignored, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(1200):
        if ready.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].startswith("interrupted: the candidate was not judged to the end")
    assert "Traceback" not in err
    assert out == ""
    assert not list((tmp_path / "runs").iterdir()), "nothing was found out"


def test_an_interrupt_ends_an_import_that_would_swallow_it(tmp_path):
    swallowing = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(swallowing)
    (tmp_path / "candidate.py").write_text("class ModelNew: pass\n")
    done = subprocess.run(
        [*KERNELWRIGHT, "evaluate", "diag_matmul", "candidate.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted: nothing was judged yet\n")


@pytest.mark.exhaustive
def test_an_interrupt_does_not_wait_for_a_silent_endpoint(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        (tmp_path / "model.toml").write_text("silence_timeout_s = 3600\n")
        command = [*KERNELWRIGHT, "optimize", "diag_matmul", "--device", "cpu", "--policy", "api", "--model", "m"]
        process = subprocess.Popen(
            [*command, "--base-url", url, "--model-settings", "model.toml"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("interrupted: ")


def test_phases_are_lines_with_seconds_where_there_is_no_terminal(capsys):
    with Phases() as phases:
        phases.begin("checking\x1b[2J")
        phases.count("1 of 2")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d+ s: checking \[2J\n", err)


def test_a_reader_that_goes_away_is_no_rejection_and_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*KERNELWRIGHT, "sass", "cache", "list", "--json"], stdout=writer, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_doctor_always_succeeds_and_prints_one_object():
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = {finding["name"] for finding in found["findings"]}
    assert {"python", "torch", "gpu", "nvcc", "nvcc for sass", "triton"} <= names
    assert {"landlock", "seccomp", "capabilities"} <= found["isolation"].keys()


@pytest.fixture
def no_tools(tmp_path, monkeypatch):
    """Take away every compiler that the environment names."""
    monkeypatch.setenv("PATH", "")
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "KERNELWRIGHT_NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kernelwright.gpu.compilers.TOOLKIT", tmp_path)
    return monkeypatch


def a_compiler(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["nvcc", "nvcc for sass", "c++ compiler", "driver"])
def test_doctor_reports_a_missing_tool_instead_of_failing(name, no_tools):
    assert not doctor.look_for(name).present


@pytest.mark.parametrize("script", ["printf '\\377\\376'", "exit 1"])
def test_doctor_survives_a_tool_that_fails_or_prints_rubbish(script, tmp_path, no_tools):
    tool = a_compiler(tmp_path / "tools" / "nvcc", script)
    no_tools.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    found = doctor.look_for("nvcc")
    assert (found.present, found.found) == (False, f"{tool} does not say its release")


@pytest.mark.parametrize(
    ("home", "named", "for_candidates", "for_sass"),
    [(None, None, "path", "path"), ("torch", None, "torch", "path"), ("torch", "own", "torch", "own")],
)
def test_doctor_tells_the_nvcc_of_candidates_from_that_of_launch_files(
    home, named, for_candidates, for_sass, tmp_path, no_tools
):
    tools = {name: a_compiler(tmp_path / name / "bin" / "nvcc", "echo release 1.0") for name in ("torch", "path", "own")}
    no_tools.setenv("PATH", f"{tools['path'].parent}:/usr/bin:/bin")
    if home:
        no_tools.setenv("CUDA_HOME", str(tmp_path / home))
    if named:
        no_tools.setenv("KERNELWRIGHT_NVCC", str(tools[named]))
    assert doctor.look_for("nvcc").found == f"release 1.0, {tools[for_candidates]}"
    assert doctor.look_for("nvcc for sass").found == f"release 1.0, {tools[for_sass]}"


def test_doctor_names_the_variable_of_an_nvcc_that_is_not_there(tmp_path, no_tools):
    no_tools.setenv("KERNELWRIGHT_NVCC", str(tmp_path / "none"))
    found = doctor.look_for("nvcc for sass")
    assert not found.present
    assert "KERNELWRIGHT_NVCC" in found.found


def test_doctor_and_torch_look_for_nvcc_in_the_same_order(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    from kernelwright.gpu import compilers

    for name in ("home", "path"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for home, expected in ((str(tmp_path / "home"), "home"), (None, "path")):
        if home:
            monkeypatch.setenv("CUDA_HOME", home)
        else:
            monkeypatch.delenv("CUDA_HOME", raising=False)
        assert compilers.find_torch_nvcc() == tmp_path / expected / "bin" / "nvcc"
        assert cpp_extension._find_cuda_home() == str(tmp_path / expected)

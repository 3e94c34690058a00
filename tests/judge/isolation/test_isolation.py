"""What a candidate cannot do, tried from inside the judge's own sandbox.

A candidate whose attempt is refused goes on and computes the right thing; one whose attempt succeeds raises.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest

from kernelwright.judge import Settings
from kernelwright.judge.isolation import sandbox
from tests.conftest import SECRET
from tests.judge.snippets import RELU, candidate
from tests.quick import exhaustive_but

SETTINGS = Settings.quick(threads=1, timed=False, thorough=False)
needs_landlock = pytest.mark.skipif(sandbox.landlock_abi() == 0, reason="no Landlock here")

REFUSED = """
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError as error:
        if error.errno not in (1, 13, 111, 2, 22, 18):
            raise RuntimeError("failed for another reason: " + repr(error))
        return
    raise RuntimeError("it worked")


def libc(name, *arguments):
    import ctypes
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
"""


def attempt(judge, code: str):
    found = judge.evaluate(RELU, candidate(top=REFUSED, init=code), settings=SETTINGS)
    assert found.accepted, (found.reason, found.detail)


def test_it_opens_no_tcp_socket(judge):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt(
            judge,
            f"import socket\nrefused(lambda: socket.create_connection(('127.0.0.1', {port})))\n"
            "refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))\n"
            "refused(lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM))",
        )


def test_it_reaches_no_service_by_its_local_socket(judge, tmp_path):
    address = str(tmp_path / "service")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        attempt(judge, f"import socket\nrefused(lambda: socket.socket(socket.AF_UNIX).connect({address!r}))")
    attempt(judge, "import socket\na, b = socket.socketpair()\na.send(b'x')\nassert b.recv(1) == b'x'")


@pytest.mark.parametrize("who", [str(os.getpid()), "{os.getppid()}"], ids=["judge", "fork_server"])
@pytest.mark.parametrize("what", exhaustive_but(["mem", "environ", "maps", "fd/0", "cwd/."], "mem", "environ"))
def test_it_reads_nothing_of_another_process(judge, who, what):
    attempt(judge, f"refused(lambda: open(f'/proc/{who}/{what}', 'rb').read(1))")


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(str(os.getpid()), id="judge"),
        pytest.param("os.getppid()", id="fork_server", marks=pytest.mark.exhaustive),
        pytest.param("1", id="init", marks=pytest.mark.exhaustive),
    ],
)
def test_it_signals_no_other_process(judge, who):
    attempt(judge, f"refused(os.kill, {who}, 0)\nrefused(os.kill, {who}, signal.SIGCONT)")
    attempt(judge, f"refused(libc, 'tgkill', {who}, {who}, 0)")


def test_it_leaves_its_session_and_group_alone(judge):
    attempt(judge, "refused(os.setsid)\nrefused(os.killpg, os.getpgid(os.getppid()), 0)")


def test_it_debugs_nobody(judge):
    attempt(judge, f"refused(libc, 'ptrace', 0x4206, {os.getpid()}, 0, 0)")
    attempt(judge, "refused(libc, 'ptrace', 0x4206, os.getppid(), 0, 0)\nrefused(os.pidfd_open, os.getppid())")


@needs_landlock
def test_it_writes_only_into_its_own_directories(judge, tmp_path):
    target = tmp_path / "target"
    target.write_text("as it was")
    elsewhere = str(Path(tempfile.gettempdir()) / "kernelwright-made-by-a-candidate")
    attempt(
        judge,
        f"refused(lambda: open({str(target)!r}, 'w'))\nrefused(os.unlink, {str(target)!r})\n"
        f"refused(lambda: open({str(target)!r}).read())\nrefused(os.listdir, {str(tmp_path)!r})\n"
        "refused(lambda: open('/etc/kernelwright', 'w'))\nrefused(lambda: open('/dev/shm/x', 'w'))\n"
        f"refused(os.symlink, '/etc/passwd', {str(tmp_path / 'link')!r})\n"
        f"refused(lambda: open({elsewhere!r}, 'w'))",
    )
    assert target.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [target]
    assert not Path(elsewhere).exists()


def test_its_own_directories_work(judge):
    attempt(
        judge,
        "import tempfile, pathlib\n"
        "for place in ('.', tempfile.gettempdir(), os.environ['HOME']):\n"
        "    pathlib.Path(place, 'x').write_text('x')\n"
        "pathlib.Path(os.environ['TRITON_CACHE_DIR']).mkdir(parents=True)",
    )


def test_it_sees_no_variable_of_the_judge(judge):
    assert SECRET in os.environ
    attempt(judge, f"assert {SECRET!r} not in os.environ and 'hunter2' not in str(os.environ)")


def test_its_program_is_not_in_the_judges_output(judge, capfd):
    attempt(judge, "print('hello'), os.write(1, b'there'), os.write(2, b'you')\nsys.stdout.flush()")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


HANDLES = """
def handles():
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink("/proc/self/fd/" + number)
        except OSError:
            pass
"""


def test_it_has_no_handle_but_its_channel_and_its_arenas(judge):
    code = (
        "kinds = [kind.partition(':')[0] for kind in handles()]\n"
        "assert kinds.count('socket') <= 1 and kinds.count('/memfd') <= 3 and 'pipe' not in kinds, kinds"
    )
    found = judge.evaluate(RELU, candidate(top=HANDLES, init=code), settings=SETTINGS)
    assert found.accepted, (found.reason, found.detail)


def test_it_raises_no_limit(judge):
    attempt(
        judge,
        "import resource\n"
        "limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "try:\n    resource.setrlimit(resource.RLIMIT_FSIZE, (limit + 1, limit + 1))\n"
        "except (OSError, ValueError):\n    pass\nelse:\n    raise RuntimeError('it worked')",
    )


def test_the_codes_that_count_as_refusals():
    assert {1, 13, 111, 2, 22, 18} == {
        errno.EPERM,
        errno.EACCES,
        errno.ECONNREFUSED,
        errno.ENOENT,
        errno.EINVAL,
        errno.EXDEV,
    }

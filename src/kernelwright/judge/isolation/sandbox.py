"""Takes capabilities, files, network, signals and resources from a worker process, and ends the processes of its session.

Everything is done by the process itself, needs no privilege, and cannot be undone by it or its children:

- capabilities are dropped and `no_new_privs` is set;
- Landlock (Linux 5.13 and later) leaves the system readable and only its own directories writable;
- seccomp refuses the network, other processes' memory, namespaces, new sessions and changes of files' times, and ignores
  changes of their modes, owners and attributes;
- resource limits bound files; memory and process counts are watched from outside (`Session`).

A worker's session is all that it started: seccomp refuses setsid.

Used in the order `restrict(...)` has it. `kernelwright doctor` says which of these this kernel really has. Landlock
and seccomp are defence in depth here: no number or verdict rests on them (see `docs/threat-model.md`).

Sources: landlock(7), seccomp(2), prctl(2), capabilities(7), include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kernelwright.errors import SandboxError

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 24, 22, 38
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 47, 4
_LAST_CAPABILITY = 40

# --- Landlock -----------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_FS_ABI1 = (1 << 13) - 1
_NET_ALL = 0b11
_SCOPE_ALL = 0b11
FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

SYSTEM_READABLE = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/dev", "/run")


def _require(done: bool, refusal: str) -> None:
    """Raise with the system's reason where a call was refused."""
    if not done:
        raise SandboxError(f"{refusal}: {os.strerror(ctypes.get_errno())}.")


def landlock_abi() -> int:
    """Version of Landlock this kernel offers; 0 when there is none."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, int(version))


def add_path(ruleset: int, path: Path, rights: int) -> None:
    """Give a rule set rights below a path, if that is there."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # A path that is not there needs no permission.
    try:
        if not path.is_dir():
            rights &= FILE_RIGHTS
        attribute = struct.pack("=Qi", rights, handle)
        _require(libc.syscall(_ADD_RULE, ruleset, 1, attribute, 0) == 0, f"Landlock refused a rule for {path}")
    finally:
        os.close(handle)


def restrict_files(writable: tuple[Path, ...], readable: tuple[Path, ...], device: str) -> bool:
    """Leave `writable` writable, the system and `readable` readable, and nothing else; False without Landlock."""
    abi = landlock_abi()
    if abi == 0:
        return False
    handled = _ALL_FS_ABI1
    handled |= _REFER if abi >= 2 else 0
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL_DEV if abi >= 5 else 0
    attribute = struct.pack("=QQQ", handled, _NET_ALL if abi >= 4 else 0, _SCOPE_ALL if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(_CREATE_RULESET, attribute[:size], ctypes.c_size_t(size), 0)
    _require(ruleset >= 0, "Landlock refused its rule set")
    read = (_EXECUTE | _READ_FILE | _READ_DIR) & handled
    for path in (*map(Path, SYSTEM_READABLE), *readable):
        add_path(ruleset, path, read)
    write_device = (_READ_FILE | _WRITE_FILE | _IOCTL_DEV) & handled
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        add_path(ruleset, Path("/dev") / name, write_device)
    # Drivers name their threads in here, truncating as they write.
    add_path(ruleset, Path("/proc/self"), (_READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE) & handled)
    if device.startswith("cuda"):
        for path in gpu_nodes():
            add_path(ruleset, path, write_device)
        # The driver keeps the bookkeeping of shared device memory here.
        add_path(ruleset, Path("/dev/shm"), handled & ~_EXECUTE)
    for path in writable:
        add_path(ruleset, path, handled)
    _require(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0, "Landlock refused to restrict the process")
    os.close(ruleset)
    return True


def gpu_nodes(devices: Path = Path("/dev")) -> list[Path]:
    """Device files of NVIDIA's driver."""
    return [*devices.glob("nvidia*"), *devices.glob("nvidia-caps/*")]


# --- seccomp ------------------------------------------------------------------------------------------------------

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYSTEM_CALLS = tuple(
    (name, (int(x86), int(aarch64)), answer)
    for line in Path(__file__).with_name("system_calls.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
    for name, x86, aarch64, answer in (line.split(),)
)
"""Name, numbers on x86-64 and aarch64, and answer (`refused` or `ignored`) of each call that a worker may not make."""
_IOCTL = (16, 29)
_SET_FILE_FLAGS = (0x40086602, 0x40046602, 0x401C5820)
"""`FS_IOC_SETFLAGS` in 64 and 32 bits, and `FS_IOC_FSSETXATTR`."""
_SOCKET = (41, 198)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_PRLIMIT = (302, 261)
_SIGNAL_CALLS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo: each names its target in the first argument."""
_CLONE_NEW_ANY = 0x7E020080
_AF_UNIX = 1

_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSED = _ERRNO | errno.EPERM
_LD_ABS, _JEQ, _JSET, _JGE, _RET = 0x20, 0x15, 0x45, 0x35, 0x06


class _BpfProgram:
    """A BPF program in the making."""

    FIRST_ARGUMENT = 16
    """Offset of the first argument's low half in struct seccomp_data."""

    def __init__(self, *instructions: tuple[int, int, int, int]) -> None:
        self._instructions = [*instructions]

    def when(self, number: int, *body: tuple[int, int, int, int]) -> None:
        """Run a body for calls of this number only."""
        self._instructions += [(_JEQ, 0, len(body), number), *body]

    def refuse_unless(self, number: int, *tests: tuple[int, int, int, int]) -> None:
        """Refuse calls of this number unless a test of the first argument jumps over the refusal."""
        self.when(number, (_LD_ABS, 0, 0, self.FIRST_ARGUMENT), *tests, (_RET, 0, 0, _REFUSED), (_RET, 0, 0, _ALLOW))

    def assembled(self) -> bytes:
        """The program, which allows what it does not name."""
        return b"".join(struct.pack("=HBBI", *one) for one in (*self._instructions, (_RET, 0, 0, _ALLOW)))


def call_filter(own_pid: int, scoped_signals: bool) -> bytes:
    """The BPF program. Refused calls return an error rather than kill, so that honest libraries can carry on."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxError(f"No seccomp filter is written for {machine}; wanted {' or '.join(ARCHITECTURES)}.")
    index = 0 if machine == "x86_64" else 1
    # The x32 calls are a second way to everything.
    without_x32 = ((_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _REFUSED)) if index == 0 else ()
    program = _BpfProgram(
        (_LD_ABS, 0, 0, 4),
        (_JEQ, 1, 0, ARCHITECTURES[machine]),
        (_RET, 0, 0, _KILL_PROCESS),
        (_LD_ABS, 0, 0, 0),
        *without_x32,
    )
    for _, numbers, answer in SYSTEM_CALLS:
        if numbers[index] >= 0:
            program.when(numbers[index], (_RET, 0, 0, _REFUSED if answer == "refused" else _ERRNO))
    flags = [(_JEQ, len(_SET_FILE_FLAGS) - at, 0, number) for at, number in enumerate(_SET_FILE_FLAGS)]
    second = _BpfProgram.FIRST_ARGUMENT + 8
    program.when(_IOCTL[index], (_LD_ABS, 0, 0, second), *flags, (_RET, 0, 0, _ALLOW), (_RET, 0, 0, _ERRNO))
    # glibc falls back to clone, whose flags a filter can read, when clone3 is not there.
    program.when(_CLONE3[index], (_RET, 0, 0, _ERRNO | errno.ENOSYS))
    program.refuse_unless(_SOCKET[index], (_JEQ, 1, 0, _AF_UNIX))
    program.refuse_unless(_CLONE[index], (_JSET, 0, 1, _CLONE_NEW_ANY))
    program.refuse_unless(_PRLIMIT[index], (_JEQ, 1, 0, 0))  # 0 is the caller
    if not scoped_signals:  # Landlock's signal scope is better: it lets a worker end its own children
        for numbers in _SIGNAL_CALLS:
            program.refuse_unless(numbers[index], (_JEQ, 2, 0, own_pid), (_JEQ, 1, 0, 0))
    return program.assembled()


def restrict_calls(scoped_signals: bool) -> None:
    """Install the system-call filter; threads and children inherit it. `no_new_privs` must be set already."""
    code = call_filter(os.getpid(), scoped_signals)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    _require(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0) == 0, "seccomp refused the filter")


# --- privileges and resources -------------------------------------------------------------------------------------


def drop_privileges() -> None:
    """Give up every capability, also those that root would get back on exec."""
    _require(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs was refused")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused when there is nothing to drop
    header = struct.pack("=Ii", 0x20080522, 0)
    _require(libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)) == 0, "Dropping capabilities was refused")


def limit_resources(file_limit_bytes: int) -> None:
    """No core files, bounded files and handles."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))
    soft = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))


def hide_memory() -> None:
    """Keep processes of the same user from reading this one's memory, environment and file table."""
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the parent ends, however it ends."""
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become the parent of descendants whose own parent has died, so that they can be found and ended; or stop being it."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def restrict(writable: tuple[Path, ...], device: str, file_limit_bytes: int) -> None:
    """Give up everything a candidate must not have. Call in the worker, before any candidate code."""
    readable = {Path(entry) for entry in (sys.prefix, sys.base_prefix, *sys.path) if entry and Path(entry).exists()}
    limit_resources(file_limit_bytes)
    drop_privileges()
    with_files = restrict_files(writable, tuple(sorted(readable)), device)
    restrict_calls(scoped_signals=with_files and landlock_abi() >= 6)


_WHOLE_WATCH_EVERY = 10
"""Looks at the worker alone for one at its whole session: that takes longer the more processes the machine has."""
_KILL_ROUNDS = 100
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Ending(NamedTuple):
    """The end of a worker process."""

    exit_code: int
    """Exit status; where a signal ended it, minus the signal's number."""
    cause: str | None
    """`memory` or `processes` when the watch ended it; None otherwise."""


@dataclass
class Session:
    """A worker's session, seen by the worker's parent."""

    pid: int
    """Process id of the worker, which is its session's too."""
    memory_limit_bytes: int
    """Anonymous memory of all its processes."""
    process_limit: int
    cause: str | None = None
    """Limit for which it was ended; None as long as it keeps both."""
    looks: int = 0

    def watch(self) -> None:
        """End it where it has grown beyond its limits."""
        if self.cause is not None:
            return
        self.looks += 1
        members = [self.pid] if self.looks % _WHOLE_WATCH_EVERY else session_members(self.pid)
        if len(members) > self.process_limit:
            self.cause = "processes"
        elif sum(map(anonymous_bytes, members)) > self.memory_limit_bytes:
            self.cause = "memory"
        if self.cause is not None:
            self._kill()
            signal_each([self.pid], signal.SIGKILL)  # one that was just forked is in no session of its own yet

    def end(self, grace_s: float = 0.0) -> Ending:
        """Kill all its processes, the worker only if it still lives after `grace_s`, and tell how the worker ended."""
        ended, status = 0, 0
        deadline_s = time.monotonic() + grace_s
        while not ended and time.monotonic() < deadline_s:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            time.sleep(0.002)
        self._kill()
        if not ended:
            signal_each([self.pid], signal.SIGKILL)  # as in `watch`
            _, status = os.waitpid(self.pid, 0)
        # Orphans of the session come to us; none may outlive the worker.
        for _ in range(_KILL_ROUNDS):
            if not (left := session_members(self.pid, zombies=True)):
                break
            self._kill()
            for pid in left:
                with contextlib.suppress(ChildProcessError):  # its own parent has not died or not reaped it yet
                    os.waitpid(pid, 0)
        return Ending(os.waitstatus_to_exitcode(status), self.cause)

    def _kill(self) -> None:
        """Kill until nothing is left: a process may fork while it is being looked for, but stopped ones may not."""
        signal_each(session_members(self.pid), signal.SIGSTOP)
        for _ in range(_KILL_ROUNDS):
            if not (members := session_members(self.pid)):
                return
            signal_each(members, signal.SIGKILL)


def session_members(session: int, *, zombies: bool = False) -> list[int]:
    """Ids of a session's processes."""
    members = []
    # The youngest first: one that lives for a millisecond is gone by the end.
    for name in reversed(os.listdir("/proc")):
        try:
            if not name.isdigit() or os.getsid(int(name)) != session:
                continue
            if not zombies:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                        continue
        except OSError:
            continue  # it ended while we looked
        members.append(int(name))
    return members


def signal_each(pids: list[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is not shared; 0 of one that has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES

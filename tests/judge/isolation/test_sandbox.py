"""What a worker gives up: its filter as a table, its rules before a counting kernel, and the real thing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest

from kernelwright.cli.doctor import isolation_here
from kernelwright.errors import SandboxError
from kernelwright.judge.isolation import sandbox
from tests.judge.isolation.forked import in_child

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
X86, ARM = 0xC000003E, 0xC00000B7


# --- the filter: a BPF program run by an interpreter of the few instructions it has -------------


def run_filter(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The action of a seccomp program for one call."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    counter, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = instructions[counter]
        counter += 1
        if code == 0x20:  # load a word at an absolute offset
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            counter += if_true if holds else if_false


@pytest.fixture
def filters(monkeypatch):
    made = {}
    for machine, architecture in (("x86_64", X86), ("aarch64", ARM)):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        for scoped in (True, False):
            made[architecture, scoped] = sandbox.call_filter(4242, scoped)
    return made


# Numbers from arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of the kernel.
REFUSED = {
    "connect": (42, 203),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "setsid": (112, 157),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "kcmp": (312, 272),
    "personality": (135, 92),
    "init_module": (175, 105),
    "reboot": (169, 142),
}
PASSED = {
    "read": (0, 63),
    "write": (1, 64),
    "mmap": (9, 222),
    "openat": (257, 56),
    "execve": (59, 221),
    "futex": (202, 98),
    "exit_group": (231, 94),
    "getpid": (39, 172),
    "recvmsg": (47, 212),
    "ioctl": (16, 29),
    "setpgid": (109, 154),
    "wait4": (61, 260),
    "memfd_create": (319, 279),
    "socketpair": (53, 199),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("architecture", "column"), [(X86, 0), (ARM, 1)])
def test_a_refused_call_gets_an_error(filters, name, architecture, column):
    for scoped in (True, False):
        assert run_filter(filters[architecture, scoped], architecture, REFUSED[name][column]) == EPERM


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize(("architecture", "column"), [(X86, 0), (ARM, 1)])
def test_an_ordinary_call_passes(filters, name, architecture, column):
    for scoped in (True, False):
        assert run_filter(filters[architecture, scoped], architecture, PASSED[name][column], (1, 2, 3)) == ALLOW


@pytest.mark.parametrize(("architecture", "number"), [(X86, 41), (ARM, 198)])
def test_only_local_sockets_can_be_made(filters, architecture, number):
    for family in range(50):
        wanted = ALLOW if family == socket.AF_UNIX else EPERM
        assert run_filter(filters[architecture, True], architecture, number, (family, 1, 0)) == wanted
    # The kernel reads the low half only: a high half must not smuggle another family in.
    assert run_filter(filters[architecture, True], architecture, number, (1 << 32 | 2, 1, 0)) == EPERM


@pytest.mark.parametrize(("architecture", "number"), [(X86, 56), (ARM, 220)])
def test_threads_and_children_can_be_made_but_no_namespaces(filters, architecture, number):
    thread, fork = 0x003D0F00, 0x01200011
    for flags in (thread, fork, signal.SIGCHLD):
        assert run_filter(filters[architecture, True], architecture, number, (flags,)) == ALLOW
    for namespace in (
        0x00020000,
        0x02000000,
        0x04000000,
        0x08000000,
        0x10000000,
        0x20000000,
        0x40000000,
        0x80,
    ):
        assert run_filter(filters[architecture, True], architecture, number, (fork & ~0xFF | namespace,)) == EPERM


def test_clone3_whose_flags_cannot_be_seen_does_not_exist(filters):
    assert run_filter(filters[X86, True], X86, 435) == ENOSYS
    assert run_filter(filters[ARM, True], ARM, 435) == ENOSYS


@pytest.mark.parametrize(("architecture", "number"), [(X86, 302), (ARM, 261)])
def test_limits_of_other_processes_are_out_of_reach(filters, architecture, number):
    assert run_filter(filters[architecture, True], architecture, number, (0, 7)) == ALLOW
    assert run_filter(filters[architecture, True], architecture, number, (4242, 7)) == EPERM


@pytest.mark.parametrize(("architecture", "number"), [(X86, 62), (ARM, 129)])
def test_without_landlocks_scope_the_filter_bounds_signals(filters, architecture, number):
    for target, action in ((4242, ALLOW), (0, ALLOW), (1, EPERM), (2**64 - 1, EPERM)):
        assert run_filter(filters[architecture, False], architecture, number, (target, 9)) == action
        assert run_filter(filters[architecture, True], architecture, number, (target, 9)) == ALLOW


def test_calls_of_another_architecture_end_the_process(filters):
    for wrong in (0x40000003, ARM, 0):  # i386 among them, whose numbers mean other calls
        assert run_filter(filters[X86, True], wrong, 1) == KILL
    assert run_filter(filters[ARM, True], X86, 1) == KILL


def test_the_x32_way_round_is_closed(filters):
    for number in (0, 41, 101):
        assert run_filter(filters[X86, True], X86, 0x40000000 | number) == EPERM


def test_every_jump_lands_inside_the_program(filters):
    for program in filters.values():
        instructions = list(struct.iter_unpack("=HBBI", program))
        assert instructions[-1][0] == 0x06
        for index, (code, if_true, if_false, _) in enumerate(instructions):
            if code in (0x15, 0x35, 0x45):
                assert index + 1 + max(if_true, if_false) < len(instructions)


def test_an_unknown_machine_has_no_filter_and_says_so(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(SandboxError, match="vax"):
        sandbox.call_filter(1, True)
    assert isolation_here()["seccomp"] == "no filter for vax"


# --- the requests to the kernel, with a kernel that only counts -----------------------------------


class FakeLibc:
    """Answers as a kernel with Landlock of one version would; fails where told."""

    def __init__(self, abi, refuse=()):
        self.abi, self.refuse = abi, refuse
        self.calls = []

    def syscall(self, number, *arguments):
        name = {444: "create", 445: "rule", 446: "restrict"}[number]
        if name == "create" and arguments[0] is None:
            return self.abi if self.abi else -1
        self.calls.append((name, *arguments))
        if name in self.refuse:
            return -1
        return os.open(os.devnull, os.O_RDONLY) if name == "create" else 0

    def prctl(self, option, *arguments):
        self.calls.append((f"prctl {option}", *arguments))
        return -1 if f"prctl {option}" in self.refuse else 0

    def capset(self, header, data):
        self.calls.append(("capset", header, data))
        return -1 if "capset" in self.refuse else 0

    def made(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def kernel(monkeypatch):
    def install(abi=7, refuse=()):
        fake = FakeLibc(abi, refuse)
        monkeypatch.setattr(sandbox, "libc", fake)
        return fake

    return install


@pytest.mark.parametrize(("abi", "size"), [(1, 8), (2, 8), (3, 8), (4, 16), (5, 16), (6, 24), (7, 24)])
def test_the_rule_set_asks_for_what_its_version_knows(kernel, tmp_path, abi, size):
    fake = kernel(abi)
    assert sandbox.restrict_files((tmp_path,), (Path("/usr"),), "cpu")
    ((attribute, length, flags),) = fake.made("create")
    assert len(attribute) == length.value == size
    assert flags == 0
    files, network, scope = (*struct.unpack(f"={size // 8}Q", attribute), 0, 0)[:3]
    bits = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16, 7: 16}[abi]
    assert files == (1 << bits) - 1
    assert network == (3 if abi >= 4 else 0)
    assert scope == (3 if abi >= 6 else 0)
    rules = {rights for _, _, attribute, _ in fake.made("rule") for rights in struct.unpack("=Qi", attribute)[:1]}
    assert all(rights & ~files == 0 for rights in rules)
    assert files in rules
    assert len(fake.made("restrict")) == 1


def test_without_landlock_nothing_is_asked_and_the_caller_is_told(kernel, tmp_path):
    fake = kernel(0)
    assert sandbox.restrict_files((tmp_path,), (), "cpu") is False
    assert fake.calls == []
    assert isolation_here()["landlock"].startswith("not available")
    assert isolation_here()["landlock_signals"] == "by seccomp"


def test_only_a_gpu_opens_the_drivers_devices(kernel, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(sandbox, "add_path", lambda ruleset, path, rights: opened.append(path))
    monkeypatch.setattr(sandbox, "gpu_nodes", lambda: [Path("/dev/nvidia3")])
    kernel()
    sandbox.restrict_files((tmp_path,), (), "cuda:0")
    assert {Path("/dev/nvidia3"), Path("/dev/shm"), tmp_path} <= set(opened)
    opened.clear()
    sandbox.restrict_files((tmp_path,), (), "cpu")
    assert not {Path("/dev/nvidia3"), Path("/dev/shm")} & set(opened)


def test_the_device_files_of_the_driver(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia-caps" / "cap1").touch()
    names = {path.name for path in sandbox.gpu_nodes(tmp_path)}
    assert names == {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps", "cap1"}


@pytest.mark.parametrize("step", ["create", "rule", "restrict"])
def test_a_refusal_by_landlock_is_an_error_not_a_silence(kernel, tmp_path, step):
    kernel(refuse=(step,))
    with pytest.raises(SandboxError, match="Landlock refused"):
        sandbox.restrict_files((tmp_path,), (), "cpu")


def test_a_path_that_is_not_there_needs_no_rule(kernel, tmp_path):
    fake = kernel()
    sandbox.add_path(0, tmp_path / "nowhere", 1)
    assert fake.calls == []


def test_a_rule_for_a_file_asks_for_no_rights_on_directories(kernel, tmp_path):
    fake = kernel()
    (tmp_path / "file").touch()
    sandbox.add_path(0, tmp_path / "file", (1 << 16) - 1)
    ((_, _, attribute, _),) = fake.made("rule")
    assert struct.unpack("=Qi", attribute)[0] == sandbox.FILE_RIGHTS


@pytest.mark.parametrize("step", [f"prctl {sandbox.PR_SET_NO_NEW_PRIVS}", "capset"])
def test_privileges_that_cannot_be_dropped_are_an_error(kernel, step):
    kernel(refuse=(step,))
    with pytest.raises(SandboxError, match="refused"):
        sandbox.drop_privileges()


def test_every_capability_is_dropped_from_every_set(kernel):
    fake = kernel()
    sandbox.drop_privileges()
    assert [arguments[0] for arguments in fake.made(f"prctl {sandbox.PR_CAPBSET_DROP}")] == list(range(41))
    ((_, data),) = fake.made("capset")
    assert data == bytes(24)


def test_a_refused_filter_is_an_error(kernel):
    kernel(refuse=(f"prctl {sandbox.PR_SET_SECCOMP}",))
    with pytest.raises(SandboxError, match="seccomp refused"):
        sandbox.restrict_calls(scoped_signals=True)


def test_the_filter_is_handed_to_the_kernel_whole(kernel):
    fake = kernel()
    sandbox.restrict_calls(scoped_signals=True)
    ((mode, program, *_),) = fake.made(f"prctl {sandbox.PR_SET_SECCOMP}")
    length, _ = struct.unpack("=HxxxxxxQ", ctypes.string_at(program, 16))
    assert mode == 2
    assert length == len(sandbox.call_filter(os.getpid(), True)) // 8


def test_resources_are_bounded_for_good(monkeypatch):
    limits = {}
    monkeypatch.setattr(sandbox.resource, "setrlimit", limits.__setitem__)
    sandbox.limit_resources(77)
    assert limits[resource.RLIMIT_CORE] == (0, 0)
    assert limits[resource.RLIMIT_FSIZE] == (77, 77)
    soft, hard = limits[resource.RLIMIT_NOFILE]
    assert soft == hard <= 8192


@pytest.mark.parametrize(("abi", "scoped"), [(0, False), (5, False), (6, True)])
def test_everything_is_given_up_and_privileges_first(kernel, monkeypatch, tmp_path, abi, scoped):
    fake = kernel(abi)
    order = []
    monkeypatch.setattr(sandbox, "limit_resources", lambda limit: order.append(("resources", limit)))
    monkeypatch.setattr(sandbox, "drop_privileges", lambda: order.append("privileges"))
    monkeypatch.setattr(sandbox, "restrict_calls", lambda *, scoped_signals: order.append(("calls", scoped_signals)))
    sandbox.restrict((tmp_path,), "cpu", 123)
    assert order == [("resources", 123), "privileges", ("calls", scoped)]
    assert bool(fake.made("restrict")) == (abi > 0)


def test_hiding_and_adopting_ask_the_kernel(kernel):
    fake = kernel()
    sandbox.hide_memory()
    sandbox.adopt_orphans()
    sandbox.die_with_parent()
    assert fake.made(f"prctl {sandbox.PR_SET_PDEATHSIG}")[0][0] == signal.SIGKILL
    assert fake.made(f"prctl {sandbox.PR_SET_DUMPABLE}")[0][0] == 0
    assert fake.made(f"prctl {sandbox.PR_SET_CHILD_SUBREAPER}")[0][0] == 1


# --- the real thing, in a child --------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    private, other = tmp_path_factory.mktemp("private"), tmp_path_factory.mktemp("other")
    (other / "secret").write_text("secret")
    return private, other


needs_landlock = pytest.mark.skipif(sandbox.landlock_abi() == 0, reason="no Landlock here")


def restricted(places, attempt):
    """The outcome of `attempt` in a process that may write to the first place only."""

    def run():
        sandbox.restrict((places[0],), "cpu", 1 << 20)
        return attempt()

    return in_child(run)


def test_its_own_directory_can_be_written_and_the_system_read(places):
    def attempt():
        (places[0] / "mine").write_text("x")
        (places[0] / "folder").mkdir()
        (places[0] / "mine").rename(places[0] / "folder" / "mine")
        return [Path("/etc/passwd").exists(), os.path.exists("/usr/lib"), len(os.urandom(4))]

    assert restricted(places, attempt) == [True, True, 4]


@needs_landlock
def test_nothing_else_can_be_written_or_read(places):
    secret = places[1] / "secret"
    refused = f"errno {errno.EACCES}"
    assert restricted(places, lambda: secret.read_text()) == refused
    assert restricted(places, lambda: secret.write_text("x")) == refused
    assert restricted(places, lambda: (places[1] / "new").write_text("x")) == refused
    assert restricted(places, lambda: secret.unlink()) == refused
    assert restricted(places, lambda: os.listdir(places[1])) == refused
    assert restricted(places, lambda: Path("/etc/passwd").open("a").close()) == refused
    assert restricted(places, lambda: os.link(secret, places[0] / "link")) in (
        refused,
        f"errno {errno.EXDEV}",
    )
    assert secret.read_text() == "secret"


def test_no_file_gets_another_mode_owner_time_or_attribute(places):
    files = [places[1] / "secret", places[0] / "own"]
    files[1].write_text("own")

    def attempt():
        for path in files:
            handle = os.open(path, os.O_PATH)
            os.chmod(path, 0o777)
            os.chmod(f"/proc/self/fd/{handle}", 0o777)
            os.chown(path, os.getuid(), os.getgid())
            os.setxattr(path, "user.note", b"x")
            with contextlib.suppress(PermissionError):
                os.utime(path, (1, 1))
        shutil.copy(files[1], places[0] / "copied")
        (places[0] / "touched").touch()
        return (places[0] / "copied").read_text() + (places[0] / "touched").read_text()

    before = [(path.stat().st_mode, path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in files]
    assert restricted(places, attempt) == "own"
    assert [(path.stat().st_mode, path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in files] == before
    assert not any(os.listxattr(path) for path in files)


def test_flags_of_files_stay(places):
    get, change, no_access_times = 0x80086601, 0x40086602, 0x80  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOATIME_FL

    def attempt():
        with (places[0] / "flagged").open("w") as file:
            before = fcntl.ioctl(file, get, bytes(8))
            fcntl.ioctl(file, change, struct.pack("l", no_access_times))
            return fcntl.ioctl(file, get, bytes(8)) == before

    assert restricted(places, attempt) in (True, f"errno {errno.ENOTTY}")


@needs_landlock
def test_a_link_out_of_the_directory_leads_nowhere(places):
    def attempt():
        (places[0] / "way-out").symlink_to(places[1] / "secret")
        return (places[0] / "way-out").read_text()

    assert restricted(places, attempt) == f"errno {errno.EACCES}"


def test_no_socket_but_a_local_one(places):
    def family(number):
        return restricted(places, lambda: socket.socket(number, socket.SOCK_STREAM).fileno() > 0)

    assert family(socket.AF_INET) == f"errno {errno.EPERM}"
    assert family(socket.AF_INET6) == f"errno {errno.EPERM}"
    assert family(socket.AF_NETLINK) == f"errno {errno.EPERM}"
    assert family(socket.AF_UNIX) is True


def test_other_processes_are_out_of_reach(places):
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def called(result):
        return result if result == 0 else f"errno {ctypes.get_errno()}"

    refused = f"errno {errno.EPERM}"
    assert restricted(places, lambda: os.kill(parent, 0)) == refused
    assert restricted(places, lambda: os.kill(1, signal.SIGCONT)) == refused
    assert restricted(places, lambda: called(libc.ptrace(16, parent, None, None))) == refused
    assert restricted(places, lambda: os.pidfd_open(parent)) == refused
    assert restricted(places, lambda: os.setsid()) == refused
    assert restricted(places, lambda: called(libc.unshare(0x10000000))) == refused
    assert restricted(places, lambda: resource.prlimit(parent, resource.RLIMIT_CPU)) == refused
    outcome = restricted(places, lambda: Path(f"/proc/{parent}/environ").read_bytes().decode()[:1])
    assert outcome in (f"errno {errno.EACCES}", f"errno {errno.EPERM}")


def test_other_processes_are_neither_slowed_nor_placed_nor_met_in_memory_by_name(places):
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    refused = f"errno {errno.EPERM}"

    def called(result):
        return result >= 0 or f"errno {ctypes.get_errno()}"

    assert restricted(places, lambda: os.setpriority(os.PRIO_PROCESS, parent, 5)) == refused
    assert restricted(places, lambda: os.sched_setaffinity(parent, {0})) == refused
    assert restricted(places, lambda: os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0))) == refused
    assert restricted(places, lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))) == refused
    assert restricted(places, lambda: called(libc.shmget(0x6B77, 4096, 0o1600))) == refused
    assert restricted(places, lambda: called(libc.msgget(0x6B77, 0o1600))) == refused
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0


def test_its_own_children_and_threads_work(places):
    def attempt():
        child = os.fork()
        if child == 0:
            signal.pause()
        os.kill(child, signal.SIGKILL)
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return os.WTERMSIG(os.waitpid(child, 0)[1])

    if sandbox.landlock_abi() >= 6:
        assert restricted(places, attempt) == signal.SIGKILL
    assert restricted(places, lambda: os.waitstatus_to_exitcode(os.system("true"))) == 0


def test_what_is_given_up_cannot_be_taken_back(places):
    def attempt():
        sandbox.libc.prctl(23, 0)
        status = Path("/proc/self/status").read_text()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in status.splitlines())}

    status = restricted(places, attempt)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    if os.geteuid() == 0:
        assert int(status["CapBnd"], 16) == 0


def test_files_are_bounded(places):
    def attempt():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with (places[0] / "large").open("wb") as file:
            return sum(file.raw.write(bytes(1 << 20)) or 0 for _ in range(2))

    assert restricted(places, attempt) == f"errno {errno.EFBIG}"
    assert restricted(places, lambda: list(resource.getrlimit(resource.RLIMIT_CORE))) == [0, 0]
    assert restricted(places, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 8192) is True


def test_hidden_memory_belongs_to_nobody():
    def attempt():
        sandbox.hide_memory()
        return sandbox.libc.prctl(3, 0, 0, 0, 0)

    assert in_child(attempt) == 0


def test_the_description_says_what_this_kernel_has():
    assert set(isolation_here()) == {
        "landlock",
        "landlock_signals",
        "landlock_network",
        "seccomp",
        "capabilities",
        "session",
        "user",
    }

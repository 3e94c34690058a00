"""No text, file, process or message of a candidate ends an evaluation in a fault, and nothing of it stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation.sandbox import session_members
from kernelwright.records import Candidate, Evaluation
from tests.judge.snippets import LOCKS, RELU, candidate

HURRIED = Settings.quick(
    threads=1,
    timed=False,
    thorough=False,
    stall_limit_s=2.0,
    run_limit_s=2.0,
    memory_limit_bytes=1 << 30,
    file_limit_bytes=1 << 28,
)
HONEST = candidate().source

TEXTS = {
    "nothing": "",
    "a null byte": HONEST + "\0",
    "a null byte in a string": HONEST + "x = '\0'\n",
    "half a surrogate pair": HONEST + "x = '\ud800'\n",
    "a byte-order mark": "\ufeff" + HONEST,
    "form feeds": "\f" + HONEST.replace("\n\n", "\n\f\n"),
    "carriage returns": HONEST.replace("\n", "\r"),
    "both": HONEST.replace("\n", "\r\n"),
    "another encoding": "# coding: utf-16\n" + HONEST,
    "an encoding that is none": "# coding: nonesuch\n" + HONEST,
    "parentheses": "x = " + "(" * 5000 + ")" * 5000,
    "minuses": "x = " + "-" * 30_000 + "1\n" + HONEST,
    "a long sum": "x = " + " + ".join(["1"] * 900) + "\n" + HONEST,
    "a longer sum": "x = " + " + ".join(["1"] * 100_000) + "\n" + HONEST,
    "attributes": "x = a" + ".b" * 50_000 + "\n" + HONEST,
    "blocks": "".join(" " * depth + "if 1:\n" for depth in range(99)) + " " * 99 + "pass\n" + HONEST,
    "a long decimal integer": "x = " + "9" * 100_000 + "\n" + HONEST,
    "a long hexadecimal integer": "x = 0x" + "f" * 100_000 + "\n" + HONEST,
    "a power of a power": "x = lambda: 9 ** 9 ** 9 ** 9\n" + HONEST,
    "a long string": "x = '" + "a" * 5_000_000 + "'\n" + HONEST,
    "many statements": "x = 1;" * 100_000 + "\n" + HONEST,
    "many lines": "\n" * 2_000_000 + HONEST,
    "a string of brackets": "x = '" + "open(" * 100_000 + "'\n" + HONEST,
}
SOCKET = """
import socket
def channel():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name).startswith("socket:"):
                return int(name)
        except OSError:
            pass
"""
FILES = {
    "deep folders": "for _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "odd names": "for n in range(1, 256):\n    if n != 47: open(b'f' + bytes([n]), 'w').close()",
    "names like options": "os.mkdir('-rf'); os.mkdir('--help'); os.mkdir('a\\n-rf')",
    "read-only folders": "os.makedirs('a/b/c')\nfor name in ('a/b/c', 'a/b', 'a'): os.chmod(name, 0)",
    "its own folder": "os.chmod('.', 0)",
    "the folder of its caches": "os.chmod(os.path.dirname(os.environ['TRITON_CACHE_DIR']), 0)",
    "its own folder removed": "import shutil; shutil.rmtree('.', ignore_errors=True)",
    "pipes": "os.mkfifo('f'); os.remove('candidate.py'); os.mkfifo('candidate.py'); raise ValueError('x')",
    "a pipe for its log": "os.remove('output.log'); os.mkfifo('output.log'); raise RuntimeError('Error building extension')",
    "a pipe for its stack": "os.remove('stack.log'); os.mkfifo('stack.log'); time.sleep(1000)",
    "a socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('s')",
    "loops of links": "os.symlink('l', 'l'); os.symlink('.', 'here'); os.symlink('/', 'root'); os.symlink('..', 'up')",
    "thousands": "for n in range(5000): open(f'f{n}', 'w').close()",
    "a large file": "f = open('big', 'w'); f.truncate(1 << 30)",
    "a large log": "sys.stdout.write('x' * 10**8)",
}
PROCESSES = {
    "a double fork": "if os.fork() == 0:\n    if os.fork() == 0:\n        while True: time.sleep(1)\n    os._exit(0)",
    "another group": "if os.fork() == 0:\n    os.setpgid(0, 0)\n    while True: time.sleep(1)",
    "a new session": "if os.fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n    while True: time.sleep(1)",
    "a child without a parent": "if os.fork(): os._exit(0)\nwhile True: time.sleep(1)",
    "two that answer": "os.fork()",
    "no output": "for number in range(3): os.close(number)",
    "no files": "os.closerange(0, 10000)",
    "as many as it can": "while True:\n    try: os.fork()\n    except OSError: pass",
    "one that stops": "os.kill(os.getpid(), signal.SIGSTOP)",
    "another program": "os.execv('/bin/sleep', ['sleep', '1000'])",
    "one that leaves": "import atexit; atexit.register(time.sleep, 1000); sys.exit(0)",
    "an end by SIGUSR1": "signal.signal(signal.SIGUSR1, signal.SIG_DFL)\nwhile True: pass",
    "many threads": "import threading\nfor _ in range(500): threading.Thread(target=time.sleep, args=(1000,)).start()",
    "no handles": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
    "no processor time": "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "half an answer": "os.write(channel(), b'ab'); time.sleep(1000)",
    "a flood of answers": "while True: os.write(channel(), b'{}' * 10000)",
    "a closed channel": "socket.socket(fileno=channel()).shutdown(2); time.sleep(1000)",
}
WORDS = {
    "half a surrogate pair": "raise ValueError('\\ud800')",
    "a long message": "raise ValueError('x' * 10**8)",
    "no message": "raise type('E', (Exception,), {'__str__': lambda self: 5})()",
    "a message that never ends": "def text(self):\n    while True: pass\nraise type('E', (Exception,), {'__str__': text})()",
    "a strange name": "raise type('\\ud800' * 1000, (Exception,), {})('x')",
    "no exception": "raise KeyboardInterrupt",
    "a strange status": "raise SystemExit({'a': '\\ud800'})",
    "nested groups": "e = ValueError()\nfor _ in range(3000): e = ExceptionGroup('g', [e])\nraise e",
    "names of parameters": "setattr(self, '\\ud800', torch.nn.Parameter(torch.ones(3)))",
    "a state that is none": "self.state_dict = lambda *a, **k: {1: 2}",
}
OUTPUTS = {
    "deep lists": "for _ in range(5000): x = [x]\nreturn x",
    "a list of itself": "y = []; y.append(y)\nreturn y",
    "strange keys": "return {'\\ud800': x, 1: x, None: x, (1, 2): x}",
    "a long integer": "return 10 ** 10000",
    "a long text": "return 'x' * 10**8",
    "no number": "return float('nan')",
    "a huge view": "return x[0, 0].expand(10**9, 10**9)",
    "no memory": "x.untyped_storage().resize_(0)\nreturn x",
    "a sparse one": "return x.to_sparse()",
    "one without data": "return x.to('meta')",
}
KINDS = {
    "text": {name: Candidate(source=text) for name, text in TEXTS.items()},
    "file": {name: candidate(init=code) for name, code in FILES.items()},
    "process": {name: candidate(init=code, top=SOCKET) for name, code in PROCESSES.items()},
    "words": {name: candidate(init=code) for name, code in WORDS.items()},
    "output": {name: candidate(code) for name, code in OUTPUTS.items()},
}


QUICK = {"half a surrogate pair", "minuses"}
QUICK |= {"read-only folders", "a double fork", "as many as it can", "a flood of answers"}
CASES = [
    pytest.param(kind, what, marks=[] if what in QUICK else [pytest.mark.exhaustive])
    for kind, cases in KINDS.items()
    for what in cases
]


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_an_evaluation_ends_with_a_verdict_and_leaves_nothing(judge: Judge, temporary, kind, what):
    found = judge.evaluate(RELU, KINDS[kind][what], settings=HURRIED)
    assert Evaluation.model_validate_json(found.model_dump_json().encode()).verdict is found.verdict
    assert {path.name for path in temporary.glob("kernelwright-*")} <= {*LOCKS}
    assert [pid for pid in descendants_of(judge.fork_server.process.pid) if session_members(pid)] == []


def descendants_of(parent: int) -> list[int]:
    """Children of the process that forks workers, which adopts what their death leaves."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    return [pid for pid, above in parents.items() if above == parent and os.path.exists(f"/proc/{pid}")]

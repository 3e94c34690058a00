"""Run a function in a forked child, for what cannot be undone in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child, through JSON.

    An OSError comes back as `"errno 1"`, any other exception as `"ValueError: ..."`, and death by a signal as
    `"SIGKILL"`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer = function()
            except OSError as error:
                answer = f"errno {error.errno}"
            except Exception as error:  # noqa: BLE001 - handed to the parent
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    _, status = os.waitpid(pid, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else json.loads(data)

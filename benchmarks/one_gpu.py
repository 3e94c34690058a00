"""Runs a command that finds the device file of one GPU only, as in a container with one GPU.

    python3 benchmarks/one_gpu.py 2 python3 benchmarks/context_cost.py RUN_DIR --contexts-only    # as root, on Linux

`CUDA_VISIBLE_DEVICES` hides a GPU from CUDA, but the driver still opens the files of all GPUs for each context. In a mount
namespace of its own the command has a /dev with one of them. The GPU's number is that of `nvidia-smi`, and in there it is
`cuda:0`.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

import pynvml

CLONE_NEWNS = 1 << 17
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    if _libc.mount(source.encode(), str(target).encode(), kind.encode(), flags, options.encode()):
        error = ctypes.get_errno()
        raise OSError(error, f"mount {source} on {target}: {os.strerror(error)}")


def hide_others(gpu: int) -> None:
    """Give this process a /dev without the files of other GPUs.

    Args:
        gpu: Number of the GPU's device file.

    Raises:
        OSError: this process may not mount.
    """
    if _libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "wanted a mount namespace; this process may not make one")
    _mount("none", Path("/"), "none", MS_REC | MS_PRIVATE)
    made, old = Path(tempfile.mkdtemp(prefix="one-gpu-")), Path("/dev")
    _mount("tmpfs", made, "tmpfs", 0, "mode=755,size=1m")
    for entry in old.iterdir():
        if (number := re.fullmatch(r"nvidia(\d+)", entry.name)) and int(number[1]) != gpu:
            continue
        mine, found = made / entry.name, entry.lstat()
        if stat.S_ISLNK(found.st_mode):
            mine.symlink_to(entry.readlink())
        elif stat.S_ISDIR(found.st_mode):
            mine.mkdir()
            _mount(str(entry), mine, "none", MS_BIND | MS_REC)
        elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            os.mknod(mine, found.st_mode, found.st_rdev)
            mine.chmod(stat.S_IMODE(found.st_mode))
    _mount(str(made), old, "none", MS_MOVE)
    # The driver makes files of GPUs that it misses, where it can.
    _mount("none", old, "none", MS_REMOUNT | MS_BIND | MS_RDONLY)


def device_file(gpu: int) -> int:
    """Number of a GPU's device file, which need not be the GPU's own where a container has some of a host's GPUs."""
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByIndex(gpu)))
    finally:
        pynvml.nvmlShutdown()


def main() -> None:
    """Hide, and become the command."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        raise SystemExit(__doc__)
    hide_others(device_file(int(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()

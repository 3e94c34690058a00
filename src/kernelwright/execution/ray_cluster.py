"""Connects to a Ray cluster and counts its places for judges."""

from __future__ import annotations

import os
import socket
from typing import Any

from kernelwright.errors import ConfigError, DeviceError

JUDGE_RESOURCE = "kernelwright_judge"
"""Custom resource of a node: number of CPU judges that may time there. One, unless timing does not matter."""

OBJECT_STORE_BYTES = 80 << 20
"""Object store of a Ray started here: records are small, and Ray refuses less than 75 MiB."""

_CONNECT_LIMIT_S = 10.0


def import_ray() -> Any:
    """The package; raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Wanted Ray, to judge on many machines; {error}. Install it with `pip install 'kernelwright[ray]'`."
        ) from error
    return ray


def room_in(resources: dict[str, float], device: str, per_gpu: int) -> int:
    """Number of judges that a cluster with these resources has places for; raises DeviceError at none."""
    room = int(resources.get("GPU", 0)) * per_gpu if device == "cuda" else int(resources.get(JUDGE_RESOURCE, 0))
    if room:
        return room
    what = "a GPU" if device == "cuda" else f"the resource `{JUDGE_RESOURCE}`"
    start = f"""Start each node with `ray start --resources='{{"{JUDGE_RESOURCE}": 1}}' ...`."""
    do = "Start nodes that have one, or judge on device cpu." if device == "cuda" else start
    raise DeviceError(f"Wanted a Ray cluster with {what}; found {', '.join(sorted(resources))}. {do}")


def connect(ray: Any, address: str | None, slots: int | None) -> None:
    """Connect to a cluster, or start one on this machine with places for `slots` judges; raises DeviceError."""
    quiet = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
    try:
        if address is not None:
            host, colon, port = address.rpartition(":")
            if colon and "//" not in host:
                # Ray asks for minutes; a port that nobody listens on is known at once.
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_LIMIT_S).close()
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            places = {JUDGE_RESOURCE: slots or 1}
            ray.init(address="local", resources=places, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise DeviceError(
            f"Wanted the Ray cluster at {address or 'this machine'}; {error}. Start it with `ray start --head`."
        ) from error

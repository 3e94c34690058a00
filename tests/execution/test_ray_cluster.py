"""A Ray cluster is connected to, or one is started that ends with its pool."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from kernelwright.errors import DeviceError, InfrastructureError
from kernelwright.execution.local import Job
from kernelwright.execution.ray_cluster import connect
from kernelwright.execution.ray_pool import RayPool
from kernelwright.judge import Settings
from kernelwright.records import Candidate
from tests.execution.test_ray_pool import SETTINGS, fake_pool, job, run
from tests.judge.snippets import RELU, candidate

ray = pytest.importorskip("ray")


def test_a_cluster_that_listens_is_connected_to():
    started = []
    fake = SimpleNamespace(init=lambda **options: started.append(options["address"]), exceptions=ray.exceptions)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        connect(fake, address, None)
        server.settimeout(5.0)
        server.accept()[0].close()
    with pytest.raises(DeviceError, match=address):
        connect(fake, address, None)
    connect(fake, "auto", None)
    connect(fake, "ray://nobody.invalid:10001", None)  # Ray's own client knows how to ask
    assert started == [address, "auto", "ray://nobody.invalid:10001"]


def test_a_cluster_that_is_not_there_is_a_device_error(ray_home):
    with pytest.raises(DeviceError, match=r"Wanted the Ray cluster at 127\.0\.0\.1:1"):
        RayPool(SETTINGS, device="cpu", address="127.0.0.1:1")


@pytest.mark.exhaustive
def test_a_ray_of_its_own_ends_with_the_pool(ray_home):
    with fake_pool(slots=1) as pool:
        assert len(run(pool, [job(n) for n in range(2)])) == 2
        with pytest.raises(DeviceError, match="with a GPU"):
            RayPool(SETTINGS)
        assert ray.is_initialized()
    assert not ray.is_initialized()
    with pytest.raises(InfrastructureError, match="shut down"):
        run(pool, [job(0)])
    assert not ray.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_real_judges_work_on_every_gpu_that_ray_gives_them(ray_home):
    jobs = [Job(RELU, Candidate(source=candidate().source + f"# {number}\n")) for number in range(4)]
    with RayPool(Settings.quick(), device="cuda", per_gpu=2) as pool:
        found = [outcome for _, outcome in pool.evaluate(jobs)]
        assert pool.slots == 2 * torch.cuda.device_count()
    assert [outcome.accepted for outcome in found] == [True] * 4, found
    assert all(outcome.device.startswith("cuda:") and outcome.speedup_low is not None for outcome in found)

"""A Triton driver without a GPU: real compilation for compute capability 9.0, launches done by Python on the host.

What a cubin does is looked up by its bytes; those that nothing was said of do what `default` does.
"""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class FakeUtils:
    def __init__(self):
        self.loaded = []

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name, binary, shared, device):
        self.loaded.append(bytes(binary))
        handle = len(self.loaded)
        return handle, handle, 32, 0, 1024

    def unload_module(self, module):
        pass


class FakeDriver:
    """Stands in for Triton's active driver."""

    def __init__(self, default):
        self.default = default
        self.behaviour = {}
        self.utils = FakeUtils()
        self.launched = []

    def launcher_cls(self, source, metadata):
        return self._launch

    def _launch(self, grid_x, grid_y, grid_z, stream, function, packed, metadata, enter, leave, *args):
        cubin = self.utils.loaded[function - 1]
        self.launched.append(cubin)
        self.behaviour.get(cubin, self.default)((grid_x, grid_y, grid_z), *args)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        def bench(call, quantiles=None, **_):
            call()
            return [1.0, 1.0, 1.0]

        return bench


def triple_on_the_host():
    """Make a stand-in that computes y = 3 x the active driver; run first in a process that captures."""
    from triton.runtime import driver

    driver.set_active(FakeDriver(lambda grid, x, y, n, *_: y.copy_(x * 3)))

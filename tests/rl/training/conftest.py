from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# TRL warns of its own experimental hooks at each use.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    import toys

    return toys.make_tiny_model(tmp_path_factory.mktemp("tiny") / "base")

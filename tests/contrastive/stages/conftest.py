from __future__ import annotations

import gc
import importlib.util

import pytest

if importlib.util.find_spec("peft") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _imported_once():
    """Stages collect garbage after each round: what they import is left out of that, as what the tests import is."""
    import peft  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    from tests.contrastive.stages import toys

    return toys.make_tiny_model(tmp_path_factory.mktemp("tiny") / "base")

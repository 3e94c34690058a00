from __future__ import annotations

import functools
import gc
import importlib.util
import sys

import pytest

NEED_TRAINING = ("against_trl", "golden", "recipe", "restarted_campaign", "stages", "train_command", "config", "held_out")
if importlib.util.find_spec("peft") is None:
    collect_ignore = [f"test_{name}.py" for name in NEED_TRAINING]


@pytest.fixture(scope="session", autouse=True)
def _identities_once():
    """Every equipment reads the packaged patterns anew; what each one's snippet is like does not change."""
    from kernelwright.contrastive.hacks import database

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database, "identity", functools.cache(database.identity))
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    if "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    import peft  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    from tests.contrastive import toys

    # Stages collect garbage after each round: what they import is left out of that, as what the tests import is.
    gc.collect()
    gc.freeze()
    return toys.make_tiny_model(tmp_path_factory.mktemp("tiny") / "base")

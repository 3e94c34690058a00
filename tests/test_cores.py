"""The core on which calls of a GPU are timed, and the cores that are left for the rest."""

from __future__ import annotations

import os

import pytest
import torch

from kernelwright import cores
from kernelwright.cores import cores_except, siblings_of, timing_core


@pytest.mark.parametrize(
    ("device", "visible", "cores", "chosen"),
    [
        ("cuda:0", None, range(8), 7),
        ("cuda:1", None, range(8), 6),
        ("cuda", "", range(8), 7),
        ("cuda:0", "3", range(8), 4),
        ("cuda:1", "3,2", range(8), 5),
        ("cuda:0", "GPU-5e1f", range(8), 7),
        ("cuda:0", "5", range(10, 14), 12),
        ("cuda:0", None, range(3), None),
        ("cpu", None, range(8), None),
    ],
)
def test_each_gpu_has_another_core_where_one_is_to_spare(monkeypatch, device, visible, cores, chosen):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert timing_core(torch.device(device)) == chosen


@pytest.mark.parametrize(
    ("said", "siblings", "beside"),
    [
        ("6-7\n", {6, 7}, {0, 1, 2, 3, 4, 5}),
        ("3,7\n", {3, 7}, {0, 1, 2, 4, 5, 6}),
        ("7\n", {7}, set(range(7))),
        ("1-7\n", set(range(1, 8)), set(range(7))),
        ("what?\n", {7}, set(range(7))),
        (None, {7}, set(range(7))),
    ],
)
def test_its_siblings_are_kept_free_too_where_others_are_left(monkeypatch, tmp_path, said, siblings, beside):
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    if said is not None:
        (tmp_path / "cpu7/topology").mkdir(parents=True)
        (tmp_path / "cpu7/topology/thread_siblings_list").write_text(said)
    assert siblings_of(7) == siblings
    assert cores_except(7) == beside
    assert cores_except(None) == set(range(8))

"""What is a path on this machine and what a name on the hub."""

from __future__ import annotations

import pytest

from kernelwright.models.pretrained import missing_path


@pytest.mark.parametrize(
    "name", ["gpt2", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "owner/model", "here", "here/model", "here/x.gguf", ""]
)
def test_names_on_the_hub_and_what_exists_are_left_to_the_loader(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "x.gguf").touch()
    assert missing_path(name) is None


@pytest.mark.parametrize(
    "name",
    ["models/x", "runs/x", "here/x", "a/b/c", "./x", "../x", "~/x", "/x", "x/", "x.gguf", "owner/x.gguf", "C:\\x", "a b"],
)
def test_a_path_without_anything_there_is_told_without_asking_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert f"there is nothing at {name}," in missing_path(name)

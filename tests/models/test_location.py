"""What is a path on this machine and what a name on the hub."""

from __future__ import annotations

import os
import socket

import pytest

from kernelwright.files import go_offline_without_hub, missing_path


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


@pytest.mark.parametrize(("found", "proxies", "told"), [(True, "", "0"), (False, "", "1"), (False, "http://p", "0")])
def test_a_hub_without_an_address_is_not_asked(monkeypatch, found, proxies, told):
    def lookup(host, port):
        if not found:
            raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    if proxies:
        monkeypatch.setenv("https_proxy", proxies)
    go_offline_without_hub()
    assert os.environ.get("HF_HUB_OFFLINE", "0") == told

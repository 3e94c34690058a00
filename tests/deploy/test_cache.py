"""Tuned kernels on disk: two writers, damage, removal."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import multiprocessing
import threading
from pathlib import Path

import pytest

from kernelwright.deploy import cache as cache_module
from kernelwright.deploy.cache import CacheEntry, CacheKey, Proof, TunedCache, default_root
from kernelwright.errors import UsageError
from kernelwright.gpu.driver import GpuIdentity

GPU = GpuIdentity("Fake GPU", 90, "13.0", 0)
KEY = CacheKey(identity="1" * 64, architecture=90, gpu="Fake GPU", signature="k(*fp32) threads=128 shared=0")


def entry_of(cubin, key=KEY, **changes):
    return CacheEntry(
        key=key,
        entry="k",
        original_sha256="0" * 64,
        tuned_sha256=hashlib.sha256(cubin).hexdigest(),
        proof=Proof(checker="kernelwright", moved=3),
        **changes,
    )


def write_many(root, name, count):
    cache = TunedCache(root)
    for number in range(count):
        cubin = f"{name} {number} ".encode() * 500
        cache.put(entry_of(cubin, provenance={"writer": name}), cubin)


def test_what_was_put_comes_back(tmp_path):
    cache = TunedCache(tmp_path)
    assert cache.get(KEY) is None
    entry = entry_of(b"tuned", provenance={"run": "here", "moves": [[1, 2]]})
    folder = cache.put(entry, b"tuned")
    assert cache.get(KEY).entry == entry
    assert cache.get(KEY).cubin == b"tuned"
    assert json.loads((folder / "entry.json").read_text())["provenance"]["moves"] == [[1, 2]]
    assert [found.entry for found in cache.entries()] == [entry]


@pytest.mark.parametrize("change", [{"gpu": "Other"}, {"architecture": 80}, {"identity": "2" * 64}, {"signature": "k()"}])
def test_a_key_that_differs_anywhere_finds_nothing(tmp_path, change):
    cache = TunedCache(tmp_path)
    cache.put(entry_of(b"tuned"), b"tuned")
    assert cache.get(KEY.model_copy(update=change)) is None


def test_a_later_one_takes_the_place_of_an_earlier_one(tmp_path):
    cache = TunedCache(tmp_path)
    other = KEY.model_copy(update={"signature": "other"})
    cache.put(entry_of(b"other", other), b"other")
    for cubin in (b"first", b"second", b"second"):
        folder = cache.put(entry_of(cubin), cubin)
        assert [path.read_bytes() for path in folder.glob("*.cubin")] == [cubin], "the earlier cubin is of no use any more"
    assert cache.get(KEY).cubin == b"second"
    assert cache.get(other).cubin == b"other"
    assert len(list(cache.entries())) == 2


def test_files_that_are_not_the_caches_stay(tmp_path):
    cache = TunedCache(tmp_path)
    folder = cache.put(entry_of(b"first"), b"first")
    for name in ("my.cubin", f"{'1' * 64}.txt"):
        (folder / name).write_text("mine")
    cache.put(entry_of(b"second"), b"second")
    assert (folder / "my.cubin").exists()
    assert (folder / f"{'1' * 64}.txt").exists()


def test_a_cubin_whose_entry_is_yet_to_come_is_not_taken_for_an_earlier_one(tmp_path, monkeypatch):
    """A second writer begins when the first has written its cubin and not its entry."""
    cache, threads = TunedCache(tmp_path), []
    write, lock, got_on = cache_module._write, fcntl.flock, threading.Event()

    def second_writer():
        cache.put(entry_of(b"second"), b"second")
        got_on.set()

    def begin_another_before_the_entry(path, data):
        if path.name == "entry.json" and not threads:
            threads.append(threading.Thread(target=second_writer))
            threads[0].start()
            assert got_on.wait(60), "the second writer neither waits nor ends"
        write(path, data)

    def say_who_waits(file, operation):
        if threads:
            got_on.set()
        lock(file, operation)

    monkeypatch.setattr(cache_module, "_write", begin_another_before_the_entry)
    monkeypatch.setattr(fcntl, "flock", say_who_waits)
    folder = cache.put(entry_of(b"first"), b"first")
    threads[0].join(60)
    assert cache.get(KEY).cubin == b"second"
    assert [path.read_bytes() for path in folder.glob("*.cubin")] == [b"second"]


def test_a_kernel_that_is_deployed_anew_between_a_readers_two_files_is_read_again(tmp_path, monkeypatch, caplog):
    cache, read, cubins = TunedCache(tmp_path), Path.read_bytes, [b"second", b"third"]
    cache.put(entry_of(b"first"), b"first")

    def deployed_anew_before(path):
        if path.suffix == ".cubin" and cubins:
            cubin = cubins.pop(0)
            cache.put(entry_of(cubin), cubin)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", deployed_anew_before)
    assert cache.get(KEY).cubin == b"third"
    assert not caplog.records


@pytest.mark.exhaustive
def test_two_processes_write_while_a_third_reads(tmp_path, caplog):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, name, 60)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    cache, seen = TunedCache(tmp_path), set()
    while any(writer.is_alive() for writer in writers):
        found = cache.get(KEY)
        assert found is not None or not seen, "there is one from the first on"
        if found is not None:
            assert hashlib.sha256(found.cubin).hexdigest() == found.entry.tuned_sha256
            assert found.cubin.split()[0].decode() == found.entry.provenance["writer"]
            seen.add(found.entry.tuned_sha256)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen
    assert cache.get(KEY).cubin.split()[1] == b"59"
    assert [path.stem for path in tmp_path.rglob("*.cubin")] == [cache.get(KEY).entry.tuned_sha256]
    assert not caplog.records
    assert not [path for path in tmp_path.rglob(".*")], "temporary files are left"


def damage_cubin(folder):
    next(folder.glob("*.cubin")).write_bytes(b"tuneD")


def lose_cubin(folder):
    next(folder.glob("*.cubin")).unlink()


def tear_entry(folder):
    (folder / "entry.json").write_text('{"version": 1, "key"')


def newer_entry(folder):
    values = json.loads((folder / "entry.json").read_text())
    (folder / "entry.json").write_text(json.dumps({**values, "version": 2}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (damage_cubin, "damaged"),
        (lose_cubin, "has no cubin"),
        (tear_entry, "cannot be read"),
        (newer_entry, "cannot be read"),
    ],
)
def test_what_is_damaged_is_ignored_and_said(tmp_path, caplog, harm, said):
    cache = TunedCache(tmp_path)
    harm(cache.put(entry_of(b"tuned"), b"tuned"))
    with caplog.at_level(logging.WARNING):
        assert cache.get(KEY) is None
        assert list(cache.entries()) == []
    assert said in caplog.text


def test_an_entry_in_a_wrong_directory_is_ignored(tmp_path, caplog):
    cache = TunedCache(tmp_path)
    folder = cache.put(entry_of(b"tuned"), b"tuned")
    other = KEY.model_copy(update={"signature": "other"})
    folder.rename(folder.with_name(other.digest))
    assert cache.get(other) is None
    assert "another kernel" in caplog.text


def test_bytes_other_than_the_entrys_are_refused(tmp_path):
    with pytest.raises(UsageError, match="other bytes"):
        TunedCache(tmp_path).put(entry_of(b"tuned"), b"others")


def test_removal(tmp_path):
    cache = TunedCache(tmp_path)
    folder = cache.put(entry_of(b"tuned"), b"tuned")
    cache.mark_verified(entry_of(b"tuned"), GPU)
    assert not cache.remove("")
    assert not cache.remove("x")
    assert cache.remove(KEY.digest[:10])
    assert not folder.exists()
    assert cache.get(KEY) is None


def test_a_comparison_is_remembered_for_one_cubin_one_gpu_and_one_driver(tmp_path):
    cache, entry = TunedCache(tmp_path), entry_of(b"tuned")
    cache.put(entry, b"tuned")
    assert not cache.is_verified(entry, GPU)
    cache.mark_verified(entry, GPU)
    assert cache.is_verified(entry, GPU)
    assert not cache.is_verified(entry, GpuIdentity("Fake GPU", 90, "13.1", 0))
    assert not cache.is_verified(entry_of(b"again"), GPU)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--cache or KERNELWRIGHT_CACHE"):
        TunedCache(tmp_path / "file").put(entry_of(b"tuned"), b"tuned")
    with pytest.raises(UsageError, match="--cache or KERNELWRIGHT_CACHE"):
        TunedCache(tmp_path / "file").require_writable()
    TunedCache(tmp_path / "new" / "one").require_writable()
    assert list((tmp_path / "new" / "one").iterdir()) == []


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELWRIGHT_CACHE", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("KERNELWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "kernelwright" / "tuned"

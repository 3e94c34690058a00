"""The campaign and the paper's recipe, in a tiny form and on a model."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kernelwright.errors import UsageError
from kernelwright.sass import MoveError

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "cuasmrl.py"


def run(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cwd / "triton")}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.exhaustive
def test_a_campaign_in_small_goes_on_where_it_was_and_marks_what_is_simulated(tmp_path):
    script = ROOT / "benchmarks" / "sass_campaign.py"
    options = ["--backend", "simulated-issue", "--agents", "greedy,random", "--budget", "30", "--side-by-side", "2"]
    options += ["--minutes", "5", "--kernels", "rope"]
    done = run(script, tmp_path / "out", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    required = {
        "kernels",
        "geomean",
        "max",
        "per_kernel",
        "controls",
        "wrong_outputs",
        "schedules_run",
        "schedules_per_second",
    }
    assert required <= set(summary)
    assert (summary["kernels"], summary["schedules_run"], summary["wrong_outputs"]) == (1, 60, 0)
    assert summary["failed"] == []
    assert summary["schedules_per_second"] > 0
    assert summary["simulated"] is True
    found = summary["per_kernel"]["rope"]
    assert found["deployed"] is False
    assert found["why_not_deployed"] == "simulated"
    assert {agent: c["schedules"] for agent, c in found["controls"].items()} == {"greedy": 30, "random": 30}
    assert len(summary["left_out"]) >= 14
    logs = {path: path.read_text() for path in (tmp_path / "out").rglob("*.log")}
    assert {path.stem for path in logs} == {"greedy", "random", "deploy"}
    again = run(script, tmp_path / "out", *options, "--pack", tmp_path / "pack", cwd=tmp_path)
    assert again.returncode == 0
    assert {path: path.read_text() for path in (tmp_path / "out").rglob("*.log")} == logs, (
        "what is finished is not run again"
    )
    assert sorted(path.name for path in (tmp_path / "pack").iterdir()) == ["runs-1.tar.gz", "summary.json"]
    hasty = run(script, tmp_path / "late", *options, "--minutes", "0.1", cwd=tmp_path)
    assert "left for the next call: rope/greedy, rope/random, rope/deploy" in hasty.stdout


@pytest.fixture
def recipe(tmp_path, monkeypatch, capsys):
    """Runs the recipe as its command does, in this process: exit status and what it printed."""

    def started(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(RECIPE), *arguments])
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr()

    return started


def test_the_recipe_of_the_paper_in_small(recipe, tmp_path):
    text = (ROOT / "recipes" / "cuasmrl.toml").read_text()
    for name, value in {
        "kernels": '["softmax"]',
        "agents": '["greedy"]',
        "budget": "6",
        "backend": '"simulated-issue"',
    }.items():
        lines = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in text.splitlines()]
        text = "\n".join(lines)
    (tmp_path / "small.toml").write_text(text)
    status, said = recipe("small.toml", "out")
    assert status == 0, said.err
    assert "softmax: legal: True" in said.out
    assert "simulated, not times" in said.out
    assert "paper, A100: geomean 1.09, best 1.26; ours: a model, nothing to compare" in said.out
    assert json.loads((tmp_path / "out" / "softmax" / "config.json").read_text())["moves"] == "paper"


def test_a_recipe_without_kernels_is_refused(recipe, tmp_path):
    (tmp_path / "none.toml").write_text('kernels = []\nbackend = "simulated-issue"\n')
    status, said = recipe("none.toml", "out")
    assert status == 2, said.err
    assert said.err.startswith("error: Wanted a valid `kernels`, found []")
    assert "Correct the setting" in said.err
    assert not (tmp_path / "out").exists()


def test_the_campaign_has_the_papers_kernels_and_more():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import sass_campaign
        import sass_kernels
    assert len(sass_campaign.PAPER) == 6
    assert "sgemm" in sass_campaign.TARGETS
    assert len(sass_campaign.TARGETS) >= 11
    assert set(sass_kernels.SPECS) == set(sass_campaign.HEADROOM)
    assert sass_campaign.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert sass_campaign.geomean([]) is None


@pytest.fixture
def sass_campaign():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import sass_campaign

        yield sass_campaign


def summary_of(agent, **best):
    return {
        "best": {"agent": agent, "noise_floor": 0.01, **best} if best else None,
        "agents": {agent: {"confirmed": None, "best_in_search": 1.3, "schedules": 5, "stopped_by": "schedules"}},
        "schedules_run": 5, "wrong_outputs": 1, "statuses": {"measured": 4, "wrong-output": 1}, "simulated": False,
        "unit": "us", "budget": 5, "simulated_bound": {"gain_at_most": 1.5, "limited_by": "issue slots"},
    }  # fmt: skip


def deployed(agents):
    return {"deployed": False, "agents": agents, "reason": "no improvement", "schedules": dict.fromkeys(agents, 5)}


def test_a_kernel_without_a_deployed_winner_counts_as_one(sass_campaign):
    summaries = {"ppo": summary_of("ppo", speedup=1.2, low=1.1, high=1.3), "random": summary_of("random")}
    refused = sass_campaign.of_kernel(summaries, {"deployed": False, "reason": "no-improvement", "low": 0.99, "high": 1.01})
    assert (refused["speedup"], refused["interval"], refused["why_not_deployed"]) == (1.0, None, "no-improvement")
    assert (refused["schedules_run"], refused["wrong_outputs"], refused["statuses"]["measured"]) == (10, 2, 8)
    final = {"deployed": True, "agent": "ppo", "speedup": 1.15, "low": 1.12, "high": 1.18, "noise_floor": 0.01}
    held = sass_campaign.of_kernel(summaries, final)
    assert (held["speedup"], held["interval"], held["agent"]) == (1.15, [1.12, 1.18], "ppo")
    assert set(held["controls"]) == {"ppo", "random"}


class Done:
    """A process that has ended."""

    def __init__(self, status):
        self.status = status

    def poll(self):
        return self.status


def options_of(out, **changed):
    given = {"kernels": "softmax,rope,gemv", "agents": "ppo,random", "gpus": 2, "side_by_side": 2, "minutes": 5.0}
    return argparse.Namespace(out=out, **{**given, **changed})


def test_every_agent_has_a_process_and_what_fails_leaves_the_rest_alone(sass_campaign, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sass_campaign.time, "sleep", lambda _: None)
    started = []

    def start(unit, gpu, until):
        started.append((unit.name, gpu))
        folder = tmp_path / unit.kernel
        if unit.name in ("rope/ppo", "gemv/deploy"):
            folder.mkdir(exist_ok=True)
            (folder / f"{unit.agent or 'deploy'}.log").write_text("Traceback\nno GPU\n")
            return Done(1)
        if unit.agent is None:
            agents = sorted(path.parent.name for path in folder.glob("*/summary.json"))
            (folder / "deployed.json").write_text(json.dumps(deployed(agents)))
        else:
            (folder / unit.agent).mkdir(parents=True)
            (folder / unit.agent / "summary.json").write_text(json.dumps(summary_of(unit.agent)))
        return Done(0)

    failed = sass_campaign.campaign(options_of(tmp_path), start)
    assert failed == ["rope/ppo", "gemv/deploy"]
    assert "rope/ppo: exit status 1: no GPU" in capsys.readouterr().out
    kernels = ("softmax", "rope", "gemv")
    assert sorted(name for name, _ in started) == sorted(f"{k}/{a}" for k in kernels for a in ("ppo", "random", "deploy"))
    assert [gpu for _, gpu in started[:4]] == [0, 1, 0, 1], "at most two processes share a GPU"
    summary = sass_campaign.summarise(tmp_path, failed)
    assert set(summary["per_kernel"]) == set(kernels)
    assert set(summary["per_kernel"]["rope"]["controls"]) == {"random"}
    assert summary["failed"] == failed
    # What failed is owed to the next call, and the kernel is deployed anew with what that adds.
    started.clear()
    sass_campaign.campaign(options_of(tmp_path), start)
    assert sorted(name for name, _ in started) == ["gemv/deploy", "rope/deploy", "rope/ppo"]


def test_who_was_stopped_by_time_is_owed_the_rest_and_then_the_winner_another_deployment(sass_campaign, tmp_path):
    unit, deployment = sass_campaign.Unit("rope", "ppo"), sass_campaign.Unit("rope")
    run = tmp_path / "rope" / "ppo"
    assert not unit.is_done(tmp_path, ["ppo"])
    run.mkdir(parents=True)
    summary = summary_of("ppo")
    summary["agents"]["ppo"] |= {"stopped_by": "time", "schedules": 3}
    (run / "summary.json").write_text(json.dumps(summary))
    sass_campaign.deploy_best(tmp_path / "rope")
    assert deployment.is_done(tmp_path, ["ppo"])
    assert not unit.is_done(tmp_path, ["ppo"])
    (run / "summary.json").write_text(json.dumps(summary_of("ppo")))
    assert unit.is_done(tmp_path, ["ppo"])
    assert not deployment.is_done(tmp_path, ["ppo"])


def test_whether_an_agent_has_finished_is_read_from_its_own_summary_alone(sass_campaign, tmp_path):
    for agent in ("ppo", "random"):
        (tmp_path / "rope" / agent).mkdir(parents=True)
        (tmp_path / "rope" / agent / "summary.json").write_text(json.dumps(summary_of(agent)))
    (tmp_path / "rope" / "random" / "summary.json").write_text("{ torn")
    assert sass_campaign.Unit("rope", "ppo").is_done(tmp_path, ["ppo", "random"])
    # Whether to deploy anew is a question to all of them, once there is something to compare with.
    assert not sass_campaign.Unit("rope").is_done(tmp_path, ["ppo", "random"])
    (tmp_path / "rope" / "deployed.json").write_text(json.dumps(deployed(["ppo", "random"])))
    for unit in (sass_campaign.Unit("rope", "random"), sass_campaign.Unit("rope")):
        with pytest.raises(UsageError, match=r"random/summary\.json"):
            unit.is_done(tmp_path, ["ppo", "random"])


def test_networks_go_where_the_campaign_says(sass_campaign, tmp_path, monkeypatch):
    seen = set()

    def popen(command, env, **options):
        given = dict(zip(command[3::2], command[4::2], strict=True))
        seen.add((env["CUDA_VISIBLE_DEVICES"], given["--network-device"]))
        return Done(0)

    monkeypatch.setattr(sass_campaign.subprocess, "Popen", popen)
    monkeypatch.setattr(sass_campaign.time, "sleep", lambda _: None)
    given = {"budget": 9, "seed": 0, "moves": "beyond", "backend": "gpu", "start": None, "architecture": None}
    sass_campaign.campaign(options_of(tmp_path / "out", network_device="cuda", **given))
    assert seen == {("0", "cuda"), ("1", "cuda")}


def test_archives_are_few_and_leave_the_policies_out(sass_campaign, tmp_path, monkeypatch):
    run_of = tmp_path / "out" / "rope" / "ppo"
    run_of.mkdir(parents=True)
    (tmp_path / "out" / "summary.json").write_text("{}")
    (run_of / "policy.zip").write_bytes(bytes(1000))
    for number in range(4):
        (run_of / f"{number}.bin").write_bytes(os.urandom(40_000))
    monkeypatch.setattr(sass_campaign, "ARCHIVE_BYTES", 70_000)
    files = sass_campaign.pack(tmp_path / "out", tmp_path / "pack")
    assert [path.name for path in files] == ["summary.json", "runs-1.tar.gz", "runs-2.tar.gz"]
    names = []
    for path in files[1:]:
        with tarfile.open(path) as archive:
            names += archive.getnames()
    assert sorted(names) == ["rope/ppo/0.bin", "rope/ppo/1.bin", "rope/ppo/2.bin", "rope/ppo/3.bin", "summary.json"]


def test_what_is_published_is_packed_and_names_no_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sass_publish

    campaign, target = tmp_path / "campaign", tmp_path / "published"
    code = b"\x7fELF\0/some/where/kernels\0.text\0" + bytes(range(256))
    for agent in ("ppo", "random"):
        run = campaign / "rope" / agent
        (run / "ppo").mkdir(parents=True)
        for name in ("config.json", "summary.json", "schedules.jsonl", "winner.json", "ppo/ppo.jsonl", "ppo/policy.zip"):
            (run / name).write_text(f"{agent} {name}")
        for name in ("original.cubin", "tuned.cubin"):
            (run / name).write_bytes(code)
    (campaign / "rope" / "deployed.json").write_text('{"agent": "ppo"}')
    for name in ("summary.json", "calls.json"):
        (campaign / name).write_text("{}")
    sass_publish.publish(campaign, target)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == sorted(
        ["calls.json", "summary.json", "rope/deployed.json", "rope/original.cubin", "rope/ppo/tuned.cubin"]
        + [
            f"rope/{agent}/{name}"
            for agent in ("ppo", "random")
            for name in ("config.json", "summary.json", "schedules.jsonl.gz", "winner.json.gz", "ppo/ppo.jsonl.gz")
        ]
    )
    packed = (target / "rope" / "random" / "schedules.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == b"random schedules.jsonl"
    assert (target / "rope" / "original.cubin").read_bytes() == code.replace(b"/some/where/kernels", b"." * 19)


@pytest.mark.exhaustive
def test_a_campaign_goes_on_from_the_winners_of_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import sass_campaign

    from kernelwright.gpu import disassemble
    from kernelwright.sass import load

    earlier = ROOT / "results" / "sass-h200"
    # The code that was played on is in the results: what a compiler of another version makes would not fit.
    kernel = load((earlier / "batched_gemm" / "original.cubin").read_bytes(), disassemble).kernel()
    assert sass_campaign.winner_of(earlier / "batched_gemm", kernel)
    assert sass_campaign.winner_of(earlier / "softmax", kernel) == ()
    with pytest.raises((UsageError, MoveError)):
        sass_campaign.winner_of(earlier / "sgemm", kernel)
    (tmp_path / "deployed.json").write_text('{"deployed": true, "agent": "ppo"}')
    with pytest.raises(UsageError, match=r"found no winner\.json in .*ppo"):
        sass_campaign.winner_of(tmp_path, kernel)

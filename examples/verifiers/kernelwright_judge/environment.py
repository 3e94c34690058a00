"""Tasks, rubric and harness. The policy answers once; the judge rewards what it wrote.

Nothing here needs a container or a cloud: the model's answer is text, and the judge builds and runs it behind its own walls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import httpx
import verifiers.v1 as vf
from pydantic import Field

from kernelwright.contrastive.grader import Grader, chat_prompt, task_text
from kernelwright.tasks import load_task


@functools.cache
def _grader(url: str, reward: str) -> Grader:
    return Grader(url, reward=reward)


class KernelTaskConfig(vf.TaskConfig):
    """What judges: options `--env.taskset.task.NAME`."""

    url: str = ""
    """Address of `kernelwright serve`; empty to judge in this process."""
    reward: str = "lower-bound"
    """Reward of the speedup, by its name."""


class KernelData(vf.TaskData):
    """One task."""

    task: str
    """Id of a built-in task, or JSON with its source."""


class KernelTask(vf.Task[KernelData, vf.State, KernelTaskConfig]):
    """The rubric. Weights change with `--env.taskset.task.rewards.NAME.weight`."""

    @vf.metric
    async def judged(self, trace: vf.Trace) -> dict[str, float]:
        """Have the answer judged; verifiers asks for metrics first. A fault of the machine is an error of the rollout."""
        grade = await _grader(self.config.url, self.config.reward).grade_async(self.data.task, trace.last_reply)
        trace.info["why"] = grade.why
        return {"is_form": grade.form, "is_right": grade.right, "judged_reward": grade.reward, "is_honest": grade.honest}

    @vf.reward(weight=0.1)
    async def form(self, trace: vf.Trace) -> float:
        """1 where the answer holds a candidate."""
        return trace.metrics["is_form"]

    @vf.reward(weight=0.2)
    async def right(self, trace: vf.Trace) -> float:
        """1 where the judge accepted it."""
        return trace.metrics["is_right"]

    @vf.reward(weight=1.0)
    async def speedup(self, trace: vf.Trace) -> float:
        """The named reward: by default the lower end of the speedup's interval, 0 for a failure."""
        return trace.metrics["judged_reward"]

    @vf.reward(weight=0.5)
    async def honest(self, trace: vf.Trace) -> float:
        """-1 where the judge caught it cheating, so that a cheat earns less than a mistake; else 0."""
        return trace.metrics["is_honest"] - 1.0


class KernelTasksetConfig(vf.TasksetConfig):
    """Which tasks: options `--env.taskset.NAME`."""

    tasks: list[str] = Field(default=["diag_matmul", "rms_norm_composite", "linear_logsumexp", "conv2d_min_channel"])
    """Ids of built-in tasks, or Python files in KernelBench's format."""
    device: str = "cuda"
    """What judges, `cuda` or `cpu`, as the prompt tells it."""
    hardware: str = ""
    """Its name, as the prompt tells it."""
    task: KernelTaskConfig = KernelTaskConfig()


class KernelTaskset(vf.Taskset[KernelTask, KernelTasksetConfig]):
    """Prompts to make a module faster."""

    def load(self) -> Iterator[KernelTask]:
        """Each task once."""
        for task in map(load_task, self.config.tasks):
            system, user = chat_prompt(task, self.config.device, self.config.hardware)
            data = KernelData(name=task.id, task=task_text(task), system_prompt=system["content"], prompt=user["content"])
            yield KernelTask(data, self.config.task)


class OneAnswerConfig(vf.HarnessConfig):
    """No options of its own."""


class OneAnswer(vf.Harness[OneAnswerConfig]):
    """Asks the model once, in this process, so that no program has to be installed anywhere."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One completion. Sampling options are verifiers' own, which fills them in on the way."""
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text if answer.is_error else "")


class KernelEnvConfig(vf.SingleAgentEnvConfig):
    """One agent, which runs on this machine."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class KernelEnv(vf.SingleAgentEnv, vf.Env[KernelEnvConfig]):
    """verifiers' environment of one agent, without its default of a runtime in a cloud."""

"""A toy world in which three stages of training take seconds: tiny model, one-line answers, and a judge that knows them all.

A task is `even` or `odd`. An answer picks a `way` from 0 to 7. The toy judge accepts ways of the task's own parity, the
higher the faster; way 7 it calls a cheat and 6 is right but slowest. None of this says anything about GPUs, times or code.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from kernelwright.contrastive.context import ConfiguredJudges, Judging, ModelAccess, StageContext
from kernelwright.contrastive.evaluations import Deadline
from kernelwright.contrastive.prompts import contrastive_prompt, whole_source
from kernelwright.contrastive.samples import Origin, Sample
from kernelwright.contrastive.scoring import Scorer
from kernelwright.contrastive.settings import RewardSection
from kernelwright.errors import KernelwrightError, TaskError
from kernelwright.execution.work import Evaluate, Screen
from kernelwright.models.chat import Completion, Sampling
from kernelwright.records import Candidate, Evaluation, Reason, RunDirectory, Task, Verdict
from kernelwright.records.policy import Context
from kernelwright.records.screened import screened_of
from tests.executors import FakeExecutor

NAMES = ("amber", "beryl", "coral", "diamond", "emerald", "flint", "garnet", "jade")
HELD_OUT_NAMES = ("opal", "pearl", "quartz", "ruby")
SPEEDUPS = {0: 1.0, 1: 1.0, 2: 1.4, 3: 1.4, 4: 2.0, 5: 2.0, 6: 0.6}


def toy_task(parity: str, name: str) -> Task:
    source = (
        f'"""elementwise: toy {parity} {name}."""\nimport torch\n\n\nclass Model(torch.nn.Module):\n'
        f"    def forward(self, x):\n        return x\n\n\ndef get_inputs():\n    return [torch.ones(2)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    )
    return Task(id=f"toy-{parity}-{name}", source=source)


def toy_tasks(names: Iterable[str] = NAMES) -> list[Task]:
    return [toy_task(parity, name) for name in names for parity in ("even", "odd")]


def toy_code(way: int) -> str:
    return f"class ModelNew(Model): way = {way}\n"


class ToyJudge(FakeExecutor):
    """Judges toy answers by looking the way up. Not a judge of code: it runs nothing and measures nothing."""

    def __init__(self, before_each: Callable[[int], None] = lambda count: None) -> None:
        super().__init__(self._verdict, kinds=(Evaluate,))
        self.count = 0
        self.seen: Counter[tuple[str, str]] = Counter()
        self._before_each = before_each

    def _verdict(self, work: Evaluate) -> Evaluation | KernelwrightError:
        self._before_each(self.count)
        self.count += 1
        self.seen[work.task.sha256, work.candidate.sha256] += 1
        return self.outcome(work)

    def outcome(self, work: Evaluate) -> Evaluation | KernelwrightError:
        """What is found."""
        return toy_evaluation(work.task, work.candidate)


class ToyScreens(FakeExecutor):
    """Estimates what the toy judge would find, times a factor."""

    def __init__(self, factor=1.0, broken=()):
        super().__init__(self._looks, kinds=(Screen,))
        self.factor, self.broken, self.seen = factor, broken, []

    def prepare(self, tasks):
        pass

    def _looks(self, work):
        if work.task.id in self.broken:
            raise TaskError("Wanted a task that runs.")
        for candidate in work.candidates:
            self.seen.append(candidate.sha256)
            found = toy_evaluation(work.task, candidate)
            estimate = found.speedup * self.factor if found.accepted else None
            yield screened_of(work.task, candidate, correct=found.accepted, reason=found.reason, estimate=estimate)
        yield None


class Asked(Deadline):
    """A deadline that has passed when a function says so."""

    def __init__(self, passed: Callable[[], bool]) -> None:
        super().__init__()
        self._passed = passed

    def comes_within(self, seconds: float) -> bool:
        return self._passed()


class Loading(ModelAccess):
    """Loads models by a function."""

    def __init__(self, load):
        self.load = load


def toy_context(
    judges, *, confirmers=None, out_of_time=lambda: False, load=None, log=lambda line: None, settings=None, **judging
) -> StageContext:
    """What a stage works with on the CPU, under toy judges."""
    judging = Judging(
        device=judging.pop("device", "cpu"),
        rewards=ConfiguredJudges(judges, settings),
        reported=ConfiguredJudges(confirmers or judges, settings),
        **judging,
    )
    model = ModelAccess() if load is None else Loading(load)
    return StageContext(judging, model, Asked(out_of_time), log, {"toy": ToyTeacher()})


def toy_evaluation(task: Task, candidate: Candidate) -> Evaluation:
    found = re.search(r"way = (\d+)", candidate.source)
    way = int(found[1]) if found else 99
    right = way in SPEEDUPS and way % 2 == ("odd" in task.id)
    reason = None if right else Reason.PRECISION_DOWNGRADE if way == 7 else Reason.WRONG_OUTPUT
    speedup = SPEEDUPS[way] if right else None
    return Evaluation(
        task=task.id,
        task_sha256=task.sha256,
        candidate_sha256=candidate.sha256,
        verdict=Verdict.ACCEPTED if right else Verdict.REJECTED,
        reason=reason,
        speedup=speedup,
        speedup_low=speedup,
        speedup_high=speedup,
        noise_floor=0.01 if right else None,
        policy=candidate.policy,
        techniques=candidate.techniques,
        parent=candidate.parent,
        source=candidate.source,
    )


EVEN, ODD = toy_task("even", "amber"), toy_task("odd", "beryl")


def toy_answer(way: int) -> str:
    return f"```python\n{toy_code(way)}```"


def toy_sample(text, task=EVEN, sample=0, finish_reason="stop", prompt=None) -> Sample:
    """An answer as it was drawn."""
    completion = Completion(text=text, prompt_tokens=1, completion_tokens=1, finish_reason=finish_reason)
    asked = prompt or contrastive_prompt(task, (), device="cpu", form="subclass")
    return Sample(task=task, prompt=asked, completion=completion, step=0, sample=sample)


def toy_scorer(path, judge, exemplars=None, *, reward=None, **rest) -> Scorer:
    """Scores answers in a run directory under a toy judge; without smoothing, where the reward does not ask for it."""
    origin = Origin(stage="contrastive", model="toy", sampling=Sampling(), form="subclass")
    section = RewardSection(smoothing=False).model_copy(update=reward or {})
    return Scorer(toy_context(judge, **rest), RunDirectory(path), origin, section, exemplars)


class ToyTeacher:
    """Knows every way, and tries them in order."""

    name = "toy-teacher"

    def propose(self, context: Context, count: int) -> list[Candidate]:
        seen = {found.candidate_sha256 for found in context.history}
        plan = [
            Candidate(source=whole_source(context.task, toy_code(way), "subclass"), policy=self.name, techniques=("toy",))
            for way in range(8)
        ]
        return [candidate for candidate in plan if candidate.sha256 not in seen][:count]


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ message['content'].split('toy ')[1].split(' ')[0] }} "
    "{% if '(score ' in message['content'] %}{{ message['content'].split('(score ')[-1].split(')')[0] }} {% endif %}"
    "{% endif %}{% if message['role'] == 'assistant' %}{{ message['content'] }}<end>{% endif %}{% endfor %}"
)
"""Shows the tiny model the task's parity and the best exemplar's score, and spares it the rest of the prompt."""


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Save a randomly initialised Qwen2 of two layers, and a tokenizer of its words, in Hugging Face's format."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from kernelwright.contrastive.fitting import answer_text

    texts = ["even odd even odd 0.12 1.34 2.56 7.89 "]
    for task in (toy_task(parity, "amber") for parity in ("even", "odd")):
        prompt = contrastive_prompt(task, (), device="cpu", form="subclass")
        for way in range(8):
            candidate = Candidate(source=whole_source(task, toy_code(way), "subclass"), techniques=("toy",))
            texts.append(answer_text(task, prompt, toy_evaluation(task, candidate), "subclass"))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.train_from_iterator(
        texts * 2,
        trainers.BpeTrainer(
            special_tokens=["<pad>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=core.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def judged_twice(path: Path) -> list[str]:
    """Candidates that a run directory holds more than one first measurement of."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in (path / "evaluations.jsonl").read_text().splitlines():
        record = json.loads(line)
        if not record["confirms"]:
            counts[record["task_sha256"], record["candidate_sha256"]] += 1
    return [key[1] for key, count in counts.items() if count > 1]

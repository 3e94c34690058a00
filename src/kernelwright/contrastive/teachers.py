"""Defines the teachers of the supervised stage: policies whose answers take the form that the model is to learn.

A small model learns short answers: candidates are cut to what differs from the reference, and a CUDA graph is written that
fits into an answer. The result is judged like any other.
"""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kernelwright.contrastive.answers import parse_completion
from kernelwright.contrastive.prompts import AnswerForm, prompt_of, whole_source
from kernelwright.contrastive.settings import PromptSection, TeacherSection
from kernelwright.errors import ConfigError
from kernelwright.models.chat import ChatModel, Sampling
from kernelwright.models.factory import chat_model
from kernelwright.models.transcript import Recorded, Transcript
from kernelwright.records import Candidate, Task
from kernelwright.records.policy import Context, Policy
from kernelwright.rewrites import wrappers
from kernelwright.rewrites.emit import REFERENCE_NOTE, reference_source
from kernelwright.tasks.generated import DEVICE_BOUND, variations


def teacher_named(name: str, form: AnswerForm, answer_chars: int, attempts: int) -> Policy:
    """A teacher by its name, `builtin` or `templates`; of longer answers than `answer_chars` it has none.

    Raises:
        ConfigError: there is no such teacher.
    """
    if name == "templates":
        return TemplatePolicy(form, answer_chars)
    if name == "builtin":
        # Imported only now: the rules import torch and its exporter, which takes a second.
        from kernelwright.rewrites.builtin import BuiltinPolicy

        return CompactPolicy(BuiltinPolicy(), form, answer_chars, attempts)
    raise ConfigError(
        f"Wanted a teacher in augmentation.teachers; found '{name}'. Known are builtin and templates; a language model "
        "has a table [[augmentation.models]] of its own."
    )


KINDS = {"spelling": 6, "kernel": 2, "graph": 1}
"""Relative frequency of each kind of template: PyTorch's operators in other words, Triton kernels, and either of them
replayed from a CUDA graph. Our choice: the paper's teachers, language models, mostly wrote what was right and no faster
(table 5)."""


class TemplatePolicy:
    """The variations that a generated task's family knows, plain and replayed from a CUDA graph; of any other task, a copy
    of the reference, likewise. In a random order, so that few attempts are not all of one kind, and whatever their speed."""

    name = "templates"

    def __init__(self, form: AnswerForm, answer_chars: int) -> None:
        self._form = form
        self._answer_chars = answer_chars

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """Candidates that the history does not have."""
        dice = random.Random(f"{context.seed} {context.task.sha256}")
        kinds: dict[str, list[Candidate]] = {}
        for kind, techniques, code in self._codes(context.task, context.device):
            if len(code) <= self._answer_chars:
                source = whole_source(context.task, code, self._form)
                kinds.setdefault(kind, []).append(Candidate(source=source, policy=self.name, techniques=techniques))
        plan = []
        for found in kinds.values():
            dice.shuffle(found)
        while kinds:
            (kind,) = dice.choices(list(kinds), [KINDS[name] for name in kinds])
            plan.append(kinds[kind].pop())
            if not kinds[kind]:
                del kinds[kind]
        return _unseen(plan, context, count)

    def _codes(self, task: Task, device: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Kind, techniques and answer of each."""
        # Where the device is busy throughout, a graph wins nothing.
        graphs = device.startswith("cuda") and not task.id.startswith(DEVICE_BOUND)
        plain = [(variation.techniques, variation.answer) for variation in variations(task, device)]
        if not plain and (copied := copied_forward(task)) is not None:
            plain = [(("copy-of-reference",), copied)]
        for techniques, code in plain:
            yield "kernel" if "triton" in code else "spelling", techniques, code
            if graphs and techniques != ("in-double",) and (replayed := graphed(code)) is not None:
                yield "graph", (*techniques, "cuda-graph"), replayed


class CompactPolicy:
    """A policy whose candidates are cut down to what a small model can say: without docstrings, guards and the
    reference's own text. Its wrappers are left out; a CUDA graph in few words takes their place. In a random order, so that
    single rewrites come up as well as all of them together."""

    def __init__(self, policy: Policy, form: AnswerForm, answer_chars: int, attempts: int) -> None:
        self.name = policy.name
        self._policy = policy
        self._form = form
        self._answer_chars = answer_chars
        self._attempts = attempts
        self._plans: dict[tuple[str, str], list[Candidate]] = {}

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """Candidates that the history does not have."""
        key = (context.task.sha256, context.device)
        if key not in self._plans:
            # The policy's own hashes differ from the shortened ones, so its fixed plan is asked for at once.
            proposed = self._policy.propose(replace(context, history=()), _PLAN * self._attempts)
            plan = list(self._shortened(context, proposed))
            random.Random(f"{context.seed} {context.task.sha256}").shuffle(plan)
            self._plans[key] = plan
        return _unseen(self._plans[key], context, count)

    def _shortened(self, context: Context, proposed: list[Candidate]) -> Iterator[Candidate]:
        for candidate in proposed:
            if set(candidate.techniques) & set(wrappers.WRAPPERS):
                continue
            code = shortened(context.task, candidate.source)
            versions = [(candidate.techniques, code)]
            if context.device.startswith("cuda") and (replayed := graphed(code)) is not None:
                versions.append(((*candidate.techniques, "cuda-graph"), replayed))
            for techniques, text in versions:
                if len(text) <= self._answer_chars:
                    source = whole_source(context.task, text, self._form)
                    yield Candidate(source=source, policy=self.name, techniques=techniques)


_PLAN = 4
"""Proposals of the built-in policy looked at for each attempt: on a GPU most of them are wrappers."""

_DRAWS = 3
"""Questions in a row before a model counts as having nothing new. Our choice."""


class ChatTeacher:
    """A language model, asked as the student will be. Its answers are recorded, so a kill costs nothing twice."""

    def __init__(self, model: ChatModel, prompt: PromptSection, sampling: Sampling) -> None:
        self.name = model.name
        self._model = model
        self._prompt = prompt
        self._sampling = sampling

    @classmethod
    def open(cls, section: TeacherSection, prompt: PromptSection, directory: Path) -> ChatTeacher:
        """The teacher of a configuration; its transcript goes into `directory`.

        Raises:
            ConfigError: an option of the model is wrong.
            PolicyError: it cannot be reached or loaded.
        """
        model = Recorded(chat_model(section.kind, **section.options), Transcript(directory / "transcript.jsonl"))
        return cls(model, prompt, Sampling(temperature=section.temperature, max_tokens=section.max_tokens))

    def propose(self, context: Context, count: int) -> list[Candidate]:
        """Candidates of the model's answers to the plain prompt; answers without one are dropped."""
        section = self._prompt
        prompt = prompt_of(section, context.task, (), context.device)
        for attempt in range(_DRAWS):
            seed = context.seed * 1_000_003 + len(context.history) * _DRAWS + attempt
            sampling = replace(self._sampling, seed=seed)
            (completions,) = self._model.sample([prompt.messages], count=count, sampling=sampling)
            sources = [parse_completion(completion).source for completion in completions]
            plan = [
                Candidate(source=whole_source(context.task, source, section.answer), policy=self.name)
                for source in sources
                if source is not None
            ]
            if fresh := _unseen(plan, context, count):
                return fresh
        return []


def _unseen(plan: list[Candidate], context: Context, count: int) -> list[Candidate]:
    seen = {evaluation.candidate_sha256 for evaluation in context.history}
    fresh: list[Candidate] = []
    for candidate in plan:
        if len(fresh) < count and candidate.sha256 not in seen:
            seen.add(candidate.sha256)
            fresh.append(candidate)
    return fresh


def shortened(task: Task, source: str) -> str:
    """The part of a candidate beyond its reference, without docstrings and without guards that fall back to the reference.

    Raises:
        SyntaxError: it is not Python.
    """
    known = {ast.dump(node) for node in ast.parse(reference_source(task.source)).body}
    known.update(ast.dump(node) for node in ast.parse(f"import torch\n{REFERENCE_NOTE}").body)
    known.add(ast.dump(ast.parse("from torch.nn import functional as F").body[0]))
    tree = ast.parse(source)
    kept: list[ast.stmt] = []
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if docstring or future or ast.dump(node) in known:
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                part.body = [line for line in part.body if not _is_docstring(line)] or [ast.Pass()]
        kept.append(_plain_class(node) if isinstance(node, ast.ClassDef) else node)
    text = "\n\n\n".join(ast.unparse(node) for node in kept) + "\n"
    # A name that the reference does not import must come with the answer.
    unused = "F." not in text.replace("import torch.nn.functional as F", "")
    return text.replace("import torch.nn.functional as F\n\n\n", "") if unused else text


def _plain_class(node: ast.ClassDef) -> ast.ClassDef:
    body: list[ast.stmt] = []
    for item in node.body:
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
            continue
        if isinstance(item, ast.FunctionDef):
            item.body = [line for line in item.body if not _is_guard(line)]
            if item.name == "_runs_reference" or (item.name == "__init__" and all(map(_only_traced, item.body))):
                continue
        body.append(item)
    node.body = body or [ast.Pass()]
    return node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_guard(node: ast.stmt) -> bool:
    """`if not (...): return super().forward(...)`: the built-in policy's fall-back for inputs it was not written for."""
    if ast.unparse(node).startswith("self.__dict__['last_path'] ="):
        return True
    if not isinstance(node, ast.If) or node.orelse:
        return False
    negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
    return negated and ast.unparse(node.body[-1]).startswith("return super().forward(")


def _only_traced(node: ast.stmt) -> bool:
    text = ast.unparse(node)
    return text.startswith(("super().__init__(*args", "self._is_as_traced =", "if not self._is_as_traced:"))


def copied_forward(task: Task) -> str | None:
    """`ModelNew` with the reference's own `forward`: right, and no faster. None when `Model` has none of its own."""
    for node in ast.parse(task.source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "forward":
                    item.body = [line for line in item.body if not _is_docstring(line)] or [ast.Pass()]
                    item.args.args = [ast.arg(argument.arg) for argument in item.args.args]
                    item.returns = None
                    method = textwrap.indent(ast.unparse(ast.fix_missing_locations(item)), "    ")
                    return f"class ModelNew(Model):\n{method}\n".replace("super().", "super(Model, self).")
    return None


def graphed(code: str) -> str | None:
    """The same answer replayed from a CUDA graph; None when it has no `ModelNew.forward` of its own.

    The graph reads parameters where they are, so new weights count; inputs are copied in, outputs are copied out; buffers
    that warming up changed are put back.
    """
    tree = ast.parse(code)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ModelNew":
            forwards = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"]
            if len(forwards) == 1:
                forwards[0].name = "compute"
                text = ast.unparse(tree).replace("super().forward(", "super(ModelNew, self).forward(")
                return text + "\n" + GRAPH_FORWARD
    return None


GRAPH_FORWARD = """
    def forward(self, *inputs):
        key = (self.training, *((t.shape, t.stride()) for t in inputs))
        graphs = self.__dict__.setdefault("graphs", {})
        if key not in graphs:
            saved = [t.clone() for t in self.buffers()]
            static = [t.clone() for t in inputs]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.compute(*static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.compute(*static)
            for t, value in zip(self.buffers(), saved):
                t.copy_(value)
            graphs[key] = graph, static, output
        graph, static, output = graphs[key]
        for old, new in zip(static, inputs):
            old.copy_(new)
        graph.replay()
        return output.clone()
"""

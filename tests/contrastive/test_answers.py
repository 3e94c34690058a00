"""The parser of answers: what it tolerates, what it refuses and why, and that nothing makes it raise."""

from __future__ import annotations

import ast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernelwright.contrastive.answers import AnswerFailure, parse_answer, parse_completion
from kernelwright.models.chat import Completion
from tests.samples import answer, module

CODE = module()
FENCED = f"```python\n{CODE}```\n"
KERNEL = "```cuda\n__global__ void k() { /* ModelNew */ }\n```\n"


def test_the_form_that_was_asked_for():
    found = parse_answer(answer(CODE, analysis="Slow: n^2 work.\nFast: n work.", design="Scale."))
    assert found.source == CODE
    assert found.failure is None
    assert (found.analysis, found.design) == ("Slow: n^2 work.\nFast: n work.", "Scale.")


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        FENCED,
        FENCED.replace("python", ""),
        FENCED.replace("python", "Python title=a.py"),
        FENCED.replace("```", "~~~~"),
        FENCED.replace("\n", "\r\n"),
        f"```python\n{CODE}",
        f"{CODE}```\nIt scales rows.",
        "1. The code:\n" + "\n".join(f"   {line}" for line in FENCED.split("\n")),
        f"First a kernel.\n{KERNEL}Then the module.\n{FENCED}",
        f"{FENCED}It calls this:\n{KERNEL}",
        f"{FENCED}Use it so:\n```python\nprint(run())\n```\n",
        f"```python\nclass ModelNew(:\n```\nNo, better:\n{FENCED}",
        f"{FENCED}A variant:\n```python\nclass ModelNew(torch.nn.Module):\n    def forward(self,",
        f"```python\nimport torch  # never closed\n{FENCED}",
        f"<think>class ModelNew: what if\n```python\nclass ModelNew: pass\n```\n</think>\n{FENCED}",
        f"<think>one</think>\n```python\nclass ModelNew: pass\n```\nWait. <think>two</think>{FENCED}",
        f"the prompt opened it</THINK>{FENCED}",
        f"{FENCED}<think>was that right?",
        f"Here is the module.\n\n{CODE}",
        f"### code implementation\n{CODE}",
        f"{FENCED}```",
        FENCED.replace("python", "cuda"),
        FENCED.replace("python", "cpp") + KERNEL,
        f"````markdown\n## Code Implementation\n{FENCED}````\n",
        f"```md\n## Code Implementation\n{FENCED}```\n",
        f"```python\n\ufeff{CODE}```",
        f"\ufeff{CODE}",
        f"The module:\n\n{CODE}\nIt's faster, since it does less.",
        f"<answer>\n{CODE}\n</answer>",
        f"{CODE}\n<|im_end|>",
    ],
)
def test_the_same_code_is_found_in_every_dress(text):
    found = parse_answer(text)
    assert found.failure is None, found
    assert found.source is not None
    assert ast.dump(ast.parse(found.source)) == ast.dump(ast.parse(CODE))
    assert "\r" not in found.source


def test_a_module_by_its_right_name_comes_before_one_by_a_wrong_name():
    assert parse_answer(f"{FENCED}As C:\n```text\n{module('torch.mul(a[:, None], b)')}```").source == CODE


@pytest.mark.parametrize("fence", ["```", "```python"])
def test_examples_in_a_docstring_may_have_fences(fence):
    code = CODE.replace(":\n", f':\n    """Scale.\n\n    {fence}\n    ModelNew()(a, b)\n    ```\n    """\n\n', 1)
    assert parse_answer(f"## Code Implementation\n```python\n{code}```\nDone.").source == code


def test_of_several_complete_blocks_the_last_counts():
    better = module("torch.mul(a[:, None], b)")
    assert parse_answer(FENCED + f"or\n```python\n{better}```").source == better


@pytest.mark.parametrize(
    "definition",
    ["class Other: pass\nModelNew = Other", "from torch.nn import ReLU as ModelNew", "if True:\n    class ModelNew: pass"],
)
def test_a_class_may_be_defined_in_any_way_that_python_has(definition):
    assert parse_answer(f"```python\n{definition}\n```").source == definition + "\n"


@pytest.mark.parametrize("heading", ["## {}", "# {}:", "#### **{}**", "**{}**", "## 1. {}", "__{}__", "###{}", "**2) {}:**"])
def test_headings_of_any_level_and_case(heading):
    lines = [heading.format("PERFORMANCE analysis"), "slow", heading.format("Algorithm Design"), "fast", FENCED]
    found = parse_answer("\n".join(lines))
    assert (found.analysis, found.design) == ("slow", "fast")


@pytest.mark.parametrize(
    ("text", "failure", "words"),
    [
        ("", AnswerFailure.EMPTY, "empty"),
        (" \n\t", AnswerFailure.EMPTY, "empty"),
        ("<think>long</think>\n", AnswerFailure.EMPTY, "reasoning"),
        ("<think>no end", AnswerFailure.TRUNCATED, "within its reasoning"),
        ("Sure!\n<think>no end", AnswerFailure.TRUNCATED, "within its reasoning"),
        ("I cannot help with that.", AnswerFailure.NO_CODE, "no code"),
        ("The ModelNew class would be faster.", AnswerFailure.NO_CODE, "no code"),
        ("```python\nimport torch\n```", AnswerFailure.NO_MODEL_NEW, "does not define ModelNew"),
        ("```python\nx = ModelNew()\n```", AnswerFailure.NO_MODEL_NEW, "does not define ModelNew"),
        (KERNEL, AnswerFailure.NO_MODEL_NEW, "does not define ModelNew"),
        ("import torch\nclass Model: pass\n", AnswerFailure.NO_MODEL_NEW, "does not define ModelNew"),
        ("```python\nclass ModelNew(\n```", AnswerFailure.SYNTAX_ERROR, "line 1"),
        ("```python\nclass ModelNew:\n  x = '\ud800'\n```", AnswerFailure.SYNTAX_ERROR, "UnicodeEncodeError"),
        ("```python\nclass ModelNew:\n  x = 0\0\n```", AnswerFailure.SYNTAX_ERROR, ""),
        ("```python\nclass ModelNew: pass\nx = " + "-" * 100_000 + "1\n```", AnswerFailure.SYNTAX_ERROR, ""),
        ("```python\nclass ModelNew: pass\n" + "#" * 300_000 + "\n```", AnswerFailure.SYNTAX_ERROR, "262144"),
        ("class ModelNew(torch.nn.Module):\n  def", AnswerFailure.SYNTAX_ERROR, "line"),
        ("```python\nclass ModelNew(torch.nn.Module):\n  def", AnswerFailure.TRUNCATED, "before its code"),
    ],
)
def test_what_holds_no_candidate_says_why(text, failure, words):
    found = parse_answer(text)
    assert (found.source, found.failure) == (None, failure)
    assert words in found.detail


def test_an_answer_cut_at_the_limit_is_truncated_unless_its_code_is_whole():
    cut = "## Performance Analysis\nThe product"
    assert parse_answer(cut, truncated=True).failure is AnswerFailure.TRUNCATED
    assert parse_answer(cut).failure is AnswerFailure.NO_CODE
    assert parse_answer(f"{FENCED}This is", truncated=True).source == CODE
    assert parse_answer("```python\nclass ModelNew(\n```\nThis", truncated=True).failure is AnswerFailure.SYNTAX_ERROR
    assert parse_answer("", truncated=True).failure is AnswerFailure.TRUNCATED
    assert parse_answer("", truncated=True).detail.startswith("the limit")


def completion(text, **changes):
    return Completion(text=text, prompt_tokens=1, completion_tokens=1, **changes)


def test_a_completion_that_failed_is_no_answer_unless_it_holds_a_whole_candidate():
    broken = parse_completion(completion("## Perf", failure="stream-cut"))
    assert (broken.failure, broken.detail) == (AnswerFailure.NO_ANSWER, "stream-cut")
    assert parse_completion(completion(FENCED + "## More", failure="stream-cut")).source == CODE
    assert (
        parse_completion(completion("```python\nclass ModelNew", finish_reason="length")).failure is AnswerFailure.TRUNCATED
    )


FENCES = ["```", "```python", "~~~", "    ```", "<think>", "</think>", "## Code Implementation", "**Algorithm Design**"]
WORDS = [
    "class ModelNew:",
    "    pass",
    "import torch",
    "(",
    '"""',
    "\0",
    "\ud800",
    "ModelNew",
    "",
    "\u2028",
    "x = 1",
    "\\",
    "\r",
]
PIECES = st.sampled_from([*FENCES, *WORDS])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=14).map("\n".join)), st.booleans())
@example("(" * 5000 + "class ModelNew: pass", False)
@example("```python\n" + "[" * 3000 + "ModelNew", False)
def test_nothing_makes_it_raise_and_what_it_finds_is_a_module(text, truncated):
    found = parse_answer(text, truncated=truncated)
    assert (found.source is None) != (found.failure is None)
    if found.source is not None:
        found.source.encode()
        assert any("ModelNew" in ast.dump(node) for node in ast.parse(found.source).body)
    else:
        assert found.detail


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(exclude_characters="`~<\0", exclude_categories=["Cs"]), max_size=80),
    st.sampled_from(["", "python", "py", "Python3"]),
    st.sampled_from(["```", "````", "~~~"]),
)
def test_words_around_a_fenced_module_do_not_matter(words, language, fence):
    text = f"{words}\n{fence}{language}\n{CODE}{fence}\n{words}"
    assert parse_answer(text).source == CODE

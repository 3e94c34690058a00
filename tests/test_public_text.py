"""Tracked text speaks of the project alone: no paths of a machine, no mirrors. Its sentences are short."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT_BYTES = 4 << 20

FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:work|root|home/\w+)(?:/|\b)(?!\w)"),
    "a package mirror": re.compile(
        r"--(?:extra-)?index-url|--trusted-host|artifactory|jfrog|devpi|pip\.conf|"
        r"https?://[\w.-]*(?:pypi|mirror|registry)[\w.-]*",
        re.IGNORECASE,
    ),
    "how it was written": re.compile(
        r"\b(?:this|previous|next|last|another|earlier|later|my) session\b|"
        r"\bsession(?:'s)? (?:log|brief|end)|"
        r"\bsub-?agents?\b|\bcoding agents?\b|\bhelper agents?\b|\bissues show\b|"
        r"\bworkplace\b|\bclaude\b|\bchatgpt\b|\bcopilot\b|\btool call",
        re.IGNORECASE,
    ),
}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        return []
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and ROOT / name != Path(__file__)]


def text_of(path: Path) -> str | None:
    """The file's text; None for what is gone, a link, large or binary."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > LIMIT_BYTES:
        return None
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def problems_in(text: str) -> list[str]:
    # A pattern that a text does not have is in none of its lines: almost all texts are searched as wholes alone.
    patterns = {what: pattern for what, pattern in FORBIDDEN.items() if pattern.search(text)}
    found = []
    for number, line in enumerate(text.splitlines() if patterns else (), start=1):
        for what, pattern in patterns.items():
            hit = pattern.search(line)
            if hit:
                found.append(f"line {number}: {what}: {hit.group(0)}")
    return found


def test_tracked_text_speaks_of_the_project_alone():
    files = tracked_files()
    if not files:
        pytest.skip("not a checkout")
    wrong = {}
    for path in files:
        text = text_of(path)
        problems = problems_in(f"{path.relative_to(ROOT)}\n{text}") if text is not None else []
        if problems:
            wrong[str(path.relative_to(ROOT))] = problems
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "see /work/main/src",
        "cd /root",
        "/home/someone/x",
        "pip install --index-url http://x",
        "https://mirror.example.org/simple",
        "in the last session",
        "a sub-agent did it",
        "asked Claude",
    ],
)
def test_the_patterns_catch_what_they_are_for(line):
    assert problems_in(line)


@pytest.mark.parametrize(
    "line",
    [
        "the worker's private HOME and /tmp",
        "seccomp refuses new sessions",
        "an agent plays the assembly game",
        "runs/workers/root/x",
        "src/work/x",
        "the root of the tree",
        "framework/rooted",
        "homework",
    ],
)
def test_the_patterns_leave_ordinary_words_alone(line):
    assert problems_in(line) == []


def test_pages_and_docstrings_are_written_as_contributing_says():
    found = subprocess.run([sys.executable, ROOT / ".ci" / "check_prose.py"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("page", "long", "habits"),
    [
        ("A NaN always fails. A waiting timer blocks new entrants for up to 4 s.", 0, 0),
        ("`run` " + "word " * 25 + "and an end.", 1, 0),
        ("| `run` | " + "word " * 30 + "|", 0, 0),
        ("```\nWhat runs here takes less since.\n```", 0, 0),
        ("- Whether it is right.", 0, 1),
        ("It takes half since. One has 1.52 of the best baseline.", 0, 2),
        ("Why? What a page says is short?", 0, 0),
    ],
)
def test_long_sentences_and_habits_are_found(page, long, habits):
    prose = runpy.run_path(str(ROOT / ".ci" / "check_prose.py"))
    found = prose["faults"](list(prose["of_page"](page)), prose["HABITS"])
    assert [len(one) for one in found] == [long, habits]

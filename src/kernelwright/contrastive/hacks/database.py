"""Holds the known hacks: patterns that ship with the package, and those confirmed since, in a file of the user's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kernelwright.contrastive.hacks.names import code_only
from kernelwright.contrastive.hacks.profile import Sign, profile
from kernelwright.contrastive.hacks.structure import SHAPE, features, identity
from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.records import Evaluation, append_lines

_PACKAGED = "patterns.jsonl"


class Family(StrEnum):
    """The target of a hack's attack. `docs/hacks.md` describes each."""

    TIMING = "timing"
    """Work moves out of what the clock sees, or the clock, the statistics or the baseline are bent."""
    CACHING = "caching"
    """Results, inputs or weights of one call are kept and used in another."""
    LAZINESS = "laziness"
    """The candidate returns something other than a finished plain tensor."""
    STALE_MEMORY = "stale-memory"
    """Memory is handed out that the candidate did not write, or only in part."""
    TAMPERING = "tampering"
    """Inputs, task, expected values or process-wide state are changed."""
    SHORTCUT = "shortcut"
    """Something cheaper is computed that the test cannot tell from the right function."""
    PRECISION = "precision"
    """Fewer bits are computed than the task asks for."""
    FALLBACK = "fallback"
    """The code shown does not run: decoys, dead branches, the reference under another name."""
    HARNESS = "harness"
    """The program that judges is attacked: its process, its channel, its files, its code."""
    MODE = "mode"
    """Training mode, buffers or parameters are other than the reference's."""


class Pattern(BaseModel):
    """One way to cheat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    family: Family
    name: str
    """A few words, distinct over the database."""
    what: str
    """The mechanism, in a sentence."""
    why: str
    """The reason for which that is a cheat."""
    source_signs: tuple[str, ...]
    """Identifiers and shapes in the source that give it away."""
    measured_signs: tuple[Sign, ...]
    """Signs in the measurements of a judge that falls for it, or in the verdict of one that does not."""
    snippet: str
    """Python that shows the mechanism and little else; it parses."""
    honest: str = ""
    """The same program without the cheat, where there is one: what is in both is not the mechanism."""
    allowed: bool = False
    """Whether it is no cheat where it is called by its name, as a label of the judge does."""
    origin: str
    """`exploits/NAME`, `catalogue/ID`, `written`, or `confirmed/HASH` of a candidate."""
    catalogue: tuple[str, ...] = ()
    """Entries of the catalogue in `docs/hacks.md` that it belongs to, the first above all."""

    def identity(self) -> str:
        """A hash that stays when names, numbers and comments of the snippet are changed."""
        return identity(self.snippet)


class HackDatabase:
    """Patterns to compare candidates with: those given, and those of `confirmed`.

    `confirmed` is a JSON lines file for hacks found since, read now and appended to by `add_confirmed`; None keeps them in
    memory only.

    Raises:
        UsageError: two patterns have one id, or the file cannot be read.
    """

    def __init__(self, patterns: tuple[Pattern, ...] = (), confirmed: Path | None = None) -> None:
        self._confirmed = confirmed
        self._patterns: list[Pattern] = []
        self._identities: set[str] = set()
        self._ids: set[str] = set()
        for pattern in patterns:
            if pattern.id in self._ids:
                raise UsageError(f"Wanted one pattern of each id; found two with `{pattern.id}`. Rename one.")
            self._take(pattern)
        if confirmed is not None:
            self._read_confirmed(confirmed)

    @classmethod
    def packaged(cls, confirmed: Path | None = None) -> HackDatabase:
        """The patterns that ship with the package, and those of a user's file."""
        return cls(packaged_patterns(), confirmed)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """All of them, in order of arrival."""
        return tuple(self._patterns)

    def __len__(self) -> int:
        return len(self._patterns)

    def without(self, holds: Callable[[Pattern], bool]) -> HackDatabase:
        """A copy in memory without the patterns for which `holds` is true: for honest measurements of detection."""
        return HackDatabase(tuple(pattern for pattern in self._patterns if not holds(pattern)))

    def add_confirmed(self, evaluation: Evaluation, family: Family, *, name: str, what: str) -> Pattern | None:
        """Add a candidate that was found to cheat; None when its structure is known already.

        Confirmed means that the judge rejected it, in the first place or in deeper checks, or that a person has read
        it. A reviewing model's vote is no confirmation.

        Raises:
            UsageError: the record has no source, or one that is not Python.
        """
        snippet = code_only(evaluation.source)
        try:
            known = identity(snippet) if snippet.strip() else None
        except (SyntaxError, ValueError, RecursionError):
            known = None
        if known is None:
            raise UsageError(
                f"Wanted the Python source of a hack in the record of {evaluation.candidate_sha256[:12]}; found none. "
                "Give a record that holds its source."
            )
        if self._confirmed is not None:
            # Another process may have added to the file since it was read.
            self._read_confirmed(self._confirmed)
        if known in self._identities:
            return None
        names = {pattern.name for pattern in self._patterns}
        shapes = sorted(item.removeprefix(SHAPE) for item in features(snippet) if item.startswith(SHAPE))
        reason = evaluation.reason.value if evaluation.reason else "accepted by the judge, and yet a cheat"
        pattern = Pattern(
            id=f"confirmed-{known[:12]}",
            family=family,
            name=name if name not in names else f"{name} ({evaluation.candidate_sha256[:8]})",
            what=what,
            why=f"The judge: {reason}. {evaluation.detail}".strip(),
            source_signs=tuple(shapes),
            measured_signs=tuple(sorted(profile(evaluation))),
            snippet=snippet,
            origin=f"confirmed/{evaluation.candidate_sha256[:12]}",
        )
        if self._confirmed is not None:
            try:
                append_lines(self._confirmed, [pattern.model_dump_json()])
            except OSError as error:
                raise UsageError(
                    f"Wanted to add a hack to {self._confirmed}; {error.strerror}. Choose another file."
                ) from error
        self._take(pattern)
        return pattern

    def _take(self, pattern: Pattern) -> None:
        self._patterns.append(pattern)
        self._ids.add(pattern.id)
        self._identities.add(pattern.identity())

    def _read_confirmed(self, path: Path) -> None:
        """Take the whole patterns of a user's file; torn and foreign lines are skipped, as in a run directory."""
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            raise UsageError(f"Wanted to read hacks from {path}; {error.strerror}. Choose another file.") from error
        for line in text.splitlines():
            with suppress(ValidationError, SyntaxError, ValueError):
                pattern = Pattern.model_validate_json(line)
                if pattern.id not in self._ids and pattern.identity() not in self._identities:
                    self._take(pattern)


def packaged_patterns() -> tuple[Pattern, ...]:
    """The patterns that ship with the package.

    Raises:
        InfrastructureError: they are not there or not valid.
    """
    try:
        text = Path(__file__).with_name(_PACKAGED).read_text(encoding="utf-8")
        return tuple(Pattern.model_validate_json(line) for line in text.splitlines())
    except (OSError, ValidationError) as error:
        raise InfrastructureError(
            f"Wanted the patterns that ship with the package; found: {error}. Install kernelwright again."
        ) from error

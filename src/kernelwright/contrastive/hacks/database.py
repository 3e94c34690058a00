"""Holds the known hacks, finds those nearest to a candidate, and reads signs of cheating from what was measured of it.

Patterns ship with the package; those confirmed since are in a file of the user's. Signs find hacks that behave alike.

CUDA-L1 retrieves similar hacks by "AST similarity + performance profile" and published neither. Here a candidate and a
pattern are sets of features of their syntax trees (`structure.py`). Features that a pattern shares with its honest twin
do not count: the mechanism, not the program around it. A feature weighs the more the fewer honest programs
have it: the twins, and the references of the built-in tasks. Features of the task's own reference are left out of
the candidate's. The similarity is the weight of what both have over the weight of what either has (Jaccard), with a constant
in the denominator, so that little evidence is no likeness. Measurements that a pattern is known for raise it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kernelwright.contrastive.families import Family
from kernelwright.contrastive.hacks.names import code_only
from kernelwright.contrastive.hacks.structure import PATH, SHAPE, features, identity
from kernelwright.errors import InfrastructureError, UsageError
from kernelwright.records import Evaluation, Label, Reason, append_lines, read_records
from kernelwright.records.reasons import DescribedCode
from kernelwright.tasks.suites import load_suite

_PACKAGED = "patterns.jsonl"


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
    """True when it is no cheat where it is called by its name, as a label of the judge does."""
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
        """Take the whole patterns of a user's file."""
        for pattern in read_records(path, Pattern):
            with suppress(SyntaxError, ValueError):
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


SUSPICIOUS_SPEEDUP = 3.0
"""CUDA-L1 (arXiv 2507.14111, 2.4.4) measures a speedup above 3x again on another device."""
IMPLAUSIBLE_SPEEDUP = 10.0
"""CUDA-L1's project page: a speedup above 10x on a simple operation begins a verification in several stages."""
TINY_LATENCY_US = {"cpu": 5.0, "cuda": 3.0}
"""A call that does less than one operator's dispatch or one kernel's launch costs; our choice."""
NEAR_LIMIT = 0.5
"""Share of the allowed error above which a candidate uses up its tolerance; our choice."""
SLOW_FIRST_RATIO = 3.0
"""First call of a process against its median; our choice."""
REFERENCE_SPREAD = 1.5
"""Slowest process median of the reference against the fastest: something disturbs it; our choice."""


class Sign(DescribedCode):
    """Something that an evaluation's record shows: its code, and `meaning` in words for prompts and pages."""

    SPEEDUP_SUSPICIOUS = "speedup-suspicious", "the speedup is above 3x"
    SPEEDUP_IMPLAUSIBLE = "speedup-implausible", "the speedup is far above what the bytes moved or the operations done allow"
    LATENCY_TINY = "latency-tiny", "a call takes no longer than a single launch or dispatch"
    FAST_AFTER_FIRST_CALL = "fast-after-first-call", "the first calls of a process are slow and all later ones fast"
    LATENCY_BIMODAL = "latency-bimodal", "calls fall into two groups of very different latency"
    ERROR_NEAR_LIMIT = "error-near-limit", "the error uses up most of the tolerance, as that of a lower precision does"
    OUTER_CLOCK_LONGER = "outer-clock-longer", "the judge's own clock saw more time than the one beside the candidate"
    WORK_OUTSIDE_CALL = "work-outside-call", "processor or device work goes on between calls"
    REFERENCE_DISTURBED = (
        "reference-disturbed",
        "the reference's latency varies by process, or is slower than when alone",
    )
    FLAGS_CHANGED = "flags-changed", "process-wide settings or library functions differ after the candidate was loaded"
    OUTPUT_REPEATS = "output-repeats", "outputs are those of an earlier call, or the same for different inputs"
    OUTPUT_CHANGES_LATER = "output-changes-later", "an output changes after it was handed out"
    OUTPUT_WRONG = "output-wrong", "outputs are wrong on some input set, though right on ordinary inputs"
    OUTPUT_STRANGE = "output-strange", "outputs are not plain tensors of the reference's type, layout and device"
    WEIGHTS_IGNORED = "weights-ignored", "outputs do not follow when weights are loaded or changed"
    STATE_WRONG = "state-wrong", "buffers, keys or the training mode differ from the reference's"
    INPUT_CHANGED = "input-changed", "inputs are other after the call than before"
    PROCESS_DIED = "process-died", "the process ended, hung or was stopped for what it used"
    CHANNEL_TOUCHED = "channel-touched", "something other than the harness wrote to the judge's channel"
    NO_SPEEDUP = "no-speedup", "nothing is gained beyond noise"
    TASK_VACUOUS = "task-vacuous", "a trivial output would pass this task"


_REASONS: Mapping[Sign, tuple[Reason, ...]] = {
    Sign.OUTPUT_REPEATS: (Reason.STALE_OUTPUT, Reason.TIMED_OUTPUT_WRONG, Reason.NONDETERMINISTIC),
    Sign.WEIGHTS_IGNORED: (Reason.STALE_WEIGHTS,),
    Sign.OUTPUT_CHANGES_LATER: (Reason.OUTPUT_OVERWRITTEN, Reason.OUTPUT_ALIASES),
    Sign.ERROR_NEAR_LIMIT: (Reason.PRECISION_DOWNGRADE,),
    Sign.OUTPUT_WRONG: (Reason.WRONG_OUTPUT, Reason.NON_FINITE_OUTPUT),
    Sign.OUTPUT_STRANGE: (
        Reason.WRONG_SHAPE,
        Reason.WRONG_DTYPE,
        Reason.WRONG_DEVICE,
        Reason.WRONG_TYPE,
        Reason.WRONG_STRIDES,
    ),
    Sign.STATE_WRONG: (Reason.STATE_MISMATCH, Reason.MODE_MISMATCH, Reason.BUFFER_MISMATCH),
    Sign.INPUT_CHANGED: (Reason.INPUT_MUTATED,),
    Sign.OUTER_CLOCK_LONGER: (Reason.CLOCK_DISAGREEMENT,),
    Sign.WORK_OUTSIDE_CALL: (Reason.WORK_OUTSIDE_TIMING, Reason.DEVICE_NOT_QUIET, Reason.TOO_MANY_PROCESSES),
    Sign.FLAGS_CHANGED: (Reason.GLOBAL_STATE_CHANGED,),
    Sign.CHANNEL_TOUCHED: (Reason.PROTOCOL_VIOLATION,),
    Sign.PROCESS_DIED: (Reason.CRASHED, Reason.EXITED, Reason.RUN_TIMEOUT, Reason.BUILD_TIMEOUT, Reason.OUT_OF_MEMORY),
}
_LABELS = {
    Label.ALIASED_OUTPUT: Sign.OUTPUT_CHANGES_LATER,
    Label.GLOBAL_FLAGS: Sign.FLAGS_CHANGED,
    Label.TF32: Sign.ERROR_NEAR_LIMIT,
    Label.STATE_DIFFERS: Sign.STATE_WRONG,
    Label.STRIDES_DIFFER: Sign.OUTPUT_STRANGE,
    Label.VACUOUS_TASK: Sign.TASK_VACUOUS,
}


def profile(evaluation: Evaluation) -> frozenset[Sign]:
    """The signs that an evaluation's record shows; empty where nothing was measured."""
    signs = {_LABELS[label] for label in evaluation.labels if label in _LABELS}
    signs |= {sign for sign, reasons in _REASONS.items() if evaluation.reason in reasons}
    return frozenset(signs | _of_speed(evaluation) | _of_blocks(evaluation) | _of_checks(evaluation.checks))


def _of_speed(evaluation: Evaluation) -> set[Sign]:
    if evaluation.speedup is None:
        return set()
    least_us = TINY_LATENCY_US.get(evaluation.device.partition(":")[0], 0.0)
    shown = {
        Sign.SPEEDUP_SUSPICIOUS: evaluation.speedup > SUSPICIOUS_SPEEDUP,
        Sign.SPEEDUP_IMPLAUSIBLE: evaluation.speedup > IMPLAUSIBLE_SPEEDUP,
        Sign.NO_SPEEDUP: not evaluation.is_improvement,
        Sign.LATENCY_TINY: evaluation.candidate_us is not None and evaluation.candidate_us < least_us,
    }
    return {sign for sign, holds in shown.items() if holds}


def _of_blocks(evaluation: Evaluation) -> set[Sign]:
    signs: set[Sign] = set()
    candidate: dict[int, list[float]] = {}
    reference: dict[int, list[float]] = {}
    for block in evaluation.blocks:
        candidate.setdefault(block.process, []).extend(block.candidate_us)
        reference.setdefault(block.process, []).extend(block.reference_us)
    for calls in candidate.values():
        middle = median_high(calls)
        if len(calls) > 2 and calls[0] > SLOW_FIRST_RATIO * middle:
            signs.add(Sign.FAST_AFTER_FIRST_CALL)
        slow = sum(call > SLOW_FIRST_RATIO * min(calls) for call in calls)
        if len(calls) > 3 and 2 <= slow <= len(calls) - 2:
            signs.add(Sign.LATENCY_BIMODAL)
    middles = [median_high(calls) for calls in reference.values() if calls]
    if len(middles) > 1 and max(middles) > REFERENCE_SPREAD * min(middles):
        signs.add(Sign.REFERENCE_DISTURBED)
    return signs


def _of_checks(checks: Mapping[str, Any]) -> set[Sign]:
    signs: set[Sign] = set()
    sets = checks.get("sets")
    for found in sets.values() if isinstance(sets, dict) else ():
        for kind in ("rms", "worst"):
            error, allowed = (_number(found.get(name), kind) for name in ("error", "allowed"))
            if error is not None and allowed is not None and error > NEAR_LIMIT * allowed:
                signs.add(Sign.ERROR_NEAR_LIMIT)
    clocks = checks.get("clocks")
    for clock in clocks if isinstance(clocks, list) else ():
        charged, harness = clock.get("charged_us"), clock.get("harness_us")
        if isinstance(charged, int | float) and isinstance(harness, int | float) and charged > max(harness, 1.0):
            signs.add(Sign.OUTER_CLOCK_LONGER)
    if checks.get("vacuous"):
        signs.add(Sign.TASK_VACUOUS)
    return signs


def _number(pair: object, kind: str) -> float | None:
    value = pair.get(kind) if isinstance(pair, dict) else None
    return float(value) if isinstance(value, int | float) else None


SHAPE_WEIGHT = 2.0
PATH_WEIGHT = 0.3
"""Weights of a shape and of a path of the syntax tree, beside another feature as rare. Chosen on the training split of
results/2026-11-23-hack-detection-cpu, from {2, 4} and {0.3, 1}."""
PRIOR_WEIGHT = 20.0
"""Added to the denominator of a similarity: about four rare features. Chosen as the weights were, from {0, 20, 60}."""
PROFILE_BOOST = 2.0
"""Rise of a similarity at full agreement of the measurements: to three times. Chosen on the measured training
cases of results/2026-11-23-hack-detection-cpu, from {0, 1, 2, 4}. It multiplies, since being fast alone is like no hack."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A known hack and how near it is."""

    pattern: Pattern
    similarity: float
    """Likeness of structure and profile together, from 0 to 1."""
    shared: tuple[str, ...]
    """The weightiest features that both have."""


class Retriever:
    """Finds the nearest patterns of a database. Build it anew when the database has grown."""

    def __init__(self, database: HackDatabase) -> None:
        self._patterns = database.patterns
        twins = [_features(pattern.honest) for pattern in self._patterns if pattern.honest]
        references, programs = honest_counts()
        honest = references + Counter(feature for twin in twins for feature in twin)
        self._hacks = _Index([_mechanism(pattern) for pattern in self._patterns], honest, programs + len(twins))
        self._twins = _Index(twins, references, programs)

    def nearest(
        self, source: str, *, reference: str = "", evaluation: Evaluation | None = None, count: int = 5
    ) -> tuple[Neighbour, ...]:
        """The patterns nearest to a candidate, nearest first; ties by id. Features of the reference are left out."""
        if not self._patterns:
            return ()
        weights = self._hacks.weights_of(_own_features(source, reference))
        structure = self._hacks.similarities(weights)
        signs = profile(evaluation) if evaluation is not None else frozenset()
        scores = [
            (_raised(float(structure[row]), pattern, signs), pattern.id, row) for row, pattern in enumerate(self._patterns)
        ]
        scores.sort(key=lambda item: (-item[0], item[1]))
        return tuple(
            Neighbour(self._patterns[row], score, self._hacks.shared(row, weights)) for score, _, row in scores[:count]
        )

    def honest_resemblance(self, source: str, *, reference: str = "") -> float:
        """The similarity of the nearest honest twin of a hack, from 0 to 1."""
        similarities = self._twins.similarities(self._twins.weights_of(_own_features(source, reference)))
        return float(similarities.max(initial=0.0))


class _Index:
    """Sets of weighted features that others are compared with.

    Args:
        sets: The features of each.
        honest: How many honest programs have each feature.
        programs: How many honest programs there are.
    """

    def __init__(self, sets: Sequence[frozenset[str]], honest: Mapping[str, int], programs: int) -> None:
        self._names: list[str] = sorted(frozenset[str]().union(*sets))
        self._columns = {name: column for column, name in enumerate(self._names)}
        self._has: NDArray[np.float32] = np.zeros((len(sets), len(self._names)), dtype=np.float32)
        for row, found in enumerate(sets):
            self._has[row, [self._columns[name] for name in found]] = 1.0
        self._weights: NDArray[np.float32] = np.array(
            [_weight(name, honest.get(name, 0), programs) for name in self._names], dtype=np.float32
        )
        self._totals: NDArray[np.float32] = self._has @ self._weights

    def weights_of(self, found: frozenset[str]) -> NDArray[np.float32]:
        """The weights of the features that a candidate has, zero elsewhere."""
        weights = np.zeros(len(self._names), dtype=np.float32)
        columns = [self._columns[name] for name in found if name in self._columns]
        weights[columns] = self._weights[columns]
        return weights

    def similarities(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """The similarity of each set to a candidate with these weights."""
        shared: NDArray[np.float32] = self._has @ weights
        nearness: NDArray[np.float32] = shared / (self._totals + weights.sum() - shared + np.float32(PRIOR_WEIGHT))
        return nearness

    def shared(self, row: int, weights: NDArray[np.float32]) -> tuple[str, ...]:
        """The weightiest features that a set and a candidate both have."""
        both = self._has[row] * weights
        order = sorted(np.flatnonzero(both).tolist(), key=lambda column: (-both[column], self._names[column]))
        return tuple(self._names[column] for column in order[:8])


_features = lru_cache(maxsize=4096)(features)


def _own_features(source: str, reference: str) -> frozenset[str]:
    return _features(source) - (_features(reference) if reference else frozenset())


def _mechanism(pattern: Pattern) -> frozenset[str]:
    """The features that make a pattern a cheat: its own without those of its honest twin.

    Of a cheat that only leaves something out nothing remains, and no structure is like it. Letting all its features
    stand for it instead found 27 training cheats in place of 29, with as many false alarms (docs/hacks.md).
    """
    own = _features(pattern.snippet)
    return own - _features(pattern.honest) if pattern.honest else own


def _weight(name: str, owners: int, programs: int) -> float:
    kind = SHAPE_WEIGHT if name.startswith(SHAPE) else PATH_WEIGHT if name.startswith(PATH) else 1.0
    return kind * math.log((1.0 + programs) / (1.0 + owners))


def _raised(structure: float, pattern: Pattern, signs: frozenset[Sign]) -> float:
    """A similarity of structure, raised by the share of a candidate's measured signs that a pattern is known for."""
    agreement = len(signs & frozenset(pattern.measured_signs)) / len(signs) if signs else 0.0
    return min(1.0, structure * (1.0 + PROFILE_BOOST * agreement))


@cache
def honest_counts() -> tuple[Counter[str], int]:
    """The number of built-in references with each feature, and of all of them."""
    sources = [entry.task.source for entry in load_suite("builtin").entries]
    return Counter(feature for source in sources for feature in features(source)), len(sources)

"""A run directory as one HTML file that needs no network.

A candidate's source, messages and names are text that an untrusted program chose. They reach the page in
two ways only: through Jinja's auto-escaping, and as JSON with every `<`, `>` and `&` escaped, which the
page's script reads and shows as text nodes. The page's own script and style are allowed by their hashes in
a content security policy, so that nothing else in it could run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kernelwright.errors import UsageError
from kernelwright.records import Evaluation, RunDirectory, sha256_of
from kernelwright.report import charts, differences
from kernelwright.report.words import LABELS, REASONS

IMPROVEMENT, ACCEPTED, REJECTED = "improvement", "accepted", "rejected"


@dataclass(frozen=True, slots=True)
class Row:
    """One evaluation as the page shows it."""

    number: int
    """Place in the order of judging, from 1."""
    evaluation: Evaluation
    state: str
    """`improvement`, `accepted` or `rejected`."""
    superseded_by: int | None
    """Number of the later evaluation of the same source, which is the one that counts."""
    parent: int | None
    """Number of the evaluation of the candidate that this one was derived from, where it is in this run."""

    @property
    def anchor(self) -> str:
        """The row's id in the page."""
        return f"e{self.number}"

    @property
    def name(self) -> str:
        """What was done, or who did it."""
        return ", ".join(self.evaluation.techniques) or self.evaluation.policy

    @property
    def reason(self) -> str:
        """The reason of a rejection in words; empty when accepted."""
        return REASONS[self.evaluation.reason] if self.evaluation.reason else ""

    @property
    def labels(self) -> list[tuple[str, str]]:
        """Each label with its meaning."""
        return [(label.value, LABELS[label]) for label in self.evaluation.labels]

    @property
    def speedup(self) -> float | None:
        """The speedup where it can be drawn: finite and positive."""
        return _drawable(self.evaluation.speedup)

    @property
    def low(self) -> float | None:
        """Lower end of its interval."""
        return _drawable(self.evaluation.speedup_low)

    @property
    def high(self) -> float | None:
        """Upper end of its interval."""
        return _drawable(self.evaluation.speedup_high)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one task."""

    task: str
    rows: list[Row]
    best: Row | None


def write_report(run: RunDirectory, target: Path) -> Path:
    """Write the page of `run` to `target`, replacing it in one step, and return `target`.

    Raises:
        UsageError: a JSON file of the run is broken, or `target` cannot be written.
    """
    text = render(run)
    temporary = target.with_name(f".{target.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(target)
    except OSError as error:
        message = f"Wanted to write the report to {target}, found: {error.strerror}. Choose another file."
        raise UsageError(message) from error
    return target


def render(run: RunDirectory) -> str:
    """The page of `run` as text."""
    config = _object(run.read_json("config.json"))
    environment = _object(run.read_json("environment.json"))
    rows = rows_of(list(run.evaluations()))
    groups = _groups(rows)
    marks = [
        charts.Mark(
            row.number,
            row.anchor,
            row.state,
            row.name,
            row.speedup,
            row.low,
            row.high,
            row.superseded_by is None,
        )
        for row in rows
    ]
    style, script = _asset("page.css"), _asset("page.js")
    template = _template()
    standing = [row for row in rows if row.superseded_by is None]
    standing_marks = [mark for mark in marks if mark.counts]
    return template.render(
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        verb=config.get("verb", "run"),
        run_name=run.path.resolve().name,
        device=config.get("device")
        or environment.get("device")
        or (rows[0].evaluation.device if rows else "unknown"),
        rows=rows,
        groups=groups,
        counts={
            state: sum(row.state == state for row in standing) for state in (IMPROVEMENT, ACCEPTED, REJECTED)
        },
        superseded=len(rows) - len(standing),
        search=charts.search_over_time(marks) if rows and len(groups) == 1 else None,
        spread=charts.distribution(standing_marks) if any(mark.speedup for mark in standing_marks) else None,
        matrix=_matrix(groups),
        table=_plain_table(run.read_json("table.json")),
        facts=_headline_facts(environment),
        environment=list(_flatten(environment)),
        config=list(_flatten({key: value for key, value in config.items() if key not in ("tasks", "task")})),
        data=_script_json(_details(rows, _references(config))),
    )


def _template() -> jinja2.Template:
    engine = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    engine.filters |= {"latency": latency, "times": times, "interval": interval}
    return engine.from_string(_asset("page.html.j2"))


def rows_of(evaluations: Sequence[Evaluation]) -> list[Row]:
    """Number the evaluations, and let the last one of several of the same candidate count."""
    numbered = list(enumerate(evaluations, start=1))
    # The policy is part of it: baselines of a bench may share the reference's source.
    last = {(e.task_sha256, e.candidate_sha256, e.policy): number for number, e in numbered}
    by_source = {(e.task_sha256, e.candidate_sha256): number for number, e in numbered}
    rows = []
    for number, evaluation in numbered:
        final = last[evaluation.task_sha256, evaluation.candidate_sha256, evaluation.policy]
        state = REJECTED
        if evaluation.accepted:
            state = IMPROVEMENT if evaluation.is_improvement else ACCEPTED
        parent = by_source.get((evaluation.task_sha256, evaluation.parent or ""))
        rows.append(Row(number, evaluation, state, None if final == number else final, parent))
    return rows


def best_of(rows: Sequence[Row]) -> Row | None:
    """The improvement with the highest lower bound among the evaluations that count."""
    standing = [row for row in rows if row.state == IMPROVEMENT and row.superseded_by is None]
    return max(standing, key=lambda row: row.low or 0.0, default=None)


def _groups(rows: Sequence[Row]) -> list[Group]:
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row.evaluation.task, []).append(row)
    return [Group(task, members, best_of(members)) for task, members in by_task.items()]


def _matrix(groups: Sequence[Group]) -> dict[str, Any] | None:
    """Task by policy, where several policies were judged on several tasks."""
    policies = list(dict.fromkeys(row.evaluation.policy for group in groups for row in group.rows))
    if len(groups) < 2 or len(policies) < 2:
        return None
    lines = []
    for group in groups:
        cells: dict[str, Row] = {}
        for row in group.rows:
            if row.superseded_by is None:
                known = cells.get(row.evaluation.policy)
                if known is None or (row.low or 0.0) > (known.low or 0.0):
                    cells[row.evaluation.policy] = row
        lines.append((group.task, [cells.get(policy) for policy in policies]))
    return {"policies": policies, "lines": lines}


def _references(config: dict[str, Any]) -> dict[str, str]:
    """Sources of the run's tasks by their hash, as `config.json` keeps them."""
    tasks = config.get("tasks") or ([config["task"]] if isinstance(config.get("task"), dict) else [])
    sources = [
        task["source"] for task in tasks if isinstance(task, dict) and isinstance(task.get("source"), str)
    ]
    return {sha256_of(source): source for source in sources}


def _details(rows: Sequence[Row], references: dict[str, str]) -> dict[str, Any]:
    """What the page's script shows when a row is opened: each text once, differences as spans."""
    texts: dict[str, int] = {}
    sources = {row.evaluation.candidate_sha256: row.evaluation.source for row in rows}

    def index_of(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def against(before: str | None, after: str) -> dict[str, Any] | None:
        if before is None or before == after or not after:
            return None
        return {"before": index_of(before), "spans": differences.spans(before, after)}

    details = {}
    for row in rows:
        evaluation = row.evaluation
        details[row.anchor] = {
            "source": index_of(evaluation.source) if evaluation.source else None,
            "reference": against(references.get(evaluation.task_sha256), evaluation.source),
            "parent": against(sources.get(evaluation.parent or ""), evaluation.source),
            "facts": {
                "candidate": evaluation.candidate_sha256,
                "policy": evaluation.policy,
                "device": evaluation.device,
                "started": evaluation.started,
                "judged in": f"{evaluation.elapsed_s:.1f} s",
                "detail": evaluation.detail,
            },
            "processes": _processes(evaluation),
            "checks": _presentable(evaluation.checks),
        }
    return {"texts": [text.splitlines() for text in texts], "rows": details}


def _processes(evaluation: Evaluation) -> list[dict[str, str]]:
    """Medians of each fresh process triple: what the interval was made of."""
    found = []
    for process in sorted({block.process for block in evaluation.blocks}):
        blocks = [block for block in evaluation.blocks if block.process == process]
        reference = _median([value for block in blocks for value in block.reference_us])
        candidate = _median([value for block in blocks for value in block.candidate_us])
        null = _median([value for block in blocks for value in block.null_us])
        found.append(
            {
                "process": str(process),
                "reference": latency(reference),
                "candidate": latency(candidate),
                "ratio": times(reference / candidate) if reference and candidate else "-",
                "A/A ratio": times(reference / null) if reference and null else "-",
                "calls": str(sum(len(block.candidate_us) for block in blocks)),
            }
        )
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _drawable(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _presentable(value: Any) -> Any:
    """The same value with numbers shortened and without what JSON cannot spell."""
    if isinstance(value, dict):
        return {str(key): _presentable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_presentable(item) for item in value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, (str, int)) or value is None else str(value)


def _plain_table(value: Any) -> dict[str, Any] | None:
    """A list of like objects as columns and lines; None for anything else."""
    lines = value.get("rows") if isinstance(value, dict) else value
    if not isinstance(lines, list) or not lines or not all(isinstance(line, dict) for line in lines):
        return None
    columns = list(dict.fromkeys(str(key) for line in lines for key in line))
    return {
        "columns": columns,
        "lines": [[_presentable(line.get(column)) for column in columns] for line in lines],
    }


def _headline_facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    gpus = environment.get("gpu")
    gpu = _object(gpus[0]) if isinstance(gpus, list) and gpus else {}
    packages = _object(environment.get("packages"))
    facts = {
        "processor": environment.get("processor"),
        "GPU": gpu.get("name"),
        "driver": gpu.get("driver_version"),
        "CUDA": environment.get("cuda"),
        "torch": packages.get("torch"),
        "commit": environment.get("commit"),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += _flatten(item, f"{prefix}{key}.")
        else:
            lines.append((f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item)))
    return lines


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _asset(name: str) -> str:
    return resources.files("kernelwright.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script_json(value: Any) -> Markup:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    # `</script>` and `<!--` would end or change the script element that holds this text.
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def latency(value_us: float | None) -> str:
    """A latency in the unit in which it is easiest to read."""
    if value_us is None or not math.isfinite(value_us):
        return "-"
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if value_us < limit:
            return f"{value_us / scale:.4g} {unit}"
    return f"{value_us / 1e6:.4g} s"


def times(value: float | None) -> str:
    """A ratio such as `1.84×`."""
    return "-" if value is None else f"{value:.3f}×" if value < 10 else f"{value:.4g}×"


def interval(row: Row) -> str:
    """The interval of a row such as `[1.79, 1.90]`; empty without one."""
    return "" if row.low is None or row.high is None else f"[{row.low:.3f}, {row.high:.3f}]"

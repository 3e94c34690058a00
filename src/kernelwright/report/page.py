"""Writes a run directory as one HTML file that needs no network.

A candidate's source, messages and names are text that an untrusted program chose. They reach the page in
two ways only: through Jinja's auto-escaping, and as JSON with every `<`, `>` and `&` escaped, which the
page's script reads and shows as text nodes. The page's own script and style are allowed by their hashes in
a content security policy, so that nothing else in it could run.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kernelwright.errors import UsageError
from kernelwright.files import replace_file
from kernelwright.records import Evaluation, RunDirectory, TimingBlock, read_objects, sha256_of
from kernelwright.records.decisions import BaselineComparison
from kernelwright.records.model_costs import answers_on_record, model_costs
from kernelwright.records.scoring import log_ratios
from kernelwright.records.tables import TaskResult, baseline_table, bench_table, comparison_of, tally
from kernelwright.report import charts
from kernelwright.report.rows import (
    ACCEPTED,
    IMPROVEMENT,
    REJECTED,
    EvaluationRow,
    Group,
    candidates,
    groups_of,
    matrix,
    near_miss,
    roofline_scatter,
    rows_of,
    screened_section,
    time_spent,
)
from kernelwright.report.tables import render_markdown, render_tasks, task_table

LINE_LIMIT = 3000
CHARACTER_LIMIT = 300_000
"""Matching takes quadratic time on repetitive text, and a candidate chooses its own text."""

Span = tuple[str, int, int, int, int]
"""(tag, first line before, end before, first line after, end after); `tag` as difflib has it."""


def fill(
    name: str, *, style: str, script: str | None = None, filters: Mapping[str, Callable[..., str]], **values: Any
) -> str:
    """The page of a template of this package.

    The page's policy allows this style and this script alone. Values are escaped unless they are `Markup`.
    """
    engine = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    engine.filters |= filters
    allowed = f"style-src {_hash(style)}; " + ("" if script is None else f"script-src {_hash(script)}; ")
    return engine.from_string(asset(name)).render(
        policy=f"default-src 'none'; {allowed}base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=None if script is None else Markup(script),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )


def write_page(text: str, target: Path) -> Path:
    """Write a page to `target` in one step, and return `target`; raises UsageError where it cannot be written."""
    try:
        replace_file(target, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"Wanted to write the report to {target}, found: {error.strerror}. Choose another file.") from error
    return target


def asset(name: str) -> str:
    """The text of a file of this package."""
    return resources.files("kernelwright.report").joinpath(name).read_text(encoding="utf-8")


def flattened(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The leaves of nested objects with their dotted names, as text."""
    lines: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            lines += flattened(item, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", item if isinstance(item, str) else json.dumps(item)))
    return lines


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def differing_spans(before: str, after: str) -> list[Span] | None:
    """Edits from the lines of `before` to those of `after`; None when a text is too long to compare."""
    if max(len(before), len(after)) > CHARACTER_LIMIT:
        return None
    old, new = before.splitlines(), after.splitlines()
    if max(len(old), len(new)) > LINE_LIMIT:
        return None
    return list(difflib.SequenceMatcher(None, old, new, autojunk=True).get_opcodes())


LONG_KEYS = ("task_source", "tasks")
"""Keys of `config.json` that the page shows elsewhere or not at all."""
TABLE_CAPTIONS = {
    "solved": "Speedups of the solved tasks; unsolved ones are left out.",
    "filled": "Speedups of all tasks; an unsolved one counts as 1×, since its user keeps the baseline.",
}
TASKS_CAPTION = "Where each task stands: its best baseline beside its winner, or why there is none."
TABLE_COLUMNS = {
    "mean": "mean", "largest": "max", "p75": "75 %", "p50": "50 %", "p25": "25 %", "geomean": "geomean",
}  # fmt: skip


def write_report(run: RunDirectory, target: Path) -> Path:
    """Write the page of `run` to `target`, replacing it in one step, and return `target`.

    Raises:
        UsageError: a JSON file of the run is broken, or `target` cannot be written.
    """
    return write_page(render(run), target)


def write_bench_report(run: RunDirectory, results: Sequence[TaskResult], tasks: Sequence[Mapping[str, Any]]) -> None:
    """Write `table.md` and `report.html` of a run over a suite, from its results and the status of its tasks."""
    searched = bool((run.read_json("config.json") or {}).get("policy"))
    statistics = render_markdown(bench_table(results), tally(results), baseline_table(results), searched=searched)
    run.write_text("table.md", f"{render_tasks(tasks)}\n{statistics}")
    write_report(run, run.path / "report.html")


def render(run: RunDirectory) -> str:
    """The page of `run` as text."""
    config = _object(run.read_json("config.json"))
    environment = _object(run.read_json("environment.json"))
    rows = rows_of(list(run.evaluations()))
    screened, table = list(run.screened()), run.read_json("table.json")
    groups, judged = groups_of(rows), candidates(rows)
    marks = [
        charts.ChartPoint(
            row.number,
            row.anchor,
            row.state,
            row.name,
            row.speedup,
            row.low,
            row.high,
            row.superseded_by is None,
        )
        for row in judged
    ]
    standing = [row for row in judged if row.superseded_by is None]
    standing_marks = [mark for mark in marks if mark.counts]
    return fill(
        "page.html.j2",
        style=asset("page.css"),
        script=asset("page.js"),
        filters={"latency": latency, "times": times, "interval": interval, "floor": floor, "near_miss": near_miss},
        kind=config.get("kind", "run"),
        run_name=run.path.resolve().name,
        device=_device(config, environment, rows),
        rows=rows,
        groups=groups,
        labels=sorted({pair for row in rows for pair in row.labels}),
        counts={state: sum(row.state == state for row in standing) for state in (IMPROVEMENT, ACCEPTED, REJECTED)},
        superseded=len(judged) - len(standing),
        baselines=len(rows) - len(judged),
        beside=_comparison(run, config, groups),
        search=charts.search_over_time(marks) if rows and len(groups) == 1 else None,
        rewards=_rewards(run.path / "metrics.jsonl"),
        spread=charts.distribution(standing_marks) if any(mark.speedup for mark in standing_marks) else None,
        roofline=_roofline(table, rows),
        counts_operations=any(_object(line["roofline"]).get("operations_us") is not None for line in _with_roofline(table)),
        matrix=matrix(groups),
        screened=screened_section(screened, rows),
        spent=time_spent(screened, rows),
        model=model_costs(answers_on_record(run.path)),
        tables=_tables(table),
        errors=_object(run.read_json("errors.json")),
        facts=_headline_facts(environment),
        environment=flattened(environment),
        config=flattened({key: value for key, value in config.items() if key not in LONG_KEYS}),
        data=_script_json(_details(rows, _references(config, run.read_json("tasks.json")))),
    )


def _rewards(metrics: Path) -> Markup | None:
    """Mean reward by step of a run that trains; None elsewhere."""
    found = {
        int(line["step"]): value
        for line in read_objects(metrics)
        for name, value in line.items()
        if name.endswith("/reward_mean")
    }
    if len(found) < 2:
        return None
    return charts.curves(
        [sorted(found.items())], "Mean reward of the answers of each step.", "steps", min(0.0, *found.values())
    )


def _comparison(run: RunDirectory, config: dict[str, Any], groups: Sequence[Group]) -> BaselineComparison | None:
    """How the winner of a search for one task stands against its baselines."""
    if config.get("kind") != "optimize" or len(groups) != 1 or groups[0].best is None:
        return None
    return comparison_of(run, groups[0].best.evaluation)


def _device(config: dict[str, Any], environment: dict[str, Any], rows: Sequence[EvaluationRow]) -> str:
    devices = config.get("devices")
    if isinstance(devices, list) and devices:
        return ", ".join(map(str, devices))
    known = config.get("device") or environment.get("device")
    return str(known or (rows[0].evaluation.device if rows else "an unknown device"))


def _references(config: dict[str, Any], tasks: Any) -> dict[str, str]:
    """Sources of the run's tasks by their hash: of one in `config.json`, of many in `tasks.json`."""
    listed = [_object(task).get("source") for task in tasks] if isinstance(tasks, list) else []
    sources = [source for source in (config.get("task_source"), *listed) if isinstance(source, str)]
    return {sha256_of(source): source for source in sources}


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of a page, each kept once."""

    indices: dict[str, int] = field(default_factory=dict)

    def index(self, text: str) -> int:
        """Place of a text in the page's list."""
        return self.indices.setdefault(text, len(self.indices))

    def difference(self, before: str | None, after: str) -> dict[str, Any] | None:
        """Edits from one text to another; None where there are none or a text is missing."""
        if before is None or before == after or not after:
            return None
        return {"before": self.index(before), "spans": differing_spans(before, after)}


def _details(rows: Sequence[EvaluationRow], references: dict[str, str]) -> dict[str, Any]:
    """Data of opened rows for the page's script: each text once, differences as spans."""
    texts = _Texts()
    sources = {row.evaluation.candidate_sha256: row.evaluation.source for row in rows}
    details = {}
    for row in rows:
        evaluation = row.evaluation
        details[row.anchor] = {
            "source": texts.index(evaluation.source) if evaluation.source else None,
            "reference": texts.difference(references.get(evaluation.task_sha256), evaluation.source),
            "parent": texts.difference(sources.get(evaluation.parent or ""), evaluation.source),
            "facts": {
                "candidate": evaluation.candidate_sha256,
                "policy": evaluation.policy,
                "device": evaluation.device,
                "started": evaluation.started,
                "judged in": f"{evaluation.elapsed_s:.1f} s",
                "detail": evaluation.detail,
            },
            "processes": _processes(evaluation),
            "speedup_from": _speedup_from(evaluation),
            "checks": _presentable(evaluation.checks),
        }
    return {"texts": [text.splitlines() for text in texts.indices], "rows": details}


def _processes(evaluation: Evaluation) -> list[dict[str, str]]:
    """Each fresh process triple: medians of its sides, and the median ratio of its pairs, of which the speedup is made."""
    found = []
    for process in sorted({block.process for block in evaluation.blocks}):
        blocks = [block for block in evaluation.blocks if block.process == process]
        found.append(
            {
                "process": str(process),
                "reference": latency(_median([value for block in blocks for value in block.reference_us])),
                "candidate": latency(_median([value for block in blocks for value in block.candidate_us])),
                "paired ratio": times(_paired(blocks)),
                "paired A/A ratio": times(_paired(blocks, null=True)),
                "pairs of calls": str(sum(len(block.candidate_us) for block in blocks)),
            }
        )
    return found


def _speedup_from(evaluation: Evaluation) -> str:
    """How the speedup follows from the processes, in words; empty where nothing was timed."""
    ratios = [
        ratio
        for process in {block.process for block in evaluation.blocks}
        if (ratio := _paired([block for block in evaluation.blocks if block.process == process]))
    ]
    if not ratios or evaluation.speedup is None:
        return ""
    mean = statistics.geometric_mean(ratios)
    words = (
        "A ratio is the median over pairs of calls on the same input, so it may differ from the ratio of the two medians."
    )
    if math.isclose(mean, evaluation.speedup, rel_tol=1e-3):
        return f"{words} The geometric mean of these ratios is the speedup, {times(evaluation.speedup)}."
    why = "which is all that series of calls by the judge's own clock bear out"
    if not evaluation.series:
        why += " (this old record does not hold them)"
    return f"{words} The geometric mean of these ratios is {times(mean)}; the speedup is {times(evaluation.speedup)}, {why}."


def _paired(blocks: Sequence[TimingBlock], *, null: bool = False) -> float | None:
    if null and not all(block.null_us for block in blocks):
        return None
    (ratios,) = log_ratios(blocks, null=null)
    return math.exp(statistics.median(ratios))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _presentable(value: Any) -> Any:
    """The same value with numbers shortened and without what JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): _presentable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_presentable(item) for item in value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, (str, int)) or value is None else str(value)


def _tables(value: Any) -> list[dict[str, Any]]:
    """The tasks in `table.json`, and its statistics over solved tasks and over all; none for anything else."""
    listed = _object(value).get("rows")
    rows = [_object(row) for row in listed] if isinstance(listed, list) else []
    tables = []
    for variant, caption in TABLE_CAPTIONS.items():
        numbers = [(row, _object(row.get(variant))) for row in rows]
        lines = [_statistics_line(row, found) for row, found in numbers if found]
        if lines:
            columns = list(dict.fromkeys(name for line in lines for name in line))
            cells = [[line.get(name, "") for name in columns] for line in lines]
            tables.append({"caption": caption, "columns": columns, "lines": cells})
    if tables and (tasks := task_table(_object(value).get("tasks") or [])):
        shown = [list(cells.values()) for cells in tasks]
        tables.insert(0, {"caption": TASKS_CAPTION, "columns": list(tasks[0]), "lines": shown})
    return tables


def _roofline(value: Any, rows: Sequence[EvaluationRow]) -> Markup | None:
    """The scatter of the tasks in `table.json`; None for anything else."""
    return roofline_scatter(_with_roofline(value), rows)


def _with_roofline(value: Any) -> list[dict[str, Any]]:
    """The tasks in `table.json` that have a roofline."""
    listed = _object(value).get("tasks")
    return [line for line in map(_object, listed if isinstance(listed, list) else []) if line.get("roofline")]


def _statistics_line(row: dict[str, Any], numbers: dict[str, Any]) -> dict[str, str]:
    tasks = row.get("tasks", "")
    line = {"level": str(row.get("level") or "all"), "baseline": str(row.get("baseline", ""))}
    line |= {title: times(numbers.get(name)) for name, title in TABLE_COLUMNS.items()}
    line |= {f"fast_{float(p):g}": f"{share:.1%}" for p, share in _object(row.get("fast_p")).items()}
    return line | {
        "success": f"{row.get('success', '')}/{tasks}",
        "above 1.01×": f"{row.get('above', '')}/{tasks}",
        "ahead": f"{row.get('ahead', '-')}/{tasks}",
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
        "commit": str(environment.get("commit") or "").replace("+dirty", " with changes"),
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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


def interval(row: EvaluationRow) -> str:
    """The interval of a row such as `[1.79, 1.90]`; empty without one."""
    return "" if row.low is None or row.high is None else f"[{row.low:.3f}, {row.high:.3f}]"


def floor(value: float | None) -> str:
    """A noise floor such as `1.20 %`."""
    return "-" if value is None else f"{100 * value:.2f} %"

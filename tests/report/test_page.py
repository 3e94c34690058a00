"""The page as a file: what it says about a run, and that nothing a candidate wrote becomes markup."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kernelwright.errors import UsageError
from kernelwright.records import Candidate, Reason, RunDirectory, Task
from kernelwright.records.model_costs import TRANSCRIPT
from kernelwright.records.scoring import log_ratios
from kernelwright.records.screened import screened_of
from kernelwright.records.tables import TaskResult, bench_table
from kernelwright.report.moves import KIND, write_moves_report
from kernelwright.report.page import CHARACTER_LIMIT, LINE_LIMIT, differing_spans, times, write_page, write_report
from kernelwright.report.rows import best_of, rows_of
from tests.report.report_samples import REFERENCE, accepted, candidate_source, rejected, search, write_run

PAYLOADS = (
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "]]><img src=x onerror=\"document.title='owned'\">",
    "'\"><svg onload=alert(1)>{{ 7 * 7 }}{% raw %}",
    "\u2028\u2029 </pre></textarea></style>",
)


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self._script = True

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(path: Path, evaluations, **options) -> Elements:
    run = write_run(path, evaluations, **options)
    return Elements(write_report(run, path / "report.html").read_text(encoding="utf-8"))


def details_of(page: Elements) -> dict:
    return json.loads(page.scripts[0])


def test_every_candidate_has_a_row_with_its_verdict_reason_and_interval(tmp_path):
    page = page_of(tmp_path, search())
    rows = [attributes for tag, attributes in page.found if tag == "tr" and "data-state" in attributes]
    states = "accepted rejected improvement rejected improvement improvement accepted rejected improvement"
    assert [row["data-state"] for row in rows] == [*states.split(), "rejected", "improvement"]
    for words in (
        Reason.INPUT_MUTATED.meaning,
        "input-mutated",
        "[1.588, 1.652]",
        "1.620×",
        "diag-to-einsum",
    ):
        assert words in page.text


def test_the_last_measurement_of_a_candidate_is_the_one_that_counts(tmp_path):
    page = page_of(tmp_path, search())
    assert "3.680× [3.600, 3.750] Best improvement, confirmed in fresh processes: candidate #11" in page.text
    assert "again in #11" in page.text
    assert "4 improvements 2 accepted, not faster 4 rejected 1 measured again later" in page.text


def test_a_first_measurement_that_stands_is_not_called_measured_again(tmp_path):
    checks = {"spent_s": {"candidate call": 2.0}}
    first = accepted("a.unsqueeze(1) * b", 3.7).model_copy(update={"checks": checks})
    stands = first.model_copy(update={"confirms": True})
    once = page_of(tmp_path / "once", [stands]).text
    assert "confirmed at once" in once
    assert "improvement measured again" not in once
    assert "judging candidate call 2.0" in once
    assert "confirming" not in once
    twice = page_of(tmp_path / "twice", [first, stands]).text
    assert "confirmed at once" not in twice
    assert "again in #2" in twice
    assert "improvement measured again" in twice
    assert "confirming candidate call 2.0" in twice
    assert "judging candidate call 2.0" in twice


def test_a_winner_that_is_rejected_when_measured_again_is_not_the_best():
    winner = accepted("a.unsqueeze(1) * b", 3.7)
    again = rejected("a.unsqueeze(1) * b", Reason.TIMED_OUTPUT_WRONG)
    modest = accepted("a[:, None] * b", 1.5)
    best = best_of(rows_of([winner, modest, again]))
    assert best is not None
    assert best.evaluation == modest


def test_a_baseline_improves_no_task_and_is_no_candidate_in_the_pictures(tmp_path):
    graph = accepted("a.mul(b)", 1.4, task="other", reference="other", policy="baseline", techniques=("cudagraph",))
    page = page_of(tmp_path, [accepted("a.unsqueeze(1) * b", 0.9), graph])
    assert "0 of 2 tasks improved" in page.text
    assert "0 improvements 1 accepted, not faster 0 rejected" in page.text
    drawn = [attributes["href"] for tag, attributes in page.found if tag == "a" and "href" in attributes]
    assert "#e2" not in drawn[: drawn.index("#e1") + 1]
    assert sum(href == "#e2" for href in drawn) == 1, "in the table of tasks alone"


def test_an_interval_inside_the_noise_floor_is_no_improvement(tmp_path):
    within = accepted("a.unsqueeze(1) * b", 1.02, width=0.012)
    assert within.speedup_low > 1.0
    page = page_of(tmp_path, [within])
    assert "No improvement" in page.text
    assert "0 improvements 1 accepted, not faster 0 rejected" in page.text


def test_the_highest_lower_bound_wins_over_the_highest_estimate():
    wide, narrow = accepted("x", 4.0, width=0.5), accepted("y", 3.0, width=0.01)
    best = best_of(rows_of([wide, narrow]))
    assert best is not None
    assert best.evaluation == narrow


def test_a_run_without_evaluations_has_a_page(tmp_path):
    page = page_of(tmp_path, [])
    assert "No evaluation yet" in page.text
    assert not any(tag == "svg" for tag, _ in page.found)


def test_an_empty_directory_has_a_page(tmp_path):
    text = write_report(RunDirectory(tmp_path / "run"), tmp_path / "page.html").read_text(encoding="utf-8")
    assert "environment.json is not in this run directory" in text


def test_a_run_of_rejections_only_says_so_and_draws_no_distribution(tmp_path):
    page = page_of(tmp_path, [rejected("x", Reason.CRASHED, "signal 11"), rejected("y", Reason.WRONG_SHAPE)])
    assert "No improvement" in page.text
    charts = [attributes["class"] for tag, attributes in page.found if tag == "svg"]
    assert charts == ["chart search"]


def test_several_tasks_are_grouped_and_compared_by_policy(tmp_path):
    other = REFERENCE.replace("1024", "2048")
    evaluations = [
        accepted("a", 2.0, policy="compile"),
        accepted("b", 3.0, policy="builtin"),
        rejected("c", Reason.WRONG_OUTPUT, task="softmax", reference=other, policy="compile"),
        accepted("d", 0.9, task="softmax", reference=other, policy="builtin"),
    ]
    page = page_of(tmp_path, evaluations)
    assert "1 of 2 tasks improved" in page.text
    groups = [attributes for tag, attributes in page.found if tag == "tr" and attributes.get("class") == "group"]
    assert len(groups) == 2
    assert "softmax 2 judged, no improvement" in page.text
    assert "task compile builtin diag_matmul 2.000× 3.000× softmax wrong-output 0.900×" in page.text


def test_the_statistics_of_a_bench_are_shown_over_solved_and_over_all_tasks(tmp_path):
    run = write_run(tmp_path, search())
    results = [
        TaskResult("one", 1, {"eager": 900.0, "compile": 600.0}, accepted("a", 4.0)),
        TaskResult("two", 1, {"eager": 900.0}, rejected("b", Reason.WRONG_OUTPUT)),
    ]
    rows = [asdict(row) | {"fast_p": {str(p): share for p, share in row.fast_p.items()}} for row in bench_table(results)]
    run.write_json("table.json", {"rows": rows, "tally": {}})
    run.write_json("errors.json", {"three compile": "Wanted <b>; found none."})
    page = Elements(write_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "level baseline mean max 75 % 50 % 25 % geomean fast_1 fast_1.5 fast_2 success above 1.01×" in page.text
    assert "1 eager 4.000× 4.000× 4.000× 4.000× 4.000× 4.000× 50.0% 50.0% 50.0% 1/2 1/2" in page.text
    assert "1 eager 2.500× 4.000× 3.250× 2.500× 1.750× 2.000× 50.0%" in page.text
    assert "three compile Wanted <b>; found none." in page.text


def test_a_table_of_another_shape_is_left_out(tmp_path):
    run = write_run(tmp_path, search())
    for value in ([1, 2], {"rows": [1, {"solved": 3}]}, {"rows": None}, "x"):
        run.write_json("table.json", value)
        page = Elements(write_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
        assert "Statistics" not in page.text


def test_baselines_are_columns_and_never_the_best(tmp_path):
    other = REFERENCE.replace("1024", "2048")
    evaluations = [
        accepted("a", 1.5, policy="cuda-l1"),
        rejected("b", Reason.WRONG_OUTPUT, task="softmax", reference=other, policy="cuda-l1"),
        accepted("c", 9.0, policy="baseline", techniques=("compile",)),
        accepted("d", 8.0, task="softmax", reference=other, policy="baseline", techniques=("compile",)),
    ]
    page = page_of(tmp_path, evaluations)
    assert "1 of 2 tasks improved" in page.text
    assert "1 improvement 0 accepted, not faster 1 rejected 2 baselines" in page.text
    assert "task cuda-l1 compile diag_matmul 1.500× 9.000× softmax wrong-output 8.000×" in page.text


def test_only_a_confirmed_improvement_is_the_best_where_winners_were_measured_again():
    winner, second = accepted("a", 3.7), accepted("b", 3.0)
    confirmed = second.model_copy(update={"confirms": True, "speedup_low": 2.5})
    best = best_of(rows_of([winner, second, confirmed]))
    assert best is not None
    assert best.evaluation == confirmed
    failed = winner.model_copy(update={"confirms": True, "speedup": 1.0, "speedup_low": 0.9})
    assert best_of(rows_of([winner, second, failed])) is None


def test_a_search_says_whether_its_best_was_confirmed(tmp_path):
    winner = accepted("a", 3.7)
    failed = winner.model_copy(update={"confirms": True, "speedup": 1.0, "speedup_low": 0.9})
    assert "Best improvement so far, not confirmed yet" in page_of(tmp_path / "1", [winner]).text
    assert "Nothing held when it was measured again" in page_of(tmp_path / "2", [winner, failed]).text


@pytest.mark.parametrize(("compiled", "said"), [(1.5, "certainly ahead"), (1.99, "not certainly ahead")])
def test_a_search_says_how_its_best_stands_against_the_baselines(tmp_path, compiled, said):
    winner = accepted("a", 2.0).model_copy(update={"confirms": True})
    page = page_of(tmp_path, [winner, accepted("c", compiled, policy="baseline", techniques=("compile",))])
    assert (
        f"Baselines over eager: compile {compiled:.3f}×. Over the fastest, compile, the best is {2 / compiled:.3f}×"
        in page.text
    )
    assert f"]: {said}." in page.text
    assert "Baselines over eager" not in page_of(tmp_path / "without", [winner]).text


def test_decided_tasks_are_drawn_by_their_distance_from_the_roofline_and_linked_with_their_winner(tmp_path):
    winner = accepted("a", 2.0)
    run = write_run(tmp_path, [rejected("b", Reason.WRONG_OUTPUT), winner])
    roofline = {"least_us": 10.0, "reference": 0.1, "winner": 0.2}
    numbers = {"speedup": None, "low": None, "high": None, "candidate_sha256": None, "reason": "", "roofline": roofline}
    won = {"speedup": 2.0, "low": 1.9, "high": 2.1, "candidate_sha256": winner.candidate_sha256}
    tasks = [
        numbers | won | {"task": winner.task, "outcome": "winner"},
        numbers | {"task": "<b>", "outcome": "no-winner", "reason": "rejected: wrong-output 1"},
        numbers | {"task": "open", "outcome": "screened-only"},
        numbers | {"task": "unknown", "outcome": "no-winner", "roofline": None},
    ]
    run.write_json("table.json", {"tasks": tasks})
    text = write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    chart = text.partition('<svg class="chart roofline"')[2].partition("</svg>")[0]
    assert chart.count("<circle") == 2, "what is decided and has a distance"
    assert f'<a href="#e2"><title>{winner.task}: 2.00x (1.90 to 2.10); eager takes 10× the roofline' in chart
    assert "&lt;b&gt;: no winner, rejected: wrong-output 1" in chart
    bytes_alone, both = "this run did not count operations", "A rewrite that avoids operations may lie above it."
    assert bytes_alone in text
    assert both not in text
    run.write_json("table.json", {"tasks": [*tasks, tasks[0] | {"roofline": roofline | {"operations_us": 30.0}}]})
    text = write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert both in text
    assert bytes_alone not in text
    for other in ({"tasks": 3}, {"tasks": [3, {}]}):
        run.write_json("table.json", other)
        assert 'class="chart roofline"' not in write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")


def test_tasks_of_a_bench_are_compared_with_where_they_are_recorded(tmp_path):
    run = write_run(tmp_path, [accepted("a", 2.0)])
    run.write_json("config.json", {"kind": "bench", "tasks": ["diag_matmul"]})
    run.write_json("tasks.json", [{"id": "diag_matmul", "source": REFERENCE, "origin": ""}])
    page = Elements(write_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert details_of(page)["rows"]["e1"]["reference"] is not None


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_a_candidate_wrote_is_text_and_never_markup(tmp_path, payload):
    honest = page_of(tmp_path / "honest", [accepted("a", 2.0), rejected("b", Reason.RUNTIME_ERROR, "boom")])
    hostile = page_of(
        tmp_path / "hostile",
        [
            accepted("a", 2.0, techniques=(payload,), policy=payload, source=f"x = '''{payload}'''"),
            rejected("b", Reason.RUNTIME_ERROR, payload, source=payload).model_copy(
                update={"checks": {payload: [{payload: payload}]}}
            ),
        ],
    )
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in honest.found]
    assert {name for _, attributes in hostile.found for name in attributes} == {
        name for _, attributes in honest.found for name in attributes
    }
    entries = details_of(hostile)
    assert entries["rows"]["e2"]["facts"]["detail"] == payload
    assert "\n".join(entries["texts"][entries["rows"]["e1"]["source"]]).startswith("x = '''")


def test_a_hostile_task_name_and_settings_are_text_too(tmp_path):
    payload = PAYLOADS[0]
    run = write_run(tmp_path, [accepted("a", 2.0, task=payload)])
    run.write_json("config.json", {"kind": payload, payload: payload, "device": payload})
    run.write_json("environment.json", {"processor": payload, "gpu": [{"name": payload}]})
    page = Elements(write_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page.scripts) == 2
    assert page.text.count("document.title") >= 5


def test_the_page_asks_for_nothing_outside_itself(tmp_path):
    text = write_report(write_run(tmp_path, search()), tmp_path / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    for tag, attributes in page.found:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "audio", "video", "source"}
        assert not {"src", "srcset", "style", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
        if "href" in attributes:
            assert attributes["href"].startswith("#")
    assert not re.search(r"https?://|@import|url\(", text)


def test_only_the_pages_own_script_and_style_are_allowed(tmp_path):
    page = page_of(tmp_path, search())
    policy = next(a["content"] for t, a in page.found if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_links_inside_the_page_lead_somewhere(tmp_path):
    page = page_of(tmp_path, search())
    targets = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    links = {attributes["href"][1:] for tag, attributes in page.found if tag == "a"}
    assert links <= targets


def test_differences_against_the_reference_and_the_parent_rebuild_the_candidate(tmp_path):
    entries = details_of(page_of(tmp_path, search()))
    texts, row = entries["texts"], entries["rows"]["e9"]
    after = texts[row["source"]]
    for kind in ("reference", "parent"):
        change = row[kind]
        before = texts[change["before"]]
        rebuilt = []
        for tag, old_start, old_end, new_start, new_end in change["spans"]:
            rebuilt += before[old_start:old_end] if tag == "equal" else after[new_start:new_end]
        assert rebuilt == after
        assert before != after
    assert texts[row["reference"]["before"]] == REFERENCE.splitlines()


def test_without_the_task_in_the_configuration_there_is_no_reference_to_compare_with(tmp_path):
    run = write_run(tmp_path, search())
    run.write_json("config.json", {"kind": "optimize"})
    page = Elements(write_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert details_of(page)["rows"]["e9"]["reference"] is None
    assert details_of(page)["rows"]["e9"]["parent"] is not None


def test_a_text_too_long_to_compare_is_not_compared():
    assert differing_spans("a\n" * (LINE_LIMIT + 1), "b") is None
    assert differing_spans("a", "b" * (CHARACTER_LIMIT + 1)) is None
    assert differing_spans("a\nb", "a\nc") == [("equal", 0, 1, 0, 1), ("replace", 1, 2, 1, 2)]


def test_numbers_that_are_not_finite_do_not_break_the_page(tmp_path):
    odd = accepted("a", 2.0).model_copy(
        update={"speedup_high": float("inf"), "checks": {"error": float("nan"), "at": (1, float("-inf"))}}
    )
    run = write_run(tmp_path, [])
    run.evaluations_path.write_text(odd.model_dump_json().replace('"speedup_high":null', '"speedup_high":Infinity') + "\n")
    page = Elements(write_report(run, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "2.000×" in page.text


def test_a_broken_file_of_the_run_is_a_usage_error(tmp_path):
    run = write_run(tmp_path, search())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json"):
        write_report(run, tmp_path / "report.html")


def test_writing_the_report_twice_replaces_it(tmp_path):
    run = write_run(tmp_path, [])
    write_report(run, tmp_path / "report.html")
    run.append(search()[0])
    assert "1.003×" in write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert not list(tmp_path.glob(".report*"))


def test_processes_are_summarised_from_the_raw_blocks(tmp_path):
    entry = details_of(page_of(tmp_path, [accepted("a", 2.0)]))["rows"]["e1"]
    assert [line["process"] for line in entry["processes"]] == ["0", "1", "2"]
    ratios = [line["paired ratio"] for line in entry["processes"]]
    assert all(ratio.startswith(("1.9", "2.0")) for ratio in ratios)
    assert all(line["pairs of calls"] == "8" for line in entry["processes"])


def test_the_speedup_follows_from_the_ratios_that_are_shown(tmp_path):
    claimed = accepted("a", 2.0)
    ratios = [statistics.median(process) for process in log_ratios(claimed.blocks)]
    speedup = math.exp(statistics.fmean(ratios))
    pages = [
        page_of(tmp_path / str(number), [claimed.model_copy(update={"speedup": value})])
        for number, value in enumerate((speedup, 1.5))
    ]
    same, lower = (details_of(page)["rows"]["e1"]["speedup_from"] for page in pages)
    assert f"The geometric mean of these ratios is the speedup, {times(speedup)}." in same
    assert f"is {times(speedup)}; the speedup is 1.500×, which is all that series of calls" in lower


def test_the_latencies_that_are_shown_agree_with_the_speedup(tmp_path):
    found = accepted("a", 1.516).model_copy(update={"reference_us": 1588.0, "candidate_us": 1135.0})
    page = page_of(tmp_path, [found])
    assert "1.047 ms a call against the reference's 1.588 ms; noise floor 1.10 %" in page.text
    assert "1.135 ms" not in page.text
    assert details_of(page)["rows"]["e1"]["processes"][0]["candidate"].endswith("µs")


def test_a_near_miss_says_what_it_lacks_and_what_would_settle_it(tmp_path):
    page = page_of(tmp_path, [accepted("a", 1.097, width=0.06).model_copy(update={"noise_floor": 0.051})])
    words = "the lower end 1.031 is not above 1.051, 1 + the noise floor; --processes "
    assert page.text.count(words) == 2, "under the headline and in its row"
    assert "5.10 %" in page.text


def test_a_source_is_kept_once_however_often_it_was_judged(tmp_path):
    same = [accepted("a", 2.0 + i / 10) for i in range(5)]
    entries = details_of(page_of(tmp_path, same))
    assert len(entries["texts"]) == 2
    assert candidate_source("a").splitlines() in entries["texts"]


def test_a_summary_of_another_kind_is_said(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_json("config.json", {"kind": KIND})
    run.write_json("summary.json", {"kernels": {}})
    with pytest.raises(UsageError, match="Wanted the summary of an assembly run"):
        write_moves_report(run, tmp_path / "report.html")


@pytest.mark.parametrize("place", ["nowhere/report.html", "folder"])
def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path, place):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="Choose another file"):
        write_page("text", tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_screened_candidates_stand_apart_from_judged_ones(tmp_path):
    judged = accepted("a", 2.0)
    run = write_run(tmp_path, [judged])
    task = Task(id=judged.task, source=REFERENCE)
    for source, techniques, found in (
        (judged.source, ("twice",), {"correct": True, "estimate": 2.5, "spread": 0.02}),
        ("# other", ("thrice </script>",), {"correct": True, "estimate": 3.5, "spread": 0.02}),
        ("# wrong", ("wrong",), {"correct": False, "reason": Reason.WRONG_OUTPUT, "detail": "far"}),
    ):
        candidate = Candidate(source=source, policy="builtin", techniques=techniques)
        one = screened_of(task, candidate, **found, spent_s={"build": 1.5})
        run.append(one.model_copy(update={"task_sha256": judged.task_sha256}))
    text = write_report(run, tmp_path / "report.html").read_text()
    section = text.partition('id="screened"')[2].partition("</section>")[0]
    assert "3 candidates had a quick look" in section
    assert "2 looked right" in section
    assert "1 went to the judge" in section
    assert section.count("<circle") == 1, "the scatter holds what was judged"
    assert "3.500×" in section
    assert "not judged" in section
    assert Reason.WRONG_OUTPUT.meaning in section
    assert "thrice &lt;/script&gt;" in section
    spent = text.partition('id="spent"')[2].partition("</section>")[0]
    assert "<td>screening</td><td>build</td>" in spent
    assert ">4.5<" in spent
    assert 'id="screened"' not in write_report(write_run(tmp_path / "plain", [judged]), tmp_path / "plain.html").read_text()


def test_a_run_that_trains_shows_its_reward_by_step_and_errors_are_shortened(tmp_path):
    run = write_run(tmp_path, search())
    steps = [{"step": step, "contrastive/reward_mean": step / 10} for step in range(3)]
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    run.write_json("errors.json", {"one compile": "CUDA out of memory. " * 100})
    text = write_report(run, tmp_path / "page.html").read_text(encoding="utf-8")
    curve = text.partition('<svg class="chart curve"')[2].partition("</svg>")[0]
    assert curve.count("<polyline") == 1
    assert "2 steps" in curve
    assert text.count("CUDA out of memory.") < 20
    assert "<summary>Its code</summary><pre>" in text


def test_what_a_language_model_cost_is_on_the_page(tmp_path):
    run = write_run(tmp_path, search())
    answer = {
        "kind": "answer",
        "model": "api:m",
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cost": 0.5,
        "currency": "EUR",
    }
    (run.path / TRANSCRIPT).write_text(f"{json.dumps(answer)}\n" * 3)
    text = write_report(run, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "3 answers, 300 prompt tokens, 30 answer tokens, 1.5 EUR" in text

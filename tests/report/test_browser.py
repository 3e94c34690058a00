"""The page in a real browser: Chromium, headless, on a file, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from kernelwright.records import Reason
from kernelwright.report.page import write_report
from tests.report.report_samples import accepted, candidate_source, rejected, search, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


def browse(page: Path, profile: Path, *arguments: str) -> str:
    """What Chromium prints for `page`, a path with or without a fragment."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *arguments, f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def outcome_of(
    page: Path, script: str, fragment: str = "", *, with_policy: bool = True, flags: tuple[str, ...] = ()
) -> dict:
    """Run `script`, the body of a function that returns a JSON value, in a copy of the page; its value."""
    code = (
        "addEventListener('load', () => setTimeout(() => { const found = (() => {" + script + "})();"
        "const place = document.createElement('pre'); place.id = 'outcome';"
        "place.textContent = JSON.stringify(found); document.body.append(place); }, 50));"
    )
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("</body>", f"<script>{code}</script></body>")
    # The policy stands in an attribute, where quotes are escaped.
    text = text.replace("script-src ", f"script-src &#39;sha256-{digest}&#39; ", 1)
    if not with_policy:
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text, count=1)
    copy = page.with_name("driven.html")
    copy.write_text(text, encoding="utf-8")
    flags = ("--virtual-time-budget=3000", "--dump-dom", *flags)
    dom = browse(Path(f"{copy}{fragment}"), page.parent / "profile", *flags)
    found = re.search(r'<pre id="outcome">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(unescape(found.group(1)))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_report(write_run(tmp_path, search()), tmp_path / "report.html")


def test_the_page_loads_nothing_and_its_own_script_runs(page):
    found = outcome_of(
        page,
        """return {
            loaded: performance.getEntriesByType('resource').length,
            shown: document.querySelector('output[name=shown]').textContent,
            ground: getComputedStyle(document.querySelector('.result')).borderTopStyle,
        };""",
    )
    assert found == {"loaded": 0, "shown": "11 shown", "ground": "solid"}


@pytest.mark.exhaustive
def test_the_filter_shows_only_that_verdict(page):
    found = outcome_of(
        page,
        """return ['improvement', 'accepted', 'rejected', 'all'].map((state) => {
            document.querySelector(`input[value=${state}]`).click();
            const rows = [...document.querySelectorAll('tr.row')].filter((row) => row.offsetParent !== null);
            return { state, shown: document.querySelector('output[name=shown]').textContent,
                     states: [...new Set(rows.map((row) => row.dataset.state))].sort(), rows: rows.length };
        });""",
    )
    assert found == [
        {"state": state, "shown": f"{count} shown", "states": states, "rows": count}
        for state, count, states in (
            ("improvement", 5, ["improvement"]),
            ("accepted", 2, ["accepted"]),
            ("rejected", 4, ["rejected"]),
            ("all", 11, ["accepted", "improvement", "rejected"]),
        )
    ]


@pytest.mark.exhaustive
def test_words_narrow_the_table(page):
    found = outcome_of(
        page,
        """const box = document.querySelector('input[name=words]');
        box.value = 'INPUT-mutated'; box.dispatchEvent(new Event('input', { bubbles: true }));
        return [...document.querySelectorAll('tr.row')].filter((row) => !row.hidden).map((row) => row.id);""",
    )
    assert found == ["e8"]


@pytest.mark.exhaustive
def test_opening_a_row_shows_checks_processes_and_both_differences(page):
    found = outcome_of(
        page,
        """const button = document.querySelector('#e9 .open');
        button.focus(); button.click();
        const detail = document.getElementById(button.getAttribute('aria-controls'));
        const before = detail.querySelector('.removed').textContent;
        const after = detail.querySelector('.added').textContent;
        const tabs = [...detail.querySelectorAll('.tabs button')];
        tabs[1].click();
        const parent = [...detail.querySelectorAll('.removed')].map((cell) => cell.textContent).join('');
        tabs[2].click();
        return { expanded: button.getAttribute('aria-expanded'), before, after, parent,
                 tabs: tabs.map((tab) => tab.textContent),
                 headings: [...detail.querySelectorAll('h3')].map((heading) => heading.textContent),
                 lines: detail.querySelectorAll('.code tbody tr').length };""",
    )
    assert found["expanded"] == "true"
    assert found["tabs"] == ["Against the reference", "Against the candidate it came from", "Full source"]
    assert found["before"] == "class Model(nn.Module):"
    assert found["after"] == "class ModelNew(nn.Module):"
    assert found["parent"].strip() == "return a.unsqueeze(1) * b"
    assert found["headings"] == ["Record", "Fresh processes", "Checks", "Code"]
    assert found["lines"] == len(candidate_source("a.view(-1, 1) * b").splitlines())


@pytest.mark.exhaustive
def test_closing_a_row_hides_its_detail_and_filtering_hides_it_too(page):
    found = outcome_of(
        page,
        """const button = document.querySelector('#e9 .open'); button.click();
        const detail = document.getElementById('e9-detail'); const seen = [detail.hidden];
        document.querySelector('input[value=rejected]').click(); seen.push(detail.hidden);
        document.querySelector('input[value=all]').click(); seen.push(detail.hidden);
        button.click(); seen.push(detail.hidden);
        return seen;""",
    )
    assert found == [False, True, False, True]


@pytest.mark.exhaustive
def test_a_link_to_an_evaluation_opens_it(page):
    found = outcome_of(
        page,
        "return [...document.querySelectorAll('tr.detail')].map((row) => row.id);",
        fragment="#e2",
    )
    assert found == ["e2-detail"]


@pytest.mark.exhaustive
def test_sorting_by_speedup_orders_rows_and_keeps_details_beside_them(page):
    found = outcome_of(
        page,
        """document.querySelector('#e7 .open').click();
        document.querySelector('button[data-sort=speedup]').click();
        const rows = [...document.querySelectorAll('tr.row')];
        return { order: rows.map((row) => Number(row.dataset.speedup)),
                 sorted: document.querySelector('button[data-sort=speedup]').closest('th').ariaSort,
                 after: document.getElementById('e7').nextElementSibling.id };""",
    )
    assert found["order"] == sorted(found["order"], reverse=True)
    assert found["sorted"] == "descending"
    assert found["after"] == "e7-detail"


@pytest.mark.parametrize(
    "with_policy",
    [
        pytest.param(True, id="with policy", marks=pytest.mark.exhaustive),
        pytest.param(False, id="by escaping alone"),
    ],
)
def test_a_hostile_candidate_runs_nothing_and_is_shown_as_text(tmp_path, with_policy):
    payload = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--"
    run = write_run(
        tmp_path,
        [
            rejected("x", Reason.RUNTIME_ERROR, payload, source=payload, techniques=(payload,)).model_copy(
                update={"checks": {payload: [{payload: payload}], "b": {payload: payload}}}
            ),
            accepted("y", 2.0, source=f"'''{payload}'''\n", policy=payload),
        ],
        reference=f"'''{payload}'''",
    )
    found = outcome_of(
        write_report(run, tmp_path / "report.html"),
        """for (const button of document.querySelectorAll('.open')) button.click();
        for (const tab of document.querySelectorAll('.tabs button')) tab.click();
        return { title: document.title, images: document.images.length, scripts: document.scripts.length,
                 code: document.querySelector('#e1-detail .code').textContent,
                 message: document.querySelector('#e1-detail .message').textContent };""",
        with_policy=with_policy,
    )
    assert found["title"].endswith("Kernelwright report")
    assert found["images"] == 0
    assert found["scripts"] == 3
    assert payload in found["code"]
    assert found["message"] == payload


def test_a_script_that_is_not_the_pages_own_is_refused(page):
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</main>", "</main><script>document.title='owned'</script>"), encoding="utf-8")
    dom = browse(page, page.parent / "profile", "--virtual-time-budget=1000", "--dump-dom")
    assert "<title>owned" not in dom
    assert "11 shown" in dom


@pytest.mark.exhaustive
def test_text_is_readable_in_light_and_dark(page):
    """Contrast of every visible text against what lies behind it is at least 4.5 to 1 (WCAG 2.2, 1.4.3)."""
    measure = """
        const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const behind = (element) => {
            for (let at = element; at; at = at.parentElement) {
                const colour = channels(getComputedStyle(at).backgroundColor);
                if (colour.length === 3 || colour[3] === 1) return colour;
            }
            return [255, 255, 255];
        };
        document.querySelector('#e9 .open').click();
        document.querySelector('#e2 .open').click();
        const low = [];
        for (const element of document.querySelectorAll('body *')) {
            if (element.closest('svg, .skip, pre#outcome, noscript') || !element.offsetParent) continue;
            if (![...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
            const one = luminance(channels(getComputedStyle(element).color));
            const two = luminance(behind(element));
            const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
            const name = `${element.className} ${element.textContent.slice(0, 20)}`;
            if (ratio < 4.5) low.push(`${name} ${ratio.toFixed(2)}`);
        }
        return { low: [...new Set(low)], dark: matchMedia('(prefers-color-scheme: dark)').matches };"""
    assert outcome_of(page, measure) == {"low": [], "dark": False}
    text = page.read_text(encoding="utf-8")
    # The dark colours, applied whatever the system prefers: the style's hash changes, so the policy goes.
    page.write_text(text.replace("(prefers-color-scheme: dark)", "all"), encoding="utf-8")
    assert outcome_of(page, measure, with_policy=False)["low"] == []


@pytest.mark.exhaustive
def test_every_control_has_a_name(page):
    found = outcome_of(
        page,
        """document.querySelector('#e9 .open').click();
        return [...document.querySelectorAll('button, input, a, svg')].filter((e) =>
            !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map((e) => e.outerHTML);""",
    )
    assert found == []


@pytest.mark.exhaustive
def test_nothing_is_wider_than_a_phone(page):
    found = outcome_of(
        page,
        "return { wide: document.documentElement.scrollWidth, window: innerWidth };",
        flags=("--window-size=500,900",),
    )
    assert found["window"] <= 500
    assert found["wide"] <= found["window"]


@pytest.mark.exhaustive
def test_a_run_without_evaluations_raises_no_script_error(tmp_path):
    page = write_report(write_run(tmp_path, []), tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    dom = browse(page, tmp_path / "profile", "--virtual-time-budget=1000", "--dump-dom")
    assert "No evaluation yet" in dom
    assert text.count("<script") == 2

"""Laws of the pages in a browser: all that the data says can be seen, and nothing of it is executed."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.plan.plan import Plan
from fourfold.planner.plan_text import DEVICES, Curve, Point
from fourfold.report.document import UNKNOWN, bars, card, document, note, render, table
from fourfold.report.page import compare_runs, describe_run
from fourfold.report.plan_pages import describe_curves, describe_decision, describe_plan
from fourfold.report.run_record import read_run
from tests.browser import Tab, needs_browser, open_tab
from tests.decision_cases import DECISION, WORKLOAD, prediction, timed
from tests.report_data import NASTY, log, make_run, texts

pytestmark = needs_browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_tab() as tab:
        yield tab


def load(tab: Tab, data: Any, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(render(data), encoding="utf-8")
    tab.load(path.as_uri())


def nasty_run(folder: Path) -> Path:
    """A run of which every text is nasty."""
    run = make_run(folder, task=NASTY)
    log(run, *({"step": step, "valid": {"loss": value, NASTY: value}} for step, value in ((2, 2.0), (4, 1.5))))
    (run / "faults.jsonl").write_text(json.dumps({"time": 1.0, "kind": NASTY, "step": 3, "text": NASTY, "host": NASTY}))
    return run


def pages(folder: Path) -> dict[str, dict[str, Any]]:
    """A page of each kind."""
    records = [read_run(nasty_run(folder / name)) for name in ("first", "a-second-one-with-quite-a-long-name")]
    decision = dataclasses.replace(DECISION, ranked=(timed(Plan(pp=4, microbatches=8)), *DECISION.ranked))
    points = tuple(Point(str(n), float(n), WORKLOAD, prediction(Plan(dp=n), compute=500.0 / n)) for n in (2, 4))
    rows = [(str(number), UNKNOWN, NASTY) for number in range(50)]
    listed = card(
        "Listed",
        table(("n", "", NASTY), rows),
        note(NASTY, [(NASTY, "wait")]),
        bars([(NASTY, 1.0, NASTY, "wait")], title=""),
    )
    return {
        "run": describe_run(records[0]),
        "runs": compare_runs([*records] * 4),
        "plan": describe_plan(Plan(pp=2, microbatches=3), f"plan   {NASTY}\n" * 2),
        "decision": describe_decision(decision, dataclasses.replace(WORKLOAD, task=NASTY, machine=NASTY)),
        "curves": describe_curves([Curve(DEVICES, "strong scaling", points)], title="What if", under=NASTY),
        "listed": document(NASTY, NASTY, [listed]),
    }


def test_every_text_of_the_data_is_on_the_page_which_is_as_wide_as_the_window(tmp_path, tab):
    for name, data in pages(tmp_path).items():
        load(tab, data, tmp_path)
        shown = " ".join(tab.run("document.querySelector('main').textContent").split())
        assert [text for text in texts(data) if " ".join(text.split()) not in shown] == [], name
        for width in (1200, 400):
            tab.resize(width)
            assert tab.run("document.documentElement.scrollWidth") == width, name
        assert tab.run("document.querySelectorAll('main script, main b b, p b').length") == 0


def test_no_script_runs_but_the_page_s_own(tmp_path, tab):
    load(tab, document("", "", ()), tmp_path)
    added = "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    assert tab.run(f"{added}, window.ran === undefined")


POINT = """
var chart = document.querySelector("svg[tabindex]"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + (58 + 3 / 5 * 488) / 560 * box.width}));
"""
PRESS = 'chart.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}))'
SHOWN = 'document.querySelector(".tip").innerText'


def test_values_under_the_pointer_or_the_cursor_are_shown(tmp_path, tab):
    run = make_run(tmp_path / "first")
    log(run, {"step": 2, "valid": {"loss": 2.0}}, {"step": 4, "valid": {"loss": 1.5}})
    load(tab, describe_run(read_run(run)), tmp_path)
    tab.run(POINT)
    assert tab.run(SHOWN).split() == ["step", "4", "each", "step", "2.6", "training", "2.6", "validation", "1.5"]
    tab.run('chart.dispatchEvent(new PointerEvent("pointerleave"))')
    assert tab.run('document.querySelectorAll(".tip, .cursor").length') == 0
    tab.run(PRESS)
    tab.run(PRESS)
    assert tab.run(SHOWN).split() == ["step", "2", "each", "step", "2.8", "training", "2.8", "validation", "2"]


def test_ticks_are_few_and_round_and_within_the_range(tab):
    draw = random.Random(1)
    ranges = [(low, low + 10 ** draw.uniform(-6, 6)) for low in (draw.uniform(-1e6, 1e6) for _ in range(300))]
    found = tab.run(f"{json.dumps(ranges)}.map(([low, high]) => ticks(low, high, 5))")
    for (low, high), marks in zip(ranges, found, strict=True):
        margin = 1e-6 * max(abs(low), high - low)
        assert 1 <= len(marks) <= 7
        assert all(low - margin <= mark <= high + margin for mark in marks)


def test_a_block_is_named_in_the_longest_part_that_no_later_block_covers(tab):
    draw = random.Random(2)
    span = lambda: sorted(draw.sample(range(21), 2))  # noqa: E731
    drawn = [(span(), [span() for _ in range(draw.randrange(6))]) for _ in range(300)]
    blocks = [[start, stop, [["", *other] for other in others]] for (start, stop), others in drawn]
    found = tab.run(f"{json.dumps(blocks)}.map((each) => freePart(...each))")
    for ((begin, end), others), (start, stop) in zip(drawn, found, strict=True):
        covered = [any(a <= k < b for a, b in others) for k in range(begin, end)]
        assert stop - start == max(map(len, "".join(" x"[each] for each in covered).split("x")))
        assert not any(covered[k - begin] for k in range(start, stop))

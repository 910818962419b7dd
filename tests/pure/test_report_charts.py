"""Laws of the report's charts, of its key figures and of the comparison: every value logged is there, once, exactly."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.report import page, run_record
from fourfold.report.cards import MemoryRecord, memory_card
from fourfold.report.page import Figure
from fourfold.report.svg import Series, line_figure
from tests.browser import Tab, needs_browser, open_tab
from tests.pure.test_report import NASTY, make_run, parse_html, visible_text

MEMORY = {
    "step": 6,
    "predicted": {"weights": 2.0**20, "states": 2.0**21},
    "ranks": [
        {"kept_bytes": 4 * 2**20, "peak_bytes": 5 * 2**20, "before_bytes": 2**20, "device_bytes": None},
        {"kept_bytes": 6 * 2**20, "peak_bytes": 7 * 2**20, "before_bytes": None, "device_bytes": None},
    ],
}


def log(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def evaluated(folder: Path, **measures: Sequence[float | None]) -> Path:
    """The run with so many evaluations, every second step."""
    for number, values in enumerate(zip(*measures.values(), strict=True)):
        log(folder, {"step": 2 * number + 2, "valid": dict(zip(measures, values, strict=True))})
    return folder


def charts_of(html: str) -> dict[str, dict[str, list[list[float]]]]:
    """The values of each drawing, by the title of its card and the name of the curve."""
    found = {}
    for card in parse_html(html).iter("section"):
        for svg in (node for node in card.iter() if node.get("data-series")):
            series = json.loads(svg.get("data-series") or "")
            found["".join(card[0].itertext())] = {each["name"]: each["points"] for each in series}
    return found


def table(html: str, style: str) -> dict[str, list[str]]:
    """The rows of the last table of a style, by their first cell."""
    (*_, found) = (node for node in parse_html(html).iter("table") if style in (node.get("class") or "").split())
    rows = [["".join(cell.itertext()) for cell in row] for row in found.iter("tr")]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def test_every_measure_has_a_curve_of_exactly_its_values(run):
    evaluated(run, **{"loss": [2.0, 1.5], "accuracy": [0.5, 0.75], NASTY: [1.0, 2.0], "ema accuracy": [0.25, 0.5]})
    drawn = charts_of(page.write_report([run]).read_text())
    assert drawn["Accuracy"] == {"accuracy": [[2, 0.5], [4, 0.75]], "ema accuracy": [[2, 0.25], [4, 0.5]]}
    assert drawn[NASTY] == {NASTY: [[2, 1.0], [4, 2.0]]}
    assert drawn["Loss"]["validation"] == [[2, 2.0], [4, 1.5], [6, 2.34567]]


def test_a_measure_that_is_not_finite_leaves_a_gap(run):
    evaluated(run, accuracy=[0.5, None, 0.75])
    assert charts_of(page.write_report([run]).read_text())["Accuracy"] == {"accuracy": [[2, 0.5], [6, 0.75]]}


def test_learning_rate_and_gradient_norm_are_drawn_where_they_were_logged(run):
    assert not {"Learning rate", "Gradient norm"} & set(charts_of(page.write_report([run]).read_text()))
    step = {"loss": 1.0, "samples": 8, "seconds": 0.5, "waiting_seconds": 0.0}
    log(run, *({**step, "step": n, "lr": 0.1 / n, "grad_norm": float(n)} for n in range(1, 7)))
    drawn = charts_of(page.write_report([run]).read_text())
    assert drawn["Learning rate"] == {"learning rate": [[n, pytest.approx(0.1 / n)] for n in range(1, 7)]}
    assert drawn["Gradient norm"]["each step"] == [[n, n] for n in range(1, 7)]


def test_memory_is_shown_of_each_rank_as_predicted_and_as_measured(run):
    assert "Memory of each rank" not in page.write_report([run]).read_text()
    log(run, {"memory": {**MEMORY, "step": 3, "ranks": []}}, {"memory": MEMORY})
    html = page.write_report([run]).read_text()
    assert table(html, "memory") == {
        "": ["predicted", "kept", "peak", "before the model"],
        "rank 0": ["3.00 MiB", "4.00 MiB", "5.00 MiB", "1.00 MiB"],
        "rank 1": ["3.00 MiB", "6.00 MiB", "7.00 MiB", "–"],
    }
    assert "7.00 MiB peak memory of a rank" in visible_text(html).replace("MiBpeak", "MiB peak")


def test_a_gpu_s_memory_has_a_column_and_is_the_peak():
    ranks = [{"kept_bytes": 1, "peak_bytes": 9 * 2**30, "device_bytes": n * 2**30} for n in (2, 3)]
    record = msgspec.convert({**MEMORY, "ranks": ranks}, MemoryRecord)
    assert record.largest_peak_bytes == 3 * 2**30
    assert table(f"<p>{memory_card(record)}</p>", "memory")["rank 1"][2:4] == ["3.00 GiB", "9.00 GiB"]


def test_a_line_of_memory_that_is_none_is_refused(run):
    log(run, {"memory": {"step": 3, "ranks": [{"kept_bytes": "much"}]}}, {"step": 7, "valid": {}})
    with pytest.raises(run_record.ReportError, match="a line of a run's log"):
        page.write_report([run])


def test_the_task_s_arguments_stand_apart_from_the_settings(run):
    settings = json.loads((run / "settings.json").read_text())
    arguments = {"width": 128, "data": NASTY, "dropout": None}
    (run / "settings.json").write_text(json.dumps({**settings, "width": 128, "task_arguments": arguments}))
    html = page.write_report([run]).read_text()
    assert table(html, "words") != {}
    text = visible_text(html)
    assert "Arguments of the task" in text
    assert f"data{NASTY}" in text
    assert "dropoutnone" in text
    assert text.count("width128") == 1


NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)


@given(points=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20), name=st.text())
def test_a_figure_holds_the_values_that_it_draws(points, name):
    name = "".join(char for char in name if char.isprintable())
    points.sort()
    html = line_figure([Series(name, points, 7), Series("mark", points, 3, "rule")], x="step", y="loss", title=name)
    (svg,) = (node for node in parse_html(html).iter() if node.get("data-series"))
    (series,) = json.loads(svg.get("data-series") or "")
    assert series["name"] == name
    assert series["colour"] == 1  # colours repeat after six
    assert [tuple(point) for point in series["points"]] == [tuple(map(pytest.approx, point)) for point in points]
    assert len((svg.get("data-frame") or "").split()) == 8


@pytest.mark.parametrize(("measure", "better"), [
    ("loss", "lower"), ("bits per byte", "lower"), ("accuracy", "higher"), ("ema accuracy", "higher"),
    ("word error", "lower"), ("f1", "higher"), ("temperature", ""), ("accuracy loss", ""), ("glossary", ""),
])  # fmt: skip
def test_a_measure_s_better_direction_follows_from_its_words(measure, better):
    assert page.better_direction(measure) == better


def figures(better: Any, values: list[float | None]) -> list[Figure | None]:
    return [None if value is None else Figure("name", f"{value:g}", value, better) for value in values]


def test_the_best_of_a_row_is_marked_only_where_it_can_be_said():
    assert page.best_indices(figures("lower", [2.0, 1.0, None, 1.0])) == {1, 3}
    assert page.best_indices(figures("higher", [2.0, 1.0, float("nan")])) == {0}
    assert page.best_indices(figures("", [2.0, 1.0])) == set()
    assert page.best_indices(figures("lower", [1.0, 1.0])) == set()
    assert page.best_indices(figures("lower", [1.0, None])) == set()


def test_a_comparison_shows_what_differs_first_then_final_values_then_a_curve_of_each_run(tmp_path):
    folders = [
        evaluated(make_run(tmp_path / "first"), loss=[2.0, 1.5, 1.6], accuracy=[0.5, 0.75, 0.7]),
        evaluated(
            make_run(tmp_path / "second", loss=2.0, task="digits"), loss=[1.0, 1.0, 0.9], accuracy=[0.9, 0.6, 0.6]
        ),
    ]
    html = page.write_report(folders).read_text()
    titles = ["".join(node.itertext()) for node in parse_html(html).iter("h2")]
    assert titles[:4] == ["What differs in plan and settings", "Final values", "Loss", "Throughput"]
    values = table(html, "finals")
    assert values["accuracy"] == ["0.7000", "0.6000"]
    assert values["best accuracy"] == ["0.7500 (step 4)", "0.9000 (step 2)"]
    assert values["validation loss"] == ["1.6000", "0.9000"]
    best = ["".join(cell.itertext()) for cell in parse_html(html).iter("td") if cell.get("class") == "best"]
    assert best == ["0.9000", "0.7000", *best[2:]]
    assert {"0.9000 (step 2)", "0.9000 (step 6)"} <= set(best)
    drawn = charts_of(html)
    assert drawn["Accuracy"] == {
        "first": [[2, 0.5], [4, 0.75], [6, 0.7]],
        "second": [[2, 0.9], [4, 0.6], [6, 0.6]],
    }
    assert set(drawn["Loss"]) == {"first", "second", "first, validation", "second, validation"}


def test_a_comparison_of_equal_runs_says_that_nothing_differs(tmp_path):
    records = [run_record.read_run(make_run(tmp_path / name)) for name in ("first", "second")]
    assert "Nothing." in visible_text(page.render_comparison(records))


# Points at step 4 of the first drawing.
POINT = """
var svg = document.querySelector("svg[data-series]"), box = svg.getBoundingClientRect(),
  frame = svg.dataset.frame.split(" ").map(Number),
  x = frame[0] + (4 - frame[4]) / (frame[5] - frame[4]) * (frame[1] - frame[0]);
svg.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: box.left + x / 560 * box.width}));
"""
LEAVE = 'document.body.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}))'
PRESS = 'svg.dispatchEvent(new KeyboardEvent("keydown", {bubbles: true, key: "ArrowRight"}))'
SHOWN = 'document.querySelector(".tip").innerText'


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_tab() as tab:
        yield tab


@needs_browser
def test_values_under_the_pointer_or_the_cursor_are_shown(run, tab):
    evaluated(run, loss=[2.0, 1.5])
    tab.load(page.write_report([run]).as_uri())
    tab.run(POINT)
    assert tab.run(SHOWN).split() == ["step", "4", "each", "step", "2.6", "training", "2.6", "validation", "1.5"]
    tab.run(LEAVE)
    assert tab.run('document.querySelectorAll(".tip, .cursor").length') == 0
    tab.run(PRESS)
    tab.run(PRESS)
    assert tab.run(SHOWN).split() == ["step", "2", "each", "step", "2.8", "training", "2.8", "validation", "2"]


@needs_browser
def test_no_page_is_wider_than_the_window(tmp_path, tab):
    folders = [make_run(tmp_path / f"a-run-with-quite-a-long-name-{number}") for number in range(7)]
    for paths in (folders, folders[:1]):
        tab.load(page.write_report(paths).as_uri())
        for width in (1200, 400):
            tab.resize(width)
            assert tab.run("document.documentElement.scrollWidth") == width

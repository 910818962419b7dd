"""Laws of the report's faults and checkpoints: all are listed and marked in the drawing, whatever their lines hold."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.report import cards, page, run_record, svg
from fourfold.report.cards import Faults
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from tests.pure.test_report import NASTY, make_run, parse_html, visible_text

SVG = "{http://www.w3.org/2000/svg}"
RESTART = {
    "time": 1795260000.5,
    "kind": "restart",
    "step": 3,
    "rank": 1,
    "host": "alpha",
    "text": NASTY,
    "seconds": 4.2,
}
SKIPPED = {"time": 1795260060.0, "kind": "skipped step", "step": 5, "rank": None, "host": None, "text": "NaN"}
FAULTS = st.builds(
    Fault,
    time=st.floats(),
    kind=st.text(),
    step=st.integers(),
    rank=st.none() | st.integers(),
    host=st.none() | st.text(),
    text=st.text(),
    seconds=st.none() | st.floats(),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def write_faults(folder: Path, *lines: bytes | dict[str, object]) -> None:
    text = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / FAULTS_FILE).write_bytes(b"\n".join(text))


def log(folder: Path, *lines: dict[str, object]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def checkpoint(folder: Path, name: str, num_bytes: int) -> None:
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "rank-000.safetensors").write_bytes(bytes(num_bytes))


def marked(html: str, kind: str) -> list[str | None]:
    """The tooltips of the marks of one kind."""
    paths = (node for node in parse_html(html).iter(f"{SVG}path") if (node.get("class") or "").split()[0] == kind)
    return [title.text for node in paths if (title := node.find(f"{SVG}title")) is not None]


def rows(html: str, table: str) -> list[list[str]]:
    result = (node for node in parse_html(html).iter("table") if table in (node.get("class") or "").split())
    return [["".join(cell.itertext()) for cell in row] for node in result for row in node.iter("tr")]


def test_faults_are_listed_and_marked_on_the_curve(run):
    write_faults(run, SKIPPED, RESTART)
    html = page.write_report([run]).read_text()
    head, first, second = rows(html, "faults")
    assert first == ["21 Nov 11:20:00", "restart", "3", "rank 1, alpha", "4.2 s", NASTY]
    assert second[1:5] == ["skipped step", "5", "–", "–"]
    assert len(head) == len(first)
    assert marked(html, "rule") == ["restart at 3"]
    assert marked(html, "peg") == ["skipped step at 5"]


def test_a_run_without_faults_has_one_line_and_no_table(run):
    html = page.write_report([run]).read_text()
    assert "No faults, no restarts." in visible_text(html)
    assert "Faults and restarts" not in visible_text(html)
    assert not rows(html, "faults")
    log(run, {"resumed": 4})
    assert "No faults; resumed from step 4." in visible_text(page.write_report([run]).read_text())


@given(junk=st.lists(st.binary().filter(lambda line: line.strip()), max_size=5))
@example(junk=[b'{"time": 1, "kind": "half a li', b"3", b"[]", b'{"time": 1, "kind": "x", "step": "3"}', b"\xff"])
def test_unreadable_fault_lines_are_counted_and_the_others_shown(junk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    lines = [line for each in junk for line in each.splitlines() if line.strip()]
    write_faults(folder, RESTART, *lines, {**SKIPPED, "later": "a field of a later version"})
    result = cards.read_faults(folder)
    assert [fault.kind for fault in result.faults] == ["restart", "skipped step"]
    assert result.num_unreadable == len(lines)
    assert ("could not be read" in cards.faults_card(result, [])) == bool(lines)


@given(known=st.lists(FAULTS, min_size=1, max_size=60), resumed=st.lists(st.integers(0, 10**6), max_size=9))
@example(known=[Fault(time=1e300, kind="\x00" + NASTY, step=2**70, text="\x1b[31m")], resumed=[])
def test_any_fault_gives_well_formed_html(known, resumed):
    card = cards.faults_card(Faults(known), resumed)
    root = ElementTree.fromstring(f"<html>{card}</html>")
    assert len([row for row in root.iter("tr") if row[0].tag == "td"]) == len(known)
    assert sum(len(series.points) for series in cards.fault_marks(known, last_step=100)) == sum(
        0 <= f.step <= 100 for f in known
    )


def test_a_fault_at_an_impossible_step_does_not_stretch_the_axis(run):
    write_faults(run, {**RESTART, "step": 10**12}, {**RESTART, "step": -1}, {**RESTART, "step": 0})
    assert marked(page.write_report([run]).read_text(), "rule") == ["restart at 0"]


def test_checkpoints_are_reported_with_sizes_pauses_and_outcomes(run):
    checkpoint(run, "step-00000004", 3 * 2**20)
    log(
        run,
        *({"step": step, "checkpoint": f"step-{step:08d}", "pause_seconds": step / 1000} for step in (1, 2, 4, 6)),
        {"checkpoint": "step-00000002", "damaged": [f"/a/b/step-00000002/rank-000.safetensors: {NASTY}"]},
        {"warning": "the checkpoint of step 6 could not be written: no space left on device; training continues"},
        {"warning": "something else"},
    )
    html = page.write_report([run]).read_text()
    assert rows(html, "saved")[1:] == [
        ["2", "–", "–", f"damaged, set aside: rank-000.safetensors: {NASTY}"],
        ["4", "3.00 MiB", "4.00 ms", "kept"],
        ["6", "–", "6.00 ms", "not written: no space left on device"],
    ]
    assert "3 saved, 1 kept · pause 3.00 ms in the median, 6.00 ms at most" in visible_text(html)
    assert marked(html, "tick") == ["checkpoint at 1", "checkpoint at 2", "checkpoint at 4"]


def test_a_run_without_checkpoints_says_so(run):
    html = page.write_report([run]).read_text()
    assert "None was saved." in visible_text(html)
    assert not rows(html, "saved")
    assert cards.read_checkpoints(run, []).on_disk == []


def test_the_time_of_a_resumed_run_is_the_sum_over_its_segments(run):
    path = run / "metrics.jsonl"
    *steps, valid, finished = path.read_text().splitlines()
    saved_at_4 = {"step": 4, "checkpoint": "step-00000004", "pause_seconds": 0.1, "elapsed_seconds": 2.5}
    between = [json.dumps(line) for line in (saved_at_4, {"resumed": 4})]
    path.write_text("\n".join([*steps[:4], *between, *steps[4:], valid, finished]) + "\n")
    html = page.write_report([run]).read_text()
    assert rows(html, "segments")[1:] == [
        ["1 to 4", "2.5 s", "3.28 k", "started"],
        ["5 to 6", "3.2 s", "1.26 k", "resumed from step 4"],
    ]
    assert "0:06 time, 2 segments" in visible_text(html).replace("0:06time", "0:06 time")
    assert "2.14 k" in visible_text(html)
    path.write_text(
        "\n".join([*steps[:4], json.dumps({"resumed": 4}), *steps[4:]]) + "\n"
    )  # an unfinished run, with a log of an older version
    assert [segment.seconds for segment in run_record.read_run(run).segments] == [2.0, 1.0]


def test_a_comparison_counts_restarts_and_skipped_steps(tmp_path):
    folders = [make_run(tmp_path / "first"), make_run(tmp_path / "second", loss=2.0)]
    write_faults(folders[0], RESTART, RESTART, SKIPPED, {**SKIPPED, "kind": "terminated"})
    text = visible_text(page.render_comparison([run_record.read_run(folder) for folder in folders]))
    assert "restarts / skipped steps2 / 10 / 0" in text.replace("> ", "")


def test_marks_do_not_move_the_curve():
    curve = svg.Series("loss", [(0.0, 3.0), (10.0, 2.0)])
    marks = [
        svg.Series("restart", [(5.0, 0.0)], 3, "rule"),
        svg.Series("checkpoint", [(9.0, 0.0)], 2, "tick"),
    ]
    drawn = [svg.line_chart(each, x="step", y="loss", title="Loss") for each in ([curve], [*marks, curve])]
    paths = [[n.get("d") for n in ElementTree.fromstring(each).iter(f"{SVG}path") if n.get("class") == "line c0"]
             for each in drawn]  # fmt: skip
    assert paths[0] == paths[1]
    assert len(paths[0]) == 1

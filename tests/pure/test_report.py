"""Laws of the report: well-formed, self-contained, escaped, and every figure of the run in it."""

import dataclasses
import itertools
import json
import re
import resource
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.plan.plan import Plan
from fourfold.report import charts, html_page, page, run_record, step_timeline, svg
from fourfold.report.page import key_figures
from fourfold.report.style import CSS
from fourfold.step.step_runner import Metrics
from fourfold.trace.trace_file import Event, Trace, encode_trace
from fourfold.trainer import progress
from fourfold.trainer.meters import Throughput
from fourfold.words.measures import num_units
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import COMPUTE_LANE, REDUCE_LANE
from tests.recorded_traces import trace

NASTY = "<b>&\"'</script>"
NUMBERS = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))


def parse_html(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


def visible_text(html: str) -> str:
    return " ".join("".join(parse_html(html).itertext()).split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def make_run(folder: Path, *, task: str = "lm", loss: float = 3.0, tokens: int | None = 2048) -> Path:
    folder.mkdir()
    (folder / "plan.toml").write_text(Plan(dp=2).to_toml(defaults=True))
    versions = {"fourfold": "0.1.0", "torch": "2.13.0", "python": "3.11.2"}
    settings = {"task": task, "steps": 6, "batch_size": 8, "clip": None, "transport": "shared memory"}
    (folder / "settings.json").write_text(json.dumps({**settings, "versions": versions, "cores": 2}))
    times = {"seconds": 0.5, "waiting_seconds": 0.125, "data_seconds": 0.25}
    lines = [{"step": n, "loss": loss - 0.1 * n, "samples": 8, "tokens": tokens, **times} for n in range(1, 7)]
    valid = {"step": 6, "valid": {"loss": 2.34567, "bits per byte": 3.3841}}
    unit = "tokens" if tokens else "samples"
    finished = {"finished": 6, "seconds": 3.25, "rate": 3780.9, "unit": unit, "valid": valid["valid"]}
    rows = [*lines, valid, finished]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trace.json").write_bytes(encode_trace(trace(late=1.0)))
    return folder


def test_a_page_that_the_disk_does_not_take_leaves_the_one_before(run):
    before = page.write_report([run]).read_text()
    files, limits = sorted(run.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            page.write_report([run])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run / page.REPORT_FILE).read_text() == before
    assert sorted(run.iterdir()) == files


def test_a_page_is_well_formed_and_self_contained(run):
    html = page.write_report([run]).read_text()
    root = parse_html(html)
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(|XMLHttp|import\(", html)
    assert {node.tag.split("}")[-1] for node in root.iter()} >= {"svg", "table", "style", "title"}
    assert "prefers-color-scheme: dark" in html


def test_terminal_and_page_mean_the_same_by_waiting_and_count_the_unit_of_the_task(run):
    metrics = Metrics(3.0, 8, 2048, None, seconds=0.5, waiting_seconds=0.125, data_seconds=0.25)
    throughput = Throughput()
    for _ in range(6):
        throughput.add_step(num_units("samples", metrics.tokens, metrics.samples), metrics)
    line = throughput.progress_line(6, num_steps=6, unit="samples")
    assert line.waiting_fraction == run_record.read_run(run).waiting_fraction() == 0.25
    assert throughput.num_units == 6 * 8


def test_every_key_figure_is_on_the_page(run):
    text = visible_text(page.write_report([run]).read_text())
    for figure in (
        "2.3457",
        "3.3841",
        "3.78 k",
        "25.0 %",
        "0:03",
        "shared memory",
        "2.13.0",
        "bucket_bytes",
        "2 ranks",
    ):
        assert figure in text
    assert {"time", "waiting"} <= {each.name for each in key_figures(run_record.read_run(run))}
    assert "training time, s" in text
    for part in ("Loss", "Throughput", "Time by action", "One step, measured and simulated", "Settings", "Plan"):
        assert part in text


def test_the_step_is_drawn_measured_and_simulated_with_its_differences(run):
    html = page.write_report([run]).read_text()
    text = visible_text(html)
    for name in ("rank 0 compute", "rank 0 data", "rank 1 reduce", "simulated 0 compute", "simulated 1 reduce"):
        assert name in text
    rows = [row for row in parse_html(html).iter("tr") if (row[0].text or "").startswith("rank ")]
    assert len(rows) == 14  # seven actions on each of two ranks
    assert text.count("U0.1") >= 4


def test_the_step_begins_where_its_batch_is_waited_for(run):
    """Both ranks ask one second before their first action."""
    text = visible_text(page.write_report([run]).read_text())
    assert "data: 1000.000 ms from 0.000 ms" in text
    assert "F0.0: 1000.000 ms from 1000.000 ms" in text


def data_line(first_step: int, last_step: int, compute: float, **fields) -> dict:
    record = {"first_epoch": 0, "last_epoch": 0, "first_step": first_step, "last_step": last_step}
    record |= {"num_steps": last_step - first_step + 1, "num_samples": 80, "compute_seconds": compute}
    record |= {"running_seconds": 2.0, "utilization": compute / 2, "bytes_read": 5_000_000}
    return {"data": {**record, "rank": 1, "host": "node7", "rank_seconds": 0.5, **fields}}


def test_waits_for_data_are_on_the_page_and_repeated_ones_count_once(run):
    assert "Waiting for data" not in visible_text(page.write_report([run]).read_text())
    with (run / "metrics.jsonl").open("a") as log:
        lines = [data_line(2, 3, 1.9), data_line(5, 6, 0.2), {"resumed": 4}, data_line(5, 6, 1.7, bytes_read=None)]
        log.writelines(json.dumps(line) + "\n" for line in lines)
    record = run_record.read_run(run)
    assert [each.window.utilization for each in record.data] == [0.95, 0.85]
    text = visible_text(page.write_report([run]).read_text())
    for shown in (
        "90.0 % utilization",
        "2 to 3 95.0 % 40.0 2.50 MB/s rank 1 on node7, 25.0 % of the time",
        "4 counted",
    ):
        assert shown.replace(" ", "") in text.replace(" ", "")  # cells stand next to each other


def test_text_from_a_run_is_escaped(tmp_path):
    folder = make_run(tmp_path / "a&b", task=NASTY)
    html = page.write_report([folder]).read_text()
    assert "<b>&" not in html
    assert NASTY in visible_text(html)
    assert "a&b" in visible_text(html)
    assert NASTY in visible_text(
        page.render_comparison([run_record.read_run(folder), run_record.read_run(make_run(tmp_path / "second"))])
    )


def test_several_runs_are_compared(tmp_path):
    folders = [make_run(tmp_path / "first"), make_run(tmp_path / "second", loss=2.0, task="digits")]
    path = page.write_report(folders)
    assert path == tmp_path / "first+second.html"
    html = path.read_text()
    text = visible_text(html)
    assert "2 runs compared" in text
    assert "task lm digits".replace(" ", "") in text.replace(" ", "")
    assert html.count('class="line c1"') >= 2  # the second run, in both drawings


def test_an_unfinished_run_without_a_trace_is_shown(run):
    (run / "trace.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:9])
    text = visible_text(page.write_report([run]).read_text())
    assert "No step of this run was traced." in text
    assert "not finished" in text
    assert "steps" in text


def test_a_nan_loss_leaves_a_gap_in_the_curve(run):
    lines = (run / "metrics.jsonl").read_text().replace('"loss": 2.8,', '"loss": null,')
    (run / "metrics.jsonl").write_text(lines)
    assert "NaN" not in page.write_report([run]).read_text()


def test_missing_files_are_reported_all_at_once(run):
    (run / "plan.toml").unlink()
    (run / "settings.json").unlink()
    with pytest.raises(run_record.ReportError) as caught:
        page.write_report([run])
    assert "2 problems" in str(caught.value)
    assert "need a file that fourfold train writes" in str(caught.value)


def test_a_missing_run_is_reported_with_the_closest_name(run):
    with pytest.raises(run_record.ReportError, match="try fourfold report first"):
        run_record.find_run("frist", parent=run.parent)
    assert run_record.find_run("first", parent=run.parent) == run


@example(points=[(0.0, 1.0), (1.0, 2.0)], name=NASTY)
@given(points=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30), name=st.text(st.characters(codec="utf-8")))
def test_any_curve_is_well_formed(points, name):
    name = "".join(char for char in name if char.isprintable())
    series = [svg.Series(name, points), svg.Series("dots", points, 1, "dots")]
    drawing = svg.line_chart(series, x="step", y="loss", title=name)
    assert ElementTree.fromstring(drawing) is not None if points else drawing == ""
    assert "nan" not in drawing.replace(name, "")


@given(low=NUMBERS, length=st.floats(1e-6, 1e6))
def test_axis_ticks_are_few_and_within_the_range(low, length):
    result = svg.axis_ticks(low, low + length)
    margin = 1e-6 * max(abs(low), length)
    assert 1 <= len(result) <= 7
    assert all(low - margin <= tick <= low + length + margin for tick in result)


def test_bar_lengths_are_proportional_to_their_values():
    rows = [svg.Bar(NASTY, 1.0, "1 ms", "wait"), svg.Bar("two", 2.0, "2 ms", "wait")]
    root = ElementTree.fromstring(svg.bar_chart(rows, title="t"))
    widths = [float(node.get("width", 0)) for node in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)


SPANS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)


@given(span=SPANS, others=st.lists(SPANS.filter(lambda span: span[0] < span[1]), max_size=5))
def test_a_block_is_named_in_the_longest_part_that_no_later_block_covers(span, others):
    block, *later = [svg.Block("F0.0", start, stop, "forward") for start, stop in (span, *others)]
    start, stop = svg.widest_gap(block, later)
    covered = [any(a < k + 1 and k < b for a, b in others) for k in range(*span)]
    runs = "".join(" x"[each] for each in covered).split("x")
    assert stop - start == max(map(len, runs), default=0)
    assert block.start <= start <= stop <= max(block.stop, start)
    assert not any(covered[k - span[0]] for k in range(int(start), int(stop)))


@given(values=st.lists(NUMBERS, min_size=1, max_size=2000))
def test_a_downsampled_curve_keeps_its_last_point(values):
    points = [(float(index), value) for index, value in enumerate(values)]
    thin = charts.downsample(charts.smooth(points), lambda some: some[0])
    assert len(thin) <= charts.MAX_POINTS + 1
    assert thin[-1][0] == points[-1][0]


@given(values=st.lists(NUMBERS, min_size=1, max_size=300))
def test_a_smoothed_curve_has_the_mean_of_a_window_at_its_end(values):
    width = max(1, len(values) // 50)
    smoothed = charts.smooth([(float(index), value) for index, value in enumerate(values)])
    assert [x for x, _ in smoothed] == list(range(len(values)))
    for index, (_, mean) in enumerate(smoothed):
        window = values[max(0, index + 1 - width) : index + 1]
        assert mean == pytest.approx(sum(window) / len(window), abs=1e-3)


def test_every_field_of_the_plan_is_shown(run):
    text = visible_text(page.write_report([run]).read_text())
    assert all(field.name in text for field in dataclasses.fields(Plan) if getattr(Plan(), field.name) is not None)


@given(num=st.integers(0, 90))
def test_a_long_table_keeps_every_row_and_shows_the_last(num):
    rows = [html_page.render_row([str(number)]) for number in range(num)]
    root = ElementTree.fromstring(f"<p>{html_page.render_table(['n'], rows, style='faults')}</p>")
    assert [row[0].text for row in root.iter("tr") if row[0].tag == "td"] == [str(number) for number in range(num)]
    hidden = [row for details in root.iter("details") for row in details.iter("tr")]
    assert max(0, num - html_page.MAX_ROWS) == max(0, len(hidden) - 1)


def test_durations_are_shown_with_units():
    times = (0.0017, 0.9996, 4.21, 99.94, 99.96, 725.0)
    assert [progress.format_seconds(each) for each in times] == ["1.70 ms", "1.0 s", "4.2 s", "99.9 s", "1:40", "12:05"]


def axes_of(html: str) -> dict[str, str]:
    """All texts of each drawing of losses or throughput and of its legend, by the name of its vertical axis."""
    drawings = [node for node in parse_html(html).iter() if node.tag == "figure"]
    names = ("a second", "loss")
    result = {}
    for drawing in drawings:
        texts = [text for text in drawing.itertext() if text.strip()]
        for name in (text for text in texts if text.endswith(names)):
            result[name] = " ".join(texts)
    return result


def test_runs_with_different_units_have_separate_throughput_charts(tmp_path):
    folders = [
        make_run(tmp_path / "words"),
        *(make_run(tmp_path / name, tokens=None) for name in ("images", "pictures")),
    ]
    axes = axes_of(page.render_comparison([run_record.read_run(folder) for folder in folders]))
    tokens, samples = axes["thousand tokens a second"], axes["samples a second"]
    assert "words" in tokens
    assert "images" in samples
    assert "pictures" in samples
    assert "images" not in tokens
    assert "words" not in samples


def test_runs_with_the_same_unit_share_a_throughput_chart(tmp_path):
    axes = axes_of(
        page.render_comparison([run_record.read_run(make_run(tmp_path / name)) for name in ("first", "second")])
    )
    (rate,) = (text for name, text in axes.items() if name.endswith("a second"))
    assert "first" in rate
    assert "second" in rate


def test_a_nan_metric_is_shown(run):
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines + json.dumps({"step": 20, "valid": {"loss": None, "f1": None}}) + "\n")
    figures = {each.name: each.text for each in key_figures(run_record.read_run(run))}
    assert figures["validation loss"] == figures["f1"] == "nan"
    parse_html(page.render_run(run_record.read_run(run)))


@pytest.mark.parametrize(("verb", "word"), [(Verb.UNSHARD, "unshard"), (Verb.GATHER, "gather")])
def test_gathers_of_weights_have_a_colour_and_a_word_in_the_legend_of_their_own(verb, word):
    action = Action(verb, 0, 0)
    events = (Event(0, 3, str(action), REDUCE_LANE, 0.0, 1.0), Event(0, 3, "F0.0", COMPUTE_LANE, 1.0, 2.0))
    html = step_timeline.step_card(Trace({0: (action, Action(Verb.FORWARD, 0, 0))}, events))
    assert '<rect class="unshard"' in html
    assert re.findall(r'class="key (\w+)"></span>(\w+)', html) == [
        ("forward", "forward"),
        ("unshard", word),
        ("wait", "waiting"),
    ]
    assert CSS.count("--unshard: #") == 2  # light and dark


def test_every_verb_has_a_colour():
    assert set(step_timeline.VERB_STYLES) == set(Verb)
    assert all(f".{style} {{ fill" in CSS for style in step_timeline.VERB_STYLES.values())


@pytest.mark.parametrize("size", range(4))
def test_the_note_on_times_that_overlap_is_a_whole_sentence_for_every_choice_of_them(size, monkeypatch):
    for names in itertools.combinations(step_timeline.OVERLAPS, size):
        monkeypatch.setattr(step_timeline, "seconds_by_category", lambda _, names=names: dict.fromkeys(names, 1.0))
        note = visible_text(f"<div>{step_timeline.action_card(trace())}</div>")
        assert ("Not added to the step's time: " in note) == bool(names)
        for name, text in step_timeline.OVERLAPS.items():
            assert (text in note) == (name in names)
        assert "Nor " not in note

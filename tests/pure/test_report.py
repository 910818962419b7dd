"""Laws of the report's data: every value logged is there, once, exactly; it is told apart from what is unknown."""

import dataclasses
import itertools
import json
import re
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.cli import errors
from fourfold.plan.plan import Plan
from fourfold.report import document, page, run_record, step_timeline
from fourfold.report.document import Series
from fourfold.report.page import Figure, compare_runs, describe_run, key_figures
from fourfold.report.run_record import Faults, MemoryRecord, read_faults, read_run
from fourfold.step.step_runner import Metrics
from fourfold.trace.trace_file import Event, Trace
from fourfold.trainer import progress
from fourfold.trainer.fault_log import FAULTS_FILE, Fault
from fourfold.trainer.run_logger import Throughput
from fourfold.words.errors import SettingError
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import COMPUTE_LANE, REDUCE_LANE
from tests.recorded_traces import trace
from tests.report_data import NASTY, curves, log, make_run, parts, rows, titles, visible_text

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))
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
MEMORY = {
    "step": 6,
    "predicted": {"weights": 2.0**20, "states": 2.0**21},
    "ranks": [
        {"kept_bytes": 4 * 2**20, "peak_bytes": 5 * 2**20, "before_bytes": 2**20, "device_bytes": None},
        {"kept_bytes": 6 * 2**20, "peak_bytes": 7 * 2**20, "before_bytes": None, "device_bytes": None},
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def described(*folders: Path) -> dict[str, Any]:
    records = [read_run(folder) for folder in folders]
    return describe_run(records[0]) if len(records) == 1 else compare_runs(records)


def evaluated(folder: Path, **measures: list[float | None]) -> Path:
    """The run with so many evaluations, every second step."""
    for number, values in enumerate(zip(*measures.values(), strict=True)):
        log(folder, {"step": 2 * number + 2, "valid": dict(zip(measures, values, strict=True))})
    return folder


# ---- files


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


def test_missing_files_are_reported_all_at_once(run):
    (run / "plan.toml").unlink()
    (run / "settings.json").unlink()
    with pytest.raises(run_record.ReportError, match=r"(?s)2 problems.*need a file that fourfold train writes"):
        page.write_report([run])


@pytest.mark.parametrize("command", ["fourfold report", "fourfold checkpoint list"])
def test_a_missing_run_is_reported_with_the_closest_name(run, monkeypatch, command):
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(errors, "RUNS_DIR", ".")
    with pytest.raises(SettingError, match=f"no run frist .* try {command} first"):
        errors.find_run("frist", command)
    assert errors.find_run("first", command) == Path("first")


def test_a_line_of_memory_that_is_none_is_refused(run):
    log(run, {"memory": {"step": 3, "ranks": [{"kept_bytes": "much"}]}}, {"step": 7, "valid": {}})
    with pytest.raises(run_record.ReportError, match="a line of a run's log"):
        page.write_report([run])


@given(text=st.text(), number=st.floats(-1e300, 1e300))
@example(text=NASTY + "\x1b[31m\x00\ud800", number=1.0)
def test_a_page_is_the_static_file_with_data_that_reads_back_and_ends_no_element(text, number):
    data = document.document(text, text, [document.card(text, document.values({text: number}))])
    html = document.render(data)
    before, after = document.render({"cards": []}).split('{"cards":[]}')
    inner = html.removeprefix(before).removesuffix(after)
    assert len(inner) == len(html) - len(before) - len(after)
    assert "<" not in inner
    assert json.loads(inner)["cards"][0]["parts"][0]["rows"] == [[document.escape_controls(text), str(number)]]
    assert not re.search(r"(src|href)=|url\(|@import|import\(", before + after)


# ---- figures and what a run was made of


def test_terminal_and_page_mean_the_same_by_waiting_and_count_the_unit_of_the_task(run):
    metrics = Metrics(3.0, 8, 2048, None, seconds=0.5, waiting_seconds=0.125, data_seconds=0.25)
    throughput = Throughput("samples")
    for _ in range(6):
        throughput.add_step(metrics)
    line = throughput.progress_line(6, num_steps=6, loss=3.0)
    assert line.waiting_fraction == read_run(run).waiting_fraction() == 0.25
    assert throughput.num_units == 6 * 8


def test_every_key_figure_setting_and_plan_field_is_on_the_page(run):
    text = visible_text(described(run))
    fields = [field.name for field in dataclasses.fields(Plan) if getattr(Plan(), field.name) is not None]
    figures = ["2.3457", "3.3841", "3.78 k", "25.0 %", "0:03", "shared memory", "2.13.0", "2 ranks"]
    assert [each for each in (*fields, *figures, "training time, s") if each not in text] == []
    assert {"time", "waiting"} <= {each.name for each in key_figures(read_run(run))}


def test_the_task_s_arguments_stand_apart_from_the_settings(run):
    settings = json.loads((run / "settings.json").read_text())
    arguments = {"width": 128, "data": NASTY, "dropout": None}
    (run / "settings.json").write_text(json.dumps({**settings, "task_arguments": arguments}))
    shown = list(parts(described(run), "Plan and settings"))
    tables = {title["text"]: dict(table["rows"]) for title, table in zip(shown[::2], shown[1::2], strict=True)}
    assert [*tables] == ["Plan", "Settings", "Arguments of the task", "Environment"]
    assert tables["Arguments of the task"] == {"width": "128", "data": NASTY, "dropout": "none"}
    assert "width" not in tables["Settings"]


def test_durations_are_shown_with_units():
    times = (0.0017, 0.9996, 4.21, 99.94, 99.96, 725.0)
    assert [progress.format_seconds(each) for each in times] == ["1.70 ms", "1.0 s", "4.2 s", "99.9 s", "1:40", "12:05"]


def test_an_unfinished_run_without_a_trace_is_shown(run):
    (run / "trace.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:9])
    text = visible_text(described(run))
    assert "No step of this run was traced." in text
    assert "not finished" in text


def test_a_nan_metric_is_shown(run):
    log(run, {"step": 20, "valid": {"loss": None, "f1": None}})
    figures = {each.name: each.text for each in key_figures(read_run(run))}
    assert figures["validation loss"] == figures["f1"] == "nan"


# ---- curves


def test_every_measure_has_a_curve_of_exactly_its_finite_values(run):
    evaluated(run, **{"loss": [2.0, 1.5], "accuracy": [0.5, None], NASTY: [1.0, 2.0], "ema accuracy": [0.25, 0.5]})
    log(run, {"step": 8, "valid": {"accuracy": 0.75}})
    lines = (run / "metrics.jsonl").read_text().replace('"loss": 2.8,', '"loss": null,')
    (run / "metrics.jsonl").write_text(lines)
    data = described(run)
    assert curves(data, "Accuracy") == {"accuracy": [[2, 0.5], [8, 0.75]], "ema accuracy": [[2, 0.25], [4, 0.5]]}
    assert curves(data, NASTY) == {NASTY: [[2, 1.0], [4, 2.0]]}
    assert curves(data, "Loss")["validation"] == [[2, 2.0], [4, 1.5], [6, 2.34567]]
    assert [step for step, _ in curves(data, "Loss")["each step"]] == [1, 3, 4, 5, 6]


def test_learning_rate_and_gradient_norm_are_drawn_where_they_were_logged(run):
    assert not {"Learning rate", "Gradient norm"} & set(titles(described(run)))
    step = {"loss": 1.0, "samples": 8, "units": 8, "unit": "samples", "seconds": 0.5, "waiting_seconds": 0.0}
    step["elapsed_seconds"] = 0.5
    log(run, *({**step, "step": n, "lr": 0.1 / n, "grad_norm": float(n)} for n in range(1, 7)))
    data = described(run)
    assert curves(data, "Learning rate") == {"learning rate": [[n, pytest.approx(0.1 / n)] for n in range(1, 7)]}
    assert curves(data, "Gradient norm")["each step"] == [[n, n] for n in range(1, 7)]


POINTS = st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=20)


@given(points=POINTS, name=st.text())
def test_a_drawing_holds_the_finite_values_of_its_curves(points, name):
    mark = Series("mark", [(1.0, 0.0)], kind="rule")
    drawn = document.curves([Series(name, points, 7), mark], x="step", y="loss", title=name)
    finite = [each for each in points if abs(each[0]) < float("inf") and abs(each[1]) < float("inf")]
    if not finite:
        assert drawn is None
    else:
        assert drawn is not None
        assert drawn["series"][0]["points"] == [tuple(pytest.approx(value) for value in each) for each in finite]


@given(values=st.lists(NUMBERS, min_size=1, max_size=2000))
def test_a_downsampled_curve_keeps_its_last_point(values):
    points = [(float(index), value) for index, value in enumerate(values)]
    thin = page.downsample(page.smooth(points))
    assert len(thin) <= page.MAX_POINTS + 1
    assert thin[-1][0] == points[-1][0]


@given(values=st.lists(NUMBERS, min_size=1, max_size=300))
def test_a_smoothed_curve_has_the_mean_of_a_window_at_its_end(values):
    width = max(1, len(values) // 50)
    smoothed = page.smooth([(float(index), value) for index, value in enumerate(values)])
    assert [x for x, _ in smoothed] == list(range(len(values)))
    for index, (_, mean) in enumerate(smoothed):
        window = values[max(0, index + 1 - width) : index + 1]
        assert mean == pytest.approx(sum(window) / len(window), abs=1e-3)


# ---- memory, data, faults and checkpoints


def test_memory_is_shown_of_each_rank_as_predicted_and_as_measured(run):
    assert "Memory of each rank" not in titles(described(run))
    log(run, {"memory": {**MEMORY, "step": 3, "ranks": []}}, {"memory": MEMORY})
    data = described(run)
    assert rows(data, "Memory of each rank") == [
        ["rank 0", "3.00 MiB", "4.00 MiB", "5.00 MiB", "1.00 MiB"],
        ["rank 1", "3.00 MiB", "6.00 MiB", "7.00 MiB", "–"],
    ]
    assert ("7.00 MiB", "peak memory of a rank") in data["figures"]


def test_a_gpu_s_memory_has_a_column_and_is_the_peak():
    ranks = [{"kept_bytes": 1, "peak_bytes": 9 * 2**30, "device_bytes": n * 2**30} for n in (2, 3)]
    record = msgspec.convert({**MEMORY, "ranks": ranks}, MemoryRecord)
    assert record.largest_peak_bytes == 3 * 2**30
    shown = page.memory_card(record)
    assert shown is not None
    assert shown["parts"][0]["rows"][1][3:5] == ["3.00 GiB", "9.00 GiB"]


def data_line(first_step: int, last_step: int, compute: float, **fields) -> dict:
    record = {"first_epoch": 0, "last_epoch": 0, "first_step": first_step, "last_step": last_step}
    record |= {"num_steps": last_step - first_step + 1, "num_samples": 80, "compute_seconds": compute}
    record |= {"running_seconds": 2.0, "utilization": compute / 2, "bytes_read": 5_000_000}
    return {"data": {**record, "rank": 1, "host": "node7", "rank_seconds": 0.5, **fields}}


def test_waits_for_data_are_on_the_page_and_repeated_ones_count_once(run):
    assert "Waiting for data" not in titles(described(run))
    log(run, data_line(2, 3, 1.9), data_line(5, 6, 0.2), {"resumed": 4}, data_line(5, 6, 1.7, bytes_read=None))
    data, waited = described(run), "rank 1 on node7, 25.0 % of the time"
    assert ("90.0 %", "utilization") in data["figures"]
    assert rows(data, "Waiting for data") == [
        ["1", "2 to 3", "95.0 %", "40.0", "2.50 MB/s", waited],
        ["1", "5 to 6", "85.0 %", "40.0", "–", waited],
        ["all", "4 counted", "90.0 %", "40.0", "–", "–"],
    ]


def write_faults(folder: Path, *lines: bytes | dict[str, object]) -> None:
    text = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / FAULTS_FILE).write_bytes(b"\n".join(text))


def test_faults_are_listed_and_marked_on_the_curve_which_none_of_them_stretches(run):
    write_faults(run, SKIPPED, RESTART, {**RESTART, "step": 10**12}, {**RESTART, "step": -1})
    data = described(run)
    assert rows(data, "Faults and restarts")[:2] == [
        ["21 Nov 11:20:00", "restart", "3", "rank 1, alpha", "4.2 s", NASTY],
        ["21 Nov 11:20:00", "restart", "1,000,000,000,000", "rank 1, alpha", "4.2 s", NASTY],
    ]
    assert rows(data, "Faults and restarts")[3] == ["21 Nov 11:21:00", "skipped step", "5", "–", "–", "NaN"]
    drawn = curves(data, "Loss")
    assert (drawn["restart"], drawn["skipped step"]) == ([[3, 0]], [[5, 0]])


def test_a_run_without_faults_has_one_line_and_no_table(run):
    assert "No faults, no restarts." in visible_text(described(run))
    assert "Faults and restarts" not in titles(described(run))
    log(run, {"resumed": 4})
    assert "No faults; resumed from step 4." in visible_text(described(run))


@given(junk=st.lists(st.binary().filter(lambda line: line.strip()), max_size=5))
@example(junk=[b'{"time": 1, "kind": "half a li', b"3", b"[]", b'{"time": 1, "kind": "x", "step": "3"}', b"\xff"])
def test_unreadable_fault_lines_are_counted_and_the_others_shown(junk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    lines = [line for each in junk for line in each.splitlines() if line.strip()]
    write_faults(folder, RESTART, *lines, {**SKIPPED, "later": "a field of a later version"})
    result = read_faults(folder)
    assert [fault.kind for fault in result.faults] == ["restart", "skipped step"]
    assert result.num_unreadable == len(lines)
    assert ("could not be read" in json.dumps(page.faults_card(result, []))) == bool(lines)


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


@given(known=st.lists(FAULTS, min_size=1, max_size=60), resumed=st.lists(st.integers(0, 10**6), max_size=9))
@example(known=[Fault(time=1e300, kind="\x00" + NASTY, step=2**70, text="\x1b[31m")], resumed=[])
def test_any_fault_has_a_row_and_a_mark_within_the_steps(known, resumed):
    data = document.document("", "", [page.faults_card(Faults(known), resumed)])
    assert len(rows(data, "Faults and restarts")) == len(known)
    marked = sum(len(series.points) for series in page.fault_marks(known, last_step=100))
    assert marked == sum(0 <= f.step <= 100 for f in known)


def test_checkpoints_are_reported_with_sizes_pauses_and_outcomes(run):
    assert "None was saved." in visible_text(described(run))
    path = run / "checkpoints" / "step-00000004"
    path.mkdir(parents=True)
    (path / "rank-000.safetensors").write_bytes(bytes(3 * 2**20))
    log(
        run,
        *({"step": step, "checkpoint": f"step-{step:08d}", "pause_seconds": step / 1000} for step in (1, 2, 4, 6)),
        {"checkpoint": "step-00000002", "damaged": [f"/a/b/step-00000002/rank-000.safetensors: {NASTY}"]},
        {"warning": "the checkpoint of step 6 could not be written: no space left on device; training continues"},
        {"warning": "something else"},
    )
    data = described(run)
    assert rows(data, "Checkpoints") == [
        ["2", "–", "–", f"damaged, set aside: rank-000.safetensors: {NASTY}"],
        ["4", "3.00 MiB", "4.00 ms", "kept"],
        ["6", "–", "6.00 ms", "not written: no space left on device"],
    ]
    assert "3 saved, 1 kept · pause 3.00 ms in the median, 6.00 ms at most" in visible_text(data)
    assert curves(data, "Loss")["checkpoint"] == [[1, 0], [2, 0], [4, 0]]


def test_the_time_of_a_resumed_run_is_the_sum_over_its_segments(run):
    path = run / "metrics.jsonl"
    *steps, valid, finished = path.read_text().splitlines()
    saved_at_4 = {"step": 4, "checkpoint": "step-00000004", "pause_seconds": 0.1}
    between = [json.dumps(line) for line in (saved_at_4, {"resumed": 4})]
    path.write_text("\n".join([*steps[:4], *between, *steps[4:], valid, finished]) + "\n")
    data = described(run)
    assert rows(data, "Time by segment") == [
        ["1 to 4", "2.0 s", "4.10 k", "started"],
        ["5 to 6", "3.2 s", "1.26 k", "resumed from step 4"],
    ]
    assert {("0:05", "time, 2 segments"), ("2.34 k", "tokens a second, last 20 steps 1.37 k")} <= set(data["figures"])
    path.write_text("\n".join([*steps[:4], json.dumps({"resumed": 4}), *steps[4:]]) + "\n")  # killed before a save
    assert [segment.seconds for segment in read_run(run).segments] == [2.0, 3.0]


# ---- several runs


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
    write_faults(folders[0], RESTART, RESTART, SKIPPED, {**SKIPPED, "kind": "terminated"})
    assert page.write_report(folders) == tmp_path / "first+second.html"
    data = described(*folders)
    assert titles(data)[:4] == ["What differs in plan and settings", "Final values", "Loss", "Throughput"]
    assert rows(data, "What differs in plan and settings") == [["task", "lm", "digits"]]
    (table,) = (part for part in parts(data, "Final values") if part["kind"] == "table")
    values = {row[0]: row[1:] for row in table["rows"]}
    assert values["accuracy"] == ["0.7000", "0.6000"]
    assert values["best accuracy"] == ["0.7500 (step 4)", "0.9000 (step 2)"]
    assert values["validation loss"] == ["1.6000", "0.9000"]
    assert values["restarts / skipped steps"] == ["2 / 1", "0 / 0"]
    best = {table["rows"][row][0]: table["rows"][row][column] for row, column in table["best"]}
    assert (best["accuracy"], best["best accuracy"], best["validation loss"]) == ("0.7000", "0.9000 (step 2)", "0.9000")
    accuracy = {"first": [[2, 0.5], [4, 0.75], [6, 0.7]], "second": [[2, 0.9], [4, 0.6], [6, 0.6]]}
    assert curves(data, "Accuracy") == accuracy
    assert set(curves(data, "Loss")) == {"first", "second", "first, validation", "second, validation"}


def test_runs_share_a_throughput_chart_where_they_count_the_same_unit(tmp_path):
    folders = [make_run(tmp_path / "words"), *(make_run(tmp_path / name, tokens=None) for name in ("one", "two"))]
    drawn = [part for part in parts(described(*folders), "Throughput") if part["kind"] == "lines"]
    assert {part["y"]: [each["name"] for each in part["series"]] for part in drawn} == {
        "thousand tokens a second": ["words"],
        "samples a second": ["one", "two"],
    }
    assert "Nothing." in visible_text(described(*folders[1:]))


# ---- one step


def test_the_step_is_drawn_measured_and_simulated_with_its_differences(run):
    """Both ranks ask for their batch one second before their first action."""
    (drawn,) = (part for part in parts(described(run), "One step, measured and simulated") if part["kind"] == "lanes")
    lanes = dict(drawn["lanes"])
    wanted = {"rank 0 compute", "rank 0 data", "rank 1 reduce", "simulated 0 compute", "simulated 1 reduce"}
    assert wanted <= set(lanes)
    assert ["data", 0.0, 1000.0, "data"] in lanes["rank 0 data"]
    assert ["F0.0", 1000.0, 2000.0, "forward"] in lanes["rank 0 compute"]
    # Seven actions on each of two ranks, and the step.
    assert len(rows(described(run), "One step, measured and simulated")) == 15


@pytest.mark.parametrize(("verb", "word"), [(Verb.UNSHARD, "unshard"), (Verb.GATHER, "gather")])
def test_gathers_of_weights_have_a_colour_and_a_word_in_the_legend_of_their_own(verb, word):
    action = Action(verb, 0, 0)
    events = (Event(0, 3, str(action), REDUCE_LANE, 0.0, 1.0), Event(0, 3, "F0.0", COMPUTE_LANE, 1.0, 2.0))
    card = step_timeline.step_card(Trace({0: (action, Action(Verb.FORWARD, 0, 0))}, events))
    (note,) = (part for part in card["parts"] if part["kind"] == "note")
    assert note["keys"] == [("forward", "forward"), (word, "unshard"), ("waiting", "wait")]


@pytest.mark.parametrize("size", range(4))
def test_the_note_on_times_that_overlap_is_a_whole_sentence_for_every_choice_of_them(size, monkeypatch):
    for names in itertools.combinations(step_timeline.OVERLAPS, size):
        monkeypatch.setattr(step_timeline, "seconds_by_category", lambda _, names=names: dict.fromkeys(names, 1.0))
        said = step_timeline.action_card(trace())["parts"][1]["text"]
        assert ("Not added to the step's time: " in said) == bool(names)
        for name, text in step_timeline.OVERLAPS.items():
            assert (text in said) == (name in names)

"""A run of two real ranks leaves a trace of both and a page; its simulated step is the measured one's length."""

import json
import statistics
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.trace.step_comparison import measured_seconds, simulated_step_seconds
from fourfold.trace.trace_file import decode_trace
from fourfold.words.program import Verb
from tests.spawned.test_launch import TASK, TORCHRUN, end, start

__all__ = ["start"]  # a fixture

CASES = "tests.spawned.rank_functions"
RUN_FILES = [
    "checkpoints", "config.toml", "metrics.jsonl", "plan.toml", "report.html", "settings.json", "trace.json"
]  # fmt: skip


def test_a_run_under_torchrun_prints_as_one_rank_does_and_writes_a_trace_and_a_report(
    start, tmp_path: Path, monkeypatch, capfd
):
    ended = end(start(TASK, ["train", "script.py", "name=first", "trace_every=2"], launcher=TORCHRUN))
    assert ended.code == 0, ended.err
    assert ended.out.count("step 4/4") == 1
    assert ended.out.count("2 ranks") == 1
    folder = tmp_path / "runs" / "first"
    assert sorted(path.name for path in folder.iterdir()) == RUN_FILES
    trace = decode_trace((folder / "trace.json").read_bytes())
    assert trace.steps == [2, 3, 4]
    assert {event.rank for event in trace.events} == {0, 1}
    assert "report   runs/first/report.html" in ended.out
    page = (folder / "report.html").read_text()
    assert "rank 1 compute" in page
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [line["memory"]["ranks"] for line in log if "memory" in line]
    assert all(len(ranks) == 2 and min(rank["peak_bytes"] for rank in ranks) > 0 for ranks in measured)
    assert len(measured) == 2  # after step 3, and at the end
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["report", "first"])
    assert capfd.readouterr().out.strip() == "runs/first/report.html"
    (folder / "faults.jsonl").mkdir()
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["report", "first"])
    assert "faults.jsonl: is a directory   need files of a run that can be read" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("transport", "fields"), [("shared", {"zero": 2, "update": "in_forward"}), ("gloo", {"zero": 3})]
)
def test_a_simulated_step_takes_as_long_as_the_measured(world, transport, fields):
    limit = {"shared": 0.05, "gloo": 0.10}[transport]
    found = []
    for _ in range(3):  # on a machine that is busy otherwise, what lies between the actions is longer
        trace = decode_trace(world(2).run(f"{CASES}:trace", transport=transport, **fields)[0].encode())
        # Where a shard is summed in its update, its reduction takes no time of its own.
        actions = {str(action) for action in trace.program[0] if action.verb != Verb.REDUCE}
        assert actions <= {event.name for event in trace.events}
        # Each step at its own costs: ranks that take turns in being late make medians over steps another question.
        simulated = statistics.median(simulated_step_seconds(trace, step) for step in trace.steps)
        found.append(simulated / statistics.median(measured_seconds(trace, step) for step in trace.steps))
        if abs(found[-1] - 1) <= limit:
            return
    raise AssertionError(found)


def test_traces_of_hosts_are_put_on_one_clock(world):
    # Four ranks told to live on two hosts, the second with a clock that is a thousand seconds ahead.
    texts = world(4).run(f"{CASES}:trace", transport="auto", host="two", steps=4, ahead_seconds=1000)
    trace = decode_trace(texts[0].encode())
    assert trace.ranks == [0, 1, 2, 3]
    for step in trace.steps:
        events = [event for event in trace.events if event.step == step]
        assert max(event.stop for event in events) - min(event.start for event in events) < 60

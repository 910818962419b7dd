"""A run of two real ranks leaves a trace of both and a page; its simulated step is the measured one's length."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.plan import cost
from fourfold.plan.simulate import makespan
from fourfold.plan.trace_file import Trace, decode_trace
from tests.spawned.test_launch import TASK, TORCHRUN, end, start

__all__ = ["start"]  # a fixture

CASES = "tests.spawned.rank_functions"
RUN_FILES = ["checkpoints", "metrics.jsonl", "plan.toml", "report.html", "settings.json", "trace.json"]


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
    assert "rank 1 compute" in (folder / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["report", "first"])
    assert capfd.readouterr().out.strip() == "runs/first/report.html"


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_simulated_step_takes_as_long_as_the_measured(world, transport):
    found = []
    for _ in range(3):  # on a machine that is busy otherwise, what lies between the actions is longer
        found.append(statistics.median(ratios(world(2).run(f"{CASES}:trace", transport=transport)[0])))
        if 0.85 <= found[-1] <= 1.15:
            return
    raise AssertionError(found)


def ratios(text: str) -> Iterator[float]:
    """How long each step of a trace takes, simulated, as a share of the measured."""
    trace = decode_trace(text.encode())
    for step in trace.steps:
        # Each step at its own prices: ranks that take turns in being late make medians over steps another question.
        alone = Trace(trace.program, tuple(event for event in trace.events if event.step == step))
        yield makespan(cost.simulated_timeline(alone)) / makespan(cost.measured_timeline(alone, step))


def test_traces_of_hosts_are_put_on_one_clock(world):
    # Four ranks told to live on two hosts, the second with a clock that is a thousand seconds ahead.
    texts = world(4).run(f"{CASES}:trace", transport="by-host", host="two", steps=4, ahead_seconds=1000)
    trace = decode_trace(texts[0].encode())
    assert trace.ranks == [0, 1, 2, 3]
    for step in trace.steps:
        events = [event for event in trace.events if event.step == step]
        assert max(event.stop for event in events) - min(event.start for event in events) < 60

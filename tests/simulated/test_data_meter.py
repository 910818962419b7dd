"""Laws of the data meter: the waits of training, counted where the batch is asked for. Ranks are threads."""

import functools
import json
import threading
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.feed.feed import Feed
from fourfold.report.run_record import read_run
from fourfold.step.step_runner import Metrics
from fourfold.testing import threads
from fourfold.trainer.meters import MAX_STEPS, MIN_STEPS, DataMeter
from tests.simulated.test_stragglers import MemoryLog

SECONDS = 0.02
INPUTS, TARGETS = torch.ones(24, 3), torch.ones(24)


class SlowSource:
    """Samples of which each takes a while to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.bytes_read = seconds, 0

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        threading.Event().wait(self.seconds)
        self.bytes_read += 16
        return INPUTS[index], TARGETS[index]


def task(source: Any) -> ff.Task:
    return ff.Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda outputs, targets: (outputs[:, 0] - targets).square(),
        data=lambda: ff.Data(train=source),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
    )


def log_lines(folder: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_logs_the_waits_of_a_slow_source(tmp_path):
    ff.train(task(SlowSource(SECONDS)), steps=10, batch_size=2, folder=str(tmp_path), name="run", quiet=True)
    lines = log_lines(tmp_path / "run")
    waits = [line["data_seconds"] for line in lines if "loss" in line and "step" in line]
    assert len(waits) == 10
    assert sum(waits) >= 0.8 * 10 * 2 * SECONDS
    (record,) = [line["data"] for line in lines if "data" in line]
    # The first step is in no window.
    assert (record["first_step"], record["last_step"], record["num_steps"], record["num_samples"]) == (2, 10, 9, 18)
    assert record["utilization"] == record["compute_seconds"] / record["running_seconds"] < 0.5
    assert record["running_seconds"] - record["compute_seconds"] == pytest.approx(sum(waits[1:]), abs=1e-4)
    assert record["bytes_read"] == 9 * 2 * 16  # what was read for these steps, not what was read during them
    assert [each.window.utilization for each in read_run(tmp_path / "run").data] == [record["utilization"]]


def test_an_own_loop_gets_the_waits_from_its_feed():
    step = ff.parallelize(
        torch.nn.Linear(3, 1),
        lambda outputs, targets: (outputs[:, 0] - targets).square(),
        functools.partial(torch.optim.SGD, lr=0.01),
    )
    feed = ff.Feed(SlowSource(SECONDS), batch_size=4)
    found = [step(batch).data_seconds for batch in feed]
    assert sum(seconds or 0.0 for seconds in found) >= 0.8 * 24 * SECONDS
    assert feed.bytes_read == 24 * 16
    assert step((INPUTS[:4], TARGETS[:4])).data_seconds is None
    assert ff.Feed([(INPUTS[0], TARGETS[0])], batch_size=1).bytes_read is None


class Ranks:
    """The ranks of a step, as far as the meter needs them."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.num_calls = comm, 0

    def all_gather_json(self, value: Any) -> list[Any]:
        self.num_calls += 1
        return self.comm.all_gather_json(value)


def meter_run(comm: Any, waits: list[list[float]], *, num_samples: int) -> tuple[MemoryLog, int]:
    """What is logged where rank r waits `waits[r][i]` seconds before step i, and steps end together after 1 s more."""
    log, ranks = MemoryLog(), Ranks(comm)
    feed = Feed([(torch.ones(1), torch.ones(1))] * num_samples, batch_size=1)
    meter = DataMeter(ranks, feed, log)  # pyright: ignore[reportArgumentType]
    for number, (batch, all_waits) in enumerate(zip(feed.repeat(), zip(*waits, strict=True), strict=False), 1):
        meter.batch_read(batch)
        wait, longest = all_waits[comm.rank], max(all_waits)
        metrics = Metrics(1.0, 1, None, None, 1.0 + longest - wait, 0.0, data_seconds=wait)
        meter.step_done(number, metrics)
        if number == len(waits[0]):
            break
    meter.end_segment()
    return log, ranks.num_calls


def test_the_rank_that_waited_is_charged_to_all_and_named():
    waits = [[0.0] * 30, [0.5] * 30, [0.25] * 30]
    for log, num_calls in threads.run(3, lambda comm: meter_run(comm, waits, num_samples=30)):
        (line,) = log.lines
        record = line["data"]
        assert num_calls == 1
        assert (record["rank"], record["rank_seconds"]) == (1, pytest.approx(0.5 * 29))
        assert record["utilization"] == pytest.approx(1 / 1.5)
        (note,) = log.notes
        assert note.startswith("accelerator utilization 67 %: rank 1 on ")
        assert note.endswith("waited 14.5 s of 43.5 s for data (steps 2 to 30)")


def test_a_run_that_waits_for_less_than_a_second_warns_of_nothing():
    for log, _ in threads.run(2, lambda comm: meter_run(comm, [[0.0] * 5, [0.24] * 5], num_samples=30)):
        assert [line["data"]["rank"] for line in log.lines] == [1]
        assert log.notes == []


def test_a_segment_is_whole_epochs_and_no_window_has_the_first_step_of_an_epoch():
    waits = [[float(number % 8 == 0) for number in range(48)]]  # only the first batch of an epoch is late
    for log, num_calls in threads.run(1, lambda comm: meter_run(comm, waits, num_samples=8)):
        segments = [line["data"] for line in log.lines]
        assert [(each["first_epoch"], each["last_epoch"]) for each in segments] == [(0, 2), (3, 5)]
        assert [each["num_steps"] for each in segments] == [21, 21]
        assert {each["utilization"] for each in segments} == {1.0}
        assert (num_calls, log.notes) == (2, [])
    assert MIN_STEPS <= 21


def test_a_long_epoch_has_a_line_after_so_many_steps():
    num_steps = 2 * MAX_STEPS + 1
    for log, num_calls in threads.run(1, lambda comm: meter_run(comm, [[0.0] * num_steps], num_samples=10**6)):
        assert [line["data"]["num_steps"] for line in log.lines] == [MAX_STEPS, MAX_STEPS]
        assert num_calls == 2

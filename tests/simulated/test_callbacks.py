"""Laws of callbacks: hooks follow what happens; what a callback does wrong changes nothing; a stop is a run's end."""

import contextlib
import dataclasses
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.callbacks import EarlyStopping
from fourfold.checkpoint.store import CheckpointStore, Retention, read_manifest
from fourfold.feed.source import TensorSource
from fourfold.report.live import judge_status
from fourfold.report.page import _step_points as step_points
from fourfold.report.page import format_measure, key_figures
from fourfold.report.run_record import read_run
from fourfold.testing import threads
from fourfold.words.errors import SettingError, StoppedError
from fourfold.words.units import format_si
from tests.callback_runs import BreakingSource, BrokenOffError, Recorder, Stopping, make_task, train, train_in_two
from tests.cases import Case
from tests.checkpoint_runs import ThreadRun

pytestmark = pytest.mark.usefixtures("without_dry_run")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_hooks_are_called_in_the_order_of_what_happens(tmp_path):
    recorder = Recorder()
    train(make_task(), tmp_path, recorder, steps=4)
    every = ("start", "step", "evaluate", "fault", "end")
    steps = [("step", 1), ("step", 2), ("evaluate", 2), ("step", 3), ("step", 4), ("evaluate", 4)]
    assert recorder.named(*every) == [("start", 0), *steps, ("end", 4)]
    # A checkpoint is reported when it is on the disk, which may be some steps later; the first is that of step 2, the
    # best so far.
    assert recorder.named("checkpoint") == [("checkpoint", 2), ("checkpoint", 4)]


def test_a_hook_but_on_step_is_a_wait_that_the_hang_detector_knows(tmp_path, monkeypatch):
    known = []

    @contextlib.contextmanager
    def waiting_for(what):
        known.append(what)
        yield

    monkeypatch.setattr("fourfold.trainer.callback_runner.waiting_for", waiting_for)
    train(make_task(), tmp_path, Recorder(), steps=4)
    hooks = {what.partition(" of callback ")[0] for what in known}
    assert hooks == {"on_start", "on_evaluate", "on_checkpoint", "on_end"}


def test_events_hold_what_the_log_holds(tmp_path):
    recorder = Recorder()
    result = train(make_task(), tmp_path, recorder, steps=4, clip=1.0)
    log = lines(tmp_path / "run" / "metrics.jsonl")
    steps = [event for hook, event in recorder.events if hook == "step"]
    logged = [line for line in log if "lr" in line]
    for event, line in zip(steps, logged, strict=True):
        for name in ("step", "loss", "grad_norm", "lr", "samples", "tokens", "seconds", "waiting_seconds"):
            assert getattr(event, name) == line[name], name
        assert event.units_per_second > 0
    assert [dict(event.metrics) for hook, event in recorder.events if hook == "evaluate"] == [
        line["valid"] for line in log if "valid" in line and "step" in line
    ]
    start, end = recorder.events[0][1], recorder.events[-1][1]
    assert (start.folder, start.name, start.steps, start.batch_size) == ((tmp_path / "run").absolute(), "run", 4, 8)
    assert (start.num_parameters, start.num_ranks, start.settings["clip"], start.plan["dp"]) == (5, 1, 1.0, 1)
    assert (end.status, end.loss, end.metrics, end.seconds) == ("finished", result.loss, result.valid, result.seconds)
    with pytest.raises(dataclasses.FrozenInstanceError):
        start.step = 3
    with pytest.raises(TypeError):
        start.settings["clip"] = 2.0


@pytest.mark.parametrize(("num_targets", "unit", "shown"), [
    (6, "tokens", "tokens"), (6, "pixels", "pixels"), (6, "samples", "samples"), (1, "tokens", "samples"),
])  # fmt: skip
def test_throughput_counts_the_elements_of_the_targets_or_is_of_samples_everywhere(
    num_targets, unit, shown, tmp_path, capfd
):
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    task = dataclasses.replace(
        make_task(),
        model=lambda: torch.nn.Linear(4, num_targets),
        data=lambda: ff.Data(train=TensorSource(inputs, torch.zeros(16, num_targets))),
        unit=unit,
    )
    recorder = Recorder()
    result = train(task, tmp_path, recorder, steps=2, quiet=False)
    steps = [event for hook, event in recorder.events if hook == "step"]
    units = 8 if shown == "samples" else 8 * num_targets
    assert {event.unit for event in steps} == {shown}
    *_, last = log = lines(tmp_path / "run" / "metrics.jsonl")
    assert {(line["units"], line["unit"]) for line in log if "lr" in line} == {(units, shown)}
    assert (last["unit"], last["rate"]) == (shown, pytest.approx(2 * units / result.seconds))
    assert read_run(tmp_path / "run").unit == shown
    out = capfd.readouterr().out
    assert f"{shown} per second" in out
    assert ("throughput is in samples, not in tokens: the batch shows one target a sample" in out) == (unit != shown)


class SpikedSource(BreakingSource):
    """Samples 5 and 20 have a finite loss, and a gradient that is not."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs * (1e30 if index in (5, 20) else 1.0), targets


def test_terminal_and_page_show_the_same_loss_rate_waiting_and_time_left_at_every_step(tmp_path):
    seen = []

    class Display:
        def start(self, text): ...
        def show_wait(self, text): ...
        def print_message(self, text): ...
        def finish(self, text):
            seen.append(text)

        def show_step(self, line):
            record = read_run(tmp_path / "run")
            figures = {each.name: each for each in key_figures(record)}
            loss = figures["training loss"].text if "training loss" in figures else "nan"  # every step was skipped
            assert loss == format_measure(line.loss)
            assert figures["samples a second"].note == f"last 20 steps {format_si(line.units_per_second)}"
            assert figures["waiting"].note == f"last 20 steps {100 * line.waiting_fraction:.0f} %"
            assert judge_status(record, is_locked=True, quiet_seconds=0.0).remaining_seconds == line.remaining_seconds
            seen.append(record)

    def source(breaks_at: int | None) -> ff.Data:
        spiked = SpikedSource(breaks_at)
        return ff.Data(train=spiked, valid=TensorSource(torch.ones(8, 4), torch.ones(8, 1)))

    result = None
    for breaks_at in (8 * 30 + 1, None):
        task = dataclasses.replace(
            make_task(), loss=lambda o, t: (o - t).abs(), data=lambda breaks_at=breaks_at: source(breaks_at)
        )
        with contextlib.suppress(BrokenOffError):
            result = train(task, tmp_path, report=Display(), quiet=False, steps=60, skip_nan=60, clip=1.0, keep=99)
    record, summary = seen[-2:]
    skipped = [line["step"] for line in record.steps if line.get("skipped")]
    assert len(skipped) >= 15
    assert result is not None
    assert math.isfinite(result.loss)
    assert max(value for _, value in step_points(record, "loss")) < 1e3
    assert not {step for step, _ in step_points(record, "loss")} & {*skipped}
    assert f"training loss        {result.loss:.4f}" in summary
    assert len(record.segments) == 2


def test_a_run_that_sigterm_ends_is_terminated_for_its_callbacks_and_goes_on_later(tmp_path):
    class Sending(Recorder):
        def on_step(self, event: Any) -> None:
            super().on_step(event)
            if event.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    recorder, later = Sending(), Recorder()
    with pytest.raises(StoppedError):
        train(make_task(), tmp_path, recorder, steps=8)
    (_, fault), (_, end) = recorder.events[-2:]
    assert (fault.kind, fault.step) == ("terminated", 4)
    assert (end.status, end.step) == ("terminated", 4)
    assert "SIGTERM" in end.text
    assert ("checkpoint", 4) in recorder.named("checkpoint")
    assert train(make_task(), tmp_path, later, steps=8).steps == 8
    assert later.named("start", "step")[:2] == [("start", 4), ("step", 5)]


class Failing(ff.Callback):
    """Fails in one hook, each time that it is called."""

    def __init__(self, hook: str) -> None:
        self.num_calls = 0
        setattr(self, hook, self.fail)

    def fail(self, event: Any = None) -> Any:
        self.num_calls += 1
        raise ValueError("mine")

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


HOOKS = ["on_start", "on_step", "on_evaluate", "on_checkpoint", "on_end", "state_dict"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_that_fails_is_named_and_switched_off_and_the_run_goes_on(hook, tmp_path):
    failing, recorder = Failing(hook), Recorder()
    expected = train(make_task(), tmp_path, steps=4, name="without")
    result = train(make_task(), tmp_path, failing, recorder, steps=4)
    assert failing.num_calls == 1
    assert (result.loss, result.valid) == (expected.loss, expected.valid)
    (fault,) = lines(tmp_path / "run" / "faults.jsonl")
    assert fault["kind"] == "callback failed"
    assert fault["text"].startswith(f"callback Failing failed in {hook}: ValueError: mine (test_callbacks.py, line ")
    assert fault["text"] in [line.get("warning") for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert [event.text for name, event in recorder.events if name == "fault"] == [fault["text"]]
    assert recorder.named("step") == [("step", number) for number in range(1, 5)]
    assert recorder.named("end") == [("end", 4)]


@pytest.mark.parametrize("state", [{"a": object()}, {"a": "x" * 2**21}, [1]], ids=["no JSON", "too large", "no dict"])
def test_a_state_that_no_checkpoint_can_hold_switches_its_callback_off(state, tmp_path):
    class Stateful(Recorder):
        def state_dict(self) -> Any:
            return state

    recorder = Stateful()
    train(make_task(), tmp_path, recorder, steps=4)
    assert recorder.named("step") == [("step", 1), ("step", 2)]  # the first checkpoint is that of step 2
    (fault,) = lines(tmp_path / "run" / "faults.jsonl")
    assert "callback Stateful failed in state_dict" in fault["text"]
    assert CheckpointStore(tmp_path / "run").steps() == [2, 4]


def test_an_error_that_ends_the_run_is_a_fault_and_an_end(tmp_path):
    recorder = Recorder()
    with pytest.raises(BrokenOffError):
        train(make_task(breaks_at=17), tmp_path, recorder, steps=4)
    (_, fault), (_, end) = recorder.events[-2:]
    assert (fault.kind, fault.step) == ("failed", recorder.named("step")[-1][1])
    assert (end.status, end.step) == ("failed", fault.step)


@pytest.mark.parametrize(("hook", "asked", "stopped"), [("start", 0, 1), ("step", 3, 4), ("evaluate", 4, 4)])
def test_a_run_that_a_callback_stops_evaluates_saves_and_is_finished(hook, asked, stopped, tmp_path):
    recorder = Stopping(hook, asked)
    result = train(make_task(), tmp_path, recorder, steps=8)
    assert (result.steps, result.stopped) == (stopped, "Stopping: enough")
    assert recorder.named("step")[-1] == ("step", stopped)
    assert recorder.named("evaluate")[-1] == ("evaluate", stopped)
    assert recorder.named("evaluate").count(("evaluate", stopped)) == 1
    assert CheckpointStore(tmp_path / "run").steps()[-1] == stopped
    end = recorder.events[-1][1]
    assert (end.status, end.text, end.step) == ("stopped", "Stopping: enough", stopped)
    again = train(make_task(), tmp_path, Recorder(), steps=8)
    assert (again.steps, again.stopped) == (stopped, "Stopping: enough")


def test_early_stopping_stops_after_the_evaluation_that_exhausts_its_patience(tmp_path):
    scores = iter([9.0, 0.5, 0.7, 0.72, math.nan, 0.8, 0.9, 0.9])  # the first is measured for its name only
    stopping = EarlyStopping("score", mode="max", patience=2, min_delta=0.05)
    result = train(make_task(scores=scores), tmp_path, stopping, steps=20)
    assert result.steps == 8
    assert result.stopped == "EarlyStopping: validation score has not improved for 2 evaluations (best 0.7)"


def test_early_stopping_of_a_resumed_run_stops_where_the_undisturbed_run_does(tmp_path):
    def values() -> Any:
        return iter([9.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])

    def stopping() -> EarlyStopping:
        return EarlyStopping("score", patience=4)

    whole = train(make_task(scores=values()), tmp_path, stopping(), steps=20, name="whole")
    # Broken off after step 6; its checkpoint of step 4 knows of one evaluation without progress.
    with pytest.raises(BrokenOffError):
        train(make_task(scores=values(), breaks_at=8 * 6 + 1), tmp_path, stopping(), steps=20)
    rest = iter([9.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    result = train(make_task(scores=rest), tmp_path, stopping(), steps=20)
    assert (result.steps, result.stopped) == (whole.steps, whole.stopped)
    assert whole.steps == 10


def test_the_best_checkpoints_by_a_named_measure_and_the_newest_are_kept(tmp_path):
    scores = iter([9.0, 0.5, 0.9, 0.1, 0.8, 0.2, 0.3])
    options: dict[str, Any] = {"evaluate_every": 1, "checkpoint_every": 1, "keep": 1, "keep_best": 2}
    recorder = Recorder()
    train(make_task(scores=scores), tmp_path, recorder, steps=6, best_metric="score", best_mode="max", **options)
    store = CheckpointStore(tmp_path / "run")
    assert store.steps() == [2, 4, 6]
    assert store.best_step() == 2
    assert read_manifest(store.step_dir(6)).best == 0.9
    assert [event.is_best for hook, event in recorder.events if hook == "evaluate"] == [True, True, *[False] * 4]


def test_a_run_that_goes_on_by_another_measure_knows_its_best_value(tmp_path):
    options: dict[str, Any] = {"evaluate_every": 1, "checkpoint_every": 1, "keep": 8, "steps": 6}
    with pytest.raises(BrokenOffError):
        train(make_task(scores=iter([500.0, 900.0, 100.0, 200.0]), breaks_at=8 * 3 + 1), tmp_path, **options)
    recorder, by = Recorder(), {"best_metric": "score", "best_mode": "max"}
    train(make_task(scores=iter([9.0, *[800.0] * 6])), tmp_path, recorder, **options, **by)
    assert not any(event.is_best for hook, event in recorder.events if hook == "evaluate")
    assert CheckpointStore(tmp_path / "run").best_step() == 2


def test_the_newest_good_checkpoint_is_never_removed(tmp_path):
    case = Case(batch_sizes=(8,) * 4)
    threads.run(1, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 2, save_at=(1, 2)))
    store = CheckpointStore(tmp_path)
    damaged = store.step_dir(2) / "rank-000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    store.prune(Retention(num_newest=1, num_best=0))
    assert store.steps() == [1, 2]
    (store.step_dir(2) / "manifest.json").write_text("{}")
    store.prune(Retention(num_newest=1, num_best=0))
    assert store.steps() == [1, 2]


@pytest.mark.parametrize(("given", "needs"), [
    ({"best_metric": "scor"}, ["best_metric = scor", "one of loss, score", "try best_metric=score"]),
    ({"callbacks": [EarlyStopping("accuracy")]}, ["the metric 'accuracy' for EarlyStopping", "one of loss, score"]),
    ({"best_metric": "x", "ema": 0.9}, ["loss, score, ema loss, ema score"]),
])  # fmt: skip
def test_a_measure_that_does_not_exist_is_refused_with_those_there_are_before_there_is_a_run(given, needs, tmp_path):
    task = make_task(scores=iter([1.0] * 99))
    with pytest.raises(SettingError) as refused:
        ff.train(task, folder=str(tmp_path), quiet=True, steps=4, evaluate_every=2, **given)
    assert all(need in str(refused.value) for need in needs), str(refused.value)
    assert list(tmp_path.iterdir()) == []


class CountedStream(torch.utils.data.IterableDataset):
    """Samples without end. `num_read`: how many have been read."""

    num_read = 0

    def __iter__(self):
        while True:
            self.num_read += 1
            yield torch.zeros(4), torch.zeros(1)


def test_the_measures_of_a_stream_are_learnt_from_its_first_batch(tmp_path):
    stream, task = CountedStream(), make_task(scores=iter([1.0] * 99))
    train_source = task.data().train
    task = dataclasses.replace(task, data=lambda: ff.Data(train=train_source, valid=stream))
    with pytest.raises(SettingError, match="one of loss, score"):
        ff.train(task, folder=str(tmp_path), quiet=True, steps=4, evaluate_every=2, best_metric="scor")
    assert 0 < stream.num_read <= 8  # the batch size


@pytest.mark.parametrize(("task", "given", "need"), [
    (make_task(valid=False), {"evaluate_every": 2}, "need validation data"),
    (make_task(), {"evaluate_every": None}, "need evaluations during the run"),
    (make_task(), {"evaluate_every": 2, "metric": "accuracy"}, "need loss: the task has no other   try loss"),
    (make_task(), {"evaluate_every": 2, "best_metric": "accuracy"}, "no other   try best_metric=loss"),
])  # fmt: skip
def test_early_stopping_without_evaluations_of_its_measure_is_refused(task, given, need, tmp_path):
    stopping = EarlyStopping(given.pop("metric", "loss"))
    with pytest.raises(SettingError, match=need):
        ff.train(task, folder=str(tmp_path), callbacks=[stopping], quiet=True, steps=4, **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("given", "need"), [
    (3, "a list of callbacks"),
    (Recorder(), r"try callbacks=\[…\]"),
    ([Recorder], r"need a Callback   try Recorder\(\)"),
    (["csv"], r"callbacks\[0\] = 'csv'   need a Callback   try ff.callbacks.CSV\(\)"),
    ([Recorder(), print], r"callbacks\[1\]"),
])  # fmt: skip
def test_what_is_no_callback_is_refused(given, need):
    with pytest.raises(SettingError, match=need):
        ff.train(make_task(), callbacks=given, quiet=True)


def test_a_callback_of_a_resumed_run_gets_its_state_of_that_checkpoint(tmp_path):
    loaded = []

    class Counting(Recorder):
        num_steps = 0

        def on_step(self, event: Any) -> None:
            super().on_step(event)
            self.num_steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"num_steps": self.num_steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert not self.events
            loaded.append(state)

    recorders = []

    def make() -> list[ff.Callback]:
        recorders.append([Counting(), Counting()])
        return recorders[-1]

    train_in_two(tmp_path, make)
    assert loaded == [{"num_steps": 4}] * 2
    assert recorders[1][0].named("start", "step")[:2] == [("start", 4), ("step", 5)]


def test_train_prints_what_the_command_prints_unless_it_is_quiet(tmp_path, capfd):
    train(make_task(), tmp_path, steps=2, name="quiet")
    assert capfd.readouterr() == ("", "")
    train(make_task(), tmp_path, steps=2, name="loud", quiet=False)
    out, err = capfd.readouterr()
    assert out.startswith("run · 5 parameters · 1 process · one rank")
    assert "step 1/2   mean loss" in out
    assert "validation loss" in out
    assert str(tmp_path / "loud") in out
    assert not err

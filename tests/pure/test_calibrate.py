"""What calibration measures, and when it refuses to: cuts, shortened models, the clock of segments, foreign load."""

import dataclasses
import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fourfold.cli.launch import Ended
from fourfold.cli.plan import machine as plan_machine
from fourfold.cli.plan.machine import Calibrated, calibrate, format_calibrated, threads_of_rank
from fourfold.cli.run import Run
from fourfold.planner.calibrate import timing
from fourfold.planner.calibrate.segments import BLOCKS_OF_A_KIND, SegmentClock, cuts_of, shorten
from fourfold.planner.calibrate.timing import Busy, busiest_processes, check_quiet, is_steady, this_machine
from fourfold.planner.predict.calibration import CalibrationError, Cut, encode_calibration
from fourfold.tasks import lm
from fourfold.words.task import Task
from tests.calibration_cases import calibration
from tests.planner_cases import ChainFacts


class Chain(nn.Module):
    """An embedding, blocks of two kinds, a head."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


# ---- the clock ------------------------------------------------------------------------------------------


def test_the_seconds_of_the_segments_add_up_to_those_of_the_passes(monkeypatch: pytest.MonkeyPatch):
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    model = Chain((8, 8, 16))
    clock = SegmentClock(model)
    with clock.marking():
        clock.begin_forward()
        outputs = model(torch.arange(4))
        forward = clock.end_forward()
        clock.begin_backward()
        outputs.sum().backward()
        backward = clock.end_backward()
    # Entering three blocks and leaving the last one are four marks; of backward, the inputs of three blocks and the
    # output of the last one.
    assert forward == [1.0] * 5
    assert backward == [1.0] * 5
    assert next(ticks) == 12


def test_a_model_without_a_chain_is_its_first_end():
    model = nn.Linear(4, 4)
    clock = SegmentClock(model)
    with clock.marking():
        clock.begin_forward()
        outputs = model(torch.ones(2, 4))
        forward = clock.end_forward()
        clock.begin_backward()
        outputs.sum().backward()
        backward = clock.end_backward()
    assert min(forward[0], backward[0]) > 0
    assert forward[1:] == backward[1:] == [0.0]


def test_the_clock_leaves_no_hooks_behind():
    model = Chain((8, 8))
    with SegmentClock(model).marking():
        pass
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.blocks)


def test_every_parameter_belongs_to_a_segment():
    model = Chain((8, 16))
    clock = SegmentClock(model)
    assert clock.segment_of(model.embedding.weight) == 0
    assert [clock.segment_of(p) for p in model.blocks[1].parameters()] == [2] * 4
    assert clock.segment_of(model.head.bias) == 3


# ---- what is measured -----------------------------------------------------------------------------------


def test_a_shortened_model_keeps_a_few_blocks_of_each_kind():
    widths = (8, 8, 16, 8, 8, 16, 8)
    task = _task(widths)
    short = shorten(task, task.model())
    assert short.kept == (0, 1, 2, 3, 5)
    model = short.task.model()
    assert _widths(model) == [8, 8, 16, 8, 16]
    model(torch.arange(4)).sum().backward()
    assert _widths(task.model()) == list(widths)


def test_rules_of_the_tensor_axis_follow_the_blocks_that_are_left():
    split = {f"blocks.{index}.{part}": ("column", "row")[part] for index in range(6) for part in range(2)}
    alternating = {f"blocks.{index}.0": ("column", "row")[index % 2] for index in range(8)}
    task = dataclasses.replace(_task((8,) * 6), tensor=split | {"head": "column"})
    short = shorten(task, task.model())
    assert short.kept == (0, 1, 2)
    kept = {f"blocks.{index}.{part}": ("column", "row")[part] for index in range(3) for part in range(2)}
    assert short.task.tensor == kept | {"head": "column"}
    # Blocks with different rules are not alike: what one splits, the next one sums.
    task = dataclasses.replace(_task((8,) * 8), tensor=alternating)
    short = shorten(task, task.model())
    assert short.kept == (0, 1, 2, 3, 4, 5)
    assert short.task.tensor == {name: rule for name, rule in alternating.items() if name < "blocks.6"}


def test_a_model_of_few_blocks_is_measured_whole():
    task = _task((8,) * BLOCKS_OF_A_KIND)
    assert shorten(task, task.model()).task is task


def _widths(model: nn.Module) -> list[int]:
    return [len(p) for name, p in model.named_parameters() if name.startswith("blocks") and name.endswith("0.bias")]


def _task(widths: tuple[int, ...]) -> Task:
    return dataclasses.replace(lm.task(), model=lambda: Chain(widths))


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 64))
def test_all_ways_to_divide_samples_are_measured_once(num_ranks: int, batch_size: int):
    cuts = cuts_of(num_ranks, batch_size)
    assert all(cut.plan.mesh.size == num_ranks for cut in cuts)
    found = [Cut.of(cut.plan) for cut in cuts]
    assert len(set(found)) == len(found)
    sizes = {(each.tp, each.cp) for each in found}
    expected = {(tp, cp) for tp in range(1, 9) for cp in range(1, 9) if num_ranks % (tp * cp) == 0}
    assert sizes == {(tp, cp) for tp, cp in expected if tp * cp <= num_ranks}
    assert found[0] == Cut()  # what most plans have comes first
    for cut in cuts:
        largest = -(-batch_size // cut.plan.dp)
        assert cut.samples[-1] == largest
        assert list(cut.samples) == sorted(set(cut.samples))
        assert cut.samples[0] >= 1


def test_turns_are_steady_once_more_of_them_would_change_little():
    assert is_steady([1.0, 1.01, 0.99, 1.02, 3.0, 1.0, 1.0])
    assert not is_steady([1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.5])


# ---- when it is refused ---------------------------------------------------------------------------------


def test_foreign_load_is_refused_and_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (5.2, 1.0, 1.0))
    monkeypatch.setattr(timing, "num_cores", lambda: 4)
    monkeypatch.setattr(timing, "busiest_processes", lambda: [Busy("compiler", 17, 1.52), Busy("editor", 4, 0.25)])
    with pytest.raises(CalibrationError) as raised:
        check_quiet()
    (problem,) = raised.value.problems
    assert problem.got == "load average 5.2 on 4 cores: compiler (pid 17) 1.5 cores, editor (pid 4) 0.2 cores"
    assert "force=true" in problem.attempt


def test_a_quiet_machine_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.9, 9.0, 9.0))
    monkeypatch.setattr(timing, "num_cores", lambda: 4)
    assert check_quiet() == 3.9  # by cores: however few ranks will be measured


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    monkeypatch.setattr(plan_machine, "launch_ranks", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(CalibrationError, match="could not be written"):
        calibrate(Run("digits"), 1, key="key", is_forced=True)


def test_what_was_measured_is_used_though_it_cannot_be_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    result = {"calibration": encode_calibration(calibration()).decode(), "left_out": []}
    monkeypatch.setattr(plan_machine, "launch_ranks", lambda *_, **__: Ended(0, result))

    def is_full(path, calibration):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plan_machine, "write_calibration", is_full)
    measured = calibrate(Run("digits"), 1, key="key", is_forced=True)
    assert measured is not None
    assert measured.calibration == calibration()
    assert format_calibrated(measured)[-1].endswith("no space left on device")


def test_a_question_is_answered_by_what_was_measured_though_it_is_not_stored(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = Calibrated(calibration(), tmp_path / "x", [], 1.0, "no space left on device")
    monkeypatch.setattr(plan_machine, "calibrate", lambda *_, **__: measured)
    asked = plan_machine.this_machine(Run("mine"), ChainFacts(), 1)
    assert (asked.is_here, asked.cluster.num_devices) == (True, measured.calibration.machine.ranks_per_host)
    assert "no space left on device" in capsys.readouterr().out


def test_this_process_is_not_foreign():
    assert os.getpid() not in {busy.pid for busy in busiest_processes(0.05)}


def test_a_machine_is_known_by_what_measurements_depend_on():
    found = this_machine(4, threads=2, hosts=2)
    assert (found.ranks_per_host, found.hosts, found.threads) == (2, 2, 2)
    assert found.torch == torch.__version__.partition("+")[0] or found.torch == torch.__version__
    assert found.processor


def test_a_rank_has_the_threads_of_a_job(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_rank(64) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert threads_of_rank(10**6) == 1

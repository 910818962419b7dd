"""Laws of a task's torch scheduler: the options of every step are plain torch's, undisturbed, resumed, on any mesh."""

import dataclasses
import inspect
import json
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

import fourfold as ff
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.feed.feed import Feed
from fourfold.optim.lr_scheduler import READERS, NotJsonError, SteppedScheduler, from_json, to_json
from fourfold.testing import threads
from fourfold.verification.command import verify
from fourfold.words.errors import CheckpointError, FourfoldError, SettingError
from tests.cases import Case, batches, build_step, local_batch
from tests.checkpoint_runs import MemoryLog

pytestmark = pytest.mark.usefixtures("without_dry_run")

STEPS = 9
LR = 0.1


class Halving:
    """A callable with a state of its own, which torch saves too."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5**step


def sequence(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, total_iters=3)
    second = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[3])


def chain(optimizer: Any) -> Any:
    constant = lr_scheduler.ConstantLR(optimizer, total_iters=4)
    return lr_scheduler.ChainedScheduler([constant, lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer)


SCHEDULERS: dict[str, Callable[..., LRScheduler]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, Halving()]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 5], gamma=0.5),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=4),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=6),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.8),
    "SequentialLR": sequence,
    "PolynomialLR": lambda optimizer, steps: lr_scheduler.PolynomialLR(optimizer, total_iters=steps, power=2),
    "CosineAnnealingLR": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
    "ChainedScheduler": chain,
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "OneCycleLR": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps),
    "SWALR": partial(swa_utils.SWALR, swa_lr=0.01, anneal_epochs=4),
}  # fmt: skip


class Interrupted(Exception):
    """Ends a run in the middle."""


def task(scheduler: Any, *, stop_at: int | None = None, bad: int | None = None, optimizer: Any = None) -> ff.Task:
    """Sixteen samples in float64, two groups of options. The run fails in the forward of step `stop_at`."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randn(16, n, generator=generator, dtype=torch.float64) for n in (4, 1))
    if bad is not None:
        inputs[bad] = math.nan
    calls = iter(range(1, 1000))

    def loss(outputs: Any, targets: Any) -> Any:
        if outputs.requires_grad and next(calls) == stop_at:
            raise Interrupted
        return (outputs - targets).square()

    def groups(parameters: Any) -> Any:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": LR / 2}], lr=LR, momentum=0.8)

    samples = list(zip(inputs, targets, strict=True))
    return ff.Task(
        model=lambda: nn.Linear(4, 1).double(),
        loss=loss,
        data=lambda: ff.Data(train=samples, valid=samples),
        optimizer=optimizer or groups,
        scheduler=scheduler,
        steps=STEPS,
        batch_size=4,
    )


OPTIONS: dict[str, Any] = {"trace_every": 0, "checkpoint_every": 2, "evaluate_every": 2}


def train(folder: Path, of: ff.Task, **options: Any) -> list[dict[str, Any]]:
    """The lines of the run's log."""
    given: Any = {"folder": str(folder), "name": "run", **OPTIONS, **options}
    result = ff.train(of, **given)
    assert result.folder is not None
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def rates(records: list[dict[str, Any]]) -> list[float]:
    return [record["lr"] for record in records if "lr" in record]


def weights(folder: Path) -> bytes:
    """The weights and optimizer states that the run saved last."""
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    return (newest / "rank-000.safetensors").read_bytes()


def plain_options(name: str, valid: Iterator[float]) -> list[list[dict[str, Any]]]:
    """By step: the options of each group, in a loop of plain torch. `valid`: the losses that a plateau is given."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": LR / 2}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.8)
    make = SCHEDULERS[name]
    scheduler = make(optimizer, STEPS) if "steps" in inspect.signature(make).parameters else make(optimizer)
    found = []
    for number in range(STEPS):
        found.append([{key: group[key] for key in ("lr", "momentum")} for group in optimizer.param_groups])
        optimizer.step()
        if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step()
        elif number % 2:
            scheduler.step(next(valid))
    return found


def test_every_scheduler_of_torch_is_tested() -> None:
    classes = {
        name for name, each in vars(lr_scheduler).items() if isinstance(each, type) and issubclass(each, LRScheduler)
    }
    assert classes - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_options_of_every_step_are_torchs_and_a_resume_changes_nothing(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = train(tmp_path / "whole", task(SCHEDULERS[name]))
        with pytest.raises(Interrupted):
            train(tmp_path / "broken", task(SCHEDULERS[name], stop_at=6))
        resumed = train(tmp_path / "broken", task(SCHEDULERS[name]))
    assert [record["resumed"] for record in resumed if "resumed" in record] == [4]
    assert rates(whole) == rates(resumed)
    assert weights(tmp_path / "whole") == weights(tmp_path / "broken")
    valid = iter([record["valid"]["loss"] for record in whole if "valid" in record])
    expected = [groups[0]["lr"] for groups in plain_options(name, valid)]
    assert rates(whole) == expected
    assert len(set(expected)) > 1


@pytest.mark.covering
@pytest.mark.parametrize("plan", [{"microbatches": 2}, {"update": "in_forward"}, {"update": "in_backward"}], ids=str)
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR", "StepLR"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_rates_and_cycled_momentum_take_effect_once_per_step(name: str, kind: str, plan: Any) -> None:
    optimizer = {"SGD": partial(torch.optim.SGD, lr=LR, momentum=0.8), "AdamW": partial(torch.optim.AdamW, lr=LR)}[kind]
    result = verify(task(SCHEDULERS[name], optimizer=optimizer), ff.Plan(**plan))
    assert result is not None
    assert result.max_deviation < 1e-12


MESHES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO-1": {"zero": 1},
    "ZeRO-3, in forward": {"zero": 3, "update": "in_forward"},
    "local steps": {"sync": "local", "local_steps": 2},
}


@pytest.mark.covering
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR"])
def test_a_resume_on_several_ranks_continues_with_the_same_options_and_weights(
    name: str, mesh: str, tmp_path: Path
) -> None:
    case = Case(optimizer="AdamW", batch_sizes=(8,) * 6, **MESHES[mesh])

    def run(comm: Any, folder: Path, start: int, stop: int) -> Any:
        step = build_step(case, comm.size, comm)
        scheduler = SteppedScheduler(SCHEDULERS[name], step.optimizer, steps=STEPS)
        state = TrainingState(step, Feed([(torch.zeros(1),) * 2] * 40, batch_size=8), None, scheduler)
        checkpoints = CheckpointManager(state, AttemptDir(folder, "a"), MemoryLog(), seed=0)
        progress = checkpoints.resume()
        assert (progress.step if progress else 0) == start
        found = []
        for number in range(start, stop):
            group = step.optimizer.param_groups[0]
            found.append((group["lr"], group.get("momentum"), group.get("betas")))
            step(local_batch(batches(case)[number], step.plan.dp, step.dp_index))
            scheduler.step_done()
            if number + 1 == 4:
                checkpoints.save(TrainingProgress(4, [1.0]))
        checkpoints.wait()
        return found, {name: value.clone() for name, value in step.state_dict()["model"].items()}

    whole = threads.run(2, lambda comm: run(comm, tmp_path / "whole", 0, 6))
    threads.run(2, lambda comm: run(comm, tmp_path / "broken", 0, 4))
    resumed = threads.run(2, lambda comm: run(comm, tmp_path / "broken", 4, 6))
    for (options, state), (more, again) in zip(whole, resumed, strict=True):
        assert options[4:] == more
        assert len(set(options)) == 6
        assert all(torch.equal(state[key], again[key]) for key in state)


def test_a_skipped_step_counts_for_the_scheduler_as_for_a_schedule(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = train(tmp_path, task(SCHEDULERS["ExponentialLR"], bad=3), skip_nan=9, seed=4)
    skipped = [record["step"] for record in records if record.get("skipped")]
    assert skipped == [1, 8], "the first too, where torch's schedulers expect an update"
    assert rates(records) == pytest.approx([LR * 0.8**n for n in range(STEPS)])


def test_scale_and_warm_up_multiply_the_schedulers_rate_and_a_named_schedule_replaces_it(tmp_path: Path) -> None:
    warm = ff.LRSchedule(warmup=3, scale="linear", batch_size=2)
    scheduler = SCHEDULERS["ExponentialLR"]
    records = train(tmp_path, task(scheduler), rates=warm)
    factor = warm.lr_lambda(steps=STEPS, batch_size=4)
    expected = [LR * 0.8**n * factor(n) for n in range(STEPS)]
    assert rates(records) == pytest.approx(expected)
    with pytest.raises(Interrupted):
        train(tmp_path / "again", task(scheduler, stop_at=6), rates=warm)
    assert rates(train(tmp_path / "again", task(scheduler), rates=warm)) == rates(records)
    constant = ff.LRSchedule(schedule="constant")
    assert rates(train(tmp_path / "constant", task(scheduler), rates=constant)) == [LR] * STEPS


def test_a_plateau_follows_the_validation_loss_also_where_a_stop_came_before_an_evaluation(tmp_path: Path) -> None:
    make = partial(lr_scheduler.ReduceLROnPlateau, mode="max", patience=0)  # falls with each evaluation but the first
    options = {"evaluate_every": 3, "checkpoint_every": 1}

    whole = train(tmp_path / "whole", task(make), **options)
    calls = iter(range(1, 1000))

    def loss(outputs: Any, targets: Any) -> Any:
        if outputs.requires_grad and next(calls) == 2:  # obeyed after the next step
            os.kill(os.getpid(), signal.SIGTERM)
        return (outputs - targets).square()

    with pytest.raises(ff.FourfoldError, match="SIGTERM"):
        train(tmp_path / "broken", dataclasses.replace(task(make), loss=loss), **options)
    resumed = train(tmp_path / "broken", task(make), **options)
    assert [record["resumed"] for record in resumed if "resumed" in record] == [3]
    assert rates(resumed) == rates(whole)
    assert len(set(rates(whole))) > 1


def test_an_option_that_is_back_at_the_tasks_own_value_is_restored_too() -> None:
    def made() -> tuple[Any, SteppedScheduler]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR, momentum=0.5)
        cycle = partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.2, step_size_up=2, base_momentum=0.5)
        return optimizer, SteppedScheduler(partial(cycle, max_momentum=0.75), optimizer, steps=STEPS)

    (optimizer, scheduler), (other, fresh) = made(), made()
    for _ in range(2):
        optimizer.step()
        scheduler.step_done()
    assert (optimizer.param_groups[0]["momentum"], other.param_groups[0]["momentum"]) == (0.5, 0.75)
    fresh.load(scheduler.state())
    assert other.param_groups[0]["momentum"] == 0.5


# ---- what is refused


def refused(of: Callable[[], Any], *words: str) -> None:
    with pytest.raises(FourfoldError) as caught:
        of()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (lr_scheduler.StepLR, ["StepLR also needs step_size", "try functools.partial(StepLR, step_size=…)"]),
        (partial(lr_scheduler.CyclicLR, base_lr=1), ["CyclicLR also needs max_lr"]),
        (lr_scheduler.OneCycleLR, ["also needs max_lr", "OneCycleLR(optimizer, max_lr=…, total_steps=steps)"]),
        (lambda optimizer, total: None, ["also needs total"]),
        (lambda: None, ["which takes no optimizer"]),
        (3, ["scheduler = 3"]),
        ("cosine", ["scheduler = 'cosine'"]),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_refused_with_the_task(scheduler: Any, words: list[str]) -> None:
    refused(lambda: task(scheduler), *words, "(optimizer) or (optimizer, steps)")


def test_a_scheduler_instance_and_two_schedules_are_refused() -> None:
    made = lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), 2)
    refused(lambda: task(made), "an instance of StepLR", "lambda optimizer: StepLR(optimizer, …)")
    fields = {**vars(task(SCHEDULERS["StepLR"])), "schedule": lambda step, steps: 1.0}
    refused(lambda: ff.Task(**fields), "both schedule and scheduler", "one of them   try without schedule")


class Odd(LRScheduler):
    """A scheduler whose state holds a function."""

    def __init__(self, optimizer: Any) -> None:
        self.curve = [print]
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


def hidden_plateau(optimizer: Any) -> Any:
    members = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ReduceLROnPlateau(optimizer)]
    return lr_scheduler.ChainedScheduler(members, optimizer)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (
            partial(lr_scheduler.OneCycleLR, max_lr=0.1),
            [
                "OneCycleLR rejected its arguments: You must define either total_steps",
                "try lambda optimizer, steps: OneCycleLR(optimizer, max_lr=…, total_steps=steps)",
            ],
        ),
        (lambda optimizer: 3, ["it made a int", "a scheduler of torch.optim.lr_scheduler"]),
        (lambda _: lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 2), ["a scheduler of another optimizer"]),
        (Odd, ["its state curve[0] is a builtin_function_or_method", "a state_dict that leaves it out"]),
        (hidden_plateau, ["ChainedScheduler does not support `ReduceLROnPlateau`"]),
    ],
)
def test_a_scheduler_that_cannot_be_used_is_refused_before_the_first_step(
    scheduler: Any, words: list[str], tmp_path: Path
) -> None:
    refused(lambda: train(tmp_path, task(scheduler)), *words)
    assert not (tmp_path / "run").exists()


def test_a_plateau_without_evaluations_is_refused(tmp_path: Path) -> None:
    plateau = task(SCHEDULERS["ReduceLROnPlateau"])
    with pytest.raises(SettingError, match="evaluate_every=100"):
        train(tmp_path, plateau, evaluate_every=None)


def test_an_error_of_the_users_own_code_is_raised_unchanged(tmp_path: Path) -> None:
    def wrong(optimizer: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(tmp_path, task(wrong))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (SCHEDULERS["StepLR"], ["the state of a ExponentialLR, now a StepLR"]),
        (None, ["the state of a ExponentialLR, now no scheduler"]),
    ],
)
def test_the_state_of_another_scheduler_is_refused(now: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path, task(SCHEDULERS["ExponentialLR"], stop_at=6))
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, task(now))
    assert all(word in str(caught.value) for word in words)


def test_a_run_without_a_scheduler_does_not_continue_with_one(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path, task(None, stop_at=6))
    with pytest.raises(CheckpointError, match="no state of a scheduler, now a StepLR"):
        train(tmp_path, task(SCHEDULERS["StepLR"]))


def test_changed_arguments_of_a_scheduler_have_no_effect_and_are_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path, task(SCHEDULERS["ExponentialLR"], stop_at=6))
    records = train(tmp_path, task(partial(lr_scheduler.ExponentialLR, gamma=0.5)))
    assert rates(records) == pytest.approx([LR * 0.8**n for n in range(STEPS)])
    (warning,) = [record["warning"] for record in records if "warning" in record]
    assert warning == "the task's ExponentialLR has gamma = 0.5: the run continues with the saved scheduler"


# ---- the state as JSON

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
@settings(max_examples=25, deadline=None)
def test_a_state_is_the_same_after_json(value: Any) -> None:
    assert repr(from_json(msgspec.json.decode(msgspec.json.encode(to_json(value))))) == repr(value)


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([[1, 2]]), torch.tensor([math.inf]).double()])
def test_small_tensors_are_the_same_after_json(value: torch.Tensor) -> None:
    again = from_json(msgspec.json.decode(msgspec.json.encode(to_json(value))))
    assert torch.equal(again, value)
    assert again.dtype == value.dtype


@pytest.mark.parametrize("value", [print, object(), torch.zeros(5000), {"a": [print]}, 2**70, b"x"])
def test_other_values_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(NotJsonError, match="state"):
        to_json(value)


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", *READERS]), inner, max_size=2),
)


@given(JUNK)
@settings(max_examples=40, deadline=None)
def test_a_damaged_state_is_refused_and_never_executed(value: Any) -> None:
    try:
        found = from_json(value)
    except NotJsonError:
        return
    assert isinstance(found, int | str | list | tuple | dict | torch.Tensor | None)

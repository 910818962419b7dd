"""Laws of the learning rate: how it scales with the batch size, warms up and decays."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cli.arguments import SETTINGS, parse_values
from fourfold.plan.lr_schedule import CURVES, SCALING_RULES, LRSchedule
from fourfold.trainer.settings import LR_PREFIX
from fourfold.words.errors import SettingError


@pytest.mark.parametrize(("scale", "multiple"), [("none", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_a_larger_batch_multiplies_the_rate(scale: str, multiple: float) -> None:
    rates = LRSchedule(scale=scale, batch_size=64)
    assert rates.lr_lambda(steps=10, batch_size=512)(5) == pytest.approx(multiple, rel=1e-15)
    assert LRSchedule(scale=scale).lr_lambda(steps=10, batch_size=512, tuned_batch_size=64)(5) == pytest.approx(
        multiple, rel=1e-15
    )


@given(multiple=st.integers(2, 64), warmup=st.integers(1, 50))
def test_warmup_is_linear_from_the_tuned_rate_to_the_scaled_rate(multiple: int, warmup: int) -> None:
    rates = LRSchedule(scale="linear", warmup=warmup, batch_size=8)
    factor = rates.lr_lambda(steps=100, batch_size=8 * multiple)
    values = [factor(step) for step in range(warmup + 3)]
    assert values[0] == pytest.approx(1.0)
    assert values[warmup:] == pytest.approx([multiple] * 3)
    increments = [b - a for a, b in itertools.pairwise(values[: warmup + 1])]
    assert increments == pytest.approx([(multiple - 1) / warmup] * warmup)


def test_an_unscaled_rate_warms_up_linearly_from_above_zero() -> None:
    factor = LRSchedule(warmup=4).lr_lambda(steps=10)
    assert [factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_the_step_schedule_drops_at_the_epochs_of_goyal() -> None:
    # 90 epochs of 7 steps, 5 of them warm-up: a tenth at epochs 30, 60 and 80, counted from the first one.
    factor = LRSchedule(schedule="step", warmup=35).lr_lambda(steps=630)
    assert factor(209) == factor(35) == 1.0
    assert [factor(7 * epoch) for epoch in (30, 60, 80)] == pytest.approx([0.1, 0.01, 0.001])
    assert [factor(7 * epoch - 1) for epoch in (60, 80)] == pytest.approx([0.1, 0.01])
    halves = LRSchedule(schedule="step", milestones=(0.5,), drop=0.5).lr_lambda(steps=10)
    assert [halves(step) for step in range(10)] == [1.0] * 5 + [0.5] * 5


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_is_half_done_at_the_midpoint_and_ends_at_its_floor(schedule: str) -> None:
    factor = LRSchedule(schedule=schedule, warmup=10, floor=0.2).lr_lambda(steps=110)
    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.6)
    assert factor(110) == factor(1000) == pytest.approx(0.2)
    values = [factor(step) for step in range(10, 110)]
    assert all(a > b for a, b in itertools.pairwise(values))
    quarter = {"linear": 0.8, "cosine": 0.2 + 0.8 * (2 + math.sqrt(2)) / 4}
    assert factor(35) == pytest.approx(quarter[schedule])


@given(
    schedule=st.sampled_from(sorted(CURVES)),
    scale=st.sampled_from(sorted(SCALING_RULES)),
    steps=st.integers(1, 60),
    data=st.data(),
)
def test_every_factor_lies_between_zero_and_the_scaling_factor(schedule: str, scale: str, steps: int, data) -> None:
    rates = LRSchedule(schedule=schedule, scale=scale, warmup=data.draw(st.integers(0, steps - 1)), batch_size=32)
    batch_size = data.draw(st.integers(1, 256))
    factor, multiple = rates.lr_lambda(steps=steps, batch_size=batch_size), rates.scaling_factor(batch_size)
    assert all(0 < factor(step) <= multiple * (1 + 1e-12) for step in range(steps))


def test_the_tasks_schedule_is_scaled_and_warmed_up_unless_another_is_set() -> None:
    def task_schedule(step: int) -> float:
        return 1.0 - step / 10

    factor = LRSchedule(scale="linear", warmup=2).lr_lambda(
        steps=10, batch_size=4, tuned_batch_size=2, task_schedule=task_schedule
    )
    assert [factor(step) for step in range(4)] == pytest.approx([1.0, 1.5 * 0.9, 2 * 0.8, 2 * 0.7])
    assert LRSchedule(schedule="constant").lr_lambda(steps=10, task_schedule=task_schedule)(5) == 1.0


def test_invalid_schedule_arguments_are_reported_all_at_once() -> None:
    with pytest.raises(SettingError) as caught:
        LRSchedule(schedule="cosin", scale="square", warmup=-1, batch_size=0, milestones=(0.5, 0.2), drop=0, floor=2)
    names = [problem.got.split(" = ")[0] for problem in caught.value.problems]
    assert names == ["schedule", "warmup", "scale", "batch_size", "milestones", "drop", "floor"]


def test_warmup_longer_than_the_run_and_an_unknown_batch_size_are_refused() -> None:
    with pytest.raises(SettingError, match="warmup = 10, steps = 10   need warm-up that ends before the run"):
        LRSchedule(warmup=10).lr_lambda(steps=10)
    for sizes in ((8, None), (None, 8)):
        with pytest.raises(SettingError, match="need the batch size, and the one that the learning rate was tuned for"):
            LRSchedule(scale="sqrt").scaling_factor(sizes[0], tuned_batch_size=sizes[1])


@pytest.mark.parametrize(
    ("rates", "has_task_schedule", "text"),
    [
        (
            LRSchedule(scale="linear", warmup=500, schedule="cosine"),
            True,
            "learning rate 0.0003 × 8 (linear, batch 512, tuned for 64), 500 steps of warm-up, then cosine",
        ),
        (LRSchedule(scale="sqrt"), False, "learning rate 0.0003 × 2.828 (sqrt, batch 512, tuned for 64), constant"),
        (LRSchedule(warmup=1), True, "learning rate 0.0003, 1 step of warm-up, then the task's own schedule"),
    ],
)
def test_the_description_says_what_was_scaled(rates: LRSchedule, has_task_schedule: bool, text: str) -> None:
    assert (
        rates.describe([3e-4, 3e-4], batch_size=512, tuned_batch_size=64, has_task_schedule=has_task_schedule) == text
    )


def test_every_lr_setting_is_parsed_into_a_field_of_the_schedule() -> None:
    words = {"schedule": "step", "warmup": "5", "scale": "sqrt", "batch_size": "64"}
    words |= {"milestones": "0.5,0.75", "drop": "0.2", "floor": "0.1"}
    assert {name for name in SETTINGS if name.startswith(LR_PREFIX)} == {LR_PREFIX + name for name in words}
    found = parse_values({LR_PREFIX + name: text for name, text in words.items()}, {}).run
    values = {name.removeprefix(LR_PREFIX): value for name, value in found.items()}
    given = LRSchedule(**values).non_default_fields()
    assert given == {
        "schedule": "step",
        "warmup": 5,
        "scale": "sqrt",
        "batch_size": 64,
        "milestones": (0.5, 0.75),
        "drop": 0.2,
        "floor": 0.1,
    }

"""Laws of the options that a step's call carries: read in little time, never from a device, and never out of date."""

import gc
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fourfold.optim.option_tracker import OptionTracker
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import DivergenceError
from tests.cases import Case, batches, local_batch, loss, model

CASE = Case(batch_sizes=(12, 12), bucket_bytes=1500)


def adamw(num_groups: int, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(num_groups)], **options)


def new_rates(optimizer: torch.optim.Optimizer, number: int) -> None:
    """What a scheduler does between steps, with a different rate for each group."""
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (1 + index + number)


def bytecodes(act: Any) -> int:
    """How many bytecode instructions a call takes: unlike time, a measure that no other process affects."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    gc.disable()  # a collection would run what other tests have left to end
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
        gc.enable()
    return count


def instructions_of_text(num_groups: int, schedule: bool) -> int:
    optimizer = adamw(num_groups)
    options = OptionTracker(optimizer)
    for number in range(3):
        new_rates(optimizer, number)
        options.text()
    if schedule:
        new_rates(optimizer, 3)
    return bytecodes(options.text)


@pytest.mark.parametrize("schedule", [False, True])
def test_reading_the_options_of_more_groups_takes_no_more_instructions(schedule):
    # The loops over groups are built-in ones. With Python's own, 48 groups took 11,258 instructions, and 150 µs.
    assert instructions_of_text(48, schedule) == instructions_of_text(12, schedule) < 350


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, and counts how often it is read."""

    reads = 0

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        OnDevice.reads += 1
        return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # pyright: ignore


def on_device(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(OnDevice)


@pytest.mark.parametrize("num_groups", [1, 12])
def test_a_device_tensor_is_not_read_even_if_it_replaces_an_equal_number(num_groups):
    optimizer = adamw(num_groups, lr=0.5)
    options = OptionTracker(optimizer)
    options.text()
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = on_device(0.5 if index else 0.25)
    steps, text = [], ""
    for number in range(40):
        if number > 20:
            for group in optimizer.param_groups:
                group["lr"] = on_device(0.25)  # a new tensor in every step
        before = OnDevice.reads
        text = options.text()
        steps.append(OnDevice.reads - before)
    assert "lr = a device tensor" in text
    assert steps == [0] * 40


KEYS = ("lr", "betas", "eps", "weight_decay", "maximize", "note")
VALUES: dict[str, Any] = {
    "lr": st.sampled_from([0.1, 0.2, 0.3, 2, 10**400, float("inf")]) | st.just("tensor"),
    "betas": st.sampled_from([(0.9, 0.99), (0.5, 0.9), (0.5,), (0.5, (0.9, 0.1)), "tensors", "list"]),
    "eps": st.sampled_from([1e-8, 1e-6]),
    "weight_decay": st.sampled_from([0.0, -1.0, -2.0]),
    "maximize": st.booleans(),
    "note": st.sampled_from(["a", "b", None, "gone"]),
}
EDITS = st.lists(
    st.one_of(*[st.tuples(st.integers(0, 7), st.just(key), VALUES[key], st.booleans()) for key in KEYS])
    | st.just("text")
    | st.just("in place")
    | st.just("another name")
    | st.just("another group"),
    max_size=12,
)


def apply_edit(optimizer: torch.optim.Optimizer, edit: Any) -> None:
    if edit == "in place":
        for value in (v for group in optimizer.param_groups for v in group.values()):
            if isinstance(value, torch.Tensor):
                value.add_(0.25)
            elif isinstance(value, list) and isinstance(value[0], float):
                value[0] += 0.25
    elif edit == "another name":
        for group in optimizer.param_groups:
            group["nota"] = group.pop("note", group.pop("nota", 1))
    elif edit == "another group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "weight_decay": 0.1})
    else:
        index, key, value, everywhere = edit
        made = {
            "tensor": lambda: torch.tensor(0.5),
            "tensors": lambda: (torch.tensor(0.5), torch.tensor(0.25)),
            "list": lambda: [0.5, 0.9],
        }
        for group in optimizer.param_groups if everywhere else [optimizer.param_groups[index % 5]]:
            if value == "gone":
                group.pop(key, None)
            else:
                group[key] = made[value]() if value in made else value


@pytest.mark.parametrize("num_groups", [1, 6])
@settings(max_examples=60, deadline=None)
@example(edits=[(0, "weight_decay", -1.0, True), "text", (0, "weight_decay", -2.0, True)])
@example(edits=[(0, "note", "a", True), "text", "another name"])
@given(edits=EDITS)
def test_after_any_edits_the_text_equals_that_of_a_new_tracker(num_groups, edits):
    optimizer = adamw(max(num_groups, 5) if num_groups > 1 else 1)
    if num_groups == 1:
        edits = [(0, *edit[1:]) if isinstance(edit, tuple) else edit for edit in edits]
    options = OptionTracker(optimizer)
    for edit in edits:
        if edit == "text":
            options.text()
        else:
            apply_edit(optimizer, edit)
    assert options.text() == OptionTracker(optimizer).text()


def test_integers_have_the_text_of_equal_floats():
    texts = []
    for rates in ([1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2, 3.0, 4, 5.0, 6]):
        optimizer = adamw(6)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        texts.append(OptionTracker(optimizer).text())
    assert len(set(texts)) == 1


def test_of_many_rates_that_differ_the_first_are_shown_in_decimals():
    def body(comm):
        def make(parameters):
            return torch.optim.SGD([{"params": [p], "lr": 0.1 / (1 + n)} for n, p in enumerate(parameters)])

        step = TrainStep(model("mlp"), loss(CASE), make, plan=CASE.plan(2), communicator=comm, clip=None)
        step(local_batch(batches(CASE)[0], 2, comm.rank))
        for group in step.optimizer.param_groups:
            group["lr"] *= 1 + comm.rank
        with pytest.raises(DivergenceError, match=r"lr: rank 0 has 0\.1, 0\.05, .*…; rank 1 has 0\.2, 0\.1, .*…,? "):
            step(local_batch(batches(CASE)[1], 2, comm.rank))
        return len(step.optimizer.param_groups)

    assert min(threads.run(2, body)) > 4

"""Tensor ranks in different calls: both raise DivergenceError, and neither waits for the other."""

from collections.abc import Callable
from typing import Any

import pytest

from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import DivergenceError
from tests import cases
from tests.cases import Case

CASE = Case(model="mlp", tp=2, batch_sizes=(4, 4, 4))


def train(step: TrainStep, number: int = 1) -> Any:
    return step(cases.local_batch(cases.batches(CASE)[number], step.plan.dp, step.dp_index))


def sample(step: TrainStep) -> None:
    with step.inference() as model:
        model(cases.batches(CASE)[0][0])


CALLS: dict[str, Callable[[TrainStep], Any]] = {
    "evaluate()": lambda step: step.evaluate(cases.local_batch(cases.batches(CASE)[0], step.plan.dp, step.dp_index)),
    "state_dict()": lambda step: step.state_dict(),
    "unsharded()": sample,
    "named_weights()": lambda step: list(step.named_weights()),
    "all_gather_json()": lambda step: step.all_gather_json("?"),
}


@pytest.mark.covering
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_one_tensor_rank_makes_alone_is_reported_on_both(call, transport, steps, without_dry_run):
    case = Case(**{**vars(CASE), "transport": transport})

    def body(comm):
        step = cases.build_step(case, 2, comm)
        for number in range(steps):
            train(step, number)
        with pytest.raises(DivergenceError) as caught:
            CALLS[call](step) if comm.rank else train(step, steps)
        return str(caught.value)

    for message in threads.run(2, body):
        assert f"rank 0 is at step {steps + 1}; rank 1 is at {call} after step {steps}" in message


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_forward_that_one_tensor_rank_leaves_out_is_reported_on_both(transport):
    case = Case(**{**vars(CASE), "transport": transport})
    inputs = cases.batches(CASE)[0][0]

    def body(comm):
        step = cases.build_step(case, 2, comm)

        def sample():
            with step.inference() as model:
                for _ in range(2 - comm.rank):
                    model(inputs)

        with pytest.raises(DivergenceError) as caught:
            sample()
        return str(caught.value)

    for message in threads.run(2, body):
        assert "rank 0 is at a forward of unsharded() after step 0; rank 1 is at the end of unsharded()" in message

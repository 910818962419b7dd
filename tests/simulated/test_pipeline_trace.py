"""The trace of a pipeline's step: the report draws what was measured above what is simulated, with what stages send."""

from typing import Any

import pytest
import torch

from fourfold.plan.plan import Plan
from fourfold.plan.rank_program import SENDS
from fourfold.report.step_timeline import step_card
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.trace.trace_file import Trace, is_action
from fourfold.trainer.tracer import Tracer
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4,) * 4, length=8, microbatches=4)
PLANS: list[dict[str, Any]] = [
    {"pp": 2, "microbatches": 4},
    {"pp": 2, "microbatches": 4, "schedule": "interleaved", "interleave": 2},
    {"pp": 2, "microbatches": 4, "schedule": "zero-bubble"},
]


def traced(fields: dict[str, Any]) -> Trace:
    plan = Plan(**fields)

    def body(comm: Any) -> Trace:
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            model = lm.task(width=16, layers=4, heads=2, length=16, warmup=0).model()
        step = TrainStep(model, cases.loss(CASE), cases.optimizer(CASE), plan=plan, communicator=comm)
        tracer = Tracer(step, every=1)
        for number, batch in enumerate(cases.batches(CASE), start=1):
            with tracer.sample(number) as recorder, recorder.reading():
                step(batch)
        return tracer.trace

    return threads.run(plan.mesh.size, body)[0]


@pytest.mark.parametrize("fields", PLANS, ids=lambda fields: fields.get("schedule", "1f1b"))
def test_both_timelines_of_a_step_have_all_that_stages_compute_and_send(fields):
    trace = traced(fields)
    step = trace.steps[-1]
    for rank in trace.ranks:
        measured = [event.name for event in trace.events_of(step=step, rank=rank) if is_action(event.name)]
        messages = [str(action) for action in trace.program[rank] if action.verb in SENDS]
        assert messages
        assert sorted(each for each in measured if each in messages) == sorted(messages)
    (drawn,) = (part for part in step_card(trace)["parts"] if part["kind"] == "lanes")
    lanes = [name for name, _ in drawn["lanes"]]
    wanted = [
        f"{kind} {rank} {lane}" for kind in ("rank", "simulated") for rank in (0, 1) for lane in ("compute", "send")
    ]
    assert [each for each in lanes if each in wanted] == wanted

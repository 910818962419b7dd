"""Law: short trips. How many files and functions of Fourfold a reader meets on the way of one thing, by a trace.

build  from the plan to the end of the first step: assembly, the checks of the first batch, the step
step   a later one: from the batch to the updated weights
"""

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest

from fourfold.comm.communicator import Communicator
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from tests import cases, mesh_law
from tests.cases import Case
from tests.source_files import SOURCE

NOT_ON_THE_WAY = {"testing", "words", "tasks"}  # the world of the test, the nouns, the model


class Trip(NamedTuple):
    """What a trip enters: the names of files, and functions with their files."""

    files: set[str]
    functions: set[tuple[str, str]]


# The most that each may enter: files of the build, files and functions of a step. They only ever fall: the aim is 30
# files of a build. A rank that waits enters a function or two more.
LIMITS = {
    "dp=2 zero=1": (Plan(dp=2, zero=1), 108, 51, 253),
    "pp=2 tp=2": (Plan(pp=2, tp=2, microbatches=2), 136, 71, 364),
}


def entered(run: Callable[[], Any], comm: Communicator) -> Trip:
    """What of Fourfold rank 0 enters while it runs something."""
    functions: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            file = frame.f_code.co_filename.removeprefix(f"{SOURCE}/")
            name = frame.f_code.co_qualname
            if file.split("/")[0] not in NOT_ON_THE_WAY and not name.endswith(">"):  # neither lambda nor listcomp
                functions.add((file, name))

    before = sys.getprofile()
    if comm.rank == 0:
        sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Trip({file for file, _ in functions}, functions)


def trips(plan: Plan, comm: Communicator) -> tuple[Trip, Trip]:
    """A rank's build and its third step; of rank 0 what they enter."""
    made, optimizer = mesh_law.make_model("lm", 4), cases.optimizer(Case(optimizer="AdamW"))
    batches = mesh_law.batches("lm")
    steps: list[TrainStep] = []

    def call(batch: Any) -> None:
        steps[0](cases.local_batch(batch, plan.dp, steps[0].dp_index))

    def build() -> None:
        rules = lm.TENSOR_RULES if plan.tp > 1 else {}
        steps.append(
            TrainStep(made, mesh_law.LOSSES["lm"], optimizer, plan=plan, communicator=comm, tensor=rules, clip=0.05)
        )
        call(batches[0])

    found = entered(build, comm)
    call(batches[1])
    return found, entered(lambda: call(batches[0]), comm)


@pytest.mark.parametrize("name", LIMITS)
def test_a_plan_and_a_step_enter_few_files(name):
    plan, *limits = LIMITS[name]
    build, step = threads.run(plan.pp * plan.dp * plan.cp * plan.tp, lambda comm: trips(plan, comm))[0]
    found = [len(build.files), len(step.files), len(step.functions)]
    assert all(map(operator.le, found, limits)), (found, sorted(build.files), sorted(step.functions))

"""The law of the whole data axis: whatever is not refused trains as its oracle does.

Nothing is listed by hand: what there is comes from the plan's own rules, what is legal from the functions that refuse.
"""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fourfold.parts.optim.user_optimizer import build_optimizer
from fourfold.plan.plan_fields import FIELD_RULES
from fourfold.step.model_checks import check_plan_on_ranks, check_update_timing
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from fourfold.words.errors import PlanError
from tests import cases as cases_module
from tests import codec_oracle, local_sgd_oracle
from tests.cases import Case, build_step, train_oracle, train_step

SIZE, STEPS = 2, 2
CROSSED = ("zero", "update", "codec", "sync", "unused")
# Even batches: what a cast rounds depends on the unit, which is then the first step's count everywhere.
START = Case(batch_sizes=(16,) * STEPS, bucket_bytes=1500, local_steps=STEPS)


def cases(zero: int, update: str) -> list[Case]:
    """Every combination of the crossed fields, accumulation, clipping, and kinds of optimizers."""
    choices = {name: FIELD_RULES[name].choices for name in CROSSED} | {"zero": (zero,), "update": (update,)}
    choices |= {"microbatches": (1, 2), "clip": (None, 0.05), "optimizer": ("AdamW", "LAMB")}
    found = [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]
    # A layer-wise update sees the sums, not how they came: once is enough.
    plain = [f for f in found if f["optimizer"] == "AdamW" or (f["codec"] == "none" and f["unused"] == "refuse")]
    return [dataclasses.replace(START, **fields) for fields in plain]


def is_refused(case: Case) -> bool:
    """Whether this version says no before anything is started."""
    ranks = cast(Any, SimpleNamespace(size=SIZE, device=torch.device("cpu")))
    try:
        plan, model = case.plan(SIZE), cases_module.model(case.model)
        check_plan_on_ranks(model, plan, ranks, clip=case.clip)
        check_update_timing(build_optimizer(cases_module.optimizer(case), list(model.parameters())), plan)
    except PlanError:
        return True
    return False


@functools.cache
def expected(case: Case) -> TrainingResult:
    """What one process makes of it, in plain torch."""
    if case.sync == "local":
        return local_sgd_oracle.train(case, SIZE)
    return (
        train_oracle(case) if case.codec == "none" else codec_oracle.train(case, SIZE, unit=float(case.batch_sizes[0]))
    )


def wanted(case: Case) -> TrainingResult:
    # Where gradients are coded, the number of reductions matters to the oracle; all else it does not know.
    reduced = case.zero if case.codec != "none" and case.zero > 1 and case.microbatches > 1 else 0
    return expected(dataclasses.replace(case, zero=reduced, update="after", unused="refuse", transport="by-host"))


@pytest.mark.parametrize("update", FIELD_RULES["update"].choices)
@pytest.mark.parametrize("zero", FIELD_RULES["zero"].choices)
def test_every_plan_of_the_data_axis_is_refused_or_trains_as_its_oracle(zero, update):
    legal = [case for case in cases(zero, update) if not is_refused(case)]
    # At zero 3 codecs are refused; in backward clipping, unused parameters and layer-wise updates are too.
    assert len(legal) > (1 if zero == 3 else 10)
    # Ranks of one host share weights that rest split; over gloo they gather them.
    others = [dataclasses.replace(case, transport="gloo") for case in legal if zero == 3]
    for case in legal + others:
        ranks = threads.run(SIZE, lambda ranks, case=case: train_step(case, build_step(case, SIZE, ranks)))
        assert max(oracle.deviation(each, wanted(case)) for each in ranks) <= TOLERANCE, case


def test_the_combinations_that_mean_nothing_are_refused():
    refused = [case for update in FIELD_RULES["update"].choices for case in cases(0, update) if is_refused(case)]
    for fields in ({"sync": "local", "codec": "topk"}, {"update": "in_backward", "clip": 0.05}):
        these = [case for case in cases(0, fields.get("update", "after")) if fields.items() <= vars(case).items()]
        assert these
        assert all(case in refused for case in these)

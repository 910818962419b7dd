"""The seams of the data axis: the sequence axis, hosts and weights that rest split, with whatever changes an update."""

import dataclasses
import itertools

import pytest

from fourfold.plan.plan_fields import FIELD_RULES
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from tests.cases import Case, deviation

SIZE, HOSTS, LINE = 4, 2, 2
# A first batch of one sample: all ranks of the other line have none, when the model is tried and gathers are learnt.
START = Case(model="lm", sp=LINE, length=8, batch_sizes=(1, 3), microbatches=2, bucket_bytes=40000)


def cases(zero: int) -> list[Case]:
    choices = {"update": FIELD_RULES["update"].choices, "clip": (None, 0.05)}
    found = [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]
    legal = [fields for fields in found if fields["update"] != "in_backward" or fields["clip"] is None]
    return [dataclasses.replace(START, zero=zero, **fields) for fields in legal]


@pytest.mark.parametrize("zero", FIELD_RULES["zero"].choices)
def test_lines_of_several_hosts_train_as_one_process_though_one_has_no_samples(zero):
    for case in cases(zero):
        found = threads.run(SIZE, lambda ranks, case=case: deviation(case, SIZE, ranks), hosts=HOSTS)
        assert max(found) <= TOLERANCE, case

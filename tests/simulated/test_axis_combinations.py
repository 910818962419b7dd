"""The seams of the data axis: the sequence axis, hosts and weights that rest split, with whatever changes an update."""

import dataclasses

import pytest

from fourfold.plan.plan_fields import FIELD_RULES
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from tests.cases import Case, deviation

SIZE, HOSTS, LINE = 4, 2, 2
# A first batch of one sample: all ranks of the other line have none, when the model is tried and gathers are learnt.
START = Case(model="lm", sp=LINE, length=8, batch_sizes=(1, 3), microbatches=2, bucket_bytes=40000)


@pytest.mark.parametrize(("update", "clip"), [("in_backward", None), ("in_forward", 0.05)])
@pytest.mark.parametrize("zero", FIELD_RULES["zero"].choices)
def test_lines_of_several_hosts_train_as_one_process_though_one_has_no_samples(zero, update, clip):
    case = dataclasses.replace(START, zero=zero, update=update, clip=clip)
    assert max(threads.run(SIZE, lambda ranks: deviation(case, SIZE, ranks), hosts=HOSTS)) <= TOLERANCE

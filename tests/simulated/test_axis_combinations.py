"""Combinations of the data axis with the sequence axis, hosts and split weights, for every kind of update."""

import dataclasses
import itertools

import pytest

from fourfold.plan.plan_fields import FIELD_RULES
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from tests.cases import Case, deviation

SIZE, HOSTS, SEQUENCE_RANKS = 4, 2, 2
# The first batch has one sample, so the other sequence group has none while the dry run and the first gathers happen.
START = Case(model="lm", sp=SEQUENCE_RANKS, length=8, batch_sizes=(1, 3), microbatches=2, bucket_bytes=40000)


def cases(zero: int) -> list[Case]:
    choices = {"update": FIELD_RULES["update"].choices, "clip": (None, 0.05)}
    combinations = [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]
    legal = [fields for fields in combinations if fields["update"] != "in_backward" or fields["clip"] is None]
    return [dataclasses.replace(START, zero=zero, **fields) for fields in legal]


@pytest.mark.parametrize("zero", FIELD_RULES["zero"].choices)
def test_sequence_groups_across_hosts_train_as_one_process_even_without_samples(zero):
    for case in cases(zero):
        deviations = threads.run(SIZE, lambda comm, case=case: deviation(case, SIZE, comm), hosts=HOSTS)
        assert max(deviations) <= TOLERANCE, case

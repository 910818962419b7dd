"""Combinations of the data axis with the context axis, hosts and split weights, for every kind of update."""

import dataclasses

import pytest

from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from tests.cases import Case, deviation

pytestmark = pytest.mark.usefixtures("without_dry_run")

SIZE, HOSTS, CONTEXT_RANKS = 4, 2, 2
# The first batch has one sample: the other context group has none in the dry run and in the first all-gathers.
START = Case(model="lm", cp=CONTEXT_RANKS, length=8, batch_sizes=(1, 3), microbatches=2, bucket_bytes=40000)


@pytest.mark.parametrize(("zero", "update", "clip"), [
    (0, "in_backward", None), (1, "in_forward", 0.05), (2, "in_backward", None), (3, "in_forward", 0.05),
])  # fmt: skip
def test_sequence_groups_across_hosts_train_as_one_process_even_without_samples(zero, update, clip):
    case = dataclasses.replace(START, zero=zero, update=update, clip=clip)
    assert max(threads.run(SIZE, lambda comm: deviation(case, SIZE, comm), hosts=HOSTS)) <= TOLERANCE

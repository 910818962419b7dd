"""Laws of gradient rounds: when buckets are reduced, and when they have all gradients of a step."""

import pytest
import torch

from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.axes.data.work.gradients import Countdown
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.scalars import GroupSums, ScalarReducer
from fourfold.step.grad_strategies import OneRound, RoundEveryBackward
from fourfold.testing import threads

pytestmark = pytest.mark.usefixtures("without_dry_run")


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_only_the_last_of_several_rounds_has_all_gradients(num_microbatches):
    indices, rounds = range(num_microbatches), RoundEveryBackward()
    assert all(rounds.ends_with(index, num_microbatches) for index in indices)
    assert [index for index in indices if rounds.has_all_grads(index, num_microbatches)] == [num_microbatches - 1]


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_a_single_round_ends_with_the_last_microbatch_and_has_all_gradients(num_microbatches):
    indices, rounds = range(num_microbatches), OneRound()
    assert [index for index in indices if rounds.ends_with(index, num_microbatches)] == [num_microbatches - 1]
    # It launches nothing before the last microbatch with samples, which may be an earlier one than the last.
    assert all(rounds.has_all_grads(index, num_microbatches) for index in indices)


class Counted(list[int]):
    """A list that counts how often it is searched."""

    num_searches = 0

    def __contains__(self, item: object) -> bool:
        self.num_searches += 1
        return super().__contains__(item)


def test_a_round_does_not_search_its_buckets_for_each_parameter():
    buckets = [Bucket(index, (Slot(f"p{index}", 0, 1),), 1, "float32", 4, 0) for index in range(3)]
    countdown, own = Countdown(buckets), Counted([2, 0])
    countdown.begin_round(own, 1)
    assert (countdown.round_order, own.num_searches) == ([0, 2], 0)


def test_a_sum_that_nobody_has_waited_for_is_not_lost():
    def body(comm):
        scalars = ScalarReducer(2, over_group=GroupSums(comm, range(comm.size), "scalars", CommMeter()))
        scalars.all_reduce_async(1, torch.ones(1))
        with pytest.raises(AssertionError, match="has not been waited for"):
            scalars.all_reduce_async(1, torch.ones(1))
        return scalars.wait(1)

    assert threads.run(2, body) == [[2.0], [2.0]]

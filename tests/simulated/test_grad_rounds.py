"""Laws of gradient rounds: when buckets are reduced, and when they have all gradients of a step."""

import pytest

from fourfold.step.grad_rounds import OneRound, RoundEveryBackward


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

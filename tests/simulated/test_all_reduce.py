"""Laws of `TrainStep.all_reduce`: sums of any number of values over the data ranks. Ranks are threads."""

import pytest
import torch

from fourfold.testing import threads
from fourfold.words.errors import DivergenceError, SettingError
from tests.cases import Case, build_step

SIZE = 3


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("num_values", [0, 1, 8, 9, 10, 8 + SIZE, 40])
def test_any_number_of_values_is_summed(num_values, hosts, transport):
    def body(comm):
        step = build_step(Case(transport=transport), SIZE, comm)
        before = step.all_reduce(torch.tensor([1.0], dtype=torch.float64))
        values = torch.arange(num_values, dtype=torch.float64) + 100 * comm.rank
        return before, step.all_reduce(values), step.all_reduce(torch.tensor([2.0], dtype=torch.float64))

    expected = [SIZE * number + 300.0 for number in range(num_values)]
    assert threads.run(SIZE, body, hosts=hosts) == [([3.0], expected, [6.0])] * SIZE


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_of_any_dtype_and_shape_are_summed_as_float64_in_their_order(num_ranks):
    def body(comm):
        step = build_step(Case(), num_ranks, comm)
        strided = step.all_reduce(torch.arange(6).view(2, 3).t())
        with_gradient = step.all_reduce(torch.ones(2, requires_grad=True))
        return strided, with_gradient, [type(value) for value in strided]

    expected = [[num_ranks * value for value in values] for values in ([0, 3, 1, 4, 2, 5], [1, 1])]
    assert threads.run(num_ranks, body) == [(*expected, [float] * 6)] * num_ranks


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("lengths", [(2, 3), (2, 20)])
def test_ranks_that_sum_different_numbers_of_values_are_refused(lengths, hosts):
    def body(comm):
        step = build_step(Case(), 2, comm)
        with pytest.raises(
            DivergenceError, match=rf"all_reduce\(\) of {lengths[0]} values.*all_reduce\(\) of {lengths[1]} values"
        ):
            step.all_reduce(torch.ones(lengths[comm.rank]))

    threads.run(2, body, hosts=hosts)


@pytest.mark.parametrize("values", ["x", 1.0, None, [1.0], torch.ones(2, dtype=torch.complex64)])
def test_a_value_that_is_not_a_real_tensor_is_refused_on_every_rank_and_the_next_sum_is_correct(values):
    def body(comm):
        step = build_step(Case(), 2, comm)
        with pytest.raises(SettingError, match=r"values.*need a tensor of real numbers"):
            step.all_reduce(values)
        return step.all_reduce(torch.ones(1))

    assert threads.run(2, body) == [[2.0]] * 2


def test_all_ranks_raise_if_one_rank_alone_passes_no_tensor():
    def body(comm):
        step = build_step(Case(), 2, comm)
        with pytest.raises(SettingError if comm.rank else DivergenceError, match=r"all_reduce\(\)|values"):
            step.all_reduce("x" if comm.rank else torch.ones(1))  # pyright: ignore[reportArgumentType]
        return True

    assert threads.run(2, body) == [True] * 2

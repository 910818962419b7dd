"""Laws of attention over the sequence axis: ranks as threads, by messages and in shared memory."""

import pytest
import torch

from fourfold.testing import links, threads
from tests import attention
from tests.attention import TOLERANCE


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def worst(cases, by):
    """By case, the largest deviation of any rank; all cases of one layout."""
    expected = [(case, *(_expected(case))) for case in cases]

    def body(ranks):
        axis = links.axis(ranks, cases[0].ring, cases[0].ulysses, by=by)
        found = []
        for case, tensors, oracle in expected:
            mine = attention.on_axis(case, tensors, axis)
            found.append(attention.deviation(mine, oracle, axis.spans(case.length)))
        return found

    by_rank = threads.run(cases[0].size, body)
    return dict(zip(cases, map(max, zip(*by_rank, strict=True)), strict=True))


def _expected(case):
    tensors = attention.whole(case)
    return tensors, attention.oracle(case, tensors)


def layouts(size):
    found = {}
    for case in attention.cases(size):
        found.setdefault((case.ring, case.ulysses), []).append(case)
    return found.values()


@pytest.mark.parametrize("size", range(1, 9))
def test_every_axis_finds_what_one_process_finds(size):
    for turn, cases in enumerate(layouts(size)):
        found = worst(cases, "shared" if turn % 2 else "messages")
        assert not {case: far for case, far in found.items() if far > TOLERANCE}

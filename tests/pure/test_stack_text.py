"""Whether a rank waits for its peers is read from its stack: only the innermost frames count."""

import sys
from collections.abc import Iterator

from fourfold.comm import polling
from fourfold.trainer.heartbeat import MAX_FRAMES, waits_for_peers


def stack_files() -> Iterator[str]:
    """The files of the caller's stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def test_a_rank_inside_comm_waits_for_peers_and_one_in_its_own_code_does_not():
    assert polling.__file__ is not None
    assert waits_for_peers(["/task/loss.py", polling.__file__, "/task/train.py"])
    assert waits_for_peers([f'  File "{polling.__file__}", line 30 in wait_until'])
    assert not waits_for_peers(stack_files())
    assert not waits_for_peers([])


def test_a_comm_call_far_out_in_the_stack_does_not_count_as_a_wait():
    assert polling.__file__ is not None
    own = ["/task/loss.py"] * MAX_FRAMES
    assert not waits_for_peers([*own, polling.__file__])
    assert waits_for_peers([*own[1:], polling.__file__])

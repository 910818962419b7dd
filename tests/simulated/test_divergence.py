"""Laws of ranks that diverge: found in the same call and reported, before a weight changes. Ranks are threads."""

import copy
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce import scalars
from fourfold.comm.reduce.host_memory import HostMemory, SharedMemoryLayout
from fourfold.comm.shared_regions import GroupPlace
from fourfold.feed.batches import Batch
from fourfold.orders.sample_order import BatchRange
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import DivergenceError, PeerError
from tests.cases import Case, batches, build_step, local_batch

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(12, 12, 12), bucket_bytes=1500)


def train(step: TrainStep, number: int) -> None:
    step(local_batch(batches(CASE)[number], step.plan.dp, step.dp_index))


def edit(step: TrainStep) -> None:
    with step.edit():
        pass


CALLS: dict[str, Callable[[TrainStep], Any]] = {
    "evaluate()": lambda step: step.evaluate(local_batch(batches(CASE)[0], step.plan.dp, step.dp_index)),
    "all_reduce() of 2 values": lambda step: step.all_reduce(torch.ones(2, dtype=torch.float64)),
    "all_gather_json()": lambda step: step.all_gather_json("?"),
    "edit()": edit,
    "state_dict()": lambda step: step.state_dict(),
}


def divergence(step: TrainStep, act: Callable[[], Any]) -> str:
    """The message of the DivergenceError that `act` raises; it changes no weight."""
    before = copy.deepcopy(dict(step.model.named_parameters()))
    with pytest.raises(DivergenceError) as caught:
        act()
    assert all(torch.equal(p, before[name]) for name, p in step.model.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_made_by_some_ranks_only_is_reported_on_every_rank(call, steps, alone, monkeypatch):
    # However slow the machine is, late ranks are waited for.
    monkeypatch.setattr(scalars, "DIVERGENCE_GRACE_SECONDS", threads.TIME_LIMIT_SECONDS)

    def body(comm):
        step = build_step(CASE, 3, comm)
        for number in range(steps):
            train(step, number)
        calls_it = (comm.rank == 1) == alone
        return divergence(step, lambda: CALLS[call](step) if calls_it else train(step, steps))

    one, others = (f"{call} after step {steps}", f"step {steps + 1}")[:: 1 if alone else -1]
    for message in threads.run(3, body):
        assert f"rank 1 is at {one}; ranks 0 and 2 are at {others}" in message


def test_a_rank_that_never_arrives_does_not_hide_the_divergence_of_others(monkeypatch):
    monkeypatch.setattr(scalars, "DIVERGENCE_GRACE_SECONDS", 0.3)
    steps = []  # a rank whose step is garbage-collected would count as dead

    def body(comm):
        step = build_step(CASE, 3, comm)
        steps.append(step)
        train(step, 0)
        if comm.rank == 2:
            return ""
        return divergence(step, lambda: CALLS["evaluate()"](step) if comm.rank else train(step, 1))

    for message in threads.run(3, body)[:2]:
        assert "rank 0 is at step 2; rank 1 is at evaluate() after step 1; rank 2 is at step 1 and has" in message


def test_calls_are_compared_once_all_ranks_have_begun_or_the_grace_period_is_over():
    checks = calls_of_three_ranks()
    checks[0].begin("step 6")
    checks[1].begin("edit()")
    grace = scalars.DIVERGENCE_GRACE_SECONDS
    checks[0].check_begun(grace)  # rank 2 may still begin its call
    with pytest.raises(DivergenceError, match="rank 2 is at nothing and has come no further"):
        checks[0].check_begun(grace + 0.1)
    checks[2].begin("step 6")
    with pytest.raises(DivergenceError, match=r"rank 1 is at edit\(\); ranks 0 and 2 are at step 6"):
        checks[0].check_begun(0.0)


def calls_of_three_ranks(check_peers: Callable[[], None] = lambda: None) -> list[scalars.CallChecker]:
    layout = SharedMemoryLayout(num_scalars=8, board_bytes=scalars.BOARD_BYTES)
    mapping, places = mmap.mmap(-1, layout.total_bytes(3)), [GroupPlace(index, (0, 1, 2)) for index in range(3)]
    hosts = [HostMemory(mapping, layout, place, CommMeter(), check_peers=check_peers) for place in places]
    return [scalars.CallChecker(host, None) for host in hosts]


def test_a_rank_that_diverged_and_then_died_is_reported_as_diverged():
    def check_peers() -> None:
        raise PeerError("rank 1 died")

    first, diverged, _ = calls_of_three_ranks(check_peers)
    diverged.begin("evaluate() after step 5")
    first.begin("step 6")
    with pytest.raises(DivergenceError, match="rank 2 is at nothing and has come no further"):
        first.check_same()


def test_a_skipped_step_is_found_when_the_other_ranks_evaluate():
    def body(comm):
        step = build_step(CASE, 2, comm)
        train(step, 0)
        if comm.rank == 0:
            train(step, 1)
            return divergence(step, lambda: CALLS["evaluate()"](step))
        return divergence(step, lambda: CALLS["evaluate()"](step))

    with pytest.raises(DivergenceError, match=r"rank 0 is at step 2; rank 1 is at evaluate\(\) after step 1"):
        threads.run(2, body)


def test_a_batch_skipped_on_one_rank_is_found_in_that_step():
    def body(comm):
        step = build_step(CASE, 2, comm)
        for number, batch in enumerate(batches(CASE)):
            if comm.rank == 1 and number == 1:
                continue
            positions = BatchRange(36, 5, 0, 12 * number, 12 * number + 12, 0, 0)
            local = Batch.wrap(local_batch(batch, 2, comm.rank), positions)
            if number == 0:
                step(local)
            else:
                return divergence(step, lambda local=local: step(local))
        return ""

    for message in threads.run(2, body):
        assert "rank 0 is at step 2, positions 12 to 24 of epoch 0, seed 5, 36 samples; " in message
        assert "rank 1 is at step 2, positions 24 to 36 of epoch 0, seed 5" in message
        assert "no batch that one rank leaves out" in message


def test_sources_of_different_lengths_are_found_in_the_first_step():
    """As if each rank had read its own files: each would train on a part of its own files only, in its own order."""

    def body(comm):
        step, length = build_step(CASE, 2, comm), 40 + 4 * comm.rank
        local = Batch.wrap(local_batch(batches(CASE)[0], 2, comm.rank), BatchRange(length, 0, 0, 0, 12, 0, 6))
        return divergence(step, lambda: step(local))

    for message in threads.run(2, body):
        assert "rank 0 is at step 1, positions 0 to 12 of epoch 0, seed 0, 40 samples; " in message
        assert "rank 1 is at step 1, positions 0 to 12 of epoch 0, seed 0, 44 samples" in message
        assert "the same source" in message


def test_a_late_rank_is_reported_at_its_last_call():
    mapping = mmap.mmap(-1, 3 * scalars.BOARD_BYTES)
    board = scalars.CallBoard(mapping, [index * scalars.BOARD_BYTES for index in range(3)], ranks=(4, 5, 6))
    for index, number, call in (
        (0, 1, "step 1"),
        (1, 1, "step 1"),
        (2, 1, "step 1"),
        (0, 2, "step 2"),
        (1, 2, "edit()"),
    ):
        board.write(index, number, call)
    board.check(2, lambda: [2, 2, 1])
    with pytest.raises(DivergenceError, match=r"rank 5 is at edit.*rank 6 is at step 1 and has come no further"):
        board.check(0, lambda: [2, 2, 1])
    board.write(2, 2, "step 2")
    board.write(2, 3, "step 3")
    with pytest.raises(DivergenceError, match=r"rank 5 is at edit"):
        board.check(1, lambda: [1, 2, 3])  # rank 6 is ahead already


@pytest.mark.parametrize("raises_flag", [False, True])
def test_a_rank_may_advance_while_another_compares(raises_flag):
    # Its later calls overwrite earlier ones while these are read, before its flag is raised.
    board = scalars.CallBoard(mmap.mmap(-1, 2 * scalars.BOARD_BYTES), [0, scalars.BOARD_BYTES], ranks=(0, 1))
    for index in range(2):
        board.write(index, 1, "swapped_weights()")
    counts = [1, 1]

    def get_counts():
        before = list(counts)
        for number in range(counts[1] + 1, scalars.BOARD_DEPTH + 2):
            board.write(1, number, "unsharded()")
            counts[1] = number if raises_flag else scalars.BOARD_DEPTH
        return before

    board.check(0, get_counts)
    board.write(0, 2, "unsharded()")
    board.check(0, lambda: [2, 3])
    board.write(0, 3, "all_gather_json()")
    with pytest.raises(DivergenceError, match=r"rank 1 is at unsharded\(\)"):
        board.check(0, lambda: [3, 3])


def test_long_calls_are_truncated_and_decode():
    for call in ("", "step 6", "ä" * scalars.CALL_BYTES):
        assert len(scalars.encode_call(call)) == scalars.CALL_BYTES
        assert call.startswith(scalars.decode_call(scalars.encode_call(call)).rstrip("�"))
    assert scalars.fingerprint("step 6") != scalars.fingerprint("step 7")

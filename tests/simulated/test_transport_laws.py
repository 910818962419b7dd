"""Laws of what transports are made of: reducers, weight gatherers, scalars, calls. Ranks are threads.

place    how many ranks, on how many hosts, and the plan's transport
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, grad_buffer_indices
from fourfold.comm.codec import registry
from fourfold.comm.communicator import gather_topology
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.group import LocalSGDReducer
from fourfold.comm.reduce.protocol import DataTransport, TransportSpec
from fourfold.comm.reduce.scalars import NUM_LOSS_SCALARS, WorldChannel
from fourfold.comm.transports import make_data_transport, make_world_channel
from fourfold.plan.codec import CodecSpec
from fourfold.testing import threads
from fourfold.trainer.tracer import SpanRecorder
from fourfold.words.errors import DivergenceError, PeerError, TrainingError
from fourfold.words.mesh import Mesh
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS

NUM_BUCKETS, LENGTH, PATIENCE, NUM_SCALARS = 3, 64, 10.0, 12


class Place(NamedTuple):
    size: int
    hosts: int = 1
    choice: str = "auto"


PLACES = (Place(1), Place(2), Place(4, 2), Place(2, choice="gloo"), Place(2, 2))


class Rank(NamedTuple):
    """What one rank has of a job."""

    world: WorldChannel
    data: DataTransport
    meter: CommMeter


def connect(
    comm: Any,
    place: Place,
    *,
    zero: int = 0,
    codec: str = "",
    world: WorldChannel | None = None,
    meter: CommMeter | None = None,
) -> Rank:
    """Make the data transport of a rank, and the world's channel if there is none yet."""
    meter = meter or CommMeter()
    topology = gather_topology(comm)
    world = world or make_world_channel(comm, topology, place.choice, meter)
    rest = RESTING_LAYOUTS[zero if place.size > 1 else 0]
    buckets = [Bucket(i, (Slot(str(i), 0, LENGTH),), LENGTH, "float64", 8, 0) for i in range(NUM_BUCKETS)]
    codecs = [
        registry.make_codec(CodecSpec(codec), bucket, [(LENGTH,)], device=comm.device) for bucket in buckets if codec
    ]
    spec = TransportSpec(
        (LENGTH,) * NUM_BUCKETS,
        (torch.float64,) * NUM_BUCKETS,
        grad_buffer_indices(NUM_BUCKETS, is_cyclic=zero > 1),
        rest,
        num_scalars=NUM_SCALARS,
        num_shards=place.size if zero and place.size > 1 else None,
    )
    data = make_data_transport(
        comm,
        topology,
        spec,
        meter=meter,
        calls=world.calls,
        choice=place.choice,
        codecs=codecs if place.size > 1 else (),
    )
    return Rank(world, data, meter)


def run(place: Place, body: Callable[[Any], Any]) -> list[Any]:
    return threads.run(place.size, body, hosts=place.hosts)


def until(condition: Callable[[], bool]) -> bool:
    """Poll; False after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def launch(rank: Rank, bucket: int, value: float, factor: float | None, *, is_recorded: bool = True) -> None:
    rank.data.grads.acquire_buffer(bucket, factor)
    rank.data.grads.grad_buffers[bucket].fill_(value)
    rank.data.grads.reduce_async(bucket, bucket if is_recorded else None, factor)


def total(rank: Rank, bucket: int) -> list[float]:
    """The whole sum where states rest whole, else this rank's shard."""
    return sorted({value for view in rank.data.grads.reduced_views(bucket) for value in view.flat.tolist()})


# ---- gradients


@pytest.mark.parametrize("codec", ["", "bf16"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_sum_that_needs_the_factor_stays_queued_until_it_is_given_and_is_multiplied_once(place, codec):
    def body(comm):
        rank = connect(comm, place, codec=codec)
        grads = rank.data.grads
        for bucket in range(NUM_BUCKETS):
            launch(rank, bucket, 1.0 + comm.rank, None)
        comm.all_gather_json(None)
        for _ in range(20):
            assert not any(grads.is_reduced(bucket, None) for bucket in range(NUM_BUCKETS))
        before = [grads.grad_buffers[bucket].tolist() for bucket in range(NUM_BUCKETS)]
        comm.all_gather_json(None)
        found = []
        for bucket in range(NUM_BUCKETS):
            # Polling with the factor is enough; a second factor finds nothing left to multiply.
            assert until(functools.partial(grads.is_reduced, bucket, 2.0))
            grads.wait_reduce(bucket, 2.0)
            grads.wait_reduce(bucket, 2.0)
            found.append(total(rank, bucket))
        rank.data.end_step()
        comm.all_gather_json(None)
        return found, before

    expected = [[2.0 * sum(range(1, place.size + 1))]] * NUM_BUCKETS
    for number, (found, before) in enumerate(run(place, body), 1):
        assert found == expected
        # Over a process group the sum is there before the factor; elsewhere nobody has touched the buffers.
        if place.choice != "gloo" and place.size > place.hosts and not codec:
            assert before == [[float(number)] * LENGTH] * NUM_BUCKETS


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["", "bf16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES[1:], ids=str)
def test_where_states_rest_split_no_sum_needs_the_factor(place, zero, codec):
    def body(comm):
        rank = connect(comm, place, zero=zero, codec=codec)
        found = []
        for bucket in range(NUM_BUCKETS):
            launch(rank, bucket, 1.0 + comm.rank, None)
        for bucket in range(NUM_BUCKETS):
            assert until(functools.partial(rank.data.grads.is_reduced, bucket, None))
            rank.data.grads.wait_reduce(bucket, 1.0)
            start, stop, shard = rank.data.grads.grad_shard(bucket)
            rank.data.grads.reduce_range(bucket, start, stop, 2.0)
            found.append(set(shard.tolist()))
        rank.data.end_step()
        comm.all_gather_json(None)
        return found

    assert run(place, body) == [[{2.0 * sum(range(1, place.size + 1))}] * NUM_BUCKETS] * place.size


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_size_of_a_reducer_and_of_a_gatherer_counts_all_ranks_of_all_hosts(place):
    def body(comm):
        found = set()
        for zero in (0, 1, 3):
            data = connect(comm, place, zero=zero).data
            found |= {data.grads.size, data.weights.size, LocalSGDReducer(data.grads).size}
        return found

    assert run(place, body) == [{place.size}] * place.size


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("place", [PLACES[1], PLACES[2]], ids=str)
def test_a_reduction_without_an_index_is_not_recorded(place, is_recorded):
    def body(comm):
        rank = connect(comm, place)
        rank.meter.recorder = recorder = SpanRecorder()
        launch(rank, 0, 1.0, 1.0, is_recorded=is_recorded)
        rank.data.grads.wait_reduce(0, 1.0)
        rank.data.end_step()
        comm.all_gather_json(None)
        return {span.name for span in recorder.spans if span.name.startswith("R")}

    assert run(place, body) == [{"R0.0"} if is_recorded else set()] * place.size


def test_local_steps_sum_nothing_but_what_a_sync_hands_over():
    def body(comm):
        rank = connect(comm, Place(2))
        local = LocalSGDReducer(rank.data.grads)
        local.acquire_buffer(0, None)
        local.grad_buffers[0].fill_(1.0 + comm.rank)
        local.reduce_async(0, 0, None)
        assert not local.is_reduced(0, None)
        local.wait_reduce(0, 4.0)
        alone = set(local.grad_buffers[0].tolist())
        local.all_reduce_async(0)
        joined = {value for view in local.wait_all_reduce(0) for value in view.flat.tolist()}
        local.end_step()
        comm.all_gather_json(None)
        return alone, joined

    assert threads.run(2, body) == [({4.0}, {12.0}), ({8.0}, {12.0})]


# ---- weights


@pytest.mark.parametrize("place", PLACES[1:], ids=str)
def test_weights_are_whole_when_the_step_has_ended(place):
    def body(comm):
        rank = connect(comm, place, zero=1)
        weights = rank.data.weights
        flats = weights.shared_weights or [torch.zeros(LENGTH, dtype=torch.float64) for _ in range(NUM_BUCKETS)]
        if comm.rank:
            time.sleep(0.02)  # whoever comes first waits
        weights.signal_backward_done()
        weights.wait_writable()
        for bucket, flat in enumerate(flats):
            start, stop, _ = rank.data.grads.grad_shard(bucket)
            flat[start:stop] = 1.0 + bucket
            weights.all_gather_async(bucket, flat)
        rank.data.end_step()
        found = [set(flat.tolist()) for flat in flats]
        comm.all_gather_json(None)
        return found

    assert run(place, body) == [[{1.0 + bucket} for bucket in range(NUM_BUCKETS)]] * place.size


# ---- scalars


def all_scalars(rank: Rank) -> list[Any]:
    return [rank.world.scalars, rank.data.scalars]


@pytest.mark.parametrize("place", PLACES[1:], ids=str)
def test_is_ready_never_waits_and_polling_alone_brings_the_sum(place):
    have_polled = threading.Barrier(place.size)

    def body(comm):
        rank = connect(comm, place)
        for scalars in all_scalars(rank):
            assert not scalars.is_ready(LOSS)  # not begun
            is_late = comm.rank == place.size - 1
            if not is_late:
                scalars.all_reduce_async(LOSS, torch.tensor([1.0, 2.0], dtype=torch.float64))
                assert not any(scalars.is_ready(LOSS) for _ in range(20))
            have_polled.wait(PATIENCE)
            if is_late:
                scalars.all_reduce_async(LOSS, torch.tensor([1.0, 2.0], dtype=torch.float64))
            assert until(functools.partial(scalars.is_ready, LOSS))
            assert scalars.wait(LOSS) == [1.0 * place.size, 2.0 * place.size]
            assert not scalars.is_ready(LOSS)
        comm.all_gather_json(None)

    run(place, body)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_sums_are_right_in_whatever_order_ranks_ask_for_them(place):
    kinds = [LOSS, GRAD_NORM, USED_PARAMS, TRUST_NORMS]

    def body(comm):
        rank = connect(comm, place)
        found: dict[tuple[int, int], list[float]] = {}
        for number, scalars in enumerate(all_scalars(rank)):
            for kind in kinds:
                scalars.all_reduce_async(kind, torch.tensor([10.0 * number + kind + comm.rank], dtype=torch.float64))
        comm.all_gather_json(None)
        # Of two ranks that add up something together, one polls the world's sums before the other asks for any.
        polls = (comm.rank + comm.rank * place.hosts // place.size) % 2 > 0
        if polls:
            rank.world.scalars.is_ready(LOSS)
        for number in (1, 0):
            for kind in kinds[:: 1 if polls else -1]:
                found[number, kind] = all_scalars(rank)[number].wait(kind)
        comm.all_gather_json(None)
        return found

    ranks = sum(range(place.size))
    expected = {(n, kind): [place.size * (10.0 * n + kind) + ranks] for n in range(2) for kind in kinds}
    assert run(place, body) == [expected] * place.size


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_scalars_beyond_the_room_are_refused_and_the_next_sum_is_right(place):
    def body(comm):
        rank = connect(comm, place)
        for scalars, room in zip(all_scalars(rank), (NUM_LOSS_SCALARS, NUM_SCALARS), strict=True):
            for kind in (LOSS, GRAD_NORM):
                with pytest.raises(TrainingError, match=f"{room + 1} scalars in one sum.*at most {room}"):
                    scalars.all_reduce_async(kind, torch.zeros(room + 1, dtype=torch.float64))
                assert not scalars.is_ready(kind)
                scalars.all_reduce_async(kind, torch.arange(room, dtype=torch.float64))
                assert scalars.wait(kind) == [float(place.size * value) for value in range(room)]
        comm.all_gather_json(None)

    run(place, body)


# ---- calls


@pytest.mark.parametrize("place", [PLACES[1], PLACES[2]], ids=str)
def test_a_wait_of_the_data_ranks_reports_that_the_world_has_diverged(place):
    """The last rank waits for a sum that its host's others never begin: they are in another call."""

    def body(comm):
        rank = connect(comm, place)
        is_waiting = comm.rank == place.size - 1
        rank.world.calls.begin("step 2" if is_waiting else "evaluate()")
        if is_waiting:
            launch(rank, 0, 1.0, 1.0)
            with pytest.raises(DivergenceError, match=f"rank {comm.rank} is at step 2"):
                rank.data.grads.wait_reduce(0, 1.0)
        comm.all_gather_json(None)

    run(place, body)


@pytest.mark.parametrize("place", PLACES[1:], ids=str)
def test_the_world_finds_ranks_in_different_calls(place):
    def body(comm):
        rank = connect(comm, place)
        rank.world.calls.begin("step 1")
        rank.world.calls.check_same()
        # Of several hosts all ranks of the first: a host whose own ranks differ does not ask the others.
        is_elsewhere = comm.rank < (1 if place.hosts == 1 else place.size // place.hosts)
        rank.world.calls.begin("edit()" if is_elsewhere else "step 2")
        with pytest.raises(DivergenceError, match=r"rank [01] is at edit\(\)"):
            rank.world.calls.check_same()
        comm.all_gather_json(None)

    run(place, body)


# ---- several groups of data ranks in one world


def teams(comm: Any, axis: str) -> tuple[Any, list[int]]:
    """Of a mesh of 2 × 2 ranks: those along the inner axis are neighbours, along the outer one every second rank."""
    mesh = Mesh(pp=2, dp=2) if axis == "inner" else Mesh(dp=2, tp=2)
    data = comm.on_mesh(mesh).along("dp")
    return data, list(data.ranks)


@pytest.mark.covering
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("axis", ["inner", "outer"])
@pytest.mark.parametrize("place", [Place(4), Place(4, 2), Place(4, choice="gloo")], ids=str)
def test_groups_of_data_ranks_sum_apart_and_the_world_together(place, axis, zero):
    """Also where a group and the world's sums between hosts have the same ranks."""

    def body(comm):
        data, ranks = teams(comm, axis)
        world = make_world_channel(comm, gather_topology(comm), place.choice, meter := CommMeter())
        pair = connect(data, Place(2, choice=place.choice), zero=zero, world=world, meter=meter)
        launch(pair, 0, 1.0 + comm.rank, 1.0)
        world.scalars.all_reduce_async(LOSS, torch.tensor([1.0 + comm.rank], dtype=torch.float64))
        comm.all_gather_json(None)
        if comm.rank in (0, 3):
            world.scalars.is_ready(LOSS)
        pair.data.scalars.all_reduce_async(LOSS, torch.tensor([10.0 + comm.rank], dtype=torch.float64))
        sums = pair.data.scalars.wait(LOSS), world.scalars.wait(LOSS)
        pair.data.grads.wait_reduce(0, 1.0)
        pair.data.grads.reduce_shard(0)
        assert total(pair, 0) == [2.0 + sum(ranks)]
        assert sums == ([20.0 + sum(ranks)], [10.0])
        pair.data.end_step()
        comm.all_gather_json(None)
        return pair.data.description

    shares_memory = place.choice != "gloo" and (place.hosts == 1 or axis == "inner")
    assert {"shared memory" in each for each in run(place, body)} == {shares_memory}


def test_a_rank_that_has_left_is_named_by_its_number_in_the_job():
    ended = threading.Event()

    def body(comm):
        data, _ = teams(comm.register(), "inner")
        world = make_world_channel(comm, gather_topology(comm), "shared", meter := CommMeter())
        pair = connect(data, Place(2, choice="shared"), world=world, meter=meter)
        if comm.rank == 3:
            comm.leave()
            ended.set()
        if comm.rank == 2 and pair is not None:
            assert ended.wait(PATIENCE)
            launch(pair, 0, 1.0, 1.0)
            with pytest.raises(PeerError, match=r"rank 3 .* ended its step with an error while rank 2 waited for it"):
                pair.data.grads.wait_reduce(0, 1.0)
        comm.all_gather_json(None)

    threads.run(4, body)


# ---- the meter


def test_nested_times_count_once():
    meter = CommMeter()
    with meter.timed():
        with meter.counted(), meter.timed():
            time.sleep(0.02)
        meter.waiting_seconds += 100.0  # as a wait within does
    assert 0.02 <= meter.waiting_seconds < 1.0

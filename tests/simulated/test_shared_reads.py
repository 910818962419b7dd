"""Ranks that share samples read them once per host, and each gets the batches that it would read by itself."""

import itertools
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import fourfold as ff
from fourfold.comm.communicator import Communicator, _RankProcess
from fourfold.environment.processes import this_process
from fourfold.environment.world import World
from fourfold.feed.data_input import open_input
from fourfold.feed.evaluation_batches import EvaluationBatches
from fourfold.feed.feed import Feed
from fourfold.feed.sharing import shared_reads
from fourfold.feed.sharing.channel import (
    ADDRESS_BYTES,
    MAX_AHEAD,
    MAX_FREE,
    Peers,
    ReaderEnd,
    SharerEnd,
    SlotViews,
    SlotWriter,
)
from fourfold.feed.sharing.shared_reads import Form, Key, Loop, ReaderReads, SharerReads
from fourfold.testing import threads
from fourfold.torch_kit import memory
from fourfold.words.errors import DamagedSample, DataError, PeerError, TaskError
from fourfold.words.mesh import Mesh
from tests.simulated.test_feed_orders import SOURCES

SECONDS = 20.0
MESHES = [mesh for n in (2, 4, 8) for mesh in itertools.product((1, 2, 4), repeat=4) if np.prod(mesh) == n]
ROWS = np.random.default_rng(0).integers(0, 256, (23, 40), dtype=np.uint8)


class Counting:
    """A source that counts what it reads."""

    def __init__(self, source):
        self.source, self.bytes_read = source, 0
        if hasattr(source, "fetch"):
            self.fetch = lambda indices: self._count(len(indices), source.fetch(indices))
        for name in ("sample_order", "shard_sizes"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self._count(1, self.source[index])

    def _count(self, number, value):
        self.bytes_read += number
        return value


class Records:
    """Samples with all that a batch may hold: tensors of several dtypes, an empty one, numbers, text and bytes."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        raise NotImplementedError

    def fetch(self, indices):
        rows = torch.from_numpy(ROWS[list(indices)])
        inputs = {
            "x": rows.to(torch.bfloat16), "f": rows.double() / 7, "b": rows > 100, "none": rows[:, :0],
            "image": rows.reshape(-1, 2, 5, 4).to(memory_format=torch.channels_last),
            "text": [f"{index} é" for index in indices], "bytes": [bytes(row) for row in ROWS[list(indices)]],
            "z": torch.complex(rows.float(), -rows.float()), "nested": ({"n": float("nan"), "i": 2**40}, None),
        }  # fmt: skip
        return inputs, torch.as_tensor(list(indices))


class Counted(IterableDataset[Any]):
    def __iter__(self):
        return iter([(torch.tensor([float(number)]), number) for number in range(23)])


KINDS: dict[str, Any] = {
    **SOURCES,
    "records": (Records, {}),
    "stream": (Counted, {"shuffle": False}),
    "augmented": (lambda: ff.Transformed(list(Counted()), _augment), {}),
    "drawn": (lambda: _Drawing(), {}),
}


def _augment(sample, generator):
    return sample[0] + torch.rand(3, generator=generator), sample[1]


class _Drawing:
    """Samples that draw from NumPy's own generator: they are read on demand."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        with DRAWS:
            return np.random.rand(3), index


DRAWS = threading.Lock()


def dp_index(mesh, rank):
    return Mesh(pp=mesh[0], dp=mesh[1], cp=mesh[2], tp=mesh[3]).coordinates(rank)["dp"]


def same(first, second):
    """Whether two batches are bitwise equal, types and strides included."""
    if isinstance(first, torch.Tensor):
        bits = [each.contiguous().view(-1).view(torch.uint8) if each.numel() else each for each in (first, second)]
        return (first.shape, first.dtype) == (second.shape, second.dtype) and torch.equal(*bits)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return repr(first) == repr(second)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "drawn"])
@given(data=st.data(), seed=st.integers(0, 2**63))
@settings(deadline=None, max_examples=5)
def test_every_rank_gets_the_batches_that_it_would_read_over_any_kill_and_change_of_mesh(kind, data, seed):
    make, options = KINDS[kind]
    options = {**options, "batch_size": 8, "seed": seed}
    state = Feed.single_rank(make(), **options).state
    for _ in range(data.draw(st.integers(1, 2))):  # each process is killed, and the next has another mesh
        mesh, count = data.draw(st.sampled_from(MESHES)), data.draw(st.integers(1, 7))
        size, hosts = int(np.prod(mesh)), data.draw(st.sampled_from([1, 2]))
        counting = [make() if kind in ("stream", "augmented") else Counting(make()) for _ in range(size)]

        def body(comm, mesh=mesh, count=count, state=state, counting=counting):
            feed = Feed.of_data_rank(counting[comm.rank], size=mesh[1], index=dp_index(mesh, comm.rank), **options)
            feed.load_state(state)
            feed.share_reads(comm)
            loop = feed.repeat()
            found = list(itertools.islice(loop, count))
            loop.close()
            return found, feed.state, feed._reads.reads

        results = threads.run(size, body, hosts=hosts)
        for rank, (found, _, _) in enumerate(results):
            alone = Feed.of_data_rank(make(), size=mesh[1], index=dp_index(mesh, rank), **options)
            alone.load_state(state)
            for batch, own in zip(found, itertools.islice(alone.repeat(), count), strict=True):
                assert same(batch, own)
                assert batch.samples.sample_ids() == own.samples.sample_ids()
        host_and_data = {(rank * hosts // size, dp_index(mesh, rank)) for rank in range(size)}
        assert sum(reads for _, _, reads in results) == len(host_and_data)
        read = [getattr(each, "bytes_read", None) for each in counting]
        assert all(not number for number, (_, _, reads) in zip(read, results, strict=True) if not reads)
        assert len({after for _, after, _ in results}) == 1
        state = results[0][1]


def shared_feed(comm, source, **options):
    """A feed of a world in which all ranks share their samples."""
    feed = Feed.single_rank(source, batch_size=4, **options)
    feed.share_reads(comm)
    feed.check_peers = comm.check_peers
    return feed


def test_samples_that_draw_numbers_are_the_same_and_drawn_once():
    def body(comm):
        return [batch[0].tolist() for batch in shared_feed(comm, _Drawing(), seed=3)]

    first, second = threads.run(2, body)
    assert first == second == [batch[0].tolist() for batch in Feed.single_rank(_Drawing(), batch_size=4, seed=3)]


def test_what_a_rank_writes_into_its_batch_the_others_do_not_see():
    source, barrier = [(torch.full((1000,), float(n)), n) for n in range(40)], threading.Barrier(3)

    def body(comm):
        sums = []
        for epoch in range(2):
            for number, (x, _) in enumerate(shared_feed(comm, source, seed=epoch)):
                if (number + comm.rank) % 3 == 0:
                    x.fill_(-1.0)
                barrier.wait(SECONDS)
                sums.append(x.sum().item())
                barrier.wait(SECONDS)
        return sums

    results = threads.run(3, body)
    expected = [
        batch[0].sum().item() for epoch in range(2) for batch in Feed.single_rank(source, batch_size=4, seed=epoch)
    ]
    for number, value in enumerate(expected):
        written = [(number % 10 + rank) % 3 == 0 for rank in range(3)]
        assert [each[number] for each in results] == [-4000.0 if is_written else value for is_written in written]


def test_batches_may_be_kept_and_their_memory_is_used_again_once_they_are_gone():
    source = [(torch.full((20_000,), float(n)), n) for n in range(200)]

    def body(comm):
        feed = shared_feed(comm, source)
        kept = list(feed)
        assert all(x[:, 0].tolist() == targets.tolist() for x, targets in kept)
        del kept
        for _ in range(3):
            for x, targets in feed:
                assert x[:, 0].tolist() == targets.tolist()
        comm.barrier()
        return feed._reads

    writer = threads.run(2, body)[0]._slots
    assert len(writer._slots) < 50 + 20  # the first epoch's, and those that were on their way
    with_memory = [start for start, size in writer._reserved.items() if size]
    assert len(with_memory) <= MAX_FREE + 10


class Failing:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 13:
            raise self.error
        return torch.zeros(3), index


RAISED_AT = f"(test_shared_reads.py, line {Failing.__getitem__.__code__.co_firstlineno + 2})"


@pytest.mark.parametrize(("error", "kind", "text"), [
    (DamagedSample("record 13", "torn"), DamagedSample, "sample record 13 cannot be read: torn"),
    (TaskError("no such task", where="here"), TaskError, "no such task"),
    (ValueError("thirteen"), DataError, f"{RAISED_AT}, on rank 0, which reads for this one too"),
    (StopIteration(), DataError, "StopIteration"),
])  # fmt: skip
def test_an_error_of_the_source_is_raised_on_every_rank(error, kind, text):
    def body(comm):
        try:
            return list(shared_feed(comm, Failing(error), shuffle=False))
        except Exception as caught:
            return caught

    own, told = threads.run(2, body)
    assert isinstance(told, kind)
    assert text in str(told)
    assert isinstance(own, type(told) if kind is not DataError else Exception)
    if isinstance(error, DamagedSample):
        assert (told.key, told.reason, told.where) == (own.key, own.reason, own.where)


def test_damaged_samples_are_left_out_on_every_rank():
    def body(comm):
        feed = shared_feed(comm, Failing(DamagedSample("record 13", "torn")), shuffle=False, bad_samples=1)
        return [(batch[1].tolist(), batch.damaged, batch.samples.left_out) for batch in feed]

    first, second = threads.run(2, body)
    assert first == second
    assert first[3][0] == [12, 14, 15]
    assert second[3][1][0].key == "record 13"


@pytest.mark.parametrize("what", ["an object", "sparse"])
def test_what_processes_cannot_share_each_rank_reads_by_itself_and_the_log_says_so(what, caplog):
    def collate(samples):
        x, y = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
        return (x.to_sparse() if what == "sparse" else {"x": x, "note": object}), y

    loader = DataLoader([(torch.ones(3), n) for n in range(12)], batch_size=4, collate_fn=collate)  # pyright: ignore

    def body(comm):
        feed = shared_feed(comm, loader)
        return [batch[1].tolist() for _ in range(2) for batch in feed], feed._reads.reads

    expected = [
        batch[1].tolist() for feed in [Feed.single_rank(loader, batch_size=4)] for _ in range(2) for batch in feed
    ]
    assert threads.run(2, body) == [(expected, True)] * 2
    assert "each rank reads its batches by itself: they hold" in caplog.text


def test_a_loop_that_is_left_early_does_not_disturb_the_next_ones():
    source = [(torch.tensor([float(n)]), n) for n in range(40)]

    def body(comm):
        feed, found = shared_feed(comm, source, seed=1), []
        for count in (3, 1, 5, 0):
            for _, batch in zip(range(count), feed, strict=False):
                found.append(batch[1].tolist())
            if comm.rank == 0:
                next(iter(feed))  # one rank looks at a batch by itself, and comes back
                feed.load_state(feed.state._replace(position=4 * len(found)))
        return found

    first, second = threads.run(2, body)
    assert (
        first == second == [b[1].tolist() for b in itertools.islice(Feed.single_rank(source, batch_size=4, seed=1), 9)]
    )


def test_ranks_that_need_other_samples_at_one_place_are_told():
    def body(comm):
        feed = Feed.single_rank([(torch.zeros(1), n) for n in range(40)], batch_size=4 + comm.rank)
        feed.share_reads(comm)
        if comm.rank == 0:
            return next(iter(feed)) and ""
        with pytest.raises(TaskError) as caught:
            next(iter(feed))
        return str(caught.value)

    text = threads.run(2, body)[1]
    assert "samples 0 to 4 of 40" in text
    assert "samples 0 to 5 of 40" in text


@pytest.mark.parametrize("kind", ["global", "stream"])
def test_an_evaluation_reads_ahead_and_once(kind):
    counting = [Counting(SOURCES["global"][0]()) for _ in range(4)]

    def body(comm):
        data = open_input(counting[comm.rank] if kind == "global" else Counted(), "valid")
        pieces = EvaluationBatches(data, 6, size=2, index=comm.rank // 2)
        pieces.share_reads(comm)
        return [(each.values[1].tolist(), each.is_empty) for each in pieces.read_ahead(comm.check_peers)]

    results = threads.run(4, body)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert len(results[0]) == len(results[2])
    samples = [number for targets, _ in results[0] + results[2] for number in targets]
    assert sorted(samples) == list(range(35 if kind == "global" else 23))
    if kind == "global":
        assert [source.bytes_read for source in counting] == [17, 0, 18, 0]


# ---- the reader and the sharer as processes --------------------------------------------------------------------------

NUMBERS = Form[torch.Tensor](lambda item: item, lambda item: item)


def loop_of(count, seconds=0.0):
    def read():
        for number in range(count):
            time.sleep(seconds)
            yield torch.full((5000,), float(number))

    return Loop((Key(0, 0, n, n + 1, "numbers") for n in itertools.count()), read, NUMBERS, lambda: True)


def reading_process(handle, connection, *, count, seconds=0.0):
    """The id of a process that reads `count` batches, and then waits."""
    pid = os.fork()
    if pid:
        return pid
    try:
        reads = ReaderReads(handle, ReaderEnd({1: connection}, Peers(0, lambda: None)), 0)
        for item in reads.items(loop_of(count, seconds)):
            del item
        signal.pause()
    finally:
        os._exit(1)


def sharer(handle, connection, pid, start_ticks):
    """What rank 1 has of the process `pid` as rank 0, and a check of whether that has died."""
    comm = Communicator(World(rank=1, size=2), torch.device("cpu"))
    comm._processes = [
        _RankProcess("here", "host-a", pid, start_ticks),
        _RankProcess("here", "host-a", *this_process()),
    ]
    return SharerReads(handle, SharerEnd(connection, 0, Peers(1, comm.check_peers)), 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_is_killed_at_any_moment_is_named_and_what_it_had_read_is_whole(seed):
    random = np.random.default_rng(seed)
    ours, theirs = socket.socketpair()
    handle = memory.create_growing(ADDRESS_BYTES)
    pid = reading_process(os.dup(handle), theirs, count=50, seconds=0.002)
    theirs.close()
    start_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    items = sharer(handle, ours, pid, start_ticks).items(loop_of(50))
    enough, found = int(random.integers(0, 40)), []
    for item in itertools.islice(items, enough):
        found.append(float(item[0]))
        assert torch.equal(item, item[:1].expand(5000))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(PeerError, match=r"rank 0 \(host host-a\) died while rank 1 waited for it"):
        found.extend(float(item[0]) for item in items)
    assert found == list(range(len(found)))
    assert len(found) < 50


def test_a_reader_does_not_run_away_from_a_slow_sharer():
    ours, theirs = socket.socketpair()
    handle = memory.create_growing(ADDRESS_BYTES)
    reads = ReaderReads(os.dup(handle), ReaderEnd({1: theirs}, Peers(0, lambda: None)), 0)
    taken = []
    thread = threading.Thread(target=lambda: [taken.append(1) for _ in reads.items(loop_of(40))], daemon=True)
    thread.start()
    thread.join(0.5)  # as far as it gets alone
    assert len(taken) == MAX_AHEAD
    items = SharerReads(handle, SharerEnd(ours, 0, Peers(1, lambda: None)), 1).items(loop_of(40))
    for number in range(40):
        assert float(next(items)[0]) == number
    thread.join(SECONDS)
    assert len(taken) == 40


def test_a_slot_is_filled_again_only_when_every_rank_has_let_it_go():
    handle = memory.create_growing(ADDRESS_BYTES)
    writer, views = SlotWriter(handle), SlotViews(handle)
    slot, content = writer.take(100, 2)
    content.fill_(7)
    view = views.view(slot, 100)
    tail = view[50:]
    del view
    assert views.take_released() == []
    writer.give_back(slot.start)
    assert writer.take(100, 1)[0] != slot
    del tail
    assert views.take_released() == [slot.start]
    writer.give_back(slot.start)
    assert writer.take(100, 1)[0] == slot


VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary()


def containers(part):
    return st.lists(part, max_size=3) | st.tuples(part, part) | st.dictionaries(st.text(), part, max_size=3)


@given(st.recursive(VALUES, containers, max_leaves=8))
def test_a_batch_is_what_its_tree_makes(batch):
    laid_out = shared_reads.lay_out(batch)
    assert repr(shared_reads.build_tree(laid_out.tree, laid_out.places, torch.empty(0, dtype=torch.uint8))) == repr(
        batch
    )

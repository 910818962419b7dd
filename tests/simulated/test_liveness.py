"""No wait outlasts the rank it waits for."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fourfold.checkpoint.store import CheckpointStore
from fourfold.comm.communicator import Communicator, _RankProcess, host_id
from fourfold.comm.meter import CommMeter
from fourfold.comm.polling import wait_until
from fourfold.environment.processes import process_id, this_process
from fourfold.environment.world import World
from fourfold.feed.feed import Feed
from fourfold.testing import threads
from fourfold.words.errors import PeerError, TrainingError
from fourfold.words.mesh import Mesh
from tests.cases import Case, batches, build_step
from tests.checkpoint_runs import ThreadRun

pytestmark = pytest.mark.usefixtures("without_dry_run")

SECONDS = 20  # far less than a wait's own time limit, far more than a check of the peers takes


@pytest.fixture
def killed_rank() -> Iterator[_RankProcess]:
    """The process of a rank that has been killed and is still a zombie."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed = _RankProcess(host_id(), "somewhere", *process_id(process.pid))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield killed
    process.wait()


def rank_0_with(peer: _RankProcess) -> Communicator:
    """Rank 0 of two; `peer` is rank 1."""
    comm = Communicator(World(rank=0, size=2, local_rank=0, local_size=2), torch.device("cpu"))
    comm._processes = [_RankProcess(host_id(), "here", *this_process()), peer]
    return comm


def test_a_zombie_process_counts_as_dead(killed_rank: _RankProcess) -> None:
    comm = rank_0_with(killed_rank)
    assert [comm.is_peer_dead(rank) for rank in range(2)] == [False, True]
    with pytest.raises(PeerError, match=r"rank 1 \(host somewhere\)"):
        comm.check_peers()


def test_a_reused_pid_counts_as_dead_and_a_rank_of_another_host_as_alive() -> None:
    here = _RankProcess(host_id(), "here", *this_process())
    assert rank_0_with(here._replace(start_ticks=here.start_ticks - 1)).is_peer_dead(1)
    assert not rank_0_with(here._replace(host="another", pid=1, start_ticks=0)).is_peer_dead(1)


def test_a_broken_connection_names_the_dead_rank_and_other_errors_pass_unchanged(killed_rank: _RankProcess) -> None:
    comm = rank_0_with(killed_rank)
    with pytest.raises(PeerError, match=r"rank 1 \(host somewhere\) died"), comm.report_dead_peers():
        raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    with pytest.raises(RuntimeError, match="shapes"), comm.report_dead_peers():
        raise RuntimeError("shapes differ")


class Stuck:
    """A source whose disk does not answer."""

    def __init__(self) -> None:
        self.is_released = threading.Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> None:
        self.is_released.wait(60)
        raise OSError("at last")


def test_a_rank_that_waits_for_data_notices_a_dead_peer(killed_rank: _RankProcess) -> None:
    source, begin = Stuck(), time.monotonic()
    feed = Feed(source, batch_size=2)
    feed.check_peers = rank_0_with(killed_rank).check_peers
    with pytest.raises(PeerError):
        next(iter(feed))
    assert time.monotonic() - begin < SECONDS
    source.is_released.set()


def test_the_writer_does_not_wait_for_the_file_of_a_dead_rank(tmp_path, monkeypatch) -> None:
    def body(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        run.run_steps(0, 2, save_at=(1,))
        if comm.rank == 1:  # as if it had been killed while writing
            monkeypatch.setattr(run.checkpoints._writer, "_write_rank_file", lambda *_: None)
        monkeypatch.setattr(run.step, "peer_is_dead", lambda rank: rank == 1)
        begin = time.monotonic()
        run.run_steps(2, 3, save_at=(3,))
        return run.log.messages, time.monotonic() - begin

    messages, seconds = threads.run(2, body)[0]
    assert seconds < SECONDS
    assert "rank 1 died before it had written its file" in messages[0]
    assert CheckpointStore(tmp_path).steps() == [1]


def test_no_rank_waits_for_one_that_has_left() -> None:
    def body(comm):
        comm.register()
        pair = comm.on_mesh(Mesh(dp=2, tp=2)).along("tp")
        if comm.rank == 3:
            comm.leave()
            comm.leave()  # nothing more
        comm.barrier()
        text = rf"^rank 3 \(host .*\) ended its step with an error while rank {comm.rank} waited for it$"
        for each in (comm, pair):
            if 3 in each.ranks and comm.rank != 3:
                with pytest.raises(PeerError, match=text):
                    each.check_peers()
            else:
                each.check_peers()

    threads.run(4, body)


def test_a_rank_whose_step_fails_leaves() -> None:
    def body(comm):
        left = set()
        comm.leave = lambda: left.add(comm.rank)
        step = build_step(Case(), 1, comm)

        def fail(*_: object) -> None:
            raise ValueError("of the model")

        step.model.register_forward_hook(fail)
        with pytest.raises(ValueError, match="of the model"):
            step(batches(Case())[0])
        for call in (step, step.evaluate):
            with pytest.raises(TrainingError, match="after one that ended with ValueError"):
                call(batches(Case())[0])
        return left

    assert threads.run(1, body) == [{0}]


def test_a_value_counts_though_its_peer_has_ended_since() -> None:
    values = []

    def check(_: float) -> None:
        values.append(1)  # the peer's last act, seen after the wait has looked
        raise PeerError("rank 1 died")

    wait_until(lambda: bool(values), check, CommMeter())
    with pytest.raises(PeerError, match="rank 1 died"):
        wait_until(lambda: False, check, CommMeter())

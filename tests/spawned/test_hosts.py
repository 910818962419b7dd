"""Laws of several hosts, simulated on this machine by network namespaces."""

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fourfold.testing import network_namespaces
from fourfold.testing.network_namespaces import Host, Hosts
from fourfold.testing.oracle import TOLERANCE
from fourfold.testing.process_world import SpawnedWorld
from tests.conftest import ROOT
from tests.ports import free_ports

pytestmark = pytest.mark.hosts
CASES = "tests.spawned.rank_functions"
SECONDS = 30
RATE, HOST = "1gbit", re.escape(socket.gethostname())
ZERO_AND_SHARD = [(0, None), (3, None), (3, 2)]  # zero 3 sends half as much again, unless a host holds all shards
OWNER = """
import subprocess, sys, time
from fourfold.testing.network_namespaces import Hosts
with Hosts(2) as made:
    child = subprocess.Popen(made.hosts[0].command(["sleep", "600"]))
    print(made.hosts[0].name, child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with Hosts(2, rate=RATE) as made:
        yield made


@pytest.fixture(scope="module")
def four_ranks(two) -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(4, root=ROOT, hosts=two)
    yield world
    world.kill()


@pytest.mark.parametrize(("zero", "shard"), ZERO_AND_SHARD)
def test_two_hosts_train_as_the_oracle(four_ranks, zero, shard):
    fields = {"clip": 0.5, "microbatches": 2, "batch_sizes": [12, 12, 3]}
    results = four_ranks.run(f"{CASES}:deviation", zero=zero, shard=shard, **fields)
    assert {result["transport"] for result in results} == {"shared memory + gloo between hosts"}
    assert max(result["deviation"] for result in results) <= TOLERANCE


@pytest.mark.parametrize(("zero", "shard"), ZERO_AND_SHARD)
def test_each_host_sends_the_bytes_of_the_formula(four_ranks, two, zero, shard):
    def sent(steps: int) -> list[int]:
        before = two.sent_bytes()
        (num_bytes, *_) = four_ranks.run(f"{CASES}:wide_steps", steps=steps, zero=zero, shard=shard)
        assert num_bytes == GRADIENT_BYTES
        return [after - first for after, first in zip(two.sent_bytes(), before, strict=True)]

    # The difference leaves out the start, which is the same in both: groups, and the broadcast of the weights.
    sent_bytes = [(more - few) / 2 for more, few in zip(sent(4), sent(2), strict=True)]
    # 2 (H − 1) / H of the gradient, H = 2, and half as much again at zero 3; the tolerance is headers and scalars.
    gathered = zero == 3 and shard is None
    assert sent_bytes == pytest.approx([GRADIENT_BYTES * (1.5 if gathered else 1)] * 2, rel=0.02)


GRADIENT_BYTES = 4 * (1024 * 1024 + 1024)


TASK = """
import torch
import fourfold as ff
from fourfold.trainer import link_watch

link_watch.BEAT_SECONDS = 0.2


class Source:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(512), torch.zeros(512)


def task():
    return ff.Task(
        model=lambda: torch.nn.Linear(512, 512),
        loss=lambda outputs, targets: ((outputs - targets).square().sum(), len(targets)),
        data=lambda: ff.Data(train=Source()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        steps=10**6,
        batch_size=4,
    )
"""
WORDS = ("train", "script.py", "dp=2", "name=first", "checkpoint_every=0", "peer_timeout=3")


@pytest.fixture
def job(two: Hosts, tmp_path) -> Iterator[list[subprocess.Popen[str]]]:
    """A training with one rank on each host."""
    (tmp_path / "script.py").write_text(TASK)
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MASTER_PORT": str(free_ports(1)[0])}
    ranks = []
    for rank in range(2):
        command = two.host_of(rank, 2).command([sys.executable, "-m", "fourfold", *WORDS])
        variables, pipe = {**environ, **two.rank_environ(rank, 2)}, subprocess.PIPE
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=pipe, stderr=pipe, text=True))
    yield ranks
    for each in ranks:
        each.kill()
        each.communicate()
    two.set_link(1, "up")
    two.set_rate(RATE)


def test_a_slow_or_cut_link_is_named_and_only_one_that_stays_cut_ends_the_run(two: Hosts, job, tmp_path) -> None:
    lines = iter(job[0].stdout.readline, "")
    both = rf"rank 0 \(host {HOST}\) and rank 1 \(host {HOST}\)"

    def until(pattern: str) -> None:
        read = []
        assert any(read.append(line) or re.search(pattern, line) for line in lines), read

    def until_a_step_ends() -> None:
        log = tmp_path / "runs" / "first" / "metrics.jsonl"
        before, deadline = log.stat().st_size, time.monotonic() + SECONDS
        while log.stat().st_size == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    until("^step .*/s")
    two.set_rate("1mbit")
    until(f"^{both}: a slow link: both have waited for [12] s in a step")
    two.set_rate(RATE)
    until_a_step_ends()
    two.set_link(1, "down")
    until(f"^{both} have heard nothing of each other for [12] s; the run ends after 3 s")
    two.set_link(1, "up")
    until(f"^{both} hear each other again, after [1-9] s")
    until_a_step_ends()
    two.set_link(1, "down")
    for rank in job:
        _, err = rank.communicate(timeout=SECONDS)
        assert rank.returncode == 75, err
        assert re.search(r"PeerError: rank \d .* and rank \d .* for [34] s \(peer_timeout\)", err), err


def exists(name: str) -> bool:
    return name in network_namespaces._namespaces()


def test_hosts_of_a_killed_owner_are_removed_with_their_processes():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout
    try:
        name, pid = owner.stdout.readline().split()
        network_namespaces.remove_stale()
        assert exists(name)  # its owner is alive
    finally:
        owner.kill()
        owner.wait(SECONDS)
        owner.stdout.close()
    handle = os.pidfd_open(int(pid))
    network_namespaces.remove_stale()
    assert not exists(name)
    assert select.select([handle], [], [], SECONDS)[0]  # the process has ended
    os.close(handle)


def test_hosts_are_removed_after_an_error():
    made = Hosts(2)

    def fail() -> None:
        assert exists(made.hosts[1].name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), made:
        fail()
    assert not exists(made.hosts[1].name)


def test_hosts_that_cannot_be_made_leave_nothing():
    made = Hosts(2, rate="a lot")
    with pytest.raises(network_namespaces.HostsUnavailable, match=r"tc .*need CAP_SYS_ADMIN"):
        made.__enter__()
    assert not any(exists(host.name) for host in made.hosts)


def test_a_link_has_the_requested_rate():
    with Hosts(2, rate="10mbit") as made:
        seconds = send(made.hosts[0], made.hosts[1], num_bytes=1_000_000)
        assert made.sent_bytes()[0] > 1_000_000
    # 0.8 s at 10 Mbit/s, less what fits in the token bucket; without a limit it takes milliseconds.
    assert seconds > 0.4


RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
link, _ = server.accept()
left = int(sys.argv[2])
while left:
    left -= len(link.recv(min(left, 65536)))
link.sendall(b"!")
"""
SEND = """
import socket, sys, time
begin = time.perf_counter()
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
link.sendall(bytes(int(sys.argv[3])))
link.recv(1)
print(time.perf_counter() - begin)
"""


def send(source: Host, target: Host, *, num_bytes: int) -> float:
    """Seconds from one host to the other."""
    receive = target.command([sys.executable, "-c", RECEIVE, target.address, str(num_bytes)])
    receiver = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout
        port = receiver.stdout.readline().strip()
        command = source.command([sys.executable, "-c", SEND, target.address, port, str(num_bytes)])
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout)
    finally:
        receiver.kill()
        receiver.communicate()

"""A feed over a pack, in each order: killed at any moment, with any number of readers, and with damaged records."""

import itertools
import json
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fourfold as ff
from tests.simulated.test_feed_orders import feeds, global_batches

NUM_SAMPLES, BATCH_SIZE, NUM_BATCHES = 61, 5, 30  # more than two epochs
ORDERS: dict[str, dict[str, Any]] = {
    "global": {},
    "in order": {"shuffle": False},
    "windowed": {"order": "windowed", "window": 3},
    "mixed": {},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A pack of several shards, of which the last is smaller."""
    path = tmp_path_factory.mktemp("packs") / "pack"
    samples = [(torch.full((600,), float(number)), number) for number in range(NUM_SAMPLES)]
    ff.pack(samples, path, shard_bytes=10 * 2560)
    sizes = ff.Pack(path).shard_sizes
    assert len(sizes) > 5
    assert sizes[-1] < sizes[0]
    return path


def source(path, order, threads=1) -> Any:
    pack = ff.Pack(path, threads=threads)
    if order != "mixed":
        return pack
    return ff.Mixed({
        "a": ff.Weighted(pack, 2, order="windowed", window=2),
        "b": ff.Weighted(ff.Pack(path, threads=threads), 1, repeat=None),
    })  # fmt: skip


def expected(path, order, seed=0):
    return global_batches(feeds(source(path, order), 1, batch_size=BATCH_SIZE, seed=seed, **ORDERS[order]), NUM_BATCHES)


@pytest.mark.parametrize("order", ORDERS)
@given(threads=st.integers(1, 4), size=st.integers(1, 4), seed=st.integers(0, 2**63))
@settings(deadline=None, max_examples=6)
def test_the_number_of_threads_and_ranks_changes_no_global_batch(path, order, threads, size, seed):
    ranks = feeds(source(path, order, threads), size, batch_size=BATCH_SIZE, seed=seed, **ORDERS[order])
    assert global_batches(ranks, NUM_BATCHES) == expected(path, order, seed)


@pytest.mark.parametrize("order", ["windowed", "mixed"])
def test_the_number_of_workers_changes_no_global_batch_over_a_restart(path, order):
    state, found = None, []
    for workers, count in ((2, 9), (0, 7), (1, NUM_BATCHES - 16)):
        how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(source(path, order), batch_size=BATCH_SIZE, shuffle=True, **how)
        (feed,) = feeds(loader, 1, **ORDERS[order])
        if state is not None:
            feed.load_state_dict(state)
        found += global_batches([feed], count)
        state = feed.state_dict()
    assert found == expected(path, order)


def train_until_killed(path, order, journal, state):
    """In a process: write down each batch and the state after it, until the process is killed."""
    feed = ff.Feed(source(path, order), batch_size=BATCH_SIZE, **ORDERS[order])
    if state is not None:
        feed.load_state_dict(state)
    with journal.open("a") as file:
        for batch in itertools.islice(feed.repeat(), NUM_BATCHES):
            file.write(json.dumps([batch[1].tolist(), feed.state_dict()]) + "\n")
            file.flush()
            time.sleep(0.002)  # a step


def whole_lines(journal):
    """What was written in whole before a kill; what was not is removed."""
    text = journal.read_text() if journal.exists() else ""
    journal.write_text(text[: text.rfind("\n") + 1])
    return [json.loads(line) for line in journal.read_text().splitlines()]


@pytest.mark.parametrize("order", ORDERS)
def test_killed_processes_lose_and_repeat_nothing(path, order, tmp_path):
    journal, random = tmp_path / "journal", np.random.default_rng(0)
    lines, num_kills = [], 0
    while len(lines) < NUM_BATCHES:
        pid = os.fork()
        if not pid:
            try:
                train_until_killed(path, order, journal, lines[-1][1] if lines else None)
            finally:
                os._exit(1)
        enough, given_up = len(lines) + random.integers(0, 12), time.monotonic() + 30
        while journal.exists() and journal.read_text().count("\n") < enough and time.monotonic() < given_up:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        num_kills, lines = num_kills + 1, whole_lines(journal)
    assert num_kills > 2
    assert [batch for batch, _ in lines[:NUM_BATCHES]] == expected(path, order)


@pytest.mark.parametrize("order", ORDERS)
def test_damaged_records_of_a_pack_are_left_out_and_the_others_keep_their_batches(path, order, tmp_path):
    folder, bad = tmp_path / "pack", (3, 17, 60)
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    files = ff.Pack(folder)._files
    for record in files.records(bad):
        shard = int(np.searchsorted(files.ends, record.sample, side="right"))
        with (folder / f"shard-{shard:05}.data").open("r+b") as file:
            file.seek(record.offset + 5)
            file.write(b"\xff")
    per_epoch = -(-source(path, order).sample_order.num_positions // BATCH_SIZE) if order == "mixed" else 13
    whole = expected(path, order)[:per_epoch]
    feed = ff.Feed(source(folder, order), batch_size=BATCH_SIZE, bad_samples=6, **ORDERS[order])
    batches = list(feed)
    assert [batch[1].tolist() for batch in batches] == [[n for n in each if n not in bad] for each in whole]
    left_out = [record for batch in batches for record in batch.damaged]
    assert len(left_out) == sum(number in bad for each in whole for number in each) > 0
    assert all("record" in record.key and "xxh3_64" in record.reason for record in left_out)
    assert feed.state_dict()["epoch"] == 1

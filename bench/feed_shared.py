"""Shared reads: two ranks with cp = 2 that need the same batches, when each reads them and when one reads for both.

    PYTHONPATH=src:. python -m bench.feed shared [--rounds 7] [--samples 4000] [--compute-ms 5]

A step takes a batch of 64 records of 114,688 B from a pack in the page cache, computes for some milliseconds (products
of matrices, one thread a rank) on what it reads once, and meets the other rank at a barrier, as the collectives of a
step do. Both ways take turns, an epoch each.
Law: both ways see the same batches; a ratio is a median over rounds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fourfold as ff
from bench.measurement import MB, describe_machine, format_table

RECORD_BYTES, BATCH = 114_688, 64


def compute(seconds: float, matrix: torch.Tensor) -> None:
    """Use this rank's processor for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        torch.mm(matrix, matrix)


def epoch(feed: ff.Feed, seconds: float, matrix: torch.Tensor) -> list[float]:
    """Of an epoch: the mean seconds of its steps but the first, and of their waits; the bytes read; a sum of the
    batches; processor seconds a step, the barrier's included.
    """
    times, waits, checksum, before = [], [], 0, feed.bytes_read or 0
    cpu = time.process_time()
    began = time.perf_counter()
    for inputs, _ in feed:
        waits.append(time.perf_counter() - began)
        checksum += int(inputs[:, ::4096].sum())
        compute(seconds, matrix)
        dist.barrier()
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    cpu = (time.process_time() - cpu) / len(times)
    return [statistics.mean(times[1:]), statistics.mean(waits[1:]), (feed.bytes_read or 0) - before, checksum, cpu]


def measure(path: str, rounds: int, seconds: float) -> list[Any]:
    """By round and way, what each rank has measured."""
    torch.set_num_threads(1)
    ff.world().barrier()  # joins the ranks
    matrix, found = torch.randn(256, 256), []
    feeds = [ff.Feed(ff.Pack(path), ff.Plan(cp=2), batch_size=BATCH, shared=shared) for shared in (False, True)]
    for number in range(rounds + 1):
        row = []
        for feed in feeds:
            own = torch.tensor(epoch(feed, seconds, matrix), dtype=torch.float64)
            by_rank = [torch.zeros_like(own) for _ in range(2)]
            dist.all_gather(by_rank, own)
            row.append([each.tolist() for each in by_rank])
        assert len({ranks[3] for each in row for ranks in each}) == 1, "the batches differ"
        found += [row] if number else []  # the first epoch fills caches
    return found


def run_shared(options: argparse.Namespace) -> None:
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        block = torch.randint(0, 256, (512, RECORD_BYTES), dtype=torch.uint8)
        ff.pack([(block[number % 512], number) for number in range(options.samples)], Path(name) / "pack")
        for seconds in (0.0, options.compute_ms / 1000):
            found = ff.launch(measure, f"{name}/pack", options.rounds, seconds, n=2)
            report(found, seconds)


def report(found: list[Any], seconds: float) -> None:
    rows = [[f"compute {1000 * seconds:.0f} ms", "step, ms", "wait, ms", "CPU ms, both", "MB read, 0", "MB read, 1"]]
    for shared, name in enumerate(("each reads", "one reads")):
        ranks = [row[shared] for row in found]
        step, wait = (statistics.median(max(rank[at] for rank in each) for each in ranks) for at in (0, 1))
        read = [f"{statistics.median(each[rank][2] for each in ranks) / MB:.0f}" for rank in range(2)]
        cpu = 1000 * statistics.median(sum(rank[4] for rank in each) for each in ranks)
        rows.append([name, f"{1000 * step:.2f}", f"{1000 * wait:.2f}", f"{cpu:.2f}", *read])
    print(format_table(rows))
    steps = [[max(rank[0] for rank in row[shared]) for row in found] for shared in (1, 0)]
    ratio = statistics.median(a / b for a, b in zip(*steps, strict=True))
    print(f"step when one reads / when each reads: {ratio:.2f}")

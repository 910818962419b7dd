"""Loopback: what a message costs between two processes of this host, over gloo as ranks use it.

child  a fork of this process, which has torch already: starting two afresh would take seconds
Law: when `measure` returns, neither child is left, whatever happened.
"""

import contextlib
import json
import os
import select
import signal
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from fourfold.doctor.facts import GlooTiming

TIMEOUT_SECONDS = 3.0
NUM_SCALARS, NUM_BULKS = 50, 5
BULK_ELEMENTS = 2**20  # float32: 4 MiB, a bucket of the default size


def measure_gloo() -> GlooTiming:
    """Reduce between two processes. To be called before this process has used torch's threads."""
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        reading, writing = os.pipe()
        children = [_fork_rank(rank, Path(folder) / "store", writing) for rank in range(2)]
        os.close(writing)
        try:
            return _read_result(reading)
        finally:
            os.close(reading)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _read_result(reading: int) -> GlooTiming:
    ready, _, _ = select.select([reading], [], [], TIMEOUT_SECONDS)
    if not ready:
        return GlooTiming(problem=f"no answer over gloo within {TIMEOUT_SECONDS:.0f} s")
    # Written at once and shorter than a pipe's atomic write: all of the first answer, or nothing.
    line = os.read(reading, 4096).partition(b"\n")[0]
    return GlooTiming(**json.loads(line)) if line else GlooTiming(problem="the processes ended without an answer")


def _fork_rank(rank: int, store: Path, writing: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's own warnings
        told = _time_all_reduce(rank, store)
        if rank == 0:
            os.write(writing, json.dumps(told).encode() + b"\n")
            signal.pause()  # The other rank may still be in its last reduction.
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        os.write(writing, json.dumps({"problem": f"gloo: {text[:300]}"}).encode() + b"\n")
    finally:
        os._exit(0)  # Nothing of the parent's is to be flushed or closed twice.


def _time_all_reduce(rank: int, store: Path) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # the threads of the parent are not in the fork
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    value, bulk = torch.zeros(1), torch.zeros(BULK_ELEMENTS)

    def seconds(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        return time.perf_counter() - begin

    dist.all_reduce(value)
    values = [seconds(value) for _ in range(NUM_SCALARS)]
    bulks = [seconds(bulk) for _ in range(NUM_BULKS)]
    return {"bulk_seconds": statistics.median(bulks), "value_seconds": statistics.median(values)}

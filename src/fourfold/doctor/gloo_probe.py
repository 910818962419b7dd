"""Gloo probe: how long an all-reduce takes between two processes of this host, over gloo as ranks use it.

child  a fork of this process, which has imported torch already: starting two new processes would take seconds
Law: when `measure_gloo` returns, neither child is left, whatever happened.
"""

import contextlib
import json
import os
import select
import signal
import statistics
import time
from datetime import timedelta
from pathlib import Path

from fourfold.doctor.machine_probe import GlooTiming
from fourfold.environment.temporary_folder import temporary_folder

TIMEOUT_SECONDS = 3.0
NUM_SCALARS, NUM_BULKS = 50, 5
BULK_ELEMENTS = 2**20  # float32: 4 MiB, a bucket of the default size


def measure_gloo() -> GlooTiming:
    """All-reduce between two forks. Call it before this process has used torch's threads."""
    with temporary_folder() as folder:
        read_fd, write_fd = os.pipe()
        children = [_fork_rank(rank, folder / "store", write_fd) for rank in range(2)]
        os.close(write_fd)
        try:
            return _read_result(read_fd)
        finally:
            os.close(read_fd)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _read_result(read_fd: int) -> GlooTiming:
    ready, _, _ = select.select([read_fd], [], [], TIMEOUT_SECONDS)
    if not ready:
        return GlooTiming(problem=f"no answer over gloo within {TIMEOUT_SECONDS:.0f} s")
    # The child writes its answer at once, short enough for a pipe's atomic write: all of it arrives, or nothing.
    line = os.read(read_fd, 4096).partition(b"\n")[0]
    return GlooTiming(**json.loads(line)) if line else GlooTiming(problem="the processes ended without an answer")


def _fork_rank(rank: int, store: Path, write_fd: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's own warnings
        timing = _time_all_reduce(rank, store)
        if rank == 0:
            os.write(write_fd, json.dumps(timing).encode() + b"\n")
            signal.pause()  # The other rank may still be in its last reduction.
    except Exception as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        os.write(write_fd, json.dumps({"problem": f"gloo: {text[:300]}"}).encode() + b"\n")
    finally:
        os._exit(0)  # without flushing or closing what the parent will flush and close


def _time_all_reduce(rank: int, store: Path) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # a fork does not have the threads of its parent
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

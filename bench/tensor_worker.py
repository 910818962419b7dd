"""Tensor worker: one rank of a measurement of the tensor axis.

way   how a sum is made: by Fourfold's group, by the same from the buffer where a product was written, or by gloo
job   a way, the bytes of the tensor, and how many sums in a row; or a row product, its sizes and its chunks
Law: ranks begin together. All ways give the same sum, which is checked after every job.

    python -m bench.tensor_worker CONFIGURATION CASE LIMIT RENDEZVOUS      (RANK and WORLD_SIZE in the environment)
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.axes.tensor.work.split_region import RowProduct
from fourfold.comm import init
from fourfold.comm import tensor_group as tensor_groups
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import TensorGroup, make_tensor_group
from fourfold.torch_kit.memory import keep_freed_memory

SHARED, BUFFER, GLOO = "shared memory", "from the buffer", "gloo"


def all_reduce_by(way: str, group: TensorGroup, tensor: Tensor) -> Callable[[], Tensor]:
    """A function that sums a tensor over the ranks once; of the buffer, its values are those that lie there."""
    if way == GLOO:

        def by_gloo() -> Tensor:
            dist.all_reduce(tensor)
            return tensor

        return by_gloo
    if way == BUFFER:
        return lambda: group.all_reduce(group.buffer(tensor.shape, tensor.dtype))
    return lambda: group.all_reduce(tensor)


def measure_all_reduce(group: TensorGroup, job: dict[str, Any]) -> dict[str, float]:
    """Seconds of one sum, of several in a row; and an element of the last one to check."""
    tensor = torch.zeros(job["bytes"] // 4)
    for _ in range(2):  # both areas of the buffer
        group.all_reduce(group.buffer(tensor.shape, tensor.dtype).zero_())
    sum_once = all_reduce_by(job["way"], group, tensor)
    sum_once()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(job["times"]):
        sum_once()
    seconds = (time.perf_counter() - begin) / job["times"]
    tensor.fill_(1.0 + group.index)
    if job["way"] == BUFFER:
        group.buffer(tensor.shape, tensor.dtype).copy_(tensor)
    return {"seconds": seconds, "sum": sum_once()[-1].item()}


def measure_product(group: TensorGroup, job: dict[str, Any]) -> dict[str, float]:
    """Seconds of a row product with its sum, cut into chunks; and an element of the sum to check."""
    tensor_groups.MIN_CHUNK_BYTES, tensor_groups.MAX_CHUNKS = 1, job["chunks"]
    input, weight = (
        torch.ones(job["rows"], job["features"]),
        torch.full((job["out"], job["features"]), 1.0 + group.index),
    )
    total = RowProduct.apply(input, weight, group)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(job["times"]):
        total = RowProduct.apply(input, weight, group)
    return {"seconds": (time.perf_counter() - begin) / job["times"], "sum": total[-1, -1].item()}


def main(answers: TextIO) -> None:
    limit, rendezvous = int(sys.argv[3]), sys.argv[4]
    signal.alarm(limit)
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    choice = "gloo" if sys.argv[1] == GLOO else "shared"
    group = make_tensor_group(init.init_communicator(), "tensor", CommMeter(), choice=choice)
    _reply(answers, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _reply(answers, measure_product(group, job) if "chunks" in job else measure_all_reduce(group, job))
    os._exit(0)  # Skips the shutdown of the process group: another rank may be gone already.


def _reply(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.stdout)

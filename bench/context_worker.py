"""One rank of the context axis under measurement: attention, forward and backward, in the layout of each job.

layout  ring and transport: "zigzag shared", "gather gloo"; or "alone", rank 0 with the full sequence
Law: ranks begin together. All layouts compute the same, so their sums are compared.

    python -m bench.context_worker CONFIGURATION CASE LIMIT RENDEZVOUS      (RANK and WORLD_SIZE in the environment)
"""

import json
import os
import signal
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.axes.context.rules.layout import token_positions
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup, connect_context
from fourfold.comm import init
from fourfold.comm.channel import Channel, MessageChannel
from fourfold.comm.meter import CommMeter
from fourfold.torch_kit.memory import keep_freed_memory

ALONE = "alone"


class Axes:
    """All context groups of this rank, made when first used."""

    def __init__(self) -> None:
        self._comm, self._axes, self.meter = init.init_communicator(), {}, CommMeter()

    def axis(self, layout: str) -> ContextGroup:
        if layout not in self._axes:
            ring, choice = layout.split()
            ulysses = self._comm.size if ring == "ulysses" else 1
            ring = "plain" if ring == "ulysses" else ring
            self._axes[layout] = connect_context(self._comm, self.meter, ring=ring, ulysses=ulysses, transport=choice)
        return self._axes[layout]

    def single_rank(self) -> ContextGroup:
        return ContextGroup(MessageChannel(self.meter), MessageChannel(self.meter))


def make_tensors(job: dict[str, Any]) -> list[Tensor]:
    """q, k, v and the upstream gradient of the full sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, job["heads"], job["length"], job["size"]
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def measure_attention(axes: Axes, job: dict[str, Any]) -> dict[str, float]:
    """Wall time, CPU time and waiting time of one forward and backward, in seconds; and sums to compare."""
    rank = dist.get_rank()
    is_sequence_split = job["layout"] != ALONE
    axis = axes.axis(job["layout"]) if is_sequence_split else axes.single_rank()
    *qkv, grad_out = make_tensors(job)
    if is_sequence_split:
        local_positions = torch.tensor(token_positions(axis.local_token_ranges(job["length"])))
        *qkv, grad_out = (tensor[:, :, local_positions] for tensor in (*qkv, grad_out))
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    dist.barrier()
    waited, begin, used = axes.meter.waiting_seconds, time.perf_counter(), time.thread_time()
    seconds = 0.0
    if is_sequence_split or rank == 0:
        out = context_attention(q, k, v, axis, is_causal=job["causal"])
        out.backward(grad_out)
        seconds = time.perf_counter() - begin
        used = time.thread_time() - used
        sums = [tensor.double().square().sum().item() for tensor in (out, q.grad, k.grad, v.grad) if tensor is not None]
    else:
        used, sums = 0.0, [0.0] * 4
    dist.barrier()
    times = {"seconds": seconds, "processor": used, "waited": axes.meter.waiting_seconds - waited}
    return times | dict(zip("oqkv", sums, strict=True))


def measure_exchange(axes: Axes, job: dict[str, Any]) -> dict[str, float]:
    """Seconds for all exchanges of a layer around the ring, with nothing to compute."""
    axis = axes.axis(job["layout"])
    block = torch.randn(1, job["heads"], job["length"] // axis.size, 2 * job["size"])
    dist.barrier()
    begin = time.perf_counter()
    _iterate_blocks(axis.ring_group, block)
    carry = axis.ring_group.make_accumulator(block.numel(), block.dtype, block.device)
    for hop, _ in enumerate(axis.ring_group.iterate_blocks([block])):
        if hop:
            carry.receive().add_(1.0)
            carry.send()
    carry.result()
    seconds = time.perf_counter() - begin
    dist.barrier()
    return {"seconds": seconds}


def _iterate_blocks(link: Channel, block: Tensor) -> None:
    for _ in link.iterate_blocks([block]):
        pass


def main(answers: TextIO) -> None:
    limit, rendezvous = int(sys.argv[3]), sys.argv[4]
    signal.alarm(limit)
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    axes = Axes()
    _reply(answers, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _reply(answers, (measure_exchange if job.get("exchange") else measure_attention)(axes, job))
    os._exit(0)  # Skips the shutdown of the process group: another rank may be gone already.


def _reply(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.stdout)

"""Edges over process groups: gloo between processes, NCCL on GPUs.

Law: a header, then each tensor of a message as bytes, in order; sender and receiver alone are in the group. A received
tensor lies in a buffer that is used again once nothing reads it: there are as many as the schedule has in flight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.parts.comm.collectives import Work
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.edge.message import TensorSpec, decode, encode, specs
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.memory import BufferPool
from fourfold.words.errors import Problem, TaskError

HEADER_WORDS = 128


class ProcessGroupSender:
    """See `SendingEdge`. `receiver`: its index in the communicator. Making it is collective between the two."""

    def __init__(self, comm: Communicator, receiver: int, meter: CommMeter, purpose: str) -> None:
        self.name = "NCCL" if comm.device.type == "cuda" else "gloo"
        self._comm, self._meter, self._receiver = comm, meter, receiver
        self._group = comm.get_group([comm.rank, receiver], purpose)
        self._pending: list[tuple[Work, Tensor]] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        words = encode(specs(tensors))
        if len(words) > HEADER_WORDS:
            got = f"a message of {len(tensors)} tensors between two stages"
            raise TaskError(Problem(got, f"at most {HEADER_WORDS // 8} tensors"), where="the pipeline")
        header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        header[: len(words)] = torch.tensor(words)
        self._pending = [each for each in self._pending if not each[0].is_completed()]
        for tensor in (header.to(self._comm.device), *tensors):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            if flat.numel():
                self._meter.sent_bytes += flat.numel()
                with self._comm.report_dead_peers():
                    self._pending.append((self._group.send(flat, self._receiver), flat))

    def finish(self) -> None:
        with self._meter.timed(), self._comm.report_dead_peers():
            for work, _ in self._pending:
                work.wait()
        self._pending = []


class ProcessGroupReceiver:
    """See `ReceivingEdge`. `sender`: its index in the communicator. Making it is collective between the two."""

    def __init__(self, comm: Communicator, sender: int, meter: CommMeter, purpose: str) -> None:
        self.name = "NCCL" if comm.device.type == "cuda" else "gloo"
        self._comm, self._meter, self._sender = comm, meter, sender
        self._group = comm.get_group([sender, comm.rank], purpose)
        self.buffers = BufferPool()

    def receive(self) -> list[Tensor]:
        header = torch.zeros(HEADER_WORDS, dtype=torch.int64, device=self._comm.device)
        self._receive(header)
        tensors = []
        for spec in decode(header.tolist()):
            tensor = self._room(spec)
            self._receive(tensor)
            tensors.append(tensor.requires_grad_(spec.needs_gradient))
        return tensors

    def _room(self, spec: TensorSpec) -> Tensor:
        if not spec.num_elements:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._comm.device)
        return self.buffers.acquire(spec.num_elements, spec.dtype, self._comm.device).view(spec.shape)

    def _receive(self, tensor: Tensor) -> None:
        flat = tensor.view(-1).view(torch.uint8)
        if flat.numel():
            with self._meter.timed(), self._comm.report_dead_peers():
                self._group.receive(flat, self._sender)

"""Messages between the ranks of a ring over a process group: gloo between processes, NCCL on GPUs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.parts.comm.collectives import all_gather
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.meter import CommMeter
from fourfold.parts.comm.ring.p2p import PendingRecv


class ProcessGroupChannel:
    """See `P2PChannel`. Collective among the members."""

    def __init__(self, comm: Communicator, members: Sequence[int], purpose: str, meter: CommMeter) -> None:
        self.meter, self._communicator, self._group = meter, comm, comm.process_group_getter(members, purpose)
        self.name = "NCCL" if comm.device.type == "cuda" else "gloo"
        self.size = len(members)
        self.index = list(members).index(comm.rank)
        neighbours = (members[(self.index + step) % self.size] for step in (1, -1))
        self._right_rank, self._left_rank = (comm.ranks[neighbour] for neighbour in neighbours)

    def send_right_recv_left(self, flat: Tensor, tag: int) -> PendingRecv:
        received = torch.empty_like(flat)
        self.meter.sent_bytes += flat.numel() * flat.element_size()
        operations = [
            dist.P2POp(dist.isend, flat, self._right_rank, group=self._group(), tag=tag),
            dist.P2POp(dist.irecv, received, self._left_rank, group=self._group(), tag=tag),
        ]
        with self._communicator.report_dead_peers():
            works = dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            with self.meter.timed(), self._communicator.report_dead_peers():
                for work in works:
                    work.wait()
            return received

        return wait

    def all_gather(self, flat: Tensor) -> Tensor:
        gathered = flat.new_empty(self.size, flat.numel())
        self.meter.sent_bytes += (self.size - 1) * flat.numel() * flat.element_size()
        with self.meter.timed(), self._communicator.report_dead_peers():
            all_gather(gathered.view(-1), flat, group=self._group())
        return gathered

    def all_to_all(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        self.meter.sent_bytes += (self.size - 1) * parts[0].numel() * parts.element_size()
        with self.meter.timed(), self._communicator.report_dead_peers():
            dist.all_to_all_single(received, parts, group=self._group())
        return received

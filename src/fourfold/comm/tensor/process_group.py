"""Tensor group over a process group: gloo between processes of any hosts, NCCL between GPUs.

Law: all ranks get the same bits. A ring all-reduce, gloo's and NCCL's, finishes each segment on one rank and copies it
to the others. Where ranks add by themselves, they do so in rank order.

gloo rounds sums of half precision at each rank that it passes. So with more than two ranks they are exchanged and added
here, which sends the same bytes. Maxima are gathered: gloo's and NCCL's may lose a NaN.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.comm.collectives import Work
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor.protocol import HALF, add_parts, compare_calls, max_parts
from fourfold.words.layout import Change, collective_sent_bytes

# A chunk's latency must be small beside its transfer. Measured: `docs/measured-notes.md`, "Chunks of row products".
MIN_CHUNK_BYTES = 2**20
MAX_CHUNKS = 4


class TensorGroupOverProcessGroup:
    """See `TensorGroup`. Made collectively by the ranks of `comm`, which are its ranks."""

    def __init__(self, comm: Communicator, purpose: str, meter: CommMeter) -> None:
        self.name = "NCCL" if comm.device.type == "cuda" else "gloo"
        self.size, self.index, self.meter, self._comm = comm.size, comm.rank, meter, comm
        self._group = comm.get_group(range(comm.size), purpose)
        self._is_busy = False

    def meet(self, call: str) -> None:
        compare_calls(self, self._comm, call)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._comm.device)

    def num_chunks(self, num_bytes: int) -> int:
        return max(1, min(MAX_CHUNKS, num_bytes // MIN_CHUNK_BYTES))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.all_reduce_async(tensor)()

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        total = tensor.detach().contiguous()
        result = tensor if tensor.is_contiguous() else total
        if total.numel() == 0:
            return lambda: result
        flat = total.view(-1)
        if flat.dtype in HALF and self.size > 2 and flat.device.type == "cpu":
            return lambda: self._add_rounding_once(flat, result)
        wait = self._begin(Change.ALL_REDUCE, flat.nbytes, lambda: self._group.all_reduce(flat))

        def finish() -> Tensor:
            wait()
            return result

        return finish

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        parts = self._gather(tensor)
        out = torch.empty_like(parts[0])
        max_parts(parts.unbind(), out)
        return out

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        parts = self._gather(tensor)
        return torch.cat(list(parts.unbind()), dim) if dim % tensor.ndim else parts.flatten(0, 1)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        assert tensor.shape[dim] % self.size == 0, f"{self.size} ranks do not divide dim {dim} of {list(tensor.shape)}"
        parts = torch.stack(tensor.detach().chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        self._reduce_scatter(parts.view(-1), out.view(-1))
        return out

    # ---- messages ------------------------------------------------------------------------------------

    def _gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]"""
        shard = tensor.detach().contiguous().view(-1)
        gathered = shard.new_empty(self.size * shard.numel())
        if shard.numel():
            self._begin(Change.ALL_GATHER, gathered.nbytes, lambda: self._group.all_gather(gathered, shard))()
        return gathered.view(self.size, *tensor.shape)

    def _reduce_scatter(self, flat: Tensor, out: Tensor) -> None:
        """Into `out`: this rank's part of the sum of `flat`."""
        if flat.numel() == 0:
            return
        if flat.device.type == "cuda":
            self._begin(Change.REDUCE_SCATTER, flat.nbytes, lambda: self._group.reduce_scatter(out, flat))()
            return
        received = torch.empty_like(flat)
        self._begin(Change.REDUCE_SCATTER, flat.nbytes, lambda: self._group.all_to_all(received, flat))()
        add_parts(received.view(self.size, -1).unbind(), out)

    def _add_rounding_once(self, flat: Tensor, result: Tensor) -> Tensor:
        length = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, self.size * length - flat.numel()))
        own = flat.new_empty(length)
        self._reduce_scatter(padded, own)
        flat.copy_(self._gather(own).view(-1)[: flat.numel()])
        return result

    def _begin(self, collective: Change, whole_bytes: int, begin: Callable[[], Work]) -> Callable[[], None]:
        """Begin a collective; the returned function waits for it. `whole_bytes`: of a whole tensor, as in a layout."""
        assert not self._is_busy, "a collective has begun and not ended"
        self._is_busy = True
        self.meter.sent_bytes += collective_sent_bytes(collective, whole_bytes=whole_bytes, size=self.size)
        end_span = self.meter.recorder.sending(collective)
        with self._comm.report_dead_peers():
            work = begin()

        def wait() -> None:
            with self.meter.timed(), self._comm.report_dead_peers():
                work.wait()
            self._is_busy = False
            end_span()

        return wait

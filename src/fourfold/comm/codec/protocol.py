"""The codec protocol: how a codec and a transport exchange the messages of one bucket.

message    a flat tensor, of the same length and dtype on every rank, and how the ranks' messages are combined
reduction  a generator: it yields messages, is sent what they were combined to, and leaves the sum in the flat
residual   what a rank has not sent yet; error feedback adds it to the next gradient
Law: from the same messages every rank computes the same bits, whatever its own residual is.
Law: only the sum of the ranks' residuals means something to other ranks, so it stays the same on any number of ranks.
"""

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.plan.codec import CodecRound, CodecSpec, Combine, Shapes, codec_rounds, unpadded_length
from fourfold.torch_kit import memory
from fourfold.torch_kit.mixed_precision import accumulation_dtype, bucket_dtype
from fourfold.torch_kit.tensor_reader import TensorReader


class Message(NamedTuple):
    """`payload` is the codec's own buffer. It is good until the generator goes on, and a transport may sum into it."""

    payload: Tensor
    combine: Combine


CodecReduction = Generator[Message, Sequence[Tensor], None]
"""A gathered message is answered with every rank's message in rank order, a summed one with the sum alone."""


class SavedRows(NamedTuple):
    """One tensor of a codec's state as all ranks of an earlier run saved it, and this rank of the run that loads it."""

    rows: Sequence[TensorReader]
    """By rank that saved, each read when it is needed; empty if it was not saved."""
    rank: int
    size: int

    def local_row(self, num_elements: int) -> Tensor | None:
        """What this rank saved itself; None if other ranks saved it, or it had another length."""
        return self.row(self.rank, num_elements) if len(self.rows) == self.size else None

    def row(self, rank: int, num_elements: int) -> Tensor | None:
        """What a rank saved, flat; None if no rank saved any, or it had another length."""
        if not self.rows or math.prod(self.rows[rank].shape) != num_elements:
            return None
        return self.rows[rank].read(0, num_elements)


class Codec(Protocol):
    """One bucket's codec on one rank."""

    rounds: tuple[CodecRound, ...]
    message_dtype: torch.dtype
    num_elements: int
    """Elements of the bucket without its padding."""

    @property
    def residual(self) -> Tensor | None:
        """[num_elements] what this rank has not sent yet, float32 or wider; None for a codec that remembers nothing."""
        ...

    def reduce(self, flat: Tensor) -> CodecReduction:
        """Turn this rank's addend `flat` [num_elements] into the sum over ranks of what each of them has sent."""
        ...

    def scale_residual(self, factor: float) -> None:
        """Gradients have another unit from now on: multiply what is remembered."""
        ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What this rank remembers, by parameter and key: the flat tensors themselves, no copies.

        The keys are those of `remembers` in `plan.codec.CODECS`.
        """
        ...

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        """Write into `out`, a tensor of `state_tensors`, what this rank continues from; leave it if nothing fits."""
        ...


class GatheredCodec(Protocol):
    """A codec whose messages are gathered: each is readable by itself, and the sum of all is what was sent."""

    def encode(self, flat: Tensor) -> Tensor:
        """This rank's message; what it leaves out goes into the residual. `flat` is only read."""
        ...

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        """Add what one rank has sent to `out` [num_elements]."""
        ...


@torch.no_grad()
def reduce_by_gather(codec: GatheredCodec, flat: Tensor) -> CodecReduction:
    """The reduction of a gathered codec: messages are summed in rank order, as a dense reduction would."""
    payloads = yield Message(codec.encode(flat), Combine.GATHER)
    flat.zero_()
    for payload in payloads:
        codec.decode_add(payload, flat)


# ---- residual --------------------------------------------------------------------------------------------------------

RESIDUAL_KEY = "remainder"
"""The key of the residual in a codec's state, and in checkpoints."""


class ResidualCodec:
    """The base of `Codec`s that remember a residual: four of them would repeat it.

    A codec that remembers more extends the last three methods.
    """

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self.num_elements = codec_rounds(spec, bucket, shapes), unpadded_length(bucket)
        self._bucket, dtype = bucket, accumulation_dtype(bucket_dtype(bucket))
        self.residual: Tensor = memory.allocate_private(self.num_elements, dtype, device)

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {slot.name: {RESIDUAL_KEY: self.residual[slot.start : slot.stop]} for slot in self._bucket.slots}

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        """Each rank continues from its own residual. On another number of ranks each takes an equal part of the sum."""
        assert key == RESIDUAL_KEY
        if (row := saved.local_row(out.numel())) is not None:
            out.copy_(row)
            return
        total = torch.zeros(out.numel(), dtype=saved.rows[0].dtype if saved.rows else out.dtype)
        for each in saved.rows:
            total += each.read(0, out.numel())
        out.copy_(total / saved.size)

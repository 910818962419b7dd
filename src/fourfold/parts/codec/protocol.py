"""Talk: how a codec and a transport speak of one bucket.

message  a flat tensor, of the same length and dtype on every rank, and how it meets the others
talk     a generator: it yields messages, is sent what they have become, and leaves the sum in the flat
Law: with the same messages every rank leaves the same bits in the flat, whatever the rank remembers for itself.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.plan.codec import CodecRound, Combine
from fourfold.plan.data.buckets import Bucket


class Message(NamedTuple):
    """`payload` is the codec's own buffer, good until the talk goes on; a transport may sum into it."""

    payload: Tensor
    combine: Combine


CodecReduction = Generator[Message, Sequence[Tensor], None]
"""It is sent every rank's message in rank order where they are gathered, and the sum alone where they are summed."""


class Codec(Protocol):
    """One bucket's codec on one rank."""

    rounds: tuple[CodecRound, ...]
    message_dtype: torch.dtype
    num_elements: int
    """Elements of the bucket, its padding left out."""

    @property
    def residual(self) -> Tensor | None:
        """[length] what this rank has not sent yet, float32 or wider; None where nothing is remembered."""
        ...

    def reduce(self, flat: Tensor) -> CodecReduction:
        """Turn this rank's addend `flat` [length] into the sum over ranks of what each of them has sent."""
        ...

    def scale_residual(self, factor: float) -> None:
        """The gradient is from now on measured in another unit: multiply what is remembered."""
        ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What this rank remembers, by parameter and key: the living tensors, flat, so that they can be put back.

        "remainder" [elements of the parameter]; the other keys are the codec's own.
        """
        ...


class GatheredCodec(Protocol):
    """A codec whose messages are gathered: each can be read on its own, and what was sent is the sum of them."""

    def encode(self, flat: Tensor) -> Tensor:
        """The message of this rank, which remembers what it leaves out. `flat` is only read."""
        ...

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        """Add what one rank has sent to `out` [length]."""
        ...


@torch.no_grad()
def reduce_by_gather(codec: GatheredCodec, flat: Tensor) -> CodecReduction:
    """The talk of a codec whose messages are gathered: summed in rank order, as a dense reduction would."""
    everyone = yield Message(codec.encode(flat), Combine.GATHER)
    flat.zero_()
    for payload in everyone:
        codec.decode_add(payload, flat)


def bucket_dtype(bucket: Bucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)


def accumulation_dtype(bucket: Bucket) -> torch.dtype:
    """What remainders are kept in; see `plan.codec.work_bytes`."""
    return torch.promote_types(bucket_dtype(bucket), torch.float32)


def residual_by_param(bucket: Bucket, flat: Tensor) -> dict[str, dict[str, Tensor]]:
    """A remainder [length] as `state` gives it."""
    return {slot.name: {"remainder": flat[slot.start : slot.stop]} for slot in bucket.slots}

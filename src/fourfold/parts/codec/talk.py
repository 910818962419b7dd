"""Talk: how a codec and a transport speak of one bucket.

message  a flat tensor, of the same length and dtype on every rank, and how it meets the others
talk     a generator: it yields messages, is sent what they have become, and leaves the sum in the flat
Law: with the same messages every rank leaves the same bits in the flat, whatever the rank remembers for itself.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.plan.codec import Meet, Round
from fourfold.plan.data import Bucket


class Message(NamedTuple):
    """`payload` is the codec's own buffer, good until the talk goes on; a transport may sum into it."""

    payload: Tensor
    meet: Meet


Talk = Generator[Message, Sequence[Tensor], None]
"""It is sent every rank's message in rank order where they are gathered, and the sum alone where they are summed."""


class Codec(Protocol):
    """One bucket's codec on one rank."""

    rounds: tuple[Round, ...]
    message_dtype: torch.dtype
    length: int
    """Elements of the bucket, its padding left out."""

    @property
    def remainder(self) -> Tensor | None:
        """[length] what this rank has not sent yet, float32 or wider; None where nothing is remembered."""
        ...

    def talk(self, flat: Tensor) -> Talk:
        """Turn this rank's addend `flat` [length] into the sum over ranks of what each of them has sent."""
        ...

    def scale(self, factor: float) -> None:
        """The gradient is from now on measured in another unit: multiply what is remembered."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What this rank remembers, by parameter and key: the living tensors, flat, so that they can be put back.

        "remainder" [elements of the parameter]; the other keys are the codec's own.
        """
        ...


class Gathering(Protocol):
    """A codec whose messages are gathered: each can be read on its own, and what was sent is the sum of them."""

    def encode(self, flat: Tensor) -> Tensor:
        """The message of this rank, which remembers what it leaves out. `flat` is only read."""
        ...

    def add(self, payload: Tensor, out: Tensor) -> None:
        """Add what one rank has sent to `out` [length]."""
        ...


@torch.no_grad()
def gather(codec: Gathering, flat: Tensor) -> Talk:
    """The talk of a codec whose messages are gathered: summed in rank order, as a dense reduction would."""
    everyone = yield Message(codec.encode(flat), Meet.GATHER)
    flat.zero_()
    for payload in everyone:
        codec.add(payload, flat)


def dtype_of(bucket: Bucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)


def work_dtype(bucket: Bucket) -> torch.dtype:
    """What remainders are kept in; see `plan.codec.work_bytes`."""
    return torch.promote_types(dtype_of(bucket), torch.float32)


def by_slot(bucket: Bucket, flat: Tensor) -> dict[str, dict[str, Tensor]]:
    """A remainder [length] as `state` gives it."""
    return {slot.name: {"remainder": flat[slot.start : slot.stop]} for slot in bucket.slots}

"""Codecs without a wire: the talks of all ranks, one message after the other, in one process.

Law: what a transport makes of a bucket's messages is what `exchange` makes of them.
"""

from collections.abc import Sequence

from torch import Tensor

from fourfold.parts.codec.protocol import Codec, Message
from fourfold.plan.codec import Combine


def simulate_reduce(codecs: Sequence[Codec], flats: Sequence[Tensor]) -> list[Message]:
    """Reduce the ranks' addends [length] of one bucket in place; returns what rank 0 has said, round by round.

    Sums are taken in rank order.
    """
    talks = [codec.reduce(flat) for codec, flat in zip(codecs, flats, strict=True)]
    messages = [next(talk) for talk in talks]
    said = []
    while True:
        first = messages[0]
        assert all((each.combine, len(each.payload)) == (first.combine, len(first.payload)) for each in messages)
        said.append(Message(first.payload.clone(), first.combine))
        payloads = [each.payload.clone() for each in messages]
        if first.combine is Combine.SUM:
            for payload in payloads[1:]:
                payloads[0] += payload
            payloads = payloads[:1]
        messages = []
        for talk in talks:
            try:
                messages.append(talk.send(payloads))
            except StopIteration:
                continue
        if not messages:
            return said

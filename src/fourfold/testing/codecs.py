"""Codecs without a network: the codec runs of all ranks in one process, one message after the other.

Law: what a transport makes of a bucket's messages is what `simulate_reduce` makes of them.
"""

from collections.abc import Sequence

from torch import Tensor

from fourfold.parts.codec.protocol import Codec, Message
from fourfold.plan.codec import Combine


def simulate_reduce(codecs: Sequence[Codec], flats: Sequence[Tensor]) -> list[Message]:
    """Reduce the ranks' addends [length] of one bucket in place, adding in rank order; returns rank 0's messages."""
    runs = [codec.reduce(flat) for codec, flat in zip(codecs, flats, strict=True)]
    messages = [next(run) for run in runs]
    sent = []
    while True:
        first = messages[0]
        assert all((each.combine, len(each.payload)) == (first.combine, len(first.payload)) for each in messages)
        sent.append(Message(first.payload.clone(), first.combine))
        payloads = [each.payload.clone() for each in messages]
        if first.combine is Combine.SUM:
            for payload in payloads[1:]:
                payloads[0] += payload
            payloads = payloads[:1]
        messages = []
        for run in runs:
            try:
                messages.append(run.send(payloads))
            except StopIteration:
                continue
        if not messages:
            return sent

"""Codecs: what it takes to encode a bucket's gradient and to decode what other ranks have sent.

Law: as many messages are decoded as in a step of all ranks; none is sent, which has a price of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.analysis.calibrate.timing import Points, Turns
from fourfold.parts.codec.protocol import Message
from fourfold.parts.codec.registry import make_codec
from fourfold.plan.codec import CODECS, CodecSpec, Combine
from fourfold.plan.data.buckets import Bucket, Slot

SIZES = (16_384, 128_000, 1_024_000, 4_096_000)  # elements
COLUMNS = 256


def measure_codecs(turns: Turns) -> dict[str, Points]:
    """By codec, at its default parameters: seconds by elements of a bucket. Collective."""
    return {kind: [_measure(turns, CodecSpec(kind), size) for size in SIZES] for kind in CODECS}


def _measure(turns: Turns, spec: CodecSpec, size: int) -> tuple[float, float]:
    shape = (size // COLUMNS, COLUMNS)
    bucket = Bucket(0, (Slot("weight", 0, size),), size, "float32", 4, 0)
    device = turns.ranks.device
    codec = make_codec(spec, bucket, [shape], device=device)
    gradient, flat = torch.randn(size, device=device), torch.empty(size, device=device)

    def run() -> None:
        flat.copy_(gradient)
        reduction = codec.reduce(flat)
        answer: Sequence[Tensor] | None = None
        try:
            while True:
                message: Message = next(reduction) if answer is None else reduction.send(answer)
                answer = [message.payload] * (turns.ranks.size if message.combine is Combine.GATHER else 1)
        except StopIteration:
            return

    return float(size), turns.median_seconds(run)

"""Codecs: what a bucket's gradient becomes on the wire, and what a rank remembers of what it has not sent.

codec      one bucket's, on one rank; `talk` turns an addend into the sum of what all ranks have sent
remainder  what error feedback carries to the next step
Law: where there is a remainder, Σ over steps of what was sent + remainder = Σ over steps of the gradient, on every
rank by itself.

`plan/codec.py` says how many rounds and bytes that takes.
"""

from collections.abc import Callable

import torch

from fourfold.parts.codec.cast import Cast
from fourfold.parts.codec.dct import Dct
from fourfold.parts.codec.int8 import Int8
from fourfold.parts.codec.powersgd import PowerSGD
from fourfold.parts.codec.protocol import Codec, CodecReduction, GatheredCodec, Message
from fourfold.parts.codec.topk import TopK
from fourfold.plan.codec import CodecSpec, Shapes
from fourfold.plan.data.buckets import Bucket

__all__ = ["Codec", "CodecReduction", "GatheredCodec", "Message", "make_codec"]

CODECS: dict[str, Callable[[CodecSpec, Bucket, Shapes, torch.device], Codec]] = {
    "bf16": Cast,
    "fp16": Cast,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
    "dct": Dct,
}


def make_codec(spec: CodecSpec, bucket: Bucket, shapes: Shapes, *, device: torch.device) -> Codec:
    """The codec of a bucket whose parameters have these shapes. Raises PlanError for gradients that are no floats."""
    return CODECS[spec.kind](spec, bucket, shapes, device)

"""Codecs: which class compresses the gradients of a bucket.

codec     of one bucket on one rank: `reduce` turns this rank's addend into the sum of what all ranks have sent
residual  what error feedback carries to the next reduction
Law: on each rank by itself, Σ of what was sent + residual = Σ of the gradients, over all reductions (not for casts).

A codec is one file here and one row of `CODECS` in `plan/codec.py`, which says how many rounds and bytes it takes.
"""

from collections.abc import Callable

import torch

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.cast import Cast
from fourfold.comm.codec.dct import Dct
from fourfold.comm.codec.int8 import Int8
from fourfold.comm.codec.powersgd import PowerSGD
from fourfold.comm.codec.protocol import Codec
from fourfold.comm.codec.topk import TopK
from fourfold.plan.codec import CodecSpec, Shapes

CLASSES: dict[str, Callable[[CodecSpec, Bucket, Shapes, torch.device], Codec]] = {
    "bf16": Cast,
    "fp16": Cast,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSGD,
    "dct": Dct,
}


def make_codec(spec: CodecSpec, bucket: Bucket, shapes: Shapes, *, device: torch.device) -> Codec:
    """The codec of a bucket. Raises PlanError for gradients that are not floating-point numbers."""
    return CLASSES[spec.kind](spec, bucket, shapes, device)

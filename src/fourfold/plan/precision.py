"""Precision, thought: in which numbers weights are computed with and gradients are summed, and the scale of a loss.

working weights  what forward and backward use: two bytes each, once per host from zero 1 on
master weights   what the update keeps and changes: float32, or the model's own numbers where they are wider
scale            what a loss is multiplied by so that small gradients are not rounded to 0 in float16
Law: the scales of a training are those of torch.amp.GradScaler, down to the least; then an overflow is a bad step.

Sources: Micikevicius et al., "Mixed Precision Training" (2018), §3.1 and §3.2; `torch.amp.GradScaler` for the numbers.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fourfold.plan.data import Bucket, ParamSpec


class Number(NamedTuple):
    """A floating-point format."""

    dtype: str
    num_bytes: int


COMPUTE = {"bf16": Number("bfloat16", 2), "fp16": Number("float16", 2)}
REDUCE = {"fp32": Number("float32", 4), "bf16": Number("bfloat16", 2)}
MASTER_BYTES = 4


def is_float(dtype: str) -> bool:
    """Whether numbers of this dtype may be computed with in another precision: not integers, nor one-byte formats."""
    return dtype.startswith(("float", "bfloat")) and not dtype.startswith("float8")


def computed(specs: Iterable[ParamSpec], precision: str, *, kept: Collection[str] = ()) -> list[ParamSpec]:
    """The specs of the working weights; parameters named in `kept` stay what they are."""
    number = COMPUTE.get(precision)
    if number is None:
        return list(specs)
    return [
        spec._replace(dtype=number.dtype, element_bytes=number.num_bytes)
        if is_float(spec.dtype) and spec.name not in kept
        else spec
        for spec in specs
    ]


def reduced(bucket: Bucket, reduce: str) -> Bucket:
    """The bucket as its gradients are summed."""
    number = REDUCE.get(reduce)
    if number is None or not is_float(bucket.dtype):
        return bucket
    return dataclasses.replace(bucket, dtype=number.dtype, element_bytes=number.num_bytes)


def has_masters(bucket: Bucket, precision: str) -> bool:
    """Whether the bucket's weights are working weights, beside which the update keeps its own."""
    number = COMPUTE.get(precision)
    return number is not None and bucket.dtype == number.dtype


class Scale:
    """The scale of the loss: halved where a gradient overflows, doubled after `interval` steps in which none does."""

    INITIAL, LEAST, INTERVAL = 65536.0, 1.0, 2000
    GROWTH, BACKOFF = 2.0, 0.5
    MOST = 3.4028234663852886e38  # float32's

    def __init__(self, initial: float = INITIAL, interval: int = INTERVAL) -> None:
        self.value, self._interval, self._good = initial, interval, 0

    @property
    def may_fall(self) -> bool:
        """Whether a smaller scale may help against an overflow."""
        return self.value > self.LEAST

    def stepped(self, *, overflowed: bool) -> None:
        """A step with this scale is over."""
        if overflowed:
            self.value, self._good = max(self.LEAST, self.value * self.BACKOFF), 0
            return
        self._good += 1
        if self._good == self._interval:
            self._good = 0
            if self.value * self.GROWTH <= self.MOST:
                self.value *= self.GROWTH

    @property
    def state(self) -> dict[str, float]:
        return {"value": self.value, "good": self._good}

    def load(self, state: Mapping[str, float]) -> None:
        """Put back what `state` gave. What no scale can be is not believed."""
        value = float(state["value"])
        if math.isfinite(value) and self.LEAST <= value <= self.MOST:
            self.value, self._good = value, max(0, int(state["good"])) % self._interval

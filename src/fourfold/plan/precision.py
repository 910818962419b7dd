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

from fourfold.plan.data.buckets import Bucket, ParamSpec


class FloatFormat(NamedTuple):
    """A floating-point format."""

    dtype: str
    num_bytes: int


COMPUTE_FORMATS = {"bf16": FloatFormat("bfloat16", 2), "fp16": FloatFormat("float16", 2)}
REDUCE_FORMATS = {"fp32": FloatFormat("float32", 4), "bf16": FloatFormat("bfloat16", 2)}
MASTER_BYTES = 4


def is_float(dtype: str) -> bool:
    """Whether numbers of this dtype may be computed with in another precision: not integers, nor one-byte formats."""
    return dtype.startswith(("float", "bfloat")) and not dtype.startswith("float8")


def compute_specs(specs: Iterable[ParamSpec], precision: str, *, excluded: Collection[str] = ()) -> list[ParamSpec]:
    """The specs of the working weights; parameters named in `kept` stay what they are."""
    number = COMPUTE_FORMATS.get(precision)
    if number is None:
        return list(specs)
    return [
        spec._replace(dtype=number.dtype, element_bytes=number.num_bytes)
        if is_float(spec.dtype) and spec.name not in excluded
        else spec
        for spec in specs
    ]


def gradient_bucket(bucket: Bucket, reduce_dtype: str) -> Bucket:
    """The bucket as its gradients are summed."""
    number = REDUCE_FORMATS.get(reduce_dtype)
    if number is None or not is_float(bucket.dtype):
        return bucket
    return dataclasses.replace(bucket, dtype=number.dtype, element_bytes=number.num_bytes)


def has_master_weights(bucket: Bucket, precision: str) -> bool:
    """Whether the bucket's weights are working weights, beside which the update keeps its own."""
    number = COMPUTE_FORMATS.get(precision)
    return number is not None and bucket.dtype == number.dtype


class LossScaler:
    """The scale of the loss: halved where a gradient overflows, doubled after `interval` steps in which none does."""

    INITIAL_SCALE, MIN_SCALE, GROWTH_INTERVAL = 65536.0, 1.0, 2000
    GROWTH, BACKOFF = 2.0, 0.5
    MAX_SCALE = 3.4028234663852886e38  # float32's

    def __init__(self, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.value, self._growth_interval, self._num_good_steps = initial, growth_interval, 0

    @property
    def can_decrease(self) -> bool:
        """Whether a smaller scale may help against an overflow."""
        return self.value > self.MIN_SCALE

    def update(self, *, overflowed: bool) -> None:
        """A step with this scale is over."""
        if overflowed:
            self.value, self._num_good_steps = max(self.MIN_SCALE, self.value * self.BACKOFF), 0
            return
        self._num_good_steps += 1
        if self._num_good_steps == self._growth_interval:
            self._num_good_steps = 0
            if self.value * self.GROWTH <= self.MAX_SCALE:
                self.value *= self.GROWTH

    @property
    def state(self) -> dict[str, float]:
        return {"value": self.value, "good": self._num_good_steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Put back what `state` gave. What no scale can be is not believed."""
        value = float(state["value"])
        if math.isfinite(value) and self.MIN_SCALE <= value <= self.MAX_SCALE:
            self.value, self._num_good_steps = value, max(0, int(state["good"])) % self._growth_interval

"""Precision: the dtypes of computation and of gradient sums, and the scale of an fp16 loss.

working weights  used by forward and backward: two bytes each, once per host from zero 1 on
master weights   changed by the update: float32, or the model's own dtype if that is wider
scale            multiplies the loss so that small gradients are not rounded to 0 in float16
Law: the scales of a training are those of torch.amp.GradScaler, down to the minimum; an overflow there is a bad step.

Sources: Micikevicius et al., "Mixed Precision Training" (2018), §3.1 and §3.2; `torch.amp.GradScaler` for the numbers.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.plan.param_spec import ParamSpec


class FloatFormat(NamedTuple):
    """A floating-point dtype and its size."""

    dtype: str
    num_bytes: int


COMPUTE_FORMATS = {"bf16": FloatFormat("bfloat16", 2), "fp16": FloatFormat("float16", 2)}
REDUCE_FORMATS = {"fp32": FloatFormat("float32", 4), "bf16": FloatFormat("bfloat16", 2)}
MASTER_BYTES = 4


def is_float(dtype: str) -> bool:
    """Whether tensors of this dtype may be computed in another precision: not integers, nor one-byte floats."""
    return dtype.startswith(("float", "bfloat")) and not dtype.startswith("float8")


def compute_specs(specs: Iterable[ParamSpec], precision: str, *, excluded: Collection[str] = ()) -> list[ParamSpec]:
    """The specs of the working weights; parameters named in `excluded` keep their dtype."""
    compute = COMPUTE_FORMATS.get(precision)
    if compute is None:
        return list(specs)
    return [
        spec._replace(dtype=compute.dtype, element_bytes=compute.num_bytes)
        if is_float(spec.dtype) and spec.name not in excluded
        else spec
        for spec in specs
    ]


def gradient_bucket(bucket: Bucket, reduce_dtype: str) -> Bucket:
    """The bucket with the dtype in which its gradients are summed."""
    reduce = REDUCE_FORMATS.get(reduce_dtype)
    if reduce is None or not is_float(bucket.dtype):
        return bucket
    return dataclasses.replace(bucket, dtype=reduce.dtype, element_bytes=reduce.num_bytes)


def has_master_weights(bucket: Bucket, precision: str) -> bool:
    """Whether the bucket holds working weights, so that the update needs master weights."""
    compute = COMPUTE_FORMATS.get(precision)
    return compute is not None and bucket.dtype == compute.dtype


class LossScale:
    """What the loss is multiplied by for backward: this one does not scale it.

    reported      the scale, if the loss is scaled
    can_decrease  whether the scale can be halved against an overflow
    """

    value: float = 1.0
    reported: float | None = None
    can_decrease: bool = False

    @property
    def state(self) -> dict[str, float] | None:
        """What a checkpoint saves; None if there is nothing to save."""
        return None

    def scale(self, loss: Any) -> Any:
        """The loss times the scale."""
        return loss

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step with it."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a saved `state`, unless its scale is out of range."""


class LossScaler(LossScale):
    """The scale of the loss: halved when a gradient overflows, doubled after `growth_interval` steps without one."""

    INITIAL_SCALE, MIN_SCALE, GROWTH_INTERVAL = 65536.0, 1.0, 2000
    GROWTH, BACKOFF = 2.0, 0.5
    MAX_SCALE = 3.4028234663852886e38  # float32's

    def __init__(self, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self._growth_interval = growth_interval
        self._set(initial, 0)

    def _set(self, value: float, num_good_steps: int) -> None:
        self.value = self.reported = value
        self.can_decrease = value > self.MIN_SCALE
        self._num_good_steps = num_good_steps

    def scale(self, loss: Any) -> Any:
        return loss * self.value

    def update(self, *, overflowed: bool) -> None:
        if overflowed:
            self._set(max(self.MIN_SCALE, self.value * self.BACKOFF), 0)
            return
        num_good_steps = (self._num_good_steps + 1) % self._growth_interval
        grown = self.value * self.GROWTH
        self._set(grown if num_good_steps == 0 and grown <= self.MAX_SCALE else self.value, num_good_steps)

    @property
    def state(self) -> dict[str, float]:
        return {"value": self.value, "good": self._num_good_steps}  # steps since it changed

    def load_state(self, state: Mapping[str, float]) -> None:
        value = float(state["value"])
        if math.isfinite(value) and self.MIN_SCALE <= value <= self.MAX_SCALE:
            self._set(value, max(0, int(state["good"])) % self._growth_interval)

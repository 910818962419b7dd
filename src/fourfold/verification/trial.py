"""Trial: one training made twice, by a mesh and on one device, so that each step of the two can be compared.

Law: both begin with the same weights, and train with the same options of the optimizer in each step.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.feed.batches import Batch
from fourfold.optim.user_optimizer import OptimizerSource
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.verification.comparison import FACTOR, LOSS, Comparison, to_float64
from fourfold.verification.one_device import (
    OneDevice,
    OneRank,
    Reference,
    copied,
    mesh_state,
    run_step,
)

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Batches = Callable[[torch.optim.Optimizer, bool], Iterator[tuple[Any, Any]]]
"""This rank's batch and the global one, by step. If asked to, sets the rate of the optimizer as the task does."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained twice, and the plan of one of the two. `step_options`: of `parallelize`."""

    model: nn.Module
    loss: Callable[[Any, Any], Any] | None
    optimizer: OptimizerSource
    plan: Plan
    step_options: Mapping[str, Any]

    @property
    def has_precision(self) -> bool:
        """Whether the mesh computes in another precision than one device."""
        return self.plan.precision != "keep"

    @property
    def is_descent(self) -> bool:
        """Whether gradients are compressed or rounded on their way."""
        return not self.has_precision and (self.plan.codec != "none" or self.plan.reduce_dtype != "keep")

    @property
    def cast(self) -> torch.dtype | None:
        """To what gradients are rounded on their way."""
        return CASTS.get(self.plan.codec, CASTS.get(self.plan.reduce_dtype)) if self.is_descent else None

    @property
    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """In which the mesh computes. The mode for float64 would undo what a precision is about."""
        return contextlib.nullcontext() if self.has_precision or self.cast is not None else Float64Mode()

    def by_descent(self, rate: float) -> "Training":
        """The same by plain gradient descent, without clipping."""
        optimizer = functools.partial(torch.optim.SGD, lr=rate)
        return dataclasses.replace(self, optimizer=optimizer, step_options={**self.step_options, "clip": None})

    def on_mesh(self) -> TrainStep:
        model, optimizer = copied(self.model, self.optimizer)
        with self.mode:
            step = parallelize(model, self.loss, optimizer, self.plan, **self.step_options)
        # Torch computes in the dtype of an option that is a tensor, or in float64, as each implementation likes.
        for group in () if self.has_precision else step.optimizer.param_groups:
            group.update({k: tree_map(v, to_float64) for k, v in group.items() if k != "params"})
        return step

    def on_one_device(self) -> OneDevice:
        return OneDevice(*self._copied(), clip=self.step_options.get("clip"))

    def on_one_rank(self) -> OneRank:
        return OneRank(*self._copied(), plan=self.plan, clip=self.step_options.get("clip"))

    def _copied(self) -> tuple[Any, Any, Any]:
        model, optimizer = copied(self.model, self.optimizer)
        return model, self.loss, optimizer


class Lockstep:
    """A step on the mesh, and on rank 0 the same training on one device: both make each step, and are compared.

    rounded  what the precision under test does to one device; None: the mesh computes exactly
    """

    def __init__(
        self, step: TrainStep, comparison: Comparison, one: Reference | None, rounded: Reference | None = None
    ):
        self.step, self._comparison, self._one, self._rounded = step, comparison, one, rounded
        self._num_steps = 0

    def run(self, run_mesh: Callable[[], float], parts: Sequence[Any]) -> float:
        """One step of all. Collective. `parts`: the global batch, used on rank 0 only. Returns the mesh's loss."""
        self._num_steps += 1
        groups = [dict(group) for group in self.step.optimizer.param_groups]
        loss = run_mesh()
        state = mesh_state(self.step, self.step.state_dict())
        if self._one is not None:
            want, *others = (
                {**self._step_reference(each, groups, parts)} for each in (self._one, self._rounded) if each is not None
            )
            self._comparison.add(self._num_steps, {LOSS: loss_tensor(loss), **state}, want, *others)
        return loss

    @staticmethod
    def _step_reference(reference: Reference, groups: Sequence[Mapping[str, Any]], parts: Sequence[Any]) -> Any:
        reference.set_options(groups)
        loss = reference.step(parts)
        return {LOSS: loss_tensor(loss), **reference.state()}


def loss_tensor(value: float) -> dict[str, Tensor]:
    return {"": torch.tensor(value, dtype=torch.float64)}


def run_on_mesh(training: Training, step: TrainStep, local: Any) -> float:
    """One step on the mesh; returns its loss. Collective."""
    with training.mode:
        return run_step(step, local if training.has_precision else _wide_batch(local))


def _wide_batch(batch: Any) -> Any:
    """The batch in float64. One of a feed still knows its samples."""
    samples = getattr(batch, "samples", None)
    plain = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
    wide = tree_map(plain, to_float64)
    return wide if samples is None else Batch.wrap(wide, samples)


def title(name: str, plan: Plan, num_steps: int, *, precision: str = "") -> str:
    """What is compared. `precision`: of the mesh, if it is neither the plan's nor float64."""
    sizes = {axis: plan.mesh.axis_size(axis) for axis in ("pp", "dp", "cp", "tp")}
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    steps = f"{num_steps} step{'s' if num_steps > 1 else ''}"
    precision = precision or ("float64" if plan.precision == "keep" else plan.precision)
    other = "" if precision == "float64" else ", against float64"
    return f"{name} on {axes or 'one rank'}, compared with one device: {steps} in {precision}{other}"


def rounding_bound(precision: str) -> str:
    return (
        f"{FACTOR:.0f} times what {precision} does to one device, by tensor: the root mean square of the difference "
        f"between the same training of one device in {precision} and in float64"
    )

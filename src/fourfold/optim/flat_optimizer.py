"""The flat optimizer: the user's class and options, its update over slices of whole buckets.

slice      elements [start, stop) of a bucket with the place of their reduced gradient, inside one parameter where
           parameters are told from each other
converted  a gradient that is cast or moved to its weights' dtype and device just before the update
Law: the slices of a bucket tile the elements that this rank updates, and the update of a slice equals the update of its
parameters one by one.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.memory_order import flat_of
from fourfold.comm.reduce.protocol import BucketSlice, GradReducer
from fourfold.optim.lars_lamb import (
    LAMB,
    LARS,
    PendingLayerwiseUpdate,
    Ranges,
    begin_update,
    finish_update,
)
from fourfold.optim.master_weights import MasterWeights
from fourfold.optim.user_optimizer import is_layerwise
from fourfold.torch_kit import memory
from fourfold.torch_kit.option_text import IMPLEMENTATION_OPTIONS
from fourfold.torch_kit.tensor_reader import ParameterState
from fourfold.torch_kit.torch_private import mark_step_called, step_without_wrappers
from fourfold.words.errors import OptimizerError, Problem
from fourfold.words.ranges import rest_of_range

# ---- slices --------------------------------------------------------------------------------------------------------

MAX_SLICE_ELEMENTS = 2**18
"""1 MiB of float32: small enough that a slice stays in the cache while it is summed, scaled and updated."""
MAX_SLICE_ELEMENTS_ON_GPUS = 2**24
"""64 MiB of float32: a GPU works on it for as long as the host takes to launch its kernels. A converted gradient is as
large as a slice."""


class UpdateSlice(NamedTuple):
    """Elements [start, stop) of a bucket."""

    start: int
    stop: int
    weight: Tensor
    """What the update changes."""
    gradient: Tensor | nn.Parameter
    """Where the sum of the gradients rests. A parameter stands for what its `.grad` holds at the time of the update."""
    slot_index: int | None = None
    """The parameter's index in the bucket, if slices are cut by parameter."""
    model_weight: Tensor | None = None
    """If `weight` is a master weight: the weight that the model computes with."""

    @property
    def converts_grad(self) -> bool:
        """Whether the gradient is converted before the update: to another dtype or device, or for a master weight."""
        weight, gradient = self.weight, self.gradient
        is_same_kind = gradient.dtype == weight.dtype and gradient.device == weight.device
        return self.model_weight is not None or not is_same_kind

    @property
    def is_unbucketed(self) -> bool:
        """Whether the gradient is where autograd leaves it."""
        return isinstance(self.gradient, nn.Parameter)


def update_slices(
    shards: Sequence[BucketSlice],
    master_weights: MasterWeights,
    buckets: Sequence[Bucket],
    reducer: GradReducer,
    *,
    split_by_param: bool,
    is_chunked: bool,
) -> list[list[UpdateSlice]]:
    """The slices of each bucket: weights paired with the sums of their gradients.

    There is one slice for each view of the sum. `split_by_param` cuts them at the slots too, so that a parameter can be
    left out. `is_chunked` cuts them into slices of limited size; so are those whose gradients are converted.
    """
    result: list[list[UpdateSlice]] = []
    for bucket, shard, master in zip(buckets, shards, master_weights.by_bucket, strict=True):
        slots = [(slot.start, slot.stop) for slot in bucket.slots] if split_by_param else [(0, bucket.size)]
        updated = shard.flat if master is None else master.flat
        most = MAX_SLICE_ELEMENTS if updated.device.type == "cpu" else MAX_SLICE_ELEMENTS_ON_GPUS
        result.append([])
        for slot_index, (slot_start, slot_stop) in enumerate(slots):
            for view in reducer.reduced_views(bucket.index):
                low, high = max(slot_start, view.start), min(slot_stop, view.stop)
                is_limited = is_chunked or master is not None or view.flat.dtype != shard.flat.dtype
                size = most if is_limited else max(1, high - low)
                for start in range(low, high, size):
                    stop = min(start + size, high)
                    gradient = view.flat[start - view.start : stop - view.start]
                    model_weight = shard.flat[start - shard.start : stop - shard.start]
                    pair = (model_weight, None) if master is None else (master.view_range(start, stop), model_weight)
                    index = slot_index if split_by_param else None
                    result[-1].append(UpdateSlice(start, stop, pair[0], gradient, index, pair[1]))
    return result


# ---- the optimizer -------------------------------------------------------------------------------------------------


PrepareGrads = Callable[[int, int, int, float], None]
SavedSlot = tuple[int, int, ParameterState]
"""The elements [start, stop) of a bucket that are one parameter, and its saved state."""


class _FlatUpdate(NamedTuple):
    """The slices that one optimizer object updates together."""

    optimizer: Optimizer
    slices: Sequence[UpdateSlice]
    has_fixed_grads: bool
    """Whether the gradients are always in the same tensors, and are used as they are."""


class FlatOptimizer:
    """The user's optimizer, once for each bucket, over slices of flat memory."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        slices: Sequence[Sequence[UpdateSlice]],
        *,
        prepare_grads: PrepareGrads | None = None,
        uncounted: Sequence[Ranges] = (),
    ) -> None:
        """A bucket's `param_group` is an index into `optimizer.param_groups`.

        slices         by bucket
        prepare_grads  (bucket, start, stop, factor) computes the gradients of a slice, just before they are used
        uncounted      by bucket: the elements [start, stop) whose squares another tensor rank adds to norms of
                       parameters; empty: none
        """
        self._uncounted = uncounted
        self._user_optimizer, self._buckets, self._slices, self._prepare_grads = (
            optimizer,
            buckets,
            slices,
            prepare_grads,
        )
        self.converts_grads = any(each.converts_grad for bucket_slices in slices for each in bucket_slices)
        """Whether gradients are converted. If one is, all are, and `factor` multiplies them in the weights' dtype."""
        self._implementations = [
            _choose_implementation(optimizer, bucket.param_group, each[0].weight) if each else {}
            for bucket, each in zip(buckets, slices, strict=True)
        ]
        self._updates = [
            [self._make_update(bucket, group) for group in self._slice_groups(bucket)] for bucket in range(len(slices))
        ]
        self._pending: dict[int, list[PendingLayerwiseUpdate]] = {}
        self._frozen_options: list[dict[str, Any]] | None = None
        memory.track_owner(self)

    def owned_tensors(self) -> Iterator[Tensor]:
        """The optimizer states."""
        for run in (run for runs in self._updates for run in runs):
            for state in list(run.optimizer.state.values()):
                yield from [value for value in list(state.values()) if isinstance(value, Tensor)]

    def _slice_groups(self, bucket: int) -> list[Sequence[UpdateSlice]]:
        """The slices that are updated together: one by one if each is prepared or converted, else all."""
        slices = self._slices[bucket]
        if self._prepare_grads is not None or self.converts_grads:
            return [[each] for each in slices]
        return [slices] if slices else []

    def _make_update(self, bucket: int, slices: Sequence[UpdateSlice]) -> "_FlatUpdate":
        kind = type(self._user_optimizer)
        accepted = inspect.signature(kind).parameters
        options: dict[str, Any] = {
            k: v for k, v in self._user_optimizer.defaults.items() if k in accepted
        } | self._implementations[bucket]
        flat = kind([each.weight for each in slices], **options)
        run = _FlatUpdate(
            flat, slices, has_fixed_grads=not (self.converts_grads or any(each.is_unbucketed for each in slices))
        )
        if run.has_fixed_grads:
            for each in slices:
                each.weight.grad = each.gradient
        return run

    def set_options_frozen(self, *, frozen: bool) -> None:
        """Keep the options of this moment for all further updates, or read them again in each update."""
        self._frozen_options = None
        if frozen:
            self._frozen_options = [
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
                for group in self._user_optimizer.param_groups
            ]
            self._notify_schedulers()

    def _notify_schedulers(self) -> None:
        # torch's schedulers warn unless the optimizer they were made with has made a step.
        mark_step_called(self._user_optimizer)

    @torch.no_grad()
    def update(
        self,
        bucket: int,
        *,
        used: Sequence[bool] | None = None,
        factor: float = 1.0,
        squared_norms: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> None:
        """One step of the bucket's weights.

        used           by slot: whether any rank had a gradient for it; None = all
        factor         multiplies the sums, when they are prepared or converted
        squared_norms  layer-wise: the result of `begin_layerwise_update`, summed over the ranks that share the bucket
                       or the parameters; None if this rank has all of them
        gradient       the whole bucket's, in the weights' dtype, to be used in place of the sums
        """
        if is_layerwise(self._user_optimizer):
            if squared_norms is None:
                squared_norms = self.begin_layerwise_update(bucket, used=used, factor=factor, gradient=gradient)
            for pending, run in zip(self._pending.pop(bucket), self._updates[bucket], strict=True):
                finish_update(pending, squared_norms.to(run.slices[0].weight.device))
                _write_back(run)
        else:
            for run in self._prepared_updates(bucket, used, factor, gradient):
                _step(run)
                _write_back(run)
        self._notify_schedulers()

    @torch.no_grad()
    def begin_layerwise_update(
        self,
        bucket: int,
        *,
        used: Sequence[bool] | None = None,
        factor: float = 1.0,
        gradient: Tensor | None = None,
    ) -> Tensor:
        """The first half of a layer-wise update: float64 [slots, 2], see `PendingLayerwiseUpdate.squared_norms`."""
        pending = self._pending[bucket] = []
        device = next(p.device for group in self._user_optimizer.param_groups for p in group["params"])
        total = torch.zeros(len(self._buckets[bucket].slots), 2, dtype=torch.float64, device=device)
        for run in self._prepared_updates(bucket, used, factor, gradient):
            indices = [each.slot_index for each in run.slices if each.slot_index is not None]
            layerwise, counted = cast("LARS | LAMB", run.optimizer), self._counted_ranges(bucket, run)
            pending.append(begin_update(layerwise, indices, num_parameters=len(total), counted=counted))
            total += pending[-1].squared_norms.to(device)
        return total

    def _counted_ranges(self, bucket: int, update: "_FlatUpdate") -> list[Ranges] | None:
        """By slice: its elements whose squares this rank adds to the norms of parameters; None: all."""
        if not self._uncounted:
            return None
        taken = self._uncounted[bucket]
        return [
            [(a - each.start, b - each.start) for a, b in rest_of_range(each.start, each.stop, taken)]
            for each in update.slices
        ]

    def _prepared_updates(
        self, bucket: int, used: Sequence[bool] | None, factor: float, bucket_grad: Tensor | None
    ) -> Iterator["_FlatUpdate"]:
        """The bucket's updates one after the other, each with its options and gradients set."""
        groups = self._user_optimizer.param_groups if self._frozen_options is None else self._frozen_options
        options = {k: v for k, v in groups[self._buckets[bucket].param_group].items() if k != "params"}
        options = _without_grad_writes(options | self._implementations[bucket])
        for run in self._updates[bucket]:
            run.optimizer.param_groups[0].update(options)
            for each in run.slices:
                if self._prepare_grads is not None:
                    self._prepare_grads(bucket, each.start, each.stop, 1.0 if self.converts_grads else factor)
                each.weight.grad = self._slice_grad(each, factor, bucket_grad)
                if used is not None:
                    assert each.slot_index is not None
                    if not used[each.slot_index]:
                        each.weight.grad = None
            yield run

    def _slice_grad(self, update_slice: UpdateSlice, factor: float, bucket_grad: Tensor | None) -> Tensor | None:
        """The gradient that a slice is updated with."""
        if bucket_grad is not None:
            return bucket_grad[update_slice.start : update_slice.stop]
        weight, place = update_slice.weight, update_slice.gradient
        if self.converts_grads:
            # Always a copy: other ranks may still read the slot, and some updates change their gradients.
            converted = place.to(weight.device, weight.dtype, copy=True)
            return converted if factor == 1.0 else converted.mul_(factor)
        if update_slice.is_unbucketed:
            return None if place.grad is None else flat_of(place.grad, place)
        return place

    def state_slices(self, bucket: int, start: int, stop: int) -> dict[str, Any]:
        """The state of elements [start, stop) of a bucket: lists of consecutive tensors (no copies), scalars as floats.

        Empty before the first update, and if this rank updates none of these elements.
        """
        pairs = [(run, s) for run in self._updates[bucket] for s in run.slices if s.start < stop and start < s.stop]
        if not pairs:
            return {}
        covering = [each for _, each in pairs]
        states = [run.optimizer.state.get(each.weight, {}) for run, each in pairs]
        bounds = [(max(start, each.start) - each.start, min(stop, each.stop) - each.start) for each in covering]
        result: dict[str, Any] = {}
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.shape == covering[0].weight.shape:
                result[key] = [s[key][low:high] for s, (low, high) in zip(states, bounds, strict=True)]
            else:
                result[key] = first.item() if isinstance(first, Tensor) else first
        return result

    def can_load_state(self, bucket: int, slots: Sequence[SavedSlot]) -> bool:
        """Whether, of the parameters that are updated together, all have a state or none has."""
        keys = [(start, stop, state.keys) for start, stop, state in slots]
        for each in (each for run in self._updates[bucket] for each in run.slices):
            covering = {own for start, stop, own in keys if start < each.stop and each.start < stop}
            if len(covering) > 1:
                return False
        return True

    def load_state(self, bucket: int, slots: Sequence[SavedSlot]) -> None:
        """Load the states of slots that tile the bucket. Only the elements that this rank updates are read."""
        for flat, each in ((run.optimizer, each) for run in self._updates[bucket] for each in run.slices):
            covering = [slot for slot in slots if slot[0] < each.stop and each.start < slot[1]]
            if not covering:
                continue  # padding
            _, _, (tensors, scalars) = covering[0]
            state: dict[str, Any] = {}
            for key, first in scalars.items():
                if any(saved.scalars[key] != first for _, _, saved in covering):
                    problem = Problem(f"{key} differs between parameters of one bucket", "the plan it was saved with")
                    raise OptimizerError(problem, where="the state")
                is_fused = bool(self._implementations[bucket].get("fused"))
                state[key] = _scalar_state(first, each.weight, fused=is_fused)
            for key, first in tensors.items():
                # The weights may have had another dtype when the state was saved.
                dtype = each.weight.dtype if first.dtype.is_floating_point else first.dtype
                joined = torch.zeros(each.stop - each.start, dtype=dtype, device=each.weight.device)
                for start, stop, saved in covering:
                    low, high = max(start, each.start), min(stop, each.stop)
                    joined[low - each.start : high - each.start] = saved.tensors[key].read(low - start, high - start)
                state[key] = joined
            flat.state[each.weight] = state


def _step(update: _FlatUpdate) -> None:
    """One step of all weights that have a gradient."""
    weights = [each.weight for each in update.slices if each.weight.grad is not None]
    seen = [(each, each.grad) for each in weights if update.optimizer.state.get(each)]
    if seen and len(seen) < len(weights):
        # Those without a state by themselves: torch's fused SGD makes the momentum of all weights, or of none.
        for each, _ in seen:
            each.grad = None
        step_without_wrappers(update.optimizer)
        for each in weights:
            each.grad = None
        for each, gradient in seen:
            each.grad = gradient
    # The wrappers around `step` cost more than a small update.
    step_without_wrappers(update.optimizer)


def _write_back(update: _FlatUpdate) -> None:
    """After an update: round master weights into the model weights, and free gradients that are in no slot."""
    for each in update.slices:
        if each.model_weight is not None:
            each.model_weight.copy_(each.weight)
        if not update.has_fixed_grads:
            each.weight.grad = None


def _scalar_state(value: Any, weight: Tensor, *, fused: bool) -> Any:
    """A scalar of the state as torch's optimizers store it: a tensor, on the weight's device if the update is fused."""
    if not isinstance(value, float):
        return value
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device=weight.device if fused else None)


def _without_grad_writes(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, without the implementation that changes gradients: other ranks may still read them."""
    if options.get("foreach") and options.get("nesterov"):
        return options | {"foreach": False}  # it adds the momentum to the gradients
    return options


def _choose_implementation(optimizer: Optimizer, group: int, weight: Tensor) -> dict[str, bool | None]:
    """Fused, if the class has it for this device and the user chose no implementation for this group."""
    options = optimizer.param_groups[group]
    chosen = {key: options.get(key) for key in IMPLEMENTATION_OPTIONS if key in optimizer.defaults}
    if "fused" not in chosen or any(value is not None for value in chosen.values()):
        return chosen
    # On CPUs torch 2.13's fused SGD leaves most elements of 2-byte weights unchanged (pytorch#191763).
    can_fuse = weight.device.type == "cuda" or weight.dtype in (torch.float32, torch.float64)
    return {"fused": True, "foreach": False} if can_fuse else chosen

"""Optimizers on flat buffers: the user's class, its options by group, its update over whole buckets at once.

piece         a stretch of a bucket's weights with the tensor where its summed gradient rests
converted     of a gradient: made the numbers of its weights just before these are updated
element-wise  an update in which no element looks at another: it may run on flat buffers as it is
layer-wise    an update in which an element looks at two norms of its parameter: see `layerwise`
Law: the update of a flat piece equals the update of its parameters one by one.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.parts import memory
from fourfold.parts.optim.lars_lamb import (
    LAYERWISE,
    LayerwiseOptimizer,
    PendingLayerwiseUpdate,
    begin_update,
    finish_update,
)
from fourfold.parts.optim.option_checks import call_factory, check_options
from fourfold.parts.torch_private import avoid_dynamo_import, mark_step_called, step_without_wrappers
from fourfold.plan.data.buckets import Bucket
from fourfold.words.errors import OptimizerError, Problem

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
# How an update is carried out, not what it computes: chosen here unless the user did.
IMPLEMENTATION_OPTIONS = ("fused", "foreach")

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


PrepareGrads = Callable[[int, int, int, float], None]


class UpdateSlice(NamedTuple):
    """Elements [start, stop) of a bucket: the weights that are updated, and where the sum of their gradients rests.

    `slot` is the number of the piece's parameter in the bucket, where pieces are cut by parameter. In place of a
    gradient the parameter itself: its gradient is what its `.grad` holds at the time. `working`: where these are master
    weights, those that the model computes with.
    """

    start: int
    stop: int
    weight: Tensor
    gradient: Tensor | nn.Parameter
    slot_index: int | None = None
    model_weight: Tensor | None = None

    @property
    def converts_grad(self) -> bool:
        """Whether the gradient is of another dtype than the weights, or on another device; or these are masters."""
        weight, gradient = self.weight, self.gradient
        alike = gradient.dtype == weight.dtype and gradient.device == weight.device
        return self.model_weight is not None or not alike

    @property
    def is_unbucketed(self) -> bool:
        """Whether the gradient is where autograd leaves it."""
        return isinstance(self.gradient, nn.Parameter)


def check_supported(optimizer: Optimizer) -> None:
    """Raise OptimizerError unless the optimizer's update can run on flat buffers."""
    kind = type(optimizer)
    if kind not in (*ELEMENTWISE, *LAYERWISE):
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        ours = ", ".join(f"ff.optim.{cls.__name__}" for cls in LAYERWISE)
        attempt = "one of these, or ff.DistributedOptimizer, which runs any optimizer as it is"
        need = f"an element-wise optimizer of torch.optim ({known}), or {ours}"
        raise OptimizerError(Problem(kind.__name__, need, attempt))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(Problem("differentiable = True", "an update outside autograd", "differentiable = False"))


def is_layerwise(optimizer: Optimizer) -> bool:
    """Whether the update must know which elements are of one parameter."""
    return isinstance(optimizer, LAYERWISE)


def build_optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The user's optimizer over the original parameters. Raises OptimizerError for what cannot run on flat buffers."""
    avoid_dynamo_import()
    optimizer = call_factory(factory, parameters)
    if not isinstance(optimizer, Optimizer):
        attempt = "functools.partial(torch.optim.AdamW, lr=3e-4)"
        raise OptimizerError(Problem(repr(optimizer), "a function from parameters to a torch optimizer", attempt))
    check_supported(optimizer)
    check_options(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = len(held - {id(p) for p in parameters})
    if strangers:
        problem = Problem(
            f"{strangers} parameters that are not the model's", "an optimizer of the parameters it is given"
        )
        raise OptimizerError(problem)
    # torch would update them once for each time, and only warns.
    twice = sum(len(group["params"]) for group in optimizer.param_groups) - len(held)
    if twice:
        got = f"{twice} parameters that are in a group more than once"
        raise OptimizerError(Problem(got, "every parameter once", "each parameter once, as model.parameters() has it"))
    left = sum(p.requires_grad and id(p) not in held for p in parameters)
    if left:
        got = f"{left} trainable parameters that are in no group"
        raise OptimizerError(Problem(got, "every trainable parameter in a group", "p.requires_grad_(False) for them"))
    return optimizer


def num_state_tensors(optimizer: Optimizer, group: int) -> int:
    """How many tensors of a parameter's shape an update keeps for each parameter of a group."""
    state, trial = _trial_state(optimizer, group)
    return sum(isinstance(value, Tensor) and value.shape == trial.shape for value in state.values())


def state_keys(optimizer: Optimizer, group: int) -> set[str]:
    """What an update keeps for each parameter of a group, by name."""
    return set(_trial_state(optimizer, group)[0])


@torch.no_grad()
def _trial_state(optimizer: Optimizer, group: int) -> tuple[dict[str, Any], nn.Parameter]:
    """The state after an update of a small parameter with a group's options, and that parameter."""
    # Asked by trying: it depends on options (momentum, amsgrad), and no optimizer tells it.
    trial = nn.Parameter(torch.zeros(2))
    trial.grad = torch.zeros(2)
    options = {k: v for k, v in optimizer.param_groups[group].items() if k != "params"}
    kind: Any = type(optimizer)
    flat: Optimizer = kind([trial], lr=options["lr"])
    flat.param_groups[0].update(options)
    step_without_wrappers(flat)
    return flat.state[trial], trial


def group_indices(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """By name of a parameter: the index of its group; a parameter that is in no group is left out."""
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: group_of[id(p)] for name, p in parameters.items() if id(p) in group_of}


class _FlatUpdate(NamedTuple):
    """Pieces that one optimizer updates. `has_slots`: their gradients always rest in the same tensors, as they are."""

    optimizer: Optimizer
    slices: Sequence[UpdateSlice]
    has_fixed_grads: bool


class FlatOptimizer:
    """The user's optimizer, once per bucket, over pieces of flat memory."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        slices: Sequence[Sequence[UpdateSlice]],
        *,
        prepare_grads: PrepareGrads | None = None,
    ) -> None:
        """A bucket's group is an index into `optimizer.param_groups`; `pieces` are by bucket.

        `prepare(bucket, start, stop, factor)` has the gradients of a piece made, just before they are used.
        """
        self._user_optimizer, self._buckets, self._slices, self._prepare_grads = (
            optimizer,
            buckets,
            slices,
            prepare_grads,
        )
        self.converts_grads = any(piece.converts_grad for some in slices for piece in some)
        """Whether gradients are converted: then all are, and multiplied by `factor` in the weights' own numbers."""
        self._implementations = [_choose_implementation(optimizer, p[0].weight) if p else {} for p in slices]
        self._updates = [
            [self._make_update(bucket, some) for some in self._slice_groups(bucket)] for bucket in range(len(slices))
        ]
        self._pending: dict[int, list[PendingLayerwiseUpdate]] = {}
        self._frozen_options: list[dict[str, Any]] | None = None
        memory.track_owner(self)

    def owned_tensors(self) -> Iterator[Tensor]:
        """The tensors of the states."""
        for run in (run for runs in self._updates for run in runs):
            for state in list(run.optimizer.state.values()):
                yield from [value for value in list(state.values()) if isinstance(value, Tensor)]

    def _slice_groups(self, bucket: int) -> list[Sequence[UpdateSlice]]:
        """The pieces that are updated together: one by one where each is to be prepared or converted, else all."""
        pieces = self._slices[bucket]
        if self._prepare_grads is not None or self.converts_grads:
            return [[piece] for piece in pieces]
        return [pieces] if pieces else []

    def _make_update(self, bucket: int, slices: Sequence[UpdateSlice]) -> "_FlatUpdate":
        kind = type(self._user_optimizer)
        accepted = inspect.signature(kind).parameters
        options: dict[str, Any] = {
            k: v for k, v in self._user_optimizer.defaults.items() if k in accepted
        } | self._implementations[bucket]
        flat = kind([piece.weight for piece in slices], **options)
        run = _FlatUpdate(
            flat, slices, has_fixed_grads=not (self.converts_grads or any(piece.is_unbucketed for piece in slices))
        )
        if run.has_fixed_grads:
            for piece in slices:
                piece.weight.grad = piece.gradient
        return run

    def set_options_frozen(self, *, frozen: bool) -> None:
        """From now on update with the options of this moment, or again with those of each update's."""
        self._frozen_options = None
        if frozen:
            self._frozen_options = [
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
                for group in self._user_optimizer.param_groups
            ]
            self._notify_schedulers()

    def _notify_schedulers(self) -> None:
        # A scheduler of torch warns unless it has seen a step of the optimizer it was made with.
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
        """One step of the bucket's weights. `used[s]`: whether any rank had a gradient for slot s; None = all.

        `factor` is what the sums are multiplied by, by `prepare` or when they are converted. `squares`: what `direct`
        gave, summed over the ranks that share the bucket; without it, a bucket of a layer-wise optimizer is here as a
        whole. `gradient`: the whole bucket's, in the weights' numbers, in place of the sums.
        """
        if is_layerwise(self._user_optimizer):
            if squared_norms is None:
                squared_norms = self.begin_layerwise_update(bucket, used=used, factor=factor, gradient=gradient)
            for begun, run in zip(self._pending.pop(bucket), self._updates[bucket], strict=True):
                finish_update(begun, squared_norms.to(run.slices[0].weight.device))
                _write_back(run)
        else:
            for run in self._prepared_updates(bucket, used, factor, gradient):
                # The wrappers around `step` cost more than a small update.
                step_without_wrappers(run.optimizer)
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
        """The first half of a layer-wise update: float64 [slots, 2], see `layerwise.Begun.squares`."""
        begun = self._pending[bucket] = []
        device = self._user_optimizer.param_groups[0]["params"][0].device
        total = torch.zeros(len(self._buckets[bucket].slots), 2, dtype=torch.float64, device=device)
        for run in self._prepared_updates(bucket, used, factor, gradient):
            owners = [piece.slot_index for piece in run.slices if piece.slot_index is not None]
            begun.append(begin_update(cast(LayerwiseOptimizer, run.optimizer), owners, num_parameters=len(total)))
            total += begun[-1].squared_norms.to(device)
        return total

    def _prepared_updates(
        self, bucket: int, used: Sequence[bool] | None, factor: float, bucket_grad: Tensor | None
    ) -> Iterator["_FlatUpdate"]:
        """The bucket's runs, one after the other, each with its options and gradients."""
        groups = self._user_optimizer.param_groups if self._frozen_options is None else self._frozen_options
        theirs = {k: v for k, v in groups[self._buckets[bucket].param_group].items() if k != "params"}
        theirs = _without_grad_writes(theirs | self._implementations[bucket])
        for run in self._updates[bucket]:
            run.optimizer.param_groups[0].update(theirs)
            for piece in run.slices:
                if self._prepare_grads is not None:
                    self._prepare_grads(bucket, piece.start, piece.stop, 1.0 if self.converts_grads else factor)
                piece.weight.grad = self._slice_grad(piece, factor, bucket_grad)
                if used is not None:
                    assert piece.slot_index is not None
                    if not used[piece.slot_index]:
                        piece.weight.grad = None
            yield run

    def _slice_grad(self, update_slice: UpdateSlice, factor: float, bucket_grad: Tensor | None) -> Tensor | None:
        """What a piece is updated with."""
        if bucket_grad is not None:
            return bucket_grad[update_slice.start : update_slice.stop]
        if self.converts_grads:
            return _converted_grad(update_slice, factor)
        return _unbucketed_grad(update_slice) if update_slice.is_unbucketed else update_slice.gradient

    def state_slices(self, bucket: int, start: int, stop: int) -> dict[str, Any]:
        """The state of elements [start, stop) of a bucket as it lies: lists of consecutive tensors, scalars as floats.

        Empty before the first update, and where this rank has none of these elements.
        """
        held = [(run, p) for run in self._updates[bucket] for p in run.slices if p.start < stop and start < p.stop]
        if not held:
            return {}
        covering = [piece for _, piece in held]
        states = [run.optimizer.state.get(piece.weight, {}) for run, piece in held]
        bounds = [(max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start) for piece in covering]
        result: dict[str, Any] = {}
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.shape == covering[0].weight.shape:
                result[key] = [s[key][low:high] for s, (low, high) in zip(states, bounds, strict=True)]
            else:
                result[key] = first.item() if isinstance(first, Tensor) else first
        return result

    def can_load_state(self, bucket: int, slots: Sequence[tuple[int, int, Mapping[str, Any]]]) -> bool:
        """Whether the parameters that this rank updates together all have a state, or none of them has."""
        for piece in (piece for run in self._updates[bucket] for piece in run.slices):
            kept = [state.keys() for start, stop, state in slots if start < piece.stop and piece.start < stop]
            if any(keys != kept[0] for keys in kept):
                return False
        return True

    def load_state(self, bucket: int, slots: Sequence[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Put back what `stretches` gave, tensors joined: (start, stop, state) of stretches that tile the bucket."""
        for flat, piece in ((run.optimizer, piece) for run in self._updates[bucket] for piece in run.slices):
            covering = [slot for slot in slots if slot[0] < piece.stop and piece.start < slot[1]]
            if not covering:
                continue  # padding
            state: dict[str, Any] = {}
            for key, first in covering[0][2].items():
                if isinstance(first, Tensor):
                    # Saved with other weights than now, states become the numbers that these are updated in.
                    dtype = piece.weight.dtype if first.is_floating_point() else first.dtype
                    whole = torch.zeros(piece.stop - piece.start, dtype=dtype, device=piece.weight.device)
                    for start, stop, s in covering:
                        low, high = max(start, piece.start), min(stop, piece.stop)
                        whole[low - piece.start : high - piece.start] = s[key][low - start : high - start]
                    state[key] = whole
                elif any(s[key] != first for _, _, s in covering):
                    problem = Problem(f"{key} differs between parameters of one bucket", "the plan it was saved with")
                    raise OptimizerError(problem, where="the state")
                else:
                    state[key] = _scalar_state(
                        first, piece.weight, fused=bool(self._implementations[bucket].get("fused"))
                    )
            flat.state[piece.weight] = state


def _unbucketed_grad(update_slice: UpdateSlice) -> Tensor | None:
    """The gradient where autograd has left it; None where there is none."""
    gradient = update_slice.gradient.grad
    return None if gradient is None else gradient.reshape(-1)


def _converted_grad(update_slice: UpdateSlice, factor: float) -> Tensor:
    """The sum of a piece's gradients in the numbers of its weights, times the factor."""
    # A copy in any case: what rests in a slot may still be read by others, and some updates change their gradients.
    gradient = update_slice.gradient.to(update_slice.weight.device, update_slice.weight.dtype, copy=True)
    return gradient if factor == 1.0 else gradient.mul_(factor)


def _write_back(update: _FlatUpdate) -> None:
    """After an update: the model computes with the new weights, and gradients that rest in no slot are free."""
    for piece in update.slices:
        if piece.model_weight is not None:
            piece.model_weight.copy_(piece.weight)
        if not update.has_fixed_grads:
            piece.weight.grad = None


def _scalar_state(value: Any, weight: Tensor, *, fused: bool) -> Any:
    """A scalar of the state as torch's optimizers keep it: a tensor, on the device where a fused update reads it."""
    if not isinstance(value, float):
        return value
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device=weight.device if fused else None)


def _without_grad_writes(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, without an implementation that writes into gradients: other ranks may still read them."""
    if options.get("foreach") and options.get("nesterov"):
        return options | {"foreach": False}  # it adds the momentum to the gradients
    return options


def _choose_implementation(optimizer: Optimizer, weight: Tensor) -> dict[str, bool | None]:
    """Fused, where the class has it for this device and the user asked for no other implementation."""
    theirs = {key: optimizer.defaults.get(key) for key in IMPLEMENTATION_OPTIONS if key in optimizer.defaults}
    if "fused" not in theirs or any(value is not None for value in theirs.values()):
        return theirs
    # torch 2.13's fused SGD leaves most elements of 2-byte weights as they are on CPUs (pytorch#191763).
    able = weight.device.type == "cuda" or weight.dtype in (torch.float32, torch.float64)
    return {"fused": True, "foreach": False} if able else theirs

"""One device: the training that a mesh is compared with, in this process, on global batches.

exact    plain torch, in float64 and complex128 throughout, even where a model asks for float32
rounded  the same in the dtype of the model, or by a step of one rank in the plan's precision
Law: nothing of the mesh takes part. What the model draws here changes no generator of the mesh.

Law: both begin with the same weights, and train with the same options of the optimizer in each step.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.comm.communicator import Communicator
from fourfold.environment.world import World
from fourfold.feed.batches import Batch
from fourfold.model.batch import num_samples, unpack_batch
from fourfold.model.batch_statistics import own_statistics
from fourfold.model.loss_sum import Loss, sum_loss
from fourfold.model.model_call import TRAINED_DTYPES, call_model, model_loss
from fourfold.optim.user_optimizer import OptimizerSource
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.model_copy import deep_copy
from fourfold.torch_kit.option_text import IMPLEMENTATION_OPTIONS
from fourfold.torch_kit.shared_memory import check_weights_apart
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.torch_kit.torch_private import DropoutBase, post_accumulate_hooks, tensor_hooks
from fourfold.verification.comparison import BUFFER, FACTOR, LOSS, STATE, UNSAVED, WEIGHT, Comparison, to_float64
from fourfold.words.errors import Problem, TaskError

KEPT_PLAN_FIELDS = ("precision", "reduce_dtype", "microbatches", "batch_norm", "unused")
"""What a plan says that is not about other ranks."""


class Reference(Protocol):
    """A training on one device."""

    def step(self, parts: Sequence[Any]) -> float:
        """One update on a global batch, whose samples may be in several parts; returns the loss."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Weights, buffers and optimizer states, by kind and name."""
        ...

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Train on with the options, such as the learning rate, that the mesh's optimizer has."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Begin where a step on the mesh begins: with its `state_dict`."""
        ...


class OneDevice:
    """A `Reference` in plain torch. Takes over the model and the optimizer of its parameters.

    randomness  the modules that have drawn random numbers
    count       of the last loss: over how many elements its mean was taken
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        is_exact: bool = True,
    ) -> None:
        self.model = to_float64_model(model) if is_exact else model
        self.optimizer, self.randomness = optimizer, list[str]()
        self._loss, self._clip, self.is_exact = loss, clip, is_exact
        self.count: float | Tensor = 0.0

    def step(self, parts: Sequence[Any]) -> float:
        mean = self.backward(parts)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        return mean

    def backward(self, parts: Sequence[Any]) -> float:
        """The gradient of the mean loss, in `.grad`; returns this loss."""
        self.optimizer.zero_grad()
        with self.computing():
            losses = [self.loss_sum(part, is_whole=len(parts) == 1) for part in parts]
            self.count = sum(loss.count for loss in losses)
            mean = sum(loss.total for loss in losses) / self.count
            assert isinstance(mean, Tensor)
            mean.backward()
        return mean.item()

    def loss_sum(self, batch: Any, *, is_whole: bool = True) -> Loss:
        """The loss of a batch, or of a part of it, as a sum and its count. Raises TaskError for the mean of a part."""
        inputs, targets = tree_map(unpack_batch(batch), self.own_dtype)
        outputs = call_model(self.model, inputs)
        value = model_loss(outputs, inputs) if self._loss is None else self._loss(outputs, targets)
        if not is_whole and isinstance(value, Tensor) and value.dim() == 0:
            got = "a loss that is a mean, and samples of other shapes on other ranks: one device cannot weigh the means"
            raise TaskError(
                Problem(got, "unreduced values, or a pair (sum, count)", 'reduction="none"'), where="the loss"
            )
        return sum_loss(value, num_samples(batch))

    def own_dtype(self, tensor: Tensor) -> Tensor:
        """What the model is given for a tensor of a batch."""
        tensor = tensor.to(next(self.model.parameters()).device)
        return to_float64(tensor) if self.is_exact else tensor

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Within, the model may be called. Random draws are noted; the generators are restored at the end."""
        device = next(self.model.parameters()).device
        mode = Float64Mode() if self.is_exact else contextlib.nullcontext()
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            watched_draws(self.model, self.randomness),
            own_statistics(self.model),
            mode,
        ):
            yield

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def state(self) -> dict[str, dict[str, Tensor]]:
        return training_state(self.model, self.optimizer)

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        _set_options(self.optimizer, groups)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights by name; buffers stay."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"], strict=False)
        for name, parameter in self.model.named_parameters():
            for key, value in state["optimizer"].get(name, {}).items():
                moved = value.to(parameter) if isinstance(value, Tensor) else torch.tensor(float(value))
                self.optimizer.state[parameter][key] = moved.clone()


class OneRank:
    """A `Reference` by a step of one rank in the plan's precision."""

    def __init__(self, model: nn.Module, loss: Any, optimizer: OptimizerSource, *, plan: Plan, clip: float | None):
        own = Plan(**{name: getattr(plan, name) for name in KEPT_PLAN_FIELDS})
        device = next(model.parameters()).device
        alone = Communicator(World(), device)
        self._step = TrainStep(model, loss, optimizer, plan=own, communicator=alone, clip=clip, drift_check=0)

    def step(self, parts: Sequence[Any]) -> float:
        if len(parts) > 1:
            got = "samples of other shapes on other ranks, in another precision"
            raise TaskError(Problem(got, "samples that fit into one batch", 'precision = "keep"'), where="the batch")
        (batch,) = parts
        return run_step(self._step, batch)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return mesh_state(self._step, self._step.state_dict())

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        _set_options(self._step.optimizer, groups)

    def load(self, state: Mapping[str, Any]) -> None:
        self._step.load_state_dict(state)


def _set_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own.update({k: v for k, v in given.items() if k not in ("params", *IMPLEMENTATION_OPTIONS)})


def run_step(step: Callable[[Any], Any], batch: Any) -> float:
    """The loss of a step that changes weights: in fp16, the first whose gradients did not overflow. Collective."""
    while (metrics := step(batch)).overflowed:
        pass
    return metrics.loss


def mesh_state(step: TrainStep, state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Weights, buffers and optimizer states of all stages, by kind and name. `state`: of the step. Collective."""
    own = {kind: named.items() for kind, named in buffers_by_kind(step.model).items()}
    kept = {kind: iter([each for each in named if step.pipeline.is_own(each[0])]) for kind, named in own.items()}
    buffers = {kind: dict(step.pipeline.all_named(named)) for kind, named in kept.items()}
    return {WEIGHT: state["model"], **buffers, STATE: optimizer_tensors(state["optimizer"])}


def training_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Weights, buffers and optimizer states of a plain training, by kind and name."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    states = saved_state(model, optimizer)["optimizer"]
    return {WEIGHT: weights, **buffers_by_kind(model), STATE: optimizer_tensors(states)}


def saved_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What `Reference.load` takes, of a plain training."""
    states = {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}
    return {"model": model.state_dict(), "optimizer": states}


def script_precision(model: nn.Module, compute: str | None = None) -> tuple[str, float]:
    """The dtype in which a script computes, and its spacing at 1, or 0.0 for float64. `compute`: not the model's."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = own if compute is None else getattr(torch, compute)
    return str(dtype).removeprefix("torch."), 0.0 if dtype == torch.float64 else torch.finfo(dtype).eps


def buffers_by_kind(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The buffers: those that a state dict has, and the others."""
    saved = model.state_dict(keep_vars=True).keys()
    named = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return {
        BUFFER: {name: buffer for name, buffer in named.items() if name in saved},
        UNSAVED: {name: buffer for name, buffer in named.items() if name not in saved},
    }


def optimizer_tensors(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """What an optimizer keeps of each element of the weights."""
    return {
        f"{name} ({key})": value
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    }


def copied(model: nn.Module, optimizer: OptimizerSource) -> tuple[nn.Module, Optimizer]:
    """A copy of a model, and the optimizer of its parameters."""
    model, optimizer = copy_with_hooks(model, optimizer)
    return model, optimizer if isinstance(optimizer, Optimizer) else optimizer(list(model.parameters()))


def copy_with_hooks(model: nn.Module, optimizer: OptimizerSource) -> tuple[nn.Module, OptimizerSource]:
    """A copy of a model with the hooks of its parameters, which torch omits, and of an optimizer that has these.

    Raises TaskError for weights that share memory: torch gives each memory of its own.
    """
    check_weights_apart(model)
    is_given = isinstance(optimizer, Optimizer)
    purpose = "verify trains copies on one device"
    copies = (
        deep_copy((model, optimizer), model, purpose) if is_given else (deep_copy(model, model, purpose), optimizer)
    )
    for own, new in zip(model.parameters(), copies[0].parameters(), strict=True):
        for hook in tensor_hooks(own) if new.requires_grad else ():
            new.register_hook(hook)
        for hook in (post_accumulate_hooks(own) or {}).values():
            new.register_post_accumulate_grad_hook(hook)
    return copies


def to_float64_model(model: nn.Module) -> nn.Module:
    """The model in float64 and complex128."""
    for module in model.modules():  # copies of a module have its attributes, those of a parameter have not
        setattr(module, TRAINED_DTYPES, [each.dtype for each in module.parameters(recurse=False)])
    model.double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # `double` leaves complex tensors as they are
            tensor.data = tensor.data.to(torch.complex128)
    return model


def disable_dropout(model: nn.Module) -> int:
    """Set every dropout probability in a model to 0; returns how many there were."""
    num_dropouts = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = name == "p" if isinstance(module, DropoutBase) else "drop" in name
            if is_probability and type(value) is float and value > 0.0:
                setattr(module, name, 0.0)
                num_dropouts += 1
    return num_dropouts


@contextlib.contextmanager
def watched_draws(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Within, the innermost modules whose forward draws random numbers are added to a list, once each."""
    states: list[Tensor] = []
    names = {module: name for name, module in model.named_modules()}

    def enter(*_: Any) -> None:
        states.append(torch.get_rng_state())

    def leave(module: nn.Module, *_: Any) -> None:
        if torch.equal(states.pop(), torch.get_rng_state()):
            return
        name = f"{names[module] or 'the model'} ({type(module).__name__})"
        is_inner = any(each.startswith(f"{names[module]}." if names[module] else "") for each in found)
        if not is_inner and name not in found:
            found.append(name)

    before = torch.get_rng_state()
    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if not found and not torch.equal(before, torch.get_rng_state()):
        found.append("the loss")


# ---- Trial: one training made twice, by a mesh and on one device, so that each step of the two can be compared ------

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
            references = [each for each in (self._one, self._rounded) if each is not None]
            want, *others = (self._step_reference(each, groups, parts) for each in references)
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

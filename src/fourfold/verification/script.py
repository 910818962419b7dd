"""Verify a script: the user's loop, unchanged, on the ranks of a launcher, compared step by step with one device.

recorded    what `step(batch)` of `ff.parallelize` got on each rank
call        of a loop with `ff.DistributedOptimizer`, whose loss only the loop itself knows: one forward of the model in
            a step: what it got, what came out, and the gradient of that in the loop
taken over  what one device does not compute of such a loop: the gradients at the outputs, which its losses give, and
            what it does to gradients between backward and step, such as clipping
one device  trains on the ranks' batches, concatenated, from the same weights, with the same optimizer and its options
rounded     the same in the dtype of the script, which says how far that is from float64
Law: the script sees what it would see without this; after some steps it ends. One device computes forward, backward and
update by itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.comm.broadcast_tree import broadcast_tree
from fourfold.comm.init import init_communicator, world
from fourfold.model.batch import unpack_batch
from fourfold.optim.user_optimizer import OptimizerSource
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.step import parallelize
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.shared_memory import check_weights_apart
from fourfold.torch_kit.tensor_tree import detached_clone, tree_leaves, tree_map
from fourfold.verification.command import check_verifiable
from fourfold.verification.comparison import GRADIENT, OUTPUT, Comparison, VerifyResult
from fourfold.verification.one_device import (
    Lockstep,
    OneDevice,
    OneRank,
    Reference,
    copied,
    disable_dropout,
    rounding_bound,
    run_step,
    saved_state,
    script_precision,
    title,
    training_state,
)
from fourfold.words.errors import PlanError, Problem, TaskError

# ---- a loop with ff.DistributedOptimizer -----------------------------------------------------------------------------


NOT_COVERED = (
    "not covered: the loss, which the loop computes; one device is given its gradient at the outputs of the model",
    "a loss that reads the weights or differentiates twice, and weights that the loop changes, show as differences",
)


class Call(NamedTuple):
    """See above. `grads`: by output, zero where none has come."""

    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    grads: list[Tensor]

    def add_grad(self, index: int, grad: Tensor) -> None:
        self.grads[index] = self.grads[index] + grad.detach()


class LoopTrial:
    """A wrapped optimizer of a script, and one device that makes the same steps, on rank 0.

    wrapper    the DistributedOptimizer
    copies     on rank 0: the model and its optimizer, twice, as they were before they were wrapped
    step_done  called after each step
    """

    def __init__(
        self,
        wrapper: Any,
        optimizer: Optimizer,
        model: nn.Module,
        copies: Sequence[tuple[nn.Module, Optimizer]],
        result: VerifyResult,
        step_done: Callable[[], None],
    ) -> None:
        self.wrapper, self.num_steps = wrapper, 0
        self._model, self._optimizer, self._result, self._step_done = model, optimizer, result, step_done
        self._calls, self._reduced, self._autocast = list[Call](), dict[str, Tensor](), contextlib.nullcontext()
        self._got: dict[str, Mapping[str, Tensor]] = {}
        self._wants: list[dict[str, Mapping[str, Tensor]]] = []
        self.precision, eps = script_precision(model)
        self._references = [OneDevice(m, None, o, is_exact=not index) for index, (m, o) in enumerate(copies)]
        self._comparison = Comparison(result, compute_eps=eps)
        if not eps:
            del self._references[1:]
        else:
            result.bound = rounding_bound(self.precision)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._record, with_kwargs=True)
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(self._end_update)
        result.notes += NOT_COVERED

    def _begin(self, *_: Any) -> None:
        """Before a forward: one device begins with what the loop begins with, and is in the same mode."""
        if not self._calls and not self.num_steps:
            for reference in self._references:
                reference.load(saved_state(self._model, self._optimizer))
        for reference in self._references:
            for own, module in zip(reference.model.modules(), self._model.modules(), strict=True):
                own.training = module.training

    def _record(self, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Returns the outputs as views: their gradient is what the loop's use gives, not what another output's does."""
        if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in tree_leaves(outputs)):
            return None
        outputs = tree_map(outputs, lambda leaf: leaf.view_as(leaf))
        leaves = list(tree_leaves(outputs))
        kind = leaves[0].device.type
        if torch.is_autocast_enabled(kind):
            self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind))
            self._comparison.set_compute_dtype(torch.get_autocast_dtype(kind))
        own_args, own_kwargs = tree_map((list(args), dict(kwargs)), detached_clone)
        call = Call(own_args, own_kwargs, [*map(detached_clone, leaves)], [torch.zeros_like(leaf) for leaf in leaves])
        self._calls.append(call)
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(call.add_grad, index))
        return outputs

    def note_gradients(self) -> None:
        """Of the mesh, as backward leaves them."""
        self._reduced = self._gradients()

    def _gradients(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named if p.requires_grad}

    def _begin_update(self, *_: Any) -> None:
        """Before the loop's optimizer steps: the gradients on one device, and there what the loop has made of them."""
        self.num_steps += 1
        world = init_communicator()
        ranks = [broadcast_tree(world, [list(call) for call in self._calls], src=rank) for rank in range(world.size)]
        if len({*map(len, ranks)}) != 1:
            got = f"{', '.join(str(len(each)) for each in ranks)} forwards on the ranks in step {self.num_steps}"
            raise TaskError(Problem(got, "the same number on each rank", "batches for all ranks"), where="the loop")
        if not self._calls:
            got = f"no forward of {type(self._model).__name__} with gradients in step {self.num_steps}"
            need = "outputs that are tensors, or dicts, lists or tuples of them, of a call of the model itself"
            raise TaskError(Problem(got, need, "ff.verify(model, loss, optimizer, batches, plan)"), where="the loop")
        steps = [[Call(*each) for each in of_ranks] for of_ranks in zip(*ranks, strict=True)]
        self._calls, self._wants, changed = [], [], self._gradients()
        for reference in self._references:
            reference.set_options(self._optimizer.param_groups)
            outputs = _replay(reference, steps, contextlib.nullcontext() if reference.is_exact else self._autocast)
            own = {name: grad.clone() for name, grad in reference.gradients().items()}
            self._wants.append({OUTPUT: outputs, GRADIENT: own})
            for name, parameter in reference.model.named_parameters():
                if parameter.grad is not None and name in changed:
                    parameter.grad = _as_changed(own[name], self._reduced[name], changed[name])
        recorded = [[call.outputs for call in merged(of_ranks)] for of_ranks in steps]
        self._got = {OUTPUT: _named_outputs(recorded), GRADIENT: self._reduced}

    def _end_update(self, *_: Any) -> None:
        """After it has stepped: one device does the same, and is compared."""
        for reference, want in zip(self._references, self._wants, strict=True):
            reference.optimizer.step()
            want.update(reference.state())
        if self._references:
            got = {**self._got, **training_state(self._model, self._optimizer)}
            self._comparison.add(self.num_steps, got, *self._wants)
            self._result.randomness = self._references[0].randomness
        self._step_done()


def _as_changed(own: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """A gradient of one device, changed as the loop has changed that of the mesh: scaled, and more where it is not."""
    before, after = before.to(own), after.to(own)
    size = before.square().sum()
    factor = (before * after).sum() / size if size > 0 else torch.zeros_like(size)
    return own * factor + (after - before * factor)


def _replay(one: OneDevice, steps: Sequence[Sequence[Call]], autocast: Any) -> dict[str, Tensor]:
    """The forwards and the backward of a step, in `.grad`; returns the outputs. `steps`: by call and rank."""
    one.optimizer.zero_grad()
    parts = [merged(of_ranks) for of_ranks in steps]
    with torch.enable_grad(), one.computing():
        found: list[list[list[Tensor]]] = []
        for of_call in parts:
            with autocast:
                found.append([_forward(one, call) for call in of_call])
        pairs = [
            (leaf, grad.to(leaf))
            for of_call, outputs in zip(parts, found, strict=True)
            for call, leaves in zip(of_call, outputs, strict=True)
            for leaf, grad in zip(leaves, call.grads, strict=True)
            if leaf.requires_grad
        ]
        torch.autograd.backward([leaf for leaf, _ in pairs], [grad for _, grad in pairs])
    return _named_outputs(found)


def _forward(one: OneDevice, call: Call) -> list[Tensor]:
    args, kwargs = tree_map((call.args, call.kwargs), one.own_dtype)
    return list(tree_leaves(one.model(*args, **kwargs)))


def _named_outputs(calls: Sequence[Sequence[Sequence[Tensor]]]) -> dict[str, Tensor]:
    """By name. `calls`: by call, part and output."""
    return {
        f"output {index} of forward {number}" + (f", part {part}" if len(parts) > 1 else ""): leaf.detach()
        for number, parts in enumerate(calls, 1)
        for part, leaves in enumerate(parts)
        for index, leaf in enumerate(leaves)
    }


# ---- the ranks' batches, concatenated ---------------------------------------------------------------------


def merged(of_ranks: Sequence[Call]) -> list[Call]:
    """The same forward of all ranks as one, with the gradients of their mean; or one after the other."""
    num_ranks = len(of_ranks)
    inputs = joined([[call.args, call.kwargs] for call in of_ranks])
    calls = [call._replace(grads=[grad / num_ranks for grad in call.grads]) for call in of_ranks]
    if len(inputs) > 1:
        return calls
    sizes = [_num_samples([call.args, call.kwargs]) for call in of_ranks]
    outputs = [
        _together(leaves, sizes) / (1 if _has_samples(leaves, sizes) else num_ranks) for leaves in _columns(calls, 2)
    ]
    (args, kwargs), *_ = inputs
    return [Call(args, kwargs, outputs, [_together(leaves, sizes) for leaves in _columns(calls, 3)])]


def _columns(calls: Sequence[Call], field: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(call[field] for call in calls), strict=True))


def _has_samples(leaves: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether the first dim of an output counts samples, on all ranks."""
    return all(leaf.dim() and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True))


def _together(leaves: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Outputs by sample concatenated; one of the whole batch, such as a loss, summed."""
    return torch.cat(list(leaves)) if _has_samples(leaves, sizes) else torch.stack(list(leaves)).sum(0)


def joined(trees: Sequence[Any]) -> list[Any]:
    """The batches of several ranks as one, where their samples have one shape; else those that have samples.

    A tensor whose first dim does not count samples must be the same on all ranks.
    """
    columns = list(zip(*map(tree_leaves, trees), strict=False))
    sizes = [_num_samples(tree) for tree in trees]
    for leaves in columns:
        is_same = all(torch.equal(leaf, leaves[0]) for leaf in leaves)
        fits = _has_samples(leaves, sizes) and len({leaf.shape[1:] for leaf in leaves}) == 1
        if not (is_same or fits) or len({len(list(tree_leaves(tree))) for tree in trees}) > 1:
            return [tree for tree, size in zip(trees, sizes, strict=True) if size]
    values = iter([torch.cat(list(c)) if _has_samples(c, sizes) else c[0] for c in columns])
    return [tree_map(trees[0], lambda _: next(values))]


def _num_samples(tree: Any) -> int:
    """The first dim of the first tensor of a tree."""
    return next((len(leaf) for leaf in tree_leaves(tree) if leaf.dim()), 0)


# ---- a script --------------------------------------------------------------------------------------------------------


class Enough(BaseException):
    """All steps have been compared: the script ends."""


class ScriptVerifier:
    """Watches the first step, or the first wrapped optimizer, that a script makes. `result`: on rank 0."""

    def __init__(self, name: str, *, steps: int) -> None:
        self._name, self._steps, self._num_trials = name, steps, 0
        self._trial: StepTrial | LoopTrial | None = None
        self.result = VerifyResult(name)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, a script runs. It ends, without an error, when the steps have been compared."""
        functions = (
            (parallelize, "parallelize", self._parallelize),
            (TrainStep, "__call__", self._call_step),
            (DistributedOptimizer, "__init__", self._wrap),
            (DistributedOptimizer, "_on_backward_end", self._end_backward),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, function in functions:
                stack.enter_context(_replaced(owner, name, function))
            with contextlib.suppress(Enough):
                yield
        if self._num_trials > 1:
            self.result.notes.append(f"the script makes {self._num_trials} steps or optimizers: the first is compared")

    def _parallelize(
        self, make: Callable[..., TrainStep], model: Any, loss: Any, optimizer: Any, *args: Any, **options
    ):
        self._num_trials += 1
        if self._num_trials > 1:
            return make(model, loss, optimizer, *args, **options)
        plan = args[0] if args else options.get("plan")
        plan = plan or Plan(dp=world().size)
        _check_script_plan(plan)
        trial = self._trial = StepTrial(self.result, model, loss, optimizer, plan, options.get("clip"))
        trial.step = make(trial.without_dropout(model), loss, optimizer, *args, **options)
        return trial.step

    def _call_step(self, call: Callable[..., Any], step: TrainStep, batch: Any) -> Any:
        trial = self._trial
        if not isinstance(trial, StepTrial) or trial.step is not step:
            return call(step, batch)
        metrics = trial.run(functools.partial(call, step), batch)
        self._count_step(trial.plan)
        return metrics

    def _wrap(
        self, initialize: Callable[..., None], own: Any, optimizer: Optimizer, model: nn.Module, *args: Any, **rest
    ):
        self._num_trials += 1
        if self._num_trials > 1:
            initialize(own, optimizer, model, *args, **rest)
            return
        check_weights_apart(model)  # on every rank: the others would wait for the first
        self.result.num_dropouts = disable_dropout(model)
        copies = [copied(model, optimizer) for _ in range(2)] if world().rank == 0 else []
        initialize(own, optimizer, model, *args, **rest)
        plan = Plan(dp=world().size)
        self._trial = LoopTrial(own, optimizer, model, copies, self.result, lambda: self._count_step(plan))

    def _end_backward(self, end: Callable[..., None], own: Any) -> None:
        end(own)
        if isinstance(self._trial, LoopTrial) and self._trial.wrapper is own:
            self._trial.note_gradients()

    def _count_step(self, plan: Plan) -> None:
        assert self._trial is not None
        num_steps = self._trial.num_steps
        self.result.title = title(self._name, plan, num_steps, precision=self._trial.precision)
        if num_steps == self._steps:
            raise Enough


def _check_script_plan(plan: Plan) -> None:
    check_verifiable(plan)
    if plan.codec != "none" or (plan.reduce_dtype != "keep" and plan.precision == "keep"):
        got = "a script whose plan compresses or rounds gradients"
        need = "steps whose gradients can be seen: plain gradient descent, which the script does not use"
        raise PlanError(
            Problem(got, need, "ff.verify(model, loss, optimizer, batches, plan)"), where="the plan to verify"
        )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within, `function(what was there, *args)` is called in its place."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


class StepTrial:
    """The step of a script, and one device that makes the same steps, on rank 0. `step`: set when it is made."""

    step: TrainStep

    def __init__(
        self, result: VerifyResult, model: Any, loss: Any, optimizer: OptimizerSource, plan: Plan, clip: float | None
    ) -> None:
        self.plan, self.num_steps, self.precision, self._eps, self._result = plan, 0, "", 0.0, result
        self._lockstep: Lockstep | None = None
        self._references: list[Reference] = []
        if world().rank:
            return
        with torch.random.fork_rng():
            whole = model if isinstance(model, nn.Module) else model()
        result.num_dropouts = disable_dropout(whole)
        compute = COMPUTE_FORMATS.get(plan.precision)
        self.precision, self._eps = script_precision(whole, None if compute is None else compute.dtype)
        exact, near = (copied(whole, optimizer) for _ in range(2))
        self._references.append(OneDevice(exact[0], loss, exact[1], clip=clip))
        if compute is not None:
            self._references.append(OneRank(near[0], loss, near[1], plan=plan, clip=clip))
        elif self._eps:
            self._references.append(OneDevice(near[0], loss, near[1], clip=clip, is_exact=False))
        if len(self._references) > 1:
            result.bound = rounding_bound(self.precision)

    def without_dropout(self, model: Any) -> Any:
        """The model, or the function that makes it, without dropout."""
        if isinstance(model, nn.Module):
            disable_dropout(model)
            return model

        @functools.wraps(model)
        def make() -> nn.Module:
            made = model()
            disable_dropout(made)
            return made

        return make

    def run(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """One step of the script, and of one device. Collective. Returns what the script gets."""
        if self._lockstep is None:
            state = self.step.state_dict()
            for reference in self._references:
                reference.load(state)
            comparison = Comparison(self._result, compute_eps=self._eps)
            self._lockstep = Lockstep(self.step, comparison, *(self._references or [None]))
        parts, found = self._whole_batch(batch), []

        def run_mesh() -> float:
            return run_step(lambda each: found.append(call(each)) or found[-1], batch)

        self._lockstep.run(run_mesh, parts)
        self.num_steps += 1
        one = self._references[0] if self._references else None
        self._result.randomness = one.randomness if isinstance(one, OneDevice) else []
        return found[-1]

    def _whole_batch(self, batch: Any) -> list[Any]:
        """The batches of all data ranks, as one; or one after the other if samples differ in shape. Collective."""
        mesh, parts = self.plan.mesh, []
        for rank in range(mesh.size):
            if all(index == 0 for axis, index in mesh.coordinates(rank).items() if axis != "dp"):
                inputs, targets = broadcast_tree(self.step.communicator, unpack_batch(batch), src=rank)
                parts.append(inputs if targets is None else (inputs, targets))
        return joined(parts)

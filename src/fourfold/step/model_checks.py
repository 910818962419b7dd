"""What cannot be carried out is refused here, before anything is built: all problems at once.

Law: no silent fallback. What a plan asks for happens, or is refused.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fourfold.parts import mixed_precision
from fourfold.parts.comm import transports
from fourfold.parts.optim import flat_optimizer
from fourfold.parts.optim.option_tracker import ABSENT, CLASS_KEY, describe_options
from fourfold.plan.data import ParamSpec
from fourfold.plan.plan import Plan, candidate_meshes
from fourfold.step.batch_norm import FREEZE_HINT, uses_batch_stats
from fourfold.words.errors import PlanError, Problem, TaskError


def check_plan_on_ranks(
    model: nn.Module, plan: Plan, communicator: transports.Communicator, *, clip: float | None = None
) -> None:
    """Raise PlanError with every reason why this plan cannot be carried out with this model on these ranks."""
    problems = size_problems(plan, communicator.size) + model_plan_problems(model, plan, clip=clip)
    if problems:
        raise PlanError(problems, where="the plan")
    transports.check_transport_device(plan.transport, communicator.device.type)


def check_plan_for_model(model: nn.Module, plan: Plan, *, clip: float | None) -> None:
    """Raise PlanError with every reason why this plan cannot be carried out with this model, on whatever ranks."""
    problems = model_plan_problems(model, plan, clip=clip)
    if problems:
        raise PlanError(problems, where="the plan")


def check_model_loss(loss: Callable[[Any, Any], Any] | None, plan: Plan) -> None:
    """Raise TaskError for a model's own loss where ranks have some of a sample's tokens only."""
    if loss is not None or plan.sp == 1:
        return
    got = f"sp = {plan.sp} and loss = None: the model's own loss"
    need = "a loss of each token and its own target: a causal model shifts labels inside, past a rank's own tokens"
    attempt = "loss(outputs, targets) with targets that the data has shifted, or sp = 1"
    raise TaskError(Problem(got, need, attempt), where="the loss")


def model_plan_problems(model: nn.Module, plan: Plan, *, clip: float | None) -> list[Problem]:
    """All that does not go together."""
    return model_problems(model, plan) + update_problems(plan, clip) + sync_problems(plan) + precision_problems(plan)


def precision_problems(plan: Plan) -> list[Problem]:
    """A scaled loss may overflow in any gradient, and all of them must be known before the first weight moves."""
    if plan.precision != "fp16":
        return []
    problems, fp16 = [], 'precision = "fp16"'
    if plan.update == "in_backward":
        need = "to know that no gradient has overflowed before the first bucket is updated"
        got = f'{fp16} with update = "{plan.update}"'
        problems.append(Problem(got, need, 'precision = "bf16", or update = "after"'))
    if plan.codec != "none":
        need = "gradients that are known to be finite when they are coded: what overflows would be remembered for ever"
        problems.append(Problem(f'{fp16} with codec = "{plan.codec}"', need, 'precision = "bf16", or codec = "none"'))
    return problems


def update_problems(plan: Plan, clip: float | None) -> list[Problem]:
    """When buckets are updated must leave time for what the update needs to know."""
    if plan.update != "in_backward":
        return []
    problems = []
    if clip is not None:
        need = "the norm of all gradients before the first bucket is updated"
        problems.append(
            Problem(f'update = "in_backward" with clip = {clip:g}', need, 'clip = none, or update = "in_forward"')
        )
    if plan.unused == "allow":
        need = "to know, before a bucket is updated, which parameters got no gradient anywhere"
        attempt = 'unused = "refuse", or update = "in_forward"'
        problems.append(Problem('update = "in_backward" with unused = "allow"', need, attempt))
    return problems


def sync_problems(plan: Plan) -> list[Problem]:
    """With local steps every rank has weights, states and gradients of its own, and all of them."""
    if plan.sync != "local":
        return []
    local, problems = 'sync = "local"', []
    if plan.offload != "none":
        need = "weights that are averaged where they are updated"
        got = f'{local} with offload = "{plan.offload}"'
        problems.append(Problem(got, need, 'offload = "none", or sync = "step"'))
    if plan.precision != "keep":
        need = "weights that are averaged as they are updated, not as they are rounded"
        got = f'{local} with precision = "{plan.precision}"'
        problems.append(Problem(got, need, 'precision = "keep", or sync = "step"'))
    if plan.sp > 1:
        need = "ranks that each have whole samples: those of one sequence share every step"
        problems.append(Problem(f"{local} with sp = {plan.sp}", need, 'sp = 1, or sync = "step"'))
    if plan.zero:
        need = "weights and optimizer states that rest whole: each rank's are its own"
        problems.append(Problem(f"{local} with zero = {plan.zero}", need, 'zero = 0, or sync = "step"'))
    if plan.codec != "none":
        need = "gradients on their way between ranks, and here they stay where they are"
        problems.append(Problem(f'{local} with codec = "{plan.codec}"', need, 'codec = "none", or sync = "step"'))
    if plan.unused == "allow":
        need = "the same optimizer states on every rank, and a rank may have used what another one has not"
        problems.append(Problem(f'{local} with unused = "allow"', need, 'unused = "refuse", or sync = "step"'))
    if plan.update == "in_forward":
        need = "weights that are new when ranks meet at the end of a step"
        problems.append(Problem(f'{local} with update = "in_forward"', need, 'update = "in_backward", or "after"'))
    return problems


def check_update_timing(optimizer: Optimizer, plan: Plan) -> None:
    """Raise PlanError where the plan leaves no time for what this optimizer needs to know."""
    if (
        plan.update != "in_backward"
        or plan.zero == 0
        or plan.reduce_group_size == 1
        or not flat_optimizer.is_layerwise(optimizer)
    ):
        return
    got = f'update = "in_backward" with {type(optimizer).__name__} at zero = {plan.zero}'
    need = "the norms of whole parameters, which ranks share, before a bucket is updated"
    raise PlanError(Problem(got, need, 'update = "in_forward", or zero = 0'), where="the plan")


def size_problems(plan: Plan, size: int) -> list[Problem]:
    """The mesh must have as many places as there are ranks."""
    mesh = plan.mesh
    if mesh.size == size:
        return []
    got = f"pp × dp × sp × tp = {mesh.pp} × {mesh.dp} × {mesh.sp} × {mesh.tp} = {mesh.size}"
    # The same share of sequence ranks where that can be, else data ranks alone.
    fitting = [choice for choice in candidate_meshes(size) if choice.sp == mesh.sp] or candidate_meshes(size)[:1]
    told = f"dp = {fitting[0].dp}" + (f", sp = {fitting[0].sp}" if mesh.sp > 1 else "")
    attempt = f"{told}, or -n {mesh.size}"
    return [Problem(got, f"the number of ranks, {size}", attempt)]


def model_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """What of the model does not go with the plan."""
    problems = []
    if not any(p.requires_grad for p in model.parameters()):
        problems.append(Problem("a model without trainable parameters", "at least one with requires_grad"))
    problems += _lazy_problems(model) + _embedding_problems(model, plan) + _lowered_problems(model)
    norms = [name for name, module in model.named_modules() if uses_batch_stats(module)]
    parts = plan.reduce_group_size * plan.microbatches
    if norms and plan.batch_norm == "refuse" and parts > 1:
        got = f"batch normalization at {', '.join(norms[:3])}{' …' if len(norms) > 3 else ''}"
        need = f"no statistics over a batch that is cut in {parts}"
        problems.append(
            Problem(got, need, f'GroupNorm, {FREEZE_HINT}, or batch_norm = "local" (not the same training)')
        )
    problems += _compiled_problems(model, plan)
    odd = [f"{name} ({p.dtype})" for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    if plan.codec != "none" and odd:
        got = f'codec = "{plan.codec}" and {", ".join(odd[:3])}'
        problems.append(Problem(got, "gradients that are real floating-point numbers", 'codec = "none"'))
    if plan.codec != "none" and plan.zero == 3:
        need = "gradients to be most of what is sent: at zero 3 two thirds are weights, which no codec makes small"
        problems.append(Problem(f'codec = "{plan.codec}" with zero = 3', need, 'zero = 2, or codec = "none"'))
    if plan.codec not in ("none", "bf16", "fp16") and plan.unused == "allow":
        got = f'codec = "{plan.codec}" and unused = "allow"'
        need = "a gradient for every parameter: what a codec sends of an unused one's remainder would not be applied"
        problems.append(Problem(got, need, 'unused = "refuse", or codec = "bf16"'))
    return problems


def _lazy_problems(model: nn.Module) -> list[Problem]:
    """Parameters and buffers get their shapes before they are laid over ranks."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    lazy = [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]
    if not lazy:
        return []
    got = (
        f"lazy modules that have not been called: {', '.join(lazy[:3])}{' …' if len(lazy) > 3 else ''} without a shape"
    )
    return [Problem(got, "parameters that have their shapes", "one forward of a sample before the model is given")]


def _lowered_problems(model: nn.Module) -> list[Problem]:
    """A model that an earlier TrainStep has lowered computes in two bytes still; that step has its float32 weights."""
    name = mixed_precision.find_cast_module(model)
    if name is None:
        return []
    need = "the float32 weights, which that step has"
    attempt = 'a new model, with model.load_state_dict(step.state_dict()["model"]) of that step'
    return [Problem(f"weights that an earlier TrainStep has rounded, at {name}", need, attempt)]


def _embedding_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """What an embedding does with all the rows that a batch asks for is not done by the parts of a batch."""
    found = [(n or "the model", m) for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    parts, problems = plan.reduce_group_size * plan.microbatches, []
    if parts > 1 and (names := [n for n, m in found if m.scale_grad_by_freq and m.weight.requires_grad]):
        got = f"scale_grad_by_freq at {', '.join(names[:3])}, and a batch that is cut in {parts}"
        need = "gradients that do not depend on how often the whole batch has an index: a part counts its own"
        problems.append(Problem(got, need, "scale_grad_by_freq=False"))
    shortened = [n for n, m in found if m.max_norm is not None]
    if (names := shortened) and plan.reduce_group_size > 1:
        got = f"max_norm at {', '.join(names[:3])}, and samples on {plan.reduce_group_size} ranks"
        need = "weights that forward does not write: each rank would shorten the rows of its own samples only"
        problems.append(Problem(got, need, "max_norm=None, and vectors that are normalized after they are looked up"))
    elif names and plan.precision != "keep":
        got = f'max_norm at {", ".join(names[:3])}, and precision = "{plan.precision}"'
        need = "weights that forward does not write: it has rounded copies, and the update goes on from others"
        problems.append(Problem(got, need, "max_norm=None, and vectors that are normalized after they are looked up"))
    return problems


def _compiled_problems(model: nn.Module, plan: Plan) -> list[Problem]:
    """Compiled code does not tell what it does with weights, and of what attention it is made."""
    compiled = [name or "the model" for name, module in model.named_modules() if _is_compiled(module)]
    if not compiled:
        return []
    where = f"compiled code at {', '.join(compiled[:3])}{' …' if len(compiled) > 3 else ''}"
    told = "to be told when a weight is used, which compiled code does not"
    reasons = [
        (plan.update == "in_forward", 'update = "in_forward"', told, 'update = "after"'),
        (plan.zero == 3, "zero = 3", told, "zero = 2"),
        (plan.sp > 1, f"sp = {plan.sp}", "to see each call of attention, which compiled code hides", "sp = 1"),
    ]
    return [Problem(f"{got} and {where}", need, attempt) for holds, got, need, attempt in reasons if holds]


def check_same_on_ranks(
    communicator: transports.Communicator,
    specs: Sequence[ParamSpec],
    shapes: Mapping[str, list[int] | str],
    *,
    plan: Plan,
    options: Mapping[str, Any],
    optimizer: Optimizer,
) -> None:
    """Raise PlanError unless every rank has the same parameters, plan, options and optimizer. Collective."""
    mine = [f"{s.name} {shapes[s.name]} {s.dtype}, group {s.param_group}" for s in specs]
    mine += [f"{name} {value}" for name, value in options.items()]
    mine += plan.to_toml(defaults=True).splitlines()
    told = describe_options(optimizer)
    digest = hashlib.blake2b(json.dumps([mine, told]).encode(), digest_size=16).hexdigest()
    if len(set(communicator.all_gather_json(digest))) == 1:
        return
    everyone, optimizers = communicator.all_gather_json(mine), communicator.all_gather_json(told)
    for rank, theirs in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if first != other:
                problem = Problem(f"rank 0 has {first}, rank {rank} has {other}", "the same on every rank")
                raise PlanError(problem, where="the ranks")
    raise PlanError(_optimizer_problems(optimizers), where="the optimizers of the ranks")


def _optimizer_problems(optimizers: Sequence[Mapping[str, str]]) -> list[Problem]:
    """What the first rank whose optimizer is not rank 0's has otherwise."""
    first = optimizers[0]
    rank, other = next((rank, other) for rank, other in enumerate(optimizers) if other != first)
    differing = [name for name in dict.fromkeys([*first, *other]) if first.get(name) != other.get(name)]
    if CLASS_KEY in differing:
        differing = [CLASS_KEY]  # the options of two classes have little in common
    else:
        # Defaults say nothing new where a group says the same.
        grouped = {name.split(" ", 2)[2] for name in differing if name.startswith("group")}
        differing = [name for name in differing if name.removeprefix("default ") not in grouped]
    texts = [(f"{name} = {first.get(name, ABSENT)}", f"{name} = {other.get(name, ABSENT)}") for name in differing]
    need, attempt = "the same on every rank", "an optimizer that is made the same way on every rank"
    return [Problem(f"rank 0 has {a}, rank {rank} has {b}", need, attempt) for a, b in texts]


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile`, as a whole or in place, or by TorchScript."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")

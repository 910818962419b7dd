"""Memory bound: the bytes that a run is certain to hold on this host, compared with what the host has.

bound        a lower bound: only what is certainly held at one moment; what fits the bound may still not fit the host
model        weights, master weights, gradients and optimizer states of this host's ranks, as `plan/memory.py` counts
batch        the samples that a rank has in its hands; between two steps the old batch and the next one
activations  of one microbatch on one rank: inputs of linear and convolution layers that autograd keeps for backward,
             and the outputs; measured per sample by two forwards of a model without values
Law: what could run is never refused. Nothing of the run has been allocated when it is refused.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from fourfold.feed.draws import fetch_seeded
from fourfold.parts import data, lowered, optim
from fourfold.plan.data import RESTING_LAYOUTS, effective_bucket_bytes, make_buckets
from fourfold.plan.memory import HostRanks, bytes_per_element, host_memory_use
from fourfold.plan.plan import Plan
from fourfold.plan.precision import compute_specs
from fourfold.run.activations import activation_bytes_per_sample
from fourfold.run.batch import tree_leaves
from fourfold.words.errors import FourfoldError, Problem, SettingError
from fourfold.words.host_memory import available_bytes
from fourfold.words.layout import SPLIT
from fourfold.words.task import Source, Task
from fourfold.words.units import sized

# Private memory of a rank that has imported torch and does nothing: 130 MB on Linux, of which half is counted.
PROCESS_BYTES = 64 * 2**20
# Activations are measured where the batch alone is at least this part of the memory: else they are not worth the time.
WORTH_MEASURING = 2**-17


class Bound(NamedTuple):
    """Bytes in a memory. `batch` and `activations` are of one sample, of the ranks that hold it.

    num_batches  how many batches there are between two steps: the old one and the next
    """

    processes: float
    weights: float
    model: float
    batch: float
    activations: float
    num_batches: int = 2

    def total(self, samples: int, microbatches: int, steps: int) -> float:
        """For global batches of so many samples."""
        held = samples * self.batch
        between = self.model + held * min(self.num_batches, max(1, steps))
        within = (self.model if steps > 1 else self.weights) + held + samples // microbatches * self.activations
        return self.processes + max(between, within)


class Place(NamedTuple):
    """A memory, and the ranks that use it. `trains`: whether models and activations are there, or batches alone."""

    name: str
    available: int
    num_ranks: int
    trains: bool = True
    is_host: bool = True


def refuse_memory(
    task: Task, plan: Plan, source: Source, model: nn.Module, *, batch_size: int, steps: int, num_ranks: int
) -> None:
    """Raise SettingError where `num_ranks` ranks of this run cannot fit into the memory of this host, or of a GPU.

    `model` is an outline: no memory behind it. Where the host does not say what it has, nothing is refused. Ranks that
    already run count themselves alone: what the others hold is no longer available.
    """
    samples, problems = min(batch_size, len(source)), []
    for place in _places(num_ranks):
        bound = measure(task, plan, source, model, samples=samples, place=place)
        if bound.total(samples, plan.microbatches, steps) > place.available:
            problems.append(_problem(bound, plan, place, batch_size=batch_size, samples=samples, steps=steps))
    if problems:
        raise SettingError(problems, where="what the run holds in memory")


def _places(num_ranks: int) -> list[Place]:
    has_gpus, on_host = torch.cuda.is_available(), available_bytes()
    places = [] if on_host is None else [Place("available on this host", on_host, num_ranks, trains=not has_gpus)]
    if has_gpus:
        # Of the smallest of them, all of it: what others use now may be free when the run begins.
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        least = min(device.total_memory for device in devices)
        places.append(Place("the memory of a GPU", least, 1, is_host=False))
    return places


def measure(task: Task, plan: Plan, source: Source, model: nn.Module, *, samples: int, place: Place) -> Bound:
    """What a run holds in a memory."""
    weights = held = activations = 0.0
    batch = _sample_bytes(source) / plan.dp
    if place.trains:
        weights, held = _model_bytes(task, plan, model, place)
        if samples * batch >= place.available * WORTH_MEASURING:
            each = activation_bytes_per_sample(
                model, fetch_seeded(source, [0], seed=0, epoch=0)[0][0], is_half_precision=plan.precision != "keep"
            )
            activations = each / (plan.dp * plan.sp)
    # This process is there already.
    processes = PROCESS_BYTES * (place.num_ranks - 1) if place.is_host else 0
    return Bound(processes, weights, held, batch * place.num_ranks, activations, 2 if place.is_host else 1)


def _sample_bytes(source: Source) -> int:
    """Of one sample as a batch holds it. A source with its own `fetch` may make samples of several sizes."""
    last = len(source) - 1
    numbers = sorted({0, last // 2, last}) if hasattr(source, "fetch") else [0]
    try:
        return min(_tensor_bytes(fetch_seeded(source, [number], seed=0, epoch=0)[0]) for number in numbers)
    except FourfoldError:
        raise
    except (
        Exception
    ):  # the source's own error: where the sample is read for a step, it is raised with its rank and step
        return 0


def _tensor_bytes(batch: Any) -> int:
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tree_leaves(batch))


def _model_bytes(task: Task, plan: Plan, model: nn.Module, place: Place) -> tuple[float, float]:
    """Weights alone, and all that lasts from step to step, of a place's ranks."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optim.build_optimizer(task.optimizer, list(model.parameters()))
    own = data.param_specs(trainable, optim.group_indices(optimizer, trainable))
    specs = compute_specs(own, plan.precision, excluded=lowered.full_precision_params(model))
    shares = plan.reduce_group_size if RESTING_LAYOUTS[plan.zero].state == SPLIT else 1
    buckets = make_buckets(
        specs,
        bucket_bytes=effective_bucket_bytes(specs, plan.bucket_bytes, is_inter_host=plan.codec != "none"),
        num_shards=shares,
    )
    kinds = [optim.num_state_tensors(optimizer, group) for group in range(len(optimizer.param_groups))]
    of = bytes_per_element(
        buckets, plan, num_states=kinds, original_bytes={spec.name: spec.element_bytes for spec in own}
    )
    held = host_memory_use(of, zero=plan.zero, host=_host(plan, place))
    part = place.num_ranks / _host(plan, place).num_ranks
    # A real model is there already, and gives its memory back when the run's own copy is made.
    weights = part * held.weights if all(p.is_meta for p in trainable.values()) else 0.0
    if plan.unused == "allow":  # what is not used has neither gradient nor state
        return weights, weights
    offloaded = plan.offload == "states" and not place.is_host
    return weights, weights + part * (held.gradients + (0 if offloaded else held.masters + held.states))


def _host(plan: Plan, place: Place) -> HostRanks:
    """The least a place can hold: ranks of a host share memory where they can."""
    shares_memory = place.is_host and plan.reduce_group_size > 1 and plan.transport in ("by-host", "shared")
    return HostRanks(plan.reduce_group_size if place.is_host else 1, plan.shard_groups, has_shared_memory=shares_memory)


def _problem(bound: Bound, plan: Plan, place: Place, *, batch_size: int, samples: int, steps: int) -> Problem:
    need = f"at most {sized(place.available)}, {place.name}"
    if bound.total(plan.dp, 1, steps) > place.available:
        return Problem(_too_large(bound, plan), need, "smaller ones, or fewer ranks on this host")
    parts = {
        "batches": samples * bound.batch,
        "activations": samples // plan.microbatches * bound.activations,
        "model": bound.model,
    }
    told = ", ".join(f"{name} {sized(value)}" for name, value in parts.items() if value)
    of = f", of which an epoch has {samples}," if samples < batch_size else ""
    got = (
        f"batch_size = {batch_size}{of} takes at least {sized(bound.total(samples, plan.microbatches, steps))} ({told})"
    )
    return Problem(got, need, " or ".join(_attempts(bound, plan, samples, steps=steps, available=place.available)))


def _too_large(bound: Bound, plan: Plan) -> str:
    """What does not fit even with the smallest batch: the largest part."""
    parts = {
        f"{plan.mesh.size} processes that take": bound.processes,
        "samples that take": plan.dp * bound.batch,
        "activations of one sample that take": plan.dp * bound.activations,
        "weights, gradients and optimizer states that take": bound.model,
    }
    words = max(parts, key=lambda name: parts[name])
    return f"{words} at least {sized(parts[words])}"


def _attempts(bound: Bound, plan: Plan, samples: int, *, steps: int, available: int) -> list[str]:
    """The batch beyond which the bound does not fit, and the fewest microbatches with which it does."""
    unit = plan.dp * plan.microbatches
    low, high = 0, samples // unit
    while low < high:  # the most units that fit
        middle = (low + high + 1) // 2
        fits = bound.total(middle * unit, plan.microbatches, steps) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    attempts = [f"a batch_size well below {(low + 1) * unit}"]
    pieces = plan.microbatches
    while pieces < samples and bound.total(samples, pieces, steps) > available:
        pieces *= 2
    if bound.total(samples, pieces, steps) <= available:
        attempts.append(f"microbatches above {pieces}")
    return attempts

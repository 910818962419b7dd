"""Memory bound: the bytes that a run certainly needs on this host, compared with what the host has.

bound        a lower bound of what is held at one moment; a run within the bound may still not fit
model        weights, master weights, gradients and optimizer states of this host's ranks, as `plan/memory.py` counts
batch        the samples that a rank holds; between two steps the old batch and the next one
activations  of one microbatch on one rank: inputs of linear and convolution layers that autograd saves for backward,
             and the outputs; measured per sample by two forwards of a meta model. With stages: of as many microbatches
             as the schedule has in flight, on the stage that holds most
saved        the storages that linear and convolution layers save for the gradients of their weights, and the outputs
Law: a run that would fit is never refused. A run is refused before it allocates anything.
Law: a real forward holds every byte that is counted here, from the layer until backward reaches it. Not counted: what a
backend may choose to save, such as attention scores, and what is checkpointed or offloaded by hooks.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.environment.host_limits import available_bytes
from fourfold.feed.data_input import open_input
from fourfold.feed.sample_rng import fetch_one
from fourfold.feed.source import CollatedSource
from fourfold.feed.stream import Stream
from fourfold.model.model_call import call_model
from fourfold.model.weights import trainable_parameters, update_spec
from fourfold.optim.user_optimizer import build_optimizer
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.step.model_layout import laid_out_specs
from fourfold.torch_kit.param_access import restore_arguments
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import storage_key
from fourfold.words.errors import FourfoldError, Problem, SettingError
from fourfold.words.task import Source, Task
from fourfold.words.units import format_bytes

# ---- activations ---------------------------------------------------------------------------------------------------

LAYER_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d}
AUTOCAST_DEVICES = ("cpu", "cuda")


def activation_bytes_per_sample(model: nn.Module, inputs: Any, *, is_half_precision: bool) -> float:
    """Bytes that a forward of a meta model saves for each sample; 0 if the model cannot run on the meta device.

    `inputs`: of one sample. `is_half_precision`: the run computes in two-byte numbers.
    """
    if not all(p.is_meta for p in model.parameters()):
        return 0.0
    try:
        two, four = (_saved_bytes(model, inputs, number, is_half_precision=is_half_precision) for number in (2, 4))
    except Exception:  # a forward that needs values: the bound leaves activations out
        return 0.0
    return max(0.0, (four - two) / 2)


def _saved_bytes(model: nn.Module, inputs: Any, num_samples: int, *, is_half_precision: bool) -> float:
    """Bytes saved in a forward of `num_samples` samples."""
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _SavedTensor:
        entry = _SavedTensor(tensor)
        saved.add(entry)
        return entry

    on_meta = tree_map(
        inputs, lambda tensor: torch.empty((num_samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
    )
    watch = _LayerInputMode()
    with torch.device("meta"), watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
        outputs = call_model(model, on_meta)
    # The entries that are still alive are held by the outputs' graph: a branch that the model dropped is freed.
    storages = {
        storage_key(each.tensor): each.tensor for each in saved if storage_key(each.tensor) in watch.inputs_by_storage
    }
    storages |= {storage_key(tensor): tensor for tensor in tree_leaves(outputs)}
    max_element_bytes = 2 if is_half_precision or watch.is_autocast else 8
    return float(sum(_storage_bytes(tensor, max_element_bytes) for tensor in storages.values()))


class _SavedTensor:
    """A tensor that autograd has saved; alive as long as the graph holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _LayerInputMode(TorchFunctionMode):
    """Records the inputs of layers, and holds them, so that no storage address is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs_by_storage: dict[int, Tensor] = {}
        self.is_autocast = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.is_autocast = self.is_autocast or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
        if func in LAYER_FUNCTIONS and args and isinstance(args[0], Tensor):
            self.inputs_by_storage[storage_key(args[0])] = args[0]
        return func(*args, **restore_arguments(func, args, kwargs or {}))


def _storage_bytes(tensor: Tensor, max_element_bytes: int) -> float:
    """Bytes of a tensor's storage, with elements of at most `max_element_bytes`."""
    return tensor.untyped_storage().nbytes() * min(1.0, max_element_bytes / tensor.element_size())


# ---- bound ---------------------------------------------------------------------------------------------------------


# Private memory of a rank that has only imported torch: 130 MB on Linux; half of it is counted.
PROCESS_BYTES = 64 * 2**20
# Activations are measured only if the batch is at least this fraction of the memory: measuring them takes time.
MIN_BATCH_FRACTION = 2**-17


class MemoryBound(NamedTuple):
    """Bytes in one memory, of all ranks that use it. Batch and activations are per sample of the global batch.

    num_batches  how many batches exist between two steps: the old one and the next
    """

    process_bytes: float
    weight_bytes: float
    model_bytes: float
    batch_bytes_per_sample: float
    activation_bytes_per_sample: float
    num_batches: int = 2

    def total_bytes(self, num_samples: int, num_microbatches: int, num_steps: int) -> float:
        """The bound for global batches of `num_samples` samples: the larger one of two moments."""
        batch_bytes = num_samples * self.batch_bytes_per_sample
        between_steps = self.model_bytes + batch_bytes * min(self.num_batches, max(1, num_steps))
        in_step = (
            (self.model_bytes if num_steps > 1 else self.weight_bytes)
            + batch_bytes
            + num_samples // num_microbatches * self.activation_bytes_per_sample
        )
        return self.process_bytes + max(between_steps, in_step)


class MemoryPool(NamedTuple):
    """A memory, and how many ranks use it. `has_model`: it holds models and activations too, not only batches."""

    name: str
    num_bytes: int
    num_ranks: int
    has_model: bool = True
    is_host: bool = True


def check_memory(
    task: Task, plan: Plan, data: Any, model: nn.Module, *, batch_size: int, num_steps: int, num_ranks: int
) -> None:
    """Raise SettingError if `num_ranks` ranks of this run cannot fit into the memory of this host, or of a GPU.

    `model` is a meta model. Nothing is refused if the host does not say how much memory it has. A rank that already
    runs passes `num_ranks=1`: what the other ranks hold is not available any more.
    """
    given, problems = open_input(data, "the training data"), []
    source, length = given.source, given.num_samples
    samples = batch_size if length is None else min(batch_size, length)
    for pool in _memory_pools(num_ranks):
        bound = measure_bound(task, plan, source, model, num_samples=samples, pool=pool)
        if bound.total_bytes(samples, plan.microbatches, num_steps) > pool.num_bytes:
            problems.append(
                _memory_problem(bound, plan, pool, batch_size=batch_size, num_samples=samples, num_steps=num_steps)
            )
    if problems:
        raise SettingError(problems, where="what the run holds in memory")


def _memory_pools(num_ranks: int) -> list[MemoryPool]:
    has_gpus, on_host = torch.cuda.is_available(), available_bytes()
    pools = (
        [] if on_host is None else [MemoryPool("available on this host", on_host, num_ranks, has_model=not has_gpus)]
    )
    if has_gpus:
        # All memory of the smallest GPU: what other processes use now may be free when the run begins.
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        least = min(device.total_memory for device in devices)
        pools.append(MemoryPool("the memory of a GPU", least, 1, is_host=False))
    return pools


def measure_bound(
    task: Task, plan: Plan, source: Source | Stream, model: nn.Module, *, num_samples: int, pool: MemoryPool
) -> MemoryBound:
    """The bound of what a run holds in a memory."""
    weights = model_bytes = activations = 0.0
    batch = _sample_bytes(source) / plan.dp
    if pool.has_model:
        weights, model_bytes = _model_bytes(task, plan, model, pool)
        is_kept = plan.recompute == "none"  # else less is kept, and how much is not measured
        if is_kept and num_samples * batch >= pool.num_bytes * MIN_BATCH_FRACTION and not isinstance(source, Stream):
            inputs = fetch_one(source, 0)[0]
            is_half_precision = plan.precision != "keep"
            per_sample = activation_bytes_per_sample(model, inputs, is_half_precision=is_half_precision)
            # At least: with tp, not all of them are split.
            activations = per_sample * plan.least_held / (plan.dp * plan.cp * plan.tp)
    # This process exists already.
    processes = PROCESS_BYTES * (pool.num_ranks - 1) if pool.is_host else 0
    return MemoryBound(processes, weights, model_bytes, batch * pool.num_ranks, activations, 2 if pool.is_host else 1)


def _sample_bytes(source: Source | Stream) -> int:
    """The smallest of a few samples, as a batch holds it; of a stream nothing is known.

    Samples differ in size only with a source's own `fetch`, or a collate function.
    """
    if isinstance(source, Stream):
        return 0
    last = len(source) - 1
    numbers = sorted({0, last // 2, last}) if hasattr(source, "fetch") or isinstance(source, CollatedSource) else [0]
    try:
        batches = (fetch_one(source, number) for number in numbers)
        return min(sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tree_leaves(batch)) for batch in batches)
    except FourfoldError:
        raise
    except Exception:  # the source's own error; the step that reads the sample raises it with rank and step
        return 0


def _model_bytes(task: Task, plan: Plan, model: nn.Module, pool: MemoryPool) -> tuple[float, float]:
    """Bytes of the weights alone, and of all that lasts from step to step, of the ranks that use a memory."""
    optimizer = build_optimizer(task.optimizer, list(model.parameters()))
    update = update_spec(model, optimizer, clip=task.clip, counts_states=True)
    specs = laid_out_specs(model, optimizer, task.tensor, plan.tensor_spec, plan.stage_spec)
    # One host needs the least memory: its ranks share memory wherever they can.
    topology = Topology.regular(hosts=1, ranks_per_host=plan.mesh.size, device="cpu" if pool.is_host else "cuda")
    use = lower(plan, specs, topology, update).host_memory
    fraction = pool.num_ranks / topology.size
    # A model that is not on the meta device exists already, and is freed when the run makes its own copy.
    weights = fraction * use.weights if all(p.is_meta for p in trainable_parameters(model).values()) else 0.0
    if plan.unused == "allow":  # unused parameters have neither gradient nor state
        return weights, weights
    offloaded = plan.offload == "states" and not pool.is_host
    return weights, weights + fraction * (use.gradients + (0 if offloaded else use.masters + use.states))


def _memory_problem(
    bound: MemoryBound, plan: Plan, pool: MemoryPool, *, batch_size: int, num_samples: int, num_steps: int
) -> Problem:
    need = f"at most {format_bytes(pool.num_bytes)}, {pool.name}"
    if bound.total_bytes(plan.dp, 1, num_steps) > pool.num_bytes:
        return Problem(_describe_largest_part(bound, plan), need, "smaller ones, or fewer ranks on this host")
    parts = {
        "batches": num_samples * bound.batch_bytes_per_sample,
        "activations": num_samples // plan.microbatches * bound.activation_bytes_per_sample,
        "model": bound.model_bytes,
    }
    shown = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items() if value)
    limited = f" (an epoch has {num_samples} samples)" if num_samples < batch_size else ""
    needed = format_bytes(bound.total_bytes(num_samples, plan.microbatches, num_steps))
    got = f"batch_size = {batch_size}{limited} takes at least {needed} ({shown})"
    return Problem(
        got, need, " or ".join(_suggestions(bound, plan, num_samples, num_steps=num_steps, num_bytes=pool.num_bytes))
    )


def _describe_largest_part(bound: MemoryBound, plan: Plan) -> str:
    """The largest part of a bound that even the smallest batch exceeds."""
    parts = {
        f"{plan.mesh.size} processes that take": bound.process_bytes,
        "samples that take": plan.dp * bound.batch_bytes_per_sample,
        "activations of one sample that take": plan.dp * bound.activation_bytes_per_sample,
        "weights, gradients and optimizer states that take": bound.model_bytes,
    }
    largest = max(parts, key=lambda name: parts[name])
    return f"{largest} at least {format_bytes(parts[largest])}"


def _suggestions(bound: MemoryBound, plan: Plan, num_samples: int, *, num_steps: int, num_bytes: int) -> list[str]:
    """The batch size from which the bound is exceeded, and a number of microbatches with which it is not."""
    unit = plan.dp * plan.microbatches
    low, high = 0, num_samples // unit
    while low < high:  # bisect for the most units that fit
        middle = (low + high + 1) // 2
        fits = bound.total_bytes(middle * unit, plan.microbatches, num_steps) <= num_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    attempts = [f"a batch_size well below {(low + 1) * unit}"]
    microbatches = plan.microbatches
    while microbatches < num_samples and bound.total_bytes(num_samples, microbatches, num_steps) > num_bytes:
        microbatches *= 2
    if bound.total_bytes(num_samples, microbatches, num_steps) <= num_bytes:
        attempts.append(f"microbatches above {microbatches}")
    return attempts

"""Memory prediction: the bytes that a rank holds at its peak, by place on the pipeline axis.

in flight  microbatches whose activations a place keeps, and what it has received for them
deferred   microbatches between the two halves of their backward: gradients of the outputs of products are kept too
Law: what rests is counted by `plan/memory.py`, as `torch_kit/memory.py` does; the rest follows from facts and lists.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from fourfold.axes.pipeline.rules.schedules import num_stashed
from fourfold.plan.codec import CODECS, accumulation_bytes, low_rank_spec
from fourfold.plan.lowering import Blueprint, DataGroup, bytes_by_bucket
from fourfold.plan.memory import HostMemoryUse, host_memory_use
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict.action_costs import place_groups
from fourfold.planner.predict.facts import FactsSource, OperationKind, SegmentFacts
from fourfold.planner.predict.prediction import MemoryParts
from fourfold.planner.predict.stage_seconds import stage_segments
from fourfold.words.program import Action, Verb

FULL_BYTES = 4  # of an element, without a precision


def predict_memory(
    blueprint: Blueprint,
    source: FactsSource,
    *,
    stage_blocks: Sequence[range] | None = None,
    reserve_bytes: float = 0.0,
) -> tuple[MemoryParts, ...]:
    """What a rank of each place on the pipeline axis holds. `reserve_bytes`: context and fragmentation."""
    plan = blueprint.plan
    facts = source.facts(plan)
    blocks = stage_blocks or source.stage_blocks(plan)
    lists = plan.undrained_lists if plan.is_asynchronous else plan.compute_lists
    last = plan.num_stages - 1
    segments = [
        stage_segments(facts, blocks[stage], is_first=stage == 0, is_last=stage == last)
        for stage in range(plan.num_stages)
    ]
    samples = -(-source.batch_size // (plan.dp * plan.microbatches))
    received = facts.boundary_bytes * samples if plan.pp > 1 else 0.0
    parts = []
    for place, group in enumerate(place_groups(blueprint)):
        stages = {
            stage: _stage_bytes(blueprint, segments[stage], samples, received if stage else 0.0)
            for stage in range(place, plan.num_stages, plan.pp)
        }
        resting, working = resting_memory(blueprint, group, place), _working_bytes(lists[place], stages)
        parts.append(
            resting._replace(
                activations=working.activations,
                buffers=resting.buffers + received,  # the message that is sent
                temporaries=working.temporaries,
                reserve=reserve_bytes,
            )
        )
    return tuple(parts)


# ---- what rests ----------------------------------------------------------------------------------------


def resting_memory(
    blueprint: Blueprint, group: DataGroup, place: int, order: Sequence[int] | None = None
) -> MemoryParts:
    """Weights, gradients and states, and the buffers of the data axis; memory of a host divided among its ranks.

    `order`: the buckets of the place by their numbers in the group, where it has one of each size only; None: its own.
    """
    plan, num_ranks = blueprint.plan, group.hosts.ranks_per_host
    order = range(len(group.buckets)) if order is None else order
    of = bytes_by_bucket(plan, group.stage, blueprint.update_spec)
    host = blueprint.host_ranks(group, num_ranks)
    use = host_memory_use([of[index] for index in order], zero=plan.zero, host=host)
    each = HostMemoryUse(*(kind / num_ranks for kind in use))
    sizes = [group.buckets[index].num_bytes for index in order]
    weights = each.weights + _stashed_bytes(plan, place, sum(sizes))
    gradients, states = each.gradients + _unbucketed_bytes(blueprint, sizes), each.masters + each.states
    if place == plan.pp - 1 > 0:  # a copy of the tied weights, and the sum of its gradients
        tied = sum(spec.num_bytes for spec in blueprint.specs if spec.is_tied)
        weights, gradients = weights + tied, gradients + tied
    if plan.offload == "states" and blueprint.topology.device != "cpu":
        states = 0.0
    states += _codec_bytes(plan, group, order)
    return MemoryParts(weights, gradients, states, 0.0, each.gathered + each.staging, 0.0, 0.0)


def _stashed_bytes(plan: Plan, place: int, weight_bytes: int) -> float:
    """Older versions of the weights, which microbatches in flight use."""
    versions = num_stashed(plan.schedule, plan.pipeline_spec, place) if plan.is_asynchronous else 1
    return (versions - 1) * weight_bytes


def _unbucketed_bytes(blueprint: Blueprint, sizes: Sequence[int]) -> float:
    """Gradients that stay where autograd leaves them: all of a stage, or one bucket's if updates free them at once."""
    if not blueprint.has_unbucketed_grads:
        return 0.0
    frees_early = blueprint.plan.update == "in_backward" and blueprint.plan.microbatches == 1
    return max(sizes, default=0) if frees_early else sum(sizes)


def _codec_bytes(plan: Plan, group: DataGroup, order: Sequence[int]) -> float:
    """What a codec remembers between reductions, as large as the gradients: the residual, and warm factors."""
    codec = plan.codec_spec
    if codec is None:
        return 0.0
    remembers, shapes = CODECS[codec.kind].remembers, {spec.name: spec.local_shape for spec in group.stage.specs}
    kept = []
    for bucket in group.stage.gradient_buckets:
        width, num_elements = accumulation_bytes(bucket), 0
        if "remainder" in remembers:
            num_elements += bucket.size
        if "warm" in remembers:
            own = [shapes[slot.name] for slot in bucket.slots]
            num_elements += low_rank_spec(bucket, own, codec.matrix_rank).num_q
        kept.append(num_elements * width)
    return sum(kept[index] for index in order)


# ---- activations ---------------------------------------------------------------------------------------


class _StageBytes(NamedTuple):
    """One microbatch on one stage.

    kept      from its forward until its backward: what was received, and what autograd keeps
    most      while its forward or backward runs; what the segments behind the running one have kept is freed by then
    deferred  between the halves of its backward, in place of `kept`: both factors of the gradients of weights
    most_of_first_half  as `most`, with the factors of the segments behind the running one
    """

    kept: float
    most: float
    deferred: float
    most_of_first_half: float


def _stage_bytes(blueprint: Blueprint, segments: Sequence[SegmentFacts], samples: int, received: float) -> _StageBytes:
    plan = blueprint.plan
    copied = copied_shapes(blueprint.specs) if received else set[tuple[int, ...]]()
    factors = [factor_bytes(plan, segment, copied) * samples for segment in segments]
    kept = most = most_of_first_half = received
    behind = deferred = sum(factors)
    for segment, own in zip(segments, factors, strict=True):
        kept, behind = kept + segment.saved_bytes[plan.recompute] * samples, behind - own
        now = kept + segment.most_temporary_bytes(samples, plan.recompute)
        most, most_of_first_half = max(most, now), max(most_of_first_half, now + behind)
    return _StageBytes(kept, most, deferred, most_of_first_half)


class _WorkingBytes(NamedTuple):
    """At the worst time of a list: what microbatches in flight keep, and what the running action holds besides."""

    activations: float
    temporaries: float


def _working_bytes(actions: Sequence[Action], stages: Mapping[int, _StageBytes]) -> _WorkingBytes:
    worst, others = _WorkingBytes(0.0, 0.0), 0.0
    """`others`: what microbatches in flight hold, besides the one of the running action."""
    for verb, each in ((action.verb, stages[action.stage]) for action in actions):
        if verb is Verb.BACKWARD_WEIGHT:
            others -= each.deferred
            now = _WorkingBytes(others + each.deferred, 0.0)
        else:
            most = each.most_of_first_half if verb is Verb.BACKWARD_INPUT else each.most
            others -= each.kept * (verb is not Verb.FORWARD)
            now = _WorkingBytes(others + each.kept, most - each.kept)
            others += {Verb.FORWARD: each.kept, Verb.BACKWARD_INPUT: each.deferred}.get(verb, 0.0)
        worst = max(worst, now, key=sum)
    return worst


def copied_shapes(specs: Iterable[ParamSpec]) -> set[tuple[int, ...]]:
    """Of tied weights, in increasing order. A copy is no parameter: the first half of a backward makes its gradient."""
    return {tuple(sorted(spec.local_shape)) for spec in specs if spec.is_tied}


def factor_bytes(plan: Plan, segment: SegmentFacts, copied: Set[tuple[int, ...]]) -> float:
    """Of one sample: the inputs of the products with weights, and their outputs, whose gradients are as large.

    copied  shapes of weights, in increasing order, whose products are not deferred
    """
    width = COMPUTE_FORMATS[plan.precision].num_bytes if plan.precision in COMPUTE_FORMATS else FULL_BYTES
    products = (each for each in segment.operations if each.kind == OperationKind.PRODUCT and each.has_weight)
    return width * sum(
        product.rows * (product.columns + product.inner)
        for product in products
        if (min(product.columns, product.inner), max(product.columns, product.inner)) not in copied
    )

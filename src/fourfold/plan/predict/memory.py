"""Memory prediction: the bytes that a rank holds at its peak, by place on the pipeline axis.

in flight  microbatches whose activations a place keeps; the schedule says how many of each of its stages
deferred   microbatches between the two halves of their backward: gradients of the outputs of products are kept too
Law: what rests is counted by `plan/memory.py`, as `parts/memory.py` counts it; the rest follows from facts and lists.
"""

from collections.abc import Mapping, Sequence

from fourfold.plan.codec import CODECS, accumulation_bytes, low_rank_spec
from fourfold.plan.lowering import Blueprint, DataGroup, bytes_by_bucket
from fourfold.plan.memory import HostMemoryUse, host_memory_use
from fourfold.plan.pipeline.asynchronous import num_stashed
from fourfold.plan.pipeline.in_flight import peak_in_flight, peak_of_stages
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.plan.predict.action_costs import place_groups
from fourfold.plan.predict.facts import FactsSource, OperationKind, SegmentFacts
from fourfold.plan.predict.prediction import MemoryParts
from fourfold.plan.predict.stage_seconds import stage_segments
from fourfold.words.program import Action

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
    lists = _compute_lists(plan)
    last = plan.num_stages - 1
    segments = [
        stage_segments(facts, blocks[stage], is_first=stage == 0, is_last=stage == last)
        for stage in range(plan.num_stages)
    ]
    samples = -(-source.batch_size // plan.dp) / plan.microbatches
    messages = 2 * facts.boundary_bytes * samples if plan.pp > 1 else 0.0
    parts = []
    for place, group in enumerate(place_groups(blueprint)):
        stages = {stage: segments[stage] for stage in range(place, plan.num_stages, plan.pp)}
        resting = _resting(blueprint, group, place)
        parts.append(
            resting._replace(
                activations=_activation_bytes(plan, lists[place], stages) * samples,
                buffers=resting.buffers + messages,
                temporaries=max(_temporary_bytes(plan, each, samples) for own in stages.values() for each in own),
                reserve=reserve_bytes,
            )
        )
    return tuple(parts)


def _compute_lists(plan: Plan) -> Sequence[Sequence[Action]]:
    """By place: what a step computes, whatever was left in flight by the steps before."""
    if plan.is_asynchronous:
        return plan.undrained_lists
    return plan.compute_lists


# ---- what rests ----------------------------------------------------------------------------------------


def _resting(blueprint: Blueprint, group: DataGroup, place: int) -> MemoryParts:
    """Weights, gradients and states, and the buffers of the data axis; memory of a host divided among its ranks."""
    plan, num_ranks = blueprint.plan, group.hosts.ranks_per_host
    host = blueprint.host_ranks(group, num_ranks)
    use = host_memory_use(bytes_by_bucket(plan, group.stage, blueprint.update_spec), zero=plan.zero, host=host)
    each = HostMemoryUse(*(kind / num_ranks for kind in use))
    weights = each.weights + _stashed_bytes(plan, group, place)
    gradients, states = each.gradients + _unbucketed_bytes(blueprint, group), each.masters + each.states
    if place == plan.pp - 1 > 0:  # a copy of the tied weights, and the sum of its gradients
        tied = sum(spec.num_bytes for spec in blueprint.specs if spec.is_tied)
        weights, gradients = weights + tied, gradients + tied
    if plan.offload == "states" and blueprint.topology.device != "cpu":
        states = 0.0
    states += _codec_bytes(plan, group)
    return MemoryParts(weights, gradients, states, 0.0, each.gathered + each.staging, 0.0, 0.0)


def _stashed_bytes(plan: Plan, group: DataGroup, place: int) -> float:
    """Older versions of the weights, which microbatches in flight use."""
    if not plan.is_asynchronous:
        return 0.0
    versions = num_stashed(plan.schedule, plan.pipeline_spec, place) - 1
    return versions * sum(bucket.num_bytes for bucket in group.buckets)


def _unbucketed_bytes(blueprint: Blueprint, group: DataGroup) -> float:
    """Gradients that stay where autograd leaves them: all of a stage, or one bucket's if updates free them at once."""
    if not blueprint.has_unbucketed_grads:
        return 0.0
    sizes = [bucket.num_bytes for bucket in group.buckets]
    return max(sizes) if blueprint.plan.update == "in_backward" and blueprint.plan.microbatches == 1 else sum(sizes)


def _codec_bytes(plan: Plan, group: DataGroup) -> float:
    """What a codec remembers between reductions, as large as the gradients: the residual, and warm factors."""
    codec = plan.codec_spec
    if codec is None:
        return 0.0
    remembers, shapes = CODECS[codec.kind].remembers, {spec.name: spec.local_shape for spec in group.stage.specs}
    total = 0.0
    for bucket in group.stage.gradient_buckets:
        width = accumulation_bytes(bucket)
        if "remainder" in remembers:
            total += bucket.size * width
        if "warm" in remembers:
            own = [shapes[slot.name] for slot in bucket.slots]
            total += low_rank_spec(bucket, own, codec.matrix_rank).num_q * width
    return total


# ---- activations ---------------------------------------------------------------------------------------


def _activation_bytes(plan: Plan, actions: Sequence[Action], stages: Mapping[int, Sequence[SegmentFacts]]) -> float:
    """Bytes of one sample of each microbatch in flight, at the worst time."""
    saved = {stage: sum(each.saved_bytes[plan.recompute] for each in own) for stage, own in stages.items()}
    peak = peak_of_stages(actions, saved)
    deferred = peak_in_flight(actions).deferred
    if not deferred:
        return peak
    width = COMPUTE_FORMATS[plan.precision].num_bytes if plan.precision in COMPUTE_FORMATS else FULL_BYTES
    return peak + deferred * max(_output_elements(own) for own in stages.values()) * width


def _output_elements(segments: Sequence[SegmentFacts]) -> float:
    """Outputs of the products with weights, of one sample: their gradients are kept between I and W."""
    return sum(
        operation.rows * operation.columns
        for segment in segments
        for operation in segment.operations
        if operation.kind == OperationKind.PRODUCT and operation.has_weight
    )


def _temporary_bytes(plan: Plan, segment: SegmentFacts, samples: float) -> float:
    """What a forward or backward holds in addition; a backward that computes again holds all that it computes."""
    again = max(0.0, segment.saved_bytes["none"] - segment.saved_bytes[plan.recompute])
    return (segment.temporary_bytes + again) * samples + segment.call_bytes

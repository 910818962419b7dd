"""Lowering: what a plan means for these parameters on these machines, decided once and without torch.

stage       the parameters of one pipeline stage, in buckets
data group  the ranks that sum the gradients of one stage and one tensor place; they hold the same bucketed parameters
record      what the first step learns: the launch order of reductions, the use orders of unshards
Law: build, `show`, the wrapped optimizer and the planner ask here; what is legal, where tensors rest and which program
each rank runs has one answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fourfold.axes.data.rules.buckets import Bucket, effective_bucket_bytes, make_buckets
from fourfold.axes.data.rules.step_program import DataStepSpec, StepSync, lower_evaluation, lower_step, lower_undrained
from fourfold.axes.data.rules.zero import (
    RESTING_LAYOUTS,
    RestingLayouts,
    ShardGroups,
    TransportRequest,
    layout_changes,
    request_transport,
    step_sent_bytes,
)
from fourfold.axes.pipeline.rules.edges import add_nominal_count, add_sends
from fourfold.axes.pipeline.rules.schedules import steady_actions
from fourfold.axes.pipeline.rules.spec import owner_of
from fourfold.axes.pipeline.rules.ties import add_copies, add_ties
from fourfold.plan.check import legality_problems
from fourfold.plan.codec import CodecSpec, Combine, codec_rounds, codec_sent_bytes
from fourfold.plan.memory import (
    BucketBytes,
    HostMemoryUse,
    HostRanks,
    bytes_per_element,
    has_unbucketed_grads,
    host_memory_use,
)
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import compute_specs, gradient_bucket
from fourfold.plan.step_programs import NO_RECORD, Programs, StepRecord
from fourfold.plan.topology import GroupHosts, Topology, group_hosts, num_host_shards
from fourfold.words.errors import PlanError
from fourfold.words.layout import SPLIT
from fourfold.words.program import Action, Verb


@dataclass(frozen=True)
class StageBuckets:
    """The parameters of a stage as a place of the tensor axis holds them, in buckets.

    specs    as the user made them; the buckets have the dtypes in which forward and backward compute
    buckets  the same on every rank of the place; those of other places have the same parameters
    """

    stage: int
    specs: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    gradient_buckets: tuple[Bucket, ...]
    """The buckets with the dtypes in which gradients are summed."""

    @property
    def bucket_stages(self) -> tuple[int, ...]:
        """By bucket: the stage of the model that computes with it; of interleaved stages, a rank has several."""
        stage_of = {spec.name: spec.stage for spec in self.specs}
        return tuple(stage_of[bucket.slots[0].name] for bucket in self.buckets)

    @property
    def uncounted_ranges(self) -> list[list[tuple[int, int]]]:
        """By bucket: the elements [start, stop) whose squares another tensor rank adds to norms; empty: tp = 1."""
        ranges = {spec.name: spec.shards[spec.tensor_index].uncounted_ranges for spec in self.specs if spec.shards}
        if not ranges:
            return []
        return [
            [(slot.start + start, slot.start + stop) for slot in bucket.slots for start, stop in ranges[slot.name]]
            for bucket in self.buckets
        ]


@dataclass(frozen=True)
class DataGroup:
    """The ranks that sum the gradients of one stage and one tensor place, and what they need.

    resting_layouts  on this topology: weights that exist once per host are whole for all of its ranks
    request          what their transport must provide
    """

    ranks: tuple[int, ...]
    stage: StageBuckets
    hosts: GroupHosts
    resting_layouts: RestingLayouts
    request: TransportRequest

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.stage.buckets


@dataclass(frozen=True)
class Blueprint:
    """All that a plan decides, for every rank: the same object on each."""

    plan: Plan
    specs: tuple[ParamSpec, ...]
    topology: Topology
    update_spec: UpdateSpec
    groups: tuple[DataGroup, ...]

    @cached_property
    def _group_of(self) -> dict[int, DataGroup]:
        return {rank: group for group in self.groups for rank in group.ranks}

    def group_of(self, rank: int) -> DataGroup:
        """The data group of a rank."""
        return self._group_of[rank]

    @property
    def is_sharded(self) -> bool:
        """Whether optimizer states rest split."""
        return planned_layouts(self.plan).state == SPLIT

    @property
    def has_unbucketed_grads(self) -> bool:
        """Whether gradients stay where autograd leaves them."""
        return has_unbucketed_grads(self.plan)

    @property
    def has_trust_ratios(self) -> bool:
        """Whether updates wait for norms of parameters of which ranks hold parts."""
        return self.update_spec.is_layerwise and (self.is_sharded or self.plan.tp > 1)

    @property
    def sync_interval(self) -> int:
        """With local steps: every how many steps ranks average their weights; else 1."""
        return self.plan.sync_interval

    def step_spec(self, group: DataGroup, record: StepRecord = NO_RECORD) -> DataStepSpec:
        """What the steps of a data group consist of."""
        plan, stage = self.plan, group.stage.stage
        return DataStepSpec(
            plan.microbatches,
            len(group.buckets),
            group.resting_layouts,
            has_clip=self.update_spec.waits_for_norm(plan.precision),
            allows_unused=plan.unused == "allow",
            update=plan.update,
            launch_order=record.launch_orders.get(stage, ()),
            bucket_stages=group.stage.bucket_stages,
            has_trust_ratios=self.update_spec.is_layerwise and (self.is_sharded or plan.tp > 1),
            sync=StepSync.WEIGHTS if plan.sync == "local" else StepSync.GRADIENTS,
            use_orders=record.use_orders.get(stage),
            stage=stage,
            computes=self._compute_lists[stage] if plan.pp > 1 else (),
            undrained=self._undrained_lists[stage] if plan.is_asynchronous else (),
        )

    @cached_property
    def _compute_lists(self) -> tuple[tuple[Action, ...], ...]:
        """By place on the pipeline axis: the forwards and backwards of a step, with the messages between stages."""
        lists = add_sends(self.plan.compute_lists, self.plan.num_stages)
        return add_nominal_count(add_ties(lists) if self._has_ties else lists)

    @cached_property
    def _undrained_lists(self) -> tuple[tuple[Action, ...], ...]:
        """By place: the forwards and backwards of a step of an asynchronous schedule, with their messages."""
        return add_sends(steady_actions(self.plan.pipeline_spec), self.plan.num_stages)

    @cached_property
    def _evaluation_lists(self) -> tuple[tuple[Action, ...], ...]:
        """By place: the forwards of an evaluation, with their messages."""
        num_stages = self.plan.num_stages
        places = [range(place, num_stages, self.plan.pp) for place in range(self.plan.pp)]
        lists = add_sends([[Action(Verb.FORWARD, stage, 0) for stage in place] for place in places], num_stages)
        return add_copies(lists) if self._has_ties else lists

    @property
    def _has_ties(self) -> bool:
        return any(spec.is_tied for spec in self.specs)

    def programs(self, record: StepRecord = NO_RECORD) -> Programs:
        """The programs of all ranks, with what the first step has learnt. Cheap."""
        by_spec: dict[DataStepSpec, tuple[tuple[Action, ...], ...]] = {}
        by_rank: dict[int, tuple[tuple[Action, ...], ...]] = {}
        for group in self.groups:
            spec = self.step_spec(group, record)
            if spec not in by_spec:
                by_spec[spec] = _lower_group(spec, self._evaluation_lists[spec.stage] if self.plan.pp > 1 else ())
            by_rank |= dict.fromkeys(group.ranks, by_spec[spec])
        return Programs(*({rank: by_rank[rank][kind] for rank in sorted(by_rank)} for kind in range(5)))

    @property
    def ranks_by_memory(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that meet in shared memory, a tuple for each."""
        return tuple(ranks for group in self.groups if group.hosts.shares_memory for ranks in group.hosts.ranks_by_host)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends over a network in a step that reduces gradients or averages weights, at most."""
        return max(_group_sent_bytes(self.plan, group) for group in self.groups)

    @cached_property
    def host_memory(self) -> HostMemoryUse:
        """Bytes on the host that holds most, from step to step, without activations."""
        by_host: dict[str, list[HostMemoryUse]] = {}
        for group in self.groups:
            of = bytes_by_bucket(self.plan, group.stage, self.update_spec)
            uses = {
                size: host_memory_use(of, zero=self.plan.zero, host=self.host_ranks(group, size))
                for size in {len(ranks) for ranks in group.hosts.ranks_by_host}
            }
            for ranks in group.hosts.ranks_by_host:
                by_host.setdefault(self.topology.hosts[ranks[0]], []).append(uses[len(ranks)])
        totals = [HostMemoryUse(*map(sum, zip(*uses, strict=True))) for uses in by_host.values()]
        return max(totals, key=lambda use: use.total)

    def host_ranks(self, group: DataGroup, num_ranks: int) -> HostRanks:
        """The ranks of a group on one host."""
        return HostRanks(num_ranks, self.plan.shard_groups, has_shared_memory=group.hosts.shares_memory)


def lower(plan: Plan, specs: Sequence[ParamSpec], topology: Topology, update_spec: UpdateSpec) -> Blueprint:
    """What a plan decides for these parameters, in order of definition, on these machines.

    Raises PlanError with every reason why it cannot be carried out.
    """
    if problems := legality_problems(plan, specs, topology, update_spec):
        raise PlanError(problems, where="the plan")
    groups = plan.mesh.groups("dp", "cp")
    hosts = {ranks: group_hosts(topology, ranks, transport=plan.transport) for ranks in groups}
    is_inter_host = any(each.num_hosts > 1 for each in hosts.values())
    stored = [[spec for spec in specs if owner_of(spec.stage, plan.pp) == stage] for stage in range(plan.pp)]
    stages = {
        (stage, index): _fill_buckets(
            plan, stage, [spec.at(index) for spec in stored[stage]], update_spec, is_inter_host=is_inter_host
        )
        for stage in range(plan.pp)
        for index in range(plan.tp)
    }
    places = {ranks: plan.mesh.coordinates(ranks[0]) for ranks in groups}
    of_group = {ranks: stages[place["pp"], place["tp"]] for ranks, place in places.items()}
    data_groups = tuple(_data_group(plan, of_group[ranks], hosts[ranks], update_spec) for ranks in groups)
    return Blueprint(plan, tuple(specs), topology, update_spec, data_groups)


def planned_layouts(plan: Plan) -> RestingLayouts:
    """Where tensors rest as the plan has them. Split over one rank is whole."""
    return RESTING_LAYOUTS[plan.zero if plan.num_shards > 1 else 0]


def effective_layouts(plan: Plan, hosts: GroupHosts) -> RestingLayouts:
    """Where tensors rest on these hosts: weights that exist once per host need not be unsharded before use."""
    planned = planned_layouts(plan)
    host = HostRanks(hosts.ranks_per_host, plan.shard_groups, has_shared_memory=hosts.shares_memory)
    return RESTING_LAYOUTS[2] if planned.weight == SPLIT and not host.unshards_params else planned


def bytes_by_bucket(plan: Plan, stage: StageBuckets, update_spec: UpdateSpec) -> list[BucketBytes]:
    """The bytes per element of each bucket of a stage."""
    original_bytes = {spec.name: spec.element_bytes for spec in stage.specs}
    return bytes_per_element(stage.buckets, plan, num_states=update_spec.num_states, original_bytes=original_bytes)


def _fill_buckets(
    plan: Plan, stage: int, stored: Sequence[ParamSpec], update_spec: UpdateSpec, *, is_inter_host: bool
) -> StageBuckets:
    compute = compute_specs(stored, plan.precision, excluded=update_spec.full_precision_params)
    # A codec's residuals depend on the buckets: with a codec, one host has the same buckets as several.
    is_sent = is_inter_host or plan.codec != "none"
    buckets = make_buckets(
        compute,
        bucket_bytes=effective_bucket_bytes(compute, plan.bucket_bytes, is_inter_host=is_sent),
        num_shards=plan.reduce_group_size if planned_layouts(plan).state == SPLIT else 1,
    )
    return StageBuckets(
        stage, tuple(stored), buckets, tuple(gradient_bucket(each, plan.reduce_dtype) for each in buckets)
    )


def _data_group(plan: Plan, stage: StageBuckets, hosts: GroupHosts, update_spec: UpdateSpec) -> DataGroup:
    request = request_transport(
        stage.buckets,
        stage.gradient_buckets,
        planned_layouts(plan),
        num_shards=plan.num_shards,
        num_scalars=len(stage.specs) * (2 if update_spec.is_layerwise else 1),
    )
    ranks = tuple(sorted(rank for host in hosts.ranks_by_host for rank in host))
    return DataGroup(ranks, stage, hosts, effective_layouts(plan, hosts), request)


def _lower_group(spec: DataStepSpec, evaluation: Sequence[Action]) -> tuple[tuple[Action, ...], ...]:
    """The programs of a rank, in the order of `Programs`. `evaluation`: its forwards, with messages.

    The first step of an asynchronous schedule is drained: it learns what later ones need.
    """
    local = spec._replace(sync=StepSync.NOTHING) if spec.sync == StepSync.WEIGHTS else spec
    steps = [spec, local]
    steps += [each._replace(measures_nominal_count=True) for each in steps]
    lowered = {each: lower_step(each) for each in dict.fromkeys(steps)}
    if spec.undrained:
        lowered[spec] = lower_undrained(spec)
    return (*(lowered[each] for each in steps), lower_evaluation(spec, evaluation))


def _group_sent_bytes(plan: Plan, group: DataGroup) -> float:
    """Bytes that a rank of a group sends over a network in a step."""
    hosts = group.hosts
    if not hosts.shares_memory:
        return stage_sent_bytes(plan, group.stage, plan.shard_groups)
    shards = num_host_shards(plan.num_shards, hosts.ranks_per_host) if plan.num_shards > 1 else hosts.num_hosts
    assert shards is not None
    host_groups = ShardGroups(shards, hosts.num_hosts // shards)
    return stage_sent_bytes(plan, group.stage, host_groups, ranks_per_host=hosts.ranks_per_host)


def stage_sent_bytes(
    plan: Plan, stage: StageBuckets, shard_groups: ShardGroups, *, ranks_per_host: int = 1, is_coded: bool = True
) -> float:
    """Bytes that each rank sends in a step, by ring algorithms; without the plan's codec unless `is_coded`.

    `shard_groups` are of ranks; of hosts, if the ranks of each share memory: then each rank sends its part of a bucket.
    """
    if is_coded and plan.codec_spec is not None:
        return _coded_bytes(plan, plan.codec_spec, stage, shard_groups, ranks_per_host)
    sent = step_sent_bytes(
        stage.buckets,
        zero=plan.zero,
        shard_groups=shard_groups,
        microbatches=plan.microbatches,
        gradient_buckets=stage.gradient_buckets,
    )
    return sent / ranks_per_host


def _coded_bytes(
    plan: Plan, codec: CodecSpec, stage: StageBuckets, shard_groups: ShardGroups, ranks_per_host: int
) -> float:
    """Bytes of a codec's messages, and of the updated weights, which no codec compresses."""
    shapes = {spec.name: spec.local_shape for spec in stage.specs}
    after_update = layout_changes(planned_layouts(plan)).after_update
    num_rounds = plan.microbatches if plan.zero == 2 else 1
    sent = 0.0
    for bucket, gradient in zip(stage.buckets, stage.gradient_buckets, strict=True):
        for each in codec_rounds(codec, gradient, [shapes[slot.name] for slot in bucket.slots]):
            # Messages that are summed are summed within a host first; those that are gathered are sent by their rank.
            parts = ranks_per_host if each.combine is Combine.SUM else 1
            sent += codec_sent_bytes([each], size=shard_groups.size) * num_rounds / parts
        sent += shard_groups.all_gather_sent_bytes(after_update, bucket.num_bytes) / ranks_per_host
    return sent

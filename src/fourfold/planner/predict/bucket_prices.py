"""Bucket prices: what the buckets of one place cost besides what their collectives send: updates, gradients, scalars.

owned  the part of a bucket that a rank updates
Law: what a rank does for a bucket is priced by the bytes that it reads and writes.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from fourfold.plan.lowering import Blueprint, DataGroup, StageBuckets, bytes_by_bucket
from fourfold.planner.predict.bucket_collectives import BucketCollectives, collective_seconds, shape_of
from fourfold.planner.predict.prediction import StepTerms
from fourfold.planner.predict.prices import GroupShape, Prices
from fourfold.planner.predict.stage_seconds import ZERO
from fourfold.planner.remembered import remembered
from fourfold.words.layout import SPLIT, Change
from fourfold.words.program import GRAD_NORM, TRUST_NORMS, USED_PARAMS, Action

SCALAR_BYTES = 8


class PlaceSizes(NamedTuple):
    """The parameters of a place, and by stage the bytes of their gradients, as backward makes them and as they rest."""

    num_params: int
    made: Mapping[int, int]
    kept: Mapping[int, int]


def place_sizes(stage: StageBuckets) -> PlaceSizes:
    """The sizes of a place with these buckets."""
    made, kept = Counter[int](), Counter[int]()
    for each, bucket, gradient in zip(stage.bucket_stages, stage.buckets, stage.gradient_buckets, strict=True):
        made[each] += bucket.num_bytes
        kept[each] += gradient.num_bytes
    return PlaceSizes(len(stage.specs), made, kept)


class BucketPrices:
    """What the buckets of a data group cost. `collectives`: what they exchange.

    `sizes`: of all buckets, where the group has only some of them.
    """

    def __init__(self, blueprint: Blueprint, group: DataGroup, prices: Prices, sizes: PlaceSizes | None = None) -> None:
        self._blueprint, self._group, self._prices, self._plan = blueprint, group, prices, blueprint.plan
        self.collectives = BucketCollectives(blueprint, group, prices)
        self._bytes = bytes_by_bucket(self._plan, group.stage, blueprint.update_spec)
        self._sizes = sizes or place_sizes(group.stage)
        self._between = prices.between_actions()

    @property
    def num_buckets(self) -> int:
        return len(self._group.buckets)

    @remembered(lambda _, stage, *, is_first: (stage, is_first))
    def gradient_seconds(self, stage: int, *, is_first: bool) -> float:
        """Copying the gradients of a step's first backward to their buckets, and adding those of later ones."""
        made, kept = self._sizes.made[stage], self._sizes.kept[stage]
        if self._blueprint.has_unbucketed_grads:
            # A second half adds its products to the gradients while it makes them.
            return 0.0 if is_first or self._plan.divides_backward else self._prices.memory_pass(3 * made)
        copies = is_first or self._group.resting_layouts.gradient == SPLIT
        return self._prices.memory_pass(made + (1 if copies else 2) * kept)

    def gradient_seconds_of_place(self, *, is_first: bool) -> float:
        """The same of a microbatch on all stages of the place."""
        return sum(self.gradient_seconds(stage, is_first=is_first) for stage in self._sizes.made)

    # ---- buckets --------------------------------------------------------------------------------------

    def update(self, bucket: int) -> StepTerms:
        """The update of what a rank owns of a bucket; then weights rest split, whole or once per host."""
        plan, bytes_ = self._plan, self._bytes[bucket]
        gradient_bytes = self._group.stage.gradient_buckets[bucket].element_bytes
        owned = bytes_.num_elements * self.owned_fraction
        in_all = owned * (bytes_.weight + gradient_bytes + bytes_.master + bytes_.state)
        seconds = self._prices.update(self._blueprint.update_spec.optimizer, owned, in_all)
        updated = bytes_.master or bytes_.weight
        if gradient_bytes != updated:  # gradients are converted just before
            seconds += self._prices.memory_pass(owned * (gradient_bytes + updated))
        if plan.offload == "states":
            seconds += self._prices.offload(owned * (gradient_bytes + bytes_.weight))
        if plan.is_asynchronous:  # the version that microbatches in flight use is kept
            seconds += self._prices.memory_pass(2 * owned * bytes_.weight)
        return ZERO._replace(update=seconds, overhead=self._between)

    @cached_property
    def owned_fraction(self) -> float:
        """The part of a bucket that a rank updates."""
        if self._group.resting_layouts.state != SPLIT:
            return 1.0
        return 1.0 / self._blueprint.host_ranks(self._group, self._group.hosts.ranks_per_host).num_shards

    def pull(self, bucket: int) -> StepTerms:
        """The outer update: the change of the weights, their reference and its momentum.

        The change is a difference, scaled; it is added to the reference, which is copied to the weights, and these to
        the reference when the next step begins: 3 + 2 + 3 + 2 + 2 tensors read or written. A momentum is scaled and
        added to, and added to the reference: 2 + 3 + 3.
        """
        bytes_ = self._bytes[bucket]
        momentum = max(0, bytes_.local_sgd_state - bytes_.weight)
        moved = bytes_.num_elements * (12 * bytes_.weight + 8 * momentum)
        own = self.collectives.push(bucket).own
        return ZERO._replace(update=self._prices.memory_pass(moved), exposed=own, overhead=self._between)

    # ---- scalars --------------------------------------------------------------------------------------

    def measure(self, action: Action) -> StepTerms:
        """Scalars that are summed over ranks. Nothing waits for the loss: its sum goes on while ranks compute."""
        num_params = self._sizes.num_params
        passes, num_scalars, group = {
            GRAD_NORM: (1, 1, self._world),
            USED_PARAMS: (0, num_params, self.collectives.shapes.whole),
            TRUST_NORMS: (4, 2 * num_params, self.collectives.shapes.whole),
        }.get(action.index, (0, 0, GroupShape(1)))
        gradients = sum(self._sizes.kept.values()) * self.owned_fraction
        summed = collective_seconds(self._prices, Change.ALL_REDUCE, num_scalars * SCALAR_BYTES, group).total
        update = self._prices.memory_pass(passes * gradients) if passes else 0.0
        return ZERO._replace(update=update, exposed=summed, overhead=self._between)

    @cached_property
    def _world(self) -> GroupShape:
        topology = self._blueprint.topology
        return shape_of(topology, range(topology.size), shares_memory=self._group.hosts.shares_memory)

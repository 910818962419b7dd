"""Step pricing: what plans take by the facts of a model and the prices of a machine.

busy   seconds that all places together compute for one microbatch
place  of the pipeline; its devices are equal
Law: equal segments are priced once for all plans that compute them alike.
"""

from typing import Any

from fourfold.plan.predict.cluster import Cluster, topology_of
from fourfold.plan.predict.facts import FactsSource, SegmentFacts
from fourfold.plan.predict.prices import Prices
from fourfold.words.errors import Problem


class StepPricing:
    """The `Pricing` of a task on a cluster."""

    def __init__(self, source: FactsSource, prices: Prices, cluster: Cluster, num_devices: int) -> None:
        self._source, self._prices, self._cluster = source, prices, cluster
        self._topology = topology_of(cluster, num_devices)
        # By the identity of facts, which the source remembers: their distinct segments with their numbers.
        self._distinct: dict[int, list[tuple[SegmentFacts, int]]] = {}
        self._busy: dict[tuple[Any, ...], float] = {}
        self._problems: dict[tuple[Any, ...], list[Problem]] = {}

    def on_devices(self, num_devices: int) -> "StepPricing":
        return StepPricing(self._source, self._prices, self._cluster, num_devices)

    def slowdown(self) -> float:
        return self._prices.slowdown()

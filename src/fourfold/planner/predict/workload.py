"""Workload: what is planned, in the numbers that turn seconds into rates.

unit   what throughput counts: tokens or samples
share  of the peak: the operations of forward and backward in a second, over what the devices could do at most; what is
       computed again is not counted
Law: two plans of one workload have rates in the ratio of their speeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import FactsSource, OperationKind, SegmentFacts
from fourfold.planner.predict.prediction import Prediction

PASSES = 3  # a backward takes as many operations as two forwards


@dataclass(frozen=True)
class Workload:
    """A task on a machine.

    num_parameters  that are trained
    num_units       tokens or samples of a step, over all data ranks
    flops           of a step: forward and backward, over all ranks
    again_flops     by the plan's `recompute`: those that a step computes again in addition
    memory_bytes    of a device; None: not known
    peak_flops      operations a second of a device; None: not known
    """

    task: str
    machine: str
    num_parameters: int
    batch_size: int
    unit: str
    num_units: float
    flops: float
    memory_bytes: float | None = None
    peak_flops: float | None = None
    again_flops: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        source: FactsSource,
        *,
        task: str,
        machine: str,
        memory_bytes: float | None = None,
        peak_flops: float | None = None,
    ) -> Self:
        """The workload of a task whose facts are those of one rank. Raises PlanError."""
        plan = Plan()
        facts = source.facts(plan)
        batch_size = source.batch_size
        return cls(
            task=task,
            machine=machine,
            num_parameters=sum(spec.num_elements for spec in source.specs(plan)),
            batch_size=batch_size,
            unit="samples" if facts.tokens is None else "tokens",
            num_units=batch_size * (facts.tokens or 1),
            flops=PASSES * batch_size * sum(segment.flops for segment in facts.segments),
            memory_bytes=memory_bytes,
            peak_flops=peak_flops,
            again_flops={
                "full": batch_size * sum(block.flops for block in facts.blocks),
                "selective": batch_size * sum(_attention_flops(block) for block in facts.blocks),
            },
        )

    def units_per_second(self, prediction: Prediction) -> float:
        return self.num_units / prediction.seconds

    def flops_per_second(self, prediction: Prediction) -> float:
        """What a device computes, with what it computes again: the rate that Megatron's tables have."""
        plan = prediction.plan
        done = self.flops + self.again_flops.get(plan.recompute, 0.0)
        return done / (prediction.seconds * plan.mesh.size)

    def share_of_peak(self, prediction: Prediction) -> float | None:
        """The fraction of the peak of all devices; None where the peak is not known."""
        if self.peak_flops is None:
            return None
        return self.flops / (prediction.seconds * prediction.plan.mesh.size * self.peak_flops)


def _attention_flops(block: SegmentFacts) -> float:
    return sum(each.flops for each in block.operations if each.kind is OperationKind.ATTENTION)

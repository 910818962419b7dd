"""Operation seconds: what a segment takes by its operations alone, at measured rates.

Law: the price of a segment is linear in what its operations read, write and compute, but for the rates of small ones.
"""

from typing import NamedTuple

from fourfold.plan.predict.calibration import OperationRates
from fourfold.plan.predict.facts import Operation, OperationKind, SegmentFacts


class OperationSeconds(NamedTuple):
    """Of one pass over a segment's operations. `attention`: the part of the forward that attentions take."""

    forward: float
    backward_input: float
    backward_weight: float
    attention: float


def operation_seconds(facts: SegmentFacts, rates: OperationRates, num_samples: float) -> OperationSeconds:
    """Without collectives, and without what a step does between operations."""
    forward = backward_input = backward_weight = attention = 0.0
    for operation in facts.operations:
        seconds = _seconds(operation, rates, num_samples)
        forward += seconds
        # With a weight, both gradients are products as large; without one, both are of inputs.
        backward_input += seconds if operation.has_weight else 2 * seconds
        backward_weight += seconds if operation.has_weight else 0.0
        attention += seconds if operation.kind == OperationKind.ATTENTION else 0.0
    return OperationSeconds(forward, backward_input, backward_weight, attention)


def _seconds(operation: Operation, rates: OperationRates, num_samples: float) -> float:
    """Arithmetic or memory, whichever takes longer."""
    moved = rates.passes.at(operation.moved_bytes * num_samples + operation.weight_bytes)
    curves = {
        OperationKind.PRODUCT: rates.products,
        OperationKind.ATTENTION: rates.attention,
        OperationKind.CONVOLUTION: rates.convolution,
    }
    if operation.kind not in curves:
        return moved
    return max(moved, curves[operation.kind].at(operation.flops * num_samples))

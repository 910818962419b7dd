"""Operation seconds: what a segment takes by its operations alone, at measured rates.

thin  a product of a few rows with a weight: what it takes, reading the weight decides
Law: the price of a segment is the sum over its operations, and more samples never cost less.
"""

from typing import NamedTuple

from fourfold.plan.predict.calibration import OperationRates
from fourfold.plan.predict.curve import Curve
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
        seconds = _seconds(operation, rates, num_samples, rates.thin)
        forward += seconds
        # With a weight, both gradients are operations as large; without one, both are of inputs.
        backward_input += seconds if operation.has_weight else 2 * seconds
        backward_weight += _seconds(operation, rates, num_samples, rates.outer) if operation.has_weight else 0.0
        attention += seconds if operation.kind == OperationKind.ATTENTION else 0.0
    return OperationSeconds(forward, backward_input, backward_weight, attention)


def _seconds(operation: Operation, rates: OperationRates, num_samples: float, thin: Curve) -> float:
    """Arithmetic or memory, whichever takes longer. `thin`: of products with a weight, by their rows."""
    moved = operation.moved_bytes * num_samples + operation.weight_bytes
    flops = operation.flops * num_samples
    if operation.kind == OperationKind.PRODUCT:
        elements = operation.columns * operation.inner if operation.has_weight else 0
        return max(rates.products.at(flops), thin.at(operation.rows * num_samples) * elements)
    if operation.kind == OperationKind.ATTENTION:
        return max(rates.attention.at(flops), rates.passes.at(moved))
    if operation.kind == OperationKind.CONVOLUTION:
        return max(rates.convolution.at(flops), rates.passes.at(moved))
    return rates.pointwise.at(moved)

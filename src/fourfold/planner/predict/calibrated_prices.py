"""Calibrated prices: what this machine charges, from what was measured here.

measured  a segment whose signature and cut are in the calibration; any other is priced by its operations
thin      a product of a few rows with a weight: what it takes, reading the weight decides
Law: between measured sizes prices are linear; more samples, bytes, elements or ranks never cost less. The price of any
other segment is the sum over its operations.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fourfold.plan.codec import CodecSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.calibration import (
    Calibration,
    CalibrationError,
    CollectiveRecord,
    Curve,
    Cut,
    ExchangeRecord,
    OperationRates,
    SegmentRecord,
    signature,
)
from fourfold.planner.predict.facts import Collective, Operation, OperationKind, SegmentFacts
from fourfold.planner.predict.prices import GroupShape, SegmentSeconds
from fourfold.words.errors import Problem
from fourfold.words.layout import Change

# ---- operation seconds ---------------------------------------------------------------------------------------------


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


# ---- calibrated prices ---------------------------------------------------------------------------------------------


MAX_EXCHANGED = 0.9  # of a segment: what its collectives take at most, if they are priced apart from it


class OperationFactors(NamedTuple):
    """Seconds that segments took over those that their operations add up to."""

    forward: float
    backward: float


class _Exchanged(NamedTuple):
    """What collectives inside a segment take."""

    forward: float
    backward: float


class CalibratedPrices:
    """See `Prices`. Raises CalibrationError where nothing was measured from which a price follows."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._rates = calibration, calibration.operations
        self._segments = {
            (each.signature, each.cut, each.second_half is not None): each for each in calibration.segments
        }

    # ---- segments -------------------------------------------------------------------------------------

    def segment(self, facts: SegmentFacts, plan: Plan, num_samples: float) -> SegmentSeconds:
        record = self._record(facts, plan)
        modelled = operation_seconds(facts, self._rates, num_samples)
        if record is None:
            own = self._corrected(modelled)
            sent = self._exchanged(facts.collectives, plan, num_samples)
            seconds = SegmentSeconds(
                own.forward + sent.forward, own.backward_input + sent.backward, own.backward_weight
            )
        else:
            seconds = self._measured(record, facts, plan, num_samples)
        return self._with_recompute(seconds, modelled, plan)

    def _record(self, facts: SegmentFacts, plan: Plan) -> SegmentRecord | None:
        key = signature(facts), Cut.of(plan)
        divided = self._segments.get((*key, True)) if plan.divides_backward else None
        return divided or self._segments.get((*key, False))

    def _corrected(self, seconds: OperationSeconds) -> SegmentSeconds:
        """With what segments that were measured took more than their operations."""
        forward, backward = self._calibration.forward_factor, self._calibration.backward_factor
        return SegmentSeconds(
            seconds.forward * forward, seconds.backward_input * backward, seconds.backward_weight * backward
        )

    def _measured(self, record: SegmentRecord, facts: SegmentFacts, plan: Plan, num_samples: float) -> SegmentSeconds:
        forward, backward = record.forward.at(num_samples), record.backward.at(num_samples)
        if record.second_half is not None:
            seconds = SegmentSeconds(forward, backward, record.second_half.at(num_samples))
        else:
            share = self._weight_share(facts, record)
            seconds = SegmentSeconds(forward, backward * (1 - share), backward * share)
        absent = [each for each in record.collectives if each not in facts.collectives]
        if not absent:
            return seconds
        # At the largest measured size, so that the share is the same for all.
        reference = record.forward.sizes[-1]
        sent = self._exchanged(absent, plan, reference)
        own_forward = 1 - _share(sent.forward, record.forward.at(reference))
        own_backward = 1 - _share(sent.backward, record.backward.at(reference))
        return SegmentSeconds(
            seconds.forward * own_forward, seconds.backward_input * own_backward, seconds.backward_weight
        )

    def _weight_share(self, facts: SegmentFacts, record: SegmentRecord) -> float:
        """The part of a whole backward that gradients of weights take: as operations have it."""
        seconds = operation_seconds(facts, self._rates, record.backward.sizes[-1])
        return _share(seconds.backward_weight, seconds.backward_input + seconds.backward_weight, most=1.0)

    def _with_recompute(self, seconds: SegmentSeconds, modelled: OperationSeconds, plan: Plan) -> SegmentSeconds:
        """`full` computes the forward again; `selective` what attentions save."""
        if plan.recompute == "none":
            return seconds
        share = 1.0 if plan.recompute == "full" else _share(modelled.attention, modelled.forward, most=1.0)
        return seconds._replace(backward_input=seconds.backward_input + share * seconds.forward)

    def _exchanged(self, collectives: Iterable[Collective], plan: Plan, num_samples: float) -> _Exchanged:
        """What collectives inside a forward and a backward take; those of a second forward are in that forward."""
        forward = backward = 0.0
        for each in collectives:
            size = {"tp": plan.tp, "cp": plan.cp}[each.axis]
            seconds = self._exchange(each.axis, each.change, each.whole_bytes * num_samples, size)
            forward += each.forward * seconds
            backward += each.backward * seconds
        return _Exchanged(forward, backward)

    def _exchange(self, axis: str, change: Change, whole_bytes: float, size: int) -> float:
        """One collective among tensor ranks, or context ranks, which pass blocks round a ring."""
        if size == 1:
            return 0.0
        record, factor = self._exchange_record(size)
        if axis == "tp":
            part = 1.0 if change == Change.ALL_REDUCE else 0.5
            return part * record.all_reduce.at(whole_bytes * factor)
        hops = {Change.ALL_REDUCE: 2 * (size - 1), Change.ALL_TO_ALL: (size - 1) / size}.get(change, size - 1)
        return hops * record.hop.at(whole_bytes / size)

    def _exchange_record(self, size: int) -> tuple[ExchangeRecord, float]:
        """The record of the nearest group size, and by how much more bytes move in a group of this size."""
        records = self._calibration.exchanges
        if not records:
            raise _not_measured("exchanges of tensor or context ranks")
        nearest = min(records, key=lambda each: (abs(each.size - size), each.size))
        return nearest, _moved(size) / _moved(nearest.size)

    # ---- the data axis --------------------------------------------------------------------------------

    def collective(self, change: Change, whole_bytes: float, group: GroupShape) -> float:
        if group.size == 1 or change == Change.NONE:
            return 0.0
        records = [
            each
            for each in self._calibration.collectives
            if each.change == change
            and each.shares_memory == group.shares_memory
            and (each.hosts > 1) == (group.hosts > 1)
        ]
        if not records:
            where = f"{group.hosts} hosts" if group.hosts > 1 else "one host"
            how = "in shared memory" if group.shares_memory else "over messages"
            raise _not_measured(f"{change} {how} on {where}")
        nearest = min(records, key=lambda each: _distance(each, group))
        moved = _moved(group.size) / _moved(nearest.ranks_per_host * nearest.hosts)
        return nearest.curve.at(whole_bytes * moved)

    def edge(self, num_bytes: float, *, crosses_hosts: bool) -> float:
        curve = self._calibration.edge_between_hosts if crosses_hosts else self._calibration.edge
        if curve is None:
            raise _not_measured(f"messages between stages on {'two hosts' if crosses_hosts else 'one host'}")
        return curve.at(num_bytes)

    def update(self, optimizer: str, num_elements: float, num_bytes: float) -> float:
        """An optimizer that was not measured is a pass over its bytes, most of which are read and written."""
        curve = self._calibration.updates.get(optimizer)
        return self.memory_pass(2 * num_bytes) if curve is None else curve.at(num_bytes)

    def memory_pass(self, num_bytes: float) -> float:
        return self._rates.passes.at(num_bytes)

    def codec(self, codec: CodecSpec, num_elements: float) -> float:
        """Products of low-rank factors grow with their rank; other codecs look at every element once."""
        if codec.kind not in self._calibration.codecs:
            raise _not_measured(f"codec {codec.kind}")
        factor = codec.matrix_rank / CodecSpec(codec.kind).matrix_rank if codec.kind == "powersgd" else 1.0
        return self._calibration.codecs[codec.kind].at(num_elements) * factor

    def offload(self, num_bytes: float) -> float:
        return 0.0  # ranks compute on the host

    def slowdown(self) -> float:
        return self._calibration.slowdown

    def waiting(self) -> float:
        machine = self._calibration.machine
        return min(1.0, machine.cores / (machine.ranks_per_host * machine.threads))

    def between_actions(self) -> float:
        return self._calibration.between_actions

    def around_step(self) -> float:
        return self._calibration.around_step


def operation_factors(
    measured: Iterable[tuple[SegmentFacts, SegmentRecord]], rates: OperationRates
) -> OperationFactors:
    """Of the segments with whole backwards, at the most samples that were measured, without their collectives."""
    totals = [0.0] * 4
    for facts, record in measured:
        if record.second_half is not None or record.cut != Cut(precision=record.cut.precision):
            continue
        size = record.forward.sizes[-1]
        modelled = operation_seconds(facts, rates, size)
        measured_both = (record.forward.at(size), record.backward.at(size))
        added = (*measured_both, modelled.forward, modelled.backward_input + modelled.backward_weight)
        totals = [total + each for total, each in zip(totals, added, strict=True)]
    forward, backward, modelled_forward, modelled_backward = totals
    if not modelled_forward:
        return OperationFactors(1.0, 1.0)
    return OperationFactors(forward / modelled_forward, backward / modelled_backward)


def _moved(size: int) -> float:
    """The part of a tensor that each rank of a group reads or sends."""
    return (size - 1) / size


def _share(part: float, whole: float, *, most: float = MAX_EXCHANGED) -> float:
    return min(part / whole, most) if whole else 0.0


def _distance(record: CollectiveRecord, group: GroupShape) -> tuple[int, int]:
    return abs(record.hosts - group.hosts), abs(record.ranks_per_host - group.ranks_per_host)


def _not_measured(what: str) -> CalibrationError:
    attempt = "fourfold plan calibrate with ranks that have them, or a described cluster: cluster=FILE"
    return CalibrationError(Problem(f"no measurement of {what}", "one from which the price follows", attempt))

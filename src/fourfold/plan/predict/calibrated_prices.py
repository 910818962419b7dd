"""Calibrated prices: what this machine charges, from what was measured here.

measured  a segment whose signature and cut are in the calibration; any other is priced by its operations
Law: between measured sizes prices are linear; more samples, bytes, elements or ranks never cost less.
"""

from collections.abc import Sequence

from fourfold.plan.codec import CodecSpec
from fourfold.plan.plan import Plan
from fourfold.plan.predict.calibration import Calibration, CalibrationError, CollectiveRecord, Cut, SegmentRecord, signature
from fourfold.plan.predict.curve import Curve
from fourfold.plan.predict.facts import Collective, Operation, OperationKind, SegmentFacts
from fourfold.plan.predict.prices import GroupShape, SegmentSeconds
from fourfold.words.errors import Problem
from fourfold.words.layout import Change

ATTENTION_BACKWARD = 2.0
"""Backward of an operation without weights, in forwards: two gradients of inputs."""


class CalibratedPrices:
    """See `Prices`."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._segments = {(each.signature, each.cut, each.is_divided): each for each in calibration.segments}
        self._collectives: dict[tuple[str, bool], list[CollectiveRecord]] = {}
        for each in calibration.collectives:
            self._collectives.setdefault((each.change, each.shares_memory), []).append(each)

    # ---- segments -------------------------------------------------------------------------------------

    def segment(self, facts: SegmentFacts, plan: Plan, num_samples: float) -> SegmentSeconds:
        record = self._record(facts, plan)
        seconds = self._by_operations(facts, num_samples) if record is None else _of_record(record, num_samples)
        absent = self._absent_collectives(facts, plan, record)
        return seconds

    def _record(self, facts: SegmentFacts, plan: Plan) -> SegmentRecord | None:
        key = signature(facts), Cut.of(plan)
        return self._segments.get((*key, plan.divides_backward)) or self._segments.get((*key, False))

"""The calibration: curves, the file, and the prices that follow from what was measured."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.codec import CodecSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.calibrated_prices import CalibratedPrices, operation_factors, operation_seconds
from fourfold.planner.predict.calibration import (
    Calibration,
    CalibrationError,
    CollectiveRecord,
    Curve,
    Cut,
    ExchangeRecord,
    MachineIdentity,
    OperationRates,
    SegmentRecord,
    calibration_path,
    decode_calibration,
    encode_calibration,
    read_calibration,
    signature,
    write_calibration,
)
from fourfold.planner.predict.facts import Operation, OperationKind, SegmentFacts
from fourfold.planner.predict.prices import GroupShape
from fourfold.words.layout import Change
from tests.planner_cases import ChainFacts

MACHINE = MachineIdentity("a processor", 2, "2.13.0", 1, 2)
LINE = Curve((1.0, 2.0, 4.0), (1.0, 2.0, 4.0))
seconds = st.floats(0.0, 1e3)
points = st.lists(st.tuples(st.floats(1.0, 1e9), seconds), min_size=1, max_size=6)
curves = points.map(Curve.through)


def scaled(rate: float) -> Curve:
    return Curve((1e3, 1e9), (1e3 / rate, 1e9 / rate))


RATES = OperationRates(
    products=scaled(1e9),
    thin=Curve((1.0, 4.0, 1e6), (1e-7, 1e-7, 2e-3)),  # of up to four rows, reading the weight decides
    outer=Curve((1.0, 4.0, 1e6), (4e-7, 4e-7, 2e-3)),
    attention=scaled(5e8),
    convolution=scaled(1e9),
    pointwise=scaled(1e9),
    passes=scaled(1e10),
)


def calibration(*segments: SegmentRecord) -> Calibration:
    groups = [(2, 1, True), (2, 1, False), (4, 1, True)]
    changes = (Change.ALL_REDUCE, Change.REDUCE_SCATTER, Change.ALL_GATHER)
    return Calibration(
        machine=MACHINE,
        load=0.5,
        is_forced=False,
        segments=segments,
        collectives=tuple(CollectiveRecord(change, *group, scaled(1e9)) for change in changes for group in groups),
        updates={"AdamW": scaled(2e9)},
        codecs={"topk": scaled(1e8), "powersgd": scaled(1e8)},
        exchanges=(ExchangeRecord(2, scaled(1e9), scaled(1e9)),),
        edge=scaled(1e9),
        edge_between_hosts=None,
        operations=RATES,
        forward_factor=1.25,
        backward_factor=1.5,
        slowdown=1.5,
        between_actions=1e-5,
        around_step=1e-3,
    )


def block(plan: Plan) -> SegmentFacts:
    return ChainFacts().facts(plan).blocks[0]


def record(plan: Plan, factor: float = 1.0, second_half: Curve | None = None) -> SegmentRecord:
    """A block of which one sample takes a second forward and two seconds backward, times a factor."""
    facts, cut = block(plan), Cut.of(plan)
    curves = Curve((1.0, 4.0), (factor, 4 * factor)), Curve((1.0, 4.0), (2 * factor, 8 * factor))
    return SegmentRecord(signature(facts), cut, *curves, second_half, facts.collectives)


# ---- curves ---------------------------------------------------------------------------------------------


@given(curves, st.floats(0.0, 1e10), st.floats(0.0, 1e10))
def test_more_never_costs_less(curve: Curve, one: float, other: float):
    less, more = sorted((one, other))
    assert 0.0 <= curve.at(less) <= curve.at(more) * (1 + 1e-9)


@given(points)
def test_a_curve_keeps_measurements_that_rise(measured: list[tuple[float, float]]):
    sizes = sorted({size for size, _ in measured})
    rising = sorted(second for _, second in measured)[: len(sizes)]
    curve = Curve.through(zip(sizes, rising, strict=True))
    assert [curve.at(size) for size in sizes] == pytest.approx(rising)


def test_between_measured_sizes_and_beyond_them_a_curve_is_linear():
    curve = Curve((2.0, 4.0, 8.0), (3.0, 4.0, 10.0))
    assert [curve.at(size) for size in (0.0, 3.0, 6.0, 12.0)] == [2.0, 3.5, 7.0, 16.0]


def test_measurements_that_fall_share_their_mean():
    assert Curve.through([(1.0, 1.0), (2.0, 5.0), (3.0, 3.0), (4.0, 6.0)]).seconds == (1.0, 4.0, 4.0, 6.0)


def test_times_of_one_size_count_with_their_mean():
    assert Curve.through([(2.0, 1.0), (2.0, 3.0)]) == Curve((2.0,), (2.0,))
    assert Curve((2.0,), (3.0,)).at(4.0) == 6.0


# ---- the file -------------------------------------------------------------------------------------------


@given(curves, curves, st.floats(0.0, 100.0), st.booleans())
def test_a_file_holds_what_was_written(one: Curve, other: Curve, load: float, is_forced: bool):
    facts = block(Plan(tp=2))
    segment = SegmentRecord(signature(facts), Cut(tp=2), one, other, one, facts.collectives)
    written = dataclasses.replace(calibration(segment), load=load, is_forced=is_forced, edge_between_hosts=other)
    assert decode_calibration(encode_calibration(written), where="a file") == written


def test_a_stored_calibration_is_read_again(tmp_path: Path):
    path = tmp_path / "of" / "a user" / "one.json"
    write_calibration(path, calibration())
    assert read_calibration(path, MACHINE) == calibration()


@pytest.mark.parametrize("name", MachineIdentity._fields)
def test_a_calibration_of_another_machine_is_refused_by_name(tmp_path: Path, name: str):
    path = tmp_path / "one.json"
    write_calibration(path, calibration())
    other = MACHINE._replace(**{name: "another" if isinstance(getattr(MACHINE, name), str) else 7})
    with pytest.raises(CalibrationError) as raised:
        read_calibration(path, other)
    (problem,) = raised.value.problems
    assert name.replace("_", " ") in problem.got
    assert str(getattr(MACHINE, name)) in problem.got
    assert str(getattr(other, name)) in problem.need


def test_all_differences_of_a_machine_are_named_at_once(tmp_path: Path):
    path = tmp_path / "one.json"
    write_calibration(path, calibration())
    with pytest.raises(CalibrationError) as raised:
        read_calibration(path, MACHINE._replace(torch="2.14.0", threads=4))
    assert [problem.got for problem in raised.value.problems] == [
        "measured with torch 2.13.0",
        "measured with threads 1",
    ]


def test_another_version_is_refused():
    data = encode_calibration(calibration()).replace(b'"version": 2', b'"version": 1', 1)
    with pytest.raises(CalibrationError, match="version 1"):
        decode_calibration(data, where="a file")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": 2}', b'{"version": 2, "calibration": {}}', b"\xff"])
def test_what_is_no_calibration_is_refused(data: bytes):
    with pytest.raises(CalibrationError):
        decode_calibration(data, where="a file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"edge": Curve((1.0, 2.0), (2.0, 1.0))},
        {"edge": Curve((2.0, 1.0), (1.0, 2.0))},
        {"edge": Curve((), ())},
        {"edge": Curve((1.0,), (1.0, 2.0))},
        {"edge": Curve((1.0,), (-1.0,))},
        {"updates": {"AdamW": Curve((0.0,), (1.0,))}},
        {"slowdown": 0.5},
        {"around_step": -1.0},
        {"between_actions": -1e-9},
    ],
)
def test_numbers_that_no_measurement_gives_are_refused(wrong: dict[str, object]):
    damaged = dataclasses.replace(calibration(), **wrong)
    with pytest.raises(CalibrationError):
        decode_calibration(encode_calibration(damaged), where="a file")


def test_all_damage_is_named_at_once():
    damaged = dataclasses.replace(calibration(), slowdown=0.0, edge=Curve((), ()), around_step=-1.0)
    with pytest.raises(CalibrationError) as raised:
        decode_calibration(encode_calibration(damaged), where="a file")
    assert len(raised.value.problems) == 3


def test_calibrations_lie_in_the_users_cache_by_machine_and_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = {
        calibration_path(machine, task)
        for machine in (MACHINE, MACHINE._replace(threads=2))
        for task in ("lm", "lm width=64")
    }
    assert len(paths) == 4
    assert all(path.is_relative_to(tmp_path / "fourfold") for path in paths)


# ---- prices ---------------------------------------------------------------------------------------------


def test_a_measured_segment_costs_what_was_measured():
    plan = Plan(dp=2)
    prices = CalibratedPrices(calibration(record(plan)))
    found = prices.segment(block(plan), plan, 3.0)
    assert found.forward == pytest.approx(3.0)
    assert found.backward == pytest.approx(6.0)
    # A product with a weight: its two gradients share the backward as they would by themselves.
    modelled = operation_seconds(block(plan), RATES, 4.0)
    share = modelled.backward_weight / (modelled.backward_input + modelled.backward_weight)
    assert found.backward_weight == pytest.approx(6.0 * share)


def test_each_cut_of_a_segment_has_its_own_times():
    whole, split = Plan(dp=2), Plan(tp=2)
    prices = CalibratedPrices(calibration(record(whole), record(split, 0.7)))
    assert prices.segment(block(whole), whole, 1.0).forward == pytest.approx(1.0)
    assert prices.segment(block(split), split, 1.0).forward == pytest.approx(0.7)


def test_divided_backwards_cost_their_own_halves():
    divided = Plan(pp=2, schedule="zero-bubble", microbatches=4)
    halves = record(divided, 1.1, Curve((1.0, 4.0), (0.5, 2.0)))
    prices = CalibratedPrices(calibration(record(divided), halves))
    facts = block(divided)
    found = prices.segment(facts, divided, 1.0)
    assert tuple(found) == pytest.approx((1.1, 2.2, 0.5))
    assert prices.segment(facts, Plan(pp=2, microbatches=4), 1.0).backward == pytest.approx(2.0)


def test_without_its_collectives_a_segment_costs_less():
    plan = Plan(tp=2)
    prices = CalibratedPrices(calibration(record(plan, 1e-5)))
    with_them, bare = (prices.segment(each, plan, 2.0) for each in (block(plan), _bare(block(plan))))
    assert 0 < bare.forward < with_them.forward
    assert 0 < bare.backward < with_them.backward


def _bare(facts: SegmentFacts) -> SegmentFacts:
    return dataclasses.replace(facts, collectives=())


def test_a_segment_that_was_not_measured_is_priced_by_its_operations():
    plan = Plan(dp=2)
    facts = block(plan)
    prices = CalibratedPrices(calibration())
    modelled = operation_seconds(facts, RATES, 4.0)
    found = prices.segment(facts, plan, 4.0)
    assert found.forward == pytest.approx(1.25 * modelled.forward)
    assert found.backward == pytest.approx(1.5 * (modelled.backward_input + modelled.backward_weight))
    split = prices.segment(block(Plan(tp=2)), Plan(tp=2), 4.0)
    assert split.forward > prices.segment(_bare(block(Plan(tp=2))), Plan(tp=2), 4.0).forward


def test_a_product_of_few_rows_costs_what_reading_its_weight_does():
    weight, thin = 64 * 48, Operation(OperationKind.PRODUCT, 2.0 * 64 * 48, 0.0, 0.0, True, 1.0, 64, 48)
    facts = dataclasses.replace(block(Plan()), operations=(thin,))
    one, four = (operation_seconds(facts, RATES, samples) for samples in (1.0, 4.0))
    assert one.forward == four.forward == pytest.approx(1e-7 * weight)
    assert one.backward_input == pytest.approx(1e-7 * weight)
    assert one.backward_weight == pytest.approx(4e-7 * weight)
    many = operation_seconds(facts, RATES, 1e6)
    assert many.forward == pytest.approx(1e6 * 2 * weight / 1e9, rel=0.01)


@pytest.mark.parametrize(("kind", "rate"), [("pointwise", 1e9), ("lookup", 1e9), ("attention", 1e10)])
def test_operations_without_products_cost_their_bytes(kind: str, rate: float):
    operation = Operation(OperationKind(kind), 0.0, 1e6, 5e5)
    found = operation_seconds(dataclasses.replace(block(Plan()), operations=(operation,)), RATES, 2.0)
    assert found.forward == pytest.approx(2.5e6 / rate)
    assert found.backward_input == pytest.approx(5e6 / rate)
    assert found.backward_weight == 0.0


def test_factors_are_what_segments_took_over_what_their_operations_take():
    plan = Plan(dp=2)
    facts, measured = block(plan), record(plan)
    modelled = operation_seconds(facts, RATES, 4.0)
    factors = operation_factors([(facts, measured), (block(Plan(tp=2)), record(Plan(tp=2)))], RATES)
    assert factors.forward == pytest.approx(4.0 / modelled.forward)
    assert factors.backward == pytest.approx(8.0 / (modelled.backward_input + modelled.backward_weight))


def test_recomputing_adds_a_forward():
    plan = Plan(dp=2)
    prices = CalibratedPrices(calibration(record(plan)))
    none, full = (prices.segment(block(plan), Plan(dp=2, recompute=each), 2.0) for each in ("none", "full"))
    assert full.backward == pytest.approx(none.backward + none.forward)


@given(st.floats(0.1, 64.0), st.floats(0.1, 64.0), st.sampled_from([Plan(dp=2), Plan(tp=2), Plan(cp=2)]), st.booleans())
def test_more_samples_never_cost_less(one: float, other: float, plan: Plan, is_measured: bool):
    prices = CalibratedPrices(calibration(*([record(plan)] if is_measured else [])))
    less, more = sorted((one, other))
    for facts in (block(plan), _bare(block(plan))):
        for cheap, dear in zip(prices.segment(facts, plan, less), prices.segment(facts, plan, more), strict=True):
            assert cheap <= dear * (1 + 1e-9)


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9), st.sampled_from([2, 3, 4, 8]), st.booleans())
def test_more_bytes_or_ranks_never_cost_less(one: float, other: float, ranks: int, shares: bool):
    prices = CalibratedPrices(calibration())
    less, more = sorted((one, other))
    for change in (Change.ALL_REDUCE, Change.REDUCE_SCATTER, Change.ALL_GATHER):
        group = GroupShape(ranks, 1, shares)
        assert prices.collective(change, less, group) <= prices.collective(change, more, group) * (1 + 1e-9)
        larger = group._replace(ranks_per_host=2 * ranks)
        if not shares:  # measured for one size of group
            assert prices.collective(change, more, group) <= prices.collective(change, more, larger) * (1 + 1e-9)


def test_a_rank_alone_exchanges_nothing():
    assert CalibratedPrices(calibration()).collective(Change.ALL_REDUCE, 1e9, GroupShape(1)) == 0.0


def test_what_was_not_measured_has_no_price():
    prices = CalibratedPrices(calibration())
    with pytest.raises(CalibrationError, match="all-reduce over messages on 2 hosts"):
        prices.collective(Change.ALL_REDUCE, 1e6, GroupShape(1, hosts=2))
    with pytest.raises(CalibrationError, match="two hosts"):
        prices.edge(1e6, crosses_hosts=True)
    with pytest.raises(CalibrationError, match="codec dct"):
        prices.codec(CodecSpec("dct"), 1e6)


def test_factors_of_a_higher_rank_cost_more():
    prices = CalibratedPrices(calibration())
    low, high = (prices.codec(CodecSpec("powersgd", matrix_rank=rank), 1e6) for rank in (4, 8))
    assert high == pytest.approx(2 * low)


def test_an_optimizer_that_was_not_measured_is_a_pass_over_its_bytes():
    prices = CalibratedPrices(calibration())
    assert prices.update("SGD", 1e6, 8e6) == pytest.approx(prices.memory_pass(16e6))
    assert prices.update("AdamW", 1e6, 16e6) == pytest.approx(16e6 / 2e9)

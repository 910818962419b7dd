"""Laws of what if: every value has its point, and efficiency is the rate of a device over that of the first point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.plan import Plan
from fourfold.planner.plan_text import DEVICES, Curve, Point, curve_rows, format_curves
from fourfold.report.plan_pages import describe_curves
from tests.decision_cases import WORKLOAD, prediction
from tests.report_data import parts, visible_text


def point(devices: int, seconds: float) -> Point:
    """The best plan on so many devices."""
    return Point(str(devices), float(devices), WORKLOAD, prediction(Plan(dp=devices), compute=1e3 * seconds))


NOTHING = Point("64", 64.0, None, None, "no plan fits; need 80 GiB")
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True).map(sorted)


@given(sizes=SIZES, speed=st.floats(0.1, 10), loss=st.floats(0.0, 0.9))
def test_a_step_that_shrinks_as_devices_grow_keeps_their_efficiency(sizes, speed, loss):
    ideal = Curve(DEVICES, "strong", tuple(point(size, speed / size) for size in sizes))
    assert [ideal.efficiency(each) for each in ideal.points] == pytest.approx([1.0] * len(sizes))
    slower = Curve(DEVICES, "strong", (*ideal.points, point(128, speed / 128 / (1 - loss))))
    assert slower.efficiency(slower.points[-1]) == pytest.approx(1 - loss)


def test_efficiency_is_relative_to_the_first_point_that_fits_and_only_of_devices():
    curve = Curve(DEVICES, "strong", (NOTHING, point(2, 0.5), point(4, 0.5)))
    assert [curve.efficiency(each) for each in curve.points] == [None, 1.0, 0.5]
    assert Curve("network", "by network", (point(2, 0.5),)).efficiency(point(2, 0.5)) is None


def test_where_nothing_fits_the_row_says_why():
    curve = Curve(DEVICES, "strong scaling", (point(2, 0.5), NOTHING))
    head, first, last = curve_rows(curve)
    assert head == ("devices", "step", "tokens/s", "efficiency", "memory", "plan")
    assert first == ("2", "500 ms", "8.19 k", "100 %", "1.00 GiB", "dp=2")
    assert last == ("64", "", "", "", "", "no plan fits; need 80 GiB")
    text = format_curves([curve], head="what if")
    assert text.startswith("what if\n\nstrong scaling\n")
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_the_page_has_every_number_of_the_text_and_draws_every_point():
    curves = [
        Curve(DEVICES, "strong scaling", (point(2, 0.5), point(4, 0.3), NOTHING)),
        Curve(DEVICES, "weak scaling", (point(2, 0.5), point(4, 0.6))),
    ]
    data = describe_curves(curves, title="What if", under="lm")
    page = visible_text(data)
    for curve in curves:
        for row in curve_rows(curve):
            assert all(cell in page for cell in row)
    drawn = [part["series"] for part in parts(data) if part["kind"] == "lines"]
    assert [[len(each["points"]) for each in series] for series in drawn] == [[2, 2], [2, 2]]


def test_an_axis_in_bytes_is_drawn_in_its_unit():
    gib = 2.0**30
    curve = Curve(
        "memory", "by memory", (point(2, 0.5)._replace(value=8 * gib), point(2, 0.4)._replace(value=16 * gib))
    )
    drawn = next(parts(describe_curves([curve], title="What if", under="lm")))
    assert [x for x, _ in drawn["series"][0]["points"]] == [8.0, 16.0]
    assert drawn["x"] == "memory of a device, GiB"

"""The law of the tensor axis on real processes, in shared memory, over gloo and on two hosts."""

import pytest

from fourfold.testing.oracle import TOLERANCE

CASES = "tests.spawned.tensor_axis"
# Fewer heads of keys and values than tensor ranks; tensor ranks with sharded weights, and with a sequence.
PLANS = [{"tp": 4}, {"dp": 2, "tp": 2, "zero": 3}, {"cp": 2, "tp": 2, "zero": 1}]


@pytest.mark.parametrize(("plans", "host"), [
    (PLANS, None),
    ([{"dp": 2, "tp": 2, "zero": 1, "transport": "gloo"}], None),
    ([{"dp": 2, "tp": 2, "zero": 2}, {"tp": 4}], "two"),
])  # fmt: skip
def test_processes_train_as_one_device(world, plans, host):
    for deviations in world(4).run(f"{CASES}:deviations", plans=plans, host=host, time_limit_seconds=120.0):
        assert max(deviations) <= TOLERANCE


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_processes_in_different_calls_report_it_and_do_not_wait(world, transport):
    for evaluated, left_out in world(2).run(f"{CASES}:divergences", transport=transport, time_limit_seconds=60.0):
        assert "rank 0 is at step 2; rank 1 is at evaluate() after step 1" in evaluated
        assert "rank 0 is at step 2; rank 1 is at state_dict() after step 1" in left_out

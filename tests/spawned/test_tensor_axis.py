"""The law of the tensor axis on real processes, in shared memory, over gloo and on two hosts."""

import pytest

from fourfold.testing.oracle import TOLERANCE

FUNCTION = "tests.spawned.tensor_axis:deviations"
# Fewer heads of keys and values than tensor ranks; tensor ranks with sharded weights, and with a sequence.
PLANS = [{"tp": 4}, {"dp": 2, "tp": 2, "zero": 3}, {"sp": 2, "tp": 2, "zero": 1}]


@pytest.mark.parametrize(("plans", "host"), [
    (PLANS, None),
    ([{"dp": 2, "tp": 2, "zero": 1, "transport": "gloo"}], None),
    ([{"dp": 2, "tp": 2, "zero": 2}, {"tp": 4}], "two"),
])  # fmt: skip
def test_processes_train_as_one_device(world, plans, host):
    for deviations in world(4).run(FUNCTION, plans=plans, host=host, time_limit_seconds=120.0):
        assert max(deviations) <= TOLERANCE

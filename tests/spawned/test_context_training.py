"""Laws of the context axis in training, on real processes."""

import pytest

from fourfold.testing.oracle import TOLERANCE

CASES = "tests.spawned.rank_functions"


@pytest.mark.parametrize(("size", "transport", "fields"), [
    (2, "shared", {"cp": 2, "clip": 0.5}),
    (4, "gloo", {"cp": 2, "ulysses": 2, "zero": 1, "microbatches": 2}),
    (4, "shared", {"cp": 4, "zero": 2, "length": 13}),
    (4, "gloo", {"cp": 4, "length": 13}),
    (4, "gloo", {"cp": 2, "zero": 3, "update": "in_forward", "clip": 0.5}),
])  # fmt: skip
def test_sharded_sequences_train_as_the_oracle(world, size, fields, transport):
    fields = {"model": "lm", "batch_sizes": [4, 4, 3], "transport": transport, **fields}
    results = world(size).run(f"{CASES}:deviation", **fields)
    assert max(result["deviation"] for result in results) <= TOLERANCE


@pytest.mark.parametrize("fields", [{"cp": 2}, {"dp": 2, "zero": 1, "update": "in_backward"}, {"pp": 2}])
def test_a_plan_is_verified_on_its_mesh(world, fields):
    found, other = world(2).run(f"{CASES}:verdict", **fields)
    assert found["tensors"] == 15
    assert found["worst"] <= TOLERANCE
    assert other is None

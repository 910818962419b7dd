"""Laws of precision: which dtypes, and how many bytes."""

import pytest

from fourfold.axes.data.rules.buckets import make_buckets
from fourfold.axes.data.rules.zero import ShardGroups, step_sent_bytes
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.precision import LossScaler, compute_specs, gradient_bucket, has_master_weights

SPECS = [
    ParamSpec("a", (100,), "float32", 4),
    ParamSpec("norm", (10,), "float32", 4),
    ParamSpec("count", (1,), "int64", 8),
    ParamSpec("small", (10,), "bfloat16", 2),
]


def test_floating_point_weights_are_cast_to_two_bytes_and_others_kept():
    assert compute_specs(SPECS, "keep") == SPECS
    names = {spec.name: (spec.dtype, spec.element_bytes) for spec in compute_specs(SPECS, "fp16", excluded={"norm"})}
    assert names == {"a": ("float16", 2), "norm": ("float32", 4), "count": ("int64", 8), "small": ("float16", 2)}


def test_only_buckets_in_the_compute_dtype_have_master_weights():
    buckets = make_buckets(compute_specs(SPECS, "bf16", excluded={"norm"}), bucket_bytes=1000)
    assert {b.slots[0].name: has_master_weights(b, "bf16") for b in buckets} == {
        "small": True,
        "norm": False,
        "count": False,
    }
    assert not any(has_master_weights(bucket, "keep") for bucket in buckets)


@pytest.mark.parametrize(("zero", "reduce", "factor"), [
    (0, "keep", 2 * 2), (0, "fp32", 2 * 4), (1, "keep", 2 + 2), (1, "fp32", 4 + 2), (2, "fp32", 3 * 4 + 2),
])  # fmt: skip
def test_gradients_and_weights_are_sent_in_their_own_dtypes(zero, reduce, factor):
    (bucket,) = make_buckets(compute_specs(SPECS[:1], "bf16"), bucket_bytes=1000)
    sent = step_sent_bytes(
        [bucket],
        zero=zero,
        shard_groups=ShardGroups(4),
        microbatches=3,
        gradient_buckets=[gradient_bucket(bucket, reduce)],
    )
    assert sent == pytest.approx(factor * 100 * 3 / 4)


def test_an_invalid_loss_scale_is_not_restored():
    scale = LossScaler()
    for state in ({"value": float("nan"), "good": 1}, {"value": 0.0, "good": 1}, {"value": float("inf"), "good": 1}):
        scale.load_state(state)
        assert scale.state == {"value": 65536.0, "good": 0}
    scale.load_state({"value": 8.0, "good": 5000})
    assert scale.state == {"value": 8.0, "good": 1000}

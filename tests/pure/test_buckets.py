"""Laws of buckets and of the step program of the data axis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.data.rules.buckets import effective_bucket_bytes, make_buckets
from fourfold.axes.data.rules.step_program import DataStepSpec, lower_step
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, ShardGroups, layout_changes, step_sent_bytes
from fourfold.plan.param_spec import ParamSpec
from fourfold.words.layout import Change
from fourfold.words.program import Verb

SPECS = st.lists(
    st.tuples(st.integers(1, 500), st.sampled_from([("float32", 4), ("float64", 8)]), st.integers(0, 2)),
    min_size=1,
    max_size=30,
).map(lambda rows: [ParamSpec(f"p{i}", (n,), dtype, size, group) for i, (n, (dtype, size), group) in enumerate(rows)])


@given(specs=SPECS, bucket_bytes=st.integers(1, 4000))
def test_slots_tile_buckets(specs, bucket_bytes):
    buckets = make_buckets(specs, bucket_bytes=bucket_bytes)
    by_name = {spec.name: spec for spec in specs}
    assert sorted(slot.name for bucket in buckets for slot in bucket.slots) == sorted(by_name)
    for number, bucket in enumerate(buckets):
        assert bucket.index == number
        assert bucket.slots[0].start == 0
        for slot, after in zip(bucket.slots, bucket.slots[1:], strict=False):
            assert slot.stop == after.start
        for slot in bucket.slots:
            spec = by_name[slot.name]
            assert slot.stop - slot.start == spec.num_elements
            assert (spec.dtype, spec.param_group) == (bucket.dtype, bucket.param_group)
        assert bucket.size == bucket.slots[-1].stop
        assert len(bucket.slots) == 1 or bucket.slots[-1].stop * bucket.element_bytes <= bucket_bytes


@given(specs=SPECS, bucket_bytes=st.integers(1, 4000))
def test_buckets_and_slots_are_in_reverse_order_of_definition(specs, bucket_bytes):
    position = {spec.name: number for number, spec in enumerate(reversed(specs))}
    buckets = make_buckets(specs, bucket_bytes=bucket_bytes)
    ends = [position[bucket.slots[-1].name] for bucket in buckets]
    assert ends == sorted(ends)
    for bucket in buckets:
        positions = [position[slot.name] for slot in bucket.slots]
        assert positions == sorted(positions)


@pytest.mark.parametrize(("megabytes", "limit", "expected"), [
    (3.5, 4.0, 0.5),  # a small model
    (20.0, 4.0, 2.5),  # a medium model: an eighth of it
    (400.0, 4.0, 4.0),  # a large model: the plan's limit
    (3.5, 0.25, 0.25),  # the plan's limit holds for small models too
])  # fmt: skip
def test_between_hosts_a_model_has_about_eight_buckets_of_at_least_512_kib(megabytes, limit, expected):
    specs = [ParamSpec("p", (int(megabytes * 2**18),), "float32", 4)]
    assert effective_bucket_bytes(specs, int(limit * 2**20), is_inter_host=True) == expected * 2**20
    assert effective_bucket_bytes(specs, int(limit * 2**20), is_inter_host=False) == limit * 2**20


def test_each_zero_level_implies_its_collectives():
    changes = {zero: layout_changes(rest) for zero, rest in RESTING_LAYOUTS.items()}
    none = Change.NONE
    assert changes[0] == (none, none, Change.ALL_REDUCE, none)
    assert changes[1] == (none, none, Change.REDUCE_SCATTER, Change.ALL_GATHER)
    assert changes[2] == (none, Change.REDUCE_SCATTER, none, Change.ALL_GATHER)
    assert changes[3] == (Change.ALL_GATHER, Change.REDUCE_SCATTER, none, none)


@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_step_sends_the_bytes_given_in_the_zero_paper(zero, factor):
    # Rajbhandari et al. 2020, §7: 2 Ψ for stages 0 to 2, 3 Ψ for stage 3, with one microbatch.
    (bucket,) = make_buckets([ParamSpec("p", (1000,), "float32", 4)], bucket_bytes=4096)
    assert step_sent_bytes([bucket], zero=zero, shard_groups=ShardGroups(8), microbatches=1) == pytest.approx(
        factor * 4000 * 7 / 8
    )


def test_the_program_of_a_step_as_text():
    program = lower_step(DataStepSpec(microbatches=2, num_buckets=3, has_clip=True, launch_order=(2, 0, 1)))
    assert " ".join(map(str, program)) == "F0.0 B0.0 F0.1 M0.0 B0.1 R0.2 R0.0 R0.1 M0.1 U0.2 U0.0 U0.1"
    program = lower_step(DataStepSpec(1, 2, RESTING_LAYOUTS[1], has_clip=True, has_trust_ratios=True))
    assert " ".join(map(str, program)) == "F0.0 M0.0 B0.0 R0.0 R0.1 M0.1 M0.3 U0.0 G0.0 U0.1 G0.1"


@given(
    zero=st.integers(0, 2),
    microbatches=st.integers(1, 5),
    buckets=st.integers(1, 6),
    clip=st.booleans(),
    unused=st.booleans(),
)
def test_every_bucket_is_reduced_in_each_round_before_it_is_updated(zero, microbatches, buckets, clip, unused):
    program = lower_step(DataStepSpec(microbatches, buckets, RESTING_LAYOUTS[zero], clip, unused))
    verbs = [action.verb for action in program]
    assert verbs.count(Verb.FORWARD) == verbs.count(Verb.BACKWARD) == microbatches
    reduced = [a.index for a in program if a.verb == Verb.REDUCE]
    assert sorted(reduced) == list(range(buckets * (microbatches if zero == 2 else 1)))
    assert [a.index for a in program if a.verb == Verb.GATHER] == (list(range(buckets)) if zero else [])
    assert max(i for i, v in enumerate(verbs) if v == Verb.REDUCE) < min(
        i for i, v in enumerate(verbs) if v == Verb.UPDATE
    )

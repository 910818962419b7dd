"""Interleaved stages share a place, never a bucket: each stage reduces, unshards and updates its own."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.data.rules.buckets import make_buckets
from fourfold.axes.data.rules.step_program import DataStepSpec, lower_step
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS
from fourfold.axes.pipeline.rules.edges import add_sends
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.words.program import Verb, bucket_of


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(4, 400))
def test_a_bucket_has_parameters_of_one_stage_and_later_stages_come_first(stages, bucket_bytes):
    specs = [ParamSpec(f"p{i}", (4,), "float32", 4, stage=stage) for i, stage in enumerate(stages)]
    stage_of = {spec.name: spec.stage for spec in specs}
    buckets = make_buckets(specs, bucket_bytes=bucket_bytes)
    found = [{stage_of[slot.name] for slot in bucket.slots} for bucket in buckets]
    assert all(len(each) == 1 for each in found)
    order = [each.pop() for each in found]
    assert order == sorted(order, reverse=True)


@st.composite
def interleaved_steps(draw):
    """The step of a place, and its number of stages."""
    pp, interleave = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    plan = Plan(pp=pp, microbatches=pp * draw(st.integers(1, 2)), schedule="interleaved", interleave=interleave)
    place = draw(st.integers(0, pp - 1))
    stages = range(place, plan.num_stages, pp)
    of_bucket = sorted(draw(st.lists(st.sampled_from(stages), max_size=3)) + list(stages), reverse=True)
    return DataStepSpec(
        plan.microbatches,
        len(of_bucket),
        RESTING_LAYOUTS[draw(st.integers(0, 3))],
        update=draw(st.sampled_from(("after", "in_backward", "in_forward"))),
        stage=place,
        computes=add_sends(plan.compute_lists, plan.num_stages)[place],
        bucket_stages=tuple(of_bucket),
    )


@given(interleaved_steps())
def test_what_follows_a_backward_is_of_its_stage_and_what_precedes_a_phase_too(step):
    program, latest, pending = lower_step(step), None, []
    num_backwards, num_reductions = Counter(), Counter()
    for action in program:
        stage = step.bucket_stages[bucket_of(action, step.num_buckets)]
        if action.verb == Verb.UNSHARD:
            pending.append(stage)
        elif action.verb in (Verb.FORWARD, Verb.BACKWARD):
            assert set(pending) <= {action.stage}
            pending, latest = [], action
            num_backwards[action.stage] += action.verb == Verb.BACKWARD
        elif action.verb == Verb.REDUCE:
            assert latest is not None
            assert (stage, Verb.BACKWARD) == (latest.stage, latest.verb)
            num_reductions[stage, bucket_of(action, step.num_buckets)] += 1
        elif action.verb == Verb.UPDATE and step.update == "in_backward":
            assert num_backwards[stage] == step.microbatches
            assert latest is not None
            assert stage == latest.stage
    rounds = step.microbatches if step.resting_layouts in (RESTING_LAYOUTS[2], RESTING_LAYOUTS[3]) else 1
    assert set(num_reductions.values()) == {rounds}
    assert len(num_reductions) == step.num_buckets
    assert len(set(program)) == len(program)

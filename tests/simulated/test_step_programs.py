"""Laws of step programs: what the first step learns is kept by stage, and returns from its record."""

import dataclasses

import pytest

from fourfold.plan.lowering import Blueprint, DataGroup, lower
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.step.step_programs import StepPrograms
from fourfold.words.program import Verb


def two_stages() -> Blueprint:
    """Rank 0 has stage 0 with three buckets, rank 1 stage 1 with two."""
    specs = [ParamSpec(f"p{index}", (4,), "float32", 4) for index in range(5)]
    plan = Plan(dp=2, bucket_bytes=1)
    whole = lower(plan, specs, Topology.regular(hosts=1, ranks_per_host=2), UpdateSpec())
    (group,) = whole.groups

    def stage(index: int, num_buckets: int) -> DataGroup:
        buckets, own = group.stage.buckets[:num_buckets], tuple(spec._replace(stage=index) for spec in specs)
        return dataclasses.replace(
            group, ranks=(index,), stage=dataclasses.replace(group.stage, stage=index, specs=own, buckets=buckets)
        )

    return dataclasses.replace(whole, groups=(stage(0, 3), stage(1, 2)))


ORDERS = {0: (2, 0, 1), 1: (1, 0)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorded_launch_order_returns_by_stage_and_orders_this_ranks_reductions(rank):
    programs = StepPrograms(two_stages(), rank)
    assert programs.launch_order == []
    programs.set_record(ORDERS, 8.0)
    assert programs.launch_order == [2, 0, 1, 4, 3]
    assert programs.split_order(programs.launch_order) == ORDERS
    reductions = [action for action in programs.of_step(2) if action.verb == Verb.REDUCE]
    assert [(action.stage, action.index) for action in reductions] == [(rank, bucket) for bucket in ORDERS[rank]]


@pytest.mark.parametrize("order", [[], [2, 0, 1], [2, 0, 1, 4], [2, 0, 3, 4, 1], [0, 0, 1, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_a_launch_order_of_other_buckets_is_not_used(order):
    assert StepPrograms(two_stages(), 0).split_order(order) == {}


def test_before_the_first_step_no_unshard_is_in_the_program_and_then_those_of_each_phase():
    blueprint = two_stages()
    split = dataclasses.replace(blueprint.plan, zero=3, transport="gloo")
    specs = [ParamSpec(f"p{index}", (4,), "float32", 4) for index in range(5)]
    topology = Topology.regular(hosts=1, ranks_per_host=2)
    programs = StepPrograms(lower(split, specs, topology, UpdateSpec()), 0)
    assert not any(action.verb == Verb.UNSHARD for action in programs.of_step(1))
    programs.nominal_count = 1.0
    programs.set_use_orders({0: {"forward": (4, 0), "backward": (0,)}})
    unshards = [action.index for action in programs.of_step(1) if action.verb == Verb.UNSHARD]
    assert unshards == [4, 0, 5]
    programs.set_use_orders({0: {"forward": (4, 0), "backward": (0, 1)}})
    assert [a.index for a in programs.of_step(1) if a.verb == Verb.UNSHARD] == [4, 0, 5, 1]
    assert programs.inference == (*(a for a in programs.evaluation if a.verb == Verb.FORWARD),)

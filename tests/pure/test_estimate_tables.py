"""Law of the tables behind estimates: what they have kept of other plans changes no estimate."""

import itertools

import pytest

from fourfold.plan.check import combination_problems
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.estimate import Estimator
from fourfold.planner.predict.step import predict_step
from tests.planner_cases import ChainFacts, LinearPrices

MESHES = [{"dp": 4}, {"pp": 2, "dp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "cp": 2}]
SCHEDULES = [{}, {"schedule": "gpipe"}, {"schedule": "interleaved", "interleave": 2}, {"schedule": "2bw"}]
STATES = [{"zero": zero, "update": update} for zero in (0, 1, 3) for update in ("after", "in_backward", "in_forward")]
STATES += [{"zero": 3, "shard": 2}, {"codec": "topk"}, {"precision": "bf16"}, {"stages": "5,3"}, {"unused": "allow"}]


def plans() -> list[Plan]:
    found = []
    for mesh, schedule, state, microbatches in itertools.product(MESHES, SCHEDULES, STATES, (1, 4)):
        num_stages = mesh.get("pp", 1) * schedule.get("interleave", 1)
        if ("shard" in state and mesh.get("dp", 1) < 4) or ("stages" in state and num_stages != 2):
            continue
        if schedule and mesh.get("pp", 1) == 1:
            continue
        plan = Plan.from_dict({**mesh, **schedule, **state, "microbatches": microbatches, "bucket_bytes": 2000})
        if not combination_problems(plan):
            found.append(plan)
    return found


def test_a_place_with_a_copy_of_tied_weights_holds_more_than_one_with_the_same_buckets():
    source = ChainFacts(num_blocks=8, width=16, batch_size=16, has_tied_head=True)
    topology = Topology.regular(hosts=1, ranks_per_host=2, device="cuda")
    plan = Plan(pp=2, schedule="gpipe")
    blueprint = lower(plan, source.specs(plan), topology, source.update_spec)
    first, last = predict_step(blueprint, source, LinearPrices()).by_stage
    assert last.weights > first.weights
    assert Estimator(source, LinearPrices(), topology).estimate(plan).memory.weights == last.weights


@pytest.mark.parametrize("has_tied_head", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_estimates_do_not_depend_on_those_before(has_tied_head, device):
    source = ChainFacts(num_blocks=8, width=16, batch_size=16, has_tied_head=has_tied_head)
    prices = LinearPrices(overlap_slowdown=1.1, action_seconds=1e-5)
    topology = Topology.regular(hosts=2, ranks_per_host=2, device=device)
    shared = Estimator(source, prices, topology)
    tried = plans()
    assert len(tried) > 150
    for plan in tried:
        assert shared.estimate(plan) == Estimator(source, prices, topology).estimate(plan), plan.to_toml()

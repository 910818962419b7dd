"""Laws of planning for hosts that differ in speed: the stages and the order of hosts are the best there are."""

import dataclasses
import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fourfold.plan.ask import Ask
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster, ProductEfficiency, Tier, topology_of
from fourfold.planner.predict.step import predict_step
from fourfold.planner.search.answer import decide
from fourfold.planner.search.step_pricing import host_order, places_of
from tests.planner_cases import ChainFacts, LinearPrices

NETWORK = Tier(1e-6, 1e9)
EQUAL = Cluster("three", "cuda", 2, 3, 1e9, {"float32": 1e9}, 1e9, ProductEfficiency(1.0, 0.0), NETWORK, NETWORK)
SPEEDS = st.tuples(*[st.sampled_from([0.25, 0.5, 1.0, 2.0])] * 3)
SOURCE = ChainFacts(num_blocks=7, width=16, batch_size=8, tokens=16, end_factor=0.5)
PRICES = LinearPrices(flops=1e7, bandwidth=1e9, latency=1e-7, network_latency=1e-6, network_bandwidth=1e8)
PIPELINE = {"pp": 3, "dp": 1, "tp": 2, "microbatches": 8, "schedule": "1f1b", "recompute": "none", "update": "after"}


def cluster_of(speeds: tuple[float, ...], devices_per_host: int = 2) -> Cluster:
    return dataclasses.replace(EQUAL, host_speeds=speeds, hosts=len(speeds), devices_per_host=devices_per_host)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(SPEEDS)
def test_stages_and_hosts_are_the_best_of_all_divisions_and_orders(speeds):
    cluster = cluster_of(speeds)
    decision = decide(Ask(**PIPELINE, sequence_parallel=False), SOURCE, PRICES, cluster, error=0.0)
    topology = topology_of(cluster, 6)
    seconds = []
    for counts in itertools.product(range(1, 6), repeat=3):
        if sum(counts) != 7:
            continue
        plan = Plan.from_dict({**PIPELINE, "stages": ",".join(map(str, counts))})
        blueprint = lower(plan, SOURCE.specs(plan), topology, SOURCE.update_spec)
        seconds += [
            predict_step(blueprint, SOURCE, PRICES, speeds=order).seconds for order in itertools.permutations(speeds)
        ]
    # The division is the best by its sum and its slowest stage; in which order stages fill and drain, makes 1 or 2 %.
    assert decision.fastest.seconds <= min(seconds) * 1.03
    assert sorted(decision.host_order) == [0, 1, 2]


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.integers(1, 24)
)
def test_every_host_is_used_once_and_alike_ones_are_together(speeds, per_host, num_places):
    cluster = cluster_of(tuple(speeds), per_host)
    if cluster.num_devices % num_places:
        return
    places = places_of(cluster, num_places)
    assert places.num_places == num_places
    assert max(kind.speed for kind in places.kinds) <= max(speeds)
    assert min(kind.speed for kind in places.kinds) == min(speeds)
    kinds = places.order or tuple(i for i, kind in enumerate(places.kinds) for _ in range(kind.num_places))
    hosts = host_order(cluster, kinds)
    assert sorted(hosts) == list(range(len(speeds)))
    size = cluster.num_devices // num_places
    for place, kind in enumerate(kinds):
        own = {hosts[rank // per_host] for rank in range(place * size, (place + 1) * size)}
        assert min(speeds[host] for host in own) >= places.kinds[kind].speed


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(SPEEDS, st.integers(0, 2))
def test_a_slower_host_never_gives_a_faster_answer(speeds, host):
    slower = tuple(speed / 2 if index == host else speed for index, speed in enumerate(speeds))
    ask = Ask(recompute="none", update="after", zero=0, sequence_parallel=False)
    before, after = (decide(ask, SOURCE, PRICES, cluster_of(each), error=0.0) for each in (speeds, slower))
    assert after.fastest.seconds >= before.fastest.seconds / (1 + before.bound + 1e-9)


def test_a_slow_host_gets_fewer_blocks_and_data_ranks_wait_for_it():
    cluster = cluster_of((1.0, 0.25, 1.0))
    decision = decide(Ask(**PIPELINE, sequence_parallel=False), SOURCE, PRICES, cluster, error=0.0)
    place = decision.host_order.index(1)
    counts = [int(count) for count in decision.fastest.plan.stages.split(",")]
    assert counts[place] == min(counts)
    data = {"pp": 1, "dp": 6, "tp": 1, "zero": 0, "microbatches": 1, "recompute": "none", "update": "after"}
    source = dataclasses.replace(SOURCE, batch_size=12)  # which dp divides
    equal, unequal = (decide(Ask(**data), source, PRICES, each, error=0.0) for each in (EQUAL, cluster))
    ratio = unequal.answer.terms.compute / equal.answer.terms.compute
    assert ratio == pytest.approx(4.0, rel=0.02)
    assert equal.host_order == ()

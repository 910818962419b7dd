"""Weights that are gathered during a forward or backward: stalls, and steps that a network bounds."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.action_costs import GatherStalls
from fourfold.planner.predict.clusters import RooflinePrices, load_cluster, topology_of
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.prices import GroupShape
from fourfold.planner.predict.step import predict_step
from fourfold.words.layout import Change
from fourfold.words.program import Verb

seconds = st.floats(0.0, 10.0)
phases = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)


def end_by_turns(computing: list[float], sent: list[float]) -> float:
    """When a phase ends, from its first computing on: each part waits for its bucket."""
    arrivals = [each - sent[0] for each in itertools.accumulate(sent)]
    clock = 0.0
    for own, arrival in zip(computing, arrivals, strict=True):
        clock = max(clock, arrival) + own
    return clock


@given(phases)
def test_a_phase_ends_as_if_each_part_waited_for_its_bucket(phase):
    computing, sent = ([each[half] for each in phase] for half in (0, 1))
    offsets = [0.0, *itertools.accumulate(computing)][:-1]
    stalls = GatherStalls.of(offsets, sent)
    assert sum(computing) + stalls.total == pytest.approx(end_by_turns(computing, sent))


@given(phases)
def test_gradients_are_sent_after_their_computing_and_after_all_gathers(phase):
    computing, sent = ([each[half] for each in phase] for half in (0, 1))
    sums = [0.0, *itertools.accumulate(computing)]
    stalls, window = GatherStalls.of(sums[:-1], sent), sums[-1]
    arrivals = [end - sent[0] for end in itertools.accumulate(sent)]
    for done in range(1, len(phase) + 1):
        # The bucket behind the first parts; those whose computing takes no time are there at the same moment.
        same = max(index for index in range(1, len(phase) + 1) if sums[index] == sums[done])
        ready = end_by_turns(computing[:same], sent[:same])
        overlap = stalls.reduction_overlap(window - sums[done], window)
        following = max(arrivals[same] if same < len(phase) else 0.0, ready)
        assert window + stalls.total - overlap == pytest.approx(max(following, arrivals[-1]))


def test_a_step_without_gathers_has_no_stalls():
    assert GatherStalls.of([1.0, 2.0], [0.0, 0.0]) == GatherStalls()
    assert GatherStalls().reduction_overlap(2.0, 5.0) == 2.0


def predict(*, hosts: int, bandwidth: float, bucket_bytes: int) -> tuple[Prediction, float]:
    """A step at zero 3, and the seconds that all weights take once around the network."""
    cluster = load_cluster("dgx-a100")
    assert cluster.network is not None
    network = cluster.network._replace(bandwidth=bandwidth, latency=0.0)
    slow = dataclasses.replace(cluster, network=network, overlap_slowdown=1.0).resized(8 * hosts)
    gpt = GptFacts(layers=6, width=1024, heads=8, vocabulary=1024, length=256, batch_size=8 * hosts)
    plan = Plan(dp=8 * hosts, zero=3, precision="bf16", bucket_bytes=bucket_bytes)
    blueprint = lower(plan, gpt.specs(plan), topology_of(slow, 8 * hosts), gpt.update_spec)
    prices = RooflinePrices(slow)
    padded = sum(bucket.size for bucket in blueprint.groups[0].buckets)
    prediction = predict_step(blueprint, gpt, prices)
    around = prices.collective(Change.ALL_GATHER, 2.0 * padded, GroupShape(8, hosts))
    return prediction, around


@pytest.mark.parametrize("hosts", [2, 8])
def test_zero_3_that_a_network_bounds_takes_two_gathers_and_a_reduction(hosts):
    # Narayanan et al. (2104.04473), table 2: the time of an iteration does not change with the number of GPUs.
    prediction, around = predict(hosts=hosts, bandwidth=1e8, bucket_bytes=2**20)
    assert prediction.seconds == pytest.approx(3 * around, rel=0.05)


def test_the_first_gather_is_a_part_of_the_step():
    prediction, _ = predict(hosts=2, bandwidth=1e9, bucket_bytes=2**30)
    assert prediction.timeline is not None
    assert prediction.seconds == pytest.approx(max(timed.end for timed in prediction.timeline[0]))


@pytest.mark.parametrize("bandwidth", [1e8, 5e9, 2e10])
def test_no_phase_ends_before_its_weights_are_there(bandwidth):
    prediction, _ = predict(hosts=2, bandwidth=bandwidth, bucket_bytes=2**21)
    assert prediction.timeline is not None
    gathers = sorted(timed.end for timed in prediction.timeline[0] if timed.action.verb == Verb.UNSHARD)
    phases = [timed.end for timed in prediction.timeline[0] if timed.action.verb in (Verb.FORWARD, Verb.BACKWARD)]
    half = len(gathers) // 2
    assert phases[0] >= max(gathers[:half])
    assert phases[1] >= max(gathers[half:])

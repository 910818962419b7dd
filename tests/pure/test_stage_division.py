"""Laws of the division into stages: none that fits has a shorter step."""

import itertools
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fourfold.planner.search.step_pricing import Chain, Division, Segment, Submesh, best_division, division_of

NUMBERS = st.integers(0, 9).map(float)
SEGMENTS = st.builds(Segment, NUMBERS, NUMBERS, NUMBERS)
CHAINS = st.builds(
    Chain, SEGMENTS, st.lists(SEGMENTS, min_size=1, max_size=6).map(tuple), SEGMENTS, st.sampled_from([0.0, 1.0, 2.5])
)
SUBMESHES = st.lists(
    st.builds(
        Submesh, st.integers(1, 3), st.sampled_from([0.5, 1.0, 1.5]), st.sampled_from([20.0, 40.0, 80.0, math.inf])
    ),
    min_size=1,
    max_size=3,
)


def all_divisions(
    chain: Chain, submeshes: list[Submesh], in_flight: list[int]
) -> list[tuple[Division, tuple[int, ...]]]:
    """Every division that fits, by trying all, with the kind of submesh of each stage."""
    num_stages, num_blocks = len(in_flight), len(chain.blocks)
    found = []
    for inner in itertools.combinations(range(1, num_blocks), num_stages - 1):
        stops = (*inner, num_blocks)
        for kinds in itertools.product(range(len(submeshes)), repeat=num_stages):
            if any(kinds.count(kind) > each.num_places for kind, each in enumerate(submeshes)):
                continue
            parts = [list(chain.blocks[a:b]) for a, b in itertools.pairwise((0, *stops))]
            parts[0].insert(0, chain.first)
            parts[-1].append(chain.last)
            fits = all(
                sum(each.held_bytes for each in part) + alive * sum(each.saved_bytes for each in part)
                <= submeshes[kind].memory_bytes
                for part, alive, kind in zip(parts, in_flight, kinds, strict=True)
            )
            if fits:
                found.append((division_of(chain, stops, [submeshes[kind].speed for kind in kinds]), kinds))
    return found


# What is shortest in all is not what has the fastest slowest stage: a state must keep both.
SLOW_AND_SHORT = Chain(Segment(0.0), tuple(map(Segment, (8.0, 7.0, 5.0, 4.0))), Segment(0.0))


@settings(max_examples=100, deadline=None)
@example(SLOW_AND_SHORT, [Submesh(1, 1.0), Submesh(1, 0.5)], [1, 1], 1)
@given(CHAINS, SUBMESHES, st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 5))
def test_no_division_that_fits_has_a_shorter_step(chain, submeshes, in_flight, microbatches):
    in_flight = in_flight[: min(len(chain.blocks), sum(each.num_places for each in submeshes))]
    tried = all_divisions(chain, submeshes, in_flight)
    found = best_division(chain, submeshes, microbatches=microbatches, in_flight=in_flight)
    best = min((each.step_seconds(microbatches) for each, _ in tried), default=math.inf)
    assert (found is None) == (not tried)
    if found is not None:
        assert math.isclose(found.step_seconds(microbatches), best)
        # What it says of itself is what the same division takes.
        again = division_of(chain, found.stops, [submeshes[kind].speed for kind in found.submeshes])
        assert math.isclose(again.step_seconds(microbatches), best)
        assert (found.stops, found.submeshes) in {(each.stops, kinds) for each, kinds in tried}
        assert sum(map(int, found.counts.split(","))) == len(chain.blocks)


@settings(max_examples=80, deadline=None)
@given(CHAINS, SUBMESHES, st.sampled_from([1, 3, 100]), st.sampled_from([0.7, 1.0, 1.001, 1.3]))
def test_a_known_step_only_hides_divisions_that_are_no_shorter(chain, submeshes, microbatches, factor):
    num_stages = min(len(chain.blocks), sum(each.num_places for each in submeshes))
    sizes = {"microbatches": microbatches, "in_flight": [1] * num_stages}
    free = best_division(chain, submeshes, **sizes)
    if free is None:
        return
    best = free.step_seconds(microbatches)
    found = best_division(chain, submeshes, **sizes, known_seconds=best * factor)
    assert (found is not None) == (best < best * factor)
    assert found is None or math.isclose(found.step_seconds(microbatches), best)

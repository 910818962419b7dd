"""The order of gathers: learnt from pleas, and the same on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.unshard_order import MissingBucket, UnshardOrder


def learnt(*buckets: int) -> UnshardOrder:
    """A script of these buckets, whose gathers this rank has all begun and used."""
    script = UnshardOrder()
    for place, bucket in enumerate(buckets):
        script.insert_missing([MissingBucket(bucket, place - 1)])
        script.mark_used(bucket)
    assert script.buckets == list(buckets)
    return script


def test_what_is_missed_comes_behind_what_its_rank_used_last():
    script = learnt(0, 1, 2, 3)
    assert script.insert_missing([MissingBucket(7, 1)]) == [7]
    assert script.buckets == [0, 1, 7, 2, 3]
    assert script.missing_bucket(9) == MissingBucket(9, 4)  # this rank has used the last, which is one further now


def test_pleas_of_one_round_mean_places_of_before_it():
    script = learnt(0, 1, 2, 3)
    assert script.insert_missing(
        [MissingBucket(7, 0), MissingBucket(8, 2), MissingBucket(7, 3), MissingBucket(9, -1)]
    ) == [7, 8, 9]
    assert script.buckets == [9, 0, 7, 1, 2, 8, 3]


def test_a_rank_pleads_by_the_gather_it_used_and_not_by_those_it_took_part_in():
    script = learnt(0, 1, 2, 3)
    script.begin_phase()
    assert [script.next_bucket() for _ in range(4)] == [0, 1, 2, 3]
    script.mark_used(1)
    assert script.has_ended
    assert script.missing_bucket(5) == MissingBucket(5, 1)


PLEAS = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3)).map(lambda pair: MissingBucket(*pair)), max_size=4)


@given(st.lists(PLEAS, max_size=5), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_ranks_that_have_used_other_buckets_have_the_same_script_all_the_same(rounds, used):
    ranks = [learnt(0, 1, 2, 3) for _ in used]
    for script, bucket in zip(ranks, used, strict=True):
        script.begin_phase()
        while not script.has_ended:
            script.next_bucket()
        script.mark_used(bucket)
    for pleas in rounds:
        first, second = (script.insert_missing(pleas) for script in ranks)
        assert first == second == list(dict.fromkeys(plea.bucket for plea in pleas))
    assert ranks[0].buckets == ranks[1].buckets
    assert sorted(set(ranks[0].buckets)) == sorted({0, 1, 2, 3} | {p.bucket for pleas in rounds for p in pleas})

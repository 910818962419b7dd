"""The order of gathers: learnt from pleas, and the same on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.gathers import Plea, Script


def learnt(*buckets: int) -> Script:
    """A script of these buckets, whose gathers this rank has all begun and used."""
    script = Script()
    for place, bucket in enumerate(buckets):
        script.hear([Plea(bucket, place - 1)])
        script.use(bucket)
    assert script.buckets == list(buckets)
    return script


def test_what_is_missed_comes_behind_what_its_rank_used_last():
    script = learnt(0, 1, 2, 3)
    assert script.hear([Plea(7, 1)]) == [7]
    assert script.buckets == [0, 1, 7, 2, 3]
    assert script.plea(9) == Plea(9, 4)  # this rank has used the last, which is one further now


def test_pleas_of_one_round_mean_places_of_before_it():
    script = learnt(0, 1, 2, 3)
    assert script.hear([Plea(7, 0), Plea(8, 2), Plea(7, 3), Plea(9, -1)]) == [7, 8, 9]
    assert script.buckets == [9, 0, 7, 1, 2, 8, 3]


def test_a_rank_pleads_by_the_gather_it_used_and_not_by_those_it_took_part_in():
    script = learnt(0, 1, 2, 3)
    script.begin()
    assert [script.next() for _ in range(4)] == [0, 1, 2, 3]
    script.use(1)
    assert script.has_ended
    assert script.plea(5) == Plea(5, 1)


PLEAS = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3)).map(lambda pair: Plea(*pair)), max_size=4)


@given(st.lists(PLEAS, max_size=5), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_ranks_that_have_used_other_buckets_have_the_same_script_all_the_same(rounds, used):
    ranks = [learnt(0, 1, 2, 3) for _ in used]
    for script, bucket in zip(ranks, used, strict=True):
        script.begin()
        while not script.has_ended:
            script.next()
        script.use(bucket)
    for pleas in rounds:
        first, second = (script.hear(pleas) for script in ranks)
        assert first == second == list(dict.fromkeys(plea.bucket for plea in pleas))
    assert ranks[0].buckets == ranks[1].buckets
    assert sorted(set(ranks[0].buckets)) == sorted({0, 1, 2, 3} | {p.bucket for pleas in rounds for p in pleas})

"""The unshard order: learnt from miss reports, and the same on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.data.rules.unshard_order import MissingBucket, UnshardOrder


def learnt(*buckets: int) -> UnshardOrder:
    """An order of these buckets, whose all-gathers this rank has begun and used."""
    order = UnshardOrder()
    for position, bucket in enumerate(buckets):
        order.insert_missing([MissingBucket(bucket, position - 1)])
        order.mark_used(bucket)
    assert order.buckets == list(buckets)
    return order


def test_a_missing_bucket_is_inserted_after_what_its_rank_used_last():
    order = learnt(0, 1, 2, 3)
    assert order.insert_missing([MissingBucket(7, 1)]) == [7]
    assert order.buckets == [0, 1, 7, 2, 3]
    assert order.missing_bucket(9) == MissingBucket(
        9, 4
    )  # this rank used the last bucket, whose position has grown by one


def test_the_miss_reports_of_one_round_refer_to_positions_before_it():
    order = learnt(0, 1, 2, 3)
    assert order.insert_missing(
        [MissingBucket(7, 0), MissingBucket(8, 2), MissingBucket(7, 3), MissingBucket(9, -1)]
    ) == [7, 8, 9]
    assert order.buckets == [9, 0, 7, 1, 2, 8, 3]


def test_a_miss_report_names_the_last_bucket_used_not_the_last_all_gather():
    order = learnt(0, 1, 2, 3)
    order.begin_phase()
    assert [order.next_bucket() for _ in range(4)] == [0, 1, 2, 3]
    order.mark_used(1)
    assert order.has_ended
    assert order.missing_bucket(5) == MissingBucket(5, 1)


REPORTS = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3)).map(lambda pair: MissingBucket(*pair)), max_size=4)


@given(st.lists(REPORTS, max_size=5), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_ranks_that_used_different_buckets_still_have_the_same_order(rounds, used):
    orders = [learnt(0, 1, 2, 3) for _ in used]
    for order, bucket in zip(orders, used, strict=True):
        order.begin_phase()
        while not order.has_ended:
            order.next_bucket()
        order.mark_used(bucket)
    for reports in rounds:
        first, second = (order.insert_missing(reports) for order in orders)
        assert first == second == list(dict.fromkeys(report.bucket for report in reports))
    assert orders[0].buckets == orders[1].buckets
    assert sorted(set(orders[0].buckets)) == sorted(
        {0, 1, 2, 3} | {report.bucket for reports in rounds for report in reports}
    )

"""Laws of rank layouts: which elements of the parameters each rank holds. Ranks are threads, on one host or several."""

import functools

import torch

from fourfold.testing import threads
from tests.cases import Case, build_step

# Ranks, hosts, and the fields of the plan.
LAYOUTS = [
    (1, 1, {"zero": 0}),
    (2, 1, {"zero": 0}),
    (2, 1, {"zero": 1}),
    (3, 1, {"zero": 3, "transport": "gloo"}),
    (4, 1, {"zero": 2, "shard": 2, "transport": "gloo"}),
    (4, 2, {"zero": 1}),
    (4, 2, {"zero": 3}),
    (4, 2, {"zero": 3, "shard": 2}),
]


def held_by(size, fields, comm):
    """What a rank holds of each bucket, its replica, and all that `gather_json` gives; of states and of weights."""
    step = build_step(Case(bucket_bytes=1500, precision="bf16", **fields), size, comm)
    found = []
    for layout in (step.state_layout, step._weights.storage.layout):
        for name, parameter in step._weights.trainable.items():
            whole = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
            part = whole.reshape(-1)[slice(*layout.ranges[name])]
            assert torch.equal(layout.gather(name, part), whole)
        found.append((list(layout.bucket_ranges), layout.replica, layout.gather_json(comm.rank)))
    return found, [bucket.size for bucket in step.buckets]


def test_the_ranks_that_hold_the_same_elements_count_each_other_and_all_of_them_make_whole_tensors():
    for size, hosts, fields in LAYOUTS:
        by_rank = threads.run(size, functools.partial(held_by, size, fields), hosts=hosts)
        for kind in range(2):
            holders: dict[str, list[int]] = {}
            for rank, (found, _) in enumerate(by_rank):
                holders.setdefault(str(found[kind][0]), []).append(rank)
            for ranks in holders.values():
                assert [by_rank[rank][0][kind][1] for rank in ranks] == [(n, len(ranks)) for n in range(len(ranks))]
            for found, sizes in by_rank:
                # What ranks with other elements say is among what a rank gathers.
                assert all(set(found[kind][2]) & set(ranks) for ranks in holders.values())
                parts = [by_rank[ranks[0]][0][kind][0] for ranks in holders.values()]
                for bucket, length in enumerate(sizes):
                    bounds = sorted(ranges[bucket] for ranges in parts)
                    assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), length]

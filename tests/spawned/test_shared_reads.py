"""Ranks that share samples, as processes: a run reads them once, and trains the same."""

import pytest

CASES = "tests.spawned.shared_reads"


@pytest.mark.parametrize("fields", [{"cp": 2}, {"pp": 2, "microbatches": 2}, {"cp": 2, "tp": 2}])
def test_a_run_reads_once_what_ranks_share_and_trains_the_same(world, tmp_path, fields):
    run, options = world(4 if "tp" in fields else 2).run, {"folder": str(tmp_path), **fields}
    shared = run(f"{CASES}:reads", shared=True, **options)
    own = run(f"{CASES}:reads", shared=False, **options)
    assert [rank[2:] for rank in shared] == [rank[2:] for rank in own]
    for index in range(2):  # of training, of validation
        counts, alone = ([rank[index] for rank in ranks] for ranks in (shared, own))
        assert counts[0] <= max(alone) + 16  # reading ahead differs by a batch or two
        assert all(count <= 2 < min(alone) for count in counts[1:]), (counts, alone)  # a sample, for its shapes


@pytest.mark.parametrize(("size", "fields"), [(2, {"cp": 2}), (4, {"dp": 2, "tp": 2})])
def test_a_loop_of_ones_own_reads_once_too(world, size, fields):
    shared, own = (world(size).run(f"{CASES}:own_loop", shared=each, **fields) for each in (True, False))
    assert [batches for batches, _ in shared] == [batches for batches, _ in own]
    # With several data ranks each also reads one sample twice, to compare it.
    assert [read for _, read in own] == ([40, 40] if size == 2 else [22] * 4)
    assert [read for _, read in shared] == ([40, 0] if size == 2 else [22, 0, 22, 0])

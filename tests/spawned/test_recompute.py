"""The law of recompute with dropout: on every axis the second forward drops what the first one did."""

RUNS = [
    {"dp": 2, "tp": 2, "zero": 3, "microbatches": 2},
    {"cp": 2, "tp": 2, "zero": 2},
    {"pp": 2, "tp": 2, "microbatches": 2},
    {"pp": 2, "cp": 2, "microbatches": 2, "zero": 1},
]


def test_recompute_changes_no_bit_of_a_training_with_dropout(world):
    ranks = world(4).run("tests.spawned.recompute:same_trainings", runs=RUNS, time_limit_seconds=200)
    assert ranks == [[{"selective": True, "full": True}] * len(RUNS)] * 4

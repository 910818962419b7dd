"""The law of dropout on the tensor axis: ranks that compute with the same samples drop the same features."""


def test_tensor_ranks_drop_the_same_whole_features_and_data_ranks_others(world):
    ranks = world(4).run("tests.spawned.tensor_dropout:masks", time_limit_seconds=60, dp=2, tp=2)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0] != ranks[2]
    assert len(ranks[0]) == 2
    assert ranks[0][0] != ranks[0][1]

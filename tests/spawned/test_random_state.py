"""The law of random numbers after a resume: ranks with the same data index draw the same, on every mesh."""

import pytest

from fourfold.testing.oracle import TOLERANCE
from tests.spawned import stochastic_depth

SECONDS = 60  # ranks that draw differently wait for each other's attention


def trained(world, folder, dp, cp, **what):
    """What each rank of a mesh found; one rank is this process."""
    if dp * cp == 1:
        return [stochastic_depth.train(str(folder), dp, cp, **what)]
    case = "tests.spawned.stochastic_depth:train"
    return world(dp * cp).run(case, time_limit_seconds=SECONDS, folder=str(folder), dp=dp, cp=cp, **what)


@pytest.mark.parametrize(
    ("saved", "dp"),
    [
        ((4, 1), 2),
        ((2, 1), 2),
        ((2, 1), 4),
        ((1, 2), 1),
        ((2, 2), 2),
        ((2, 2), 4),
    ],
    ids=str,
)
def test_random_numbers_of_a_resumed_run_depend_on_the_data_index_alone(saved, dp, world, tmp_path):
    uninterrupted = trained(world, tmp_path, *saved, save=True)
    found = {cp: trained(world, tmp_path, dp, cp, resume=True) for cp in (1, 2) if dp * cp <= 4}
    by_index = [rank["draws"] for rank in found[1]]
    assert len(set(map(tuple, by_index))) == dp
    for cp, ranks in found.items():
        assert [rank["draws"] for rank in ranks] == [draws for draws in by_index for _ in range(cp)]
        for rank in ranks:
            assert rank["losses"] == pytest.approx(found[1][0]["losses"], rel=0, abs=TOLERANCE)
    if dp == saved[0]:  # The states are restored: the run goes on as if it had not been interrupted.
        assert by_index == [rank["draws"] for rank in uninterrupted[:: saved[1]]]
        assert found[1][0]["losses"] == pytest.approx(uninterrupted[0]["losses"][2:], rel=0, abs=TOLERANCE)

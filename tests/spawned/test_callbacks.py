"""The law of callbacks on real processes: they are called on rank 0, and all ranks stop after the same step."""

import pytest

CASES = "tests.spawned.rank_functions"


@pytest.mark.parametrize(("hook", "stopped"), [("step", 4), ("evaluate", 4)])
def test_all_ranks_stop_after_the_step_that_a_callback_of_rank_0_asks_for(world, hook, stopped, tmp_path):
    results = world(4).run(f"{CASES}:stopped_by_a_callback", folder=str(tmp_path), hook=hook)
    assert [(each["steps"], each["stopped"]) for each in results] == [(stopped, "Stopping: enough")] * 4
    assert [each["events"] > 0 for each in results] == [True, False, False, False]

"""Laws of counted pipeline memory: what a rank holds follows from its list of actions."""

import pytest
import torch

from bench import bert, pipeline_memory
from bench.pipeline_memory import FakeRank, run_rank
from fourfold.axes.pipeline.rules.in_flight import peak_in_flight
from fourfold.axes.pipeline.rules.schedules import compute_actions
from fourfold.words.program import Verb


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "none"), ("1f1b", "none"), ("interleaved", "none"), ("1f1b", "full")]
)
def test_a_fake_rank_holds_the_activations_that_the_schedule_counts(schedule: str, recompute: str) -> None:
    # 4 stages × 8 microbatches; behind each action what is in flight then, in activations of one microbatch
    interleave = 2 if schedule == "interleaved" else 1
    shape = bert.Shape(width=16, heads=2, layers=1)
    for place, actions in enumerate(compute_actions(schedule, pp=4, microbatches=8, interleave=interleave)):
        with torch.device("meta"):
            stages = {
                place + 4 * chunk: pipeline_memory.make_stage([bert.Block(shape, 1, bert.math_attention, split=False)])
                for chunk in range(interleave)
            }
            rank = FakeRank(stages, lambda _: torch.empty(2, 8, 16), last_stage=-1, recompute=recompute)
            _, held = run_rank(rank, actions)
        one, flights = held[0], 0
        for action, num_bytes in zip(actions, held, strict=True):
            flights += 1 if action.verb is Verb.FORWARD else -1
            assert num_bytes == flights * one
        assert max(held) == peak_in_flight(actions).microbatches * one
        inputs_and_outputs = 2 * 2 * 8 * 16 * 4
        assert (one == inputs_and_outputs) == (recompute == "full")

"""Overhead: the cost of checkpoints and of traced steps when training the default language model.

    torchrun --nproc-per-node 2 -m bench.overhead [--rounds 12]

block   ten steps; a save begins before the first one. The output says how many were still being written at the end
pair    a block with a save and one without (or a step with and without tracing); the order alternates
Law: a cost is the median difference within pairs, as a fraction of the steps between two saves (or two traced steps).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.checkpoint import NullLog
from bench.measurement import describe_machine, format_table
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.feed.feed import Feed
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.trainer.settings import TRACE_EVERY
from fourfold.trainer.tracer import Tracer

BLOCK_STEPS = 10
WARM_UP = 5
SAVE_EVERY = 50
UNSAMPLED_STEP = 1  # a step that is not traced if every hundredth is


class PairedTimes(NamedTuple):
    """(with, without) by round, in seconds: wall time and processor time of this rank."""

    wall_seconds: list[tuple[float, float]]
    cpu_seconds: list[tuple[float, float]]


def time_in_turns(rounds: int, with_it: Callable[[], None], without: Callable[[], None]) -> PairedTimes:
    times = PairedTimes([], [])
    for number in range(rounds):
        spent = {}
        for work in (with_it, without)[:: 1 if number % 2 else -1]:
            wall, processor = time.perf_counter(), time.process_time()
            work()
            spent[work] = time.perf_counter() - wall, time.process_time() - processor
        for index, kind in enumerate(times):
            kind.append((spent[with_it][index], spent[without][index]))
    return times


def format_row(name: str, pairs: Sequence[tuple[float, float]], steps: int, every: int) -> tuple[str, ...]:
    """A row: each half of a pair has `steps` steps, and the cost arises once in `every` steps."""
    step = statistics.median(without for _, without in pairs) / steps
    extra = [with_it - without for with_it, without in pairs]
    shares = [each / (every * step) for each in extra]
    low, middle, high = statistics.quantiles(shares, n=4)
    added = f"{statistics.median(extra) * 1e3:+.1f}"
    return name, f"{step * 1e3:.1f}", added, f"{middle:+.2%}", f"{low:+.2%} to {high:+.2%}"


def build_step(folder: str) -> tuple[TrainStep, CheckpointManager, Callable[[], None]]:
    task, plan = lm.task(), Plan(dp=2)
    data = task.data()
    step = parallelize(task.model(), task.loss, task.optimizer, plan, clip=task.clip)
    feed = Feed(data.train, plan, batch_size=task.batch_size)
    manager = CheckpointManager(
        TrainingState(step, feed), AttemptDir(Path(step.all_gather_json(folder)[0]), "bench"), NullLog(), seed=0
    )
    batches = feed.repeat()
    return step, manager, lambda: step(next(batches)) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-", dir=".") as folder:
        step, manager, run_step = build_step(folder)
        tracer = Tracer(step, folder=Path(folder) if step.rank == 0 else None)
        num_late = saves = samples = 0

        def block() -> None:
            for _ in range(BLOCK_STEPS):
                run_step()

        def saving() -> None:
            nonlocal num_late, saves
            saves += 1
            manager.save(TrainingProgress(saves))
            block()
            num_late += manager._writer._thread is not None and manager._writer._thread.is_alive()

        def sampled() -> None:
            nonlocal samples
            samples += 1
            with tracer.sample(TRACE_EVERY * samples):
                run_step()

        def unsampled() -> None:
            with tracer.sample(UNSAMPLED_STEP):
                run_step()

        for _ in range(WARM_UP):
            run_step()
        sampled()
        saving()
        saves_found = time_in_turns(rounds, saving, block)
        steps_found = time_in_turns(rounds * BLOCK_STEPS, sampled, unsampled)
        manager.wait()
        step.all_gather_json(None)
    if step.rank == 0:
        print(
            f"{describe_machine()}\nlm, 2 ranks, {rounds} pairs of blocks, "
            f"{rounds * BLOCK_STEPS} pairs of steps; rank 0's times\n"
        )
        heads = ("", "step, ms", "added, ms", "of the steps", "middle half")
        saved = f"one save in {SAVE_EVERY} steps"
        traced = f"one sampled step in {TRACE_EVERY}"
        rows = [heads, format_row(saved, saves_found.wall_seconds, BLOCK_STEPS, SAVE_EVERY)]
        rows += [format_row(f"{saved}, processor", saves_found.cpu_seconds, BLOCK_STEPS, SAVE_EVERY)]
        rows += [
            format_row(traced, steps_found.wall_seconds, 1, TRACE_EVERY),
            format_row(f"{traced}, processor", steps_found.cpu_seconds, 1, TRACE_EVERY),
        ]
        print(format_table(rows))
        print(f"\n{num_late} of {saves} saves were still being written when their block ended")


if __name__ == "__main__":
    main()

"""Beside: what a checkpoint and a sampled step cost the steps of the default language model.

    torchrun --nproc-per-node 2 -m bench.overhead [--rounds 12]

block   ten steps; a save begins before the first of them, and has been written before the last has ended, or it is told
twin    the same block without a save; twins take turns in one run, and which is first changes
Law: a cost is the median difference of twins, told as a share of the steps it is paid for.
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
from fourfold.step.build import TrainStep, parallelize
from fourfold.tasks import lm
from fourfold.trainer.settings import TRACE_EVERY
from fourfold.trainer.tracer import Tracer

BLOCK_STEPS = 10
WARM_UP = 5
SAVE_EVERY = 50
UNSAMPLED_STEP = 1  # a step that is not recorded where every hundredth is


class PairedTimes(NamedTuple):
    """Seconds with and without, wall and processor time of this rank, by round."""

    wall_seconds: list[tuple[float, float]]
    cpu_seconds: list[tuple[float, float]]


def time_in_turns(rounds: int, with_it: Callable[[], None], without: Callable[[], None]) -> PairedTimes:
    found = PairedTimes([], [])
    for number in range(rounds):
        spent = {}
        for work in (with_it, without)[:: 1 if number % 2 else -1]:
            wall, processor = time.perf_counter(), time.process_time()
            work()
            spent[work] = time.perf_counter() - wall, time.process_time() - processor
        for index, kind in enumerate(found):
            kind.append((spent[with_it][index], spent[without][index]))
    return found


def format_row(name: str, twins: Sequence[tuple[float, float]], steps: int, every: int) -> tuple[str, ...]:
    """`steps` in a twin; the cost is paid once in `every` steps."""
    step = statistics.median(without for _, without in twins) / steps
    extra = [with_it - without for with_it, without in twins]
    shares = [each / (every * step) for each in extra]
    low, middle, high = statistics.quantiles(shares, n=4)
    more = f"{statistics.median(extra) * 1e3:+.1f}"
    return name, f"{step * 1e3:.1f}", more, f"{middle:+.2%}", f"{low:+.2%} to {high:+.2%}"


def build_step(folder: str) -> tuple[TrainStep, CheckpointManager, Callable[[], None]]:
    task, plan = lm.task(), Plan(dp=2)
    data = task.data()
    step = parallelize(task.model(), task.loss, task.optimizer, plan, clip=task.clip)
    feed = Feed(data.train, plan, batch_size=task.batch_size)
    keeper = CheckpointManager(
        TrainingState(step, feed), AttemptDir(Path(step.all_gather_json(folder)[0]), "bench"), NullLog(), seed=0
    )
    batches = feed.repeat()
    return step, keeper, lambda: step(next(batches)) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="fourfold-bench-", dir=".") as folder:
        step, keeper, one = build_step(folder)
        tracing = Tracer(step, folder=Path(folder) if step.rank == 0 else None)
        late = saves = samples = 0

        def block() -> None:
            for _ in range(BLOCK_STEPS):
                one()

        def saving() -> None:
            nonlocal late, saves
            saves += 1
            keeper.save(TrainingProgress(saves))
            block()
            late += keeper._writer_thread is not None and keeper._writer_thread.is_alive()

        def sampled() -> None:
            nonlocal samples
            samples += 1
            with tracing.sample(TRACE_EVERY * samples):
                one()

        def unsampled() -> None:
            with tracing.sample(UNSAMPLED_STEP):
                one()

        for _ in range(WARM_UP):
            one()
        sampled()
        saving()
        saves_found = time_in_turns(rounds, saving, block)
        steps_found = time_in_turns(rounds * BLOCK_STEPS, sampled, unsampled)
        keeper.wait()
        step.all_gather_json(None)
    if step.rank == 0:
        print(
            f"{describe_machine()}\nlm, 2 ranks, {rounds} pairs of blocks, "
            f"{rounds * BLOCK_STEPS} pairs of steps; rank 0's times\n"
        )
        heads = ("", "step, ms", "more, ms", "of the steps", "middle half")
        saved = f"one save in {SAVE_EVERY} steps"
        traced = f"one sampled step in {TRACE_EVERY}"
        rows = [heads, format_row(saved, saves_found.wall_seconds, BLOCK_STEPS, SAVE_EVERY)]
        rows += [format_row(f"{saved}, processor", saves_found.cpu_seconds, BLOCK_STEPS, SAVE_EVERY)]
        rows += [
            format_row(traced, steps_found.wall_seconds, 1, TRACE_EVERY),
            format_row(f"{traced}, processor", steps_found.cpu_seconds, 1, TRACE_EVERY),
        ]
        print(format_table(rows))
        print(f"\n{late} of {saves} saves were still being written when their block ended")


if __name__ == "__main__":
    main()

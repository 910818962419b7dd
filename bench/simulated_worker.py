"""The worker of `bench.simulated`: one rank that trains a small language model, every step of it recorded.

    fourfold run -n 2 bench/simulated_worker.py PLAN STEPS FILE     (PLAN: fields as TOML, with ; between them)

Law: rank 0 leaves the trace of the last STEPS steps in FILE; nothing is written while steps run.
"""

import contextlib
import sys
import tomllib
from pathlib import Path

import torch

import fourfold as ff
from fourfold.feed.feed import Feed
from fourfold.tasks import lm
from fourfold.trace.trace_file import encode_trace
from fourfold.trainer.tracer import Tracer
from fourfold.words.trace_events import NULL_RECORDER

NUM_UNTIMED = 4  # the launch order is fixed after the first step, and memory no longer grows after the second


def main(fields: str, steps: str, path: str) -> None:
    torch.manual_seed(1)
    task = lm.task(width=128, layers=4, batch_size=16, warmup=0, clip=None)
    plan = ff.Plan(**tomllib.loads(fields.replace(";", "\n")))
    step = ff.parallelize(task.model(), task.loss, task.optimizer, plan)
    tracer = Tracer(step, every=1, max_kept=int(steps))
    feed = Feed(task.data().train, plan, batch_size=task.batch_size)
    with contextlib.closing(feed.repeat()) as batches:
        for number in range(1, NUM_UNTIMED + int(steps) + 1):
            sample = tracer.sample(number) if number > NUM_UNTIMED else contextlib.nullcontext(NULL_RECORDER)
            with sample as recorder:
                with recorder.reading():
                    batch = next(batches)
                step(batch)
    trace = tracer.trace
    if step.rank == 0:
        Path(path).write_bytes(encode_trace(trace))


if __name__ == "__main__":
    main(*sys.argv[1:])

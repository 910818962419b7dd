"""Predict worker: one rank that trains a task by a plan, or measures its part of a calibration.

configuration  `fourfold;pp=2;microbatches=4`: fields of a plan
Law: all plans of a task train the same batches, which are read before the first step.

    python -m bench.predict_worker CONFIGURATION TASK LIMIT RENDEZVOUS      (RANK and WORLD_SIZE in the environment)
"""

import itertools
import json
import os
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist

import fourfold as ff
from bench.measurement import PeakMemory
from bench.predict_tasks import NUM_BATCHES
from fourfold.cli import job
from fourfold.cli.run import resolve
from fourfold.feed.feed import Feed
from fourfold.torch_kit.memory import memory_use
from fourfold.words.task import Task

CALIBRATE = "fourfold-calibrate"


def parse_plan(configuration: str) -> ff.Plan:
    """The plan of a configuration. Raises PlanError."""
    return ff.Plan(**tomllib.loads("\n".join(configuration.split(";")[1:])))


def parse_task(text: str) -> Task:
    """The task that words name, with the words of its arguments."""
    return job.parse_job(resolve(text.split()), has_run_dir=False).task


class Training:
    """A task, trained by a plan; the batches of this rank."""

    def __init__(self, task: Task, plan: ff.Plan) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"clip": task.clip, "tensor": task.tensor, "same_batches": "allow"}
        self._step = ff.parallelize(task.model, task.loss, task.optimizer, plan, **options)
        feed = Feed(task.data().train, plan, batch_size=task.batch_size or 1)
        batches = [_plain(batch) for batch in itertools.islice(feed.repeat(), NUM_BATCHES)]
        self._batches: Iterator[Any] = itertools.cycle(batches)

    def run_turn(self, *, untimed: int, timed: int) -> dict[str, object]:
        """Some steps that do not count, then some that do: the seconds of each, and the bytes that this rank keeps."""
        for _ in range(untimed):
            self._step(next(self._batches))
        seconds, busy = [], []
        for _ in range(timed):
            begin = time.perf_counter()
            metrics = self._step(next(self._batches))
            seconds.append(time.perf_counter() - begin)
            busy.append(self._step.busy_seconds | {"waiting": metrics.waiting_seconds})
        return {"seconds": seconds, "busy": busy, "kept": memory_use().total_bytes}


def _own_bytes() -> int:
    """Private and shared memory of this process, without files."""
    peak = PeakMemory()
    peak.sample([os.getpid()])
    return peak.own_bytes


def _plain(batch: Any) -> Any:
    """A batch without its place in the epoch."""
    return dict(batch) if isinstance(batch, dict) else tuple(batch)


def calibrate(task: Task, file: str) -> dict[str, object]:
    """Measure with all ranks; rank 0 writes the calibration."""
    from pathlib import Path

    from fourfold.comm import init
    from fourfold.planner.calibrate.rank import Conditions, measure
    from fourfold.planner.calibrate.timing import this_machine
    from fourfold.planner.predict.calibration import encode_calibration
    from fourfold.planner.task_facts.source import TaskFacts

    ranks = init.init_communicator()
    machine = this_machine(ranks.size, threads=torch.get_num_threads(), hosts=ranks.num_hosts)
    conditions = Conditions(machine, os.getloadavg()[0], is_forced=True)
    begin = time.perf_counter()
    measured = measure(task, TaskFacts(task), ranks, conditions, say=lambda text: None)
    if ranks.rank == 0:
        Path(file).write_bytes(encode_calibration(measured.calibration))
    return {"seconds": time.perf_counter() - begin, "left_out": measured.left_out}


def main(arguments: list[str], reply_stream: TextIO) -> None:
    configuration, task_text, limit, rendezvous = arguments
    signal.alarm(int(limit))  # the kernel ends this process then, whatever it does
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    task = parse_task(task_text)
    before = _own_bytes()
    training = None if configuration == CALIBRATE else Training(task, parse_plan(configuration))
    print(json.dumps({"ready": True, "before": before}), file=reply_stream, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = calibrate(task, request["file"]) if training is None else training.run_turn(**request)
        print(json.dumps(reply), file=reply_stream, flush=True)
    os._exit(0)  # skips the shutdown of the process group: another rank may be gone already


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is for the replies to the parent.
    with os.fdopen(os.dup(1), "w") as reply_stream:
        os.dup2(2, 1)
        main(sys.argv[1:], reply_stream)

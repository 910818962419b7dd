"""The law of what goes with the tensor axis: a training that has an oracle without it equals this oracle with it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.read import CheckpointReader
from fourfold.checkpoint.restore import restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from tests import cases, local_sgd_oracle
from tests.cases import Case
from tests.checkpoint_runs import MemoryLog

CASE = Case(model="lm", batch_sizes=(4, 3, 5, 4), length=8)


def make_step(comm: Any, case: Case, *, tp: int, **options: Any) -> TrainStep:
    """The case's step, with as many data ranks as there are places for."""
    plan = dataclasses.replace(case.plan(comm.size // tp), tp=tp)
    return TrainStep(
        cases.model(case.model),
        cases.loss(case),
        cases.optimizer(case),
        plan=plan,
        communicator=comm,
        clip=case.clip,
        tensor=lm.TENSOR_RULES,
        **options,
    )


def train(comm: Any, case: Case, *, tp: int) -> TrainingResult:
    # Weights that several ranks hold are compared bit for bit.
    return cases.train_step(case, make_step(comm, case, tp=tp, drift_check=1))


_one_device, _local_sgd = map(functools.cache, (cases.train_oracle, local_sgd_oracle.train))


def expected(case: Case, dp: int) -> TrainingResult:
    """The result of one process."""
    changes = {"update": "after", "microbatches": 1, "zero": 0, "sp": 1, "bucket_bytes": CASE.bucket_bytes}
    plain = dataclasses.replace(case, **changes)
    return _local_sgd(plain, dp) if case.sync == "local" else _one_device(plain)


LOCAL: dict[str, Any] = {"sync": "local", "local_steps": 2, "batch_sizes": (4, 3, 5, 1)}
DILOCO = LOCAL | {"outer_lr": 0.7, "outer_momentum": 0.9}
LAYER_WISE: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4, "update": "in_forward"},  # two heads of keys and values on four ranks
    {"dp": 2, "tp": 2, "update": "in_forward"},
    {"dp": 2, "tp": 4, "zero": 1},
    {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "zero": 3, "update": "in_forward"},
    {"dp": 4, "tp": 2, "zero": 2, "shard": 2},
    {"sp": 2, "tp": 2, "zero": 1},
]
COMBINATIONS: list[dict[str, Any]] = [
    *(fields | {"optimizer": kind, "clip": 0.05} for kind in ("LARS", "LAMB") for fields in LAYER_WISE),
    {"tp": 2} | DILOCO,
    {"dp": 2, "tp": 2, "clip": 0.05} | LOCAL,
    {"dp": 2, "tp": 4, "clip": 0.05, "microbatches": 2} | DILOCO,
    {"dp": 3, "tp": 2, "optimizer": "LAMB", "clip": 0.05} | DILOCO,  # in the last step two workers have no samples
    {"dp": 2, "tp": 2, "update": "in_backward", "optimizer": "SGD"} | LOCAL,
]


def save(step: TrainStep, folder: Path) -> None:
    manager = CheckpointManager(TrainingState(step, None, None), AttemptDir(folder, "a"), MemoryLog(), seed=0)
    manager.save(TrainingProgress(step.num_steps, [1.0]))
    manager.wait()


def resume(step: TrainStep, folder: Path) -> None:
    store = CheckpointStore(folder)
    with CheckpointReader(store.step_dir(max(store.steps()))) as reader:
        restore(TrainingState(step, None, None), reader, seed=0)


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_what_goes_with_the_tensor_axis_trains_as_in_one_process(fields, without_dry_run):
    dp, tp, of_case = fields.get("dp", 1), fields["tp"], {k: v for k, v in fields.items() if k not in ("dp", "tp")}
    case = dataclasses.replace(CASE, **of_case)
    wanted = expected(case, dp)
    for got in threads.run(dp * case.sp * tp, lambda comm: train(comm, case, tp=tp)):
        assert oracle.deviation(got, wanted) <= TOLERANCE


def test_workers_of_local_steps_go_on_with_their_states_on_another_number_of_tensor_ranks(tmp_path, without_dry_run):
    case = dataclasses.replace(CASE, **DILOCO)
    first = dataclasses.replace(case, batch_sizes=case.batch_sizes[:2])

    def begin(comm):
        step = make_step(comm, case, tp=2)
        losses = cases.train_step(first, step).losses
        save(step, tmp_path)
        return losses

    def go_on(comm, *, tp):
        step = make_step(comm, case, tp=tp)
        resume(step, tmp_path)
        return cases.train_step(case, step, skip=2)

    wanted, losses = expected(case, 2), threads.run(4, begin)[0]
    for tp in (1, 2, 4):
        for got in threads.run(2 * tp, functools.partial(go_on, tp=tp)):
            whole = got._replace(losses=losses + got.losses)
            assert oracle.deviation(whole, wanted) <= TOLERANCE

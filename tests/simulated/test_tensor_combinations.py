"""The law of what goes with the tensor axis: a training that has an oracle without it equals this oracle with it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.checkpoint.restore import CheckpointReader, restore
from fourfold.checkpoint.store import CheckpointStore
from fourfold.comm.codec.protocol import RESIDUAL_KEY
from fourfold.plan.codec import CODECS
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import preflight
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from fourfold.words.errors import PlanError
from tests import cases, codec_oracle, local_sgd_oracle
from tests.cases import Case
from tests.checkpoint_runs import MemoryLog

CASE = Case(model="lm", batch_sizes=(4, 3, 5), length=8)


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


_one_device, _local_sgd, _codec = map(functools.cache, (cases.train_oracle, local_sgd_oracle.train, codec_oracle.train))


def expected(case: Case, dp: int, tp: int = 1) -> TrainingResult:
    """The result of one process."""
    changes = {"update": "after", "microbatches": 1, "zero": 0, "cp": 1, "bucket_bytes": CASE.bucket_bytes}
    if case.codec != "none":
        # The transport divides by the first step's count, and reduces each microbatch where gradients rest split.
        count = float(case.batch_sizes[0] * case.length)
        shards = 1 if case.codec in ("bf16", "fp16") else tp  # casts are the same however a parameter is cut
        return _codec(dataclasses.replace(case, update="after", cp=1), dp, tp=shards, unit=count)
    plain = dataclasses.replace(case, **changes)
    return _local_sgd(plain, dp) if case.sync == "local" else _one_device(plain)


LOCAL: dict[str, Any] = {"sync": "local", "local_steps": 2, "batch_sizes": (4, 3, 5, 1)}
DILOCO = LOCAL | {"outer_lr": 0.7, "outer_momentum": 0.9}
EVEN = {"batch_sizes": (4, 4), "optimizer": "SGD"}
LARS, LAMB = ({"optimizer": kind, "clip": 0.05} for kind in ("LARS", "LAMB"))
COMBINATIONS: list[dict[str, Any]] = [
    {"tp": 2} | LARS,
    {"tp": 4, "update": "in_forward"} | LAMB,  # two heads of keys and values on four ranks
    {"dp": 2, "tp": 4, "zero": 1} | LARS,
    {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2} | LAMB,
    {"dp": 2, "tp": 2, "zero": 3, "update": "in_forward"} | LARS,
    {"dp": 4, "tp": 2, "zero": 2, "shard": 2} | LAMB,
    {"cp": 2, "tp": 2, "zero": 1} | LAMB,
    {"tp": 2} | DILOCO,
    {"dp": 2, "tp": 2, "clip": 0.05} | LOCAL,
    {"dp": 2, "tp": 4, "clip": 0.05, "microbatches": 2} | DILOCO,
    {"dp": 3, "tp": 2, "optimizer": "LAMB", "clip": 0.05} | DILOCO,  # in the last step two workers have no samples
    {"dp": 2, "tp": 2, "update": "in_backward", "optimizer": "SGD"} | LOCAL,
    {"tp": 2, "codec": "int8"},
    {"dp": 2, "tp": 2, "codec": "int8", "clip": 0.05, "zero": 1},
    {"dp": 3, "tp": 2, "codec": "int8", "update": "in_backward"},
    {"dp": 2, "tp": 2, "codec": "topk", "clip": 0.05},
    {"dp": 2, "tp": 2, "codec": "topk", "zero": 2, "microbatches": 2, "update": "in_forward"},
    {"dp": 2, "tp": 2, "codec": "dct", "clip": 0.05, "zero": 2},
    {"dp": 2, "tp": 2, "codec": "dct", "optimizer": "LAMB", "update": "in_forward"},
    {"dp": 2, "tp": 2, "codec": "powersgd", "clip": 0.05},
    {"dp": 2, "tp": 2, "codec": "powersgd", "zero": 2, "microbatches": 2, "update": "in_backward"},
    {"dp": 2, "tp": 2, "codec": "bf16", "clip": 0.05} | EVEN,
    {"dp": 2, "tp": 4, "codec": "fp16", "zero": 1} | EVEN,
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
    wanted = expected(case, dp, tp)
    for got in threads.run(dp * case.cp * tp, lambda comm: train(comm, case, tp=tp)):
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


class Apart(nn.Module):
    """Layers whose keys and values have weights of their own, of fewer heads than ranks, beside norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads, self.kv_heads = nn.LayerNorm(16), 4, 2
        self.q, self.k, self.v, self.out = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (each.unflatten(1, (-1, 8)) for each in (self.q(y), self.k(y), self.v(y)))
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        return self.head(x + self.out((torch.tanh(q * k) + v).flatten(1)))


APART_RULES = {"q": "column(heads)", "k": "column(kv_heads)", "v": "column(kv_heads)", "out": "row(heads)"}
PLAIN = Case(batch_sizes=(7, 8, 6))


def make_apart(comm: Any, codec: str, *, tp: int) -> TrainStep:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        model = Apart().float()
    plan = Plan(dp=comm.size // tp, tp=tp, codec=codec, codec_rank=1, codec_density=0.2, codec_refresh_steps=2, zero=1)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)  # one group, so that all may lie in one bucket
    options: dict[str, Any] = {"clip": 0.5, "tensor": APART_RULES, "drift_check": 1}
    return TrainStep(model, cases.loss(PLAIN), optimizer, plan=plan, communicator=comm, **options)


def train_apart(step: TrainStep, start: int = 0, stop: int | None = None) -> list[float]:
    batches = [(x.float(), y) for x, y in cases.batches(PLAIN)[start:stop]]
    return [step(cases.local_batch(batch, step.plan.dp, step.dp_index)).loss for batch in batches]


@pytest.mark.parametrize("codec", CODECS)
def test_what_several_ranks_hold_stays_the_same_bits_whatever_lies_beside_it(codec, without_dry_run, tmp_path):
    def finish(step):
        residuals = {name: rows.get(RESIDUAL_KEY) for name, rows in step.codec_state.state_dict().items()}
        losses = train_apart(step, start=2)  # raises DivergenceError where weights of all ranks differ
        of_heads = {name: p.detach().clone() for name, p in step.model.named_parameters() if name[0] in "kv"}
        return losses, residuals, of_heads, step.state_dict()["model"]

    def begin(comm):
        step = make_apart(comm, codec, tp=4)
        train_apart(step, stop=2)
        save(step, tmp_path)
        return finish(step)

    def go_on(comm, *, tp):
        step = make_apart(comm, codec, tp=tp)
        resume(step, tmp_path)
        return finish(step)

    ranks = threads.run(8, begin)
    losses, residuals, _, _ = ranks[0]
    for first, second in ((0, 1), (2, 3)):  # the tensor ranks of one head of keys and values
        assert all(torch.equal(p, ranks[second][2][name]) for name, p in ranks[first][2].items())
    for again, before in zip(threads.run(8, functools.partial(go_on, tp=4)), ranks, strict=True):
        assert again[0] == losses
        assert all(torch.equal(again[3][name], value) for name, value in before[3].items())
    # On another number of tensor ranks residuals go on; what else a codec remembers, it finds again.
    other, *_ = threads.run(4, functools.partial(go_on, tp=2))
    assert all(torch.equal(other[1][name], value) for name, value in residuals.items())
    assert other[0] == pytest.approx(losses, rel=0.1)


def test_codecs_that_would_send_different_sums_of_one_weight_are_rejected_before_a_weight_moves():
    def body(comm):
        step_of = functools.partial(make_step, comm, tp=4)
        got = r'codec = "int8" and tp = 4, where several ranks hold the same part of blocks.0.attention.qkv.weight, blo'
        with pytest.raises(PlanError, match=got):
            step_of(dataclasses.replace(CASE, codec="int8"))
        step_of(dataclasses.replace(CASE, codec="fp16"))

    threads.run(4, body)
    task = lm.task(width=32, heads=4, kv_heads=2, length=16)
    with pytest.raises(PlanError, match=r'codec = "topk" and tp = 4, where several ranks hold the same part of'):
        preflight(task, Plan(tp=4, codec="topk"))
    preflight(task, Plan(tp=2, codec="topk"))

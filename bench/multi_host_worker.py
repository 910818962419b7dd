"""One rank of one contender: the built-in `lm`, trained on one machine of several hosts.

contender  a way to train the same model on the same batches: DDP and its hooks, FSDP2, or a plan of Fourfold's
turn       some steps, or one validation, at the parent's request
Law: all contenders have the same weights at the start, the same batches, rates and clipping.

    python -m bench.multi_host_worker CONTENDER STEPS LIMIT RENDEZVOUS      (RANK and WORLD_SIZE in the environment)
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fourfold as ff
from fourfold.feed.source import fetch
from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan_fields import PLAN_FIELDS, parse_value
from fourfold.tasks import lm

VALID_BYTES = 16_384
VALID_BATCH_SIZE = 16
POWERSGD_START = 10  # plain all-reduces before it: it needs at least two
FOURFOLD = "fourfold"


class Contender(Protocol):
    """What is measured; the caller sets learning rates in `optimizer.param_groups`."""

    optimizer: torch.optim.Optimizer

    def step(self, batch: Any) -> float:
        """One update; returns a loss. Peers return the local loss, to save them a reduction."""
        ...

    def validate(self, batches: Sequence[Any]) -> float:
        """The mean loss over this rank's validation batches, or over all ranks'."""
        ...


class TorchPeer:
    """The training loop of every torch peer."""

    def __init__(self, model: nn.Module, task: ff.Task) -> None:
        self._model, self._task = model, task
        self.optimizer = task.optimizer(model.parameters())

    def step(self, batch: Any) -> float:
        loss = self._loss(batch)
        loss.backward()
        assert self._task.clip is not None
        nn.utils.clip_grad_norm_(self._model.parameters(), self._task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def validate(self, batches: Sequence[Any]) -> float:
        return sum(self._loss(batch).item() for batch in batches) / len(batches)

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        assert self._task.loss is not None
        return self._task.loss(self._model(**inputs), targets).mean()


class FourfoldContender:
    """A plan of Fourfold's."""

    def __init__(self, model: nn.Module, task: ff.Task, plan: ff.Plan) -> None:
        self._step = ff.parallelize(model, task.loss, task.optimizer, plan, clip=task.clip)
        self.optimizer = self._step.optimizer

    def step(self, batch: Any) -> float:
        return self._step(batch).loss

    def validate(self, batches: Sequence[Any]) -> float:
        return sum(self._step.evaluate(batch).loss for batch in batches) / len(batches)


def ddp(model: nn.Module, task: ff.Task) -> TorchPeer:
    return TorchPeer(_ddp(model), task)


def ddp_fp16(model: nn.Module, task: ff.Task) -> TorchPeer:
    wrapped = _ddp(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return TorchPeer(wrapped, task)


def ddp_powersgd(model: nn.Module, task: ff.Task) -> TorchPeer:
    # One bucket: with several, gloo aborts ("received data size doesn't match"); see docs/measured-notes.md.
    wrapped = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=256)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=POWERSGD_START)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return TorchPeer(wrapped, task)


def fsdp2(model: nn.Module, task: ff.Task) -> TorchPeer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TorchPeer(model, task)


def _ddp(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)


PEERS: dict[str, Callable[[nn.Module, ff.Task], TorchPeer]] = {
    "ddp": ddp,
    "ddp-fp16": ddp_fp16,
    "ddp-powersgd": ddp_powersgd,
    "fsdp2": fsdp2,
}


def parse_plan(contender: str, size: int) -> ff.Plan:
    """The plan of `fourfold` or `fourfold:zero=1,codec=fp16`. Raises PlanError."""
    values: dict[str, object] = {"dp": size}
    for field in filter(None, contender.partition(":")[2].split(",")):
        name, _, text = field.partition("=")
        values[name] = parse_value(name, text) if name in PLAN_FIELDS else text
    return ff.Plan.from_dict(values)


def make_contender(contender: str, task: ff.Task, size: int) -> Contender:
    torch.manual_seed(0)
    model = task.model()
    return (
        PEERS[contender](model, task)
        if contender in PEERS
        else FourfoldContender(model, task, parse_plan(contender, size))
    )


class ContenderRun:
    """A contender, its data, and the step it has reached."""

    def __init__(self, contender: str, steps: int, *, rank: int, size: int) -> None:
        self._task = lm.task(steps=steps, valid_bytes=VALID_BYTES)
        data = self._task.data()
        self._contender = make_contender(contender, self._task, size)
        self._base_lrs = [group["lr"] for group in self._contender.optimizer.param_groups]
        # Every contender gets the same batches in the same order.
        self._batches = ff.Feed(data.train, ff.Plan(dp=size), batch_size=self._task.batch_size, seed=0).repeat()
        assert data.valid is not None
        start, stop = shard_range(0, len(data.valid) // (size * VALID_BATCH_SIZE) * size * VALID_BATCH_SIZE, size, rank)
        firsts = range(start, stop, VALID_BATCH_SIZE)
        self._valid_batches = [fetch(data.valid, range(first, first + VALID_BATCH_SIZE)) for first in firsts]
        self._step = 0

    def run_steps(self, count: int) -> dict[str, object]:
        """Take some steps; returns the seconds of each, and the loss of the last."""
        seconds, loss = [], float("nan")
        for _ in range(count):
            batch = next(self._batches)
            begin = time.perf_counter()
            assert self._task.schedule is not None
            factor = self._task.schedule(self._step, self._task.steps or 0)
            for group, rate in zip(self._contender.optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = rate * factor
            loss = self._contender.step(batch)
            seconds.append(time.perf_counter() - begin)
            self._step += 1
        return {"seconds": seconds, "loss": loss}

    def validate(self) -> dict[str, object]:
        return {"valid": self._contender.validate(self._valid_batches)}


def main(arguments: list[str], reply_stream: TextIO) -> None:
    contender, steps, limit, rendezvous = arguments
    # The kernel kills this process at its limit even if it hangs in C or the parent is gone.
    signal.alarm(int(limit))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    training = ContenderRun(contender, int(steps), rank=rank, size=size)
    num_bytes = sum(p.numel() * p.element_size() for p in lm.task().model().parameters())
    print(json.dumps({"bytes": num_bytes}), file=reply_stream, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = training.run_steps(request["steps"]) if "steps" in request else training.validate()
        print(json.dumps(reply), file=reply_stream, flush=True)
    # Skips the shutdown of the process group: another rank may be gone already.
    os._exit(0)


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is for the replies to the parent.
    with os.fdopen(os.dup(1), "w") as reply_stream:
        os.dup2(2, 1)
        main(sys.argv[1:], reply_stream)

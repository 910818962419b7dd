"""One rank of one configuration.

configuration  a way to train the same model on the same batches: `step(batch) -> loss`
turn           some untimed and some timed steps, at the parent's request
Law: once it has reported that it is ready, a rank sleeps except in its turns: no process builds, exits or spins while
another world steps.

    python -m bench.worker CONFIGURATION CASE LIMIT RENDEZVOUS      (RANK and WORLD_SIZE in the environment)
"""

import functools
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.models import CASES, Batch, Case, losses

Step = Callable[[Batch], float]

NUM_BATCHES = 4


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of every torch peer. Its loss is the local one: reducing it would cost the peers time."""

    def step(batch: Batch) -> float:
        inputs, targets = batch
        loss = losses(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ddp(model: nn.Module, case: Case) -> Step:
    model = DistributedDataParallel(model)
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=case.lr))


def ddp_tuned(model: nn.Module, case: Case) -> Step:
    model = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=case.lr, fused=True))


def ddp_malloc(model: nn.Module, case: Case) -> Step:
    """Tuned DDP in a process that keeps freed memory, as Fourfold's do: it shows what the allocator contributes."""
    from fourfold.torch_kit.memory import keep_freed_memory

    keep_freed_memory()
    return ddp_tuned(model, case)


def fsdp2(model: nn.Module, case: Case) -> Step:
    from torch.distributed.device_mesh import init_device_mesh  # here: no other configuration should import it
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=case.lr, fused=True))


def no_communication(model: nn.Module, case: Case) -> Step:
    """The lower bound: equally many processes without any communication."""
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=case.lr, fused=True))


def single_process(model: nn.Module, case: Case, **options: Any) -> Step:
    """One process of plain torch; `options` choose how AdamW runs its update."""
    return torch_step(model, torch.optim.AdamW(model.parameters(), lr=case.lr, **options))


def zero_torch(model: nn.Module, case: Case) -> Step:
    """torch's own ZeRO 1, over tuned DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: no other configuration should import it

    model = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=case.lr, fused=True)
    return torch_step(model, optimizer)


def deepspeed(model: nn.Module, case: Case, *, stage: int) -> Step:
    """DeepSpeed's ZeRO with torch's fused AdamW; DeepSpeed's own would be compiled at its first use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds  # pyright: ignore[reportMissingImports]  # an optional dependency of this bench only

    ds.logger.setLevel("ERROR")
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": case.batch_size,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: Batch) -> float:
        inputs, targets = batch
        loss = losses(engine(inputs), targets).mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def fourfold(model: nn.Module, case: Case, **fields: Any) -> Step:
    import fourfold as ff  # here: the peers are measured without it

    optimizer = functools.partial(torch.optim.AdamW, lr=case.lr, fused=True)
    step = ff.parallelize(model, losses, optimizer, ff.Plan(dp=int(os.environ["WORLD_SIZE"]), **fields))
    return lambda batch: step(batch).loss


CONFIGURATIONS: dict[str, Callable[[nn.Module, Case], Step]] = {
    "ddp": ddp,
    "ddp-tuned": ddp_tuned,
    "ddp-malloc": ddp_malloc,
    "fsdp2": fsdp2,
    "alone": no_communication,
    "default": single_process,
    "foreach": functools.partial(single_process, foreach=True),
    "fused": functools.partial(single_process, fused=True),
    "zero-torch": zero_torch,
    **{f"deepspeed{stage}": functools.partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    "fourfold": fourfold,
    "fourfold-early": functools.partial(fourfold, update="in_backward"),
    "fourfold-forward": functools.partial(fourfold, update="in_forward"),
    "fourfold-zero1": functools.partial(fourfold, zero=1),
    "fourfold-zero1-early": functools.partial(fourfold, zero=1, update="in_backward"),
    "fourfold-zero1-forward": functools.partial(fourfold, zero=1, update="in_forward"),
    "fourfold-zero2": functools.partial(fourfold, zero=2),
    "fourfold-zero3": functools.partial(fourfold, zero=3),
}


def run_turn(step: Step, batches: Iterator[Batch], *, untimed: int, timed: int) -> dict[str, object]:
    """Untimed steps, then timed ones: the losses of all; seconds, processor seconds and page faults of the timed."""
    values = [step(next(batches)) for _ in range(untimed)]
    seconds = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(timed):
        begin = time.perf_counter()
        values.append(step(next(batches)))
        seconds.append(time.perf_counter() - begin)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "losses": values,
        "seconds": seconds,
        "user_seconds": after.ru_utime - before.ru_utime,
        "system_seconds": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
        "peak_bytes": 1024 * after.ru_maxrss,
    }


def main(arguments: list[str], reply_stream: TextIO) -> None:
    configuration, case_name, limit, rendezvous = arguments
    # The kernel ends this process at its limit, even if it hangs in C code or its parent is gone.
    signal.alarm(int(limit))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if size > 1 and configuration != "alone":
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    case = CASES[case_name]
    step = CONFIGURATIONS[configuration](case.build(), case)
    batches = itertools.cycle(case.batches(rank, NUM_BATCHES))
    print(json.dumps({"ready": rank}), file=reply_stream, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_turn(step, batches, **json.loads(line))), file=reply_stream, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is for the replies to the parent.
    with os.fdopen(os.dup(1), "w") as reply_stream:
        os.dup2(2, 1)
        main(sys.argv[1:], reply_stream)

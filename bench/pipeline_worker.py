"""Pipeline worker: one rank that trains its stage of a model, or sends messages to the other rank and back.

configuration  who runs the stages: Fourfold, or `torch.distributed.pipelining` with stages built by hand; or messages
case           model, schedule and microbatches, joined by commas; for messages "-"
Law: both train the same model, cut before the same block, on the same batches, with the same update.

    python -m bench.pipeline_worker CONFIGURATION CASE LIMIT RENDEZVOUS     (RANK and WORLD_SIZE in the environment)
"""

import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import CASES, Batch, Case, Layer, losses
from bench.worker import NUM_BATCHES

FOURFOLD, TORCH, EDGE = "fourfold", "torch", "edge"
SHARED, GLOO = "shared memory", "gloo"
WIDTH, LENGTH, HEADS = 256, 256, 8
COMPUTES = ("forward", "backward", "backward-input", "backward-weight")  # the verbs of a stage's own computes


class Layers(nn.Module):
    """Equal layers and nothing else, [B, L, D] to [B, L, D]."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(WIDTH, HEADS) for _ in range(num_layers))

    def forward(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return x_BLD


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """[B, L, D] and the same to the mean of each token, [B, L]."""
    return F.mse_loss(outputs, targets, reduction="none").mean(-1)


def _vectors(batch_size: int, generator: torch.Generator) -> Batch:
    x_BLD, y_BLD = torch.randn(2, batch_size, LENGTH, WIDTH, generator=generator)
    return x_BLD, y_BLD


MODELS = {**CASES, "layers": Case(model=Layers, draw_batch=_vectors, batch_size=8, lr=3e-4)}


class StepResult(NamedTuple):
    """Of one step of this rank. `loss`: None if it is another rank's; `busy_seconds`: by verb, if they are known."""

    loss: float | None
    busy_seconds: Mapping[str, float] = {}


class Setting(NamedTuple):
    """What a case says."""

    model: str
    schedule: str
    microbatches: int

    @classmethod
    def of(cls, case: str) -> "Setting":
        model, schedule, microbatches = case.split(",")
        return cls(model, schedule, int(microbatches))

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks each stage has: a rank has half of all in every schedule."""
        is_interleaved = self.schedule == "interleaved"
        if self.model == "layers":
            return (1, 1, 1, 1) if is_interleaved else (2, 2)
        return (2, 1, 1, 2) if is_interleaved else (3, 3)

    @property
    def num_chunks(self) -> int:
        """Stages of a rank."""
        return len(self.blocks) // 2

    @property
    def max_in_flight(self) -> int | None:
        """Two ranks with three microbatches in flight: H2, whose bubble is zero for equal costs."""
        return 3 if self.schedule == "zero-bubble" else None

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return squared_errors if self.model == "layers" else losses


Step = Callable[[Batch], StepResult]


def fourfold(setting: Setting) -> Step:
    import fourfold as ff  # here: torch's way is measured without it

    case = MODELS[setting.model]
    optimizer = functools.partial(torch.optim.AdamW, lr=case.lr, fused=True)
    plan = ff.Plan(
        pp=int(os.environ["WORLD_SIZE"]),
        schedule=setting.schedule,
        microbatches=setting.microbatches,
        stages=",".join(map(str, setting.blocks)),
        interleave=setting.num_chunks,
        max_in_flight=setting.max_in_flight,
    )
    step = ff.parallelize(case.build(), setting.loss, optimizer, plan)
    return lambda batch: StepResult(step(batch).loss, step.busy_seconds)


class HandMadeStage(nn.Module):
    """A stage built by hand: blocks of the GPT or of equal layers, what is before the first and behind the last one."""

    def __init__(self, model: nn.Module, blocks: range) -> None:
        super().__init__()
        all_blocks = list(model.get_submodule("blocks").children())
        is_gpt = not isinstance(model, Layers)
        self.is_first, self.is_last = is_gpt and blocks.start == 0, is_gpt and blocks.stop == len(all_blocks)
        self.blocks = nn.ModuleList(all_blocks[blocks.start : blocks.stop])
        if self.is_first:
            self.tokens, self.positions = model.get_submodule("tokens"), model.get_submodule("positions")
        if self.is_last:
            self.norm, self.head = model.get_submodule("norm"), model.get_submodule("head")

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def by_torch(setting: Setting) -> Step:
    # Here: Fourfold's way is measured without it.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    case, rank, size = MODELS[setting.model], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, stops = case.build(), list(itertools.accumulate(setting.blocks, initial=0))
    own = range(rank, len(setting.blocks), size)
    modules = nn.ModuleList(HandMadeStage(model, range(stops[number], stops[number + 1])) for number in own)
    stages: list[Any] = [
        PipelineStage(module, number, len(setting.blocks), torch.device("cpu"))
        for number, module in zip(own, modules, strict=True)
    ]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return setting.loss(outputs, targets).mean()

    schedule: Any
    if setting.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, setting.microbatches, loss_fn=loss)
    else:
        # Its zero-bubble schedules need two stages of a rank; the same cut has 1F1B.
        kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zero-bubble": Schedule1F1B}
        schedule = kinds[setting.schedule](stages[0], setting.microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=case.lr, fused=True)

    def step(batch: Batch) -> StepResult:
        inputs, targets = batch
        by_microbatch: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=by_microbatch, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return StepResult(sum(each.item() for each in by_microbatch) / len(by_microbatch) if by_microbatch else None)

    return step


CONFIGURATIONS: Mapping[str, Callable[[Setting], Step]] = {FOURFOLD: fourfold, TORCH: by_torch}


def run_turn(step: Step, batches: Iterator[Batch], *, untimed: int, timed: int) -> dict[str, object]:
    """Untimed steps, then timed ones: the losses of all; of the timed the seconds, and the busy seconds by verb."""
    results = [step(next(batches)) for _ in range(untimed)]
    seconds, busy = [], []
    for _ in range(timed):
        begin = time.perf_counter()
        results.append(step(next(batches)))
        seconds.append(time.perf_counter() - begin)
        busy.append(dict(results[-1].busy_seconds))
    return {"losses": [result.loss for result in results], "seconds": seconds, "busy": busy}


# ---- messages -------------------------------------------------------------------------------------------


def run_messages(edges: Any, job: Mapping[str, Any]) -> dict[str, object]:
    """Seconds of a message from one rank to the other, of several to and fro; and an element of the last one."""
    message, rank = torch.full((job["bytes"] // 4,), 1.0), dist.get_rank()
    echo = _by_gloo if job["way"] == GLOO else functools.partial(_by_edge, edges)
    for _ in range(8):  # all slots are reserved and touched
        echo(message, rank)
    dist.barrier()
    value, begin = 0.0, time.perf_counter()
    for _ in range(job["times"]):
        value = echo(message, rank)
    return {"seconds": (time.perf_counter() - begin) / job["times"] / 2, "value": value}


def _by_gloo(message: Tensor, rank: int) -> float:
    """To the other rank and back."""
    arrived = torch.empty_like(message)
    if rank == 0:
        dist.send(message, 1)
        dist.recv(arrived, 1)
    else:
        dist.recv(arrived, 0)
        dist.send(arrived, 0)
    return arrived[-1].item()


def _by_edge(edges: Any, message: Tensor, rank: int) -> float:
    """To the other rank and back."""
    if rank == 0:
        edges.to_next.send([message])
        (arrived,) = edges.from_next.receive()
    else:
        (arrived,) = edges.from_previous.receive()
        edges.to_previous.send([arrived])
    return arrived[-1].item()


def _edge_turns(setting: str) -> Callable[[Mapping[str, Any]], dict[str, object]]:
    from fourfold.comm import init
    from fourfold.comm.edges import make_edges
    from fourfold.comm.meter import CommMeter
    from fourfold.torch_kit.memory import keep_freed_memory

    keep_freed_memory()
    edges = make_edges(init.init_communicator(), CommMeter(), choice="shared")
    return functools.partial(run_messages, edges)


def _step_turns(configuration: str, case: str) -> Callable[[Mapping[str, Any]], dict[str, object]]:
    setting = Setting.of(case)
    step = CONFIGURATIONS[configuration](setting)
    batches = itertools.cycle(MODELS[setting.model].batches(0, NUM_BATCHES))
    return lambda job: run_turn(step, batches, **job)


def main(arguments: Iterable[str], reply_stream: TextIO) -> None:
    configuration, case, limit, rendezvous = arguments
    signal.alarm(int(limit))  # the kernel ends this process then, whatever it does
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    run = _edge_turns(case) if configuration == f"{FOURFOLD}-{EDGE}" else _step_turns(configuration, case)
    print(json.dumps({"ready": True}), file=reply_stream, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=reply_stream, flush=True)
    os._exit(0)  # skips the shutdown of the process group: another rank may be gone already


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is for the replies to the parent.
    with os.fdopen(os.dup(1), "w") as reply_stream:
        os.dup2(2, 1)
        main(sys.argv[1:], reply_stream)

"""What the ranks of a spawned world do; see `fourfold.testing.process_world`. Results are JSON."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fourfold as ff
from fourfold.axes.context.work.context_group import connect_context
from fourfold.comm import init
from fourfold.comm.meter import CommMeter
from fourfold.plan.codec import codec_rounds
from fourfold.tasks import lm
from fourfold.testing import oracle
from fourfold.trace.trace_file import encode_trace
from fourfold.trainer import meters
from fourfold.trainer.tracer import Tracer
from fourfold.verification.command import verify
from fourfold.words.errors import DivergenceError, FourfoldError, PlanError
from tests import attention_oracle, callback_runs, codec_oracle, local_sgd_oracle, precision_oracle
from tests import cases as cases_module
from tests.cases import Case
from tests.jobs import parse_job


def deviation(host: str | None = None, **fields: Any) -> dict[str, Any]:
    """The deviation of a training from the oracle's, and its transport. `host`: ranks pretend to be on two hosts."""
    if "batch_sizes" in fields:
        fields["batch_sizes"] = tuple(fields["batch_sizes"])
    case = Case(**fields)
    with fake_hosts(host):
        step = cases_module.build_step(case, dist.get_world_size())
    trained = cases_module.train_step(case, step)
    return {"deviation": oracle.deviation(trained, cases_module.train_oracle(case)), "transport": step.transport_name}


def coded_deviations(cases: list[dict[str, Any]], host: str | None = None) -> list[dict[str, Any]]:
    """For each case: the deviation of a training from that of its codec's workers, and the bytes a step sends."""
    results = []
    for fields in cases:
        case, size = Case(**fields, batch_sizes=(16, 16)), dist.get_world_size()
        with fake_hosts(host):
            step = cases_module.build_step(case, size)
        metrics = [step(cases_module.local_batch(batch, size, step.dp_index)) for batch in cases_module.batches(case)]
        trained = oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])
        expected = codec_oracle.train(case, size, unit=16.0)
        lengths = [sum(b.num_bytes for b in rounds) for rounds in _codec_rounds(step)]
        results.append(
            {
                "deviation": oracle.deviation(trained, expected),
                "transport": step.transport_name,
                "sent_bytes": metrics[-1].sent_bytes,
                "message_bytes": sum(lengths),
            }
        )
    return results


def precision_deviations(cases: list[dict[str, Any]], host: str | None = None) -> list[float]:
    """For each case: the largest difference between a weight and that of the same ranks in one process."""
    deviations = []
    for fields in cases:
        case, size = (
            dataclasses.replace(precision_oracle.CASE, batch_sizes=(16, 16, 16), **fields),
            dist.get_world_size(),
        )
        with fake_hosts(host):
            step = precision_oracle.make_step(case, size)
        got, expected = (
            precision_oracle.train_steps(step, case).weights,
            precision_oracle.train_oracle(case, size).weights,
        )
        deviations.append(max((got[name].cpu() - weight).abs().max().item() for name, weight in expected.items()))
    return deviations


def local_sgd_deviation(fields: dict[str, Any], host: str | None = None) -> dict[str, Any]:
    """The deviation of a local SGD training from that of its workers, and the bytes that each step sends."""
    case, size = Case(**{**fields, "batch_sizes": tuple(fields["batch_sizes"])}), dist.get_world_size()
    with fake_hosts(host):
        step = cases_module.build_step(case, size)
    metrics = [step(cases_module.local_batch(batch, size, step.dp_index)) for batch in cases_module.batches(case)]
    trained = oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])
    return {
        "deviation": oracle.deviation(trained, local_sgd_oracle.train(case, size)),
        "sent_bytes": [m.sent_bytes for m in metrics],
        "weight_bytes": sum(bucket.num_bytes for bucket in step.buckets),
    }


def attentions(choice: str, host: str | None) -> dict[str, Any]:
    """Every layout's deviation from attention in one process, the rings it used, and the bytes sent by ring."""
    size, comm = dist.get_world_size(), init.init_communicator()
    deviations: dict[str, float] = {}
    sent: dict[str, float] = {}
    names: set[str] = set()
    by_layout = itertools.groupby(attention_oracle.cases(size), key=lambda case: (case.ring, case.ulysses))
    for (ring, ulysses), cases in by_layout:
        meter = CommMeter()
        with fake_hosts(host):
            axis = connect_context(comm, meter, ring=ring, ulysses=ulysses, transport=choice)
        names |= {link.name for link in axis.groups if link.size > 1}
        for case in itertools.islice(cases, 0, None, 5):  # All of them are run on ranks that are threads.
            tensors = attention_oracle.make_tensors(case)
            got, expected = attention_oracle.run_on_axis(case, tensors, axis), attention_oracle.oracle(case, tensors)
            deviations[str(case)] = attention_oracle.deviation(got, expected, axis.local_token_ranges(case.length))
        sent[ring] = meter.sent_bytes
    return {"deviations": deviations, "links": sorted(names), "sent_bytes": sent}


def _codec_rounds(step: Any) -> list[Any]:
    """The messages of each bucket's codec."""
    shapes = {name: tuple(p.shape) for name, p in step.model.named_parameters()}
    by_bucket = [[shapes[slot.name] for slot in bucket.slots] for bucket in step.buckets]
    return [codec_rounds(step.plan.codec_spec, b, s) for b, s in zip(step.buckets, by_bucket, strict=True)]


@contextlib.contextmanager
def fake_hosts(host: str | None) -> Iterator[None]:
    if host is not None:
        os.environ["FOURFOLD_HOST"] = f"{host} {dist.get_rank() * 2 // dist.get_world_size()}"
    try:
        yield
    finally:
        os.environ.pop("FOURFOLD_HOST", None)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def starts_from_rank_0() -> bool:
    """Whether ranks whose models have different weights and buffers start from rank 0's."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    model[0].requires_grad_(False)
    step = ff.parallelize(model, nn.functional.mse_loss, sgd, ff.Plan(dp=dist.get_world_size()))
    sums = {name: tensor.double().sum().item() for name, tensor in step.model.state_dict().items()}
    return all(other == sums for other in step.all_gather_json(sums)) and sums["offset"] == 0.0


def dies_without_an_error() -> None:
    """Rank 1 exits silently after a step; the others say what they noticed, and how soon."""
    case = Case()
    step = cases_module.build_step(case, dist.get_world_size())
    cases_module.train_step(case, step)
    if dist.get_rank() == 1:
        os._exit(3)
    begin = time.perf_counter()
    try:
        cases_module.train_step(case, step)
    except ff.FourfoldError as error:
        raise RuntimeError(f"noticed in {time.perf_counter() - begin:.0f} s: {error}") from error


def stable_count(count: Callable[[], int]) -> int:
    """A count that comes three times in a row: the kernel lists a thread for a while after it has ended."""
    counts: list[int] = []
    while len(counts) < 3 or len(set(counts[-3:])) > 1:
        counts.append(count())
        time.sleep(0.1)
    return counts[-1]


def threads_of_a_group() -> list[int]:
    """Threads added by a group: while it exists, after its communicator's name is gone, and after its own is."""

    def threads() -> int:
        gc.collect()
        init.init_communicator()  # destroys orphaned groups
        return stable_count(lambda: len(os.listdir("/proc/self/task")))

    before, comm = threads(), init.init_communicator()
    group = comm.get_group(range(comm.size), "tests")._group
    counts = [threads() - before]
    del comm
    counts.append(threads() - before)
    assert group() in dist.distributed_c10d._world.pg_map
    dist.all_reduce(torch.ones(1), group=group())
    del group
    return [*counts, threads() - before]


KEPT_GROUPS: list[Any] = []


def keep_groups() -> None:
    """Keep all groups for ever: the end of one would wait for its collectives, which no rank completes."""
    KEPT_GROUPS.extend(dist.distributed_c10d._world.pg_map)


def diverges(transport: str, diverging: list[int], host: str | None = None) -> str:
    """The error if some ranks evaluate while the others train; before that, all have done both."""
    case = Case(transport=transport)
    with fake_hosts(host):
        step = cases_module.build_step(case, dist.get_world_size())
    batch = cases_module.local_batch(cases_module.batches(case)[0], dist.get_world_size(), dist.get_rank())
    for call in (step, step.evaluate, step, step.evaluate if dist.get_rank() in diverging else step):
        try:
            call(batch)
        except DivergenceError as error:
            keep_groups()
            return str(error)
    return "nothing"


def skips(transport: str) -> dict[str, Any]:
    """The deviation of a training with a skipped step from the oracle's without it, and why it was skipped."""
    case, size = Case(transport=transport, clip=0.5), dist.get_world_size()
    batches = cases_module.batches(case)
    batches[1][0][-1] = float("nan")
    step = ff.parallelize(
        cases_module.model("mlp"),
        cases_module.loss(case),
        cases_module.optimizer(case),
        case.plan(size),
        clip=0.5,
        skip_nan=1,
    )
    metrics = [step(cases_module.local_batch(batch, size, dist.get_rank())) for batch in batches]
    good = [m for m in metrics if m.skipped is None]
    trained = oracle.snapshot(step, [m.loss for m in good], [m.grad_norm for m in good])
    model, loss = cases_module.model("mlp"), cases_module.loss(case)
    expected = oracle.train(model, loss, cases_module.optimizer(case), batches[::2], clip=0.5)
    return {"deviation": oracle.deviation(trained, expected), "skipped": metrics[1].skipped}


def feed(num_samples: int, batch_size: int) -> list[list[int]]:
    """The sample numbers of this rank's batches in one epoch."""
    source = [(torch.tensor([index]), torch.tensor([index])) for index in range(num_samples)]
    batches = ff.Feed(source, ff.Plan(dp=dist.get_world_size()), batch_size=batch_size, seed=3)
    return [targets.flatten().tolist() for _, targets in batches]


def trace(transport: str, host: str | None = None, steps: int = 12, ahead_seconds: int = 0, **fields: Any) -> str:
    """The trace of a few steps of a language model; every step is sampled from the third on. `fields` are the plan's.

    `ahead_seconds`: how far the clocks of the second half of the ranks are ahead of the others'.
    """
    true_clock = time.monotonic_ns
    ahead = ahead_seconds * 10**9 * (dist.get_rank() * 2 // dist.get_world_size())
    task = lm.task(width=128, layers=4, heads=4, kv_heads=4, length=128, warmup=0)
    plan = ff.Plan(dp=dist.get_world_size(), transport=transport, bucket_bytes=2**20, **fields)
    torch.manual_seed(1)
    with fake_hosts(host), mock.patch.object(time, "monotonic_ns", side_effect=lambda: true_clock() + ahead):
        step = ff.parallelize(task.model(), task.loss, task.optimizer, plan, clip=1.0)
        tracing = Tracer(step, every=1)
        tokens = torch.randint(0, 256, (4, 128))
        batch = {"tokens": tokens, "positions": torch.arange(128).expand(4, 128)}, tokens
        for number in range(1, steps + 1):
            with tracing.sample(number) if number > 2 else contextlib.nullcontext():
                step(batch)
    return encode_trace(tracing.trace).decode()


def wide_steps(steps: int, zero: int, shard: int | None) -> int:
    """Run some steps of one wide layer whose input needs a gradient; returns the bytes of its parameters."""
    model = nn.Linear(1024, 1024)
    plan = ff.Plan(dp=dist.get_world_size(), zero=zero, shard=shard)
    step = ff.parallelize(model, nn.functional.mse_loss, sgd, plan)
    for _ in range(steps):
        step((torch.ones(1, 1024, requires_grad=True), torch.zeros(1, 1024)))
    return sum(p.numel() * p.element_size() for p in model.parameters())


def final_loss(recipe: str, folder: str) -> float:
    """The loss of a small language model that has been trained for a few steps with a recipe, as it is."""
    layers = math.prod(getattr(ff.Plan.recipe(recipe), name) for name in ("pp", "interleave"))
    sizes = ["width=32", f"layers={layers}", "length=32", "valid_bytes=256"]
    job = parse_job(["lm", f"recipe:{recipe}", *sizes])
    steps = job.plan.local_steps if job.plan.sync == "local" else 4
    return ff.train(job.task, job.plan, steps=steps, folder=folder, name="run", quiet=True).loss


def late_in_data(folder: str) -> list[Any]:
    """The stragglers in the log of a run whose rank 1 reads slowly."""

    class Source:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if dist.get_rank() == 1:
                time.sleep(0.02)
            return torch.ones(4), torch.ones(2)

    def data() -> ff.Data:
        return ff.Data(train=Source())

    def model() -> nn.Module:
        return nn.Linear(4, 2)

    task = ff.Task(model=model, loss=nn.functional.mse_loss, data=data, optimizer=sgd, batch_size=8)
    ff.train(
        task,
        ff.Plan(dp=2),
        steps=meters.WINDOW_STEPS + 1,
        checkpoint_every=0,
        trace_every=0,
        folder=folder,
        name="late",
        quiet=True,
    )
    lines = (Path(folder) / "late" / "metrics.jsonl").read_text().splitlines()
    return [line["late"] for line in map(json.loads, lines) if "late" in line]


def stopped_by_a_callback(folder: str, hook: str) -> dict[str, Any]:
    """How a run ended that rank 0's callback stops from a hook of step 3 or 4, and on which ranks hooks were called.

    Ranks other than 0 give no callbacks, or those of rank 0.
    """
    stopping = callback_runs.Stopping(hook, 4 if hook == "evaluate" else 3)
    given = [stopping] if dist.get_rank() in (0, 2) else []
    result = callback_runs.train(callback_runs.make_task(), Path(folder), *given, steps=8)
    return {"steps": result.steps, "stopped": result.stopped, "events": len(stopping.events)}


def verdict(**fields: Any) -> dict[str, Any] | None:
    """The result of `fourfold verify` for a plan with these fields, on rank 0."""
    task = lm.task(width=32, layers=2, length=32, steps=2, batch_size=4, clip=None)
    result = verify(task, ff.Plan(**fields))
    return None if result is None else {"worst": result.max_deviation, "tensors": len(result.worst["weight"])}


def build_others() -> list[str]:
    """What a rank raises where rank 1 builds a step of another plan, of another model, and another kind of step."""
    is_other, messages = dist.get_rank() == 1, []
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    blocks = [nn.Linear(4, 4) for _ in range(5)]
    stages, data = ff.Plan(pp=2, microbatches=2), ff.Plan(dp=2)
    for model, plan in (
        (nn.Sequential(*blocks[:4]), data if is_other else stages),
        (nn.Sequential(*blocks[: 5 if is_other else 4]), stages),
        (nn.Sequential(*blocks[:4], *[nn.ReLU()] * is_other), stages),
        (nn.Sequential(*blocks[:4]), ff.Plan(dp=4) if is_other else data),
    ):
        try:
            ff.parallelize(model, nn.MSELoss(), sgd, plan)
            messages.append("built")
        except PlanError as error:
            messages.append(str(error))
    return messages


def goes_on_after_an_error(plan: dict[str, Any], folder: str, what: str) -> str:
    """The error of a rank's step, where rank 1's loss fails, or its batch is none. The process of rank 1 goes on until
    rank 0 has its own.
    """
    fails, noticed = list[bool](), Path(folder) / f"{'-'.join(map(str, [what, *plan.values()]))}.noticed"

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if any(fails) and dist.get_rank() == 1:
            raise ValueError("the loss of rank 1")
        return nn.functional.mse_loss(outputs, targets)

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    step = ff.parallelize(model, loss, functools.partial(torch.optim.SGD, lr=0.1), ff.Plan(**plan))
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank() * (step.plan.pp == 1)))
    step((rows, rows))
    fails.append(what == "loss")
    try:
        step((rows,) if what == "batch" and dist.get_rank() == 1 else (rows, rows))
    except (ValueError, FourfoldError) as error:
        message = str(error)
    else:
        message = "no error"
    if dist.get_rank() == 0:
        noticed.touch()
    deadline = time.monotonic() + 20
    while not noticed.exists():
        if time.monotonic() > deadline:
            return f"{message}, and rank 0 went on waiting"
        time.sleep(0.01)
    return message

"""What the ranks of a spawned world do; see `fourfold.testing.spawn`. Results are JSON."""

import contextlib
import dataclasses
import gc
import itertools
import json
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
from fourfold.parts import comm, sequence
from fourfold.plan.codec import rounds
from fourfold.plan.timeline import encode
from fourfold.run import late
from fourfold.run.trace import Tracing
from fourfold.run.verify import verify
from fourfold.tasks import lm
from fourfold.testing import oracle
from fourfold.words.errors import DivergenceError
from tests import apart, attention, coded, precision, training
from tests.training import Case


def deviation(host: str | None = None, **fields: Any) -> dict[str, Any]:
    """How far a training is from the oracle's, and what carried it. `host`: ranks are told to live on two hosts."""
    if "batch_sizes" in fields:
        fields["batch_sizes"] = tuple(fields["batch_sizes"])
    case = Case(**fields)
    with _hosts(host):
        step = training.build(case, dist.get_world_size())
    trained = training.train_step(case, step)
    return {"deviation": oracle.deviation(trained, training.train_oracle(case)), "transport": step.transport}


def coded_deviations(cases: list[dict[str, Any]], host: str | None = None) -> list[dict[str, Any]]:
    """For each case: how far a training is from that of its codec's workers, and what a step has sent."""
    told = []
    for fields in cases:
        case, size = Case(**fields, batch_sizes=(16, 16)), dist.get_world_size()
        with _hosts(host):
            step = training.build(case, size)
        metrics = [step(training.local(batch, size, step.data_index)) for batch in training.batches(case)]
        trained = oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])
        expected = coded.train(case, size, unit=16.0)
        lengths = [sum(b.num_bytes for b in rounds) for rounds in _rounds(step)]
        told.append(
            {
                "deviation": oracle.deviation(trained, expected),
                "transport": step.transport,
                "sent_bytes": metrics[-1].sent_bytes,
                "message_bytes": sum(lengths),
            }
        )
    return told


def precision_deviations(cases: list[dict[str, Any]], host: str | None = None) -> list[float]:
    """For each case: how far the weights of the update are from those of ranks in one process."""
    told = []
    for fields in cases:
        case, size = dataclasses.replace(precision.CASE, batch_sizes=(16, 16, 16), **fields), dist.get_world_size()
        with _hosts(host):
            step = precision.make(case, size)
        got, expected = precision.go(step, case).weights, precision.by_hand(case, size).weights
        told.append(max((got[name] - weight).abs().max().item() for name, weight in expected.items()))
    return told


def apart_deviation(fields: dict[str, Any], host: str | None = None) -> dict[str, Any]:
    """How far a training with local steps is from that of its workers, and what each step has sent."""
    case, size = Case(**{**fields, "batch_sizes": tuple(fields["batch_sizes"])}), dist.get_world_size()
    with _hosts(host):
        step = training.build(case, size)
    metrics = [step(training.local(batch, size, step.data_index)) for batch in training.batches(case)]
    trained = oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])
    return {
        "deviation": oracle.deviation(trained, apart.train(case, size)),
        "sent_bytes": [m.sent_bytes for m in metrics],
        "weight_bytes": sum(bucket.num_bytes for bucket in step.buckets),
    }


def attentions(choice: str, host: str | None) -> dict[str, Any]:
    """How far every layout's attention is from one process', which links it had, and what it has sent by ring."""
    size, ranks = dist.get_world_size(), comm.join()
    deviations: dict[str, float] = {}
    sent: dict[str, float] = {}
    names: set[str] = set()
    by_layout = itertools.groupby(attention.cases(size), key=lambda case: (case.ring, case.ulysses))
    for (ring, ulysses), cases in by_layout:
        with _hosts(host):
            axis = sequence.connect(ranks, [range(size)], ring=ring, ulysses=ulysses, choice=choice)
        names |= {link.name for link in axis.links if link.size > 1}
        for case in cases:
            tensors = attention.whole(case)
            found, expected = attention.on_axis(case, tensors, axis), attention.oracle(case, tensors)
            deviations[str(case)] = attention.deviation(found, expected, axis.spans(case.length))
        sent[ring] = axis.around.sent_bytes + axis.heads.sent_bytes
    return {"deviations": deviations, "links": sorted(names), "sent_bytes": sent}


def _rounds(step: Any) -> list[Any]:
    """By bucket, what its codec says of its messages."""
    shapes = {name: tuple(p.shape) for name, p in step.model.named_parameters()}
    by_bucket = [[shapes[slot.name] for slot in bucket.slots] for bucket in step.buckets]
    return [rounds(step.plan.coding, b, s) for b, s in zip(step.buckets, by_bucket, strict=True)]


@contextlib.contextmanager
def _hosts(host: str | None) -> Iterator[None]:
    if host is not None:
        os.environ["FOURFOLD_HOST"] = f"{host} {dist.get_rank() * 2 // dist.get_world_size()}"
    try:
        yield
    finally:
        os.environ.pop("FOURFOLD_HOST", None)


def start_apart() -> bool:
    """Ranks that begin with other weights and buffers train with rank 0's."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    model[0].requires_grad_(False)
    step = ff.parallelize(model, nn.functional.mse_loss, _sgd, ff.Plan(dp=dist.get_world_size()))
    sums = {name: tensor.double().sum().item() for name, tensor in step.model.state_dict().items()}
    return all(theirs == sums for theirs in step.exchange(sums)) and sums["offset"] == 0.0


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def wrapped(accumulate: int, host: str | None = None, transport: str = "by-host", kind: str = "ASGD") -> dict[str, Any]:
    """A plain loop with a wrapped optimizer of a kind that is not element-wise, beside the same loop alone."""
    case, size = Case(batch_sizes=(12, 12, 12)), dist.get_world_size()
    loss = training.loss(case)
    theirs, mine = training.model("mlp"), training.model("mlp")
    alone = getattr(ff.optim, kind, None) or getattr(torch.optim, kind)
    plain, model = alone(theirs.parameters(), lr=0.05), mine
    with _hosts(host):
        optimizer = ff.DistributedOptimizer(
            alone(model.parameters(), lr=0.05), model, ff.Plan(dp=size, bucket_bytes=4000, transport=transport)
        )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    far, norms = 0.0, []
    for inputs, targets in training.batches(case):
        plain.zero_grad()
        loss(theirs(inputs), targets).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)))
        plain.step()
        for group in plain.param_groups:
            group["lr"] *= 0.5
        optimizer.zero_grad()
        some, few = training.local((inputs, targets), size, dist.get_rank())
        for part in range(accumulate):
            last = part == accumulate - 1
            x, y = training.local((some, few), accumulate, part)
            with contextlib.nullcontext() if last else optimizer.no_sync():
                (loss(model(x), y).mean() / accumulate).backward()
        far = max(far, abs(float(optimizer.clip_grad_norm_(0.2)) - norms[-1]))
        optimizer.step()
        scheduler.step()
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    far = max(far, *(float((a - b).abs().max()) for a, b in pairs))
    return {"deviation": far, "transport": optimizer.transport}


def wrapped_uneven(transport: str = "by-host", host: str | None = None) -> dict[str, Any]:
    """A rank has one batch more than the rank before it; all of them beside one process that has all batches."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Case(batch_sizes=(12,) * size)
    loss, mine, theirs, data = training.loss(case), training.model("mlp"), training.model("mlp"), training.batches(case)
    plan = ff.Plan(dp=size, bucket_bytes=4000, transport=transport)
    with _hosts(host):
        optimizer = ff.DistributedOptimizer(_sgd(mine.parameters()), mine, plan)
    with optimizer.join():
        for inputs, targets in data[:rank]:
            optimizer.zero_grad()
            loss(mine(inputs), targets).mean().backward()
            optimizer.step()
    plain = _sgd(theirs.parameters())
    for number in range(size - 1):
        plain.zero_grad()
        inputs, targets = data[number]
        # Ranks above `number` have this batch: as many times the same gradient, of `size`.
        ((size - 1 - number) / size * loss(theirs(inputs), targets).mean()).backward()
        plain.step()
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    placed = (ff.world().rank, ff.world().size) == (rank, size)
    far = max(float((a - b).abs().max()) for a, b in pairs)
    return {"deviation": far, "transport": optimizer.transport, "placed": placed}


def wrapped_adds_up() -> float:
    """Two backwards without zero_grad in between leave the sum of both means in `.grad`."""
    case, size = Case(), dist.get_world_size()
    loss, model, theirs = training.loss(case), training.model("mlp"), training.model("mlp")
    ff.DistributedOptimizer(_sgd(model.parameters()), model, ff.Plan(dp=size))
    for batch in training.batches(case)[:2]:
        loss(theirs(batch[0]), batch[1]).mean().backward()
        x, y = training.local(batch, size, dist.get_rank())
        loss(model(x), y).mean().backward()
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)


def wrapped_without_gradient() -> str:
    """What `backward()` says when a parameter got no gradient."""
    model = training.model("unused")
    optimizer = ff.DistributedOptimizer(_sgd(model.parameters()), model)
    try:
        model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    except ff.FourfoldError as error:
        return str(error)
    return f"no error from {optimizer}"


def wrapped_after_an_error() -> list[str]:
    """What the backward after a failed one says."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = ff.DistributedOptimizer(_sgd(model.parameters()), model)
    broken: torch.Tensor = model[0](torch.ones(1, 2))
    broken.register_hook(_fail)
    said = []
    for loss in (lambda: model[1](broken).sum(), lambda: model(torch.ones(1, 2)).sum()):
        try:
            loss().backward()
        except Exception as error:
            said.append(str(error))
    optimizer.zero_grad()
    return said


def _fail(_: torch.Tensor) -> None:
    raise ValueError("a hook of the user's own")


def wrapped_with_unused_layers() -> dict[str, Any]:
    """`.grad` of a layer used only under no_sync, and of one used nowhere."""
    layers = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("always", "earlier", "never")})
    optimizer = ff.DistributedOptimizer(
        _sgd(layers.parameters()), layers, ff.Plan(dp=dist.get_world_size(), unused="allow")
    )
    ones = torch.full((1, 1), float(dist.get_rank() + 1))
    with optimizer.no_sync():
        layers["earlier"](ones).sum().backward()
    layers["always"](ones).sum().backward()
    gradients = {name: layer.get_parameter("weight").grad for name, layer in layers.items()}
    return {name: None if g is None else g.item() for name, g in gradients.items()}


def dies_in_silence() -> None:
    """Rank 1 ends without a word after a step; the others say what they noticed, and how soon."""
    case = Case()
    step = training.build(case, dist.get_world_size())
    training.train_step(case, step)
    if dist.get_rank() == 1:
        os._exit(3)
    begin = time.perf_counter()
    try:
        training.train_step(case, step)
    except ff.FourfoldError as error:
        raise RuntimeError(f"noticed in {time.perf_counter() - begin:.0f} s: {error}") from error


def settled(count: Callable[[], int]) -> int:
    """What is counted three times in a row: the kernel lists a thread for a while after it has ended."""
    counts: list[int] = []
    while len(counts) < 3 or len(set(counts[-3:])) > 1:
        counts.append(count())
        time.sleep(0.1)
    return counts[-1]


def group_that_is_forgotten() -> list[int]:
    """Threads of this process more than before: with a group, with its ranks' name gone, and with itself gone."""

    def threads() -> int:
        gc.collect()
        comm.join()  # here the groups end that nobody has any more
        return settled(lambda: len(os.listdir("/proc/self/task")))  # with the kernel, which lists them a while longer

    before, ranks = threads(), comm.join()
    group = ranks.process_group(range(ranks.size), "tests")
    counts = [threads() - before]
    del ranks
    counts.append(threads() - before)
    assert group() in dist.distributed_c10d._world.pg_map
    dist.all_reduce(torch.ones(1), group=group())
    del group
    return [*counts, threads() - before]


UNENDED: list[Any] = []


def _leave_unended() -> None:
    """Keep all groups for good: the end of one would wait for its collectives, which nobody ends any more."""
    UNENDED.extend(dist.distributed_c10d._world.pg_map)


def diverges(transport: str, stray: list[int], host: str | None = None) -> str:
    """What is said where some ranks evaluate while the others train; before that, all have done both."""
    case = Case(transport=transport)
    with _hosts(host):
        step = training.build(case, dist.get_world_size())
    batch = training.local(training.batches(case)[0], dist.get_world_size(), dist.get_rank())
    for call in (step, step.evaluate, step, step.evaluate if dist.get_rank() in stray else step):
        try:
            call(batch)
        except DivergenceError as error:
            _leave_unended()
            return str(error)
    return "nothing"


def wrapped_diverges(transport: str) -> str:
    """What a wrapped optimizer says where rank 1 leaves out a backward, but no step."""
    model = nn.Linear(2, 2)
    plan = ff.Plan(dp=dist.get_world_size(), transport=transport)
    optimizer = ff.DistributedOptimizer(_sgd(model.parameters()), model, plan)
    for number in range(3):
        try:
            if (number, dist.get_rank()) != (1, 1):
                model(torch.ones(1, 2)).sum().backward()
        except DivergenceError as error:
            _leave_unended()
            return str(error)
        optimizer.step()
    return "nothing"


def skips(transport: str) -> dict[str, Any]:
    """How far a training with a skipped step is from the oracle's without it, and why it was skipped."""
    case, size = Case(transport=transport, clip=0.5), dist.get_world_size()
    batches = training.batches(case)
    batches[1][0][-1] = float("nan")
    step = ff.parallelize(
        training.model("mlp"), training.loss(case), training.optimizer(case), case.plan(size), clip=0.5, skip_nan=1
    )
    metrics = [step(training.local(batch, size, dist.get_rank())) for batch in batches]
    good = [m for m in metrics if m.skipped is None]
    trained = oracle.snapshot(step, [m.loss for m in good], [m.grad_norm for m in good])
    model, loss = training.model("mlp"), training.loss(case)
    expected = oracle.train(model, loss, training.optimizer(case), batches[::2], clip=0.5)
    return {"deviation": oracle.deviation(trained, expected), "skipped": metrics[1].skipped}


def feed(num_samples: int, batch_size: int) -> list[list[int]]:
    """The sample numbers of this rank's batches in one epoch."""
    source = [(torch.tensor([index]), torch.tensor([index])) for index in range(num_samples)]
    batches = ff.Feed(source, ff.Plan(dp=dist.get_world_size()), batch_size=batch_size, seed=3)
    return [targets.flatten().tolist() for _, targets in batches]


def dies(rank: int) -> None:
    """One rank raises in mid-step, while the others wait for its gradient."""
    case = Case()
    step = training.build(case, dist.get_world_size())
    if dist.get_rank() == rank:
        raise RuntimeError("this rank gives up")
    training.train_step(case, step)


def trace(transport: str, host: str | None = None, steps: int = 12, ahead_seconds: int = 0) -> str:
    """The trace of a few steps of a language model, every one of them sampled from the third on.

    ahead_seconds: how far the clock of the second half of the ranks is ahead of the others'.
    """
    true_clock = time.monotonic_ns
    ahead = ahead_seconds * 10**9 * (dist.get_rank() * 2 // dist.get_world_size())
    task = lm.task(width=128, layers=4, heads=4, kv_heads=4, length=128, warmup=0)
    plan = ff.Plan(dp=dist.get_world_size(), transport=transport, bucket_bytes=2**20)
    torch.manual_seed(1)
    with _hosts(host), mock.patch.object(time, "monotonic_ns", side_effect=lambda: true_clock() + ahead):
        step = ff.parallelize(task.model(), task.loss, task.optimizer, plan, clip=1.0)
        tracing = Tracing(step, every=1)
        tokens = torch.randint(0, 256, (4, 128))
        batch = {"tokens": tokens, "positions": torch.arange(128).expand(4, 128)}, tokens
        for number in range(1, steps + 1):
            with tracing.sample(number) if number > 2 else contextlib.nullcontext():
                step(batch)
    return encode(tracing.trace).decode()


def wide_steps(steps: int, zero: int, shard: int | None) -> int:
    """Some steps of one wide layer, whose input wants a gradient; the bytes of its own."""
    model = nn.Linear(1024, 1024)
    plan = ff.Plan(dp=dist.get_world_size(), zero=zero, shard=shard)
    step = ff.parallelize(model, nn.functional.mse_loss, _sgd, plan)
    for _ in range(steps):
        step((torch.ones(1, 1024, requires_grad=True), torch.zeros(1, 1024)))
    return sum(p.numel() * p.element_size() for p in model.parameters())


def late_in_data(folder: str) -> list[Any]:
    """What the log of a run says of late ranks, whose rank 1 reads slowly."""

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

    task = ff.Task(model=model, loss=nn.functional.mse_loss, data=data, optimizer=_sgd, batch_size=8)
    ff.train(task, ff.Plan(dp=2), steps=late.WINDOW + 1, checkpoint_every=0, trace_every=0, folder=folder, name="late")
    lines = (Path(folder) / "late" / "metrics.jsonl").read_text().splitlines()
    return [line["late"] for line in map(json.loads, lines) if "late" in line]


def verdict(**fields: Any) -> dict[str, Any] | None:
    """What `fourfold verify` finds of a plan with these fields; on rank 0."""
    task = lm.task(width=32, layers=1, length=32, steps=2, batch_size=4, clip=None)
    found = verify(task, ff.Plan(**fields))
    return None if found is None else {"worst": found.worst, "tensors": len(found.weights)}

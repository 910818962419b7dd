"""What the ranks of a spawned world do with a wrapped optimizer in their own loop. Results are JSON."""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

import fourfold as ff
from fourfold.words.errors import DivergenceError, FourfoldError
from tests import cases
from tests.cases import Case
from tests.spawned.rank_functions import fake_hosts, keep_groups, sgd


def trains(accumulate: int, host: str | None = None, transport: str = "auto", kind: str = "ASGD") -> dict[str, Any]:
    """Compare a plain loop with a wrapped optimizer to the same loop in one process."""
    case, size = Case(batch_sizes=(12, 12, 12)), dist.get_world_size()
    loss = cases.loss(case)
    reference, model = cases.model("mlp"), cases.model("mlp")
    make = getattr(ff.optim, kind, None) or getattr(torch.optim, kind)
    plain = make(reference.parameters(), lr=0.05)
    with fake_hosts(host):
        optimizer = ff.DistributedOptimizer(
            make(model.parameters(), lr=0.05), model, ff.Plan(dp=size, bucket_bytes=4000, transport=transport)
        )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    deviation, norms = 0.0, []
    for inputs, targets in cases.batches(case):
        plain.zero_grad()
        loss(reference(inputs), targets).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 0.2)))
        plain.step()
        for group in plain.param_groups:
            group["lr"] *= 0.5
        optimizer.zero_grad()
        local = cases.local_batch((inputs, targets), size, dist.get_rank())
        for part in range(accumulate):
            is_last = part == accumulate - 1
            x, y = cases.local_batch(local, accumulate, part)
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                (loss(model(x), y).mean() / accumulate).backward()
        deviation = max(deviation, abs(float(optimizer.clip_grad_norm_(0.2)) - norms[-1]))
        optimizer.step()
        scheduler.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    deviation = max(deviation, *(float((a - b).abs().max()) for a, b in pairs))
    return {"deviation": deviation, "transport": optimizer.transport_name}


def uneven(transport: str = "auto", host: str | None = None) -> dict[str, Any]:
    """Each rank has one batch more than the previous rank; compare with one process that has all batches."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Case(batch_sizes=(12,) * size)
    loss, model, reference, data = cases.loss(case), cases.model("mlp"), cases.model("mlp"), cases.batches(case)
    plan = ff.Plan(dp=size, bucket_bytes=4000, transport=transport)
    with fake_hosts(host):
        optimizer = ff.DistributedOptimizer(sgd(model.parameters()), model, plan)
    with optimizer.join():
        for inputs, targets in data[:rank]:
            optimizer.zero_grad()
            loss(model(inputs), targets).mean().backward()
            optimizer.step()
    plain = sgd(reference.parameters())
    for number in range(size - 1):
        plain.zero_grad()
        inputs, targets = data[number]
        # The ranks above `number` have this batch: the sum of their equal gradients, divided by `size`.
        ((size - 1 - number) / size * loss(reference(inputs), targets).mean()).backward()
        plain.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    is_placed = (ff.world().rank, ff.world().size) == (rank, size)
    deviation = max(float((a - b).abs().max()) for a, b in pairs)
    return {"deviation": deviation, "transport": optimizer.transport_name, "placed": is_placed}


def adds_up() -> float:
    """Two backwards without zero_grad in between leave the sum of both means in `.grad`."""
    case, size = Case(), dist.get_world_size()
    loss, model, reference = cases.loss(case), cases.model("mlp"), cases.model("mlp")
    optimizer = ff.DistributedOptimizer(sgd(model.parameters()), model, ff.Plan(dp=size))
    optimizer.zero_grad()
    for batch in cases.batches(case)[:2]:
        loss(reference(batch[0]), batch[1]).mean().backward()
        x, y = cases.local_batch(batch, size, dist.get_rank())
        loss(model(x), y).mean().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)


def lying_anyhow(wraps: bool) -> list[bool]:
    """Whether each tensor of a model equals rank 0's at the start, whatever its strides on either rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, mine = _model_with_strides(0), _model_with_strides(rank)
    before = [tensor.clone() for tensor in _all_tensors(first)]
    if wraps:
        ff.DistributedOptimizer(sgd(p for p in mine.parameters() if p.requires_grad), mine)
    else:
        ff.parallelize(mine, lambda outputs, _: outputs, sgd, ff.Plan(dp=size))
    return [torch.equal(tensor, value) for tensor, value in zip(_all_tensors(mine), before, strict=True)]


def _model_with_strides(rank: int) -> nn.Module:
    """A model with strided and transposed tensors, one of them with other strides on rank 0; values differ by rank."""
    draw = torch.Generator().manual_seed(rank)
    model = nn.Module()
    model.gaps = nn.Parameter(torch.randn(4, 8, generator=draw)[:, :3])
    model.turned = nn.Parameter(torch.randn(5, 3, generator=draw).t())
    model.frozen = nn.Parameter(torch.randn(8, 6, generator=draw)[::2], requires_grad=False)
    buffer = torch.randn(4, 5, generator=draw)
    model.register_buffer("either", buffer.t() if rank else buffer.t().contiguous())
    model.register_buffer("parted", torch.randn(6, 6, generator=draw)[:, ::2])
    return model


def _all_tensors(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def without_gradient() -> str:
    """The error of `backward()` for a parameter without a gradient."""
    model = cases.model("unused")
    optimizer = ff.DistributedOptimizer(sgd(model.parameters()), model)
    try:
        model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    except ff.FourfoldError as error:
        return str(error)
    return f"no error from {optimizer}"


def after_an_error() -> list[str]:
    """The error of a backward after one that failed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = ff.DistributedOptimizer(sgd(model.parameters()), model)
    broken: torch.Tensor = model[0](torch.ones(1, 2))
    broken.register_hook(_raise_in_hook)
    said = []
    for loss in (lambda: model[1](broken).sum(), lambda: model(torch.ones(1, 2)).sum()):
        try:
            loss().backward()
        except Exception as error:
            said.append(str(error))
    optimizer.zero_grad()
    return said


def _raise_in_hook(_: torch.Tensor) -> None:
    raise ValueError("a hook of the user's own")


def with_unused_layers() -> dict[str, Any]:
    """`.grad` of a layer that is used only under no_sync, and of one that is never used."""
    layers = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("always", "earlier", "never")})
    optimizer = ff.DistributedOptimizer(
        sgd(layers.parameters()), layers, ff.Plan(dp=dist.get_world_size(), unused="allow")
    )
    ones = torch.full((1, 1), float(dist.get_rank() + 1))
    with optimizer.no_sync():
        layers["earlier"](ones).sum().backward()
    layers["always"](ones).sum().backward()
    gradients = {name: layer.get_parameter("weight").grad for name, layer in layers.items()}
    return {name: None if g is None else g.item() for name, g in gradients.items()}


def with_another_wrapper() -> dict[str, str]:
    """What is said of a model that torch lays over ranks itself, and of a loop that calls such a wrapper."""
    whole = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    flat = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(blocks[0])
    split = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (2,)))
    models = {"ddp": whole, "nested": nn.Sequential(whole), "fsdp": flat, "fsdp2": blocks, "dtensor": split}
    said = {}
    for name, model in models.items():
        made = sgd([nn.Parameter(torch.zeros(1))])
        for build in (lambda m=model, o=made: ff.DistributedOptimizer(o, m), lambda m=model: _parallelized(m)):
            try:
                build()
            except FourfoldError as error:
                said[f"{name} {len(said) % 2}"] = str(error)
    optimizer = ff.DistributedOptimizer(sgd(whole.module.parameters()), whole.module)
    try:
        whole(torch.ones(1, 2)).sum().backward()
    except FourfoldError as error:
        said["loop"] = str(error)
    optimizer.zero_grad()
    keep_groups()
    return said


def _parallelized(model: nn.Module) -> Any:
    return ff.parallelize(model, nn.MSELoss(reduction="none"), sgd)


def diverges(transport: str) -> str:
    """The error of a wrapped optimizer if rank 1 skips a backward, but no step."""
    model = nn.Linear(2, 2)
    plan = ff.Plan(dp=dist.get_world_size(), transport=transport)
    optimizer = ff.DistributedOptimizer(sgd(model.parameters()), model, plan)
    for number in range(3):
        try:
            if (number, dist.get_rank()) != (1, 1):
                model(torch.ones(1, 2)).sum().backward()
        except DivergenceError as error:
            keep_groups()
            return str(error)
        optimizer.step()
    return "nothing"


def meets(folder: str) -> list[Any]:
    """Rank 1 comes to a barrier after all others have begun to wait there, and leaves a file first."""
    world, begun, last = ff.world(), Path(folder), Path(folder) / "last"
    if world.rank == 1:
        while len(list(begun.glob("begun*"))) < world.size - 1:
            time.sleep(0.01)
        last.touch()
    else:
        (begun / f"begun{world.rank}").touch()
    world.barrier()
    return [last.exists(), world.is_main, str(world.device)]

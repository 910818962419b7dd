"""Costs: what a machine takes for the parts of a step beside the segments of its model.

buckets     reductions, gathers and updates of several sizes, by the transports of plans
  reduce    from the launch of a bucket on all ranks until its sum can be used
  update    of what a rank owns of a bucket. Where ranks share memory and states rest split, it makes the sum as well:
            what it takes more than an update of as many bytes is the price of the sum
  gather    from the end of the update until all ranks have the new weights
messages    what ranks exchange inside a forward or backward, and between stages
  hop       one block of a ring to the neighbour, while one comes from the other side
codecs      to encode a bucket's gradient and to decode what other ranks have sent
operations  what kernels take by themselves, for models that no calibration has seen
overheads   what a step takes beside what it computes and sends, and what messages cost a rank that computes
Law: all ranks do the same at the same time, as in a step: gradients are written before a reduction by their owner, as
a backward writes them; all pairs and groups exchange at once; as many messages are decoded as in a step of all ranks.
Overheads are measured on steps of a model so small that nothing else takes time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.comm.channel import make_channel
from fourfold.comm.codec.protocol import Message
from fourfold.comm.codec.registry import make_codec
from fourfold.comm.communicator import Communicator
from fourfold.comm.edges import StageEdges, make_edges
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import make_tensor_group
from fourfold.plan.codec import CODECS, CodecSpec, Combine
from fourfold.plan.plan import Plan
from fourfold.planner.calibrate.segments import Probe, SegmentTimer, make_probe
from fourfold.planner.calibrate.timing import NUM_TURNS, Points, Turns, now
from fourfold.planner.predict.calibration import Curve
from fourfold.planner.predict.prices import GroupShape
from fourfold.planner.search.space import divisors
from fourfold.step.train_step import TrainStep
from fourfold.words.layout import Change
from fourfold.words.mesh import Mesh
from fourfold.words.task import Task

# ---- buckets ---------------------------------------------------------------------------------------------------------


# Elements. The largest are in no cache; tensors that are powers of two apart would take each other's places there.
BUCKET_SIZES = (4_096, 64_000, 256_000, 1_024_000, 4_096_000, 12_288_000)
NETWORK_SIZES = (4_096, 16_000, 64_000, 128_000, 256_000)  # the largest takes 160 ms at 100 Mbit/s
BUCKET_COLUMNS = 64


class BucketTimes(NamedTuple):
    """What the ranks of a group take: by bytes of a whole bucket, but `update` by bytes of what it works on."""

    group: GroupShape
    is_split: bool
    reduce: Points
    update: Points
    gather: Points


class _Weights(nn.Module):
    """Matrices of several sizes, the largest first: each becomes a bucket."""

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(size // BUCKET_COLUMNS, BUCKET_COLUMNS) for size in sizes)


class _Chain(nn.Module):
    """One such block for each place of a pipeline axis."""

    def __init__(self, num_blocks: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Weights(sizes) for _ in range(num_blocks))


def measure_buckets(task: Task, turns: Turns) -> Iterator[BucketTimes]:
    """Reductions and gathers of every group size that divides the ranks, and the task's update. Collective."""
    ranks = turns.ranks
    crosses_hosts = ranks.num_hosts > 1
    has_gloo = not crosses_hosts and ranks.device.type == "cpu"
    transports = ("auto", "gloo") if has_gloo else ("auto",)
    for size in divisors(ranks.size)[1:]:
        for transport in transports:
            # Over messages, what is sent decides: the largest bucket would take long and show nothing new.
            sizes = NETWORK_SIZES if crosses_hosts else BUCKET_SIZES[:-1] if transport == "gloo" else BUCKET_SIZES
            for zero in (0, 1):
                places = ranks.size // size
                plan = Plan(dp=size, pp=places, zero=zero, bucket_bytes=1, transport=transport, microbatches=places)
                yield _measure_bucket_times(make_probe(_bucket_task(task, places, sizes), plan, ranks), turns)


def measure_lone_update(task: Task, turns: Turns) -> Points:
    """The update of a rank that has no others, whose gradients stay where autograd leaves them. Collective."""
    probe = make_probe(_bucket_task(task, 1, BUCKET_SIZES), Plan(), turns.ranks)
    for parameter in probe.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    seconds = [
        turns.median_seconds(lambda bucket=bucket: probe.stage.optimizer.update(bucket))
        for bucket in range(probe.stage.num_buckets)
    ]
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in probe.stage.parameters]
    return list(zip(_moved_bytes(probe, sizes), seconds, strict=True))


def _bucket_task(task: Task, num_blocks: int, sizes: Sequence[int]) -> Task:
    return dataclasses.replace(task, model=lambda: _Chain(num_blocks, sizes), tensor={}, loss=_no_loss, clip=None)


def _no_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the programs of a probe are never run")


@torch.no_grad()
def _measure_bucket_times(probe: Probe, turns: Turns) -> BucketTimes:
    stage, is_split = probe.stage, probe.blueprint.is_sharded
    taken: list[list[tuple[float, float, float]]] = []

    def turn() -> float:
        taken.append([_time_bucket(probe, turns, bucket) for bucket in range(stage.num_buckets)])
        stage.gatherer.signal_backward_done()
        stage.reducer.end_step()
        stage.gatherer.end_step()
        return sum(map(sum, taken[-1]))

    timed = taken[-turns.take(turn) :]
    by_bucket = [[median(values) for values in zip(*rows, strict=True)] for rows in zip(*timed, strict=True)]
    sizes = [flat.nbytes for flat in stage.reducer.grad_buffers]
    moved = _moved_bytes(probe, sizes)
    columns = list(zip(*by_bucket, strict=True))
    return BucketTimes(
        probe.group,
        is_split,
        list(zip(sizes, columns[0], strict=True)),
        list(zip(moved, columns[1], strict=True)),
        list(zip(sizes, columns[2], strict=True)) if is_split else [],
    )


def _time_bucket(probe: Probe, turns: Turns, bucket: int) -> tuple[float, float, float]:
    """Seconds of a reduction, an update, and a gather; ranks begin each of the three together."""
    stage = probe.stage
    stage.reducer.acquire_buffer(bucket, 1.0)
    stage.reducer.grad_buffers[bucket].fill_(1e-3)
    turns.begin()
    start = now()
    stage.reducer.reduce_async(bucket, None, 1.0)
    stage.reducer.wait_reduce(bucket, 1.0)
    reduced = now()
    turns.begin()
    update_start = now()
    stage.optimizer.update(bucket)
    updated = now()
    gather_start = gathered = updated
    if probe.blueprint.is_sharded:
        turns.begin()
        gather_start = now()
        stage.gatherer.all_gather_async(bucket, stage.weights.flats[bucket])
        stage.gatherer.wait(bucket)
        gathered = now()
    return reduced - start, updated - update_start, gathered - gather_start


def _moved_bytes(probe: Probe, sizes: Sequence[int]) -> list[float]:
    """By bucket: bytes of the weights, gradients and optimizer states that this rank's updates work on."""
    stage = probe.stage
    owned = [size / (stage.reducer.size if probe.blueprint.is_sharded else 1) for size in sizes]
    # An optimizer counts steps in scalars.
    states = sum(each.nbytes for each in stage.optimizer.owned_tensors() if each.dim())
    return [(2.0 + states / sum(owned)) * each for each in owned]


def price_reduction(times: BucketTimes, update: Curve) -> Points:
    """By bytes of a whole bucket: what its sum takes, in the reduction and in the update."""
    if not times.is_split:
        return times.reduce
    return [
        (size, max(0.0, seconds + spent - update.at(moved)))
        for (size, seconds), (moved, spent) in zip(times.reduce, times.update, strict=True)
    ]


def change_of(times: BucketTimes) -> Change:
    """What the reduction of a bucket is."""
    return Change.REDUCE_SCATTER if times.is_split else Change.ALL_REDUCE


# ---- messages --------------------------------------------------------------------------------------------------------


MESSAGE_BYTES = (2**12, 2**16, 2**19, 2**21, 2**23)
NETWORK_BYTES = (2**12, 2**14, 2**16, 2**18, 2**20)
ELEMENT_BYTES = 4


class ExchangeTimes(NamedTuple):
    """Of groups of so many ranks, by bytes: an all-reduce of tensor ranks, a hop of a ring."""

    size: int
    all_reduce: Points
    hop: Points


def _sizes(ranks: Communicator) -> Sequence[int]:
    return NETWORK_BYTES if ranks.num_hosts > 1 else MESSAGE_BYTES


def measure_edges(turns: Turns) -> Points:
    """A message between two stages, by bytes. Collective."""
    ranks = turns.ranks
    places = 2 if ranks.size % 2 == 0 else ranks.size
    edges = make_edges(ranks.on_mesh(Mesh(pp=places, dp=ranks.size // places)).along("pp"), CommMeter())
    points = []
    for num_bytes in _sizes(ranks):
        message = torch.zeros(num_bytes // ELEMENT_BYTES, device=ranks.device)

        def run(message: Tensor = message) -> None:
            _echo(edges, message)

        points.append((float(num_bytes), turns.median_seconds(run) / 2))
    return points


def _echo(edges: StageEdges, message: Tensor) -> None:
    """To the next stage and back; the stage before has a message of its own on its way."""
    if edges.to_next is not None:
        edges.to_next.send([message])
    if edges.from_previous is not None and edges.to_previous is not None:
        edges.to_previous.send(edges.from_previous.receive())
    if edges.from_next is not None:
        edges.from_next.receive()


def measure_exchanges(turns: Turns, sizes: Sequence[int]) -> list[ExchangeTimes]:
    """What tensor ranks and context ranks exchange, for groups of these sizes. Collective."""
    return [_measure_exchanges(turns, size) for size in sizes]


def _measure_exchanges(turns: Turns, size: int) -> ExchangeTimes:
    ranks = turns.ranks
    group_ranks = ranks.on_mesh(Mesh(dp=ranks.size // size, tp=size)).along("tp")
    tensor = make_tensor_group(group_ranks, "calibration", CommMeter())
    ring = make_channel(group_ranks, "calibration", CommMeter())
    reduced: Points = []
    hops: Points = []
    for num_bytes in _sizes(ranks):
        values = torch.zeros(num_bytes // ELEMENT_BYTES, device=ranks.device)

        def reduce(values: Tensor = values) -> None:
            tensor.all_reduce(values)

        def circle(values: Tensor = values) -> None:
            for _ in ring.iterate_blocks([values]):
                pass

        reduced.append((float(num_bytes), turns.median_seconds(reduce)))
        hops.append((float(num_bytes), turns.median_seconds(circle) / (size - 1)))
    return ExchangeTimes(size, reduced, hops)


# ---- codecs ----------------------------------------------------------------------------------------------------------


CODEC_SIZES = (16_384, 128_000, 1_024_000, 4_096_000)  # elements
CODEC_COLUMNS = 256


def measure_codecs(turns: Turns) -> dict[str, Points]:
    """By codec, at its default parameters: seconds by elements of a bucket. Collective."""
    return {kind: [_measure_codec(turns, CodecSpec(kind), size) for size in CODEC_SIZES] for kind in CODECS}


def _measure_codec(turns: Turns, spec: CodecSpec, size: int) -> tuple[float, float]:
    shape = (size // CODEC_COLUMNS, CODEC_COLUMNS)
    bucket = Bucket(0, (Slot("weight", 0, size),), size, "float32", 4, 0)
    device = turns.ranks.device
    codec = make_codec(spec, bucket, [shape], device=device)
    gradient, flat = torch.randn(size, device=device), torch.empty(size, device=device)

    def run() -> None:
        flat.copy_(gradient)
        reduction = codec.reduce(flat)
        answer: Sequence[Tensor] | None = None
        try:
            while True:
                message: Message = next(reduction) if answer is None else reduction.send(answer)
                answer = [message.payload] * (turns.ranks.size if message.combine is Combine.GATHER else 1)
        except StopIteration:
            return

    return float(size), turns.median_seconds(run)


# ---- operations ------------------------------------------------------------------------------------------------------


PRODUCT_SIZES = (16, 64, 128, 256, 512, 1024)
ROWS, WEIGHT_SIZE = (1, 4, 16, 64, 256), 2050  # no power of two: see BUCKET_SIZES
ATTENTION_LENGTHS = (64, 128, 256, 512)
HEADS, HEAD_SIZE = 8, 32
CHANNELS, IMAGE = (16, 64, 128), 16
POINTWISE_ELEMENTS, POINTWISE_COLUMNS = (1_024, 16_384, 128_000, 1_024_000, 8_192_000), 64
PASS_BYTES = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
MIN_FLOPS, MIN_BYTES = 2e7, 2**22  # of what is timed at once: the clock has to see it


@torch.no_grad()
def measure_operations(turns: Turns) -> dict[str, Points]:
    """By field of `OperationRates`. Collective."""
    with turns.ranks.device:  # of all tensors below
        weight = torch.randn(WEIGHT_SIZE, WEIGHT_SIZE)
        rows = [torch.randn(count, WEIGHT_SIZE) for count in ROWS]

        def of_rows(run: Callable[[Tensor], Tensor]) -> Points:
            return [(len(each), turns.median_seconds(lambda x=each: run(x)) / weight.numel()) for each in rows]

        return {
            "products": [_product(turns, size) for size in PRODUCT_SIZES],
            "thin": of_rows(lambda x: F.linear(x, weight)),
            "outer": of_rows(lambda x: x.t() @ x),
            "attention": [_attention(turns, length) for length in ATTENTION_LENGTHS],
            "convolution": [_convolution(turns, channels) for channels in CHANNELS],
            "pointwise": [_pointwise(turns, size) for size in POINTWISE_ELEMENTS],
            "passes": [_pass(turns, num_bytes) for num_bytes in PASS_BYTES],
        }


def _repeated(run: Callable[[], object], turns: Turns, size: float, least: float) -> float:
    """Seconds of a call; so many at a time that together they have the least size."""
    count = max(1, round(least / size))

    def repeat() -> None:
        for _ in range(count):
            run()

    return turns.median_seconds(repeat) / count


def _product(turns: Turns, size: int) -> tuple[float, float]:
    left, right = torch.randn(size, size), torch.randn(size, size)
    flops = 2.0 * size**3
    return flops, _repeated(lambda: F.linear(left, right), turns, flops, MIN_FLOPS)


def _attention(turns: Turns, length: int) -> tuple[float, float]:
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_SIZE)
    flops = 4.0 * HEADS * HEAD_SIZE * length**2
    return flops, _repeated(lambda: F.scaled_dot_product_attention(q, k, v), turns, flops, MIN_FLOPS)


def _convolution(turns: Turns, channels: int) -> tuple[float, float]:
    images, weight = torch.randn(4, channels, IMAGE, IMAGE), torch.randn(channels, channels, 3, 3)
    flops = 2.0 * images.numel() * channels * 9
    return flops, _repeated(lambda: F.conv2d(images, weight, padding=1), turns, flops, MIN_FLOPS)


def _pointwise(turns: Turns, size: int) -> tuple[float, float]:
    """A sum, a product with a number of each row, an activation and a norm; bytes and seconds are their means."""
    x, y, scale = (
        torch.randn(size // POINTWISE_COLUMNS, POINTWISE_COLUMNS),
        torch.randn(size // POINTWISE_COLUMNS, POINTWISE_COLUMNS),
        torch.randn(size // POINTWISE_COLUMNS, 1),
    )
    kernels = [lambda: x + y, lambda: x * scale, lambda: F.silu(x), lambda: F.layer_norm(x, (POINTWISE_COLUMNS,))]
    moved = x.nbytes * mean((3, 2, 2, 2))
    return moved, mean(_repeated(each, turns, moved, MIN_BYTES) for each in kernels)


def _pass(turns: Turns, num_bytes: int) -> tuple[float, float]:
    """A copy reads half of the bytes and writes the other half."""
    source = torch.zeros(num_bytes // 2 // 4)
    target = torch.empty_like(source)
    return float(num_bytes), _repeated(lambda: target.copy_(source), turns, num_bytes, MIN_BYTES)


# ---- overheads -------------------------------------------------------------------------------------------------------


WIDTH, MICROBATCHES = 8, 9
FLIGHT_ELEMENTS, NETWORK_FLIGHT_ELEMENTS = 2**22, 2**18
PRODUCT = 256


class Overheads(NamedTuple):
    """Seconds, and how many times as long computing takes while a collective is in flight."""

    between_actions: float
    around_step: float
    slowdown: float


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.blocks(x_BD)


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(-1)


def _tiny_task() -> Task:
    return Task(
        model=_Tiny,
        loss=_squares,
        data=_no_data,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
    )


def _no_data() -> Any:
    raise AssertionError("batches are given")


def measure_overheads(turns: Turns) -> Overheads:
    """Collective."""
    ranks = turns.ranks
    one, many = (_step_seconds(turns, microbatches) for microbatches in (1, MICROBATCHES))
    probe = make_probe(_tiny_task(), Plan(dp=ranks.size), ranks)
    times = SegmentTimer(probe, turns).whole(_batch(1))
    computed = sum(times.forward) + sum(times.backward)
    between = max(0.0, ((many - one) / (MICROBATCHES - 1) - computed) / 2)
    # Forward, the loss, backward, a reduction and an update.
    around = max(0.0, one - computed - 5 * between)
    return Overheads(between, around, _slowdown(turns))


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs, targets = torch.randn(2, samples, WIDTH, generator=generator)
    return inputs, targets


def _step_seconds(turns: Turns, microbatches: int) -> float:
    task, plan = _tiny_task(), Plan(dp=turns.ranks.size, microbatches=microbatches)
    model = task.model().to(turns.ranks.device)
    step = TrainStep(model, task.loss, task.optimizer, plan=plan, communicator=turns.ranks, same_batches="allow")
    batch = _batch(microbatches)
    return turns.median_seconds(lambda: step(batch))


def _slowdown(turns: Turns) -> float:
    """The products of a rank while an all-reduce over messages is in flight, over those while there is none."""
    if turns.ranks.size == 1:
        return 1.0
    elements = NETWORK_FLIGHT_ELEMENTS if turns.ranks.num_hosts > 1 else FLIGHT_ELEMENTS
    device = turns.ranks.device
    values, matrix = torch.zeros(elements, device=device), torch.randn(PRODUCT, PRODUCT, device=device)
    alone = turns.median_seconds(lambda: matrix @ matrix)
    group = turns.ranks.get_group(range(turns.ranks.size), "calibration")
    rates = []
    for _ in range(NUM_TURNS):
        turns.begin()
        work = group.all_reduce(values)
        start, count = now(), 0
        while not work.is_completed():
            torch.mm(matrix, matrix)
            count += 1
        spent = now() - start
        work.wait()
        if count:
            rates.append(spent / count)
    return max(1.0, sorted(rates)[len(rates) // 2] / alone) if rates else 1.0

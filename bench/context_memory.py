"""Sequence memory: the largest batch and the longest sequence that BERT-base trains with on 16 GB devices.

    python -m bench.context_memory

fake rank  a process that runs as one rank, with tensors that have sizes but no memory (see `planner/task_facts`)
few hops   with the first hops of a ring only: the others hold no more, and take time
Law: what is printed is counted for all 12 layers: the winner fits, and one sample (or one step of length) more does
not. The search extrapolates from 2 and 3 layers, because the peak is linear in the layers. The winner of the headline
is counted again with every hop.

float32, Adam, dropout 0.1, a loss on every position, no recomputation. TP is tensor parallelism over heads and inner
sizes as in Megatron, with gradients made anew in each step. Context ranks hold what Fourfold's ranks on GPUs hold:
weights, gradient slots and states in buckets, for the whole run.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import bert
from bench.measurement import describe_machine, format_table
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.axes.data.rules.buckets import make_buckets
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, grad_buffer_indices
from fourfold.axes.data.work.gradients import GradBuckets, LaunchSink
from fourfold.axes.data.work.weight_storage import flatten_params, param_specs
from fourfold.comm.channel import MessageChannel
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.group import WholeReducer, WholeWeights
from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.planner.task_facts.fake_ranks import MAX_HOPS, FakeChannel
from fourfold.torch_kit.grad_hooks import GradHooks
from fourfold.words.layout import SPLIT

USABLE_BYTES = 15_400_000_000
"""The part of 16 GiB that context, libraries and fragmentation leave on a P100."""
LAYERS = 12
SAMPLE_LENGTH, BATCH = 512, 64  # the length at which batches are counted, the batch at which lengths are counted
LENGTH_STEP = 64
MAX_GROWTH = 8
TENSOR_SIZES = (1, 2, 4, 6, 12)  # 12 heads
CONTEXT_SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
SOME_TENSOR_SIZES, SOME_CONTEXT_SIZES = (4, 12), (4, 12, 64)
WEIGHTS, GRADIENTS, STATES, INPUTS = "weights", "gradients", "optimizer states", "inputs"


Kinds = dict[str, Sequence[Tensor]]


class StepMemory(NamedTuple):
    """What a rank holds besides its weights for the whole step; `owner` must live as long."""

    tensors_by_kind: Kinds
    owner: object = None


@dataclass(frozen=True)
class Layout:
    """How BERT is laid over `size` ranks: what one rank builds, computes, and holds besides its weights."""

    size: int
    build: Callable[[bert.Shape], bert.Bert]
    step_memory: Callable[[nn.Module], StepMemory]
    losses: bert.Losses
    num_shards: int
    """The number of ranks that share a sequence; a length that does not divide is padded."""


def tensor_parallel(
    size: int,
    losses: bert.Losses = bert.in_place_losses,
    *,
    attend: bert.Attend = bert.math_attention,
    split: bool = False,
) -> Layout:
    """A rank of a tensor axis. Its gradients are freed after each update, as in torch."""
    build = functools.partial(bert.Bert, num_shards=size, attend=attend, split=split)
    return Layout(size, build, adam, losses, size if split else 1)


def adam(model: nn.Module) -> StepMemory:
    """Adam's two moments of every weight."""
    return StepMemory({STATES: [torch.empty_like(p) for p in model.parameters() for _ in range(2)]})


def context_parallel(
    size: int, ring: str, *, zero: int = 0, losses: bert.Losses = bert.losses, few_hops: bool = False
) -> Layout:
    """A rank of Fourfold's context axis; a single rank uses torch's own attention. ZeRO shards over the ranks."""
    rest = functools.partial(zero_buckets, size=size, zero=zero)
    ring_group = FakeChannel(size, max_hops=MAX_HOPS if few_hops else None)
    axis = ContextGroup(ring_group, MessageChannel(CommMeter()), ring)

    def ring_attention(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor) -> Tensor:
        return context_attention(q_BHLK, k_BHLK, v_BHLK, axis, dropout=AttentionDropout(bert.DROPOUT))

    reach = ring_attention if size > 1 else bert.math_attention
    return Layout(size, functools.partial(bert.Bert, attend=reach), rest, losses, size)


def zero_buckets(model: nn.Module, *, size: int, zero: int) -> StepMemory:
    """What `step/assembly.py` and `comm` allocate on GPUs; the hooks that fill the slots are the real ones."""
    named = dict(model.named_parameters())
    rest = RESTING_LAYOUTS[zero if size > 1 else 0]
    split = rest.state == SPLIT
    buckets = make_buckets(param_specs(named, {}), bucket_bytes=Plan().bucket_bytes, num_shards=size if split else 1)
    buffer_indices = grad_buffer_indices(len(buckets), is_cyclic=rest.gradient == SPLIT)
    buffer_sizes: dict[int, int] = {}
    for bucket, index in zip(buckets, buffer_indices, strict=True):
        buffer_sizes[index] = max(buffer_sizes.get(index, 0), bucket.size)
    buffers = {index: torch.empty(length) for index, length in buffer_sizes.items()}
    flats = [buffers[index][: b.size] for b, index in zip(buckets, buffer_indices, strict=True)]
    reducer = WholeReducer(flats, buffer_indices, CommMeter())
    weights = WholeWeights()
    weights.shared_weights = [torch.empty(bucket.size) for bucket in buckets]
    flatten_params(named, buckets, weights)
    gradients = GradBuckets(named, buckets, reducer, CommMeter(), allow_unused=False)
    gradients.countdown.is_last_backward = True
    hooks = GradHooks(gradients.parameters)
    hooks.sink = LaunchSink(gradients, functools.partial(gradients.launch_next, 1.0, may_wait=False))
    shard_sizes = [bucket.size // (size if split else 1) for bucket in buckets]
    grad_shards = [torch.empty(shard_size) for shard_size in shard_sizes] if rest.gradient == SPLIT else []
    states = [torch.empty(2 * shard_size) for shard_size in shard_sizes]
    return StepMemory({GRADIENTS: [*buffers.values(), *grad_shards], STATES: states}, hooks)


def peak_memory(job: Layout, shape: bert.Shape, *, batch: int, length: int) -> PeakMemory:
    """One forward and backward of one rank; the update holds less. Tensors may be real or fake."""
    model = job.build(shape._replace(positions=max(shape.positions, length)))
    resting = job.step_memory(model)
    ids_BL = torch.zeros(batch, -(-length // job.num_shards), dtype=torch.long)
    found = PeakMemory()
    for kind, tensors in {WEIGHTS: [*model.parameters()], INPUTS: [ids_BL], **resting.tensors_by_kind}.items():
        found.track(kind, tensors)
    with found:
        logits_BLV = model(ids_BL, ids_BL)
        losses = job.losses(logits_BLV, ids_BL.new_zeros(logits_BLV.shape[:2]))
        del logits_BLV
        losses.sum().backward()
    return found


def peak_bytes(job: Layout, *, batch: int, length: int, layers: int = LAYERS) -> int:
    """Peak bytes of a step of BERT-base."""
    # The meta device has the sizes of fake tensors (`tests/simulated/test_peak.py`) at a fifth of their time.
    with torch.device("meta"):
        return peak_memory(job, bert.Shape(layers=layers), batch=batch, length=length).peak_bytes


def extrapolate_bytes(job: Layout, *, batch: int, length: int) -> int:
    """The same, extrapolated from 2 and 3 layers: it is affine in the layers."""
    two, three = (peak_bytes(job, batch=batch, length=length, layers=layers) for layers in (2, 3))
    return two + (LAYERS - 2) * (three - two)


def largest_within(bytes_at: Callable[[int], int], limit: int, start: int = 1) -> int:
    """The largest n ≥ 0 with bytes_at(n) ≤ limit, of a growing function; 0 if there is none.

    Guesses by linear extrapolation from two known values, but never grows a guess more than `MAX_GROWTH` times at
    once: at small n the slope may be near 0.
    """
    low, high, known = start, 2 * start, {}
    while known.setdefault(low, bytes_at(low)) > limit:
        low, high = low // 2, low
        if low == 0:
            return 0
    while (known.get(high) or known.setdefault(high, bytes_at(high))) <= limit:
        slope = (known[high] - known[low]) / (high - low)
        guess = high + int((limit - known[high]) / slope) + 1 if slope > 0 else MAX_GROWTH * high
        low, high = high, min(guess, MAX_GROWTH * high)
    while high - low > 1:
        share = (limit - known[low]) / (known[high] - known[low])
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        known[guess] = bytes_at(guess)
        low, high = (guess, high) if known[guess] <= limit else (low, guess)
    return low


def max_size(job: Layout, question: "Question") -> int:
    """The answer for all layers: extrapolated, then verified, and searched with all layers if that was wrong."""
    start = question.start * job.size
    guess = largest_within(lambda n: extrapolate_bytes(job, **question.at(n)), USABLE_BYTES, start)
    fits = guess == 0 or peak_bytes(job, **question.at(guess)) <= USABLE_BYTES
    if fits and peak_bytes(job, **question.at(guess + 1)) > USABLE_BYTES:
        return guess * question.unit
    return largest_within(lambda n: peak_bytes(job, **question.at(n)), USABLE_BYTES, max(1, guess)) * question.unit


@dataclass(frozen=True)
class Question:
    """What is maximized, in steps of `unit`."""

    title: str
    unit: int
    start: int
    """Where the search begins, in units per rank."""
    at: Callable[[int], dict[str, int]]


BATCHES = Question(f"largest batch, {SAMPLE_LENGTH} tokens", 1, 8, lambda n: {"batch": n, "length": SAMPLE_LENGTH})
LENGTHS = Question(
    f"longest sequence, batch {BATCH}", LENGTH_STEP, 2, lambda n: {"batch": BATCH, "length": n * LENGTH_STEP}
)


BASELINE, ORIGINAL, MERGED = "vocabulary-parallel loss", "rsa (full rows)", "plain (merged blocks)"


class Row(NamedTuple):
    """A layout of BERT for each number of ranks."""

    name: str
    sizes: Sequence[int]
    layout: Callable[[int], Layout]


TENSOR_ROWS = [
    Row(BASELINE, TENSOR_SIZES, tensor_parallel),
    Row("gathered logits", TENSOR_SIZES, lambda size: tensor_parallel(size, bert.gathered_losses(size))),
    Row("flash attention", SOME_TENSOR_SIZES, lambda size: tensor_parallel(size, attend=bert.flash_attention)),
    Row("tokens split as well (Megatron's)", SOME_TENSOR_SIZES, lambda size: tensor_parallel(size, split=True)),
    Row(
        "the same, flash attention",
        SOME_TENSOR_SIZES,
        lambda size: tensor_parallel(size, split=True, attend=bert.flash_attention),
    ),
]
SEQUENCE_ROWS = [
    Row(ORIGINAL, CONTEXT_SIZES, lambda size: context_parallel(size, "rsa", few_hops=True)),
    Row(MERGED, CONTEXT_SIZES, lambda size: context_parallel(size, "plain", few_hops=True)),
    Row(
        "plain, in-place loss",
        SOME_CONTEXT_SIZES,
        lambda size: context_parallel(size, "plain", losses=bert.in_place_losses, few_hops=True),
    ),
    *(
        Row(
            f"plain, zero {zero}",
            SOME_CONTEXT_SIZES,
            lambda size, zero=zero: context_parallel(size, "plain", zero=zero, few_hops=True),
        )
        for zero in (1, 2)
    ),
    Row("rsa, zero 2", SOME_CONTEXT_SIZES, lambda size: context_parallel(size, "rsa", zero=2, few_hops=True)),
]
Found = dict[str, dict[int, int]]


def measure_rows(rows: Sequence[Row], question: Question) -> Found:
    found: Found = {}
    for row in rows:
        found[row.name] = {}
        for size in row.sizes:
            found[row.name][size] = max_size(row.layout(size), question)
            print(f"    {question.title} · {row.name} · {size}: {found[row.name][size]}", flush=True)
    return found


def ratios(tensors: Found, sequences: Found) -> list[list[str]]:
    """What 64 context ranks reach compared with 12 tensor ranks, and with equal numbers of ranks."""
    lines = [["", "64 : 12", *(f"{size} : {size}" for size in TENSOR_SIZES if size > 1)]]
    for name, sequence in sequences.items():
        for tensor_name, tensor in tensors.items():
            equal = [_ratio(sequence, size, tensor, size) for size in TENSOR_SIZES if size > 1]
            lines.append([f"{name} : TP, {tensor_name}", _ratio(sequence, 64, tensor, 12), *equal])
    return lines


def _ratio(sequence: Mapping[int, int], size: int, tensor: Mapping[int, int], tensor_size: int) -> str:
    return f"{sequence[size] / tensor[tensor_size]:.1f}" if sequence.get(size) and tensor.get(tensor_size) else "–"


def format_results(heading: str, found: Found, sizes: Sequence[int]) -> str:
    rows = [[heading, *map(str, sizes)]]
    rows += [[name, *(str(row[size]) if size in row else "–" for size in sizes)] for name, row in found.items()]
    return format_table(rows)


def verify_result(question: Question, found: int) -> str:
    """Count the headline's result again with every hop of every layer. Raises AssertionError if it needs more."""
    at = question.at(found // question.unit)
    few = peak_bytes(context_parallel(64, "plain", few_hops=True), **at)
    with FakeTensorMode():
        every = peak_memory(context_parallel(64, "plain"), bert.Shape(), **at).peak_bytes
    assert few == every <= USABLE_BYTES, (few, every)
    return f"64 ranks, {found}, every hop of every layer, fake tensors: {every / 1e9:.3f} GB"


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{describe_machine()}\nBERT-base, float32, Adam, dropout 0.1; {USABLE_BYTES / 1e9:.1f} GB usable of 16 GiB\n"
    )
    for question in (BATCHES, LENGTHS):
        begin = time.monotonic()
        tensors, sequences = measure_rows(TENSOR_ROWS, question), measure_rows(SEQUENCE_ROWS, question)
        print(f"\n{question.title}; tensor parallelism, by ranks\n{format_results('TP', tensors, TENSOR_SIZES)}")
        print(f"\n{question.title}; context axis, by ranks\n{format_results('cp', sequences, CONTEXT_SIZES)}")
        print(f"\nratios\n{format_table(ratios(tensors, sequences))}")
        print(f"\n{verify_result(question, sequences[MERGED][64])}, {time.monotonic() - begin:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()

"""Pipeline memory: what the ranks of a pipeline hold, counted, next to the tables of three papers.

    python -m bench.pipeline_memory

fake rank  a rank that runs its list of forwards and backwards with tensors that have sizes but no memory
Law: the lists are those that a plan's schedule makes, the blocks are recomputed by what a step installs
(`step/recomputed_blocks.py`), and every byte of weights, gradients, states and activations is counted
(`planner/task_facts/fake_memory.py`).

What the papers do not say is assumed: GPipe's microbatches and its two-byte or four-byte activations; DAPPLE's model of
attention. RSA's text does not name its model: 3 blocks of BERT-large in two-byte numbers, the whole batch in flight,
explain both columns of its table.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import bert
from bench.measurement import describe_machine, format_table
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.axes.pipeline.rules.schedules import compute_actions
from fourfold.comm.channel import MessageChannel
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.planner.task_facts.fake_ranks import FakeChannel
from fourfold.step.recomputed_blocks import Recompute
from fourfold.words.program import Action, Verb

GB, GIB = 1e9, 2**30
WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"


class FakeRank(NamedTuple):
    """A rank of a pipeline: its stages by number, and what its update holds for each weight.

    receive  makes what a stage is sent
    loss     of the last stage's outputs
    """

    stages: dict[int, nn.Module]
    receive: Callable[[int], Tensor]
    last_stage: int
    loss: Callable[[Tensor], Tensor] = torch.sum
    states_per_weight: int = 2
    recompute: str = "none"


def run_rank(rank: FakeRank, actions: Sequence[Action]) -> tuple[PeakMemory, list[int]]:
    """Run a rank's list. Returns what was counted, and the bytes of activations that were held after each action."""
    counted, model = PeakMemory(), nn.ModuleDict({str(stage): each for stage, each in rank.stages.items()})
    weights = list(model.parameters())
    counted.track(WEIGHTS, weights)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    counted.track(GRADIENTS, [weight.grad for weight in weights if weight.grad is not None])
    states = [torch.empty_like(weight) for weight in weights for _ in range(rank.states_per_weight)]
    counted.track(STATES, states)
    resting, held, after = counted.current_bytes, dict[tuple[int, int], Tensor](), list[int]()
    with counted, _recompute(model, rank).installed():
        for action in actions:
            key = (action.stage, action.index)
            if action.verb is Verb.FORWARD:
                received = rank.receive(action.stage)
                received.requires_grad_(received.is_floating_point() and action.stage > 0)
                held[key] = rank.stages[action.stage](received)
                if action.stage == rank.last_stage:
                    held[key] = rank.loss(held[key])
                del received
            else:
                output = held.pop(key)
                output.backward(torch.empty_like(output))
                del output
            after.append(counted.current_bytes - resting)
    return counted, after


def _recompute(model: nn.Module, rank: FakeRank) -> Recompute:
    """What a step installs."""
    names = [name for name, module in model.named_modules() if isinstance(module, bert.Block | Decoder)]
    alone = MessageTensorGroup(CommMeter(), torch.device("cpu"))
    return Recompute(model, names if rank.recompute != "none" else [], alone, selective=rank.recompute == "selective")


def peak_bytes(make: Callable[[int], FakeRank], place: int, schedule: str, *, pp: int, microbatches: int) -> int:
    """The peak of the rank at a place. `make` gives it, on the meta device."""
    with torch.device("meta"):
        actions = compute_actions(schedule, pp=pp, microbatches=microbatches)[place]
        return run_rank(make(place), actions)[0].peak_bytes


# ---- models --------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A layer of GPipe's Transformer-L: pre-norm; the scores of attention are not kept."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        qkv = self.qkv(self.norm1(x_BLD)).view(batch, length, 3, self.heads, -1)
        q_BHLK, k_BHLK, v_BHLK = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = bert.flash_attention(q_BHLK, k_BHLK, v_BHLK).transpose(1, 2).reshape(batch, length, width)
        x_BLD = x_BLD + self.out(attended)
        return x_BLD + self.down(F.relu(self.up(self.norm2(x_BLD))))


class BertFront(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, shape: bert.Shape, num_shards: int = 1) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary // num_shards, shape.width)
        self.position, self.norm = nn.Embedding(shape.positions, shape.width), nn.LayerNorm(shape.width)

    def forward(self, ids_BL: Tensor) -> Tensor:
        return bert.dropout(self.norm(self.token(ids_BL) + self.position(ids_BL)))


def make_stage(blocks: Sequence[nn.Module], front: nn.Module | None = None, back: nn.Module | None = None) -> nn.Module:
    ends = [[] if end is None else [end] for end in (front, back)]
    return nn.Sequential(*ends[0], *blocks, *ends[1])


# ---- GPipe, Table 1 ------------------------------------------------------------------------------------------------

GPIPE_BATCH, GPIPE_LENGTH, GPIPE_WIDTH, GPIPE_INNER, GPIPE_HEADS, GPIPE_WORDS = 32, 1024, 2048, 8192, 32, 32_000
GPIPE_PAPER = {"Naive-1": 3, "Pipeline-1": 13, "Pipeline-8": 103, "Pipeline-32": 415, "Pipeline-128": 1663}
GPIPE_LIMIT = 16 * GIB
WEIGHTS_OF_LAYER = 4 * GPIPE_WIDTH**2 + 2 * GPIPE_WIDTH * GPIPE_INNER
WEIGHTS_OF_ENDS = 2 * GPIPE_WORDS * GPIPE_WIDTH


def gpipe_rank(place: int, *, pp: int, layers: int, microbatches: int, recompute: str) -> FakeRank:
    """12 bytes for each weight, as in the paper: itself, its gradient, one state."""
    blocks = [Decoder(GPIPE_WIDTH, GPIPE_INNER, GPIPE_HEADS) for _ in range(layers)]
    front = nn.Embedding(GPIPE_WORDS, GPIPE_WIDTH) if place == 0 else None
    back = nn.Linear(GPIPE_WIDTH, GPIPE_WORDS, bias=False) if place == pp - 1 else None
    shape = (GPIPE_BATCH // microbatches, GPIPE_LENGTH)

    def receive(stage: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long) if stage == 0 else torch.empty(*shape, GPIPE_WIDTH)

    def loss(logits_BLV: Tensor) -> Tensor:
        return bert.in_place_losses(logits_BLV, torch.zeros(shape, dtype=torch.long)).sum()

    return FakeRank({place: make_stage(blocks, front, back)}, receive, pp - 1, loss, 1, recompute)


def most_layers(pp: int, microbatches: int, recompute: str) -> int:
    """The most layers of a stage with which its first and its last rank are within the limit: bytes are affine."""

    def held(layers: int) -> int:
        make = functools.partial(gpipe_rank, pp=pp, layers=layers, microbatches=microbatches, recompute=recompute)
        counts = {"pp": pp, "microbatches": microbatches}
        return max(peak_bytes(make, place, "gpipe", **counts) for place in {0, pp - 1})

    one, two = held(1), held(2)
    return max(0, 1 + (GPIPE_LIMIT - one) // (two - one))


def gpipe_table() -> str:
    rows = [["", "layers", "paper", "weights", "paper", "times naive", "paper"]]
    settings = {name: int(name.rpartition("-")[2]) for name in GPIPE_PAPER}
    naive = 0
    for name, pp in settings.items():
        is_naive = name.startswith("Naive")
        layers = pp * most_layers(pp, 1 if is_naive else GPIPE_BATCH, "none" if is_naive else "full")
        found, theirs = (WEIGHTS_OF_ENDS + count * WEIGHTS_OF_LAYER for count in (layers, GPIPE_PAPER[name]))
        naive = naive or found
        ratio = theirs / (WEIGHTS_OF_ENDS + GPIPE_PAPER["Naive-1"] * WEIGHTS_OF_LAYER)
        paper = str(GPIPE_PAPER[name])
        rows.append(
            [
                name,
                str(layers),
                paper,
                f"{found / GB:.2f} B",
                f"{theirs / GB:.2f} B",
                f"{found / naive:.0f}",
                f"{ratio:.0f}",
            ]
        )
    return format_table(rows)


# ---- DAPPLE --------------------------------------------------------------------------------------------------------

BERT_48 = bert.Shape(width=1024, heads=16, layers=48)
DAPPLE_BATCH, DAPPLE_LENGTH, DAPPLE_PP, DAPPLE_MICROBATCHES = 2, 512, 2, (2, 5, 8, 16)


def dapple_rank(place: int, *, layers: int, recompute: str) -> FakeRank:
    blocks = [bert.Block(BERT_48, 1, bert.math_attention, split=False) for _ in range(layers)]
    front = BertFront(BERT_48) if place == 0 else None
    back = nn.Linear(BERT_48.width, BERT_48.vocabulary) if place == DAPPLE_PP - 1 else None
    shape = (DAPPLE_BATCH, DAPPLE_LENGTH)

    def receive(stage: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long) if stage == 0 else torch.empty(*shape, BERT_48.width)

    def loss(logits_BLV: Tensor) -> Tensor:
        return bert.losses(logits_BLV, torch.zeros(shape, dtype=torch.long)).sum()

    return FakeRank({place: make_stage(blocks, front, back)}, receive, DAPPLE_PP - 1, loss, 2, recompute)


def dapple_peak(schedule: str, recompute: str, microbatches: int) -> float:
    """The mean over ranks of their peaks: affine in the layers."""

    def held(layers: int) -> float:
        make = functools.partial(dapple_rank, layers=layers, recompute=recompute)
        peaks = [
            peak_bytes(make, place, schedule, pp=DAPPLE_PP, microbatches=microbatches) for place in range(DAPPLE_PP)
        ]
        return sum(peaks) / DAPPLE_PP

    two, three = held(2), held(3)
    return two + (BERT_48.layers // DAPPLE_PP - 2) * (three - two)


def dapple_table() -> str:
    rows = [["schedule, recompute", *(f"M = {count}" for count in DAPPLE_MICROBATCHES)]]
    found: dict[tuple[str, str], list[float]] = {}
    for schedule in ("gpipe", "1f1b"):
        for recompute in ("none", "full"):
            found[schedule, recompute] = [dapple_peak(schedule, recompute, count) for count in DAPPLE_MICROBATCHES]
            rows.append([f"{schedule}, {recompute}", *(f"{each / GIB:.1f} GiB" for each in found[schedule, recompute])])
    for recompute in ("none", "full"):
        pairs = zip(found["1f1b", recompute], found["gpipe", "full"], strict=True)
        rows.append([f"1f1b, {recompute} : gpipe, full", *(f"{ours / theirs - 1:+.0%}" for ours, theirs in pairs)])
    return format_table(rows)


# ---- RSA, Table 4 --------------------------------------------------------------------------------------------------

RSA_PP, RSA_BLOCKS, RSA_MICROBATCHES = 8, 3, 8
BERT_LARGE = bert.Shape(width=1024, heads=16, layers=24, vocabulary=30720)
RSA_PAPER = {
    (1, 64, 512): (8477.28, 8477.53), (2, 128, 512): (9520.47, 8478.76), (4, 256, 512): (12232.52, 8481.26),
    (8, 512, 512): (None, 8490.75),
    (1, 64, 256): (3707.39, 3707.01), (2, 64, 512): (4993.43, 4670.64), (4, 64, 1024): (8175.93, 6601.88),
    (8, 64, 2048): (14862.09, 10536.38),
}  # fmt: skip
"""By ranks, batch and length: MB with tensor and with context ranks; None: it did not fit."""


def rsa_rank(place: int, *, size: int, batch: int, length: int, is_tensor: bool) -> FakeRank:
    """The first stage: 3 of 24 blocks. 16 bytes for each weight: it and its gradient in two, 12 of states."""
    shape = BERT_LARGE._replace(positions=length)
    axis = ContextGroup(FakeChannel(size), MessageChannel(CommMeter()), "rsa")

    def attend(q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor) -> Tensor:
        return context_attention(q_BHLK, k_BHLK, v_BHLK, axis, dropout=AttentionDropout(bert.DROPOUT))

    shards, reach = (size, bert.math_attention) if is_tensor else (1, attend)
    blocks = [bert.Block(shape._replace(heads=16), shards, reach, split=False) for _ in range(RSA_BLOCKS)]
    local = (batch // RSA_MICROBATCHES, length if is_tensor else length // size)
    stage = make_stage(blocks, BertFront(shape, shards)).bfloat16()
    return FakeRank({0: stage}, lambda _: torch.zeros(local, dtype=torch.long), RSA_PP - 1, states_per_weight=6)


def rsa_table() -> str:
    rows = [["ranks", "batch", "length", "tensor", "paper", "sequence", "paper"]]
    base: list[tuple[float, float]] = []
    for (size, batch, length), paper in RSA_PAPER.items():
        counts = []
        for is_tensor in (True, False):
            make = functools.partial(rsa_rank, size=size, batch=batch, length=length, is_tensor=is_tensor)
            counts.append(peak_bytes(make, 0, "1f1b", pp=RSA_PP, microbatches=RSA_MICROBATCHES) / 2**20)
        if size == 1:
            base = [(ours, theirs or 0.0) for ours, theirs in zip(counts, paper, strict=True)]
        row = [str(size), str(batch), str(length)]
        for ours, theirs, (first, their_first) in zip(counts, paper, base, strict=True):
            row += [f"{ours:.0f} {ours / first - 1:+.1%}"]
            row += ["did not fit" if theirs is None else f"{theirs:.0f} {theirs / their_first - 1:+.1%}"]
        rows.append(row)
    return format_table(rows)


TABLES = {
    "GPipe, Table 1: layers of Transformer-L on 16 GiB ranks; 32 × 1024 tokens, 32 microbatches, float32": gpipe_table,
    "DAPPLE: BERT-48 on two stages, microbatches of 2 × 512 tokens, float32, Adam; mean peak": dapple_table,
    "RSA, Table 4: BERT-large on eight stages, two-byte numbers; peak of the first stage in MiB": rsa_table,
}


def main() -> None:
    torch.set_num_threads(1)
    print(describe_machine())
    for title, table in TABLES.items():
        begin = time.monotonic()
        print(f"\n{title}\n\n{table()}\n\n{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()

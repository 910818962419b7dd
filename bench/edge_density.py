"""Edge density: the loss of a training whose one pipeline edge is thresholded, and the bytes of its messages.

lm      the language model of Fourfold, cut in the middle of its blocks: the loss of its validation text
clicks  a small DLRM on clicks that a planted model draws, cut in its top MLP: the loss of samples that it has not seen
excess  the loss relative to that of the same seed without compression
Law: the edge is the runtime's own (`Compression`), between two halves of one process: `test_edge_compression.py`
shows that a pipeline trains so.

    PYTHONPATH=src:. OMP_NUM_THREADS=1 python -m bench.edge_density [lm|clicks|bytes ...] [steps=N] [width=N] [seeds=N]
"""

import sys
import time
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measurement import describe_machine, format_table
from fourfold.axes.pipeline.rules.edges import EdgeSpec, edge_bytes
from fourfold.comm.edge_compression import Compression, Kept
from fourfold.tasks import lm, text

LM_DENSITIES, CLICK_DENSITIES, SEEDS = (0.25, 0.1), (0.05,), 3
CPU = torch.device("cpu")


class Edge(nn.Module):
    """What two stages do to each other: the second one gets what an edge leaves of the first one's outputs."""

    def __init__(self, spec: EdgeSpec) -> None:
        super().__init__()
        self.compression = Compression(spec, CPU)

    def forward(self, x: Tensor) -> Tensor:
        return _Cross.apply(x, self.compression)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compression: Compression) -> Tensor:
        packed = compression.pack([x.detach().requires_grad_()])
        ctx.compression, ctx.kept = compression, packed.kept
        return compression.unpack(list(packed.message)).tensors[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kept: Kept = ctx.kept
        message = ctx.compression.pack_gradients(gradients, kept)
        return ctx.compression.unpack_gradients(list(message), kept)[0], None


class Training(NamedTuple):
    """One training. Batches are the same for the same seed; `valid` are batches that are not trained on."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Iterator[Any]
    valid: list[Any]
    optimizer: torch.optim.Optimizer
    clip: float | None


def final_loss(training: Training, steps: int) -> float:
    """The loss after so many steps; the edge compresses in the evaluation too."""
    model, optimizer = training.model, training.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * text.schedule(step, steps, warmup=0.05)
        optimizer.zero_grad()
        training.loss(model, next(training.batches)).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return mean(training.loss(model, batch).item() for batch in training.valid)


# ---- lm -------------------------------------------------------------------------------------------------


def language(spec: EdgeSpec, seed: int, width: int) -> Training:
    """The task `lm`, with an edge behind half of its blocks."""
    torch.manual_seed(seed)
    length, size = 64, 16
    task = lm.task(width=width, layers=4, heads=4, length=length)
    model: Any = task.model()
    edge = Edge(spec)
    model.blocks[1].register_forward_hook(lambda module, args, output: edge(output))
    data = lm.open_data(None, length=length, valid_bytes=32_768)
    positions = torch.arange(length)

    def samples(source: Any, numbers: list[int]) -> Any:
        inputs, targets = zip(*(source[number] for number in numbers), strict=True)
        return torch.stack([each["tokens"] for each in inputs]), torch.stack(targets)

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield samples(data.train, torch.randint(len(data.train), (size,), generator=generator).tolist())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens, targets = batch
        return lm.loss(model(tokens=tokens, positions=positions.expand_as(tokens)), targets).mean()

    assert data.valid is not None
    valid = [samples(data.valid, list(range(start, start + 64))) for start in range(0, len(data.valid) // 64 * 64, 64)]
    return Training(model, loss, batches(), valid, task.optimizer(model.parameters()), task.clip)


# ---- clicks ---------------------------------------------------------------------------------------------

NUM_TABLES, ROWS, FEATURES, SIZE, HIDDEN = 8, 500, 13, 16, 256


class ClickModel(nn.Module):
    """DLRM: a bottom MLP for numbers, embeddings for ids, products of all pairs, a top MLP with the edge in it."""

    def __init__(self, edge: nn.Module) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, SIZE) for _ in range(NUM_TABLES))
        self.bottom = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, SIZE), nn.ReLU())
        num_pairs = (NUM_TABLES + 1) * NUM_TABLES // 2
        self.first = nn.Sequential(nn.Linear(num_pairs + SIZE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.edge = edge
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, 128), nn.ReLU(), nn.Linear(128, 1))
        for weight in self.tables.parameters():
            nn.init.normal_(weight, std=0.1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        rows, columns = torch.triu_indices(NUM_TABLES + 1, NUM_TABLES + 1, 1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, rows, columns]
        return self.second(self.edge(self.first(torch.cat([dense, pairs], 1)))).squeeze(1)


class Planted:
    """The model that draws clicks: a weight for each id and number, and products of hidden vectors of ids."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(99)
        self.ids = torch.randn(NUM_TABLES, ROWS, generator=generator) * 0.4
        self.vectors = torch.randn(NUM_TABLES, ROWS, 4, generator=generator) * 0.3
        self.numbers = torch.randn(FEATURES, generator=generator) * 0.3

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        # Few ids are frequent and most are rare, as in logs of clicks.
        ids = (torch.rand(size, NUM_TABLES, generator=generator) ** 3 * ROWS).long()
        numbers = torch.randn(size, FEATURES, generator=generator)
        tables = torch.arange(NUM_TABLES)
        vectors = self.vectors[tables, ids]
        squares = vectors.sum(1).square().sum(1) - vectors.square().sum((1, 2))
        logits = numbers @ self.numbers + self.ids[tables, ids].sum(1) + squares / 2 - 1.0
        return numbers, ids, (torch.rand(size, generator=generator) < logits.sigmoid()).float()


def clicks(spec: EdgeSpec, seed: int, width: int) -> Training:
    """Each batch is new, as in one epoch."""
    torch.manual_seed(seed)
    planted, model = Planted(), ClickModel(Edge(spec))

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield planted.batch(512, generator)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        numbers, ids, clicked = batch
        return F.binary_cross_entropy_with_logits(model(numbers, ids), clicked)

    valid = [planted.batch(8192, torch.Generator().manual_seed(1000 + index)) for index in range(16)]
    return Training(model, loss, batches(), valid, torch.optim.Adam(model.parameters(), lr=2e-3), None)


# ---- figures --------------------------------------------------------------------------------------------


def print_losses(
    name: str, make: Callable[[EdgeSpec, int, int], Training], densities: tuple[float, ...], **sizes: int
) -> None:
    excesses: dict[float, list[float]] = {density: [] for density in densities}
    for seed in range(sizes["seeds"]):
        begin = time.perf_counter()
        plain = final_loss(make(EdgeSpec(), seed, sizes["width"]), sizes["steps"])
        print(f"{name}, seed {seed}: {plain:.4f} without, {time.perf_counter() - begin:.0f} s", flush=True)
        for density in densities:
            loss = final_loss(make(EdgeSpec("dct", density), seed, sizes["width"]), sizes["steps"])
            excesses[density].append(loss / plain - 1)
            print(f"{name}, seed {seed}: {loss:.4f} at {1 - density:.0%}, {loss / plain - 1:+.3%}", flush=True)
    for density, each in excesses.items():
        print(
            f"{name}, {1 - density:.0%} sparsity: mean of {len(each)} seeds {mean(each):+.3%}, worst {max(each):+.3%}"
        )


def print_bytes() -> None:
    """Bytes of a row in float32 without compression, divided by those of an edge: forward, backward, both."""
    dense, rows = edge_bytes(EdgeSpec(), 1024, 1024, 4), []
    for kind, density, width in [
        ("bf16", 1, 4),
        ("int8", 1, 4),
        *(("dct", d, w) for w in (4, 2) for d in (0.25, 0.1, 0.05)),
    ]:
        coded = edge_bytes(EdgeSpec(kind, density), 1024, 1024, width)
        ratios = (dense.forward / coded.forward, dense.backward / coded.backward, dense.both / coded.both)
        name = kind if kind != "dct" else f"dct, {1 - density:.0%}, values of {width} bytes"
        rows.append((name, *(f"{ratio:.1f}" for ratio in ratios)))
    print(format_table([("edge", "forward", "backward", "both"), *rows]))


def main() -> None:
    parts = [arg for arg in sys.argv[1:] if "=" not in arg] or ["bytes", "clicks", "lm"]
    given = {name: int(value) for name, value in (arg.split("=") for arg in sys.argv[1:] if "=" in arg)}
    sizes = {"width": 64, "seeds": SEEDS, "steps": 800} | given
    print(describe_machine(), sizes, flush=True)
    if "bytes" in parts:
        print_bytes()
    if "clicks" in parts:
        print_losses("clicks", clicks, CLICK_DENSITIES, **sizes)
    if "lm" in parts:
        print_losses("lm", language, LM_DENSITIES, **sizes)


if __name__ == "__main__":
    main()

"""What simulated and spawned tests train: small models in float64, global batches, and each rank's part of them."""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff
from fourfold.orders.sample_order import shard_range
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.tasks import digits, lm
from fourfold.testing import oracle
from fourfold.testing.oracle import TrainingResult
from tests.awkward_models import AWKWARD_MODELS


@dataclass(frozen=True)
class Case:
    """One training, as JSON can represent it."""

    model: str = "mlp"
    loss: str = "values"
    optimizer: str = "AdamW"
    batch_sizes: tuple[int, ...] = (12, 12, 12)
    microbatches: int = 1
    clip: float | None = None
    bucket_bytes: int = 4000
    unused: str = "error"
    transport: str = "auto"
    zero: int = 0
    shard: int | None = None
    update: str = "after"
    codec: str = "none"
    codec_rank: int = 2
    codec_density: float = 0.2
    codec_refresh_steps: int = 2
    sync: str = "step"
    local_steps: int = 10
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    precision: str = "keep"
    reduce_dtype: str = "keep"
    offload: str = "none"
    cp: int = 1
    tp: int = 1
    ring: str = "zigzag"
    ulysses: int = 1
    length: int = 16

    def plan(self, size: int) -> Plan:
        return Plan(
            dp=size // (self.cp * self.tp),
            cp=self.cp,
            tp=self.tp,
            ring=self.ring,
            ulysses=self.ulysses,
            microbatches=self.microbatches,
            bucket_bytes=self.bucket_bytes,
            unused=self.unused,
            transport=self.transport,
            zero=self.zero,
            shard=self.shard,
            update=self.update,
            codec=self.codec,
            codec_rank=self.codec_rank,
            codec_density=self.codec_density,
            codec_refresh_steps=self.codec_refresh_steps,
            sync=self.sync,
            local_steps=self.local_steps,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            precision=self.precision,
            reduce_dtype=self.reduce_dtype,
            offload=self.offload,
        )


PAIRS = {"first": "column", "second": "row", "third": "column", "head": "row"}
TENSOR_RULES: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("mlp", "frozen", "unused", "sometimes"), PAIRS),
    "tied": {"head": "vocabulary"},
    "digits": {"layers.11": "vocabulary"},
    "lm": lm.TENSOR_RULES,
}
"""By model: how its layers are split over the tensor axis."""
MLP_KINDS = ("mlp", "tied", "frozen", "unused", "sometimes")


class MLP(nn.Module):
    """Sixteen features, ten classes; if `kind` says so, with a tied, a frozen or an unused layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 10)
        self.scale = nn.Parameter(torch.ones(()))
        self.kind = kind
        if kind == "tied":
            self.third.weight = self.second.weight
        if kind == "frozen":
            self.second.requires_grad_(False)
        if kind in ("unused", "sometimes"):
            self.spare = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = F.gelu(self.third(F.gelu(self.second(x))))
        if self.kind == "sometimes" and len(x) % 2 == 0:
            x = self.spare(x)
        return self.head(x) * self.scale


# Ranks may be threads, which share torch's generator.
SEED_LOCK = threading.Lock()


def model(kind: str) -> nn.Module:
    with SEED_LOCK:
        torch.manual_seed(7)
        return _make(kind)


def _make(kind: str) -> nn.Module:
    if kind == "lm":
        task = lm.task(width=32, layers=2, heads=4, kv_heads=2, length=16, warmup=0)
        return task.model().double()
    if kind == "digits":
        return digits.task().model().double()
    return (MLP(kind) if kind in MLP_KINDS else AWKWARD_MODELS[kind]()).double()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "values": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
    "pair": lambda outputs, targets: (F.cross_entropy(outputs, targets, reduction="sum"), len(targets)),
    "scalar": lambda outputs, targets: F.cross_entropy(outputs, targets),
    "masked": lambda outputs, targets: (
        (F.cross_entropy(outputs, targets, reduction="none") * (targets < 6)).sum(),
        int((targets < 6).sum()),
    ),
}


def loss(case: Case) -> Callable[[Any, Any], Any]:
    if case.model == "lm":
        return functools.partial(_per_token_loss, LOSSES[case.loss])
    # "sometimes" depends on the number of samples, which unreduced values must not.
    kind = "pair" if (case.model, case.loss) == ("sometimes", "values") else case.loss
    return digits.loss if case.model == "digits" else LOSSES[kind]


def _per_token_loss(loss: Callable[[Any, Any], Any], logits: Tensor, targets: Tensor) -> Any:
    return loss(logits.flatten(0, 1), targets.flatten())


OPTIMIZERS: dict[str, Any] = {"descent": torch.optim.SGD}  # without momentum
OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "nesterov": True}, "LARS": {"trust": 1.0}}


def optimizer(case: Case, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    kind = (
        OPTIMIZERS.get(case.optimizer)
        or getattr(ff.optim, case.optimizer, None)
        or getattr(torch.optim, case.optimizer)
    )
    extra = OPTIMIZER_OPTIONS.get(case.optimizer, {}) | options

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        decay = {} if case.optimizer == "Rprop" else {"weight_decay": 0.1}
        return kind([{"params": matrices, **decay}, {"params": vectors}], lr=1e-2, **extra)

    return make


def batches(case: Case) -> list[Any]:
    """The global batches of all steps."""
    generator = torch.Generator().manual_seed(11)
    draw = functools.partial(torch.randint, generator=generator)
    result = []
    for size in case.batch_sizes:
        if case.model == "lm":
            positions = torch.arange(case.length).expand(size, case.length)
            inputs = {"tokens": draw(0, 256, (size, case.length)), "positions": positions}
            result.append((inputs, draw(0, 256, (size, case.length))))
        elif case.model == "digits":
            images = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
            result.append((images, draw(0, 10, (size,))))
        else:
            features = torch.randn(size, 16, generator=generator, dtype=torch.float64)
            result.append((features, draw(0, 10, (size,))))
    return result


def local_batch(batch: Any, size: int, index: int) -> Any:
    """The part of a global batch that one data index gets."""
    inputs, targets = batch
    start, stop = shard_range(0, len(targets), size, index)
    part = {k: v[start:stop] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[start:stop]
    return part, targets[start:stop]


def train_oracle(case: Case) -> TrainingResult:
    return oracle.train(model(case.model), loss(case), optimizer(case), batches(case), clip=case.clip)


def train_step(case: Case, step: TrainStep, *, skip: int = 0) -> TrainingResult:
    """All steps of a case on this rank, except the first `skip`."""
    size, index = step.plan.dp, step.dp_index
    metrics = [step(local_batch(batch, size, index)) for batch in batches(case)[skip:]]
    step.flush()
    return oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])


def build_step(case: Case, size: int, comm: Any = None) -> TrainStep:
    """The case's step: with the given communicator (threads), or that of the environment (processes)."""
    options = {"clip": case.clip, "tensor": TENSOR_RULES.get(case.model, {})}
    if comm is None:
        return parallelize(model(case.model), loss(case), optimizer(case), case.plan(size), **options)
    return TrainStep(model(case.model), loss(case), optimizer(case), plan=case.plan(size), communicator=comm, **options)


def deviation(case: Case, size: int, comm: Any = None) -> float:
    """The deviation of this rank's training from the oracle's."""
    return oracle.deviation(train_step(case, build_step(case, size, comm)), train_oracle(case))

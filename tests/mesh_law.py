"""The law of the mesh: every pp × dp × cp × tp of eight ranks trains as one device, `lm` and a transformers model.

mesh     one of the twenty factorizations of eight ranks, or of those of fewer
variant  zero level, update, schedule and optimizer, which rotate over the meshes: crossing them would take hours
Law: losses, gradient norms and weights after each training deviate from the one-process oracle's by 1e-9 at most.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.plan.plan import Plan
from fourfold.step.parallelize import parallelize
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle
from fourfold.testing.oracle import TrainingResult
from tests import cases
from tests.cases import Case

NUM_RANKS, LENGTH, MAX_LAYERS, CLIP = 8, 16, 8, 0.05
DIVISORS = (1, 2, 4, 8)


def meshes(num_ranks: int) -> tuple[tuple[int, int, int, int], ...]:
    """Those of so many ranks, a power of two up to 8."""
    return tuple(
        (pp, dp, cp, tp)
        for pp in DIVISORS
        for dp in DIVISORS
        for cp in DIVISORS
        for tp in DIVISORS
        if pp * dp * cp * tp == num_ranks
    )


MESHES = meshes(NUM_RANKS)
MODELS = ("lm", "gpt2")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
OPTIMIZERS = ("AdamW", "SGD", "LAMB")


class Variant(NamedTuple):
    """What a mesh trains with."""

    plan: Plan
    optimizer: str
    clip: float | None

    def __str__(self) -> str:
        plan = self.plan
        schedule = plan.schedule if plan.pp > 1 else ""
        return f"zero={plan.zero} {plan.update:<11} {schedule:<11} {self.optimizer:<5} clip={self.clip}"


def variant(mesh: tuple[int, int, int, int], model: str) -> Variant:
    """That of a mesh: the fields rotate with its number, one after the other as they are legal together."""
    pp, dp, cp, tp = mesh
    number = meshes(pp * dp * cp * tp).index(mesh) + MODELS.index(model)
    schedule = SCHEDULES[number % len(SCHEDULES)] if pp > 1 else "1f1b"
    if schedule == "interleaved" and pp == MAX_LAYERS:  # a block for each stage, and no more
        schedule = "gpipe"
    zero = number % 4 if dp > 1 else 0
    if schedule == "interleaved":
        zero = min(zero, 1)
    update = ("after", "in_backward", "in_forward")[number // 2 % 3]
    has_ties = model == "gpt2" and pp > 1
    if schedule in ("interleaved", "zero-bubble") or (has_ties and update == "in_forward"):
        update = "after"
    optimizer = OPTIMIZERS[number % len(OPTIMIZERS)]
    if optimizer == "LAMB" and (update != "after" or has_ties):
        optimizer = "SGD"
    plan = Plan(
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        zero=zero,
        update=update,
        schedule=schedule,
        interleave=2 if schedule == "interleaved" else 1,
        microbatches=pp if schedule == "interleaved" else 2,
        bucket_bytes=20_000,
    )
    return Variant(plan, optimizer, None if update == "in_backward" else CLIP)


def train(mesh: tuple[int, int, int, int], model: str, comm: Communicator | None = None) -> TrainingResult:
    """This rank's training: with the given communicator (threads), or that of the environment (processes)."""
    chosen = variant(mesh, model)
    rules = lm.TENSOR_RULES if model == "lm" and chosen.plan.tp > 1 else {}
    options: dict[str, Any] = {"clip": chosen.clip, "tensor": rules, "drift_check": 1}
    optimizer = cases.optimizer(Case(optimizer=chosen.optimizer))
    made = make_model(model, num_layers(mesh))
    if comm is None:
        step = parallelize(made, LOSSES[model], optimizer, chosen.plan, **options)
    else:
        step = TrainStep(made, LOSSES[model], optimizer, plan=chosen.plan, communicator=comm, **options)
    metrics = [step(cases.local_batch(batch, step.plan.dp, step.dp_index)) for batch in batches(model)]
    step.flush()
    return oracle.snapshot(step, [m.loss for m in metrics], [m.grad_norm for m in metrics])


def deviation(mesh: tuple[int, int, int, int], model: str) -> float:
    """The deviation of this rank's training from the oracle's, in a world of processes."""
    mesh = (mesh[0], mesh[1], mesh[2], mesh[3])  # JSON has lists
    return oracle.deviation(train(mesh, model), expected(mesh, model))


def expected(mesh: tuple[int, int, int, int], model: str) -> TrainingResult:
    """The oracle's training with what this mesh trains with."""
    chosen = variant(mesh, model)
    return train_oracle(model, num_layers(mesh), chosen.optimizer, chosen.clip)


@functools.cache
def train_oracle(model: str, layers: int, optimizer: str, clip: float | None) -> TrainingResult:
    """The training in one process."""
    update = cases.optimizer(Case(optimizer=optimizer))
    return oracle.train(make_model(model, layers), LOSSES[model], update, batches(model), clip=clip)


def num_layers(mesh: tuple[int, int, int, int]) -> int:
    """As many as two stages for each place need."""
    return min(2 * mesh[0], MAX_LAYERS)


def make_model(kind: str, layers: int) -> nn.Module:
    """A small model in float64, the same on all ranks."""
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return _MAKERS[kind](layers).double()


def batches(kind: str) -> list[Any]:
    """Three global batches: one that divides, one that does not, one with fewer samples than microbatches."""
    given = cases.batches(Case(model="lm", batch_sizes=(8, 9, 5), length=LENGTH))
    if kind == "lm":
        return given
    names = {"tokens": "input_ids", "positions": "position_ids"}
    return [({names[name]: value for name, value in inputs.items()}, targets) for inputs, targets in given]


def _lm(layers: int) -> nn.Module:
    return lm.task(width=16, layers=layers, heads=8, length=LENGTH, warmup=0).model()


def _gpt2(layers: int) -> nn.Module:
    """With the head's weights those of the embedding, as GPT-2 has it."""
    options: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options["attn_implementation"] = "sdpa"
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=layers,
        n_head=8,
        n_positions=LENGTH,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def _gpt2_loss(outputs: Any, targets: Tensor) -> Tensor:
    return cases.loss(Case(model="lm"))(outputs.logits, targets)


_MAKERS: dict[str, Callable[[int], nn.Module]] = {"lm": _lm, "gpt2": _gpt2}
LOSSES: dict[str, Callable[[Any, Any], Any]] = {"lm": cases.loss(Case(model="lm")), "gpt2": _gpt2_loss}

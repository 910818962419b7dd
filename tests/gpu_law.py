"""Laws on GPUs: kernels in one process, and the data and sequence axes over NCCL. CI has no GPU.

    python -m tests.gpu_law                                    # then: python -m tests.spawned_law --ranks 4 --gpus

Prints a line for each law; ends with status 1 unless all hold.
Law: what holds for ranks on CPUs holds on GPUs. Ranks share a GPU where there are more of them (`SpawnedWorld`).
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fourfold as ff
from fourfold.axes.context.work import kernels
from fourfold.axes.context.work.kernels import AttentionBlock, SoftmaxTotals
from fourfold.tasks import lm
from fourfold.testing.oracle import TOLERANCE
from fourfold.testing.process_world import CaseFailed, SpawnedWorld
from tests.spawned.test_data_axis import CASES, CODED, HARDEST, PRECISE

LIMIT_SECONDS = 90.0
ROUNDED = 2**-7  # a unit in the last place of bf16


class Law(NamedTuple):
    """A name, what gives the deviation, and the largest that is allowed."""

    name: str
    deviation: Callable[[], float]
    tolerance: float


def laws(world: SpawnedWorld) -> Iterator[Law]:
    """All of them. `world`: of two ranks."""
    for dtype in (torch.bfloat16, torch.float16):
        for heads, kv_heads, is_causal in ((4, 4, True), (4, 2, False), (8, 1, True)):
            name = f"flash attention, {str(dtype)[6:]}, {heads} heads, {kv_heads} of keys, causal {is_causal}"
            yield Law(name, lambda d=dtype, h=heads, g=kv_heads, c=is_causal: attention(d, h, g, c), 2 * ROUNDED)
    for dtype in (torch.float32, torch.float64):
        yield Law(f"cross-entropy, {str(dtype)[6:]}", lambda d=dtype: cross_entropy(d), 1e-5)
    for zero, fields in enumerate(
        [{"model": "lm"}, {"model": "tied"}, {"model": "frozen", "loss": "masked"}, {"model": "digits"}]
    ):
        for update in ("after", "in_forward"):
            given = HARDEST | fields | {"zero": zero, "update": update, "optimizer": "SGD" if zero == 2 else "AdamW"}
            yield Law(
                f"zero {zero}, {update}, {fields}",
                lambda g=given: max(each["deviation"] for each in run(world, f"{CASES}:deviation", **g)),
                TOLERANCE,
            )
    for case in CODED:
        # Powers of a matrix and cosines are rounded otherwise than on a CPU; bf16 adds up in two bytes.
        tolerance = 2**-9 if case["codec"] == "bf16" else 1e-7
        yield Law(
            f"codec {case['codec']}, zero {case['zero']}",
            lambda c=case: max(each[0]["deviation"] for each in run(world, f"{CASES}:coded_deviations", cases=[c])),
            tolerance,
        )
    for case in PRECISE:
        yield Law(
            f"bf16 with sums in float32, zero {case['zero']}",
            lambda c=case: max(each[0] for each in run(world, f"{CASES}:precision_deviations", cases=[c])),
            1e-3,
        )
    local = {"sync": "local", "local_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "microbatches": 2}
    local |= {"batch_sizes": [12, 9, 3, 12], "bucket_bytes": 1500}
    yield Law(
        "local SGD",
        lambda: max(each["deviation"] for each in run(world, f"{CASES}:local_sgd_deviation", fields=local)),
        TOLERANCE,
    )
    for fields in ({"cp": 2}, {"cp": 2, "ulysses": 2}, {"cp": 2, "ring": "plain"}, {"tp": 2}):
        yield Law(
            f"flash attention of ranks, {fields}: losses",
            lambda f=fields: max(run(world, "tests.gpu_law:sequence_deviation", fields=f)),
            0.002,
        )


def run(world: SpawnedWorld, case: str, **arguments: Any) -> list[Any]:
    """What the ranks say."""
    return world.run(case, time_limit_seconds=LIMIT_SECONDS, **arguments)


def attention(dtype: torch.dtype, heads: int, kv_heads: int, is_causal: bool) -> float:
    """The kernel's output and gradients in half precision from those of plain products in float64, relative.

    If not causal, the gradients are taken for half of the queries, as a zigzag ring takes them.
    """
    torch.manual_seed(heads)
    q, k, v, grad = (torch.randn(2, h, 256, 64, device="cuda", dtype=dtype) for h in (heads, kv_heads, kv_heads, heads))
    start = 0 if is_causal else 128
    found, expected = [], []
    for results, wide in ((found, dtype), (expected, torch.float64)):
        block = AttentionBlock(q.to(wide), k.to(wide), v.to(wide), 0.125, is_causal)
        output = kernels.forward(block)
        totals = SoftmaxTotals(grad.to(wide), output.out, output.lse).slice_rows(start, 256)
        grads = kernels.backward(replace(block, q=block.q[:, :, start:]), totals)
        results += [output.out, output.lse, grads.q, grads.k, grads.v]
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def cross_entropy(dtype: torch.dtype) -> float:
    """Values and gradients from those of torch."""
    torch.manual_seed(1)
    logits = torch.randn(64, 1000, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 1000, (64,), device="cuda")
    ours, theirs = ff.losses.cross_entropy(logits, targets), F.cross_entropy(logits, targets, reduction="none")
    (mine,), (other,) = (torch.autograd.grad(each.square().sum(), logits) for each in (ours, theirs))
    return max((ours - theirs).abs().max().item(), (mine - other).abs().max().item())


def sequence_deviation(fields: dict[str, Any]) -> float:
    """The losses of an `lm` in bf16 whose tokens or weights are split, from those of plain PyTorch in float32."""
    task = lm.task(width=128, layers=2, heads=4, length=128, warmup=0)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, lm.NUM_BYTES, (4, 129), generator=generator)
    inputs = {"tokens": text[:, :-1], "positions": torch.arange(128).expand(4, 128)}

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    torch.manual_seed(5)
    device = ff.world().device
    model = task.model().to(device)
    plain, found, optimizer = [], [], sgd(model.parameters())
    torch.manual_seed(5)
    plan = ff.Plan(precision="bf16", **fields)
    step = ff.parallelize(task.model, task.loss, sgd, plan, tensor=task.tensor, same_batches="allow")
    for _ in range(4):
        found.append(step((inputs, text[:, 1:])).loss)
        optimizer.zero_grad()
        logits = model(**{name: value.to(device) for name, value in inputs.items()})
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten().to(device))
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    assert plain[-1] < plain[0]
    return max(abs(a / b - 1) for a, b in zip(found, plain, strict=True))


def main() -> int:
    """Check all laws; the exit status."""
    world = SpawnedWorld(2, root=Path(__file__).resolve().parents[1], num_gpus=torch.cuda.device_count())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    num_broken = 0
    try:
        for law in laws(world):
            begin = time.monotonic()
            try:
                found = law.deviation()
                result, failure = f"{found:.1e} (need {law.tolerance:.0e})", ""
                holds = found <= law.tolerance
            except (CaseFailed, RuntimeError, ff.FourfoldError) as error:
                result, failure, holds = "failed", f"\n{type(error).__name__}: {error}", False
            num_broken += not holds
            verdict = "holds" if holds else "BROKEN"
            print(f"{verdict:<8}{law.name:<70}{result:>24}{time.monotonic() - begin:>7.1f} s{failure}", flush=True)
    finally:
        world.kill()
    print(f"{num_broken} broken" if num_broken else "all hold", flush=True)
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())

"""One GPU: steps of `lm` predicted, and measured; the same step in plain PyTorch; what a cluster file says of a device.

predicted  from the facts of the task and a cluster file, which has seen none of these steps
plain      the loop that a user would write: the same model, torch's fused AdamW, autocast for bf16
measured   the median of steps between two synchronizations, after warm-up; memory as PyTorch's allocator counts it
Law: both train the same model on the same batches. Rows that share a size are timed in one process, in turns.

    python -m bench.gpu [--cluster dgx-h200] [--sizes small,medium,large] [--steps 10] [--bf16]
    python -m bench.gpu --device          # rates of matrix products, copies and launches only
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import fourfold as ff
from bench.measurement import describe_machine, format_table
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import RooflinePrices, load_cluster, topology_of
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.step import predict_step
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.tasks import lm
from fourfold.words.task import Task

WARM_UP = 3
GIB = 2**30
DEVICE = "cuda"


class Size(NamedTuple):
    """An `lm`."""

    width: int
    layers: int
    heads: int
    length: int
    batch_size: int

    def task(self) -> Task:
        return lm.task(**self._asdict(), steps=1000, clip=None)

    def batch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        text = torch.randint(0, lm.NUM_BYTES, (self.batch_size, self.length + 1), generator=generator).to(DEVICE)
        positions = torch.arange(self.length, device=DEVICE).expand(self.batch_size, self.length)
        return {"tokens": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].contiguous()


SIZES = {
    "small": Size(512, 8, 8, 512, 16),
    "medium": Size(2048, 12, 16, 1024, 8),
    "large": Size(4096, 10, 32, 2048, 4),
}
PLANS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "bf16, in_backward": {"precision": "bf16", "update": "in_backward"},
    "bf16, recompute full": {"precision": "bf16", "recompute": "full"},
    "bf16, recompute selective": {"precision": "bf16", "recompute": "selective"},
    "bf16, 4 microbatches": {"precision": "bf16", "microbatches": 4},
    "bf16, offload states": {"precision": "bf16", "offload": "states"},
}


class Measured(NamedTuple):
    """Seconds of a step, and the most bytes that the allocator gave out."""

    seconds: float
    peak_bytes: int


def measure(step: Callable[[], object], count: int) -> Measured:
    """The median of some steps."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return Measured(statistics.median(taken), torch.cuda.max_memory_allocated())


def make_model(size: Size) -> torch.nn.Module:
    """The weights are drawn on the GPU, which takes a hundredth of the time."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return size.task().model()


def plain_step(size: Size, *, is_bf16: bool) -> Callable[[], object]:
    """A step of a loop in plain PyTorch."""
    model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    inputs, targets = size.batch()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_bf16):
            logits = model(**inputs)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()

    return step


def fourfold_step(size: Size, plan: Plan) -> Callable[[], object]:
    """A step of Fourfold with the same optimizer."""
    task = size.task()
    update = functools.partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1)
    step = ff.parallelize(make_model(size), task.loss, update, plan, same_batches="allow")
    batch = size.batch()
    return lambda: step(batch)


def free() -> None:
    """What the last step held."""
    gc.collect()
    torch.cuda.empty_cache()


def predictions(size: Size, cluster_name: str, plans: dict[str, Plan]) -> dict[str, Prediction]:
    """From the facts of the task and the cluster file."""
    cluster = load_cluster(cluster_name).resized(1)
    source, topology = TaskFacts(size.task()), topology_of(cluster, 1)
    prices = RooflinePrices(cluster)
    return {
        name: predict_step(lower(plan, source.specs(plan), topology, source.update_spec), source, prices)
        for name, plan in plans.items()
    }


def rows_of(name: str, cluster: str, count: int, *, with_float32: bool) -> Iterator[list[str]]:
    """Rows of one size: the plain loops, then the plans."""
    size = SIZES[name]
    for is_bf16 in (False, True) if with_float32 else (True,):
        found = measure(plain_step(size, is_bf16=is_bf16), count)
        free()
        label = f"{name}, PyTorch {'autocast' if is_bf16 else 'float32'}"
        yield [label, "", f"{1e3 * found.seconds:.1f}", "", "", f"{found.peak_bytes / GIB:.2f}", ""]
    plans = {label: Plan(**fields) for label, fields in PLANS.items() if fields or with_float32}
    predicted = predictions(size, cluster, plans)
    for label, plan in plans.items():
        try:
            found = measure(fourfold_step(size, plan), count)
        except ff.FourfoldError as error:
            yield [
                f"{name}, {label}",
                f"{1e3 * predicted[label].seconds:.1f}",
                str(error).splitlines()[-1][:60],
                *[""] * 4,
            ]
            continue
        finally:
            free()
        held = predicted[label].memory.total
        yield [
            f"{name}, {label}",
            f"{1e3 * predicted[label].seconds:.1f}",
            f"{1e3 * found.seconds:.1f}",
            f"{predicted[label].seconds / found.seconds - 1:+.1%}",
            f"{held / GIB:.2f}",
            f"{found.peak_bytes / GIB:.2f}",
            f"{held / found.peak_bytes - 1:+.1%}",
        ]


TITLES = ["", "predicted ms", "measured ms", "error", "predicted GiB", "peak GiB", "error"]

# ---- what a cluster file says of a device


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Of one run on the device, the median over turns of so many in a row."""
    for _ in range(3):
        run()
    taken = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(taken)


def device_rows() -> Iterator[list[str]]:
    """Products of several sizes, element-wise kernels, copies, and a kernel of nothing."""
    for dtype in (torch.bfloat16, torch.float32):
        for size in (256, 512, 1024, 2048, 4096, 8192):
            left, right = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
            seconds = seconds_of(lambda a=left, b=right: a @ b, 20)
            yield [
                f"product {str(dtype)[6:]} {size}³",
                f"{1e6 * seconds:.1f} us",
                f"{2e-12 * size**3 / seconds:.1f} TFLOP/s",
            ]
    for elements in (2**12, 2**16, 2**20, 2**24, 2**28):
        values = torch.randn(elements, device=DEVICE)
        target = torch.empty_like(values)
        for name, run, passes in (
            ("copy", lambda t=target, v=values: t.copy_(v), 2),
            ("add", lambda t=target, v=values: torch.add(v, v, out=t), 2),
            ("gelu", lambda v=values: F.gelu(v), 2),
        ):
            seconds = seconds_of(run, 20)
            yield [
                f"{name} float32 {elements:,}",
                f"{1e6 * seconds:.1f} us",
                f"{passes * values.nbytes / seconds / 1e9:.0f} GB/s",
            ]
    host = torch.randn(2**26).pin_memory()
    there = torch.empty(2**26, device=DEVICE)
    for name, run in (
        ("to the device", lambda: there.copy_(host, non_blocking=True)),
        ("to the host", lambda: host.copy_(there)),
    ):
        seconds = seconds_of(run, 3)
        yield [f"pinned copy {name}", f"{1e3 * seconds:.1f} ms", f"{host.nbytes / seconds / 1e9:.1f} GB/s"]
    free_bytes, total = torch.cuda.mem_get_info()
    yield ["memory that a process finds", f"{total / GIB:.1f} GiB", f"{free_bytes / GIB:.1f} GiB free"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="dgx-h200")
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bf16", action="store_true", help="no rows of float32")
    parser.add_argument("--device", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()} · {describe_machine()}", flush=True)
    if options.device:
        print(format_table([["", "", ""], *device_rows()]))
        return
    for name in options.sizes:
        print(
            format_table([TITLES, *rows_of(name, options.cluster, options.steps, with_float32=not options.bf16)]),
            flush=True,
        )


if __name__ == "__main__":
    main()

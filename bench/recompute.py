"""Recompute: what a forward keeps, and how much longer forward and backward take.

    python -m bench.recompute [--turns 7]

kept   bytes that are held behind the forward: activations and the output, without weights
ratio  of the time of forward and backward to that without recompute, of neighbours in time
Law: the ways take turns, and their gradients are equal bit for bit, or the command fails.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from bench.measurement import describe_machine, format_table
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.step.recomputed_blocks import Recompute, recomputed_blocks
from fourfold.tasks import lm

WAYS = ("none", "selective", "full")
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 256, 6, 8, 256, 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return lm.task(width=WIDTH, layers=LAYERS, heads=HEADS, length=LENGTH, warmup=0).model()


def make_recompute(model: nn.Module, way: str) -> Recompute:
    alone = MessageTensorGroup(CommMeter(), torch.device("cpu"))
    return Recompute(model, recomputed_blocks(model, way), alone, selective=way == "selective")


def make_inputs() -> dict[str, Tensor]:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"tokens": tokens, "positions": torch.arange(LENGTH).expand(BATCH, LENGTH)}


def kept_bytes(way: str) -> int:
    with torch.device("meta"):
        model, inputs, counted = make_model(), make_inputs(), PeakMemory()
        counted.track("weights", model.parameters())
        weights = counted.current_bytes
        with counted, make_recompute(model, way).installed():
            output = model(**inputs)
        kept = counted.current_bytes - weights
        del output
    return kept


def one_turn(model: nn.Module, way: str, inputs: dict[str, Tensor]) -> float:
    """Seconds of a forward and a backward."""
    model.zero_grad()
    begin = time.perf_counter()
    with make_recompute(model, way).installed():
        output = model(**inputs)
    output.float().square().mean().backward()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    model, inputs = make_model(), make_inputs()
    gradients: dict[str, list[Tensor]] = {}
    for way in WAYS:  # the first turn of each is not counted
        one_turn(model, way, inputs)
        gradients[way] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, gradients[way], gradients["none"])), f"{way}: other gradients"
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        seconds = {way: one_turn(model, way, inputs) for way in WAYS}
        for way in WAYS:
            ratios[way].append(seconds[way] / seconds["none"])
    rows = [["recompute", "kept", "of none", "time of none"]]
    none = kept_bytes("none")
    for way in WAYS:
        kept = kept_bytes(way)
        rows.append([way, f"{kept / 2**20:.1f} MiB", f"{kept / none:.2f}", f"{statistics.median(ratios[way]):.2f}"])
    print(f"{describe_machine()}\n{LAYERS} blocks of {WIDTH}, {BATCH} × {LENGTH} tokens, float32, one thread")
    print(format_table(rows))


if __name__ == "__main__":
    main()

"""Batch normalization over ranks: the time of a step with statistics of all ranks, against each rank's own.

model  ResNet-18 of transformers, 11 M parameters and 20 norms, on images of 32 × 32
Law: both train in the same processes, in turns, so that load affects both equally; ratios are of consecutive steps.

    PYTHONPATH=src:. fourfold run -n 2 bench/batch_norm.py [SAMPLES_PER_RANK] [NUM_STEPS] [TRANSPORT]
"""

import functools
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fourfold as ff
from bench.measurement import describe_machine

NUM_CLASSES, WARMUP = 10, 3


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.ResNetConfig(
            embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
        )
        config.num_labels = NUM_CLASSES
        self.model = transformers.ResNetForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def main(samples: int, num_steps: int, transport: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    optimizer, world = functools.partial(torch.optim.SGD, lr=0.01), ff.world()
    plans = [ff.Plan(dp=world.size, batch_norm=kind, transport=transport) for kind in ("sync", "local")]
    steps = [ff.parallelize(Classifier(), loss, optimizer, plan) for plan in plans]
    torch.manual_seed(world.rank)
    batch = torch.randn(samples, 3, 32, 32), torch.randint(0, NUM_CLASSES, (samples,))
    seconds: list[list[tuple[float, float]]] = [[], []]  # elapsed, of this rank's processor
    for number in range(num_steps + WARMUP):
        for turn in (0, 1):
            which = (number + turn) % 2
            begin, cpu_begin = time.perf_counter(), time.process_time()
            steps[which](batch)
            seconds[which].append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    if world.rank == 0:
        print(f"{describe_machine()}\n{world.size} ranks, {samples} samples each, {steps[0].transport_name}")
        for index, name in enumerate(("elapsed", "processor")):
            synced, local = ([step[index] for step in each[WARMUP:]] for each in seconds)
            ratio = median(one / two for one, two in zip(synced, local, strict=True))
            print(f"{name}: sync {median(synced) * 1e3:.0f} ms, local {median(local) * 1e3:.0f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    samples, num_steps, transport = [*sys.argv[1:], *("32", "20", "auto")[len(sys.argv) - 1 :]]
    main(int(samples), int(num_steps), transport)

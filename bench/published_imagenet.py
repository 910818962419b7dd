"""The ladder of ImageNet: ResNet-50 in fewer and fewer minutes, with larger and larger batches.

rung     a published run: batch, devices, minutes
recipe   the optimizer and the rule of the learning rate that Fourfold's documents advise for its batch
fitted   the efficiency of convolutions of a machine, on the first rung that ran on it
Law: a rung is predicted only where there is a description of its machine.

Sources: `docs/rates.md` for the rules; the papers of He, Goyal, Smith, You, Akiba, Jia, Mikami, Ying and Yamazaki
et al., 2015 to 2019. A run's checks of accuracy and its start are not predicted.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from bench.resnet_facts import ResNetFacts
from fourfold.plan.lowering import lower
from fourfold.plan.lr_schedule import LRSchedule
from fourfold.plan.param_spec import UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import (
    Cluster,
    ProductEfficiency,
    RooflinePrices,
    Tier,
    load_cluster,
    topology_of,
)
from fourfold.planner.predict.step import predict_step

IMAGES = 1_281_167
# Xeon Phi 7250 with Omni-Path, as in Stampede2: no description comes with Fourfold. Intel's data sheets: 68 cores at
# 1.4 GHz with 64 operations in float32 a cycle, 16 GB of MCDRAM, 100 Gbit/s. Copies reach about 400 GB/s.
KNL = Cluster(
    name="KNL node",
    device="cpu",
    devices_per_host=1,
    hosts=1,
    memory_bytes=96 * 2**30,
    flops_per_second={"float32": 6.1e12},
    memory_bandwidth=400e9,
    products=ProductEfficiency(0.212, 0.05e9),  # fitted on the first run on it
    host=Tier(1e-6, 50e9),
    network=Tier(2e-6, 12.5e9, 0.8, 0.8),
    launch_seconds=5e-6,
)
LARGEST_SGD_BATCH = 8192  # beyond, linear scaling lost accuracy (Goyal et al., section 5.2)
WARMUP_EPOCHS = 5
SGD = UpdateSpec(optimizer="SGD", num_states=(1,))
LARS = UpdateSpec(optimizer="LARS", is_layerwise=True, num_states=(1,))


@dataclass(frozen=True)
class Rung:
    """A run. `cluster`: its machine's description, or "" if there is none; `is_verified`: read in its paper.

    images_per_second  where it was measured: what the efficiency is fitted to, in place of the minutes
    """

    label: str
    batch_size: int
    hardware: str
    devices: int
    minutes: float
    cluster: str = ""
    is_verified: bool = False
    epochs: int = 90
    plan: tuple[tuple[str, object], ...] = ()
    images_per_second: float | None = None
    is_fitted: bool = False

    @property
    def steps(self) -> int:
        return round(self.epochs * IMAGES / self.batch_size)


FP16 = (("precision", "fp16"),)
HALF_SUMS = (("reduce_dtype", "bf16"),)  # sums in half precision; the rest in float32
LADDER = (
    Rung("He 2015", 256, "8 P100", 8, 29 * 60, "p100", is_verified=True, is_fitted=True),
    Rung("Goyal 2017", 8192, "256 P100", 256, 60, "p100", is_verified=True),
    Rung("Smith 2017", 8192, "TPU pod", 256, 30),
    Rung("You 2017", 32768, "2048 KNL", 2048, 20, "knl", is_verified=True, is_fitted=True),
    Rung("You 2017, 64 epochs", 32768, "2048 KNL", 2048, 14, "knl", is_verified=True, epochs=64),
    Rung("Akiba 2017", 32768, "1024 P100", 1024, 15, "p100", is_verified=True, plan=HALF_SUMS),
    Rung("Jia 2018", 65536, "2048 P40", 2048, 6.6),
    Rung("Mikami 2018", 55296, "3456 V100", 3456, 122 / 60, "v100", is_verified=True, plan=FP16),
    Rung("Ying 2018", 32768, "1024 TPU v3", 1024, 2.2),
    Rung(
        "Yamazaki 2019",
        81920,
        "2048 V100",
        2048,
        74.7 / 60,
        "v100",
        is_verified=True,
        plan=FP16,
        images_per_second=1.73e6,
        is_fitted=True,
    ),
)


def machine(name: str) -> Cluster:
    return KNL if name == "knl" else load_cluster(name)


class Recipe(NamedTuple):
    """How a batch is trained: `rate` is what the learning rate was tuned to at `tuned_for` images."""

    optimizer: UpdateSpec
    schedule: LRSchedule
    rate: float
    tuned_for: int

    def describe(self, batch_size: int) -> str:
        rule = self.schedule.describe([self.rate], batch_size=batch_size, tuned_batch_size=self.tuned_for)
        return f"{self.optimizer.optimizer}, {rule}"


def recipe_of(rung: Rung) -> Recipe:
    """Linear scaling of 0.1 at 256 and steps, as Goyal et al.; for larger batches LARS, scaled by the square root."""
    warmup = round(WARMUP_EPOCHS * IMAGES / rung.batch_size)
    if rung.batch_size <= LARGEST_SGD_BATCH:
        warmup = warmup if rung.batch_size > 256 else 0
        return Recipe(SGD, LRSchedule(schedule="step", warmup=warmup, scale="linear"), 0.1, 256)
    return Recipe(LARS, LRSchedule(schedule="cosine", warmup=warmup, scale="sqrt"), 10.0, LARGEST_SGD_BATCH)


def plan_of(rung: Rung) -> Plan:
    """Data parallelism; batch normalization by rank, as in all of these runs."""
    return Plan.from_dict({"dp": rung.devices, "batch_norm": "local", **dict(rung.plan)})


def step_seconds(rung: Rung, cluster: Cluster) -> float:
    source = ResNetFacts(batch_size=rung.batch_size, update_spec=recipe_of(rung).optimizer)
    plan, resized = plan_of(rung), cluster.resized(rung.devices)
    blueprint = lower(plan, source.specs(plan), topology_of(resized, rung.devices), source.update_spec)
    prediction = predict_step(blueprint, source, RooflinePrices(resized), reserve_bytes=resized.reserve_bytes)
    assert prediction.memory.total <= resized.memory_bytes, (rung.label, prediction.memory)
    return prediction.seconds


class Outcome(NamedTuple):
    """A predicted rung."""

    step: float
    minutes: float
    error: float


def predict(rung: Rung) -> Outcome | None:
    """None without a description of its machine."""
    if not rung.cluster:
        return None
    step = step_seconds(rung, machine(rung.cluster))
    minutes = rung.steps * step / 60
    return Outcome(step, minutes, minutes / rung.minutes - 1)


def fit(rung: Rung) -> float:
    """The highest efficiency of products with which a rung takes as long as published, by bisection."""
    cluster = machine(rung.cluster)
    rate = rung.images_per_second or rung.steps * rung.batch_size / (rung.minutes * 60)
    lowest, highest = 0.01, 1.0
    for _ in range(20):
        middle = (lowest * highest) ** 0.5
        products = ProductEfficiency(middle, cluster.products.half)
        is_slower = rung.batch_size / step_seconds(rung, dataclasses.replace(cluster, products=products)) < rate
        lowest, highest = (middle, highest) if is_slower else (lowest, middle)
    return highest

"""Published throughputs of pipelines: GPipe's table 2, and those of the zero-bubble schedules.

K, M    of GPipe: accelerators and microbatches; throughputs are relative to K = 2 and M = 1
p, m    of zero bubble: GPUs and microbatches; samples per second of a GPU, relative to 1F1B
Law: ratios are of simulated programs of one cluster: what all schedules need alike cancels.

Sources: Huang et al. (arXiv 1811.06965), table 2; Qi et al. (arXiv 2401.10241), tables 3 and 4. The models of the
second have p · k − 2 layers, so that the ends count as layers: here k layers on each GPU, and ends that cost nothing.
"""

from typing import NamedTuple

from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import (
    Cluster,
    ProductEfficiency,
    RooflinePrices,
    Tier,
    load_cluster,
    topology_of,
)
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.predict.step import predict_step

NO_HEAD = 8  # tokens of a vocabulary whose head costs nothing


class Ratio(NamedTuple):
    """A published ratio, and the predicted one. `is_asked`: whether the issue sets a limit for it."""

    label: str
    published: float
    predicted: float
    is_asked: bool = True

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def throughput(source: GptFacts, plan: Plan, cluster: Cluster) -> float:
    """Samples per second."""
    size = plan.mesh.size
    blueprint = lower(plan, source.specs(plan), topology_of(cluster, size), source.update_spec)
    return source.batch_size / predict_step(blueprint, source, RooflinePrices(cluster)).seconds


# ---- GPipe -----------------------------------------------------------------------------------------

# Eight cores of a TPU v3 board. The ratios depend on its peak and its links only a little.
TPU_V3 = Cluster(
    name="TPU v3",
    device="cuda",
    devices_per_host=8,
    hosts=1,
    memory_bytes=16 * 2**30,
    flops_per_second={"bfloat16": 61.5e12},  # Google Cloud: 123 TFLOP/s a chip of two cores
    memory_bandwidth=450e9 * 0.61,  # Google Cloud: 900 GB/s a chip; the efficiency of dgx-a100
    products=ProductEfficiency(0.662, 0.47e9),  # as on dgx-a100, as many seconds at the peak
    host=Tier(2e-6, 70e9, 0.862),  # Google Cloud: links of 656 Gbit/s
    network=None,
    launch_seconds=5e-6,
)
GPIPE = {  # Transformer-48, by M and K
    1: {2: 1.0, 4: 1.07, 8: 1.3},
    4: {2: 1.7, 4: 3.2, 8: 4.8},
    32: {2: 1.8, 4: 3.4, 8: 6.3},
}
GPIPE_BATCH = 128  # the paper does not say; four samples in the smallest microbatch


def gpipe_ratios() -> list[Ratio]:
    source = GptFacts(layers=48, width=2048, heads=32, vocabulary=32000, length=1024, batch_size=GPIPE_BATCH)

    def rate(accelerators: int, microbatches: int) -> float:
        plan = Plan(
            pp=accelerators,
            microbatches=microbatches,
            schedule="gpipe",
            recompute="full",
            precision="bf16",
        )
        return throughput(source, plan, TPU_V3.resized(accelerators))

    base = rate(2, 1)
    return [
        Ratio(f"K = {each}, M = {count}", published, rate(each, count) / base, is_asked=count == 32)
        for count, row in GPIPE.items()
        for each, published in row.items()
        if (each, count) != (2, 1)
    ]


# ---- zero bubble -----------------------------------------------------------------------------------


class ZeroBubbleModel(NamedTuple):
    """A model on p GPUs with k layers each. `rates`: samples per second of a GPU, by schedule."""

    label: str
    pp: int
    layers_each: int
    width: int
    heads: int
    length: int
    microbatches: int
    microbatch: int
    rates: dict[str, float]


ZERO_BUBBLE = (
    ZeroBubbleModel(
        "1.5 B", 8, 3, 2304, 24, 1024, 24, 6, {"1f1b": 11.8, "interleaved": 13.1, "zb-1p": 12.9, "zb-2p": 14.5}
    ),
    ZeroBubbleModel(
        "28.3 B", 32, 2, 6144, 48, 1024, 96, 1, {"1f1b": 0.76, "interleaved": 0.82, "zb-1p": 0.87, "zb-2p": 0.99}
    ),
)


def zero_bubble_ratios() -> list[Ratio]:
    return [ratio for model in ZERO_BUBBLE for ratio in _model_ratios(model)]


def _model_ratios(model: ZeroBubbleModel) -> list[Ratio]:
    source = GptFacts(
        layers=model.pp * model.layers_each,
        width=model.width,
        heads=model.heads,
        vocabulary=NO_HEAD,
        length=model.length,
        batch_size=model.microbatches * model.microbatch,
    )
    cluster = load_cluster("dgx-a100").resized(model.pp)
    limits = {"zb-1p": model.pp, "zb-2p": 2 * model.pp}
    found = {}
    for name in model.rates:
        stages = model.pp * (model.layers_each if name == "interleaved" else 1)
        plan = Plan(
            pp=model.pp,
            microbatches=model.microbatches,
            schedule="zero-bubble" if name in limits else name,
            interleave=stages // model.pp,
            max_in_flight=limits.get(name),
            stages=",".join([str(source.layers // stages)] * stages),
            precision="bf16",
        )
        found[name] = throughput(source, plan, cluster)
    return [
        Ratio(f"{model.label}, p = {model.pp}: {name}", rate / model.rates["1f1b"], found[name] / found["1f1b"])
        for name, rate in model.rates.items()
        if name != "1f1b"
    ]

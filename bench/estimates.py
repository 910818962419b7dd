"""Estimates next to predictions: random plans of GPT 175 B on 1,024 devices, and what each way costs.

table    of plans that share fields: made once, by the first of them that is estimated
error    of an estimate, over the prediction that simulates the same plan
Law: estimates and predictions are of the same facts, prices and plans.

    python -m bench.estimates [--plans 2000] [--predicted 60] [--seed 0]
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from bench.measurement import describe_machine
from bench.plan_search import CASES, DTYPE
from fourfold.plan.check import combination_problems
from fourfold.plan.lowering import Blueprint, lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import RooflinePrices, load_cluster, topology_of
from fourfold.planner.predict.estimate import ESTIMATE_ERROR, Estimator
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.predict.step import predict_step
from fourfold.words.errors import PlanError
from fourfold.words.terminal_text import align_columns

MAX_STAGE_PASSES = 6000  # pp × interleave × microbatches of a plan that is predicted: of more, a simulation takes long
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
Result = TypeVar("Result")


def random_plan(choose: random.Random, devices: int, batch_size: int) -> Plan | None:
    """A plan of so many devices, by powers of two; None: one that is refused."""
    tp, cp, pp = (2 ** choose.randrange(each) for each in (5, 3, 7))
    dp = devices // (tp * cp * pp)
    if dp == 0 or batch_size % dp:
        return None
    local = batch_size // dp
    schedule, interleave = choose.choice(SCHEDULES) if pp > 1 else ("1f1b", 1)
    try:
        plan = Plan(
            tp=tp,
            cp=cp,
            pp=pp,
            dp=dp,
            microbatches=choose.choice([each for each in range(1, local + 1) if local % each == 0]),
            zero=choose.randrange(4),
            recompute=choose.choice(["none", "selective", "full"]),
            schedule=schedule,
            interleave=interleave,
        )
    except PlanError:
        return None
    is_long = plan.num_stages * plan.microbatches > MAX_STAGE_PASSES
    return None if is_long or combination_problems(plan) else plan


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and seconds of processor time."""
    begin = time.process_time()
    return work(), time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"plans": 2000, "predicted": 60, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    case, choose = CASES["175B"], random.Random(options.seed)
    source = GptFacts(
        layers=case.layers, width=case.width, heads=case.heads, batch_size=case.batch_size, precision=DTYPE
    )
    cluster = load_cluster("dgx-a100").resized(case.devices)
    prices, topology = RooflinePrices(cluster, dtype=DTYPE), topology_of(cluster, case.devices)
    drawn = (random_plan(choose, case.devices, case.batch_size) for _ in itertools.count())
    plans = list(itertools.islice((plan for plan in drawn if plan is not None), options.plans))

    def lowered(plan: Plan) -> Blueprint:
        return lower(plan, source.specs(plan), topology, source.update_spec)

    estimator = Estimator(source, prices, topology)
    estimates, first = timed(lambda: [estimator.estimate(plan) for plan in plans])
    _, again = timed(lambda: [estimator.estimate(plan) for plan in plans])
    lowering, predicting, errors, kept = [], [], [], []
    for plan, estimate in list(zip(plans, estimates, strict=True))[: options.predicted]:
        blueprint, seconds = timed(lambda plan=plan: lowered(plan))
        prediction, simulated = timed(lambda blueprint=blueprint: predict_step(blueprint, source, prices))
        lowering.append(seconds)
        predicting.append(simulated)
        errors.append(estimate.seconds / prediction.seconds - 1)
        kept.append(estimate.memory.total / prediction.memory.total - 1)
    print(describe_machine())
    ordered = sorted(map(abs, errors))
    rows = [
        ("estimate, with its share of the tables", f"{first / len(plans) * 1e6:.0f} µs", f"{len(plans)} plans"),
        ("estimate, tables made", f"{again / len(plans) * 1e6:.0f} µs", ""),
        ("lowering", f"{statistics.median(lowering) * 1e3:.0f} ms", f"median of {len(lowering)} plans"),
        ("prediction", f"{statistics.median(predicting) * 1e3:.0f} ms", "median"),
        ("error of a step", f"{statistics.mean(ordered):.1%}", f"{min(errors):+.1%} to {max(errors):+.1%}"),
        *(
            (f"errors within {limit:.0%}", f"{sum(each <= limit for each in ordered) / len(ordered):.0%}", "")
            for limit in (0.05, ESTIMATE_ERROR)
        ),
        ("error of the memory", f"{statistics.mean(map(abs, kept)):.1%}", f"{min(kept):+.1%} to {max(kept):+.1%}"),
    ]
    print("\n".join(align_columns(rows, "<>>")))


if __name__ == "__main__":
    main()

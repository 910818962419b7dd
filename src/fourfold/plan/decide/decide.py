"""Decide: the answer to an ask, for a task on a cluster."""

import dataclasses
from collections.abc import Mapping

from fourfold.plan.decide.answer import PREDICTION_ERROR, Question, decide_among
from fourfold.plan.decide.ask import Ask
from fourfold.plan.decide.decision import Decision
from fourfold.plan.decide.layers import NO_DIMS
from fourfold.plan.decide.progress import Progress
from fourfold.plan.decide.space import make_space
from fourfold.plan.decide.step_pricing import StepPricing
from fourfold.plan.plan import Plan
from fourfold.plan.predict.cluster import Cluster
from fourfold.plan.predict.facts import FactsSource
from fourfold.plan.predict.prices import Prices


def decide(
    ask: Ask,
    source: FactsSource,
    prices: Prices,
    cluster: Cluster,
    *,
    dims: Mapping[str, bool] = NO_DIMS,
    error: float = PREDICTION_ERROR,
    progress: Progress | None = None,
) -> Decision:
    """The best plan for a task, the others that come close, and why.

    dims   that the task's tensor rules name, and whether they are on the tensor axis without a plan's `dims`:
           `marked_dims` of `plan/tensor_dims.py`
    error  of a prediction: plans that are closer are called equal, and the simplest is the answer

    Raises PlanError, with all problems, if no plan is legal, or with the least that would fit, if none fits.
    """
    if ask.devices is not None:
        cluster = cluster.resized(ask.devices)
    ask = ask.with_changes(devices=cluster.num_devices)
    alone = Plan.from_dict({name: value for name, value in ask.pinned.items() if name == "precision"})
    space = make_space(
        source.facts(alone),
        num_devices=cluster.num_devices,
        devices_per_host=cluster.devices_per_host,
        batch_size=source.batch_size,
        clip=source.update_spec.clip,
    )
    limit_bytes = float(ask.memory_bytes or cluster.memory_bytes)
    pricing = StepPricing(source, prices, cluster)
    decision = decide_among(Question(ask, space, pricing, limit_bytes, dims, error), progress)
    return dataclasses.replace(decision, host_order=pricing.host_order(decision.answer.plan))

"""Decide: the answer to an ask, for a task on a cluster."""

import dataclasses
import math
from collections.abc import Mapping

from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import Cluster
from fourfold.planner.predict.facts import FactsSource
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.predict.prices import Prices
from fourfold.planner.search.answer import PREDICTION_ERROR, Question, decide_among
from fourfold.planner.search.baselines import fitting, price_baselines
from fourfold.planner.search.decision import Decision, Progress
from fourfold.planner.search.layers import NO_DIMS
from fourfold.planner.search.space import make_space
from fourfold.planner.search.step_pricing import StepPricing
from fourfold.words.errors import PlanError


def decide(
    ask: Ask,
    source: FactsSource,
    prices: Prices,
    cluster: Cluster,
    *,
    dims: Mapping[str, bool] = NO_DIMS,
    error: float | None = None,
    progress: Progress | None = None,
    deadline: float = math.inf,
) -> Decision:
    """The best plan for a task, the others that come close, and why.

    dims   that the task's tensor rules name, and whether they are on the tensor axis without a plan's `dims`:
           `marked_dims` of `axes/tensor/rules/dims.py`
    deadline  of `time.monotonic`: the search ends with what it has by then
    error  of a prediction: plans that are closer count as equal, and the simplest is the answer; None: the cluster's

    Raises PlanError, with all problems, if no plan is legal, or with the least that would fit, if none fits.
    """
    if error is None:
        error = cluster.prediction_error or PREDICTION_ERROR
    question, pricing = _question(ask, source, prices, cluster, dims=dims, error=error)
    decision = decide_among(question._replace(deadline=deadline), progress)
    return dataclasses.replace(
        decision,
        host_order=pricing.host_order(decision.answer.plan),
        is_error_known=cluster.prediction_error > 0,
    )


def best_baseline_on(
    num_devices: int, ask: Ask, source: FactsSource, prices: Prices, cluster: Cluster
) -> Prediction | None:
    """The fastest baseline on so many devices; None: none fits and has what the ask pins, or there are not as many."""
    try:
        question, pricing = _question(ask.with_changes(devices=num_devices), source, prices, cluster)
        baselines = price_baselines(question.ask, question.space, pricing, limit_bytes=question.limit_bytes)
        best = min(fitting(baselines), key=lambda each: each.seconds, default=None)
        return None if best is None else pricing.simulate(best.plan)
    except PlanError:  # axes that are pinned make more devices
        return None


def _question(
    ask: Ask,
    source: FactsSource,
    prices: Prices,
    cluster: Cluster,
    *,
    dims: Mapping[str, bool] = NO_DIMS,
    error: float = PREDICTION_ERROR,
) -> tuple[Question, StepPricing]:
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
        traits=source.traits,
    )
    pricing = StepPricing(source, prices, cluster)
    return Question(ask, space, pricing, float(ask.memory_bytes or cluster.memory_bytes), dims, error), pricing

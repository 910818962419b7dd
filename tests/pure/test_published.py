"""The planner against published tables: rows that take little time to simulate, and what the bench relies on."""

import dataclasses

import pytest

from bench import published_imagenet, published_megatron
from bench.published_imagenet import LADDER
from bench.published_megatron import CLUSTER, PRIORS, ROWS, Row
from bench.published_pipelines import gpipe_ratios
from fourfold.planner.predict.clusters import load_cluster

QUICK = [row for row in ROWS if row.pp <= 2]
# Its throughput by device is a third of Yamazaki's on the same devices.
MISSED = ["Mikami 2018"]


def test_eight_constants_are_fitted_on_six_rows():
    assert len(PRIORS) == 8
    assert sum(row.is_fitted for row in ROWS) == 6
    assert {row.label for row in ROWS if not row.is_fitted} >= {"3.6 B", "76.1 B", "175 B, ZeRO-3", "175 B, PTD"}


@pytest.mark.parametrize("row", QUICK, ids=lambda row: f"{row.label} on {row.gpus}")
def test_megatron_s_rows_are_within_a_tenth(row):
    cluster = load_cluster(CLUSTER)
    plan = published_megatron.best_plan(row, cluster.resized(row.gpus))
    assert plan.mesh.size == row.gpus
    assert published_megatron.predicted_seconds(row, plan, cluster) == pytest.approx(row.published_seconds, rel=0.1)


@pytest.mark.parametrize("interleave", [1, 2])
def test_from_two_fills_of_a_pipeline_on_each_more_takes_as_long_again(interleave):
    cluster = load_cluster(CLUSTER)
    row = Row("small", 8, 1024, 8, 2, 4, 2, 2 * 24, 100.0, microbatch=1)
    plan = published_megatron.plan_of(row, 1, interleave)
    whole = published_megatron.predicted(row, plan, cluster).seconds
    assert published_megatron.predicted_seconds(row, plan, cluster) == pytest.approx(whole, rel=1e-9)


def test_the_fastest_plan_that_fits_is_taken():
    cluster = load_cluster(CLUSTER)
    row = ROWS[4]
    resized = cluster.resized(row.gpus)
    plan = published_megatron.best_plan(row, resized)
    held = published_megatron.memory_bytes(row, plan, resized)
    assert held <= cluster.memory_bytes
    smaller = dataclasses.replace(resized, memory_bytes=held - 1)
    other = published_megatron.best_plan(row, smaller)
    assert published_megatron.memory_bytes(row, other, smaller) < held
    slower, faster = (published_megatron.estimated_seconds(row, each, resized) for each in (other, plan))
    assert slower > faster


def test_constants_replace_those_of_the_description():
    changed = published_megatron.with_constants({"products.half": 1e9, "launch": 1e-6, "host.efficiency": 0.5})
    assert (changed.products.half, changed.launch_seconds, changed.host.efficiency) == (1e9, 1e-6, 0.5)
    assert changed.products.highest == load_cluster(CLUSTER).products.highest


def test_gpipe_with_32_microbatches_is_within_a_tenth():
    asked = [ratio for ratio in gpipe_ratios() if ratio.is_asked]
    assert len(asked) == 3
    assert all(abs(ratio.error) < 0.1 for ratio in asked)


@pytest.mark.parametrize("rung", [rung for rung in LADDER if rung.is_verified], ids=lambda rung: rung.label)
def test_the_ladder_of_imagenet_is_within_a_quarter(rung):
    outcome = published_imagenet.predict(rung)
    assert outcome is not None
    assert (abs(outcome.error) < 0.25) == (rung.label not in MISSED)


def test_large_batches_get_lars_and_small_ones_linear_scaling():
    for rung in LADDER:
        recipe = published_imagenet.recipe_of(rung)
        assert (recipe.optimizer.optimizer == "LARS") == (rung.batch_size > 8192)
        assert (
            recipe.schedule.lr_lambda(steps=rung.steps, batch_size=rung.batch_size, tuned_batch_size=recipe.tuned_for)(
                rung.steps // 10
            )
            > 0
        )

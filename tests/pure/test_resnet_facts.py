"""ResNet-50 facts: what torchvision's network has, by formula."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.resnet_facts import ResNetFacts
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import load_cluster, topology_of
from fourfold.planner.predict.facts import FactsSource, OperationKind
from fourfold.words.errors import PlanError


def test_resnet_facts_are_those_of_resnet_50():
    source: FactsSource = ResNetFacts(batch_size=256)
    specs = source.specs(Plan())
    assert sum(spec.num_elements for spec in specs) == 25_557_032
    assert len(specs) == 161
    assert Counter(len(spec.shape) for spec in specs) == {4: 53, 2: 1, 1: 107}
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["layer4.2.conv3.weight"] == (2048, 512, 1, 1)
    assert shapes["layer2.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert shapes["layer1.0.downsample.1.bias"] == (256,)
    multiplications = sum(segment.flops for segment in source.facts(Plan()).segments) / 2
    assert round(multiplications / 1e9, 2) == 4.09
    assert len(source.facts(Plan()).blocks) == 16


@given(st.integers(1, 12), st.integers(1, 4))
def test_what_convolutions_take_grows_with_the_area_of_the_image(side, factor):
    small, large = (ResNetFacts(batch_size=1, image=32 * side * scale).facts(Plan()) for scale in (1, factor))
    for before, after in zip(small.segments, large.segments, strict=True):
        for a, b in zip(before.operations, after.operations, strict=True):
            if a.kind is OperationKind.CONVOLUTION:
                assert (b.flops, b.moved_bytes) == (a.flops * factor**2, a.moved_bytes * factor**2)
                assert b.weight_bytes == a.weight_bytes
    assert small.segments[0].params == large.segments[0].params


@given(st.integers(1, 8), st.sampled_from(["keep", "bf16"]))
def test_every_parameter_is_in_one_segment_and_on_its_stage(pp, precision):
    source, plan = ResNetFacts(batch_size=64), Plan(pp=pp, precision=precision, microbatches=8)
    facts, stages = source.facts(plan), source.stage_blocks(plan)
    names = [name for segment in facts.segments for name in segment.params]
    assert sorted(names) == sorted(spec.name for spec in source.specs(plan))
    stage_of = {facts.blocks[index].name: stage for stage, indexes in enumerate(stages) for index in indexes}
    for spec in source.specs(plan):
        block = ".".join(spec.name.split(".")[:2])
        assert spec.stage == stage_of.get(block, plan.pp - 1 if spec.name.startswith("fc") else 0)
    assert all(math.isclose(each.saved_bytes["none"], each.saved_bytes["full"]) for each in (facts.first, facts.last))


def test_half_precision_halves_what_is_moved_and_kept():
    source = ResNetFacts(batch_size=1)
    full, half = (source.facts(Plan(precision=each)) for each in ("keep", "fp16"))
    for a, b in zip(full.blocks, half.blocks, strict=True):
        assert sum(each.moved_bytes for each in a.operations) == 2 * sum(each.moved_bytes for each in b.operations)
        assert {key: value / 2 for key, value in a.saved_bytes.items()} == b.saved_bytes
        assert a.saved_bytes["full"] < a.saved_bytes["selective"] < a.saved_bytes["none"]
        assert a.norm_channels == tuple(
            s.shape[0] for s in source.specs(Plan()) if len(s.shape) == 4 and s.name in a.params
        )


def test_it_can_be_lowered_for_data_ranks():
    source, plan = ResNetFacts(batch_size=512), Plan(dp=16, batch_norm="local", zero=1)
    blueprint = lower(plan, source.specs(plan), topology_of(load_cluster("p100").resized(16), 16), source.update_spec)
    assert len(blueprint.groups) == 1


def test_what_it_cannot_be_divided_by_is_refused_all_at_once():
    with pytest.raises(PlanError) as caught:
        ResNetFacts(batch_size=1).facts(Plan(tp=2, cp=2))
    assert [problem.got for problem in caught.value.problems] == ["cp = 2", "tp = 2"]
    with pytest.raises(PlanError, match="divisible by 32"):
        ResNetFacts(batch_size=1, image=225)
    with pytest.raises(PlanError, match="blocks of a formula have no names"):
        ResNetFacts(batch_size=1).stage_blocks(Plan(pp=2, stages="a; b"))
    with pytest.raises(PlanError, match="at least one block for each stage"):
        ResNetFacts(batch_size=1).stage_blocks(Plan(pp=17))

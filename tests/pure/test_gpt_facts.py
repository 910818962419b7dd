"""GPT facts: the formulas of the papers, and the same model on any plan."""

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.axes.context.rules.layout import AttentionSize, attention_sent_elements
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import load_cluster, topology_of
from fourfold.planner.predict.facts import FactsSource, OperationKind, Workload
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.words.errors import PlanError
from fourfold.words.layout import collective_sent_bytes

# Layers, width, heads, tensor ranks, parameters in billions, of table 1 of Narayanan et al.
TABLE_1 = [(24, 2304, 24, 1.65), (30, 3072, 32, 3.56), (36, 4096, 32, 7.47), (40, 6144, 48, 18.45)]
TABLE_1 += [(48, 8192, 64, 39.10), (60, 10240, 80, 76.05), (80, 12288, 96, 145.62)]


@st.composite
def gpts(draw, **fixed) -> GptFacts:
    heads = draw(st.sampled_from([4, 8, 12]))
    return GptFacts(
        layers=draw(st.integers(2, 6)),
        width=heads * draw(st.sampled_from([8, 64])),
        heads=heads,
        vocabulary=draw(st.integers(1, 8)) * 8,
        length=draw(st.sampled_from([64, 128])),
        batch_size=draw(st.integers(1, 64)),
        **fixed,
    )


def work_of(gpt: GptFacts) -> Workload:
    return Workload.of(gpt, task="gpt", machine="that of the paper")


def test_gpt_facts_are_a_facts_source():
    source: FactsSource = GptFacts(layers=2, width=64, heads=4, batch_size=8)
    assert source.facts(Plan()).tokens == 2048
    assert source.facts(Plan()) is source.facts(Plan(dp=4, zero=3))  # remembered


# ---- the papers' formulas --------------------------------------------------------------------------


@given(gpts())
def test_parameters_are_those_of_equation_2(gpt):
    n, h, v, s = gpt.layers, gpt.width, gpt.vocabulary, gpt.length
    number = work_of(gpt).num_parameters
    assert number == 12 * n * h**2 + 13 * n * h + (v + s) * h
    assert number == pytest.approx(12 * n * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * n * h)), rel=1e-15)


@given(gpts())
def test_operations_are_those_of_equation_3(gpt):
    n, h, v, s, b = gpt.layers, gpt.width, gpt.vocabulary, gpt.length, gpt.batch_size
    work = work_of(gpt)
    flops = work.flops + work.again_flops["full"]
    assert flops == 96 * b * s * n * h**2 + 16 * b * s**2 * n * h + 6 * b * s * h * v
    expected = 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert flops == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("layers", "width", "heads", "billions"), TABLE_1)
def test_table_1_has_these_models(layers, width, heads, billions):
    gpt = GptFacts(layers=layers, width=width, heads=heads, batch_size=1)
    assert round(work_of(gpt).num_parameters / 1e9, 2) == billions


@given(gpts(), st.sampled_from([1, 2, 4]), st.booleans())
def test_activations_are_those_of_korthikanti(gpt, t, splits):
    plan = Plan(tp=t, sequence_parallel=splits and t > 1, precision="bf16")
    s, h, a = gpt.length, gpt.width, gpt.heads
    saved = gpt.facts(plan).blocks[0].saved_bytes
    outside = 10 / t if plan.sequence_parallel else 10
    assert saved["none"] == pytest.approx(s * h * (outside + 24 / t + 5 * a * s / (h * t)))
    assert saved["selective"] == pytest.approx(s * h * (outside + 24 / t))
    assert saved["full"] == pytest.approx(2 * s * h / (t if plan.sequence_parallel else 1))
    if t == 1:
        assert saved["none"] == pytest.approx(s * h * (34 + 5 * a * s / h))


def test_wider_elements_take_more_but_masks_do_not():
    gpt = GptFacts(layers=2, width=64, heads=4, length=64, batch_size=1, vocabulary=64)
    narrow, wide = (gpt.facts(Plan(precision=each)).blocks[0].saved_bytes["none"] for each in ("bf16", "keep"))
    masks = 64 * 64 * 2 + 4 * 64 * 64
    assert wide - masks == pytest.approx(2 * (narrow - masks))


# ---- the same model on any plan --------------------------------------------------------------------


@given(gpts(fused_attention=True), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_the_ranks_of_a_plan_compute_what_one_device_does(gpt, tp, cp, ulysses):
    if gpt.heads % (tp * ulysses) or cp % ulysses or gpt.vocabulary % tp:
        return
    one, many = gpt.facts(Plan()), gpt.facts(Plan(tp=tp, cp=cp, ulysses=ulysses))
    for whole, part in zip(one.segments, many.segments, strict=True):
        assert part.flops * tp * cp == pytest.approx(whole.flops, rel=1e-12)
        assert part.params == whole.params


@given(gpts(), st.sampled_from([2, 4]))
def test_tensor_ranks_hold_each_element_of_a_weight_once(gpt, tp):
    for spec in gpt.specs(Plan(tp=tp)):
        held = defaultdict(int)
        for shard in spec.shards:
            for box, piece in zip(shard.boxes, shard.pieces, strict=True):
                size = 1
                for each in box.lengths:
                    size *= each
                held[piece.num_replicas] += size
        assert sum(size / replicas for replicas, size in held.items()) == spec._replace(shards=()).num_elements
        whole = ".norm" in spec.name or spec.name == "positions.weight" or spec.name.endswith(("out.bias", "down.bias"))
        assert set(held) == ({tp} if whole else {1})


@given(gpts(), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_every_parameter_is_in_one_segment_and_the_embedding_in_two(gpt, pp, tp):
    plan = Plan(pp=pp, tp=tp, microbatches=2)
    facts, specs = gpt.facts(plan), gpt.specs(plan)
    names = [name for segment in facts.segments for name in segment.params]
    assert sorted({*names}) == sorted(spec.name for spec in specs)
    assert len(names) == len(specs) + 1
    stages = gpt.stage_blocks(plan)
    of_block = {f"blocks.{index}": stage for stage, blocks in enumerate(stages) for index in blocks}
    for spec in specs:
        assert spec.stage == next((stage for block, stage in of_block.items() if spec.name.startswith(f"{block}.")), 0)
        assert spec.is_tied == (spec.name == "embedding.weight" and pp > 1)


@settings(max_examples=10, deadline=None)
@given(gpts(), st.sampled_from([(1, 8, 1), (2, 2, 2), (4, 2, 1), (2, 1, 4)]), st.integers(0, 3))
def test_plans_for_a_gpt_can_be_lowered(gpt, sizes, zero):
    pp, dp, tp = sizes
    if gpt.layers < pp:
        return
    plan = Plan(pp=pp, dp=dp, tp=tp, zero=zero, microbatches=4, precision="bf16", recompute="full")
    cluster = load_cluster("dgx-a100")
    blueprint = lower(plan, gpt.specs(plan), topology_of(cluster, 8), gpt.update_spec)
    held = sum(slot.stop - slot.start for group in blueprint.groups for b in group.buckets for slot in b.slots)
    assert held >= work_of(gpt).num_parameters


@given(gpts(), st.sampled_from([(2, 1), (4, 1), (4, 2), (4, 4)]))
def test_attention_sends_what_the_sequence_axis_says(gpt, sizes):
    cp, ulysses = sizes
    if gpt.heads % ulysses:
        return
    block = gpt.facts(Plan(cp=cp, ulysses=ulysses)).blocks[0]
    sent = sum(
        (each.forward + each.backward) * collective_sent_bytes(each.change, whole_bytes=1, size=cp) * each.whole_bytes
        for each in block.collectives
    )
    layer = AttentionSize(1, gpt.length, gpt.heads, gpt.width // gpt.heads)
    assert sent == pytest.approx(4 * attention_sent_elements(layer, cp, ulysses=ulysses))


@given(gpts(), st.sampled_from([2, 4]))
def test_split_residuals_send_as_much_as_whole_ones_and_one_gather_more_in_backward(gpt, tp):
    def sent(*, splits: bool) -> float:
        block = gpt.facts(Plan(tp=tp, sequence_parallel=splits)).blocks[0]
        return sum(
            (each.forward + each.backward)
            * collective_sent_bytes(each.change, whole_bytes=1, size=tp)
            * each.whole_bytes
            for each in block.collectives
        )

    gathered = 2 * (tp - 1) / tp * 4 * gpt.length * gpt.width
    assert sent(splits=True) == pytest.approx(sent(splits=False) + gathered)


def test_tensor_ranks_send_eight_hidden_tensors_a_layer():
    # Narayanan et al., section 3.2: 8·b·s·h·(t − 1)/t elements a layer, without recomputing.
    gpt = GptFacts(layers=2, width=64, heads=4, length=64, batch_size=1)
    (each,) = gpt.facts(Plan(tp=4, precision="fp16")).blocks[0].collectives
    sent = (each.forward + each.backward) * collective_sent_bytes(each.change, whole_bytes=1, size=4) * each.whole_bytes
    assert sent == 2 * 8 * 64 * 64 * 3 / 4


@pytest.mark.parametrize("splits", [False, True])
def test_a_boundary_is_sent_in_parts(splits):
    gpt = GptFacts(layers=2, width=64, heads=4, length=64, batch_size=1)
    facts = gpt.facts(Plan(tp=4, sequence_parallel=splits, precision="bf16"))
    assert facts.boundary_bytes == 2 * 64 * 64 / 4


def test_fused_attention_moves_no_scores():
    kinds = {
        fused: [
            operation.kind
            for operation in GptFacts(layers=1, width=64, heads=4, batch_size=1, fused_attention=fused)
            .facts(Plan())
            .blocks[0]
            .operations
        ]
        for fused in (False, True)
    }
    assert kinds[True].count(OperationKind.ATTENTION) == 1
    assert kinds[False].count(OperationKind.PRODUCT) == kinds[True].count(OperationKind.PRODUCT) + 2


# ---- what cannot be had -----------------------------------------------------------------------------


def test_sizes_that_cannot_be_are_refused_all_at_once():
    with pytest.raises(PlanError) as caught:
        GptFacts(layers=0, width=100, heads=3, batch_size=1, precision="int8")
    assert len(caught.value.problems) == 2
    with pytest.raises(PlanError, match="try width = 99"):
        GptFacts(layers=1, width=100, heads=3, batch_size=1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tp": 3}, "tp = 1 or 2 or 4"),
        ({"cp": 8, "ulysses": 8}, "ulysses = 1 or 2 or 4"),
        ({"cp": 3}, "length"),
        ({"tp": 4, "cp": 32, "sequence_parallel": True}, "tp to divide the tokens"),
    ],
)
def test_plans_that_cannot_be_are_refused(fields, text):
    gpt = GptFacts(layers=4, width=64, heads=4, length=64, batch_size=1)
    with pytest.raises(PlanError, match=text):
        gpt.facts(Plan(**fields))


def test_stages_are_counted_and_not_named():
    gpt = GptFacts(layers=4, width=64, heads=4, batch_size=1)
    for stages in ("a; b", "1,2"):
        with pytest.raises(PlanError):
            gpt.stage_blocks(Plan(pp=2, stages=stages))
    assert gpt.stage_blocks(Plan(pp=2, stages="1,3")) == (range(1), range(1, 4))
    assert gpt.stage_blocks(dataclasses.replace(Plan(pp=2), stages="even"))[1].stop == 4

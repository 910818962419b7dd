"""Laws of attention over the context axis; ranks are threads, which use messages or shared memory."""

import itertools
import threading
import time
from typing import cast

import pytest
import torch

from fourfold.axes.context.rules.layout import (
    RINGS,
    AttentionSize,
    ContextSpec,
    attention_sent_elements,
    scores_per_index,
)
from fourfold.axes.context.work import kernels
from fourfold.comm.channel import MessageChannel
from fourfold.testing import threads
from fourfold.trainer.tracer import SpanRecorder
from fourfold.words.trace_events import RING_SPAN, SEND_LANE
from tests import attention_oracle
from tests.attention_oracle import BATCH, HEAD_SIZE, HEADS, TOLERANCE, AttentionCase


def worst(cases, transport="messages", factor=1.0):
    """The largest deviation of any rank, by case; all cases have one layout."""
    expected = [(case, *_expected(case, factor)) for case in cases]

    def body(comm):
        axis = threads.make_axis(comm, cases[0].ring, cases[0].ulysses, transport=transport)
        found = []
        for case, tensors, oracle in expected:
            mine = attention_oracle.run_on_axis(case, tensors, axis)
            found.append(attention_oracle.deviation(mine, oracle, axis.local_token_ranges(case.length)))
        return found

    by_rank = threads.run(cases[0].size, body)
    return dict(zip(cases, map(max, zip(*by_rank, strict=True)), strict=True))


def _expected(case, factor):
    tensors = attention_oracle.make_tensors(case, factor)
    return tensors, attention_oracle.oracle(case, tensors)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8])
def test_attention_over_every_axis_equals_attention_in_one_process(size):
    by_layout = itertools.groupby(attention_oracle.cases(size), key=lambda case: (case.ring, case.ulysses))
    for turn, (_, cases) in enumerate(by_layout):
        # For large axes, every third case: together, three layouts cover all kinds of masks.
        few = list(cases) if size < 5 else list(cases)[turn % 3 :: 3]
        found = worst(few, "shared" if turn % 3 else "messages")
        assert not {case: deviation for case, deviation in found.items() if deviation > TOLERANCE}


@pytest.mark.parametrize("mask", [None, "documents", "padding"])
@pytest.mark.parametrize("ring", ["zigzag", "plain", "gather"])
def test_scores_that_do_not_fit_are_computed_in_blocks_of_rows(monkeypatch, ring, mask):
    monkeypatch.setattr(kernels, "MAX_SCORES", 1)
    cases = [AttentionCase(3, ring, causal=causal, mask=mask, heads=heads, dropout=dropout)
             for causal in (False, True) for heads, dropout in (("narrow V", 0.0), ("grouped", 0.4))]  # fmt: skip
    assert max(worst(cases).values()) <= TOLERANCE


# ---- numerics --------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["grouped", "narrow V"])
@pytest.mark.parametrize("ring", RINGS)
def test_scores_of_ten_thousand_do_not_overflow(ring, heads):
    # With such scores, rounding of the inputs dominates, so the oracle gets the same inputs in float64.
    cases = [AttentionCase(4, ring, causal=causal, heads=heads, scale=1.0) for causal in (False, True)]
    tensors = attention_oracle.make_tensors(cases[0], factor=100.0)
    assert (tensors.q @ tensors.k.repeat_interleave(tensors.q.shape[1] // tensors.k.shape[1], 1).mT).abs().max() > 1e4
    assert max(worst(cases, factor=100.0).values()) <= 1e-9
    single = [case._replace(dtype=torch.float32) for case in cases]
    # The gradients of q and k grow with q and k; a score of 1e4 is rounded to 1e-3.
    assert max(worst(single, factor=100.0).values()) < 0.3


@pytest.mark.covering
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 0.04), (torch.float16, 5e-3)])
@pytest.mark.parametrize("ring", RINGS)
def test_low_precision_results_are_rounded_once_and_not_at_every_hop(ring, dtype, tolerance):
    cases = [AttentionCase(8, ring, causal=causal, mask=mask, dtype=dtype) for causal in (False, True)
             for mask in (None, "bias", "padding")]  # fmt: skip
    assert max(worst(cases).values()) < tolerance


def test_fully_masked_queries_give_zero_as_in_torch_and_no_gradient():
    case = AttentionCase(2, mask="padding")  # the first sample is all padding
    tensors = attention_oracle.make_tensors(case)
    assert tensors.mask is not None
    torchs_own = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors.mask)
    lowest = torch.zeros(tensors.mask.shape, dtype=torch.float64).masked_fill(
        ~tensors.mask, torch.finfo(torch.float64).min
    )
    expected = attention_oracle.oracle(case, tensors)
    assert not torchs_own[0].any()
    assert not any(tensor[0].any() for tensor in expected)

    def body(comm):
        axis = threads.make_axis(comm)
        found = [
            attention_oracle.run_on_axis(case, tensors._replace(mask=mask), axis) for mask in (tensors.mask, lowest)
        ]
        return max(attention_oracle.deviation(each, expected, axis.local_token_ranges(case.length)) for each in found)

    assert max(threads.run(2, body)) <= TOLERANCE


# ---- what is sent and computed ---------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["all", "grouped", "narrow V"])
@pytest.mark.parametrize(("size", "ring", "ulysses"), [
    *itertools.product((2, 4), RINGS, (1,)), (4, "zigzag", 2), (4, "zigzag", 4), (6, "gather", 3),
])  # fmt: skip
def test_a_layer_sends_six_times_its_local_k_per_hop(size, ring, ulysses, heads):
    case = AttentionCase(size, ring, ulysses, causal=True, heads=heads)
    tensors = attention_oracle.make_tensors(case)

    def body(comm):
        axis = threads.make_axis(comm, ring, ulysses)
        attention_oracle.run_on_axis(case, tensors, axis)
        return axis.ring_group.meter.sent_bytes / torch.float64.itemsize  # of both groups

    queries, keys, value_size = (number * ulysses for number in HEADS[heads])
    layer = AttentionSize(BATCH, case.length, queries, HEAD_SIZE, keys, value_size // ulysses)
    assert set(threads.run(size, body)) == {attention_sent_elements(layer, size, ulysses=ulysses)}
    if heads == "all" and ulysses == 1:
        assert (
            attention_sent_elements(layer, size) == 6 * (size - 1) * BATCH * (queries * HEAD_SIZE) * case.length / size
        )


def test_a_key_mask_is_sent_in_the_message_of_its_keys():
    case = AttentionCase(4, mask="padding")

    def body(comm):
        axis = threads.make_axis(comm)
        ring, messages = cast(MessageChannel, axis.ring_group), []
        shift = ring.shift
        ring.shift = lambda flat, tag: (messages.append(flat.numel()), shift(flat, tag))[1]
        attention_oracle.run_on_axis(case, attention_oracle.make_tensors(case), axis)
        return messages

    pair = 2 * BATCH * HEADS["all"].num_kv * attention_oracle.LOCAL_LENGTH * HEAD_SIZE
    with_mask = pair + BATCH * attention_oracle.LOCAL_LENGTH
    assert threads.run(4, body) == [[with_mask] * 3 + [with_mask, *[with_mask, pair] * 2, pair]] * 4


@pytest.mark.parametrize("transport", ["messages", "shared"])
def test_every_rank_computes_as_many_scores_as_planned_and_zigzag_balances_them(monkeypatch, transport):
    done = [0] * 4
    index = {}

    def counting(compute):
        def counted(block, *whole):
            rows, keys = block.q.shape[-2], block.k.shape[-2]
            scores = rows * (rows + 1) // 2 if block.is_causal else rows * keys
            done[index[threading.get_ident()]] += scores
            return compute(block, *whole)

        return counted

    monkeypatch.setattr(kernels, "forward", counting(kernels.forward))
    monkeypatch.setattr(kernels, "backward", counting(kernels.backward))
    slowest = {}
    for ring in ("plain", "zigzag", "gather"):
        done[:] = [0] * 4
        case = AttentionCase(4, ring, causal=True)

        def body(comm, case=case):
            index[threading.get_ident()] = comm.rank
            attention_oracle.run_on_axis(
                case, attention_oracle.make_tensors(case), threads.make_axis(comm, case.ring, transport=transport)
            )

        threads.run(4, body)
        assert done == [2 * scores for scores in scores_per_index(ContextSpec(4, ring), case.length, causal=True)]
        slowest[ring] = max(done)
    assert slowest["zigzag"] == slowest["gather"]
    # 1.75 for long sequences; a sequence of 16 has a thick diagonal.
    assert slowest["plain"] / slowest["zigzag"] == pytest.approx(1.75, rel=0.06)


def test_the_trace_shows_communication_overlapped_with_computation(monkeypatch):
    computed = []

    def timed(compute):
        def run(*given):
            begin = time.monotonic_ns()
            found = compute(*given)
            computed.append((threading.get_ident(), begin, time.monotonic_ns()))
            return found

        return run

    monkeypatch.setattr(kernels, "forward", timed(kernels.forward))
    monkeypatch.setattr(kernels, "backward", timed(kernels.backward))
    case = AttentionCase(4, causal=True)

    def body(comm):
        axis, recording = threads.make_axis(comm), SpanRecorder()
        axis.ring_group.meter.recorder = recording
        attention_oracle.run_on_axis(case, attention_oracle.make_tensors(case), axis)
        return threading.get_ident(), recording.spans

    for rank, spans in threads.run(4, body):
        sent = [span for span in spans if span.lane == SEND_LANE]
        overlapped = [any(who == rank and span.start < begin and stop < span.stop for who, begin, stop in computed)
                  for span in sent]  # fmt: skip
        # K and V, in forward and in backward, and their gradients, whose last hop overlaps with nothing.
        assert {span.name for span in sent} == {RING_SPAN}
        assert (len(sent), sum(overlapped)) == (9, 8)


@pytest.mark.parametrize("ring", RINGS)
def test_messages_and_shared_memory_give_the_same_bits(ring):
    case = AttentionCase(4, ring, causal=True, heads="grouped", dtype=torch.float32)
    tensors = attention_oracle.make_tensors(case)
    by_transport = [
        threads.run(
            4,
            lambda comm, transport=transport: attention_oracle.run_on_axis(
                case, tensors, threads.make_axis(comm, ring, transport=transport)
            ),
        )
        for transport in ("messages", "shared")
    ]
    for one, other in zip(*by_transport, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

"""Laws of attention within packed documents; ranks are threads."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.axes.context.rules.layout import RINGS, token_positions
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.document_mask import DocumentMask
from fourfold.testing import threads
from fourfold.words.errors import TrainingError
from tests import attention_oracle
from tests.attention_oracle import BATCH, TOLERANCE, AttentionCase, AttentionResult


def starts_of(lengths):
    """The document starts of a row of documents of these lengths."""
    starts, begin = [], 0
    for length in lengths:
        starts += [begin] * length
        begin += length
    return starts


def documents(length):
    """Lengths of documents that fill a row."""
    cuts = st.sets(st.integers(1, length - 1), max_size=length - 1).map(sorted)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, length], strict=True)])


def dense(starts):
    """Which keys each query may attend to: bool [B, 1, L, L]."""
    tokens = torch.arange(starts.shape[1])
    return ((tokens >= starts[..., None]) & (tokens <= tokens[:, None]))[:, None]


def run(case, tensors, starts, group, mine):
    """Output and gradients of some tokens."""
    q, k, v = (tensor[:, :, mine].clone().requires_grad_() for tensor in tensors[:3])
    mask, gqa = DocumentMask(starts[:, mine]), q.shape[1] != k.shape[1]
    attend = F.scaled_dot_product_attention
    if group is not None:
        attend = functools.partial(context_attention, group=group, dropout=case.dropout_args)
        out = attend(q, k, v, mask=mask, enable_gqa=gqa)
    else:
        out = attend(q, k, v, attn_mask=mask, enable_gqa=gqa)
    out.backward(tensors.grad_out[:, :, mine])
    return AttentionResult(out.detach(), *(tensor.grad for tensor in (q, k, v)))


LAYOUTS = [(1, "zigzag", 1), (2, "zigzag", 2), (4, "zigzag", 2), (4, "plain", 2), *((3, ring, 1) for ring in RINGS)]


@pytest.mark.parametrize(("size", "ring", "ulysses"), LAYOUTS)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_attention_on_any_ring_is_causal_attention_within_documents(size, ring, ulysses, data):
    heads, dropout = data.draw(st.sampled_from(["all", "grouped", "narrow V"])), data.draw(st.sampled_from([0.0, 0.4]))
    case = AttentionCase(size, ring, ulysses, heads=heads, dropout=dropout)
    rows = [starts_of(data.draw(documents(case.length))) for _ in range(data.draw(st.sampled_from([BATCH, 1])))]
    starts = torch.tensor(rows)
    tensors = attention_oracle.make_tensors(case)
    expected = attention_oracle.oracle(case, tensors._replace(mask=dense(starts)))

    def body(comm):
        group = threads.make_axis(comm, case.ring, case.ulysses)
        ranges = group.local_token_ranges(case.length)
        found = run(case, tensors, starts, group, torch.tensor(token_positions(ranges)))
        return attention_oracle.deviation(found, expected, ranges)

    assert max(threads.run(size, body)) <= TOLERANCE


def test_torchs_function_takes_the_mask_without_ranks():
    case = AttentionCase(3, heads="grouped")
    tensors, starts = attention_oracle.make_tensors(case), torch.tensor([starts_of([1, 4, 7]), starts_of([9, 2, 1])])
    starts = torch.nn.functional.pad(starts, (0, case.length - starts.shape[1]), value=9)[:, : case.length]
    starts[0, 12:], starts[1, 12:] = 12, 12
    expected = attention_oracle.oracle(case, tensors._replace(mask=dense(starts)))
    found = run(case, tensors, starts, None, torch.arange(case.length))
    assert attention_oracle.deviation(found, expected, ((0, case.length),)) <= TOLERANCE


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ([[0, 0, 1, 1]], "token 2: document start 1"),
        ([[1, 1, 2, 3]], "token 0: document start 1"),
        ([[0, 1, 0, 0]], "token 2: document start 0"),
        ([[0, 0, -1, 3]], "token 2: document start -1"),
        ([[0, 0, 0]], r"document starts \[1, 3\] .* \[2 or 1, 4\]"),
        ([0, 0, 0, 0], r"torch.int64 \[4\]"),
        ([[0.0, 0.0, 0.0, 0.0]], r"torch.float32 \[1, 4\]"),
    ],
)
def test_starts_that_are_no_documents_are_refused(starts, text):
    q = torch.randn(2, 1, 4, 8)
    with pytest.raises(TrainingError, match="(?s)" + text.replace(" .* ", ".*")):
        F.scaled_dot_product_attention(q, q, q, attn_mask=DocumentMask(torch.tensor(starts)))


def test_no_score_of_two_documents_is_computed_and_no_square_mask_is_made():
    length, num_documents = 2**15, 2**9
    q = torch.randn(1, 1, length, 8)  # a square mask would take 1 GiB, and as a number for each score 4 GiB
    starts = torch.arange(length)[None] // (length // num_documents) * (length // num_documents)
    with torch.profiler.profile(profile_memory=True) as profile:
        F.scaled_dot_product_attention(q, q, q, attn_mask=DocumentMask(starts))
    largest = max(event.cpu_memory_usage for event in profile.events() or ())
    assert largest < 64 * 2**20

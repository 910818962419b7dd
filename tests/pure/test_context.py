"""Laws of the context axis: tokens, tiles, work and sent elements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.context.rules.layout import (
    RINGS,
    AttentionSize,
    ContextSpec,
    attention_sent_elements,
    heads_problem,
    scores_per_index,
    tiles,
    token_positions,
)
from fourfold.plan.plan import Plan
from fourfold.words.errors import PlanError


@st.composite
def layouts(draw):
    """A legal (length, spec)."""
    size = draw(st.integers(1, 12))
    ulysses = draw(st.sampled_from([u for u in range(1, size + 1) if size % u == 0]))
    spec = ContextSpec(size, draw(st.sampled_from(RINGS)), ulysses)
    return draw(st.integers(1, 5)) * spec.length_divisor, spec


@given(layouts())
def test_every_token_is_on_one_rank_and_all_ranks_hold_equally_many(layout):
    length, spec = layout
    held = [token_positions(spans) for spans in spec.token_ranges(length)]
    assert sorted(token for tokens in held for token in tokens) == list(range(length))
    assert {len(tokens) for tokens in held} == {length // spec.size}
    assert all(tokens == sorted(tokens) for tokens in held)


@given(layouts())
def test_a_ulysses_group_holds_the_tokens_of_one_ring_index(layout):
    length, spec = layout
    held = [token_positions(spans) for spans in spec.token_ranges(length)]
    for ring_index, spans in enumerate(spec.ring_ranges(length)):
        ranks = range(ring_index * spec.ulysses, (ring_index + 1) * spec.ulysses)
        assert [token for rank in ranks for token in held[rank]] == token_positions(spans)


@given(layouts(), st.booleans(), st.booleans())
def test_tiles_cover_every_score_once_and_nothing_that_is_masked_out(layout, causal, gathers):
    length, spec = layout
    ring_ranges = spec.ring_ranges(length)
    key_ranges = [tuple(sorted(span for spans in ring_ranges for span in spans))] if gathers else ring_ranges
    for spans in ring_ranges:
        query_positions, seen = token_positions(spans), []
        for keys in key_ranges:
            key_positions = token_positions(keys)
            for tile in tiles(spans, keys, causal=causal):
                pairs = [
                    (query_positions[row], key_positions[column])
                    for row in range(*tile.queries)
                    for column in range(*tile.keys)
                    if not tile.causal or column - tile.keys[0] <= row - tile.queries[0]
                ]
                assert len(pairs) == tile.num_scores
                seen += pairs
        expected = [(row, column) for row in query_positions for column in range(length) if not causal or column <= row]
        assert sorted(seen) == expected


@pytest.mark.parametrize(("size", "ratio"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_zigzag_halves_the_work_of_the_slowest_rank_of_a_causal_ring(size, ratio):
    length = size * 4096
    plain, zigzag = (scores_per_index(ContextSpec(size, ring), length, causal=True) for ring in ("plain", "zigzag"))
    assert sum(plain) == sum(zigzag) == length * (length + 1) // 2
    assert max(plain) / max(zigzag) == pytest.approx(ratio, rel=1e-3)
    assert max(zigzag) == min(zigzag)


def test_every_hop_of_a_zigzag_ring_costs_about_the_same():
    ring_ranges = ContextSpec(4).ring_ranges(64)
    for query_positions in ring_ranges:
        hops = [sum(tile.num_scores for tile in tiles(query_positions, keys, causal=True)) for keys in ring_ranges]
        assert sorted(set(hops)) == [128, 136]  # half of 16 · 16; a rank's own block has the diagonal too


def test_attention_sends_the_elements_given_in_the_papers():
    layer = AttentionSize(batch=2, length=1024, num_heads=8, head_size=64)
    hidden = 8 * 64
    assert attention_sent_elements(layer, 4) == 6 * 3 * 2 * hidden * 1024 / 4
    assert attention_sent_elements(layer, 1) == 0
    # K and V of two of eight heads.
    assert attention_sent_elements(layer._replace(num_kv_heads=2), 4) == attention_sent_elements(layer, 4) / 4
    # All of Q, K, V, O and their gradients, except what stays on the rank.
    assert attention_sent_elements(layer, 4, ulysses=4) == 8 * 2 * hidden * 1024 / 4 * 3 / 4


@given(layouts(), st.integers(1, 10_000))
def test_an_indivisible_length_is_refused_and_valid_lengths_suggested(layout, length):
    _, spec = layout
    problem, padded = spec.length_problem(length), spec.padded_length(length)
    assert 0 <= padded - length < spec.length_divisor
    assert spec.length_problem(padded) is None
    assert (problem is None) == (padded == length)
    if problem is not None:
        assert f" {padded}" in problem.attempt
        with pytest.raises(PlanError, match=f"sequence length {length}"):
            spec.token_ranges(length)


def test_the_plain_ring_is_suggested_if_the_length_allows_it():
    problem = ContextSpec(16).length_problem(6000)
    assert problem is not None
    assert problem.need == "a length divisible by 32 (zigzag)"
    assert problem.attempt == 'length 5984 or 6016, or ring = "plain"'
    assert 'ring = "plain"' not in ContextSpec(16).length_problem(6001).attempt  # type: ignore[union-attr]


@pytest.mark.parametrize(("heads", "kv_heads", "works"), [(12, 12, "1 or 2 or 3 or 4 or 6 or 12"), (32, 8, "1 or 2")])
def test_indivisible_heads_are_refused_and_valid_ulysses_sizes_suggested(heads, kv_heads, works):
    problem = heads_problem(heads, kv_heads, 5)
    assert problem is not None
    assert problem.attempt.startswith(f"ulysses = {works}")
    assert heads_problem(heads, kv_heads, 2) is None
    assert heads_problem(32, 8, 16) is not None


def test_ulysses_must_divide_cp():
    with pytest.raises(PlanError, match=r"ulysses = 2, cp = 1 .*need ulysses to divide cp .*try ulysses = 1"):
        Plan(ulysses=2)
    assert Plan(ring="rsa").ring == "rsa"

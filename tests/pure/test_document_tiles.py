"""Laws of the tiles of packed documents."""

from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.context.rules.document_tiles import DocumentSpan, document_tiles
from fourfold.axes.context.rules.layout import RINGS, ContextSpec, token_positions


@st.composite
def packed_rows(draw):
    """A way to hold a row, and the start of the document of each of its tokens."""
    ring, size = draw(st.sampled_from(RINGS)), draw(st.integers(1, 4))
    spec = ContextSpec(size, ring)
    length = spec.length_divisor * draw(st.integers(1, 6))
    begins = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    starts = [0]
    for token in range(1, length):
        starts.append(token if begins[token] else starts[-1])
    return spec, starts


@given(packed_rows())
def test_tiles_hold_each_pair_of_a_query_and_an_earlier_token_of_its_document_once(row):
    spec, starts = row
    by_index = spec.token_ranges(len(starts))
    found = []
    for queries in by_index:
        rows = token_positions(queries)
        for keys in by_index:
            columns = token_positions(keys)
            for tile in document_tiles(queries, keys, spans_of([starts[token] for token in rows])):
                height, width = (stop - start for start, stop in (tile.queries, tile.keys))
                assert height > 0
                assert width > 0
                assert height == width or not tile.causal
                found += [
                    (rows[tile.queries[0] + down], columns[tile.keys[0] + right])
                    for down in range(height)
                    for right in range(down + 1 if tile.causal else width)
                ]
    assert sorted(found) == [(query, key) for query, start in enumerate(starts) for key in range(start, query + 1)]


def spans_of(starts):
    spans: list[DocumentSpan] = []
    for start in starts:
        if spans and spans[-1].start == start:
            spans[-1] = DocumentSpan(start, spans[-1].num_tokens + 1)
        else:
            spans.append(DocumentSpan(start, 1))
    return spans

"""The sequence axis: which tokens each rank keeps, what it computes of attention, and what it sends.

span    [start, stop) of the whole sequence
ring    how the ranks attend to each other's tokens: one of RINGS
order   which spans a rank keeps: `plain` is one, `zigzag` one from each half, so that causal work is equal
tile    a rectangle of scores that a rank computes at once: [start, stop) of its queries × [start, stop) of some keys
Law: the ranks' spans tile the sequence; a rank keeps its own in ascending order, so the causal mask of its own
queries and keys is the ordinary one.

sp = ulysses × ring size. The index on the axis is ring index · ulysses + ulysses index; the `ulysses` neighbours
share out the tokens of one place on the ring, and the heads while they attend.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.words.errors import PlanError, Problem

# ring: order of its tokens. "gather" is no ring: keys and values are brought to all at once.
TOKEN_ORDERS = {"zigzag": "zigzag", "plain": "plain", "rsa": "plain", "gather": "zigzag"}
RINGS = tuple(TOKEN_ORDERS)

TokenRange = tuple[int, int]
TokenRanges = tuple[TokenRange, ...]


class Tile(NamedTuple):
    """Queries [start, stop) by keys [start, stop), in local order. `causal`: a square on the diagonal."""

    queries: TokenRange
    keys: TokenRange
    causal: bool

    @property
    def num_scores(self) -> int:
        """How many pairs of query and key are looked at."""
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


# ---- which tokens ----------------------------------------------------------------------------------


def ring_size(size: int, ulysses: int) -> int:
    """Places on the ring of an axis of `size` ranks. Raises PlanError unless `ulysses` divides it."""
    problem = ulysses_problem(size, ulysses)
    if problem is not None:
        raise PlanError(problem, where="the plan")
    return size // ulysses


def length_divisor(size: int, ring: str = "zigzag", ulysses: int = 1) -> int:
    """What the length of a sequence must be divisible by."""
    places = ring_size(size, ulysses)
    pieces = 2 if TOKEN_ORDERS[ring] == "zigzag" and places > 1 else 1
    return places * math.lcm(pieces, ulysses)


def token_ranges(length: int, size: int, ring: str = "zigzag", ulysses: int = 1) -> tuple[TokenRanges, ...]:
    """The spans that each of `size` indices on the axis keeps, in its local order.

    Raises PlanError where the length does not divide.
    """
    problem = length_problem(length, size, ring, ulysses)
    if problem is not None:
        raise PlanError(problem, where="the plan")
    places = ring_size(size, ulysses)
    if TOKEN_ORDERS[ring] == "plain" or places == 1:
        kept = [(place,) for place in range(places)]
        width = length // places
    else:
        kept = [(place, 2 * places - 1 - place) for place in range(places)]
        width = length // (2 * places)
    around = [tuple((chunk * width, (chunk + 1) * width) for chunk in those) for those in kept]
    local = length // size
    return tuple(_sub_ranges(spans, index * local, (index + 1) * local) for spans in around for index in range(ulysses))


def _sub_ranges(spans: TokenRanges, start: int, stop: int) -> TokenRanges:
    """[start, stop) of the tokens of `spans`, as spans."""
    found, passed = [], 0
    for first, last in spans:
        begin, end = max(start - passed, 0), min(stop - passed, last - first)
        if begin < end:
            found.append((first + begin, first + end))
        passed += last - first
    return tuple(found)


def length_problem(length: int, size: int, ring: str = "zigzag", ulysses: int = 1) -> Problem | None:
    """What is wrong with a sequence of this length, if anything, and the nearest lengths that work."""
    need = length_divisor(size, ring, ulysses)
    if length > 0 and length % need == 0:
        return None
    below, above = length // need * need, (length // need + 1) * need
    attempt = f"length {above}" if below <= 0 else f"length {below} or {above}"
    if length > 0 and TOKEN_ORDERS[ring] == "zigzag" and length % length_divisor(size, "plain", ulysses) == 0:
        attempt += ', or ring = "plain"'
    return Problem(f"sp = {size}, sequence length {length}", f"a length divisible by {need} ({ring})", attempt)


def ulysses_problem(size: int, ulysses: int) -> Problem | None:
    """What is wrong with exchanging heads among `ulysses` of `size` ranks, if anything."""
    if size % ulysses == 0:
        return None
    works = [str(u) for u in range(1, size + 1) if size % u == 0]
    return Problem(f"ulysses = {ulysses}, sp = {size}", "ulysses to divide sp", f"ulysses = {' or '.join(works)}")


def heads_problem(num_heads: int, num_kv_heads: int, ulysses: int) -> Problem | None:
    """What is wrong with sharing out these heads among `ulysses` ranks, if anything."""
    if num_heads % ulysses == 0 and num_kv_heads % ulysses == 0:
        return None
    both = math.gcd(num_heads, num_kv_heads)
    works = [str(u) for u in range(1, both + 1) if both % u == 0]
    return Problem(
        f"ulysses = {ulysses}, {num_heads} heads, {num_kv_heads} of them of keys and values",
        "both divisible by ulysses",
        f"ulysses = {' or '.join(works)}",
    )


# ---- what is computed ------------------------------------------------------------------------------


def tiles(queries: TokenRanges, keys: TokenRanges, *, causal: bool) -> tuple[Tile, ...]:
    """The tiles of the queries of some spans by the keys of others, both in their local order; none that is masked out.

    The spans of one sequence are cut at the same places: two of them are the same or do not meet.
    """
    whole = _num_tokens(queries), _num_tokens(keys)
    if not causal:
        return (Tile((0, whole[0]), (0, whole[1]), False),)
    if queries == keys:
        return (Tile((0, whole[0]), (0, whole[1]), True),)
    found: list[Tile] = []
    for span, rows in _local_ranges(queries):
        before = sum(stop - start for start, stop in keys if stop <= span[0])
        if before:
            last = found[-1] if found else None
            if last is not None and last.keys == (0, before) and not last.causal and last.queries[1] == rows[0]:
                found[-1] = Tile((last.queries[0], rows[1]), (0, before), False)
            else:
                found.append(Tile(rows, (0, before), False))
        found += [Tile(rows, columns, True) for other, columns in _local_ranges(keys) if other == span]
    return tuple(found)


def _num_tokens(spans: TokenRanges) -> int:
    return sum(stop - start for start, stop in spans)


def _local_ranges(spans: TokenRanges) -> list[tuple[TokenRange, TokenRange]]:
    """Each span, and where it lies in local order."""
    found, passed = [], 0
    for start, stop in spans:
        found.append(((start, stop), (passed, passed + stop - start)))
        passed += stop - start
    return found


def scores_per_index(length: int, size: int, ring: str = "zigzag", *, causal: bool) -> tuple[int, ...]:
    """Scores that each place of a ring looks at, in one head of one sequence."""
    spans = token_ranges(length, size, ring)
    return tuple(sum(tile.num_scores for keys in spans for tile in tiles(mine, keys, causal=causal)) for mine in spans)


# ---- what is sent ----------------------------------------------------------------------------------


class AttentionSize(NamedTuple):
    """One layer's attention over a whole sequence. `value_size` is a head's size of V (that of K where None)."""

    batch: int
    length: int
    num_heads: int
    head_size: int
    num_kv_heads: int | None = None
    value_size: int | None = None


def attention_sent_elements(layer: AttentionSize, size: int, *, ulysses: int = 1) -> float:
    """Elements that each rank sends in forward and backward of a layer.

    Around a ring of N places K and V travel N−1 hops in forward, and again in backward, with dK and dV as far: with
    hidden size H, 6 (N−1) · B · H · L/N. Exchanging heads, all of Q, K, V, O and their gradients move once, but for
    the part that stays.
    """
    places = ring_size(size, ulysses)
    kv_heads = layer.num_kv_heads or layer.num_heads
    value_size = layer.value_size or layer.head_size
    tokens = layer.batch * layer.length / size
    pair = tokens * kv_heads * (layer.head_size + value_size)
    query_and_out = tokens * layer.num_heads * (layer.head_size + value_size)
    around = 3 * (places - 1) * pair
    exchanged = 2 * (pair + query_and_out) * (ulysses - 1) / ulysses
    return around + exchanged


def padded_length(length: int, size: int, ring: str = "zigzag", ulysses: int = 1) -> int:
    """The least length that divides and is not below this one: what a sequence is padded to."""
    need = length_divisor(size, ring, ulysses)
    return -(-length // need) * need


def token_positions(spans: Sequence[TokenRange]) -> list[int]:
    """The places in the whole sequence of a rank's tokens, in local order."""
    return [token for start, stop in spans for token in range(start, stop)]

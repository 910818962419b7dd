"""The context axis: which tokens each rank holds, which attention scores it computes, and what it sends.

token range  [start, stop) of the whole sequence
ring         how ranks attend to tokens of other ranks: one of RINGS
token order  which token ranges a rank holds: `plain` is one, `zigzag` one from each half, so that causal work is equal
tile         a rectangle of scores that a rank computes at once: [start, stop) of its queries × [start, stop) of keys
Law: the token ranges of the ranks tile the sequence; a rank holds its own in ascending order, so the causal mask among
its own tokens is the usual one.

cp = ulysses × ring size. The index on the axis is ring index · ulysses + ulysses index. The `ulysses` consecutive ranks
at one ring index split its tokens, and split the heads during attention.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.words.errors import PlanError, Problem

# ring -> order of its tokens. "gather" is not a ring: it all-gathers keys and values.
TOKEN_ORDERS = {"zigzag": "zigzag", "plain": "plain", "rsa": "plain", "gather": "zigzag"}
RINGS = tuple(TOKEN_ORDERS)
DP_INSTEAD = "cp = 1, with dp instead"
"""What to try with a model whose tokens cannot be sharded."""

TokenRange = tuple[int, int]
TokenRanges = tuple[TokenRange, ...]


class Tile(NamedTuple):
    """Queries [start, stop) × keys [start, stop), in local order. `causal`: a square on the diagonal."""

    queries: TokenRange
    keys: TokenRange
    causal: bool

    @property
    def num_scores(self) -> int:
        """The number of (query, key) pairs that are computed."""
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


# ---- which tokens ----------------------------------------------------------------------------------


class ContextSpec(NamedTuple):
    """How `size` ranks hold one sequence. `ring` is one of RINGS; `ulysses` divides `size`."""

    size: int
    ring: str = "zigzag"
    ulysses: int = 1

    @property
    def ring_size(self) -> int:
        return self.size // self.ulysses

    @property
    def is_zigzag(self) -> bool:
        """Whether each ring index holds a token range from either half of the sequence."""
        return TOKEN_ORDERS[self.ring] == "zigzag" and self.ring_size > 1

    @property
    def length_divisor(self) -> int:
        """The number that must divide the length of a sequence."""
        return self.ring_size * math.lcm(2 if self.is_zigzag else 1, self.ulysses)

    def length_problem(self, length: int) -> Problem | None:
        """What is wrong with a sequence of this length, with the nearest lengths that work; None if nothing is."""
        need = self.length_divisor
        if length > 0 and length % need == 0:
            return None
        below, above = length // need * need, (length // need + 1) * need
        attempt = f"length {above}" if below <= 0 else f"length {below} or {above}"
        if self.is_zigzag and length > 0 and length % self._replace(ring="plain").length_divisor == 0:
            attempt += ', or ring = "plain"'
        got = f"cp = {self.size}, sequence length {length}"
        return Problem(got, f"a length divisible by {need} ({self.ring})", attempt)

    def padded_length(self, length: int) -> int:
        """The length to which a sequence is padded: the least one that is divisible and at least `length`."""
        return -(-length // self.length_divisor) * self.length_divisor

    def ring_ranges(self, length: int) -> tuple[TokenRanges, ...]:
        """The token ranges that each ring index holds, its `ulysses` ranks together, in local order.

        Raises PlanError for a length that is not divisible.
        """
        if problem := self.length_problem(length):
            raise PlanError(problem, where="the plan")
        if self.is_zigzag:
            num_chunks = 2 * self.ring_size
            chunks = [(index, num_chunks - 1 - index) for index in range(self.ring_size)]
        else:
            num_chunks = self.ring_size
            chunks = [(index,) for index in range(self.ring_size)]
        size = length // num_chunks
        return tuple(tuple((chunk * size, (chunk + 1) * size) for chunk in each) for each in chunks)

    def token_ranges(self, length: int) -> tuple[TokenRanges, ...]:
        """The token ranges that each index on the axis holds, in local order.

        Raises PlanError for a length that is not divisible.
        """
        local_length = length // self.size
        return tuple(
            sub_ranges(ranges, index * local_length, (index + 1) * local_length)
            for ranges in self.ring_ranges(length)
            for index in range(self.ulysses)
        )


def sub_ranges(ranges: TokenRanges, start: int, stop: int) -> TokenRanges:
    """Tokens [start, stop) in the local order of `ranges`, as token ranges."""
    cut = [(first - low, max(start, low), min(stop, high)) for (first, _), (low, high) in local_ranges(ranges)]
    return tuple((offset + begin, offset + end) for offset, begin, end in cut if begin < end)


def ulysses_problem(size: int, ulysses: int) -> Problem | None:
    """What is wrong with exchanging heads among `ulysses` of `size` ranks; None if nothing is."""
    if size % ulysses == 0:
        return None
    divisors = [str(u) for u in range(1, size + 1) if size % u == 0]
    return Problem(f"ulysses = {ulysses}, cp = {size}", "ulysses to divide cp", f"ulysses = {' or '.join(divisors)}")


def heads_problem(num_heads: int, num_kv_heads: int, ulysses: int) -> Problem | None:
    """What is wrong with splitting these heads among `ulysses` ranks; None if nothing is."""
    if num_heads % ulysses == 0 and num_kv_heads % ulysses == 0:
        return None
    common = math.gcd(num_heads, num_kv_heads)
    divisors = [str(u) for u in range(1, common + 1) if common % u == 0]
    return Problem(
        f"ulysses = {ulysses}, {num_heads} heads, {num_kv_heads} heads of keys and values",
        "both divisible by ulysses",
        f"ulysses = {' or '.join(divisors)}",
    )


# ---- what is computed ------------------------------------------------------------------------------


def tiles(queries: TokenRanges, keys: TokenRanges, *, causal: bool) -> tuple[Tile, ...]:
    """The tiles of scores of the tokens in `queries` with those in `keys`, in local order, without masked tiles.

    All token ranges of a sequence are cut at the same positions: two of them are equal or disjoint.
    """
    all_queries, all_keys = (0, _num_tokens(queries)), (0, _num_tokens(keys))
    if not causal:
        return (Tile(all_queries, all_keys, False),)
    if queries == keys:
        return (Tile(all_queries, all_keys, True),)
    found: list[Tile] = []
    for query_range, rows in local_ranges(queries):
        before = sum(stop - start for start, stop in keys if stop <= query_range[0])
        if before:
            last = found[-1] if found else None
            if last is not None and last.keys == (0, before) and not last.causal and last.queries[1] == rows[0]:
                found[-1] = Tile((last.queries[0], rows[1]), (0, before), False)
            else:
                found.append(Tile(rows, (0, before), False))
        found += [Tile(rows, columns, True) for key_range, columns in local_ranges(keys) if key_range == query_range]
    return tuple(found)


def _num_tokens(ranges: TokenRanges) -> int:
    return sum(stop - start for start, stop in ranges)


def local_ranges(ranges: TokenRanges) -> list[tuple[TokenRange, TokenRange]]:
    """Every token range, and its range in local order."""
    result, passed = [], 0
    for start, stop in ranges:
        result.append(((start, stop), (passed, passed + stop - start)))
        passed += stop - start
    return result


def scores_per_index(spec: ContextSpec, length: int, *, causal: bool) -> tuple[int, ...]:
    """The number of scores that each ring index computes, for one head of one sequence."""
    ranges = spec.ring_ranges(length)
    return tuple(
        sum(tile.num_scores for keys in ranges for tile in tiles(queries, keys, causal=causal)) for queries in ranges
    )


# ---- what is sent ----------------------------------------------------------------------------------


class AttentionSize(NamedTuple):
    """The attention of one layer over a whole sequence. `value_size` is the head size of V; None: that of K."""

    batch: int
    length: int
    num_heads: int
    head_size: int
    num_kv_heads: int | None = None
    value_size: int | None = None


def attention_sent_elements(layer: AttentionSize, size: int, *, ulysses: int = 1) -> float:
    """Elements that each rank sends in forward and backward of a layer.

    On a ring of N ranks, K and V make N−1 hops in forward and again in backward, and dK and dV as many: with hidden
    size H, 6 (N−1) · B · H · L/N elements. An exchange of heads moves Q, K, V, O and their gradients once, except for
    the part that stays on the rank.
    """
    ring_length = size // ulysses
    kv_heads = layer.num_kv_heads or layer.num_heads
    value_size = layer.value_size or layer.head_size
    tokens = layer.batch * layer.length / size
    keys_values = tokens * kv_heads * (layer.head_size + value_size)
    queries_outputs = tokens * layer.num_heads * (layer.head_size + value_size)
    ring_elements = 3 * (ring_length - 1) * keys_values
    exchanged = 2 * (keys_values + queries_outputs) * (ulysses - 1) / ulysses
    return ring_elements + exchanged


def token_positions(ranges: Sequence[TokenRange]) -> list[int]:
    """The positions of a rank's tokens in the whole sequence, in local order."""
    return [token for start, stop in ranges for token in range(start, stop)]

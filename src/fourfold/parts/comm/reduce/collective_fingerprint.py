"""Calls: which collective call each rank is in, told beside what the call sums.

call   one collective call of a program: its name and its step, such as "evaluate() after step 6"; a step's call also
       carries the optimizer's options on a second line (see `parts.options`)
board  where the ranks of a host write their calls, by turns, so that a rank that is ahead overwrites nothing
tag    48 bits of a call's hash; as a float64 it is exact
Law: no weight is changed and nothing is returned before all ranks are known to be in the same call.
"""

import hashlib
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence

from fourfold.parts.optim.option_tracker import ABSENT, parse_options
from fourfold.words.errors import DivergenceError, Problem

CALL_BYTES = 512
POSITIONS_SEPARATOR = ", positions "  # what follows is a step's part of the feed's order: see `plan.order.Stretch`
BOARD_DEPTH = 64  # how many calls a rank may be ahead of another and still be compared: some calls wait for nobody
BOARD_BYTES = CALL_BYTES * BOARD_DEPTH


class CallBoard:
    """The calls of a host's ranks, in shared memory; `ranks` are their global ranks, `starts` their first bytes."""

    def __init__(self, mapping: mmap.mmap, starts: Sequence[int], ranks: Sequence[int]) -> None:
        self._mapping, self._starts, self._ranks = mapping, tuple(starts), tuple(ranks)

    def write(self, index: int, number: int, call: str) -> None:
        """The call of this number of the rank of this local index. Its flag is raised afterwards."""
        place = self._offset(index, number)
        self._mapping[place : place + CALL_BYTES] = encode_call(call)

    def check(self, index: int, get_counts: Callable[[], Sequence[int]]) -> None:
        """Raise DivergenceError where a rank has begun another call than this one; `counted` are calls begun by rank.

        A rank may be many calls ahead, where these do not wait for others. It has compared this one itself.
        """
        counts = get_counts()
        number = counts[index]
        calls = [self._read(peer, number) for peer in range(len(counts))]
        for peer, call in enumerate(calls):
            # Whoever has begun the last turn may by now be writing over what has just been read.
            if counts[peer] >= number and get_counts()[peer] < number + BOARD_DEPTH - 1 and call != calls[index]:
                raise self._divergence_error(number, counts)

    def _divergence_error(self, number: int, counts: Sequence[int]) -> DivergenceError:
        calls = {
            self._ranks[peer]: decode_call(self._read(peer, min(number, count))) if count else "nothing"
            for peer, count in enumerate(counts)
        }
        return divergence_error(
            calls, behind=[self._ranks[peer] for peer, count in enumerate(counts) if count < number]
        )

    def _read(self, index: int, number: int) -> bytes:
        place = self._offset(index, number)
        return self._mapping[place : place + CALL_BYTES]

    def _offset(self, index: int, number: int) -> int:
        return self._starts[index] + number % BOARD_DEPTH * CALL_BYTES


def encode_call(call: str) -> bytes:
    """CALL_BYTES bytes."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")


def decode_call(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def fingerprint(call: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little"))


def with_options(call: str, options: str) -> str:
    """The call, carrying what `parts.options.Options.text` says."""
    return f"{call}\n{options}"


SAME_OPTIONS_HINT = "the same arguments, schedule and edits of them on every rank"


def divergence_error(
    calls: Mapping[int, str], *, behind: Collection[int] = (), attempt: str = SAME_OPTIONS_HINT
) -> DivergenceError:
    """The error that says which ranks are in which call; ranks `behind` have not begun theirs yet.

    `attempt`: what to try where they are in the same call, with other options.
    """
    names, options = {}, {}
    for rank, call in calls.items():
        name, _, text = call.partition("\n")
        names[rank] = f"{name} and has come no further" if rank in behind else name
        if rank not in behind:
            options[rank] = text
    if len({names[rank] for rank in options}) == 1 and len(set(options.values())) > 1:
        return _option_divergence_error(names[next(iter(options))], options, attempt)
    rows = _group_by_text(names)
    got = "; ".join(f"{_format_ranks(ranks, 'is', 'are')} at {call}" for call, ranks in rows)
    attempt = "no step, evaluation or exchange that one rank alone does or leaves out"
    if len({name.partition(POSITIONS_SEPARATOR)[0] for name in names.values()}) == 1:
        attempt = "the same source, seed, batch_size and state on every rank, and no batch that one rank leaves out"
    return DivergenceError(Problem(got, "every rank in the same call", attempt), where="the calls of the ranks")


def _option_divergence_error(call: str, options: Mapping[int, str], attempt: str) -> DivergenceError:
    """Ranks are in the same call, with different options of the optimizer: each option that differs, and its values."""
    by_rank = {rank: parse_options(text) for rank, text in options.items()}
    need, problems = "the same options on every rank", []
    for option in dict.fromkeys(name for of in by_rank.values() for name in of):
        rows = _group_by_text({rank: of.get(option, ABSENT) for rank, of in by_rank.items()})
        if len(rows) > 1:
            told = "; ".join(f"{_format_ranks(ranks, 'has', 'have')} {values}" for values, ranks in rows)
            problems.append(Problem(f"{option}: {told}", need, attempt))
    if not problems:  # a call has no room for all: the digest at its beginning tells
        told = "; ".join(
            f"{_format_ranks(ranks, 'has', 'have')} {text.split()[0]}" for text, ranks in _group_by_text(options)
        )
        problems.append(Problem(f"options that are too long to show, by digest: {told}", need, attempt))
    return DivergenceError(problems, where=f"the options of the optimizer at {call}")


def _group_by_text(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """The ranks of each text; the fewest first: they are most likely the ones that went astray."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return sorted(found.items(), key=lambda row: (len(row[1]), row[1]))


def _format_ranks(ranks: Sequence[int], one: str, many: str) -> str:
    """`rank 1 is`, `ranks 0, 2 and 3 are`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} {many}"

"""Scalars: sums of a few float64 values over ranks; with those of the loss, ranks compare which call they are in.

kind         LOSS, GRAD_NORM, …: a rank has one sum of each kind at a time, with a flag and room of its own
call         one collective call of a program: its name and step, such as "evaluate() after step 6"; a step's call also
             carries the optimizer's options on a second line (see `optim.option_tracker`)
board        where the ranks of a host write their calls, a ring buffer in shared memory
fingerprint  48 bits of a call's hash, which a float64 holds exactly
Law: the ranks of a host add in rank order, in memory; what they have added up, hosts, or ranks without shared memory,
add up over a process group. One rank alone does neither.
Law: every rank begins the same sums in the same order. Between hosts they begin in the order of the queue, whichever is
asked for first: one rank may need the loss while it reduces gradients, another only after other scalars.
Law: no weight changes and nothing is returned before all ranks are known to be in the same call.
Law: all calls begin with an all-reduce of LOSS scalars of one length, so ranks in different calls meet in it.
The divergence report is the error that says which ranks are in which call, or have which optimizer options.
"""

import hashlib
import mmap
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.comm.collectives import Work, all_gather_rows
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.host_memory import CALL_BEGUN, SCALARS_READY, HostMemory
from fourfold.torch_kit.option_text import ABSENT, parse_options
from fourfold.words.errors import DivergenceError, Problem, TrainingError
from fourfold.words.program import LOSS
from fourfold.words.rank_groups import format_groups

NUM_LOSS_SCALARS = 10
"""The room for each kind of scalars of the world."""

# ---- divergence report -----------------------------------------------------------------------------------------------

POSITIONS_SEPARATOR = ", positions "  # a step's part of the sample order follows: see `plan.sample_order.BatchRange`


def with_options(call: str, options: str) -> str:
    """The call, with the optimizer's options as text on its second line."""
    return f"{call}\n{options}"


SAME_OPTIONS_HINT = "the same arguments, schedule and edits of them on every rank"


def divergence_error(
    calls: Mapping[int, str], *, behind: Collection[int] = (), attempt: str = SAME_OPTIONS_HINT
) -> DivergenceError:
    """The error that says which ranks are in which call. Ranks `behind` have not begun the call yet: theirs is older.

    `attempt`: what to try if ranks are in the same call with different options.
    """
    names, options = {}, {}
    for rank, call in calls.items():
        name, _, text = call.partition("\n")
        names[rank] = f"{name} and has come no further" if rank in behind else name
        if rank not in behind:
            options[rank] = text
    if len({names[rank] for rank in options}) == 1 and len(set(options.values())) > 1:
        return _option_divergence_error(names[next(iter(options))], options, attempt)
    got = format_groups({rank: f"at {name}" for rank, name in names.items()}, "is", "are")
    attempt = "no step, evaluation or exchange that only one rank does or leaves out"
    if len({name.partition(POSITIONS_SEPARATOR)[0] for name in names.values()}) == 1:
        attempt = "the same source, seed, batch_size and state on every rank, and no batch that one rank leaves out"
    return DivergenceError(Problem(got, "every rank in the same call", attempt), where="the calls of the ranks")


def _option_divergence_error(call: str, options: Mapping[int, str], attempt: str) -> DivergenceError:
    """For ranks in the same call with different optimizer options: names each option that differs, and its values."""
    by_rank = {rank: parse_options(text) for rank, text in options.items()}
    need, problems = "the same options on every rank", []
    for option in dict.fromkeys(name for values in by_rank.values() for name in values):
        shown = {rank: values.get(option, ABSENT) for rank, values in by_rank.items()}
        if len(set(shown.values())) > 1:
            problems.append(Problem(f"{option}: {format_groups(shown)}", need, attempt))
    if not problems:  # the call was too short for all options; the digest at its beginning differs
        got = format_groups({rank: text.split()[0] for rank, text in options.items()})
        problems.append(Problem(f"options that are too long to show, by digest: {got}", need, attempt))
    return DivergenceError(problems, where=f"the options of the optimizer at {call}")


# ---- over a process group ------------------------------------------------------------------------------------------


class GroupSums:
    """Sums over the ranks `members` of a communicator, this one among them."""

    def __init__(self, comm: Communicator, members: Sequence[int], purpose: str, meter: CommMeter) -> None:
        self._members, self._device, self._meter = members, comm.device, meter
        self._index = members.index(comm.rank)
        self._group = comm.get_group(members, purpose)

    def all_reduce_async(self, values: Tensor, call: str | None) -> Work:
        """Begin a sum; the result is a list. With a call: its wait raises DivergenceError if a rank is in another."""
        tensor = values.to(self._device, copy=True) if call is None else self._with_fingerprint(values, call)
        work = self._group.all_reduce(tensor)

        def wait() -> list[float]:
            with self._meter.timed():
                work.wait()
                sums = tensor.tolist()
            if call is not None and len(set(sums[NUM_LOSS_SCALARS:])) > 1:
                raise self._divergence_error(call)
            return sums[: len(values)]

        return work._replace(wait=wait)

    def _with_fingerprint(self, values: Tensor, call: str) -> Tensor:
        """One element per member behind the scalars; each fills its own, so the sum holds all fingerprints."""
        assert len(values) <= NUM_LOSS_SCALARS
        tensor = torch.zeros(NUM_LOSS_SCALARS + len(self._members), dtype=torch.float64, device=self._device)
        tensor[: len(values)] = values
        tensor[NUM_LOSS_SCALARS + self._index] = fingerprint(call)
        return tensor

    def _divergence_error(self, call: str) -> DivergenceError:
        """Raised by every member, which gather their calls for it."""
        text = torch.frombuffer(bytearray(encode_call(call)), dtype=torch.uint8).to(self._device)
        rows = all_gather_rows(self._group, text, size=len(self._members))
        texts = [decode_call(bytes(row.tolist())) for row in rows]
        return divergence_error(dict(zip(self._members, texts, strict=True)))


# ---- calls ---------------------------------------------------------------------------------------------------------

CALL_BYTES = 512
BOARD_DEPTH = 64  # how many calls a rank may run ahead and still be compared: some calls do not wait
BOARD_BYTES = CALL_BYTES * BOARD_DEPTH
DIVERGENCE_GRACE_SECONDS = 2.0


class CallBoard:
    """The calls of a host's ranks. `starts`: the byte where each rank's part begins; `ranks`: their global ranks."""

    def __init__(self, mapping: mmap.mmap, starts: Sequence[int], ranks: Sequence[int]) -> None:
        self._mapping, self._starts, self._ranks = mapping, tuple(starts), tuple(ranks)

    def write(self, index: int, number: int, call: str) -> None:
        """Write call `number` of the rank with this index on the host. The caller raises the rank's flag afterwards."""
        start = self._offset(index, number)
        self._mapping[start : start + CALL_BYTES] = encode_call(call)

    def check(self, index: int, get_counts: Callable[[], Sequence[int]]) -> None:
        """Raise DivergenceError if a rank has begun another call than rank `index`.

        `get_counts` returns how many calls each rank has begun. A rank may be many calls ahead, as some calls do not
        wait; it has compared this one itself.
        """
        counts = get_counts()
        number = counts[index]
        calls = [self._read(peer, number) for peer in range(len(counts))]
        for peer, call in enumerate(calls):
            # A rank that has begun the last call of the ring buffer may be overwriting what was just read.
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
        start = self._offset(index, number)
        return self._mapping[start : start + CALL_BYTES]

    def _offset(self, index: int, number: int) -> int:
        return self._starts[index] + number % BOARD_DEPTH * CALL_BYTES


def encode_call(call: str) -> bytes:
    """The first CALL_BYTES bytes of the call, padded with zeros."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")


def decode_call(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def fingerprint(call: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(call.encode(), digest_size=6).digest(), "little"))


class CallChecker:
    """Compares the collective calls of all ranks of the world: on the board of each host, and by fingerprints."""

    def __init__(self, host: HostMemory | None, over_group: GroupSums | None) -> None:
        self.call = ""
        """The call that this rank is in."""
        self._host, self._over_group = host, over_group
        if host is not None:
            starts = [region * host.layout.region_bytes + host.layout.board_offset for region in range(host.size)]
            self._board = CallBoard(host.mapping, starts, host.ranks)
            host.check_calls = self.check_begun

    def begin(self, call: str) -> None:
        """This rank begins a collective call. Does not wait: waiting for the LOSS scalars compares the calls."""
        self.call = call
        if self._host is not None:
            self._board.write(self._host.index, self._host.counts[CALL_BEGUN] + 1, call)
            self._host.increment(CALL_BEGUN)

    def check_same(self) -> None:
        """Wait until all ranks have begun a call. Raises DivergenceError unless it is the same one."""
        if self._host is not None:
            self._host.wait_own(CALL_BEGUN)
            self.check_begun(None)
        if self._over_group is not None:
            self._over_group.all_reduce_async(torch.zeros(0), self.call).wait()

    def check_begun(self, waited_seconds: float | None) -> None:
        """Raise DivergenceError if a rank of this host is known to be in another call. Never waits.

        What waits for other ranks calls it now and then, with the seconds waited so far: compared is once all ranks
        have begun this call, or after a grace period in which late ranks may still begin it. So the error names the
        call of every rank that is merely late. None: compare now. What ranks without shared memory are in is known only
        once they have met.
        """
        host = self._host
        if host is None:
            return
        is_grace_period = waited_seconds is not None and waited_seconds <= DIVERGENCE_GRACE_SECONDS
        if is_grace_period and host.min(CALL_BEGUN) < host.counts[CALL_BEGUN]:
            return
        self._board.check(host.index, lambda: host.read_all(CALL_BEGUN))


# ---- scalars -------------------------------------------------------------------------------------------------------


class _QueuedSum(NamedTuple):
    """A sum that this rank has begun, of `length` values. A rank whose flag has reached `number` has begun it too."""

    kind: int
    number: int
    length: int


class ScalarReducer:
    """Sums over some ranks, of several kinds.

    capacity    the room for values of one kind; 0: of a transport that is asked for no scalars
    host        the memory of this host's ranks, if they share it
    over_group  over hosts, or over ranks that share no memory; None if there are no others
    calls       compared with the LOSS; None for other scalars than those of the world
    """

    def __init__(
        self,
        capacity: int,
        host: HostMemory | None = None,
        over_group: GroupSums | None = None,
        calls: CallChecker | None = None,
    ) -> None:
        self._capacity, self._host, self._over_group, self._calls = capacity, host, over_group, calls
        self._rows = [] if host is None else [host.scalars(region) for region in range(host.size)]
        self._queue: deque[_QueuedSum] = deque()
        """Sums that not all ranks of the host are known to have begun."""
        self._sums: dict[int, Work] = {}

    def all_reduce_async(self, kind: int, values: Tensor) -> None:
        """Begin to sum the values [n]. Does not wait. Raises TrainingError for more values than there is room for."""
        if values.numel() > self._capacity:  # they would overwrite what lies behind it
            raise TrainingError(Problem(f"{values.numel()} scalars in one sum", f"at most {self._capacity}"))
        if self._host is None:
            self._begin_over_group(kind, values)
            return
        flag = SCALARS_READY + kind
        self._rows[self._host.index][kind, self._host.counts[flag] % 2, : len(values)] = values
        self._host.increment(flag)
        self._queue.append(_QueuedSum(kind, self._host.counts[flag], len(values)))

    def is_ready(self, kind: int) -> bool:
        """Whether `wait` would return at once; False if no sum of this kind has begun. Never waits."""
        while self._host is not None and self._queue and self._has_begun(self._host, self._queue[0]):
            self._add_up_first()
        return kind in self._sums and self._sums[kind].is_completed()

    @staticmethod
    def _has_begun(host: HostMemory, queued: _QueuedSum) -> bool:
        return host.min(SCALARS_READY + queued.kind) >= queued.number

    def wait(self, kind: int) -> list[float]:
        """The sums. LOSS, over the world: raises DivergenceError if calls differ."""
        while self._host is not None and kind not in self._sums:
            first = self._queue[0]
            self._host.wait(SCALARS_READY + first.kind, first.number)
            self._add_up_first()
        if self._calls is not None and kind == LOSS:
            self._calls.check_begun(None)
        return self._sums.pop(kind).wait()

    def _add_up_first(self) -> None:
        """Add up the first sum of the queue, which all ranks of the host have begun."""
        kind, number, length = self._queue.popleft()
        rows = [values[kind, (number - 1) % 2, :length] for values in self._rows]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        self._begin_over_group(kind, total)

    def _begin_over_group(self, kind: int, total: Tensor) -> None:
        if self._over_group is None:
            self._sums[kind] = Work(total.tolist)
        else:
            assert kind not in self._sums, "the sum of this kind before it has not been waited for"
            call = self._calls.call if self._calls is not None and kind == LOSS else None
            self._sums[kind] = self._over_group.all_reduce_async(total, call)


class WorldChannel(NamedTuple):
    """What all ranks of the job do together."""

    scalars: ScalarReducer
    calls: CallChecker


def world_channel(host: HostMemory | None, over_group: GroupSums | None) -> WorldChannel:
    """Of the ranks of a host, if they share memory, and of the group of hosts or ranks. Neither: of one rank alone."""
    calls = CallChecker(host, over_group)
    return WorldChannel(ScalarReducer(NUM_LOSS_SCALARS, host, over_group, calls), calls)

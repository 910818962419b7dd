"""Rendezvous: proves that a program of the pipeline axis ends where sends block, and makes one that does.

rendezvous  a send ends only once its receive has been posted, as over NCCL or with large messages over MPI; whoever
            waits for it does nothing else
entry       what an index posts at one time: a compute action, a message, or an exchange
exchange    messages that are posted together; it ends when all of them have
grid        the program's lines, with a mark at the entry at which each index is stuck
Law: a program that ends under rendezvous ends with every transport, at any speed of the ranks.
"""

from collections import deque
from collections.abc import Sequence

from fourfold.plan.dependencies import SENDS, Dependencies, Dependency
from fourfold.words.errors import Problem
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, ProgramError, Verb

Entry = tuple[Action, ...]
Entries = tuple[tuple[Entry, ...], ...]
RECEIVES = frozenset({Verb.RECEIVE_FORWARD, Verb.RECEIVE_BACKWARD})
NUM_CONTEXT_ENTRIES = 3  # that the grid shows before and after a mark
MARK = "▸"


def as_entries(lists: Sequence[Sequence[Action]]) -> Entries:
    """Every action by itself."""
    return tuple(tuple((action,) for action in actions) for actions in lists)


def deadlock_problems(entries: Sequence[Sequence[Entry]]) -> list[Problem]:
    """The grid of where the indexes are stuck under rendezvous; empty: the program ends.

    An action that no index has counts as done: `completeness_problems` names it.
    """
    run = _Run(entries)
    run.advance()
    return run.problems()


def fuse_exchanges(lists: Sequence[Sequence[Action]]) -> Entries:
    """The same actions, so posted that they end under rendezvous: where the program would be stuck, the receive for
    which a send waits is posted together with the message at which its own index waits.

    The receive is nearly always the next action: in 1F1B, a stage that sends a gradient receives an activation. Only
    programs with a longer warm-up need one from further on. Computing order stays as it is. Raises ProgramError for
    lists that end with no transport.
    """
    run = _Run(as_entries(lists))
    run.advance()
    while late := run.late_receives():
        run.post_early(min(late, key=run.distance))
        run.advance()
    if run.problems():
        raise ProgramError(buffered_deadlock_problems(lists), where="the program: it cannot end")
    return run.posted()


def buffered_deadlock_problems(lists: Sequence[Sequence[Action]]) -> list[Problem]:
    """The grid of where the indexes are stuck although no send blocks; empty: the program ends."""
    run = _Run(as_entries(lists), sends_block=False)
    run.advance()
    return run.problems()


class _Run:
    """A program that runs as far as it comes, under rendezvous or with sends that do not block."""

    def __init__(self, entries: Sequence[Sequence[Entry]], *, sends_block: bool = True) -> None:
        program = {i: tuple(action for entry in each for action in entry) for i, each in enumerate(entries)}
        dependencies = Dependencies(program, Mesh(pp=max(1, len(entries))))
        self._entries = [list(each) for each in entries]
        self._at = [0] * len(entries)
        self._where = {
            Dependency(index, action): at
            for index, each in enumerate(entries)
            for at, entry in enumerate(each)
            for action in entry
        }
        self._needs = {each: [n for n in dependencies.of(*each) if n in self._where] for each in self._where}
        # By message, its other half: a receive depends on its send. If sends do not block, that is all there is to it.
        self._twins: dict[Dependency, Dependency] = {}
        for receive, needs in self._needs.items():
            if sends_block and receive.action.verb in RECEIVES and needs:
                self._twins |= {receive: needs[0], needs[0]: receive}
                self._needs[receive] = []
        self._done: set[Dependency] = set()
        self._waiters: dict[Dependency, list[int]] = {}
        self._ready = deque(range(len(entries)))

    def advance(self) -> None:
        """Run on until no index can."""
        while self._ready:
            index = self._ready.popleft()
            while self._at[index] < len(self._entries[index]) and self._ends(index):
                self._at[index] += 1

    def _ends(self, index: int) -> bool:
        """End what can end of the entry at which an index stands. Returns whether that is all of it."""
        for action in self._entries[index][self._at[index]]:
            here = Dependency(index, action)
            if here not in self._done and self._can_end(here):
                self._end(here)
                if action.verb in SENDS and here in self._twins:
                    self._end(self._twins[here])
        return not self._pending(index)

    def _can_end(self, here: Dependency) -> bool:
        for needed in self._needs[here]:
            if needed not in self._done:
                self._waiters.setdefault(needed, []).append(here.rank)
                return False
        twin = self._twins.get(here)
        # A twin that is posted but may not begin looks again at both, once it may.
        return twin is None or (self._is_posted(twin) and all(each in self._done for each in self._needs[twin]))

    def _is_posted(self, message: Dependency) -> bool:
        return self._where[message] == self._at[message.rank]

    def _end(self, which: Dependency) -> None:
        self._done.add(which)
        self._ready.extend(self._waiters.pop(which, ()))
        self._ready.append(which.rank)

    def _pending(self, index: int) -> list[Action]:
        """What an index waits to end; empty when it has ended."""
        if self._at[index] == len(self._entries[index]):
            return []
        entry = self._entries[index][self._at[index]]
        return [action for action in entry if Dependency(index, action) not in self._done]

    def late_receives(self) -> list[Dependency]:
        """The receives for which a send waits, on indexes that wait for other messages."""
        pending = [Dependency(i, action) for i in range(len(self._entries)) for action in self._pending(i)]
        may_end = [each for each in pending if each.action.verb in SENDS and self._needs_are_done(each)]
        late = [self._twins[each] for each in may_end if each.action.verb not in RECEIVES and each in self._twins]
        return [each for each in late if self.distance(each) > 0 and self._waits_for_message(each.rank)]

    def _needs_are_done(self, which: Dependency) -> bool:
        return all(each in self._done for each in self._needs[which])

    def _waits_for_message(self, index: int) -> bool:
        return any(action.verb in SENDS for action in self._pending(index))

    def distance(self, receive: Dependency) -> int:
        """How many entries after the one at which its index stands."""
        return self._where[receive] - self._at[receive.rank]

    def post_early(self, receive: Dependency) -> None:
        """Post a receive together with what its index waits for."""
        entries, at = self._entries[receive.rank], self._at[receive.rank]
        later = self._where[receive]
        entries[later] = tuple(each for each in entries[later] if each != receive.action)
        entries[at] += (receive.action,)
        self._where[receive] = at
        self._ready.append(receive.rank)

    def posted(self) -> Entries:
        """The entries as they are now."""
        return tuple(tuple(entry for entry in each if entry) for each in self._entries)

    def problems(self) -> list[Problem]:
        """The grid: a line for each index that is stuck, with what it waits for."""
        stuck = [index for index in range(len(self._entries)) if self._pending(index)]
        befores = {index: self._context(index, before=True) for index in stuck}
        width = max(map(len, befores.values()), default=0)
        return [
            Problem(
                f"index {index}: {befores[index]:>{width}}{MARK}{self._context(index, before=False)}",
                ", ".join(self._reason(Dependency(index, action)) for action in self._pending(index)),
            )
            for index in stuck
        ]

    def _context(self, index: int, *, before: bool) -> str:
        """The entries in front of the one at which an index is stuck, or that one and those behind it."""
        entries, at = self._entries[index], self._at[index]
        if before:
            low = max(0, at - NUM_CONTEXT_ENTRIES)
            words = ["…"] * (low > 0) + [format_entry(entry) for entry in entries[low:at] if entry]
            return " ".join(words) + " " * bool(words)
        high = at + NUM_CONTEXT_ENTRIES + 1
        return " ".join([format_entry(entry) for entry in entries[at:high] if entry] + ["…"] * (high < len(entries)))

    def _reason(self, stuck: Dependency) -> str:
        missing = [each for each in self._needs[stuck] if each not in self._done]
        twin = self._twins.get(stuck)
        if not missing and twin is not None:
            missing = [twin]
        return " and ".join(
            f"{each.action} of index {each.rank}" if each.rank != stuck.rank else f"{each.action} in front of it"
            for each in missing
        )


def format_entry(entry: Entry) -> str:
    """`F0.1`, and an exchange as `D1.0+V1.1`."""
    return "+".join(map(str, entry))

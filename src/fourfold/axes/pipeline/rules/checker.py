"""The checker of pipeline programs: complete, each action on the index that holds its stage, and able to end.

complete  one forward of every stage and microbatch, and one backward: B, or I and W
message   a send or receive; a program has all of them or none, which `add_sends` then adds
order     of a stage's microbatches, and of the messages between two indexes: these are not named, they come in turn
rendezvous  a send ends only once its receive has been posted, as over NCCL or with large messages over MPI; whoever
            waits for it does nothing else
entry       what an index posts at one time: a compute action, a message, or an exchange
exchange    messages that are posted together; it ends when all of them have
grid        the program's lines, with a mark at the entry at which each index is stuck
Law: a program without problems runs to its end, whatever the speed of the ranks; all problems are found at once.
Law: a program that ends under rendezvous ends with every transport, at any speed of the ranks.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from fourfold.axes.pipeline.rules.edges import COMPUTE_VERBS, add_sends
from fourfold.axes.pipeline.rules.spec import ComputeLists, PipelineSpec, owner_of
from fourfold.plan.dependencies import Dependencies, Dependency
from fourfold.plan.rank_program import SENDS
from fourfold.words.errors import Problem
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, ProgramError, Verb, parse_program

# ---- rendezvous ----------------------------------------------------------------------------------------------------

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
    """A program that runs as far as it comes, under rendezvous or with sends that do not block.

    Actions are numbered; `_needs`, `_twins` and `_where` have an item for each of them.
    """

    def __init__(self, entries: Sequence[Sequence[Entry]], *, sends_block: bool = True) -> None:
        self._actions = [Dependency(i, action) for i, each in enumerate(entries) for entry in each for action in entry]
        numbers = {each: number for number, each in enumerate(self._actions)}
        program = {i: tuple(action for entry in each for action in entry) for i, each in enumerate(entries)}
        dependencies = Dependencies(program, Mesh(pp=max(1, len(entries))))
        self._needs = [[numbers[n] for n in dependencies.of(*each) if n in numbers] for each in self._actions]
        # The other half of a message: a receive depends on its send. If sends do not block, that is all there is to it.
        self._twins: list[int | None] = [None] * len(self._actions)
        for number, (_, action) in enumerate(self._actions):
            if sends_block and action.verb in RECEIVES and self._needs[number]:
                send = self._needs[number].pop()
                self._twins[number], self._twins[send] = send, number
        self._entries = [
            [[numbers[Dependency(i, a)] for a in entry] for entry in each] for i, each in enumerate(entries)
        ]
        self._where = [0] * len(self._actions)
        for each in self._entries:
            for at, entry in enumerate(each):
                for number in entry:
                    self._where[number] = at
        self._at = [0] * len(entries)
        self._is_done = [False] * len(self._actions)
        self._waiters: dict[int, list[int]] = {}
        self._ready = deque(range(len(entries)))

    def advance(self) -> None:
        """Run on until no index can."""
        while self._ready:
            index = self._ready.popleft()
            entries = self._entries[index]
            while self._at[index] < len(entries) and self._ends(index, entries[self._at[index]]):
                self._at[index] += 1

    def _ends(self, index: int, entry: Sequence[int]) -> bool:
        """End what can end of the entry at which an index stands. Returns whether that is all of it."""
        for number in entry:
            if not self._is_done[number] and self._can_end(index, number):
                self._end(number)
                twin = self._twins[number]
                if twin is not None:
                    self._end(twin)
                    self._ready.append(self._actions[twin].rank)
        return all(self._is_done[number] for number in entry)

    def _can_end(self, index: int, number: int) -> bool:
        for needed in self._needs[number]:
            if not self._is_done[needed]:
                self._waiters.setdefault(needed, []).append(index)
                return False
        twin = self._twins[number]
        # A twin that is posted but may not begin looks again at both, once it may.
        return twin is None or (self.distance(twin) == 0 and self._may_begin(twin))

    def _end(self, number: int) -> None:
        self._is_done[number] = True
        self._ready.extend(self._waiters.pop(number, ()))

    def _may_begin(self, number: int) -> bool:
        return all(self._is_done[each] for each in self._needs[number])

    def _pending(self, index: int) -> list[int]:
        """What an index waits to end; empty when it has ended."""
        entries, at = self._entries[index], self._at[index]
        return [number for number in entries[at] if not self._is_done[number]] if at < len(entries) else []

    def late_receives(self) -> list[int]:
        """The receives for which a send waits, on indexes that wait for other messages."""
        pending = [self._pending(index) for index in range(len(self._entries))]
        wait_for_message = [any(self._twins[each] is not None for each in numbers) for numbers in pending]
        sends = [
            number
            for numbers in pending
            for number in numbers
            if self._actions[number].action.verb not in RECEIVES and self._may_begin(number)
        ]
        receives = [receive for send in sends if (receive := self._twins[send]) is not None]
        return [each for each in receives if self.distance(each) > 0 and wait_for_message[self._actions[each].rank]]

    def distance(self, number: int) -> int:
        """How many entries after the one at which its index stands."""
        return self._where[number] - self._at[self._actions[number].rank]

    def post_early(self, receive: int) -> None:
        """Post a receive together with what its index waits for."""
        index = self._actions[receive].rank
        self._entries[index][self._where[receive]].remove(receive)
        self._entries[index][self._at[index]].append(receive)
        self._where[receive] = self._at[index]
        self._ready.append(index)

    def posted(self) -> Entries:
        """The entries as they are now."""
        return tuple(tuple(self._entry(entry) for entry in each if entry) for each in self._entries)

    def _entry(self, numbers: Sequence[int]) -> Entry:
        return tuple(self._actions[number].action for number in numbers)

    def problems(self) -> list[Problem]:
        """The grid: a line for each index that is stuck, with what it waits for."""
        stuck = {index: numbers for index in range(len(self._entries)) if (numbers := self._pending(index))}
        befores = {index: self._context(index, before=True) for index in stuck}
        width = max(map(len, befores.values()), default=0)
        return [
            Problem(
                f"index {index}: {befores[index]:>{width}}{MARK}{self._context(index, before=False)}",
                ", ".join(map(self._reason, numbers)),
            )
            for index, numbers in stuck.items()
        ]

    def _context(self, index: int, *, before: bool) -> str:
        """The entries in front of the one at which an index is stuck, or that one and those behind it."""
        at, entries = self._at[index], self._entries[index]
        low, high = (max(0, at - NUM_CONTEXT_ENTRIES), at) if before else (at, at + NUM_CONTEXT_ENTRIES + 1)
        words = [format_entry(self._entry(entry)) for entry in entries[low:high] if entry]
        if before:
            return "".join(f"{word} " for word in ["…"] * (low > 0) + words)
        return " ".join(words + ["…"] * (high < len(entries)))

    def _reason(self, stuck: int) -> str:
        missing = [each for each in self._needs[stuck] if not self._is_done[each]]
        twin = self._twins[stuck]
        if not missing and twin is not None:
            missing = [twin]
        own = self._actions[stuck].rank
        return " and ".join(
            f"{action} of index {index}" if index != own else f"{action} in front of it"
            for index, action in (self._actions[each] for each in missing)
        )


def format_entry(entry: Entry) -> str:
    """`F0.1`, and an exchange as `D1.0+V1.1`."""
    return "+".join(map(str, entry))


# ---- the checker ---------------------------------------------------------------------------------------------------


COMPUTE_ORDER = (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT)
KNOWN_VERBS = COMPUTE_VERBS | SENDS
NUM_SHOWN = 6  # actions that a problem lists
ORDERED = ({Verb.FORWARD}, {Verb.BACKWARD, Verb.BACKWARD_INPUT}, {Verb.BACKWARD, Verb.BACKWARD_WEIGHT})
MESSAGES = ((Verb.SEND_FORWARD, Verb.RECEIVE_FORWARD, 1), (Verb.SEND_BACKWARD, Verb.RECEIVE_BACKWARD, -1))
NO_ACTIONS: tuple[Action, ...] = ()


def read_written(text: str, spec: PipelineSpec) -> tuple[ComputeLists, list[Problem]]:
    """The lists of a written program, by pipeline index, and its problems; with any, the lists cannot be run.

    `text`: a line per index, as `format_program` writes it; what follows a `#` is a comment.
    """
    try:
        program = parse_program("\n".join(line.partition("#")[0] for line in text.splitlines()))
    except ProgramError as error:
        return (), list(error.problems)
    lists = tuple(program.get(index, NO_ACTIONS) for index in range(spec.pp))
    return lists, program_problems(program, spec) or _order_problems(lists, spec)


def program_problems(program: Mapping[int, Sequence[Action]], spec: PipelineSpec) -> list[Problem]:
    """All that is wrong with a program, by pipeline index, of the step of a synchronous schedule."""
    problems = [
        Problem(f"index {index}", f"an index below pp = {spec.pp}") for index in program if not 0 <= index < spec.pp
    ]
    lists: list[list[Action]] = []
    for index in range(spec.pp):
        own = program.get(index, NO_ACTIONS)
        problems += _placing_problems(index, own, spec)
        lists.append([each for each in dict.fromkeys(own) if _is_in_place(index, each, spec)])
    problems += _completeness_problems(lists, spec)
    if any(action.verb in SENDS for actions in lists for action in actions):
        problems += _message_problems(lists, spec)
    return problems + buffered_deadlock_problems(lists)


def _is_in_place(index: int, action: Action, spec: PipelineSpec) -> bool:
    return (
        action.verb in KNOWN_VERBS
        and action.stage < spec.num_stages
        and action.index < spec.microbatches
        and owner_of(action.stage, spec.pp) == index
    )


def _placing_problems(index: int, actions: Sequence[Action], spec: PipelineSpec) -> list[Problem]:
    """Actions that this index cannot have, and those that it has more than once."""
    problems = []
    for action, count in Counter(actions).items():
        needs = []
        if action.verb not in KNOWN_VERBS:
            needs.append("F, B, I, W and their messages; the rest is added")
        if action.stage >= spec.num_stages:
            needs.append(f"a stage from 0 to {spec.num_stages - 1}")
        elif owner_of(action.stage, spec.pp) != index:
            needs.append(f"stage {action.stage} on index {owner_of(action.stage, spec.pp)}")
        if action.index >= spec.microbatches:
            needs.append(f"a microbatch from 0 to {spec.microbatches - 1}")
        problems += [Problem(f"index {index}: {action}", need) for need in needs]
        if count > 1:
            problems.append(Problem(f"index {index}: {action} {count} times", "each action once"))
    return problems


def _completeness_problems(lists: Sequence[Sequence[Action]], spec: PipelineSpec) -> list[Problem]:
    """The compute actions that are missing, and the backwards that are there both whole and in halves."""
    present = {action for actions in lists for action in actions}
    missing: list[Action] = []
    problems = []
    for stage, i in itertools.product(range(spec.num_stages), range(spec.microbatches)):
        forward, whole, *halves = (Action(verb, stage, i) for verb in COMPUTE_ORDER)
        found = [each for each in halves if each in present]
        if whole in present and found:
            got = " and ".join(map(str, (whole, *found)))
            problems.append(Problem(f"index {owner_of(stage, spec.pp)}: {got}", "one backward, whole or in halves"))
        backward = halves if found and whole not in present else [whole]
        missing += [each for each in (forward, *backward) if each not in present]
    return problems + _missing_problems(missing, spec)


def _message_problems(lists: Sequence[Sequence[Action]], spec: PipelineSpec) -> list[Problem]:
    """The messages that are missing, and those that nothing needs."""
    everything = [
        [
            Action(verb, stage, i)
            for stage in range(index, spec.num_stages, spec.pp)
            for verb in (Verb.FORWARD, Verb.BACKWARD)
            for i in range(spec.microbatches)
        ]
        for index in range(spec.pp)
    ]
    wanted = dict.fromkeys(each for actions in add_sends(everything, spec.num_stages) for each in actions)
    present = [each for actions in lists for each in actions]
    problems = [
        Problem(f"index {owner_of(each.stage, spec.pp)}: {each}", "no message: nothing crosses there")
        for each in present
        if each.verb in SENDS and each not in wanted
    ]
    missing = set(wanted) - set(present)
    return problems + _missing_problems([each for each in wanted if each in missing and each.verb in SENDS], spec)


def _order_problems(lists: Sequence[Sequence[Action]], spec: PipelineSpec) -> list[Problem]:
    """Microbatches of a stage that are out of order, and messages that are not received in the order of their sends."""
    problems = []
    for index, actions in enumerate(lists):
        for stage, verbs in itertools.product(range(index, spec.num_stages, spec.pp), ORDERED):
            own = [each for each in actions if each.stage == stage and each.verb in verbs]
            late = next((pair for pair in itertools.pairwise(own) if pair[0].index > pair[1].index), None)
            if late is not None:
                need = "the microbatches of a stage in order: gradients are complete after the last one"
                problems.append(Problem(f"index {index}: {late[0]} before {late[1]}", need))
    if problems:
        return list(dict.fromkeys(problems))
    with_sends = add_sends(lists, spec.num_stages)
    for index, (sent, received, step) in itertools.product(range(spec.pp), MESSAGES):
        other = (index + step) % spec.pp
        sends = [(each.stage + step, each.index) for each in with_sends[index] if each.verb == sent]
        receives = [(each.stage, each.index) for each in with_sends[other] if each.verb == received]
        problems += [
            Problem(
                f"index {other}: {Action(received, *receives[place])}",
                f"{Action(received, *sends[place])} in its place: index {index} sends in this order",
            )
            for place in itertools.islice((n for n in range(len(sends)) if sends[n] != receives[n]), 1)
        ]
    return problems


def _missing_problems(missing: Iterable[Action], spec: PipelineSpec) -> list[Problem]:
    """A problem for each index that lacks actions."""
    by_index: dict[int, list[Action]] = {}
    for action in missing:
        by_index.setdefault(owner_of(action.stage, spec.pp), []).append(action)
    return [
        Problem(f"index {index} forgets {_enumerate(actions)}", "each action once")
        for index, actions in sorted(by_index.items())
    ]


def _enumerate(actions: Sequence[Action]) -> str:
    more = len(actions) - NUM_SHOWN
    return ", ".join(map(str, actions[:NUM_SHOWN])) + (f" and {more} more" if more > 0 else "")

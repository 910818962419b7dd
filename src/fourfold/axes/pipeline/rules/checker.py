"""The checker of pipeline programs: complete, each action on the index that holds its stage, and able to end.

complete  one forward of every stage and microbatch, and one backward: B, or I and W
message   a send or receive; a program has all of them or none, which `add_sends` then adds
order     of a stage's microbatches, and of the messages between two indexes: these are not named, they come in turn
grid      the program's lines, with a mark at the action at which each index is stuck
Law: a program without problems runs to its end, whatever the speed of the ranks; all problems are found at once.
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

# ---- deadlocks -----------------------------------------------------------------------------------------------------

NUM_CONTEXT = 3  # actions that the grid shows before and after a mark
MARK = "▸"


def deadlock_problems(lists: Sequence[Sequence[Action]]) -> list[Problem]:
    """The grid of where the indexes are stuck, although no send blocks; empty: the program ends.

    An action that no index has counts as done: `_completeness_problems` names it.
    """
    needs = _needs(lists)
    at, done = [0] * len(lists), set[Dependency]()
    waiters, ready = dict[Dependency, list[int]](), deque(range(len(lists)))
    while ready:
        index = ready.popleft()
        while at[index] < len(lists[index]):
            own = Dependency(index, lists[index][at[index]])
            missing = next((each for each in needs[own] if each not in done), None)
            if missing is not None:
                waiters.setdefault(missing, []).append(index)
                break
            done.add(own)
            ready.extend(waiters.pop(own, ()))
            at[index] += 1
    stuck = [index for index, actions in enumerate(lists) if at[index] < len(actions)]
    befores = {index: _before(lists[index], at[index]) for index in stuck}
    width = max(map(len, befores.values()), default=0)
    return [
        Problem(
            f"index {index}: {befores[index]:>{width}}{MARK}{_from(lists[index], at[index])}",
            _reason(index, [each for each in needs[Dependency(index, lists[index][at[index]])] if each not in done]),
        )
        for index in stuck
    ]


def _needs(lists: Sequence[Sequence[Action]]) -> dict[Dependency, list[Dependency]]:
    """By action, what it waits for of what the program has."""
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    dependencies = Dependencies(program, Mesh(pp=max(1, len(lists))))
    all_needs = {Dependency(i, each): dependencies.of(i, each) for i, actions in program.items() for each in actions}
    return {each: [need for need in needs if need in all_needs] for each, needs in all_needs.items()}


def _before(actions: Sequence[Action], at: int) -> str:
    low = max(0, at - NUM_CONTEXT)
    return "".join(f"{word} " for word in ["…"] * (low > 0) + list(map(str, actions[low:at])))


def _from(actions: Sequence[Action], at: int) -> str:
    high = at + NUM_CONTEXT + 1
    return " ".join([*map(str, actions[at:high]), *["…"] * (high < len(actions))])


def _reason(own: int, missing: Sequence[Dependency]) -> str:
    return " and ".join(
        f"{action} of index {index}" if index != own else f"{action} in front of it" for index, action in missing
    )


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
    return problems + deadlock_problems(lists)


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

"""Edges: which messages stages send, how activations and their gradients are encoded in them, and their bytes.

row      the last dim of an activation: the features of one token
coded    a floating-point tensor with rows; others (ids, masks, one number a sample) travel as they are
bf16     every element in two bytes
int8     every element in one byte, and one scale for each row
dct      the largest elements of each row; zeros are never sent. The gradient has the same mask: its values alone travel
Law: the bytes of a message follow from its shape, and for dct from how many elements are kept; at most `num_sent` of
a row are.

Source: Gupta et al. (2021), Alg. 2 (DCT-MP). The paper has a threshold for each sample; for a text that would tell a
token what comes after it.

Sends: the messages between stages, and the count in which all ranks meet, added to lists of compute actions.

boundary  where stage s ends and stage s + 1 begins; an activation crosses it forward, a gradient backward
message   a send on one pipeline index and a receive on another
Law: a message is sent directly after the action that makes it and received directly in front of the one that uses it;
a boundary whose two stages are on the same index has none.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fourfold.axes.pipeline.rules.spec import ComputeLists, owner_of
from fourfold.plan.codec import num_sent
from fourfold.plan.rank_program import BACKWARD_PHASES, SENDS
from fourfold.words.errors import Problem
from fourfold.words.program import NOMINAL_COUNT, Action, Verb

EDGES = ("none", "bf16", "int8", "dct")
DEFAULT_DENSITY = 0.1
SCALE_BYTES = 4
INDEX_BYTES = 2
MAX_INDEXED = 2 ** (8 * INDEX_BYTES)  # columns that an index can name


class EdgeSpec(NamedTuple):
    """How edges are encoded. `density`: the fraction of a row that dct keeps; the paper's η is 1 − density."""

    kind: str = "none"
    density: float = DEFAULT_DENSITY

    def codes(self, shape: Sequence[int], element_bytes: int, *, is_float: bool) -> bool:
        """Whether a tensor is coded; otherwise it travels as it is."""
        if not is_float or len(shape) < 2 or 0 in shape:
            return False
        if self.kind == "dct":
            return num_sent(shape[-1], self.density) < shape[-1]
        return self.kind != "none" and element_bytes > {"bf16": 2, "int8": 1}[self.kind]


class EdgeBytes(NamedTuple):
    """Bytes of a coded tensor, and of its gradient."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


def uses_indices(rows: int, columns: int, num_kept: int) -> bool:
    """Whether dct names the kept elements by indices, with a count for each row, and not by a bit for each element."""
    return columns <= MAX_INDEXED and INDEX_BYTES * (rows + num_kept) < -(-rows * columns // 8)


def edge_bytes(spec: EdgeSpec, rows: int, columns: int, element_bytes: int, num_kept: int | None = None) -> EdgeBytes:
    """Bytes of a coded tensor [rows, columns]. `num_kept`: of dct; None: rows without zeros, of which most is sent."""
    num_elements = rows * columns
    if spec.kind == "none":
        return EdgeBytes(num_elements * element_bytes, num_elements * element_bytes)
    if spec.kind == "bf16":
        return EdgeBytes(num_elements * 2, num_elements * 2)
    if spec.kind == "int8":
        return EdgeBytes(num_elements + rows * SCALE_BYTES, num_elements + rows * SCALE_BYTES)
    kept = rows * num_sent(columns, spec.density) if num_kept is None else num_kept
    positions = INDEX_BYTES * (rows + kept) if uses_indices(rows, columns, kept) else -(-num_elements // 8)
    return EdgeBytes(positions + kept * element_bytes, kept * element_bytes)


def edge_note(spec: EdgeSpec) -> str | None:
    """What a user must know of compressed edges; None without them."""
    if spec.kind == "none":
        return None
    field = f'edge = "{spec.kind}"' + (f", edge_density = {spec.density:g}" if spec.kind == "dct" else "")
    return f"{field}: stages compute with what arrives, so this is another training than without it"


def edge_problems(edge: str, density: float, pp: int) -> list[Problem]:
    """What does not go with the plan's `edge` and `edge_density`."""
    problems = []
    if edge != "none" and pp == 1:
        got = f'edge = "{edge}" with pp = 1'
        problems.append(Problem(got, "pp above 1: an edge joins two stages", 'pp = 2, or edge = "none"'))
    if edge != "dct" and density != DEFAULT_DENSITY:
        got = f'edge_density = {density:g} with edge = "{edge}"'
        problems.append(Problem(got, 'edge = "dct": others send every element', 'edge = "dct", or no edge_density'))
    return problems


# ---- sends -----------------------------------------------------------------------------------------------------------

BACKWARDS = frozenset({Verb.BACKWARD, Verb.BACKWARD_INPUT})
COMPUTE_VERBS = BACKWARDS | {Verb.FORWARD, Verb.BACKWARD_WEIGHT}


def add_sends(lists: Sequence[Sequence[Action]], num_stages: int) -> ComputeLists:
    """The lists with their messages. Sends do not block: a rank computes on while they are under way.

    Lists that have messages already, as a written program may, are returned as they are.
    """
    if any(action.verb in SENDS for actions in lists for action in actions):
        return tuple(map(tuple, lists))
    pp = len(lists)
    boundaries = {stage for stage in range(num_stages - 1) if owner_of(stage, pp) != owner_of(stage + 1, pp)}
    return tuple(tuple(each for action in actions for each in _with_messages(action, boundaries)) for actions in lists)


def add_nominal_count(lists: Sequence[Sequence[Action]]) -> ComputeLists:
    """Lists with messages, and with the measure of the nominal count, for which all ranks wait.

    Behind all that ranks can do before one of them runs a backward, which needs it: so it follows the first loss, and
    no rank waits in it for what comes behind another rank's backward.
    """
    fronts, sent = [0] * len(lists), set[Action]()

    def comes_before(action: Action) -> bool:
        made = Action(Verb.SEND_FORWARD, action.stage - 1, action.index)
        return action.verb not in BACKWARD_PHASES and (action.verb != Verb.RECEIVE_FORWARD or made in sent)

    while any(comes_before(actions[front]) for actions, front in zip(lists, fronts, strict=True)):
        for index, actions in enumerate(lists):
            while comes_before(action := actions[fronts[index]]):
                sent.add(action)
                fronts[index] += 1
    return tuple(
        (*actions[:front], Action(Verb.MEASURE, index, NOMINAL_COUNT), *actions[front:])
        for index, (actions, front) in enumerate(zip(lists, fronts, strict=True))
    )


def _with_messages(action: Action, boundaries: set[int]) -> Iterator[Action]:
    """A compute action, the message that it waits for in front of it and the one that it makes behind it.

    `boundaries`: the stages whose output goes to another index.
    """
    stage, microbatch = action.stage, action.index
    has_previous, has_next = stage - 1 in boundaries, stage in boundaries
    if action.verb == Verb.FORWARD and has_previous:
        yield Action(Verb.RECEIVE_FORWARD, stage, microbatch)
    if action.verb in BACKWARDS and has_next:
        yield Action(Verb.RECEIVE_BACKWARD, stage, microbatch)
    yield action
    if action.verb == Verb.FORWARD and has_next:
        yield Action(Verb.SEND_FORWARD, stage, microbatch)
    if action.verb in BACKWARDS and has_previous:
        yield Action(Verb.SEND_BACKWARD, stage, microbatch)

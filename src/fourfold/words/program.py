"""Program: what every rank does in a step, as one list of actions per rank that can be written and read as text.

action   a verb, a stage and an index: `F0.3` is the forward of stage 0, microbatch 3
verb     what is done: forward, backward, reduce, …; one letter in text
stage    the part of the model that the action works on
index    the microbatch, bucket or scalar that the action works on; a bucket that is reduced or unsharded several times
         in a step has an index for each time: see `nth_index`
program  rank -> its actions, in order
Law: parse_program(format_program(program)) == program, and a pass may reorder actions if it keeps their
dependencies.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from fourfold.words.errors import FourfoldError, Problem

NUMBER = re.compile(r"[0-9]{1,18}")
ACTION = re.compile(r"([A-Z])([0-9]{1,18})\.([0-9]{1,18})")


class Verb(StrEnum):
    """The verbs, with their letters in text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    # Between stages. An activation goes to the next stage: Send, receiVe. A gradient goes back: senD, reCeive.
    SEND_FORWARD = "S"
    RECEIVE_FORWARD = "V"
    SEND_BACKWARD = "D"
    RECEIVE_BACKWARD = "C"
    MEASURE = "M"  # sum a few scalars over ranks; the index says which: LOSS, GRAD_NORM, …
    UNSHARD = "A"  # all-gather a bucket's weights before a use; they rest split
    REDUCE = "R"
    UPDATE = "U"
    GATHER = "G"  # all-gather a bucket's weights after their update; they rest whole
    PUSH = "P"  # local SGD: start to sum the ranks' changes of a bucket's weights
    PULL = "L"  # local SGD: wait for that sum, and make the outer step from it
    # Of weights that the first pipeline stage owns and the last one uses too, sent and received:
    TIE = "T"  # the weights, before the first forward
    TIE_GRADIENT = "Y"  # their gradients, before the owner's last backward

    # Actions are keys; Enum's own hash is a Python function, which takes as long as the rest of a look-up.
    __hash__ = str.__hash__


# The index of a MEASURE says which scalars: the loss and the counts; the squared gradient norm; which parameters
# have a gradient on any rank; the squared norms from which trust ratios are computed; in the first step, the loss
# count of the first microbatch.
LOSS, GRAD_NORM, USED_PARAMS, TRUST_NORMS, NOMINAL_COUNT = 0, 1, 2, 3, 4


class Action(NamedTuple):
    """One thing that a rank does: a verb, a stage, and the index of a microbatch, bucket or scalar."""

    verb: Verb
    stage: int
    index: int  # type: ignore[assignment]  # hides a method of tuple that no code needs

    def __str__(self) -> str:
        return f"{self.verb.value}{self.stage}.{self.index}"


Program = Mapping[int, tuple[Action, ...]]


def nth_index(bucket: int, occurrence: int, num_buckets: int) -> int:
    """The index of the action that reduces or unshards a bucket of a stage for the n-th time in a step, from 0."""
    return occurrence * num_buckets + bucket


def bucket_of(action: Action, num_buckets: int) -> int:
    """The bucket of an action that reduces or unshards one of its stage's buckets."""
    return action.index % num_buckets


class ProgramError(FourfoldError):
    """A program that cannot be read, or that deadlocks."""


def format_program(program: Program) -> str:
    """One line per rank: `0: F0.0 M0.0 B0.0 R0.0 U0.0`."""
    return "\n".join(f"{rank}: {' '.join(map(str, actions))}" for rank, actions in sorted(program.items()))


def parse_program(text: str) -> dict[int, tuple[Action, ...]]:
    """Read a program as `format_program` writes it.

    Raises ProgramError with every word that is not an action, and every rank that has a second line.
    """
    program: dict[int, tuple[Action, ...]] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        head, colon, body = line.partition(":")
        if not colon or not NUMBER.fullmatch(head.strip()):
            problems.append(Problem(f"line {number}: {line.strip()[:40]!r}", "RANK: ACTION ACTION …"))
            continue
        if int(head) in program:
            problems.append(Problem(f"line {number}: {int(head)} again", "one line per rank"))
        actions = []
        for word in body.split():
            match = ACTION.fullmatch(word)
            if match is None or match[1] not in set(Verb):
                letters = ", ".join(f"{verb.value} {verb.name.lower().replace('_', '-')}" for verb in Verb)
                problems.append(Problem(f"line {number}: {word!r}", f"a verb, a stage, a dot, an index ({letters})"))
                continue
            actions.append(Action(Verb(match[1]), int(match[2]), int(match[3])))
        program[int(head)] = tuple(actions)
    if problems:
        raise ProgramError(problems, where="program")
    return program

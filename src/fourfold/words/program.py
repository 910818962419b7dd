"""Action: what one rank does next. Program: one list of actions per rank, text in and text out.

verb     one of about a dozen words, one or two letters in text
stage    the part of the model it is about; index: the microbatch, bucket or scalar it is about
program  rank -> actions, in order; `F0.3` is the forward of stage 0, microbatch 3
Law: parse(show(program)) == program, and an action is something a pass may move.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fourfold.words.errors import FourfoldError, Problem


class Verb(StrEnum):
    """The verbs, by their letters in text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "S"
    RECEIVE = "V"
    EXCHANGE = "X"
    MEASURE = "M"  # sum a few scalars over the data ranks: loss and counts, norms
    REDUCE = "R"
    GATHER = "G"
    UPDATE = "U"
    PUSH = "P"
    PULL = "L"


# The index of a MEASURE says which scalars: the loss and the counts, the squared gradient norm, which
# parameters got a gradient anywhere, the squared norms that trust ratios are made of.
LOSS, GRAD_NORM, USED_PARAMS, TRUST_NORMS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does: verb, stage, and the microbatch, bucket or scalar it is about."""

    verb: Verb
    stage: int
    index: int

    def __str__(self) -> str:
        return f"{self.verb.value}{self.stage}.{self.index}"


Program = Mapping[int, tuple[Action, ...]]


class ProgramError(FourfoldError):
    """A program that cannot be read or cannot end."""


def format_program(program: Program) -> str:
    """One line per rank: `0: F0.0 M0.0 B0.0 R0.0 U0.0`."""
    return "\n".join(f"{rank}: {' '.join(map(str, actions))}" for rank, actions in sorted(program.items()))


def parse_program(text: str) -> dict[int, tuple[Action, ...]]:
    """The program in a text as `show` writes it. Raises ProgramError with every word that is not an action."""
    program: dict[int, tuple[Action, ...]] = {}
    problems: list[Problem] = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        head, colon, body = line.partition(":")
        if not colon or not head.strip().isdigit():
            problems.append(Problem(f"line {number}: {line.strip()[:40]!r}", "RANK: ACTION ACTION …"))
            continue
        actions = []
        for word in body.split():
            match = re.fullmatch(r"([A-Z])(\d+)\.(\d+)", word)
            if match is None or match[1] not in set(Verb):
                letters = ", ".join(f"{verb.value} {verb.name.lower().replace('_', '-')}" for verb in Verb)
                problems.append(Problem(f"line {number}: {word!r}", f"a verb, a stage, a dot, an index ({letters})"))
                continue
            actions.append(Action(Verb(match[1]), int(match[2]), int(match[3])))
        program[int(head)] = tuple(actions)
    if problems:
        raise ProgramError(problems, where="program")
    return program

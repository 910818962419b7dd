"""Position: which samples a feed has yielded, and what is wrong with a position that it is to continue from.

Law: a position in the middle of an epoch belongs to sources of one length.
"""

from typing import Any, NamedTuple

import torch

from fourfold.words import argument_checks
from fourfold.words.errors import Problem


class Position(NamedTuple):
    """The state of a feed: it has yielded samples [0, position) of the epoch.

    num_samples  the length of the epoch; None for a stream that does not say, and in states of older versions
    """

    seed: int
    epoch: int
    position: int
    num_samples: int | None = None


# torch.load accepts a saved state, with weights_only too; also one that was saved when Position was in feed.py.
torch.serialization.add_safe_globals([Position, (Position, "fourfold.feed.feed.Position")])


def position_problems(state: Any, num_samples: int | None) -> list[Problem]:
    """What is wrong with a state, for a feed of `num_samples` samples; None: of a stream."""
    numbers = list(state) if isinstance(state, tuple | list) else []
    if len(numbers) == 4 and numbers[3] is None:
        numbers = numbers[:3]
    if len(numbers) not in (3, 4) or not all(map(argument_checks.is_int, numbers)):
        got = f"a state {state!r}"
        return [Problem(got, "(seed, epoch, position, num_samples), the `state` of another feed")]
    position = Position(*numbers)
    problems = argument_checks.seed_problems(position.seed) + argument_checks.int_problems(
        "epoch", position.epoch, minimum=0
    )
    if other := length_mismatch(position, num_samples):
        problems.append(other)
    elif position.position < 0 or (num_samples is not None and position.position >= num_samples):
        need = "0 or more" if num_samples is None else f"one before the source's {num_samples} samples"
        problems.append(Problem(f"position {position.position}", need))
    return problems


def length_mismatch(state: Position, num_samples: int | None) -> Problem | None:
    """The problem if the source had another length when the state's epoch began: its order differs then."""
    if state.position == 0 or num_samples is None or state.num_samples in (None, num_samples):
        return None
    got = f"position {state.position} in an epoch of {state.num_samples} samples, and a source of {num_samples} now"
    attempt = f"the source as it was, or ({state.seed}, {state.epoch + 1}, 0), the beginning of the next epoch"
    return Problem(got, "the same number of samples until the epoch is over", attempt)

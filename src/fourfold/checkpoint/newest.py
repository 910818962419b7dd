"""Newest: the newest good checkpoint in a folder, as all ranks find it together.

Law: all ranks find the same one; each file is read by one rank. A search changes nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fourfold.checkpoint.manifest_file import verify_checkpoint
from fourfold.checkpoint.store import CheckpointStore
from fourfold.step.train_step import TrainStep
from fourfold.words.errors import Problem, UnreadableCheckpointError

MAX_SHOWN_PROBLEMS = 3


class Found(NamedTuple):
    """The newest good checkpoint, if there is one, and what is damaged in newer ones, by step."""

    folder: Path | None
    damaged: dict[int, list[str]]


def find_newest_good(step: TrainStep, store: CheckpointStore) -> Found:
    """Find the newest good checkpoint. Collective.

    Raises UnreadableCheckpointError if the newest may be good and cannot be read.
    """
    damaged: dict[int, list[str]] = {}
    for number in reversed(step.all_gather_json(store.steps() if step.rank == 0 else [])[0]):
        folder = store.step_dir(number)
        results = step.all_gather_json(_verify_files(step, _relative_to_cwd(folder)))
        if unreadable := list(dict.fromkeys(tuple(each) for problems, _ in results for each in problems)):
            # An older checkpoint could be read, but the training since then would be lost without need.
            raise UnreadableCheckpointError([Problem(*each) for each in unreadable], where="the newest checkpoint")
        problems = list(dict.fromkeys(text for _, texts in results for text in texts))
        if not problems:
            return Found(folder, damaged)
        damaged[number] = problems
    return Found(None, damaged)


def short_text(problems: Sequence[str]) -> str:
    """The first of the problems, for a message."""
    return "; ".join(problems[:MAX_SHOWN_PROBLEMS])


def _verify_files(step: TrainStep, folder: Path) -> tuple[list[Problem], list[str]]:
    """Check this rank's part of the files: why some cannot be read here, and what is damaged."""
    try:
        return [], verify_checkpoint(folder, index=step.rank, size=step.plan.mesh.size)
    except UnreadableCheckpointError as error:
        return list(error.problems), []


def _relative_to_cwd(path: Path) -> Path:
    """The path relative to the working directory if it lies below it: messages name it so."""
    try:
        here = Path.cwd()
    except OSError:  # the working directory has been removed
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path

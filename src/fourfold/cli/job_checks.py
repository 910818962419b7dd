"""Checks of a job before any process is started: its batch, its tokens, its memory, the weights it begins with.

Law: each check raises a FourfoldError that names the setting; none of them changes anything.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.errors import is_file, nearest_file
from fourfold.environment.world import from_environment
from fourfold.plan.batch_split import batch_size_problems
from fourfold.plan.plan import Plan
from fourfold.words.errors import DataError, Problem, SettingError
from fourfold.words.run_files import WEIGHTS_NEED
from fourfold.words.task import Task

if TYPE_CHECKING:
    from fourfold.feed.data_input import DataInput
    from fourfold.trainer.run_length import RunSettings


def check_batch_size(batch_size: int | None, plan: Plan) -> None:
    """Raises SettingError where the data ranks and microbatches do not divide the batch; None: it is not known."""
    if batch_size is None:
        return
    if problems := batch_size_problems(batch_size, dp=plan.dp, microbatches=plan.microbatches):
        raise SettingError(problems, where="the settings")


def check_tokens(data: "DataInput", plan: Plan) -> None:
    """Raises TaskError where cp > 1 and the samples have no sequence of tokens to split. Streams are not read here."""
    if plan.cp == 1:
        return
    from fourfold.axes.context.attach.token_shards import sequence_length
    from fourfold.feed.sample_rng import fetch_one
    from fourfold.feed.stream import Stream

    if not isinstance(data.source, Stream):
        sequence_length(fetch_one(data.source, 0))


def check_order(data: "DataInput", settings: "RunSettings") -> None:
    """Raises DataError where the data cannot have the order of samples that the settings say."""
    from fourfold.feed.orders import order_problems

    if problems := order_problems(data.source, order=settings.order, window=settings.window, shuffle=None):
        raise DataError(problems, where="the order of the training data")


def check_fits_memory(task: Task, plan: Plan, data: "DataInput", meta_model: Any, settings: "RunSettings") -> None:
    """Raises SettingError where the run cannot fit into the memory of this host."""
    from fourfold.step.memory_bound import check_memory

    # Under another launcher every rank checks its own part.
    num_ranks = plan.mesh.size if from_environment() is None else 1
    sizes = {"batch_size": settings.batch_size, "num_steps": settings.steps}
    check_memory(task, plan, data, meta_model, **sizes, num_ranks=num_ranks)


def check_init(task: Task, init: str | None) -> None:
    """Raises SettingError or CheckpointError where the files of initial weights are missing or another model's."""
    from fourfold.checkpoint.initial_weights import check_weights
    from fourfold.step.initial_model import build_meta_model

    if init is not None:
        check_init_path(init)
        check_weights(build_meta_model(task), Path(init))


def check_init_path(init: str) -> None:
    """Raise SettingError where there is neither file nor folder."""
    path = Path(init)
    if not (is_file(path) or os.path.isdir(path)):
        got = f"init = {init} ({'no regular file' if os.path.exists(path) else 'no such file'})"
        raise SettingError(Problem(got, WEIGHTS_NEED, nearest_file(path, "*.safetensors")))

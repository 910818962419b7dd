"""Parallelize: lay a model's training step over the ranks of a plan.

Law: what cannot be carried out is refused before a weight moves, and before processes are started where that can be.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from fourfold.axes.tensor.attach.axis import check_rules
from fourfold.comm import init, transports
from fourfold.comm.communicator import Communicator
from fourfold.environment.host_limits import available_bytes
from fourfold.environment.world import num_cores
from fourfold.optim.user_optimizer import OptimizerSource, build_optimizer
from fourfold.plan.check import step_hook_conflicts
from fourfold.plan.intervals import DRIFT_CHECK
from fourfold.plan.plan import Plan
from fourfold.plan.rng import generator_seed, random_place
from fourfold.step.argument_checks import check_arguments
from fourfold.step.initial_model import build_meta_model, make_initial_model
from fourfold.step.model_checks import (
    check_model_loss,
    check_optimizer,
    check_user_optimizer,
    model_plan_problems,
)
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.deferred_init import InitialModel
from fourfold.torch_kit.shared_memory import check_weights_apart
from fourfold.words.errors import PlanError
from fourfold.words.task import Task


def parallelize(
    model: nn.Module | Callable[[], nn.Module] | InitialModel,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: OptimizerSource,
    plan: Plan | None = None,
    *,
    clip: float | None = None,
    seed: int = 0,
    skip_nan: int = 0,
    same_batches: str = "error",
    drift_check: int = DRIFT_CHECK,
    tensor: Mapping[str, str] | None = None,
) -> TrainStep:
    """Lay one training step over the ranks of a plan. Collective.

    Joins the existing process group, or makes one from the launcher's environment; then rank 0's weights and buffers
    are broadcast.

    model         a module, or a function that makes it: then, with tp > 1, a rank makes one weight at a time, keeps its
                  shard, and never holds the whole model. `step.model` is the module. Or an InitialModel
    loss          loss(outputs, targets) returns unreduced values (their global mean is trained), a pair (sum, count),
                  or a scalar: the mean over the elements that torch's loss functions count, else over the samples.
                  None: the model returns its own loss, of batches that are dicts of its inputs with the labels
    optimizer     a torch optimizer of the model's parameters that has made no step, or a function that makes one of
                  them. Flat buffers are updated with its class and, in every step, the options that its groups have
                  then: a learning-rate scheduler may be made of it before or after. It is `step.optimizer`
    plan          None: all ranks are data ranks
    clip          bounds the global norm of the gradient
    seed          seeds torch's generator, differently on each data index
    skip_nan      how many steps in a row may be skipped because the global loss, or with `clip` the norm, is not
                  finite; one more raises TrainingError
    same_batches  "error": raise TaskError where all data ranks train on the same batches, three different ones in a
                  row; "allow": never raise. Batches of a `Feed` always differ
    tensor        with tp > 1: pattern of module names -> how its weights are split, such as {"*.up": "column"}; see
                  `docs/tensor-axis.md`
    drift_check   ranks compare the weights that several of them have after every so many steps, and raise
                  DivergenceError if they differ; 0: never

    Raises SettingError for arguments of the wrong kind, and PlanError, OptimizerError or TaskError if the plan cannot
    be carried out with them.
    """
    tensor = {} if tensor is None else tensor
    numbers = {"clip": clip, "seed": seed, "skip_nan": skip_nan}
    own = model.model if isinstance(model, InitialModel) else model
    check_arguments(model=own, loss=loss, optimizer=optimizer, plan=plan, tensor=tensor, **numbers)
    if isinstance(optimizer, Optimizer) and isinstance(own, nn.Module):
        # Here, where no rank waits for another yet. One that a factory makes is checked when it exists.
        check_user_optimizer(build_optimizer(optimizer, list(own.parameters())), step_hook_conflicts(plan or Plan()))
    comm = init.init_communicator()
    plan = plan or Plan(dp=comm.size)
    initial = make_initial_model(model, comm.device, defers=plan.tp > 1 or plan.pp > 1, is_log_rank=comm.rank == 0)
    _set_threads(comm)
    step = TrainStep(
        initial.model,
        loss,
        optimizer,
        plan=plan,
        communicator=comm,
        clip=clip,
        seed=seed,
        skip_nan=skip_nan,
        same_batches=same_batches,
        drift_check=drift_check,
        tensor=tensor,
        initial_weights=initial.weights,
    )
    place = random_place(plan.mesh, comm.rank)
    torch.manual_seed(generator_seed(seed, place.dp, stage=place.pp))
    return step


def preflight(task: Task, plan: Plan) -> nn.Module:
    """Check a task and a plan before processes are started; returns the task's meta model.

    Raises TaskError, PlanError, OptimizerError or SettingError.
    """
    model = build_meta_model(task, max_bytes=available_bytes())
    _check_plan_and_rules(model, plan, task)
    check_weights_apart(model)
    check_model_loss(task.loss, plan)
    transports.check_transport_device(plan.transport, "cuda" if torch.cuda.is_available() else "cpu")
    optimizer = build_optimizer(task.optimizer, list(model.parameters()))
    check_optimizer(optimizer, model, plan, task.tensor)
    return model


def _check_plan_and_rules(model: nn.Module, plan: Plan, task: Task) -> None:
    """Raise PlanError with all problems that the plan has with the model, those of the tensor rules among them."""
    problems = model_plan_problems(model, plan, clip=task.clip)
    try:
        check_rules(model, task.tensor, plan.tensor_spec)
    except PlanError as error:
        raise PlanError([*problems, *error.problems], where="the plan" if problems else error.where) from None
    if problems:
        raise PlanError(problems, where="the plan")


def _set_threads(communicator: Communicator) -> None:
    """Divide the cores of the host among its ranks, unless the user has chosen a number of threads."""
    # torch's default is the number of physical cores: any other number is the user's choice.
    defaults = {num_cores(), psutil.cpu_count(logical=False)}
    is_chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in defaults
    if communicator.world.local_size > 1 and not is_chosen:
        torch.set_num_threads(max(1, num_cores() // communicator.world.local_size))

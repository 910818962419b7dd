"""Verify from Python: `ff.verify` trains with a plan, on ranks that are forks of this process, and on one device.

Law: the model, the optimizer and the random state of this process stay as they are.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fourfold.comm import init
from fourfold.launcher.notebook import launch
from fourfold.optim.user_optimizer import OptimizerSource
from fourfold.plan.plan import Plan
from fourfold.step.argument_checks import check_arguments
from fourfold.verification.command import check_verifiable, verify_batches
from fourfold.verification.comparison import VerifyResult
from fourfold.verification.trial import Training
from fourfold.words.errors import PlanError, Problem, SettingError

STEPS, SEED = 10, 0


def verify(
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any] | None,
    optimizer: OptimizerSource,
    batches: Iterable[Any],
    plan: Plan,
    *,
    steps: int = STEPS,
    clip: float | None = None,
    tensor: Mapping[str, str] | None = None,
) -> VerifyResult:
    """Train a few steps with a plan and on one device, and compare losses, gradients, weights, buffers and states.

    model, loss, optimizer, clip, tensor  as for `ff.parallelize`; none of them is changed
    batches  global batches, each of which is divided among the data ranks; the first `steps` of them are used
    plan     how the mesh trains. Its ranks are forks of this process, on CPUs; under a launcher they are those of the
             job, every rank calls this with the same arguments, and every rank gets the result

    `result.ok` says whether the plan trains as one device does, `result.problems` where it does not, and `result.bound`
    how far numbers may deviate and why; `print(result)` shows all of it. Raises PlanError for a plan whose training is
    not meant to equal one device's, and SettingError for arguments of the wrong kind.
    """
    check_arguments(
        model=model, loss=loss, optimizer=optimizer, plan=plan, tensor=tensor or {}, clip=clip, seed=SEED, skip_nan=0
    )
    if plan is None:
        raise PlanError(Problem("no plan", "the plan to compare with one device", "ff.Plan(dp=2)"), where="ff.verify")
    check_verifiable(plan)
    used = list(itertools.islice(batches, steps))
    if not used:
        problem = Problem("no batches", "at least one global batch (inputs, targets)", "batches = [next(iter(loader))]")
        raise SettingError(problem, where="ff.verify")

    def rank() -> dict[str, Any]:
        torch.manual_seed(SEED)
        own = model if isinstance(model, nn.Module) else model()
        training = Training(own, loss, optimizer, plan, {"clip": clip, "tensor": tensor, "seed": SEED})
        result = verify_batches(training, used)
        return init.init_communicator().all_gather_json(None if result is None else result.as_json())[0]

    if plan.mesh.size == 1 or init.world().size > 1:
        with torch.random.fork_rng():
            return VerifyResult(**rank())
    return VerifyResult(**launch(rank, n=plan.mesh.size))

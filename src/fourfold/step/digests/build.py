"""Same build: ranks compare what they build a step of, before anything else that is collective.

Law: the exchange is the same whatever a rank builds, and it is the first. So ranks with another model or another plan,
whose next collectives would not pair up, raise the same PlanError, and none waits for another.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.optim.option_text import describe_options
from fourfold.parts.optim.user_optimizer import group_indices
from fourfold.plan.plan import Plan
from fourfold.step.digests.structure import function_items, model_items
from fourfold.step.digests.table import Item, check_same_items
from fourfold.words.version import VERSION


def check_same_build(
    ranks: Communicator,
    call: str,
    model: nn.Module,
    *,
    plan: Plan,
    options: Mapping[str, Any],
    loss: Any = None,
    optimizer: Optimizer | None = None,
    shape: Callable[[Tensor], Any] = lambda tensor: list(tensor.shape),
) -> None:
    """Raise PlanError, on every rank, unless all ranks build the same step. Collective; of the whole world.

    call       what builds it, such as "ff.parallelize"
    optimizer  None: it is made later, see `check_same_optimizer`
    shape      what of a tensor's shape must be the same
    """
    kinds: dict[str, Iterable[Item]] = {
        "call": [("", call)],
        "versions": version_items(),
        "plan": [(name, str(value)) for name, value in dataclasses.asdict(plan).items()],
        "options": [(name, str(value)) for name, value in options.items()],
        "model": model_items(model, shape),
        "loss": function_items(loss),
    }
    if optimizer is not None:
        kinds["optimizer"] = optimizer_items(optimizer, model)
    check_same_items(ranks, kinds)


def check_same_optimizer(ranks: Communicator, optimizer: Optimizer, model: nn.Module) -> None:
    """Raise PlanError, on every rank, unless all ranks have the same optimizer. Collective."""
    check_same_items(ranks, {"optimizer": optimizer_items(optimizer, model)})


def version_items() -> list[Item]:
    python = ".".join(platform.python_version_tuple()[:2])
    return [("fourfold", VERSION), ("torch", torch.__version__), ("Python", python)]


def optimizer_items(optimizer: Optimizer, model: nn.Module) -> list[Item]:
    """Class, options of the groups, and which parameter is in which group."""
    groups = group_indices(optimizer, dict(model.named_parameters()))
    return [
        *describe_options(optimizer).items(),
        *((f"the group of {name}", str(index)) for name, index in groups.items()),
    ]

"""Same build: ranks compare what they build a step of, before anything else that is collective.

Law: the exchange is the same whatever a rank builds, and it is the first. So ranks with another model or another plan,
whose next collectives would not pair up, raise the same PlanError, and none waits for another.
"""

import dataclasses
import platform
import secrets
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.comm.communicator import Communicator
from fourfold.model.batch import named_values
from fourfold.optim.user_optimizer import group_indices
from fourfold.plan.plan import Plan
from fourfold.proof.digests.structure import function_items, hook_items, model_items
from fourfold.proof.digests.table import DIGEST_BITS, Item, check_same_items, digest, digest_bytes
from fourfold.torch_kit.option_text import describe_options
from fourfold.words.version import VERSION

NOT_OF_THE_USER = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
"""Folders of Python's library and of this package."""


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


def build_digest(model: nn.Module, plan: Plan, options: Mapping[str, Any], loss: Any, batch: tuple[Any, Any]) -> int:
    """Of what decides whether a step on such a batch is right: the model, the loss, their code and hooks, the plan, the
    options, packages, and the batch's names, dtypes and dims, but no size and no value. A batch without samples, which
    shows nothing, has the digest of no other.
    """
    tensors = [(name, each) for name, each in named_values("batch", batch) if isinstance(each, Tensor)]
    items = [
        *version_items(),
        *package_items(model),
        *((name, str(value)) for name, value in (dataclasses.asdict(plan) | dict(options)).items()),
        *model_items(model, lambda tensor: list(tensor.shape)),
        *hook_items(model),
        *function_items(loss),
        *((name, f"{tensor.dtype} {tensor.dim()}") for name, tensor in tensors),
    ]
    return digest(items) if any(tensor.numel() for _, tensor in tensors) else secrets.randbits(DIGEST_BITS)


def package_items(model: nn.Module) -> list[Item]:
    """Versions of the packages that supply modules; and digests of the user's own files, which have no version."""
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()})
    versions = [(name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in packages]
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    own = sorted(file for file in files if file.endswith(".py") and not file.startswith(NOT_OF_THE_USER))
    own = [file for file in own if not {"site-packages", "dist-packages"} & {*Path(file).parts}]
    return versions + [("file", str(digest_bytes(Path(file).read_bytes()))) for file in own if Path(file).is_file()]


def optimizer_items(optimizer: Optimizer, model: nn.Module) -> list[Item]:
    """Class, options of the groups, and which parameter is in which group."""
    groups = group_indices(optimizer, dict(model.named_parameters()))
    return [
        *describe_options(optimizer).items(),
        *((f"the group of {name}", str(index)) for name, index in groups.items()),
    ]

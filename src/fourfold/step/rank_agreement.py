"""Rank agreement: every rank must build its step from the same parameters, plan, options and optimizer.

Law: ranks that differ raise the same PlanError on every rank, before any weight moves.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.optim.option_text import ABSENT, CLASS_KEY, describe_options
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.words.errors import PlanError, Problem


def check_same_on_ranks(
    communicator: Communicator,
    specs: Sequence[ParamSpec],
    shapes: Mapping[str, list[int] | str],
    *,
    plan: Plan,
    options: Mapping[str, Any],
    optimizer: Optimizer,
) -> None:
    """Raise PlanError unless every rank has the same parameters, plan, options and optimizer. Collective."""
    lines = [f"{s.name} {shapes[s.name]} {s.dtype}, group {s.param_group}" for s in specs]
    lines += [f"{name} {value}" for name, value in options.items()]
    lines += plan.to_toml(defaults=True).splitlines()
    optimizer_options = describe_options(optimizer)
    digest = hashlib.blake2b(json.dumps([lines, optimizer_options]).encode(), digest_size=16).hexdigest()
    if len(set(communicator.all_gather_json(digest))) == 1:
        return
    lines_by_rank, optimizers = communicator.all_gather_json(lines), communicator.all_gather_json(optimizer_options)
    for rank, others in enumerate(lines_by_rank):
        for first, other in itertools.zip_longest(lines_by_rank[0], others, fillvalue="nothing"):
            if first != other:
                problem = Problem(f"rank 0 has {first}, rank {rank} has {other}", "the same on every rank")
                raise PlanError(problem, where="the ranks")
    raise PlanError(_optimizer_problems(optimizers), where="the optimizers of the ranks")


def _optimizer_problems(optimizers: Sequence[Mapping[str, str]]) -> list[Problem]:
    """In what the first optimizer that differs from rank 0's differs."""
    first = optimizers[0]
    rank, other = next((rank, other) for rank, other in enumerate(optimizers) if other != first)
    differing = [name for name in dict.fromkeys([*first, *other]) if first.get(name) != other.get(name)]
    if CLASS_KEY in differing:
        differing = [CLASS_KEY]  # options of two classes are hardly comparable
    else:
        # Leave out a default that differs in a group too.
        grouped = {name.split(" ", 2)[2] for name in differing if name.startswith("group")}
        differing = [name for name in differing if name.removeprefix("default ") not in grouped]
    texts = [(f"{name} = {first.get(name, ABSENT)}", f"{name} = {other.get(name, ABSENT)}") for name in differing]
    need, attempt = "the same on every rank", "an optimizer made in the same way on every rank"
    return [Problem(f"rank 0 has {a}, rank {rank} has {b}", need, attempt) for a, b in texts]

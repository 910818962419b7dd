"""Probes: parts of a training that are measured by themselves, made as a step of a plan makes them.

probe      a model and the parts of a step on the mesh of a plan; its programs are never run
shortened  a model with a few blocks of each kind of its chain: the blocks are measured, not the plan
kind       blocks that compute alike: of one class, with weights of the same shapes and the same rules for tp
Law: what a probe computes and sends, a step of the plan computes and sends in the same way.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fourfold.axes.pipeline.work.chain import Chain, find_chain
from fourfold.axes.tensor.rules.styles import matches
from fourfold.comm.communicator import Communicator
from fourfold.plan.lowering import Blueprint
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prices import GroupShape
from fourfold.step.argument_checks import StepOptions
from fourfold.step.assembly import Assembly, assemble
from fourfold.step.initial_model import make_initial_model
from fourfold.step.model_checks import check_plan_on_ranks
from fourfold.step.stage import Stage
from fourfold.words.task import Task

BLOCKS_OF_A_KIND = 3


class Probe(NamedTuple):
    """A model on the mesh of a plan, the parts of its steps, and the ranks."""

    model: nn.Module
    assembly: Assembly
    world: Communicator

    @property
    def stage(self) -> Stage:
        """This rank's, of its place on the pipeline axis."""
        return self.assembly.parts.stage

    @property
    def blueprint(self) -> Blueprint:
        """What lowering has decided."""
        return self.assembly.programs.blueprint

    @property
    def group(self) -> GroupShape:
        """The ranks that sum this rank's gradients."""
        hosts = self.blueprint.group_of(self.world.global_rank).hosts
        return GroupShape(hosts.ranks_per_host, hosts.num_hosts, hosts.shares_memory)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all buckets, as gradient hooks number them."""
        return [parameter for bucket in self.stage.parameters for parameter in bucket]


def make_probe(task: Task, plan: Plan, ranks: Communicator) -> Probe:
    """The parts of a task's step by a plan. Collective. Raises PlanError or TaskError."""
    initial = make_initial_model(task.model, ranks.device, defers=plan.tp > 1 or plan.pp > 1, is_log_rank=False)
    check_plan_on_ranks(initial.model, plan, ranks, clip=task.clip)
    world = ranks.on_mesh(plan.mesh)
    options = StepOptions(clip=task.clip, tensor=task.tensor)
    return Probe(initial.model, assemble(initial, task.loss, task.optimizer, plan, world, options), world)


class Shortened(NamedTuple):
    """A task whose model has some of the blocks of its chain. `kept`: their indices in the whole chain."""

    task: Task
    kept: tuple[int, ...]


def shorten(task: Task, model: nn.Module) -> Shortened:
    """The task with a few blocks of each kind. `model`: the task's, which may be on the meta device."""
    chain = find_chain(model)
    kept = _kept_blocks(model, chain, task.tensor)
    if len(kept) == len(chain.blocks):
        return Shortened(task, kept)
    make, dropped = task.model, [name for index, name in enumerate(chain.blocks) if index not in kept]

    def make_shortened() -> nn.Module:
        made = make()
        for name in reversed(dropped):
            _drop_block(made, name)
        return made

    renamed = {chain.blocks[index]: chain.blocks[place] for place, index in enumerate(kept)}
    rules = _rules_left(model, task.tensor, renamed)
    return Shortened(dataclasses.replace(task, model=make_shortened, tensor=rules), kept)


def _rules_left(model: nn.Module, rules: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """The rules by the names of modules. `renamed`: by block that is kept, its name among those that are left."""
    left = {}
    for name, _ in model.named_modules():
        rule = next((rule for pattern, rule in rules.items() if matches(pattern, name)), None)
        block = next((each for each in renamed if name.startswith(f"{each}.")), None)
        if rule is not None and block is not None:
            left[renamed[block] + name.removeprefix(block)] = rule
        elif rule is not None and not _is_in_list_of(name, renamed):
            left[name] = rule
    return left


def _is_in_list_of(name: str, blocks: Iterable[str]) -> bool:
    """Whether a module is in the list that has these blocks."""
    container = next(iter(blocks)).rpartition(".")[0]
    return name.startswith(f"{container}.") if container else True


def _kept_blocks(model: nn.Module, chain: Chain, rules: Mapping[str, str]) -> tuple[int, ...]:
    """Of each kind of block, the first few."""
    counts: dict[object, int] = {}
    kept = []
    for index, name in enumerate(chain.blocks):
        kind = _kind(name, model.get_submodule(name), rules)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= BLOCKS_OF_A_KIND:
            kept.append(index)
    return tuple(kept)


def _kind(path: str, block: nn.Module, rules: Mapping[str, str]) -> object:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    modules = [name for name, _ in block.named_modules() if name]
    split = [(name, rule) for name in modules for pattern, rule in rules.items() if matches(pattern, f"{path}.{name}")]
    return type(block), shapes, tuple(split)


def _drop_block(model: nn.Module, name: str) -> None:
    """Take a block out of the list that has it."""
    path, _, key = name.rpartition(".")
    container: Any = model.get_submodule(path)
    keys: Sequence[str] = list(dict(container.named_children()))
    del container[keys.index(key)]

"""Chain: the blocks of a model that are divided among pipeline stages.

chain    modules that the model calls one after the other, each with what the one before has returned: the children of
         an `nn.ModuleList` or `nn.Sequential`
ends     the modules with weights outside of the chain: before it (an embedding), behind it (a norm, a head)
segment  a module of the chain or of its ends, or what the model's forward does behind one; 0: in front of the first
own      weights of a module around the chain itself, such as the positions of a vision transformer, and of lists there
Law: each weight has one stage. That blocks are called in this order, once each, the dry run shows (`attach/check.py`).
Law: a segment draws the same numbers with any number of stages and any schedule: they follow from the microbatch and
the segment. Outside of a stage's forward, torch's generators are as if it had drawn nothing.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fourfold.axes.pipeline.rules.division import StageSpec, divide, division_problems, name_problems, stage_names
from fourfold.axes.pipeline.rules.spec import owner_of
from fourfold.plan.rng import segment_seed
from fourfold.torch_kit import generators
from fourfold.words.errors import PlanError, Problem

MIN_SHARE = 0.5  # of the weights of the largest chain: a list with no more is inside one of its blocks


class Chain(NamedTuple):
    """The names of modules, in the order in which the model defines them; `own` are names of parameters."""

    blocks: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


class StageMap(NamedTuple):
    """A model's chain, and the blocks of each stage. Each stage is at a place of the pipeline axis (`owner_of`)."""

    chain: Chain
    blocks: tuple[range, ...]
    num_places: int = 1
    ties: Mapping[str, Sequence[str]] = {}
    """By weight of the first place: its other names, on the last place."""

    def place_of(self, parameter: str) -> int:
        """The place on the pipeline axis that has a parameter."""
        return owner_of(self.stage_of(parameter), self.num_places)

    def stages_at(self, place: int) -> range:
        """The stages of a place."""
        return range(place, self.num_stages, self.num_places)

    @property
    def num_stages(self) -> int:
        return len(self.blocks)

    def stage_of(self, parameter: str) -> int:
        """The stage that computes with a parameter."""
        for stage, blocks in enumerate(self.blocks):
            if any(_is_in(parameter, self.chain.blocks[block]) for block in blocks):
                return stage
        return self.num_stages - 1 if is_behind(self.chain, parameter) else 0

    def modules_elsewhere(self, place: int) -> tuple[str, ...]:
        """The blocks and ends that other places have."""
        modules = (*self.chain.before, *self.chain.blocks, *self.chain.behind)
        return tuple(name for name in modules if self.place_of(name) != place)

    def modules_in_front(self, stage: int) -> tuple[str, ...]:
        """The blocks of earlier stages, and the modules before the chain; none for the first stage."""
        return (*self.chain.before, *self.chain.blocks[: self.blocks[stage].start]) if stage else ()

    def boundaries(self) -> list[str]:
        """By stage but the last: the block whose output it sends."""
        return [self.chain.blocks[blocks.stop - 1] for blocks in self.blocks[:-1]]


def map_stages(model: nn.Module, spec: StageSpec) -> StageMap:
    """The stages of a model. Raises PlanError if it cannot be divided as the plan says."""
    num_stages = spec.num_stages
    if num_stages == 1:
        return StageMap(Chain(), (range(0),))
    groups = stage_names(spec.division)
    chain, blocks = _divide(model, spec) if groups is None else _divide_by_name(model, groups, num_stages)
    found = StageMap(chain, blocks, spec.num_places)
    found = found._replace(ties=_ties_across(model, found))
    if problems := _tied_problems(model, found):
        raise PlanError(problems, where="the pipeline")
    return found


def _divide(model: nn.Module, spec: StageSpec) -> tuple[Chain, tuple[range, ...]]:
    """The chain of a model, and the blocks of each stage: by their costs, or by counts."""
    chain = find_chain(model)
    if problems := division_problems(spec.division, len(chain.blocks), spec.num_stages):
        raise PlanError(problems, where="the pipeline")
    costs = [_cost(model, name) for name in chain.blocks]
    first, last = (sum(_cost(model, name) for name in names) for names in (chain.before, chain.behind))
    return chain, divide(spec.division, costs, first, last, spec.num_stages)


def _divide_by_name(
    model: nn.Module, groups: Sequence[Sequence[str]], num_stages: int
) -> tuple[Chain, tuple[range, ...]]:
    """The same, by the names of the blocks: of the model's chain, or of modules that a user has made one of."""
    chain, modules = find_chain(model), [name for name, _ in model.named_modules() if name]
    resolved = [[_resolved(name, chain.blocks) for name in group] for group in groups]
    if not any(name in chain.blocks for group in resolved for name in group):
        resolved = [[_resolved(name, modules) for name in group] for group in groups]
        chain = _chain_of_siblings(model, [name for group in resolved for name in group])
    if problems := name_problems(resolved, chain.blocks, modules, num_stages):
        raise PlanError(problems, where="the pipeline")
    stops = list(itertools.accumulate(map(len, resolved)))
    return chain, tuple(range(stop - len(group), stop) for stop, group in zip(stops, resolved, strict=True))


def _resolved(name: str, known: Sequence[str]) -> str:
    """The full name of a module, which may be given by its last part if no other has the same."""
    if name in known:
        return name
    found = [each for each in known if each.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else name


def _chain_of_siblings(model: nn.Module, names: Sequence[str]) -> Chain:
    """The chain of these modules, which one module has, and what lies around it. Raises PlanError.

    A model without a list of blocks has its chain in its `forward` alone: the names give the order, and the dry run
    shows whether it is that of the calls.
    """
    modules = dict(model.named_modules())
    parents = {name.rpartition(".")[0] for name in names if name in modules}
    if len(parents) > 1:
        got = f"stages of modules of {' and '.join(each or 'the model itself' for each in sorted(parents))}"
        raise PlanError(Problem(got, "modules that one module has"), where="the pipeline")
    parent = next(iter(parents), "")
    children = [_joined(parent, key) for key, _ in modules[parent].named_children()]
    weighted = [name for name in children if name not in names and _num_weights(modules[name])]
    blocks = (*dict.fromkeys(name for name in names if name in children), *weighted)
    chain, own = _around(model, parent, blocks), modules[parent].named_parameters(recurse=False)
    return chain._replace(own=(*chain.own, *(_joined(parent, key) for key, _ in own)))


def find_chain(model: nn.Module) -> Chain:
    """The chain of a model; without blocks if it has none.

    Of the lists of modules with more than half of the weights that the largest has, the one with most blocks; of equal
    ones, the outermost.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    sizes = {name: _num_weights(module) for name, module in lists.items()}
    large = [name for name in lists if sizes[name] > MIN_SHARE * max(sizes.values())]
    if not large:
        return Chain()
    container = max(large, key=lambda name: len(lists[name]))
    blocks = tuple(_joined(container, name) for name, _ in lists[container].named_children())
    return _around(model, container, blocks)


def _around(model: nn.Module, container: str, blocks: tuple[str, ...]) -> Chain:
    """The chain of these blocks, and what lies around the module that has them."""
    before: list[str] = []
    behind: list[str] = []
    own: list[str] = []
    for name, module in _path(model, container):
        own += [_joined(name, key) for key, _ in module.named_parameters(recurse=False)]
        is_behind = False
        for key, child in module.named_children():
            full = _joined(name, key)
            if _is_in(container, full):
                is_behind = True
            elif is_behind:
                behind += [full] if _num_weights(child) else []
            else:
                _add_called(full, child, before, own)
    return Chain(blocks, tuple(before), tuple(behind), tuple(own))


def _add_called(name: str, module: nn.Module, called: list[str], own: list[str]) -> None:
    """Add a module with weights to those that are called; of one without a forward, such as a list, what it has."""
    if type(module).forward is not nn.Module.forward:
        called += [name] if _num_weights(module) else []
        return
    own += [_joined(name, key) for key, _ in module.named_parameters(recurse=False)]
    for key, child in module.named_children():
        _add_called(_joined(name, key), child, called, own)


def tied_parameters(model: nn.Module) -> dict[str, list[str]]:
    """The names of each parameter that has several, by the first of them."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {each[0]: each for each in names.values() if len(each) > 1}


def _ties_across(model: nn.Module, stages: StageMap) -> dict[str, list[str]]:
    """By weight: those of its other names that are of another stage."""
    found = {}
    for first, *others in tied_parameters(model).values():
        if away := [name for name in others if stages.stage_of(name) != stages.stage_of(first)]:
            found[first] = away
    return found


def _tied_problems(model: nn.Module, stages: StageMap) -> list[Problem]:
    """Weights that are tied in another way than an embedding and a head are; a module that has both names is none."""
    problems, last = [], stages.num_places - 1
    for name, others in stages.ties.items():
        is_owned = stages.stage_of(name) == 0 and all(stages.stage_of(n) == stages.num_stages - 1 for n in others)
        module, *also = (model.get_submodule(each.rpartition(".")[0]) for each in (name, *others))
        if not is_owned or last == 0 or module in also:
            got = f"one weight, {' and '.join([name, *others])}, on several stages"
            need = "each weight on one stage, or on the first and the last one, as an embedding and a head"
            problems.append(Problem(got, need, "weights that are not tied, other stages, or pp = 1"))
    return problems


def is_behind(chain: Chain, name: str) -> bool:
    """Whether a parameter or module is behind the chain."""
    return any(_is_in(name, each) for each in chain.behind)


def _path(model: nn.Module, container: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules around a list, from the model itself to the one that has it."""
    name = ""
    for key in container.split(".") if container else ():
        yield name, model.get_submodule(name)
        name = _joined(name, key)


def _cost(model: nn.Module, name: str) -> float:
    """Products per token, counted by weights: an embedding only looks up."""
    module = model.get_submodule(name)
    looked_up = sum(_num_weights(each) for each in module.modules() if isinstance(each, nn.Embedding))
    return float(_num_weights(module) - looked_up)


def _num_weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_in(name: str, module: str) -> bool:
    """Whether a parameter or module is in a module, or is it."""
    return name == module or name.startswith(f"{module}.")


# ---- block draws ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def seeded_segments(model: nn.Module, chain: Chain, seed: int, device: torch.device) -> Iterator[None]:
    """Within, one forward of the model draws the numbers of the microbatch with this seed."""

    def begin(segment: int, *_: Any) -> None:
        generators.seed(device, segment_seed(seed, segment))

    hooks = []
    for index, name in enumerate((*chain.before, *chain.blocks, *chain.behind)):
        module, inside = model.get_submodule(name), 2 * index + 1
        hooks.append(module.register_forward_pre_hook(functools.partial(begin, inside), prepend=True))
        hooks.append(module.register_forward_hook(functools.partial(begin, inside + 1)))
    try:
        with generators.unchanged(device):
            begin(0)
            yield
    finally:
        for hook in hooks:
            hook.remove()

"""Recompute: the blocks of a model whose activations backward computes again.

block     a module of a pipeline's chain (`axes/pipeline/work/chain.py`); with pp = 1, any block of the model
boundary  a block's input. Where tensor ranks have the same one, each keeps an equal part, and backward gathers it
          (ZeRO, arXiv 1910.02054, P_a)
Law: outside of a step's forward the user's blocks are as the user made them. Inside, a block has a `forward` of its
own, which calls the user's; a second forward gives what the first one gave, with the same dropout and the same weights.

torch restores its generators for the second forward. Fourfold's own draws follow from a number drawn there
(`model/rank_dropout.py`), so they are the same too. Hooks of a block run once: they are around its forward.
"""

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.work.chain import find_chain
from fourfold.axes.pipeline.work.values import is_of_torch
from fourfold.axes.tensor.work.split_region import origins
from fourfold.comm.tensor_group import TensorGroup
from fourfold.torch_kit.recompute import compute_twice, is_in_checkpoint, trained_inputs
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.torch_kit.torch_private import BatchNormBase, is_compiled, is_in_backward, swapped_state, version_of
from fourfold.words.errors import PlanError, Problem, TaskError

RECOMPUTE_NONE = 'recompute = "none"'
NUMBERS = (bool, int, float)
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


class BoundaryPart(NamedTuple):
    """This rank's part of a tensor that all ranks of a group have.

    flat  a copy, padded to equal parts
    """

    flat: Tensor
    shape: torch.Size
    is_trained: bool

    @classmethod
    def of(cls, tensor: Tensor, group: TensorGroup) -> "BoundaryPart":
        length = -(-tensor.numel() // group.size)
        own = tensor.detach().reshape(-1)[group.index * length : (group.index + 1) * length]
        flat = own.new_zeros(length)
        flat[: own.numel()] = own
        return cls(flat, tensor.shape, tensor.requires_grad)

    def gather(self, group: TensorGroup) -> Tensor:
        """The whole tensor, without its graph. Collective."""
        whole = group.all_gather(self.flat, 0)[: self.shape.numel()].view(self.shape)
        return whole.requires_grad_(self.is_trained)


def is_same_on_ranks(tensor: Tensor, group: TensorGroup) -> bool:
    """Whether all ranks of a group have the same values. Collective: shapes and dtypes must be the same.

    On the meta device there are none: fake ranks compute the same.
    """
    if tensor.is_meta:
        return True
    whole = BoundaryPart.of(tensor, group).gather(group).detach()
    is_equal = torch.equal(whole.nan_to_num(), tensor.detach().nan_to_num())
    differs = torch.tensor([not is_equal], dtype=torch.int32, device=tensor.device)
    return not int(group.all_reduce_max(differs))


class Recompute:
    """What the forward of a stage does with its blocks. `blocks`: their names; none: nothing.

    group  the ranks that have the same inputs of blocks, each of which keeps a part of them; one rank: it keeps all
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        group: TensorGroup,
        *,
        selective: bool,
        split_params: Container[str] = (),
    ) -> None:
        """`split_params`: of which the ranks of the group have parts."""
        self._model = model
        split = [p for name, p in model.named_parameters(remove_duplicate=False) if name in split_params]
        self._blocks = [_Block(name, group, split, selective=selective) for name in blocks]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the model's forward keeps of its blocks what the plan says."""
        replaced: list[tuple[nn.Module, Any]] = []
        try:
            for block in self._blocks:
                module = self._model.get_submodule(block.name)
                replaced.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = functools.partial(block.run, module, module.forward)
            yield
        finally:
            for module, before in replaced:
                if before is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = before


class RecomputedBlocks(NamedTuple):
    """The blocks of a whole model whose activations backward computes again; none: it computes none again.

    group  see `Recompute`
    """

    names: tuple[str, ...]
    group: TensorGroup
    is_selective: bool
    split_params: frozenset[str]

    def of(self, model: nn.Module, indexes: Iterable[int] | None = None) -> Recompute:
        """Those that a stage has, by their places in the chain; None: all. `model`: what the rank has of it."""
        names = self.names if indexes is None else [self.names[index] for index in indexes if self.names]
        return Recompute(model, names, self.group, selective=self.is_selective, split_params=self.split_params)


def recomputed_blocks(model: nn.Module, recompute: str, divided: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names of a model's blocks, if a plan says that backward computes them again. Raises PlanError.

    `divided`: those that its stages have; none: of its largest list.
    """
    if recompute == "none":
        return ()
    own, problems = f'recompute = "{recompute}"', list[Problem]()
    blocks = divided or find_chain(model).blocks
    attempt = 'recompute = "none", and torch.utils.checkpoint in the model'
    if not blocks:
        got = f"{own}, and a model without a list of blocks"
        problems.append(Problem(got, "blocks in an nn.ModuleList or nn.Sequential, at least two with weights", attempt))
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    if compiled:
        got = f"{own}, and {compiled[0] or 'a model'}, which is compiled"
        problems.append(Problem(got, "blocks whose forward runs as it is written", 'recompute = "none"'))
    checkpointed = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    if checkpointed:
        got = f"{own}, and gradient checkpointing in {checkpointed[0] or 'the model'} itself"
        need = "one of the two: a block in both would be computed three times"
        problems.append(Problem(got, need, 'model.gradient_checkpointing_disable(), or recompute = "none"'))
    if problems:
        raise PlanError(problems, where="recompute")
    return blocks


class _Block:
    """One block. The layout of its inputs in a first forward holds for all calls with such arguments."""

    def __init__(self, name: str, group: TensorGroup, split_params: Sequence[Tensor], *, selective: bool) -> None:
        self.name, self._group, self._selective = name, group, selective
        self._split_ids = {id(p) for p in split_params}
        self._are_whole: dict[Any, list[bool]] = {}
        """By the arguments that are tensors, which may vary: of those that need gradients, whether all ranks of the
        group have the same."""

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The block's forward."""
        # A checkpoint of the model's own around the block computes it again, without what is installed here: its two
        # forwards must be the same.
        if not torch.is_grad_enabled() or is_in_backward() or is_in_checkpoint():
            return forward(*args, **kwargs)
        self._check_arguments(kwargs)
        block = _Forwards(self.name, module, forward)
        if self._group.size == 1:
            return compute_twice(block.run, args, kwargs, selective=self._selective)
        parts = _InputParts(args, kwargs, self._boundaries(args, kwargs), self._group)

        def run(*flats: Tensor) -> Any:
            args, kwargs = parts.take()
            return block.run(*args, **kwargs)

        return compute_twice(run, parts.flats, {}, selective=self._selective)

    def _check_arguments(self, kwargs: dict[str, Any]) -> None:
        for name in CACHE_ARGUMENTS:
            if kwargs.get(name) is not None:
                got = f"{self.name} with {name}, a cache that each forward of it writes"
                problem = Problem(got, "blocks without a cache, to compute them twice", "config.use_cache = False")
                raise TaskError(problem, where="recompute")

    def _boundaries(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The block's inputs of which each rank of the group keeps a part."""
        inputs, named = trained_inputs(tree_leaves((args, kwargs))), (*enumerate(args), *kwargs.items())
        given = tuple((name, *(each.requires_grad for each in tree_leaves(value))) for name, value in named)
        if given not in self._are_whole:
            self._are_whole[given] = [self._has_whole_layout(each) for each in inputs]
        return [each for each, is_whole in zip(inputs, self._are_whole[given], strict=True) if is_whole]

    def _has_whole_layout(self, tensor: Tensor) -> bool:
        """Whether a tensor is made outside of split regions. Collective where another stage may have made it."""
        leaves = list(origins(tensor))
        if any(each is None or id(each) in self._split_ids for each in leaves):
            return False
        # Values may be equal by chance in a first forward. Of what a stage has received, nothing else is known.
        received = [each for each in leaves if each is not None and not isinstance(each, nn.Parameter)]
        return all(is_same_on_ranks(each, self._group) for each in received)


class _Forwards:
    """The two forwards of one call of a block.

    The second one leaves the statistics of batch normalizations as they are, and attributes of modules that are
    numbers, which for it are what they were before the first one.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._has_ended = False
        """Whether the first forward has."""
        self._numbers = [(vars(each), _numbers_of(vars(each))) for each in module.modules() if not is_of_torch(each)]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_ended:
            before = {name: (each, version_of(each)) for name, each in self._module.named_buffers()}
            inputs = [(each, version_of(each)) for each in tree_leaves((args, kwargs))]
            output = self._forward(*args, **kwargs)
            self._check_written(before)
            if any(version_of(each) != version for each, version in inputs):
                got = f"{self._name}, whose forward changes its input in place"
                attempt = f"inplace=False, x = x + … in place of x += …; or {RECOMPUTE_NONE}"
                raise TaskError(Problem(got, "blocks that compute the same a second time", attempt), where="recompute")
            self._has_ended = True
            return output
        copies = {name: self._module.get_buffer(name).clone() for name in self._statistics()}
        with swapped_state(self._module, copies) if copies else contextlib.nullcontext(), self._first_numbers():
            return self._forward(*args, **kwargs)

    @contextlib.contextmanager
    def _first_numbers(self) -> Iterator[None]:
        """Within, attributes that are numbers are what they were before the first forward."""
        now = [(attributes, _numbers_of(attributes)) for attributes, _ in self._numbers]
        _set_numbers(self._numbers)
        try:
            yield
        finally:
            _set_numbers(now)

    def _statistics(self) -> list[str]:
        """The buffers that batch normalizations write."""
        norms = [(name, each) for name, each in self._module.named_modules() if isinstance(each, BatchNormBase)]
        return [
            f"{name}.{key}" if name else key for name, norm in norms for key, _ in norm.named_buffers(recurse=False)
        ]

    def _check_written(self, before: Mapping[str, tuple[Tensor, int]]) -> None:
        now, statistics = dict(self._module.named_buffers()), set(self._statistics())
        for name, (buffer, version) in before.items():
            if name not in statistics and (now.get(name) is not buffer or version_of(buffer) != version):
                got = f"{self._name}, whose forward writes the buffer {name}"
                need = "blocks that compute the same a second time: only batch normalizations may write theirs"
                raise TaskError(Problem(got, need, RECOMPUTE_NONE), where="recompute")


def _numbers_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if type(value) in NUMBERS}


def _set_numbers(changes: Iterable[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Give attributes the numbers that are to be among them."""
    for attributes, numbers in changes:
        for key in _numbers_of(attributes).keys() - numbers.keys():
            del attributes[key]
        attributes.update(numbers)


class _InputParts:
    """The inputs of a block, of some of which each rank of a group keeps a part.

    flats  these parts
    """

    def __init__(self, args: Any, kwargs: Any, boundaries: Sequence[Tensor], group: TensorGroup) -> None:
        self._first: Any = (args, kwargs)
        self._group = group
        parts = {id(each): BoundaryPart.of(each, group) for each in boundaries}
        self._by_flat = {id(part.flat): part for part in parts.values()}
        self.flats = [part.flat for part in parts.values()]
        self._held = tree_map((args, kwargs), lambda each: parts[id(each)].flat if id(each) in parts else each)

    def take(self) -> tuple[Any, Any]:
        """The arguments: the first time as they were given; then of the ranks' parts, which is collective."""
        if self._first is not None:
            given, self._first = self._first, None
            return given
        return tree_map(self._held, self._whole)

    def _whole(self, tensor: Tensor) -> Tensor:
        part = self._by_flat.get(id(tensor))
        return tensor if part is None else part.gather(self._group)

"""Sequence parallelism: modules at whose entry or exit hidden tensors are split over tokens, or gathered.

hidden  the first floating-point tensor among the arguments of a module, or of what it returns
role    what a module does, as `axes/tensor/rules/sequence_parallel.py` has inferred
Law: a module keeps its object, its name and its base class, and its own forward sees no difference but the tokens of
the hidden tensor. Gradients of parameters that work on some tokens are summed in the module that has them: so it does
not matter around which modules a checkpoint stands.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from fourfold.axes.tensor.rules.sequence_parallel import SequenceParallelLayout
from fourfold.axes.tensor.work.layers import SplitLayer, summed_gradients
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.words.errors import Problem, TaskError

Function = Callable[[Tensor], Tensor]


class Role(NamedTuple):
    """What a module does.

    splits   it gets all tokens, and its own forward this rank's
    gathers  it gets this rank's tokens, and its own forward all of them
    ends     it returns all tokens, and its own forward this rank's
    sums     the gradients of its own parameters are addends
    """

    name: str
    splits: bool
    gathers: bool
    ends: bool
    sums: bool


class SequenceParallelModule(nn.Module):
    """Mixed into the class of any module."""

    token_region: SplitRegion
    token_role: Role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        role, region = self.token_role, self.token_region
        if role.splits:
            split = functools.partial(region.split_tokens, where=role.name)
            args, kwargs = _replace_argument(args, kwargs, split, role.name)
        if role.gathers:
            gather = functools.partial(region.gather_tokens, where=role.name)
            args, kwargs = _replace_argument(args, kwargs, gather, role.name)
        forward = cast(Callable[..., Any], super().forward)
        if role.sums:
            with summed_gradients(self, region):
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        if role.ends:
            gather = functools.partial(region.gather_tokens, where=f"the end of {role.name}")
            output = _replace_output(output, gather, role.name)
            region.end_tokens()
        return output


def split_tokens(model: nn.Module, layout: SequenceParallelLayout, region: SplitRegion) -> None:
    """Make modules split and gather hidden tensors. Their layers are split already."""
    for name in layout.entries | layout.containers | layout.exits | layout.summed:
        module = model.get_submodule(name)
        module.__class__ = _sequence_parallel_class(type(module))
        entered = cast(SequenceParallelModule, module)
        places = (layout.entries, layout.containers, layout.exits, layout.summed)
        entered.token_region, entered.token_role = region, Role(name, *(name in place for place in places))
    for name in layout.rows:
        cast(SplitLayer, model.get_submodule(name)).splits_tokens = True


@functools.cache
def _sequence_parallel_class(base: type[nn.Module]) -> type[nn.Module]:
    return cast(type[nn.Module], type(f"TokenSplit{base.__name__}", (SequenceParallelModule, base), {}))


def _replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], function: Function, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values = _replace_hidden((*args, *kwargs.values()), function, f"{name} gets")
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _replace_output(output: Any, function: Function, name: str) -> Any:
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return type(output)(_replace_hidden(output, function, f"{name} returns"))
    return _replace_hidden([output], function, f"{name} returns")[0]


def _replace_hidden(values: Iterable[Any], function: Function, what: str) -> list[Any]:
    """The values with another hidden tensor, wherever it stands among them."""
    values = list(values)
    hidden = next((each for each in values if isinstance(each, Tensor) and each.is_floating_point()), None)
    if hidden is None:
        problem = Problem(
            f"{what} no floating-point tensor", "the hidden tensor of the tokens", "sequence_parallel = false"
        )
        raise TaskError(problem, where="the tensor axis")
    new = function(hidden)
    return [new if each is hidden else each for each in values]

"""Transform signature: whether a transform takes (sample, generator), or the sample alone, as torchvision's do.

Law: a signature is read once, where the transform is given; what can be called in neither way is refused there.
"""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from fourfold.torch_kit.torch_private import uncompiled
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem

WHERE = "the transform"
NEED = "a function (sample, generator) -> sample, or (sample) -> sample"
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


Call = Callable[[Any, torch.Generator], Any]


def with_generator(transform: Any) -> Call:
    """The transform as a function of (sample, generator). Raises DataError if it needs other arguments.

    It is given the generator if a parameter has this name, or the second one has no default, or a function takes any
    number of arguments. A module that takes any number, as torchvision's v2 transforms do, is given the sample alone,
    and so is what has no signature, such as a function written in C.
    """
    if problems := argument_checks.callable_problems("transform", transform, need=f"{NEED}, or FILE.py:name"):
        raise DataError(problems, where=WHERE)
    is_module = isinstance(transform, nn.Module)
    try:
        signature = inspect.signature(uncompiled(transform).forward if is_module else transform)
    except (TypeError, ValueError):
        return _alone(transform)
    parameters = list(signature.parameters.values())
    positional = [each for each in parameters if each.kind in POSITIONAL]
    takes_any = not is_module and any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)
    if len(positional) > 1 and (positional[1].name == "generator" or positional[1].default is Parameter.empty):
        adapt = _both
    elif "generator" in signature.parameters:
        adapt = _by_name
    else:
        adapt = _both if takes_any and len(positional) < 2 else _alone
    try:
        adapt(signature.bind)(None, torch.default_generator)
    except TypeError as error:
        name = getattr(transform, "__name__", type(transform).__name__)
        is_class = isinstance(transform, type)
        attempt = f"an instance, {name}(…)" if is_class else "functools.partial, which binds other arguments"
        raise DataError(Problem(f"transform = {name}{signature}", NEED, attempt), where=WHERE) from error
    return adapt(transform)


def _both(function: Any) -> Call:
    return function


def _by_name(function: Any) -> Call:
    return lambda sample, generator: function(sample, generator=generator)


def _alone(function: Any) -> Call:
    return lambda sample, generator: function(sample)

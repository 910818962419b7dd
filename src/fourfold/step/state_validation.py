"""State validation: whether a saved state can be loaded into a step.

Law: a state that does not fit is refused before anything is changed. Problems are reported together, except where one
makes the other checks impossible.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.optim.user_optimizer import group_indices, state_keys
from fourfold.words.errors import Problem, closest_match

# model: weights and buffers by name. optimizer: states by parameter name. groups: options of the optimizer's groups.
# record: what the first step has fixed (launch order, nominal count), and the optimizer's class.
STATE_KEYS = ("model", "optimizer", "groups", "record")

WholeShape = Callable[[str, Sequence[int]], tuple[int, ...]]
"""The shape of a tensor of the whole model, by its name and the shape that it has in this rank's model."""


def state_problems(
    state: Any,
    model_state: Mapping[str, Any],
    trainable: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    whole_shape: WholeShape,
) -> list[Problem]:
    """Why `state` cannot come from `TrainStep.state_dict` of such a model and optimizer.

    `model_state` is the model's state_dict, `trainable` its trainable parameters by name.
    """
    if not isinstance(state, Mapping) or any(part not in state for part in STATE_KEYS):
        got = f"a {type(state).__name__}"
        if isinstance(state, Mapping):
            got = f"a state without {', '.join(part for part in STATE_KEYS if part not in state)}"
        return [Problem(got, "what step.state_dict() returns", "init= or step.load_weights(…) for weights alone")]
    return [
        *_model_problems(state["model"], model_state, whole_shape),
        *_optimizer_problems(state, trainable, optimizer, whole_shape),
    ]


def weight_problems(values: Any, trainable: Mapping[str, Tensor], whole_shape: WholeShape) -> list[Problem]:
    """Why `values` cannot replace the weights of trainable parameters, by name."""
    if not isinstance(values, Mapping):
        return [Problem(f"a {type(values).__name__}", "a dict of tensors by name of trainable parameters")]
    problems = []
    for name, value in values.items():
        parameter = trainable.get(name)
        if parameter is None:
            problems.append(
                Problem(f"{name}", "the name of a trainable parameter", closest_match(str(name), trainable) or "")
            )
        elif not isinstance(value, Tensor):
            problems.append(Problem(f"a {type(value).__name__} for {name}", "a tensor"))
        elif value.shape != (shape := whole_shape(name, parameter.shape)):
            problems.append(Problem(f"{name} of shape {list(value.shape)}", f"shape {list(shape)}"))
        # By kind of number only: float64 may become float16, but a complex number no real one.
        elif not torch.can_cast(value.dtype, parameter.dtype):
            got, need = (str(each).removeprefix("torch.") for each in (value.dtype, parameter.dtype))
            problems.append(Problem(f"{name} of {got}", f"numbers that fit into {need}"))
    return problems


def tied_problems(model_state: Mapping[str, Any], values: Mapping[str, Any]) -> list[Problem]:
    """Tied names of a model's `state_dict` with different values: the last one would win."""
    problems, first = [], {}
    for name, tensor in model_state.items():
        other = first.setdefault(id(tensor), name)
        if other != name and not torch.equal(values[name], values[other]):
            problems.append(
                Problem(f"{other} and {name} with different values", "the same values: the model ties them")
            )
    return problems


def _model_problems(
    values: Mapping[str, Any], model_state: Mapping[str, Any], whole_shape: WholeShape
) -> Iterator[Problem]:
    wrong = [
        *(name for name in model_state if name not in values),
        *(name for name in values if name not in model_state),
    ]
    both = [(name, values[name], tensor) for name, tensor in model_state.items() if name in values]
    tensors = [(name, new, old) for name, new, old in both if isinstance(old, Tensor)]
    shapes = {name: whole_shape(name, old.shape) for name, _, old in tensors}
    wrong += [name for name, new, _ in tensors if not isinstance(new, Tensor) or new.shape != shapes[name]]
    if wrong:
        yield Problem(f"{', '.join(wrong)}", "the model's own names and shapes", "the state of this model")
    else:
        yield from tied_problems({name: old for name, _, old in tensors}, values)
    for name, new, old in tensors:
        if isinstance(new, Tensor) and not torch.can_cast(new.dtype, old.dtype):
            got, need = (str(each).removeprefix("torch.") for each in (new.dtype, old.dtype))
            yield Problem(f"{name} of {got}", f"numbers that fit into {need}")


def _optimizer_problems(
    state: Mapping[str, Any],
    trainable: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    whole_shape: WholeShape,
) -> Iterator[Problem]:
    num_groups = len(optimizer.param_groups)
    if len(state["groups"]) != num_groups:
        yield Problem(f"{len(state['groups'])} groups of options", f"{num_groups}", "the optimizer it was saved with")
        return
    states, saved = state["optimizer"], state["record"].get("optimizer")
    yield from optimizer_problems(optimizer, trainable, {name: set(keys) for name, keys in states.items()}, saved=saved)
    missing = [name for name in trainable if name not in states]
    if missing:
        yield Problem(f"no optimizer state of {', '.join(missing)}", "one for every trainable parameter, even if empty")
    for name, parameter in trainable.items():
        shape = whole_shape(name, parameter.shape)
        for key, value in states.get(name, {}).items():
            if isinstance(value, Tensor) and value.numel() != math.prod(shape):
                yield Problem(f"{key} of {name}, shape {list(value.shape)}", f"shape {list(shape)}")


def optimizer_problems(
    optimizer: torch.optim.Optimizer,
    trainable: Mapping[str, Tensor],
    keys: Mapping[str, set[str]],
    *,
    saved: str | None,
) -> Sequence[Problem]:
    """Why the optimizer cannot continue from states with these keys, by parameter.

    `saved`: the class name of the optimizer that saved them, if known.
    """
    name = type(optimizer).__name__
    attempt = "the optimizer it was saved with, or init= with its weights"
    if saved not in (None, name):
        return [Problem(f"{name}, and states of {saved}", f"{saved}", attempt)]
    group_of = group_indices(optimizer, trainable)  # type: ignore[arg-type]
    needed = {group: state_keys(optimizer, group) for group in set(group_of.values())}
    for parameter, group in group_of.items():
        missing = needed[group] - keys[parameter] if keys.get(parameter) else None
        if missing:  # A parameter without any state has not been updated yet.
            got = f"states of {parameter} without {', '.join(sorted(missing))}"
            return [Problem(got, f"what {name} with its options keeps", attempt)]
    return []

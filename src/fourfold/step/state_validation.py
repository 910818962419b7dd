"""Fits: whether a state can be put back into a step.

Law: what does not fit is told before anything is changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.parts.optim.user_optimizer import group_indices, state_keys
from fourfold.words.errors import Problem, closest_match

STATE_KEYS = ("model", "optimizer", "groups", "record")


def state_problems(
    state: Any, model_state: Mapping[str, Any], trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> list[Problem]:
    """Why `state` is none that `TrainStep.state_dict` gives of such a model and optimizer.

    `own` is the model's state_dict, `trainable` its trainable parameters by name.
    """
    if not isinstance(state, Mapping) or any(part not in state for part in STATE_KEYS):
        got = f"a {type(state).__name__}"
        if isinstance(state, Mapping):
            got = f"a state without {', '.join(part for part in STATE_KEYS if part not in state)}"
        return [Problem(got, "what step.state_dict() gives", "init= or step.put(…) for weights alone")]
    return [*_model_problems(state["model"], model_state), *_optimizer_problems(state, trainable, optimizer)]


def weight_problems(values: Any, trainable: Mapping[str, Tensor]) -> list[Problem]:
    """Why `values` are no new weights, by name, of trainable parameters."""
    if not isinstance(values, Mapping):
        return [Problem(f"a {type(values).__name__}", "a dict of tensors by name of trainable parameters")]
    problems = []
    for name, value in values.items():
        here = trainable.get(name)
        if here is None:
            problems.append(
                Problem(f"{name}", "the name of a trainable parameter", closest_match(str(name), trainable) or "")
            )
        elif not isinstance(value, Tensor):
            problems.append(Problem(f"a {type(value).__name__} for {name}", "a tensor"))
        elif value.shape != here.shape:
            problems.append(Problem(f"{name} of shape {list(value.shape)}", f"shape {list(here.shape)}"))
        elif not torch.can_cast(value.dtype, here.dtype):
            got, need = (str(each).removeprefix("torch.") for each in (value.dtype, here.dtype))
            problems.append(Problem(f"{name} of {got}", f"numbers that fit into {need}"))
    return problems


def tied_problems(model_state: Mapping[str, Any], values: Mapping[str, Any]) -> list[Problem]:
    """Names of one tensor of a model's `state_dict` under which `values` has different ones: the last would win."""
    problems, first = [], {}
    for name, tensor in model_state.items():
        other = first.setdefault(id(tensor), name)
        if other != name and not torch.equal(values[name], values[other]):
            problems.append(Problem(f"{other} and {name} with other values", "the same: the model ties them"))
    return problems


def _model_problems(values: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Problem]:
    strange = [*(name for name in own if name not in values), *(name for name in values if name not in own)]
    both = [(name, values[name], value) for name, value in own.items() if name in values]
    tensors = [(name, there, here) for name, there, here in both if isinstance(here, Tensor)]
    strange += [name for name, there, here in tensors if not isinstance(there, Tensor) or there.shape != here.shape]
    if strange:
        yield Problem(f"{', '.join(strange)}", "the model's own names and shapes", "the state of this model")
    else:
        yield from tied_problems({name: here for name, _, here in tensors}, values)
    for name, there, here in tensors:
        if isinstance(there, Tensor) and not torch.can_cast(there.dtype, here.dtype):
            got, need = (str(each).removeprefix("torch.") for each in (there.dtype, here.dtype))
            yield Problem(f"{name} of {got}", f"numbers that fit into {need}")


def _optimizer_problems(
    state: Mapping[str, Any], trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[Problem]:
    num_groups = len(optimizer.param_groups)
    if len(state["groups"]) != num_groups:
        yield Problem(f"{len(state['groups'])} groups of options", f"{num_groups}", "the optimizer it was saved with")
        return
    states, saved = state["optimizer"], state["record"].get("optimizer")
    yield from optimizer_problems(optimizer, trainable, {name: set(keys) for name, keys in states.items()}, saved=saved)
    missing = [name for name in trainable if name not in states]
    if missing:
        yield Problem(f"no optimizer state of {', '.join(missing)}", "one of every trainable parameter, if empty")
    for name, parameter in trainable.items():
        for key, value in states.get(name, {}).items():
            if isinstance(value, Tensor) and value.numel() != parameter.numel():
                yield Problem(f"{key} of {name}, shape {list(value.shape)}", f"shape {list(parameter.shape)}")


def optimizer_problems(
    optimizer: torch.optim.Optimizer,
    trainable: Mapping[str, Tensor],
    keys: Mapping[str, set[str]],
    *,
    saved: str | None,
) -> Sequence[Problem]:
    """Where states, by parameter and key, are not those that the optimizer goes on from.

    `saved`: the name of the class that they are of, where it is known.
    """
    name = type(optimizer).__name__
    attempt = "the optimizer it was saved with, or init= with its weights"
    if saved not in (None, name):
        return [Problem(f"{name}, and states of {saved}", f"{saved}", attempt)]
    group_of = group_indices(optimizer, trainable)  # type: ignore[arg-type]
    needed = {group: state_keys(optimizer, group) for group in set(group_of.values())}
    for parameter, group in group_of.items():
        missing = needed[group] - keys[parameter] if keys.get(parameter) else None
        if missing:  # Without any state a parameter has not been updated yet.
            got = f"states of {parameter} without {', '.join(sorted(missing))}"
            return [Problem(got, f"what {name} with its options keeps", attempt)]
    return []

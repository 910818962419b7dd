"""Initial model: the module that a step trains, given as it is or as the function that makes it.

Law: with tp > 1 a rank that is given a function never holds more than its shards and one whole weight at a time. Where
that cannot be, the model is made whole, as one device makes it, and the log says why. The weights are the same.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn

from fourfold.step.argument_checks import device_problems, model_argument_problems
from fourfold.torch_kit.deferred_init import OWN_WEIGHTS, InitialModel, InitialWeights, deferred_model
from fourfold.words.error_notes import describe_function, noting
from fourfold.words.errors import FourfoldError, SettingError

log = logging.getLogger("fourfold")


def make_initial_model(
    model: nn.Module | Callable[[], nn.Module] | InitialModel,
    device: torch.device,
    *,
    defers: bool,
    is_log_rank: bool,
) -> InitialModel:
    """The model itself, or what the function makes, moved to the device. `defers`: weights of a function are deferred.

    Raises SettingError, and what the function raises.
    """
    if isinstance(model, InitialModel):
        return model
    if isinstance(model, nn.Module):
        return InitialModel(model.to(device))
    with noting(f"  in the model's function, {describe_function(model)}"):
        made, weights = _deferred(model, device, is_log_rank=is_log_rank) if defers else (model(), OWN_WEIGHTS)
    if problems := model_argument_problems(made, "model()") or device_problems(made, device, may_be_on_cpu=True):
        raise SettingError(problems, where="the arguments of parallelize")
    return InitialModel(made.to(device), weights)


def _deferred(
    make: Callable[[], nn.Module], device: torch.device, *, is_log_rank: bool
) -> tuple[nn.Module, InitialWeights]:
    """What `make` makes, with deferred weights if it can be."""
    before = torch.get_rng_state()
    try:
        return deferred_model(make, device)
    except FourfoldError:
        raise
    except Exception as error:  # a model may look at its weights in ways that need memory; or `make` itself is wrong
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    torch.set_rng_state(before)
    model = make()
    if is_log_rank:
        log.warning("tp > 1: each rank makes the whole model before it is split: %s", reason)
    return model, OWN_WEIGHTS

"""Inference: a model that is called like the user's, and runs a forward-only program.

whole forward  in place of a model's forward where ranks have one stage each: it computes all stages, and every rank
               has the outputs. So methods that call the model, such as `generate` of transformers, work as they are
Law: only the step calls the model; what a call returns is what the model returns.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fourfold.axes.pipeline.attach.axis import PipelineAxis
from fourfold.step.step_runner import StepRunner
from fourfold.torch_kit.tensor_tree import is_plain
from fourfold.words.errors import Problem, SettingError

WHERE = "a call of the model"


class InferenceModel:
    """The model of a step, to be called without training it. Attributes are the model's.

    call  the model's outputs for the inputs of a batch
    """

    def __init__(self, model: nn.Module, call: Callable[[Any], Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The model's outputs for the inputs of a batch: one argument, or keywords as a dict of inputs has them."""
        return self._call(_batch_inputs(inputs, named_inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def inference_model(model: nn.Module, runner: StepRunner, pipeline: PipelineAxis) -> Iterator[InferenceModel]:
    """Inside, a model to call; where it is cut into stages, its own methods call all of them too."""
    if not pipeline.is_cut:
        yield InferenceModel(model, runner.infer)
        return
    runner.check_dry_run("step.inference()")
    forward, is_instances_own = model.forward, "forward" in vars(model)

    def restore() -> None:
        if is_instances_own:
            vars(model)["forward"] = forward
        else:
            vars(model).pop("forward", None)

    def infer(inputs: Any) -> Any:
        _check_values(inputs)
        restore()  # the stages run the model's own forward
        try:
            return runner.infer(inputs)
        finally:
            vars(model)["forward"] = whole_forward

    @functools.wraps(forward)  # transformers reads its signature
    def whole_forward(*inputs: Any, **named_inputs: Any) -> Any:
        return infer(_batch_inputs(inputs, named_inputs))

    vars(model)["forward"] = whole_forward
    try:
        yield InferenceModel(model, infer)
    finally:
        restore()


def _batch_inputs(inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> Any:
    if len(inputs) + bool(named_inputs) != 1:
        names = f" and {', '.join(named_inputs)}" if named_inputs else ""
        got = f"a call of the model with {len(inputs)} inputs by position{names}"
        need = "what a batch has: one input, or a dict of inputs, each given by its name"
        raise SettingError(Problem(got, need, "model(inputs), or model(tokens=…, positions=…)"))
    return named_inputs or inputs[0]


def _check_values(inputs: Any) -> None:
    """Raise SettingError for an input that a stage would change for its own blocks only, such as a KV cache."""
    named = inputs if isinstance(inputs, dict) else {"the input": inputs}
    problems = [
        Problem(
            f"{name} is a {type(value).__name__}, and pp is above 1",
            "tensors and numbers: a cache would have the keys of one stage only",
            "use_cache=False",
        )
        for name, value in named.items()
        if not is_plain(value)
    ]
    if problems:
        raise SettingError(problems, where=WHERE)

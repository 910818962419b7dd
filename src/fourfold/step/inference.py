"""Inference: a model that is called like the user's, and runs a forward-only program.

Law: only the step calls the model; what a call returns is what the model returns.
"""

from typing import Any

from torch import nn

from fourfold.step.step_runner import StepRunner
from fourfold.words.errors import Problem, SettingError


class InferenceModel:
    """The model of a step, to be called without training it. Attributes are the model's."""

    def __init__(self, model: nn.Module, runner: StepRunner) -> None:
        self._model, self._runner = model, runner

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The model's outputs for the inputs of a batch: one argument, or keywords as a dict of inputs has them."""
        if len(inputs) + bool(named_inputs) != 1:
            names = f" and {', '.join(named_inputs)}" if named_inputs else ""
            got = f"a call of the model with {len(inputs)} inputs by position{names}"
            need = "what a batch has: one input, or a dict of inputs, each given by its name"
            raise SettingError(Problem(got, need, "model(inputs), or model(tokens=…, positions=…)"))
        return self._runner.infer(named_inputs or inputs[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

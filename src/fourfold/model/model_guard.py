"""Model guard: whether the model still has the parameters that a step was built with, where they were then.

Law: what would make a step train other tensors than the model's is reported before the step.
"""

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn

from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.torch_private import own_children, own_parameters
from fourfold.words.errors import Problem, TaskError


class ModelGuard:
    """The modules, the trainable parameters and their storage, as they are when this is made."""

    def __init__(self, model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> None:
        self._modules, self._trainable = list(model.modules()), trainable
        self._trained_ids = {id(p) for p in trainable.values()}
        self._initial_child_ids = self._child_ids()
        self._initial_data_ptrs = self._data_ptrs()

    def check(self) -> None:
        """Raise TaskError if parameters are not those that the buckets were made of."""
        if problems := self.problems():
            raise TaskError(problems, where="the model")

    @contextlib.contextmanager
    def checking_edits(self) -> Iterator[None]:
        """Inside, parameters have another storage for a while; raise TaskError if it was replaced at the end."""
        resting, self._initial_data_ptrs = self._initial_data_ptrs, self._data_ptrs()
        try:
            yield
            self.check()
        finally:
            self._initial_data_ptrs = resting

    def problems(self) -> list[Problem]:
        """Why parameters are not those that the buckets were made of."""
        with untracked_access():
            return self._problems()

    def _problems(self) -> list[Problem]:
        problems = []
        moved = [name for name, ptr in self._data_ptrs().items() if ptr != self._initial_data_ptrs[name]]
        if moved:
            got = (
                f"{moved[0]}{f' and {len(moved) - 1} more' if len(moved) > 1 else ''} with another storage than before"
            )
            need = "weights that are changed in place, and one TrainStep for each model"
            problems.append(Problem(got, need, "p.copy_(…) inside step.edit(), or a new TrainStep"))
        if not self._has_initial_trainable():
            got = (
                "other trainable parameters than when the step was built: frozen, tied, parametrized or replaced since"
            )
            problems.append(Problem(got, "the parameters that it was built with", "a new TrainStep"))
        return problems

    def _has_initial_trainable(self) -> bool:
        """Whether the model's trainable parameters are those of the build."""
        # Called in every step: over the modules of the build, since walking the model by name takes 0.5 ms.
        parameters = [p for module in self._modules for p in own_parameters(module).values() if p is not None]
        now = {id(p) for p in parameters if p.requires_grad and p.numel() > 0}
        return self._child_ids() == self._initial_child_ids and now == self._trained_ids

    def _child_ids(self) -> list[int]:
        return [id(child) for module in self._modules for child in own_children(module).values()]

    def _data_ptrs(self) -> dict[str, int]:
        with untracked_access():
            return {name: p.data_ptr() for name, p in self._trainable.items()}

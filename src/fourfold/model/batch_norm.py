"""Batch normalizations: which ones use the statistics of the batch, and which ones frozen statistics.

frozen   in evaluation mode, with running statistics: each sample is normalized independently
Law: a normalization that was frozen when the step was built is frozen in each step, or the step is refused. Where the
ranks share statistics, it may change its mode, on all ranks together.
"""

import zlib
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from fourfold.torch_kit.torch_private import BatchNormBase
from fourfold.words.errors import Problem, TaskError


def uses_batch_stats(norm: nn.Module) -> bool:
    """Whether a batch normalization, in its present mode, uses the statistics of the batch."""
    return isinstance(norm, BatchNormBase) and (norm.training or norm.running_mean is None)


def is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of these, or is in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def frozen_norms(model: nn.Module) -> list[tuple[str, BatchNormBase]]:
    """The batch normalizations of a model that are frozen now, by name."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, BatchNormBase) and not uses_batch_stats(m)]


class NormWatch(Protocol):
    """What is checked of the normalizations of a model around its steps."""

    def check(self) -> None:
        """Raise TaskError if there are problems."""
        ...

    def problems(self) -> list[Problem]:
        """What is wrong with their present modes."""
        ...

    def call_text(self, *, in_training: bool) -> str:
        """What a call says of their modes, which ranks must then have compared before the call's forward; or ""."""
        ...


class FrozenBatchNorms:
    """Batch normalizations that must stay frozen, because a batch is split into `num_parts` parts."""

    def __init__(self, frozen: Sequence[tuple[str, BatchNormBase]], num_parts: int) -> None:
        self._frozen, self._num_parts = frozen, num_parts

    def check(self) -> None:
        """Raise TaskError if one of them is not frozen any more."""
        if problems := self.problems():
            raise TaskError(problems, where="the model")

    def problems(self) -> list[Problem]:
        """Which of them are not frozen any more."""
        names = [name or "the model" for name, norm in self._frozen if norm.training]
        if not names:
            return []
        shown = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        got = f"batch normalization at {shown} in training mode, whose statistics were frozen at the build"
        need = f"no statistics over a batch that is split into {self._num_parts} parts"
        attempt = "norm.eval() after each model.train(), or a train() of the model that keeps its norms frozen"
        return [Problem(got, need, attempt)]

    def call_text(self, *, in_training: bool) -> str:
        """Nothing: ranks run their forwards by themselves."""
        return ""


class SyncBatchNorms:
    """Batch normalizations whose statistics are of all ranks: they must be in the same modes on all ranks.

    Other pipeline stages have the modules `elsewhere`: there, this rank has no running statistics.
    """

    def __init__(self, model: nn.Module, elsewhere: Sequence[str] = ()) -> None:
        self._model, self._elsewhere = model, elsewhere

    def check(self) -> None:
        pass

    def problems(self) -> list[Problem]:
        return []

    def call_text(self, *, in_training: bool) -> str:
        """In an evaluation only norms without running statistics need other ranks."""
        norms = {name: module for name, module in self._model.named_modules() if isinstance(module, BatchNormBase)}
        if not in_training:
            return ", with statistics of the batch" if not all(map(self._has_running_stats, norms.items())) else ""
        frozen = [
            name or "the model"
            for name, norm in norms.items()
            if not norm.training and self._has_running_stats((name, norm))
        ]
        if not frozen:
            return ", with statistics of the batch"
        digest = zlib.crc32(" ".join(frozen).encode())
        shown = f"{', '.join(frozen[:3])}{f' … ({len(frozen)} of them, checksum {digest:08x})' if frozen[3:] else ''}"
        return f", with frozen batch normalization at {shown}"

    def _has_running_stats(self, named: tuple[str, BatchNormBase]) -> bool:
        name, norm = named
        return norm.track_running_stats if is_inside(name, self._elsewhere) else norm.running_mean is not None

"""Batch statistics in a loop of the user's, which calls the model when it likes: no step runs its forwards.

own      each rank's call of a norm has its own statistics: torch's normalization as it is
synced   the ranks make every training call of a norm together: in a forward, under `no_sync()`, in a recomputation
Law: from `begin` to `remove` a training call has the statistics of all ranks, or it raises. The model's classes, its
state_dict and its copies are as the user made them; only its norms have a `forward` of their own, which calls theirs.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.batch_statistics import BatchNormCall, Synced, batch_norms, intercept_batch_norm, uses_batch_stats
from fourfold.model.sync_batch_norm import BACKWARD_END, StatisticsExchange
from fourfold.plan.batch_norm import SYNC
from fourfold.torch_kit.torch_private import BatchNormBase
from fourfold.words.errors import Problem, TaskError, TrainingError


class LoopStatistics:
    """How the norms of a model take batch statistics while the user's loop calls it: here a rank needs no other."""

    def begin(self) -> None:
        """From now on the norms take them so."""

    def end_backward(self) -> None:
        """A backward that reduces has ended on this rank. Raises DivergenceError if another rank is elsewhere."""

    def check(self) -> None:
        """Raise TaskError if a norm of the model takes them otherwise."""

    def check_join(self) -> None:
        """Raise TrainingError if ranks cannot have different numbers of batches."""

    def remove(self) -> None:
        """From now on the norms are as the user made them."""


class SyncedInLoop(LoopStatistics):
    """The ranks of `exchange` call each norm together."""

    def __init__(self, model: nn.Module, exchange: StatisticsExchange) -> None:
        self._model, self._exchange = model, exchange
        self._forwards: dict[BatchNormBase, SyncedInTraining] = {}
        self._interception: AbstractContextManager[None] = nullcontext()

    def begin(self) -> None:
        norms = batch_norms(self._model)
        self._exchange.begin([name for name, _ in norms])
        self._forwards = {
            norm: SyncedInTraining(norm, n, self._exchange, self._model) for n, (_, norm) in enumerate(norms)
        }
        self._interception = intercept_batch_norm(list(self._forwards.values()))
        self._interception.__enter__()

    def end_backward(self) -> None:
        self._exchange.end(BACKWARD_END)

    def check(self) -> None:
        others = [
            name for name, norm in batch_norms(self._model) if uses_batch_stats(norm) and not self._is_synced(norm)
        ]
        if not others:
            return
        shown = f"{', '.join(others[:3])}{' …' if others[3:] else ''}"
        got = f"batch normalization at {shown}, which is new, or has another forward, since the optimizer was wrapped"
        need = f"with {SYNC} the norms that the model had then"
        raise TaskError(
            Problem(got, need, "changing the model first, and wrapping the optimizer then"), where="the model"
        )

    def _is_synced(self, norm: BatchNormBase) -> bool:
        return norm in self._forwards and vars(norm).get("forward") is self._forwards[norm]

    def check_join(self) -> None:
        got = f"join() with {SYNC}"
        need = "ranks that call each norm together: a rank that has run out of batches calls none"
        attempt = "as many batches on every rank, as ff.shard(loader) gives; or GroupNorm"
        raise TrainingError(Problem(got, need, attempt))

    def remove(self) -> None:
        self._interception.__exit__(None, None, None)
        self._interception = nullcontext()


class SyncedInTraining(Synced):
    """The forward of a norm, with statistics of all ranks while it or the model is in training mode.

    As with SyncBatchNorm, an evaluation needs no other rank: some loops evaluate on one.
    """

    def __init__(self, norm: BatchNormBase, number: int, exchange: StatisticsExchange, model: nn.Module) -> None:
        super().__init__(norm, number, exchange)
        self._model, self._own_forward = model, norm.forward

    def normalize(self, call: BatchNormCall) -> Tensor:
        if self.norm.training or self._model.training:
            return super().normalize(call)
        return F.batch_norm(*call)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _itself, (self._own_forward,)  # a copied or pickled model is a plain one


def _itself(forward: Any) -> Any:
    return forward

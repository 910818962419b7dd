"""Closure losses: what an optimizer's step gets as the loss of its closure.

closure  computes a loss and its gradients; some optimizers use the loss itself, for example in a line search
Law: a step that uses the loss gets the mean of the ranks' losses, the same bits on every rank.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fourfold.comm.reduce.protocol import WorldChannel
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import LOSS


class ClosureLosses(Protocol):
    """The losses of the closures of one rank."""

    def share(self, loss: Any, step: int) -> Any:
        """What step number `step` gets where this rank's closure has returned `loss`. Collective, if it is a mean."""
        ...

    def within_join(self) -> "ClosureLosses":
        """What takes the place of this in a `join` block: ranks without data answer reductions only."""
        ...


class OwnLosses:
    """A step gets the loss of its own rank: the optimizer only returns it, or there is one rank."""

    def share(self, loss: Any, step: int) -> Any:
        return loss

    def within_join(self) -> ClosureLosses:
        return self


class MeanLosses:
    """A step gets the mean over the ranks; `kind` names the optimizer."""

    def __init__(self, world: WorldChannel, num_ranks: int, kind: str) -> None:
        self._world, self._num_ranks, self._kind = world, num_ranks, kind

    def share(self, loss: Any, step: int) -> Any:
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise self._refusal(f"a tensor of shape {list(loss.shape)}")
        try:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError) as error:
            raise self._refusal(f"a {type(loss).__name__}") from error
        self._world.calls.begin(f"the loss of a closure in step {step} of the optimizer")
        self._world.scalars.all_reduce_async(LOSS, torch.tensor([value], dtype=torch.float64))
        mean = self._world.scalars.wait(LOSS)[0] / self._num_ranks
        if not isinstance(loss, Tensor):
            return mean
        result = loss.clone()  # with its graph: a step may call backward itself
        result.data.fill_(mean)
        return result

    def _refusal(self, got: str) -> TrainingError:
        need = f"one number: {self._kind} uses its mean over the ranks"
        return TrainingError(Problem(f"a closure that returns {got}", need, "return loss"), where="step()")

    def within_join(self) -> ClosureLosses:
        return NoLosses(self._kind)


class NoLosses:
    """In a `join` block there is no mean."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def share(self, loss: Any, step: int) -> Any:
        need = "a loss on every rank, since a line search uses their mean; ranks without data have none"
        attempt = "equal numbers of batches and no join(), or an optimizer without a closure"
        raise TrainingError(Problem(f"{self._kind} with a closure, within join()", need, attempt), where="step()")

    def within_join(self) -> ClosureLosses:
        return self


def uses_loss(optimizer: Optimizer) -> bool:
    """Whether steps may depend on the closure's loss. torch's optimizers other than LBFGS only return it."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "fourfold."))
    return isinstance(optimizer, LBFGS) or not known

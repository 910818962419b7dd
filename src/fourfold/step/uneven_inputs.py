"""Rounds of a wrapped optimizer: of ranks that all have a batch, or of a `join` block, in which some have none left.

round        one backward that reduces, on all ranks
active rank  one that still has data; a rank that has none left adds zeros to the reductions of the others
Law: a round is over for all ranks when no rank is active. Ranks that are active in one round have the same optimizer
options, or all of them raise DivergenceError.
"""

from typing import NoReturn, Protocol

import torch

from fourfold.comm.communicator import Communicator
from fourfold.comm.reduce.divergence_report import divergence_error, with_options
from fourfold.comm.reduce.protocol import WorldChannel
from fourfold.optim.option_tracker import OptionTracker
from fourfold.step.optimizer_steps import OptimizerSteps
from fourfold.step.wrapper_checks import WrapperChecks
from fourfold.words.program import LOSS

# The kind of scalar that counts the active ranks. The kind LOSS is free: losses belong to the user's loop. A rank that
# has read this sum knows that all ranks are in the same call.
ACTIVE_RANKS = LOSS


class Rounds(Protocol):
    """What ranks compare in a round, and what its sums are divided by."""

    def begin_round(self, number: int) -> None:
        """Round `number` of this rank begins, with a batch."""
        ...

    def finish_round(self) -> int:
        """What the sums of this round are divided by. Collective. Raises DivergenceError if ranks differ."""
        ...


class EvenInputs:
    """Every rank has a batch in every round: all ranks are in the same round, with the same options."""

    def __init__(self, world: WorldChannel, checks: WrapperChecks, steps: OptimizerSteps, *, num_ranks: int) -> None:
        self._world, self._checks, self._steps, self._num_ranks = world, checks, steps, num_ranks

    def begin_round(self, number: int) -> None:
        loads = f" and {self._steps.num_loads} × load_state_dict" if self._steps.num_loads else ""
        call = f"backward {number} after {self._steps.num_steps} steps of the optimizer{loads}"
        self._world.calls.begin(with_options(call, self._checks.options.text()))

    def finish_round(self) -> int:
        self._world.calls.check_same()
        # Here, within a backward, all ranks have taken the same number of steps.
        self._checks.compare_weights_if_due(self._steps.num_steps, self._steps.num_loads)
        return self._num_ranks


class UnevenInputs:
    """One `join` block, on one rank."""

    def __init__(
        self,
        communicator: Communicator,
        world: WorldChannel,
        options: OptionTracker,
        *,
        min_divisor: int,
    ) -> None:
        """`min_divisor`: what sums are divided by at least, even if fewer ranks are active."""
        self._communicator, self._world, self._options = communicator, world, options
        self._min_divisor = min_divisor
        self.num_rounds = 0
        """In how many rounds this rank has had data."""
        self._call, self._is_active = "", True

    def begin_round(self, number: int) -> None:
        digest = float(self._options.short_digest())
        self._begin(number, 1.0, digest, digest * digest)

    def begin_shadow_round(self, number: int) -> None:
        """Round `number` of this rank begins, in which it has no data."""
        self._begin(number, 0.0, 0.0, 0.0)

    def _begin(self, number: int, *values: float) -> None:
        self._call, self._is_active = f"backward {number}, within join()", values[0] > 0
        self._world.calls.begin(self._call)
        self._world.scalars.all_reduce_async(ACTIVE_RANKS, torch.tensor(values, dtype=torch.float64))

    def finish_round(self) -> int:
        divisor = self.divisor(self.count_active_ranks())
        self.num_rounds += 1
        return divisor

    def count_active_ranks(self) -> int:
        """How many ranks are active in this round. Collective.

        Raises DivergenceError where ranks are in different rounds, or active ranks have different optimizer options.
        """
        num_active, digests, squares = map(round, self._world.scalars.wait(ACTIVE_RANKS))
        # Cauchy and Schwarz: equality holds if and only if all active ranks have the same digest.
        if num_active * squares != digests * digests:
            self._raise_options_differ()
        return num_active

    def divisor(self, num_active: int) -> int:
        """What the sum of the active ranks' gradients is divided by."""
        return max(num_active, self._min_divisor)

    def _raise_options_differ(self) -> NoReturn:
        """Raise DivergenceError with the options that differ between active ranks. Collective."""
        texts = self._communicator.all_gather_json(self._options.text() if self._is_active else None)
        calls = {rank: with_options(self._call, text) for rank, text in enumerate(texts) if text is not None}
        raise divergence_error(calls, attempt="join(states=[scheduler]), after which all ranks have the same")

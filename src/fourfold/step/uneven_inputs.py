"""Uneven inputs: the rounds of a `join` block, in which ranks have different numbers of batches.

active rank  one that still has data; a rank that has none left adds zeros to the reductions of the others
Law: a round is over for all ranks when no rank is active. Ranks that are active in one round have the same optimizer
options, or all of them raise DivergenceError.
"""

from typing import NoReturn

import torch

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.divergence_report import divergence_error, with_options
from fourfold.parts.comm.reduce.protocol import WorldChannel
from fourfold.parts.optim.option_tracker import OptionTracker
from fourfold.words.program import LOSS

# The kind of scalar that counts the active ranks. The kind LOSS is free: losses belong to the user's loop. A rank that
# has read this sum knows that all ranks are in the same call.
ACTIVE_RANKS = LOSS


class UnevenInputs:
    """One `join` block, on one rank."""

    def __init__(
        self,
        communicator: Communicator,
        world: WorldChannel,
        options: OptionTracker,
        *,
        divides_by_world_size: bool,
    ) -> None:
        self._communicator, self._world, self._options = communicator, world, options
        self._divides_by_world_size = divides_by_world_size
        self.num_rounds = 0
        """In how many rounds this rank has had data."""
        self._call, self._has_data = "", True

    def begin_round(self, call: str, *, has_data: bool) -> None:
        """Say whether this rank is active in this round."""
        self._call, self._has_data = call, has_data
        self._world.calls.begin(call)
        digest = float(self._options.short_digest())
        values = [1.0, digest, digest * digest] if has_data else [0.0] * 3
        self._world.scalars.all_reduce_async(ACTIVE_RANKS, torch.tensor(values, dtype=torch.float64))

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
        return self._communicator.size if self._divides_by_world_size else num_active

    def _raise_options_differ(self) -> NoReturn:
        """Raise DivergenceError with the options that differ between active ranks. Collective."""
        texts = self._communicator.all_gather_json(self._options.text() if self._has_data else None)
        calls = {rank: with_options(self._call, text) for rank, text in enumerate(texts) if text is not None}
        raise divergence_error(calls, attempt="join(states=[scheduler]), after which all ranks have the same")

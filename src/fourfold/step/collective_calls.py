"""Collective calls: what every rank must call in the same order, and how a rank's error reaches the others.

call  a collective call and its step, such as "evaluate() after step 6"
Law: ranks that are in different calls raise DivergenceError; none waits for the others forever.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from fourfold.comm.communicator import Communicator
from fourfold.orders.sample_order import BatchRange
from fourfold.proof.attachment import TensorCalls
from fourfold.words.errors import DivergenceError, FourfoldError, Problem, TaskError


class CollectiveCalls:
    """The calls of one rank on its step."""

    def __init__(self, world: Communicator, checker: TensorCalls) -> None:
        self.world, self.checker = world, checker
        self.num_steps = 0
        """Steps done, including those before a resume: calls name them."""

    def begin(self, call: str, samples: BatchRange | None = None) -> None:
        """Begin a call. Does not wait: the next sum of the loss compares the calls."""
        self.checker.begin(with_samples(f"{call} after step {self.num_steps}", samples))

    def begin_among_tensor_ranks(self, call: str) -> None:
        """Begin a call, and wait until the tensor ranks of this place have begun it: they compute in it together."""
        self.begin(call)
        self.checker.meet()

    def meet_tensor_ranks(self, part: str) -> None:
        """Wait until the tensor ranks of this place are in this part of the call. Raises DivergenceError."""
        self.checker.meet(part)

    def begin_step(self, call: str) -> None:
        """Begin a step; `call` names it."""
        self.checker.begin(call)

    def enter(self, call: str) -> None:
        """Begin a call, and wait until all ranks have begun it. Raises DivergenceError."""
        self.begin(call)
        self.checker.check_same()

    def check_same(self) -> None:
        """Wait until all ranks have begun this call. Raises DivergenceError."""
        self.checker.check_same()

    def raise_after_mismatch(self, call: str, error: FourfoldError) -> NoReturn:
        """Raise this rank's error, and DivergenceError on the ranks that do not have it; on other stages PeerError."""
        self.checker.begin(call)
        try:
            self.checker.check_same()
        except DivergenceError as divergence:
            if self.world.along("pp").size > 1:
                self.world.leave()  # other stages may wait for this one where they compare batches
            raise error from divergence
        raise error

    def raise_on_all_ranks(self, problems: Sequence[Problem], *, where: str) -> None:
        """Raise TaskError on every rank if any rank has a problem, so that none waits for another. Collective."""
        by_rank: list[Any] = self.world.all_gather_json(problems)
        distinct = dict.fromkeys(tuple(problem) for each in by_rank for problem in each)
        if distinct:
            raise TaskError([Problem(*each) for each in distinct], where=where)


def with_samples(call: str, samples: BatchRange | None) -> str:
    """The call, and its samples in the feed's order if known: ranks in the same step may be at different batches."""
    return call if samples is None else f"{call}, {samples}, {samples.num_samples} samples"

"""Apart: gradients stay with their rank, and the ranks meet now and then.

meeting  a step in which ranks sum what they put into their slots; all ranks have it after the same number of steps
Law: outside meetings no rank reads or sends more than scalars.
"""

from collections.abc import Callable, Sequence

import torch

from fourfold.parts.comm.transport import Alone, Part, Transport
from fourfold.words.action import LOSS, NORM
from fourfold.words.spans import OnlyWaits, Recorder

SUMMED = (LOSS, NORM)  # the scalars that are summed over all ranks, in every step


class Apart:
    """See `Transport`: one rank's, over the slots of the transport that it meets the others by."""

    weights: Sequence[torch.Tensor] | None = None
    writes, gathers, replica = True, False, 0

    def __init__(self, among: Transport, num_ranks: int) -> None:
        self._among, self._alone = among, Alone(among.slots, among.turns)
        # Of all hosts: where ranks share memory, a transport's own size is that of its host.
        self.name, self.size, self.index = among.name, num_ranks, among.index
        self.slots, self.turns = among.slots, among.turns
        self._meets = False

    @property
    def recorder(self) -> Recorder:
        return self._among.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        # The sums of a meeting are no reductions of gradients: they lie within its pulls.
        self._among.recorder = OnlyWaits(recorder)

    @property
    def factor(self) -> Callable[[], float]:
        return self._alone.factor

    @factor.setter
    def factor(self, factor: Callable[[], float]) -> None:
        self._alone.factor = factor

    @property
    def waiting_seconds(self) -> float:
        return self._among.waiting_seconds

    @property
    def sent_bytes(self) -> float:
        return self._among.sent_bytes

    # ---- a meeting ----------------------------------------------------------------------------------

    def push(self, bucket: int) -> None:
        """What is to be summed lies in this rank's slot. Does not wait."""
        self._meets = True
        self._among.launch(bucket, bucket)

    def pull(self, bucket: int) -> Sequence[Part]:
        """Wait for the sum of a pushed bucket: where it lies until `close`."""
        self._among.complete(bucket)
        return self._among.sums(bucket)

    def close(self) -> None:
        self._alone.close()
        if self._meets:
            self._among.close()
            self._meets = False

    # ---- the others', in every step -----------------------------------------------------------------

    def enter(self, call: str) -> None:
        self._among.enter(call)

    def agree(self) -> None:
        self._among.agree()

    def lend(self, bucket: int) -> None:
        # Others may still read what this rank put there for the last meeting.
        self._among.lend(bucket)

    def spread(self) -> None:
        self._among.spread()

    def measure(self, kind: int, values: torch.Tensor) -> None:
        (self._among if kind in SUMMED else self._alone).measure(kind, values)

    def measured(self, kind: int) -> list[float]:
        return (self._among if kind in SUMMED else self._alone).measured(kind)

    # ---- this rank's own ----------------------------------------------------------------------------

    def launch(self, bucket: int, name: int) -> None:
        self._alone.launch(bucket, name)

    def complete(self, bucket: int) -> None:
        self._alone.complete(bucket)

    def is_complete(self, bucket: int) -> bool:
        return self._alone.is_complete(bucket)

    def is_free(self, bucket: int) -> bool:
        return self._alone.is_free(bucket)

    def take(self, bucket: int, start: int, stop: int, factor: float) -> None:
        self._alone.take(bucket, start, stop, factor)

    def settle(self, bucket: int) -> None:
        self._alone.settle(bucket)

    def sums(self, bucket: int) -> Sequence[Part]:
        return self._alone.sums(bucket)

    def own(self, bucket: int) -> Part:
        return self._alone.own(bucket)

    def scale(self, factor: float) -> None:
        self._alone.scale(factor)

    def gather(self, bucket: int) -> None:
        self._alone.gather(bucket)

    def permit(self) -> None:
        self._alone.permit()

    def permitted(self) -> None:
        self._alone.permitted()

    def publish(self, bucket: int, weight: torch.Tensor) -> None:
        self._alone.publish(bucket, weight)

    def bring(self, bucket: int, share: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        return self._alone.bring(bucket, share, out)

    def hear(self, row: Sequence[int]) -> list[list[int]]:
        return self._alone.hear(row)

    def arrive(self, bucket: int) -> None:
        self._alone.arrive(bucket)

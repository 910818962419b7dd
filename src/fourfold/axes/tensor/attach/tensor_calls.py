"""Tensor calls: tensor ranks compare which collective call each of them is in, before one waits for another in a layer.

call  see `CallChecker`; a rank that begins one meets its tensor ranks first in `agree`
Law: the first collective of every call in a tensor group is the same, whatever the call is. So ranks in different
calls meet in it, over shared memory and over messages, and raise DivergenceError.
"""

from fourfold.comm.communicator import Communicator
from fourfold.comm.reduce.protocol import CallChecker
from fourfold.comm.row_exchange import RowExchange
from fourfold.comm.tensor.protocol import NO_DIGEST, TensorGroup, compare_calls, compare_calls_of_stages


class TensorCalls:
    """See `CallChecker`: the tensor ranks of a place compare their calls before all ranks of the world do."""

    def __init__(self, world_calls: CallChecker, group: TensorGroup, ranks: Communicator) -> None:
        self._world_calls, self._group, self.ranks = world_calls, group, ranks
        self._call = ""

    def begin(self, call: str) -> None:
        self._call = call
        self._world_calls.begin(call)

    def check_same(self) -> None:
        self.meet()
        self._world_calls.check_same()

    def check_begun(self, waited_seconds: float | None) -> None:
        self._world_calls.check_begun(waited_seconds)

    def meet(self, part: str = "") -> None:
        """Wait until the tensor ranks of this place are in the same call, and in this part of it.

        Raises DivergenceError.
        """
        if self._group.size > 1:
            self.agree(NO_DIGEST, part)

    def agree(self, digest: int, part: str = "") -> list[int]:
        """As `meet`. Returns the digests of all tensor ranks."""
        return compare_calls(self._group, self.ranks, self._text(part), digest)

    def agree_with_stages(self, rows: RowExchange, stages: Communicator, digest: int) -> list[int]:
        """The same of the ranks that differ from this one on the pipeline axis only; `rows`: their exchange."""
        return compare_calls_of_stages(rows, stages, self._text(), digest)

    def _text(self, part: str = "") -> str:
        name, newline, options = self._call.partition("\n")
        return f"{part and f'{part} of '}{name}{newline}{options}"

"""Edges: what carries tensors from one stage of a pipeline to the next, or back.

message  a few tensors, and whether each of them requires a gradient
Law: messages arrive in the order in which they were sent. A receiver owns what it receives.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class SendingEdge(Protocol):
    """The end of an edge at which messages are sent."""

    name: str

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send a message. The tensors may be freed or written afterwards."""
        ...

    def finish(self) -> None:
        """Wait until all messages are on their way."""
        ...


class ReceivingEdge(Protocol):
    """The end of an edge at which messages arrive."""

    name: str

    def receive(self) -> list[Tensor]:
        """The next message. Raises PeerError if the sender has died."""
        ...


class StageEdges(NamedTuple):
    """The edges of this rank; None beyond the first and the last stage."""

    to_next: SendingEdge | None = None
    from_previous: ReceivingEdge | None = None
    to_previous: SendingEdge | None = None
    from_next: ReceivingEdge | None = None

    def finish(self) -> None:
        """Wait until all messages are on their way."""
        for edge in (self.to_next, self.to_previous):
            if edge is not None:
                edge.finish()

    @property
    def name(self) -> str:
        """What carries the messages, in words."""
        edges = (self.to_previous, self.to_next)
        return " and ".join(dict.fromkeys(edge.name for edge in edges if edge is not None)) or "none"

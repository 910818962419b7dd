"""Prices: the seconds that a machine needs for what a program does.

segment   forward and backward of one segment, with the collectives of tp and cp inside them
group     the ranks of a collective, and how they are spread over hosts
Law: more samples, bytes, elements or ranks never cost less.
"""

from typing import NamedTuple, Protocol

from fourfold.plan.codec import CodecSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import SegmentFacts
from fourfold.words.layout import Change


class SegmentSeconds(NamedTuple):
    """One microbatch on one segment. A whole backward takes both halves."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    def __add__(self, other: "SegmentSeconds") -> "SegmentSeconds":  # type: ignore[override]
        return SegmentSeconds(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class GroupShape(NamedTuple):
    """The ranks of a collective: `hosts` of them with `ranks_per_host` each.

    shares_memory  the ranks of each host meet in shared memory: they sum there themselves, and only hosts send messages
    """

    ranks_per_host: int
    hosts: int = 1
    shares_memory: bool = False

    @property
    def size(self) -> int:
        return self.ranks_per_host * self.hosts


class Prices(Protocol):
    """What a machine, calibrated or described, charges. All numbers are seconds."""

    def segment(self, facts: SegmentFacts, plan: Plan, num_samples: float) -> SegmentSeconds:
        """A microbatch of so many samples, with the plan's `recompute` in its backward."""
        ...

    def collective(self, change: Change, whole_bytes: float, group: GroupShape) -> float:
        """One collective of the data axis over a tensor of so many bytes.

        Where ranks share memory, an all-gather of no bytes is what it takes them to meet; over several hosts, the price
        includes what the ranks of a host do themselves, which is the price of the same collective on one host.
        """
        ...

    def edge(self, num_bytes: float, *, crosses_hosts: bool) -> float:
        """One message between stages, from its send to its receipt."""
        ...

    def update(self, optimizer: str, num_elements: float, num_bytes: float) -> float:
        """An optimizer update of so many elements, whose weights, gradients and states take so many bytes."""
        ...

    def memory_pass(self, num_bytes: float) -> float:
        """A pointwise pass that reads and writes so many bytes in all: a copy, an addition, a norm."""
        ...

    def codec(self, codec: CodecSpec, num_elements: float) -> float:
        """What a rank computes to encode and decode a bucket of so many elements."""
        ...

    def offload(self, num_bytes: float) -> float:
        """So many bytes between a device and its host's memory; nothing where ranks compute on the host."""
        ...

    def slowdown(self) -> float:
        """By what computing is slower while a collective of the same rank is in flight: 1.0 = not at all."""
        ...

    def waiting(self) -> float:
        """The part of a wait for other stages that lengthens a step: below 1 where ranks share cores. While some wait,
        the others have more of them.
        """
        ...

    def between_actions(self) -> float:
        """From the end of an action to the start of the next one on the same rank."""
        ...

    def around_step(self) -> float:
        """Of a step, outside of its actions: checks of the batch, zeroed gradients, metrics."""
        ...

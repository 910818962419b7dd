"""Edge messages: the bytes that cross a boundary between two stages, and what a message takes.

Law: a message costs its sender; what the receiver waits for is the end of the send.
"""

from functools import cached_property

from fourfold.axes.pipeline.rules.edges import EdgeBytes, edge_bytes
from fourfold.axes.pipeline.rules.spec import owner_of
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.facts import ModelFacts
from fourfold.planner.predict.prices import Prices
from fourfold.planner.remembered import remembered
from fourfold.words.program import Action, Verb

RECEIPTS = (Verb.RECEIVE_FORWARD, Verb.RECEIVE_BACKWARD)


def message_bytes(plan: Plan, facts: ModelFacts, num_samples: float) -> EdgeBytes:
    """Bytes of an activation, and of its gradient, of so many samples."""
    dense = facts.boundary_bytes * num_samples
    spec, columns, width = plan.edge_spec, facts.boundary_columns, facts.boundary_element_bytes
    rows = round(dense / (columns * width)) if columns else 0
    if not spec.codes((rows, columns), width, is_float=True):
        return EdgeBytes(round(dense), round(dense))
    return edge_bytes(spec, rows, columns, width)


class EdgeMessages:
    """What the messages between stages take."""

    def __init__(self, plan: Plan, facts: ModelFacts, topology: Topology, prices: Prices) -> None:
        self._plan, self._facts, self._topology, self._prices = plan, facts, topology, prices
        self.tied_bytes = 0.0

    def add_ties(self, specs: tuple[ParamSpec, ...]) -> None:
        """The weights that the first place and the last one have both."""
        self.tied_bytes += sum(spec.num_bytes for spec in specs if spec.is_tied)

    def seconds(self, action: Action, num_samples: float) -> float:
        """A message of this microbatch; nothing for its receipt, which ends when the message is there."""
        if action.verb in RECEIPTS:
            return 0.0
        if action.verb == Verb.TIE:
            return self.tie_seconds if action.stage == 0 else 0.0
        is_forward = action.verb == Verb.SEND_FORWARD
        return self._price(action.stage if is_forward else action.stage - 1, num_samples, is_forward)

    @remembered()
    def _price(self, boundary: int, num_samples: float, is_forward: bool) -> float:
        """Encoding reads a message and writes its code; the receiver does the opposite."""
        sent = message_bytes(self._plan, self._facts, num_samples)
        num_bytes, dense = sent.forward if is_forward else sent.backward, self._facts.boundary_bytes * num_samples
        places = owner_of(boundary, self._plan.pp), owner_of(boundary + 1, self._plan.pp)
        seconds = self._prices.edge(num_bytes, crosses_hosts=self.crosses_hosts(*places))
        return seconds if num_bytes == round(dense) else seconds + 2 * self._prices.memory_pass(dense + num_bytes)

    @cached_property
    def tie_seconds(self) -> float:
        """The copy of the tied weights, or of their gradients."""
        if not self.tied_bytes:
            return 0.0
        return self._prices.edge(self.tied_bytes, crosses_hosts=self.crosses_hosts(0, self._plan.pp - 1))

    def crosses_hosts(self, first: int, second: int) -> bool:
        """Whether some rank of one place has its counterpart at the other place on another host."""
        size, hosts = self._plan.mesh.size // self._plan.pp, self._topology.hosts
        return any(hosts[first * size + index] != hosts[second * size + index] for index in range(size))

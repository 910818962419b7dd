"""What a schedule is made for, and the words that all schedules share.

pipeline index  a rank's place on the pp axis
stage           a chunk of the model; pp × interleave of them, stage s on pipeline index s % pp, as in Megatron
lists           by pipeline index, its compute actions in order: F and B, or F, I and W
block           the compute time of one microbatch on one stage
in flight       the microbatches whose forward has run and whose backward has not; their activations are alive
"""

from typing import NamedTuple

from fourfold.words.program import Action, Verb

ComputeLists = tuple[tuple[Action, ...], ...]


class BlockCosts(NamedTuple):
    """The time of one microbatch on one stage; a whole backward takes the sum of its halves. Any unit."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, action: Action) -> float:
        """The time of an action; messages and everything else take none."""
        return {
            Verb.FORWARD: self.forward,
            Verb.BACKWARD: self.backward_input + self.backward_weight,
            Verb.BACKWARD_INPUT: self.backward_input,
            Verb.BACKWARD_WEIGHT: self.backward_weight,
        }.get(action.verb, 0.0)

    @property
    def total(self) -> float:
        """The time of a microbatch on one stage, forward and backward."""
        return sum(self)


EQUAL_COSTS = BlockCosts()


class PipelineSpec(NamedTuple):
    """What a schedule is made for.

    num_batches    batches in a row without a drain between them; only the asynchronous schedules have several
    max_in_flight  microbatches that an index may have in flight; only zero-bubble fills a limit. None: pp, as in 1F1B
    costs          of each stage, by which zero-bubble looks for the best order
    program        of a written schedule: its lists as text
    """

    pp: int
    microbatches: int
    interleave: int = 1
    num_batches: int = 1
    max_in_flight: int | None = None
    costs: BlockCosts = EQUAL_COSTS
    program: str = ""

    @property
    def num_stages(self) -> int:
        return self.pp * self.interleave


def owner_of(stage: int, pp: int) -> int:
    """The pipeline index that holds a stage."""
    return stage % pp

"""Facts of a task: what its model computes, keeps and sends, as plain data.

segment    what one stage computes whole: the first end (an embedding), a block of the chain, the last end (head, loss)
operation  a kernel of a segment's forward
sample     one item of a batch; with cp, a rank has 1 / cp of its tokens
Law: facts are of one sample on one rank of a plan, and costs are linear in samples, except for what is read per call.

unit   what throughput counts: tokens or samples
share  of the peak: the operations of forward and backward in a second, over what the devices could do at most; what is
       computed again is not counted
Law: two plans of one workload have rates in the ratio of their speeds.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from fourfold.plan.model_traits import ModelTraits
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import Prediction
from fourfold.words.layout import Change
from fourfold.words.mesh import Axis


class OperationKind(enum.Enum):
    """What bounds an operation: arithmetic (the first three), or memory."""

    PRODUCT = "product"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    POINTWISE = "pointwise"
    LOOKUP = "lookup"


class Operation(NamedTuple):
    """One kernel of a forward.

    flops                 for one sample; a multiply and an add are two
    moved_bytes           activations read and written, for one sample
    weight_bytes          weights read, whatever the number of samples
    has_weight            its backward is two operations as large: the gradients of inputs and those of weights.
                          Without a weight, both are gradients of inputs. Where memory bounds, it moves 1.5 times as
                          much
    rows, columns, inner  of a product [rows, inner] @ [inner, columns]; rows are those of one sample; else 0
    batch                 products of one sample in one call, where they do not share a factor; 0: one product for all
    """

    kind: OperationKind
    flops: float
    moved_bytes: float
    weight_bytes: float = 0.0
    has_weight: bool = False
    rows: float = 0.0
    columns: int = 0
    inner: int = 0
    batch: float = 0.0


class Collective(NamedTuple):
    """A collective inside forward and backward, along tp or cp.

    whole_bytes  of the tensor that is reduced or gathered, for one sample
    forward, backward     how often it runs in each
    recompute, selective  how often it runs again in the backward of a block that computes again, with each of these
    """

    axis: Axis
    change: Change
    whole_bytes: float
    forward: int
    backward: int
    recompute: int = 0
    selective: int = 0

    def repeats(self, recompute: str) -> int:
        """How often it runs again, with the plan's `recompute`."""
        return {"none": 0, "selective": self.selective, "full": self.recompute}[recompute]


class TemporaryPeak(NamedTuple):
    """A moment of a forward or backward, and what it holds besides what is kept: so many bytes, and for each sample."""

    call_bytes: float
    sample_bytes: float


@dataclass(frozen=True)
class SegmentFacts:
    """A segment of the model as one rank of a plan computes it.

    name         of its module; empty for an end
    params       the names of its parameters
    operations   of a forward
    saved_bytes  by the plan's `recompute`: what autograd keeps of one sample until backward
    temporary_bytes  the most that a forward or backward of one sample holds in addition, if nothing is computed again
    peaks        by `recompute`: the moments that hold most, for some number of samples; those of few samples are often
                 the gradient of a weight. Empty: `temporary_bytes` is all that is known
    norm_channels    of each batch normalization that uses statistics of the batch: with `batch_norm = "sync"`, data
                     ranks exchange sums over them in forward and in backward
    """

    name: str
    params: tuple[str, ...]
    operations: tuple[Operation, ...]
    saved_bytes: Mapping[str, float]
    collectives: tuple[Collective, ...] = ()
    temporary_bytes: float = 0.0
    norm_channels: tuple[int, ...] = ()
    peaks: Mapping[str, tuple[TemporaryPeak, ...]] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Of a forward of one sample."""
        return sum(operation.flops for operation in self.operations)

    def most_temporary_bytes(self, num_samples: float, recompute: str) -> float:
        """The most that a forward or backward of so many samples holds besides what is kept."""
        if recompute in self.peaks:
            moments = self.peaks[recompute]
            return max((each.call_bytes + each.sample_bytes * num_samples for each in moments), default=0.0)
        again = self.saved_bytes["none"] - self.saved_bytes[recompute]
        return (self.temporary_bytes + max(0.0, again)) * num_samples


@dataclass(frozen=True)
class ModelFacts:
    """A model as one rank of a plan computes it: all tensor ranks compute as much.

    boundary_bytes  of what one rank of a stage sends the next stage, for one sample: in the precision of the plan,
                    before `edge` encodes it; with sequence parallelism, of the rank's part
    boundary_columns        features of a token at a boundary: the last dim; 0: what crosses is not encoded
    boundary_element_bytes  of an element there
    tokens          of one sample, if it has tokens: for rates
    """

    first: SegmentFacts
    blocks: tuple[SegmentFacts, ...]
    last: SegmentFacts
    boundary_bytes: float
    tokens: int | None = None
    boundary_columns: int = 0
    boundary_element_bytes: int = 4

    @property
    def segments(self) -> tuple[SegmentFacts, ...]:
        """All segments, in the order of a forward."""
        return (self.first, *self.blocks, self.last)

    @property
    def flops(self) -> float:
        """Of a forward of one sample."""
        return sum(segment.flops for segment in self.segments)


class FactsSource(Protocol):
    """Where facts come from: the meta model of a task, or the formulas of a GPT. Each answer is remembered."""

    @property
    def batch_size(self) -> int:
        """Samples in a step, over all data ranks."""
        ...

    def resized(self, batch_size: int) -> Self:
        """The same with another batch: facts are of one sample, and stay."""
        ...

    def facts(self, plan: Plan) -> ModelFacts:
        """The facts for the plan's tp, cp, ring, ulysses, sequence_parallel and precision. Raises PlanError."""
        ...

    def specs(self, plan: Plan) -> Sequence[ParamSpec]:
        """The trained parameters, with the plan's stages and shards: what `lower` takes. Raises PlanError."""
        ...

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        """By stage: which blocks of the chain it computes; the ends belong to the first and the last stage."""
        ...

    @property
    def update_spec(self) -> UpdateSpec:
        """How gradients become an update; with the number of optimizer states."""
        ...

    @property
    def traits(self) -> ModelTraits:
        """What the model has that not every plan can be carried out with."""
        ...


# ---- Workload: what is planned, in the numbers that turn seconds into rates -----------------------------------------

PASSES = 3  # a backward takes as many operations as two forwards


@dataclass(frozen=True)
class Workload:
    """A task on a machine.

    num_parameters  that are trained
    num_units       tokens or samples of a step, over all data ranks
    flops           of a step: forward and backward, over all ranks
    again_flops     by the plan's `recompute`: those that a step computes again in addition
    memory_bytes    of a device; None: not known
    peak_flops      operations a second of a device; None: not known
    """

    task: str
    machine: str
    num_parameters: int
    batch_size: int
    unit: str
    num_units: float
    flops: float
    memory_bytes: float | None = None
    peak_flops: float | None = None
    again_flops: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        source: FactsSource,
        *,
        task: str,
        machine: str,
        memory_bytes: float | None = None,
        peak_flops: float | None = None,
    ) -> Self:
        """The workload of a task whose facts are those of one rank. Raises PlanError."""
        plan = Plan()
        facts = source.facts(plan)
        batch_size = source.batch_size
        return cls(
            task=task,
            machine=machine,
            num_parameters=sum(spec.num_elements for spec in source.specs(plan)),
            batch_size=batch_size,
            unit="samples" if facts.tokens is None else "tokens",
            num_units=batch_size * (facts.tokens or 1),
            flops=PASSES * batch_size * facts.flops,
            memory_bytes=memory_bytes,
            peak_flops=peak_flops,
            again_flops={
                "full": batch_size * sum(block.flops for block in facts.blocks),
                "selective": batch_size * sum(_attention_flops(block) for block in facts.blocks),
            },
        )

    def units_per_second(self, prediction: Prediction) -> float:
        return self.num_units / prediction.seconds

    def flops_per_second(self, prediction: Prediction) -> float:
        """What a device computes, with what it computes again: the rate that Megatron's tables have."""
        plan = prediction.plan
        done = self.flops + self.again_flops.get(plan.recompute, 0.0)
        return done / (prediction.seconds * plan.mesh.size)

    def share_of_peak(self, prediction: Prediction) -> float | None:
        """The fraction of the peak of all devices; None where the peak is not known."""
        if self.peak_flops is None:
            return None
        return self.flops / (prediction.seconds * prediction.plan.mesh.size * self.peak_flops)


def _attention_flops(block: SegmentFacts) -> float:
    return sum(each.flops for each in block.operations if each.kind is OperationKind.ATTENTION)

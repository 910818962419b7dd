"""GPT facts: Megatron's GPT by formula, so that a plan for it can be priced without a model, at any size.

first, last  the ends: an embedding with positions, and a head that shares its weight, with vocabulary-parallel loss
unfused      attention of 2021: scores, softmax and dropout go through memory; else fused, half of the scores masked
boundary     with tp, each tensor rank sends 1/tp of what crosses it; the next stage gathers it in its host
column       a layer whose outputs are split over tensor ranks, row one whose inputs are; a vocabulary is split by rows
T tokens of a sample on this rank, s/cp · h width · t tensor ranks · e bytes of an element
Law: the facts of all ranks together are those of one device.
Law: a block computes 24·T·h²/t + 4·T·s·h/t operations forward, the head 2·T·h·V/t (equation 3 of Narayanan et al.,
2104.04473). Fused attention leaves out what the causal mask hides. A block keeps T·h·(10 + 24/t + 5·a·s/(h·t)) bytes in
two-byte precision (Korthikanti et al., 2205.05198, table 2).
Law: there are 12·l·h² (1 + 13/(12·h) + (V + s)/(12·l·h)) parameters, as in equation 2 of Narayanan et al. (2104.04473):
it leaves out a norm behind the last block (2·h parameters), and so does this.

Sources: Narayanan et al. (2104.04473), sections 3 and 4.1; Korthikanti et al. (2205.05198).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Self

from fourfold.axes.context.rules.layout import AttentionSize, attention_sent_elements, heads_problem, scores_per_index
from fourfold.axes.pipeline.rules.division import divide, division_problems, stage_names
from fourfold.plan.model_traits import NO_TRAITS, ModelTraits
from fourfold.plan.param_spec import ParamSpec, ShardPiece, TensorShard, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict.facts import Collective, ModelFacts, Operation, OperationKind, SegmentFacts
from fourfold.planner.remembered import remembered
from fourfold.words.errors import PlanError, Problem
from fourfold.words.layout import Change

# ---- parameters ----------------------------------------------------------------------------------------------------

EMBEDDING = "embedding.weight"  # the head uses it too
POSITIONS = "positions.weight"


QKV = -1


class _Weight(NamedTuple):
    """A parameter. `dim`: the one that tensor ranks split; QKV: the first, of q, of k and of v; None: all have it."""

    shape: tuple[int, ...]
    dim: int | None = None

    def shards(self, tp: int) -> tuple[TensorShard, ...]:
        """By tensor rank; empty: it is not split."""
        if tp == 1:
            return ()
        if self.dim is None:
            return tuple(TensorShard.whole(self.shape, index, tp) for index in range(tp))
        if self.dim != QKV:
            return tuple(TensorShard.even(self.shape, self.dim, index, tp) for index in range(tp))
        third = self.shape[0] // 3
        share = third // tp
        starts = [[part * third + index * share for part in range(3)] for index in range(tp)]
        return tuple(TensorShard(self.shape, 0, tuple(ShardPiece(a, a + share) for a in each)) for each in starts)


def _block_weights(width: int) -> dict[str, _Weight]:
    """The parameters of a block, by name in it."""
    h = width
    return {
        "norm1.weight": _Weight((h,)),
        "norm1.bias": _Weight((h,)),
        "attention.qkv.weight": _Weight((3 * h, h), QKV),
        "attention.qkv.bias": _Weight((3 * h,), QKV),
        "attention.out.weight": _Weight((h, h), 1),
        "attention.out.bias": _Weight((h,)),
        "norm2.weight": _Weight((h,)),
        "norm2.bias": _Weight((h,)),
        "mlp.up.weight": _Weight((4 * h, h), 0),
        "mlp.up.bias": _Weight((4 * h,), 0),
        "mlp.down.weight": _Weight((h, 4 * h), 1),
        "mlp.down.bias": _Weight((h,)),
    }


def _block_name(index: int) -> str:
    return f"blocks.{index}"


# ---- blocks --------------------------------------------------------------------------------------------------------


MASK_BYTES = 1  # of dropout, an element
FLOAT32_BYTES = 4


class _Rank(NamedTuple):
    """What one rank of a plan has of a GPT.

    scores  queries × keys of one head that it computes; heads: those that it has within attention
    """

    size: "GptFacts"
    plan: Plan
    element_bytes: int
    is_fused: bool

    @property
    def tokens(self) -> float:
        return self.size.length / self.plan.cp

    @property
    def hidden(self) -> float:
        """Elements of the hidden tensor."""
        return self.tokens * self.size.width

    @property
    def hidden_here(self) -> float:
        """Elements of the hidden tensor outside of attention and MLP."""
        return self.hidden / (self.plan.tp if self.plan.sequence_parallel else 1)

    @property
    def scores(self) -> float:
        length = self.size.length
        return float(max(scores_per_index(self.plan.context_spec, length, causal=True)) if self.is_fused else length**2)

    @property
    def heads(self) -> float:
        return self.size.heads / self.plan.tp / self.plan.ulysses


# ---- segments --------------------------------------------------------------------------------------


def _block(rank: _Rank) -> SegmentFacts:
    """One block, without its names."""
    h, t = rank.size.width, rank.plan.tp
    operations = (
        _pointwise(rank, rank.hidden_here, reads=1, writes=1),  # norm
        _linear(rank, h, 3 * h // t),
        *_attention(rank),
        _linear(rank, h // t, h),
        _dropout_and_add(rank),
        _pointwise(rank, rank.hidden_here, reads=1, writes=1),  # norm
        _linear(rank, h, 4 * h // t),
        _pointwise(rank, 4 * rank.hidden / t, reads=1, writes=1),  # bias and GELU
        _linear(rank, 4 * h // t, h),
        _dropout_and_add(rank),
    )
    # Two sums over tensor ranks, each way; where tokens are split, backward gathers the inputs again, for the gradients
    # of weights (Korthikanti et al., section 4.2.2).
    sums = _along_tp(
        rank, {Change.ALL_REDUCE: (2, 2, 2)}, {Change.ALL_GATHER: (2, 4, 2), Change.REDUCE_SCATTER: (2, 2, 2)}
    )
    # A backward holds the gradients of the MLP's inner tensor before and behind its activation.
    temporary = 2 * 4 * rank.hidden / t * rank.element_bytes
    return SegmentFacts("", (), operations, _saved_by_block(rank), (*sums, *_context_exchange(rank)), temporary)


def _saved_by_block(rank: _Rank) -> dict[str, float]:
    """By `recompute`. Of each element of the hidden tensor: the inputs of two norms, of attention and of the MLP,
    and two dropout masks; split over tensor ranks: q, k, v, the input of the output layer, and twice four for the MLP;
    of each score two values and a mask.
    """
    e, t = rank.element_bytes, rank.plan.tp
    outside = rank.hidden_here * (4 * e + 2 * MASK_BYTES)
    inside = rank.hidden / t * 12 * e
    scores = 0.0 if rank.is_fused else rank.scores * rank.heads * (2 * e + MASK_BYTES)
    return {"none": outside + inside + scores, "selective": outside + inside, "full": rank.hidden_here * e}


def _first(rank: _Rank) -> SegmentFacts:
    """Each rank looks up its part of the vocabulary, and keeps a dropout mask."""
    operations = (
        Operation(OperationKind.LOOKUP, 0.0, 2 * rank.hidden * rank.element_bytes, has_weight=True),
        _pointwise(rank, rank.hidden_here, reads=2, writes=1, mask=1),  # positions, dropout
    )
    sums = _along_tp(rank, {Change.ALL_REDUCE: (1, 0)}, {Change.REDUCE_SCATTER: (1, 0), Change.ALL_GATHER: (0, 1)})
    return SegmentFacts("", (EMBEDDING, POSITIONS), operations, _always(rank.hidden_here * MASK_BYTES), sums)


def _last(rank: _Rank) -> SegmentFacts:
    """The head, and the cross-entropy of its outputs in float32: converted, maximum, exponentials, sum. It keeps its
    input, and the softmax of its outputs. Tensor ranks sum the gradients of its inputs, and of each token's outputs a
    maximum, a sum and one value.
    """
    columns = -(-rank.size.vocabulary // rank.plan.tp)
    outputs = rank.tokens * columns
    operations = (
        _linear(rank, rank.size.width, columns),
        Operation(OperationKind.POINTWISE, 0.0, outputs * (rank.element_bytes + 5 * FLOAT32_BYTES)),
    )
    sums = _along_tp(rank, {Change.ALL_REDUCE: (0, 1)}, {Change.ALL_GATHER: (1, 1), Change.REDUCE_SCATTER: (0, 1)})
    if rank.plan.tp > 1:
        sums = (*sums, Collective("tp", Change.ALL_REDUCE, rank.tokens * FLOAT32_BYTES, 3, 0))
    return SegmentFacts(
        "",
        (EMBEDDING,),
        operations,
        _always(rank.hidden_here * rank.element_bytes + outputs * FLOAT32_BYTES),
        sums,
        temporary_bytes=outputs * (FLOAT32_BYTES + rank.element_bytes),
    )


def _always(num_bytes: float) -> dict[str, float]:
    """Kept whatever is computed again."""
    return dict.fromkeys(("none", "selective", "full"), num_bytes)


# ---- operations ------------------------------------------------------------------------------------


def _pointwise(rank: _Rank, num_elements: float, *, reads: int, writes: int, mask: int = 0) -> Operation:
    per_element = (reads + writes) * rank.element_bytes + mask * MASK_BYTES
    return Operation(OperationKind.POINTWISE, 0.0, num_elements * per_element)


def _dropout_and_add(rank: _Rank) -> Operation:
    return _pointwise(rank, rank.hidden_here, reads=2, writes=1, mask=1)


def _linear(rank: _Rank, inner: int, columns: int) -> Operation:
    rows, e = rank.tokens, rank.element_bytes
    return Operation(
        OperationKind.PRODUCT,
        flops=2.0 * rows * inner * columns,
        moved_bytes=e * rows * (inner + columns),
        weight_bytes=float(e * inner * columns),
        has_weight=True,
        rows=rows,
        columns=columns,
        inner=inner,
    )


def _attention(rank: _Rank) -> tuple[Operation, ...]:
    """Fused, or as Megatron's of 2021: two batched products, and mask, softmax and dropout between them."""
    head_size, e = rank.size.width // rank.size.heads, rank.element_bytes
    in_and_out = rank.hidden / rank.plan.tp  # elements of q, or of k, v or the output
    flops = 2.0 * rank.scores * head_size * rank.heads
    if rank.is_fused:
        return (Operation(OperationKind.ATTENTION, 2 * flops, 4 * e * in_and_out),)
    scores = rank.scores * rank.heads
    product = Operation(
        OperationKind.PRODUCT,
        flops,
        e * (2 * in_and_out + scores),
        rows=rank.tokens,
        columns=rank.size.length,
        inner=head_size,
        batch=rank.heads,
    )
    values = product._replace(columns=head_size, inner=rank.size.length)
    return product, _pointwise(rank, scores, reads=1, writes=1, mask=1), values


# ---- collectives -----------------------------------------------------------------------------------

Times = Mapping[Change, tuple[int, ...]]
"""By collective: how often in forward, in backward, and again in a backward that computes again."""


def _along_tp(rank: _Rank, whole: Times, split: Times) -> tuple[Collective, ...]:
    """Collectives of the hidden tensor, where tensor ranks have all tokens, and where they split them."""
    if rank.plan.tp == 1:
        return ()
    times, num_bytes = split if rank.plan.sequence_parallel else whole, rank.hidden * rank.element_bytes
    return tuple(Collective("tp", change, num_bytes, *each) for change, each in times.items())


def _context_exchange(rank: _Rank) -> tuple[Collective, ...]:
    """As much as `attention_sent_elements` says: a third in forward, two in backward; heads move as much both ways."""
    plan, size = rank.plan, rank.size
    if plan.cp == 1:
        return ()
    layer = AttentionSize(1, size.length, size.heads // plan.tp, size.width // size.heads)
    total = attention_sent_elements(layer, plan.cp, ulysses=plan.ulysses)
    of_heads = layer._replace(length=size.length // plan.cp * plan.ulysses)  # as many tokens on a rank, without a ring
    heads = attention_sent_elements(of_heads, plan.ulysses, ulysses=plan.ulysses)
    as_gather = plan.cp / (plan.cp - 1) * rank.element_bytes  # an all-gather sends (N − 1)/N of its tensor
    ring, exchange = (total - heads) / 3 * as_gather, heads / 2 * as_gather
    found = (
        Collective("cp", Change.ALL_GATHER, ring, 1, 2, 1),
        Collective("cp", Change.ALL_GATHER, exchange, 1, 1, 1),
    )
    return tuple(each for each in found if each.whole_bytes)


# ---- gpt facts ------------------------------------------------------------------------------------------------------


ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ADAM = UpdateSpec(optimizer="Adam", num_states=(2,))
facts_key = attrgetter("tp", "cp", "ring", "ulysses", "sequence_parallel", "precision")


@dataclass(frozen=True, kw_only=True)
class GptFacts:
    """A `FactsSource`. `precision`: the dtype of the parameters, in which plans with `precision = "keep"` compute.

    Raises PlanError with all problems.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 51200
    length: int = 2048
    batch_size: int
    precision: str = "float32"
    fused_attention: bool = False
    update_spec: UpdateSpec = ADAM
    traits: ModelTraits = NO_TRAITS

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise PlanError(problems, where="the GPT")

    def _problems(self) -> Iterable[Problem]:
        counts = {
            name: getattr(self, name) for name in ("layers", "width", "heads", "vocabulary", "length", "batch_size")
        }
        wrong = [name for name, value in counts.items() if type(value) is not int or value < 1]
        for name in wrong:
            yield Problem(f"{name} = {counts[name]!r}", "a whole number of at least 1")
        if not wrong and self.width % self.heads:
            head_size = max(1, self.width // self.heads)
            attempt = f"width = {head_size * self.heads}"
            yield Problem(f"width = {self.width}, heads = {self.heads}", "a width divisible by heads", attempt)
        if self.precision not in ELEMENT_BYTES:
            yield Problem(
                f"precision = {self.precision!r}", f"one of {', '.join(ELEMENT_BYTES)}", "precision = float32"
            )

    # ---- FactsSource ----------------------------------------------------------------------------------

    def resized(self, batch_size: int) -> Self:
        return dataclasses.replace(self, batch_size=batch_size)

    @remembered(lambda _, plan: facts_key(plan))
    def facts(self, plan: Plan) -> ModelFacts:
        self._check(plan)
        return self._make_facts(plan)

    @remembered(lambda _, plan: (plan.tp, plan.pp, plan.interleave, plan.stages))
    def specs(self, plan: Plan) -> Sequence[ParamSpec]:
        self._check(plan)
        dtype = self.precision, ELEMENT_BYTES[self.precision]
        embedding, positions = _Weight((self.vocabulary, self.width), 0), _Weight((self.length, self.width))
        specs = [
            ParamSpec(EMBEDDING, embedding.shape, *dtype, shards=embedding.shards(plan.tp), is_tied=plan.pp > 1),
            ParamSpec(POSITIONS, positions.shape, *dtype, shards=positions.shards(plan.tp)),
        ]
        # The shards of all blocks are the same: a search asks for many divisions.
        weights = {name: (each.shape, each.shards(plan.tp)) for name, each in _block_weights(self.width).items()}
        for stage, blocks in enumerate(self.stage_blocks(plan)):
            for index in blocks:
                for name, (shape, shards) in weights.items():
                    specs.append(ParamSpec(f"{_block_name(index)}.{name}", shape, *dtype, stage=stage, shards=shards))
        return specs

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        """By weights in products, as Fourfold divides a model: the head counts, an embedding does not."""
        problems = division_problems(plan.stages, self.layers, plan.num_stages)
        if stage_names(plan.stages) is not None:
            problems.append(Problem(f"stages = {plan.stages!r}", "counts: blocks of a formula have no names"))
        if problems:
            raise PlanError(problems, where="the plan")
        block = float(12 * self.width**2 + 13 * self.width)
        head = float(self.vocabulary * self.width)
        return divide(plan.stages, [block] * self.layers, 0.0, head, plan.num_stages)

    # ---- facts ----------------------------------------------------------------------------------------

    def _check(self, plan: Plan) -> None:
        problems = []
        if self.heads % plan.tp:
            divisors = [str(size) for size in range(1, self.heads + 1) if self.heads % size == 0]
            problems.append(
                Problem(
                    f"tp = {plan.tp}, {self.heads} heads", "tp to divide the heads", f"tp = {' or '.join(divisors)}"
                )
            )
        elif problem := heads_problem(self.heads // plan.tp, self.heads // plan.tp, plan.ulysses):
            problems.append(problem)
        if problem := plan.context_spec.length_problem(self.length):
            problems.append(problem)
        if plan.sequence_parallel and self.length // plan.cp % plan.tp:
            got = f"tp = {plan.tp}, {self.length // plan.cp} tokens on a rank"
            problems.append(
                Problem(got, "tp to divide the tokens, with sequence parallelism", "sequence_parallel = false")
            )
        if problems:
            raise PlanError(problems, where="the plan")

    def _make_facts(self, plan: Plan) -> ModelFacts:
        compute = COMPUTE_FORMATS.get(plan.precision)
        element_bytes = compute.num_bytes if compute else ELEMENT_BYTES[self.precision]
        rank = _Rank(self, plan, element_bytes, is_fused=self.fused_attention or plan.cp > 1)
        block, weights = _block(rank), _block_weights(self.width)
        blocks = tuple(
            dataclasses.replace(block, name=name, params=tuple(f"{name}.{each}" for each in weights))
            for name in map(_block_name, range(self.layers))
        )
        # With tp, each tensor rank sends its part; with sequence parallelism, it has no more.
        boundary = rank.hidden_here / (1 if plan.sequence_parallel else plan.tp)
        return ModelFacts(
            _first(rank),
            blocks,
            _last(rank),
            boundary_bytes=boundary * element_bytes,
            tokens=self.length,
            boundary_columns=self.width,
            boundary_element_bytes=element_bytes,
        )

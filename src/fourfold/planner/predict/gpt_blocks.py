"""GPT blocks: the operations, collectives and activations of Megatron's GPT on one rank, for one sample.

T tokens of a sample on this rank, s/cp · h width · t tensor ranks · e bytes of an
element
column  a layer whose outputs are split over tensor ranks, row one whose inputs are; a vocabulary is split by rows
Law: a block computes 24·T·h²/t + 4·T·s·h/t operations forward, the head 2·T·h·V/t (equation 3 of Narayanan et al.,
2104.04473). Fused attention leaves out what the causal mask hides. A block keeps T·h·(10 + 24/t + 5·a·s/(h·t)) bytes in
two-byte precision (Korthikanti et al., 2205.05198, table 2).
Law: there are 12·l·h² (1 + 13/(12·h) + (V + s)/(12·l·h)) parameters, as in equation 2 of Narayanan et al. (2104.04473):
it leaves out a norm behind the last block (2·h parameters), and so does this.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.axes.context.rules.layout import AttentionSize, attention_sent_elements, scores_per_index
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.tensor_shard import ShardPiece, TensorShard
from fourfold.planner.predict.facts import Collective, Operation, OperationKind
from fourfold.words.layout import Change

# ---- parameters ----------------------------------------------------------------------------------------------------

EMBEDDING = "embedding.weight"  # the head uses it too
POSITIONS = "positions.weight"


class GptSize(NamedTuple):
    """The sizes of a GPT: l layers, h width, a heads, V vocabulary, s tokens of a sample."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int


def block_shapes(size: GptSize) -> dict[str, tuple[int, ...]]:
    """The parameters of a block, by name in it."""
    h = size.width
    return {
        "norm1.weight": (h,),
        "norm1.bias": (h,),
        "attention.qkv.weight": (3 * h, h),
        "attention.qkv.bias": (3 * h,),
        "attention.out.weight": (h, h),
        "attention.out.bias": (h,),
        "norm2.weight": (h,),
        "norm2.bias": (h,),
        "mlp.up.weight": (4 * h, h),
        "mlp.up.bias": (4 * h,),
        "mlp.down.weight": (h, 4 * h),
        "mlp.down.bias": (h,),
    }


def block_name(index: int) -> str:
    return f"blocks.{index}"


def gpt_specs(size: GptSize, plan: Plan, stages: Sequence[range], *, dtype: str, element_bytes: int) -> list[ParamSpec]:
    """The parameters in order of definition. `stages`: the blocks of each stage."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (size.vocabulary, size.width),
        POSITIONS: (size.length, size.width),
    }
    stage_of = {block_name(index): stage for stage, blocks in enumerate(stages) for index in blocks}
    own_stage = dict.fromkeys(shapes, 0)
    shards = {name: _shards(name, shape, plan.tp) for name, shape in shapes.items()}
    block_shards = {name: _shards(f".{name}", shape, plan.tp) for name, shape in block_shapes(size).items()}
    for block, stage in stage_of.items():
        for name, shape in block_shapes(size).items():
            shapes[f"{block}.{name}"] = shape
            own_stage[f"{block}.{name}"] = stage
            shards[f"{block}.{name}"] = block_shards[name]  # the same of all blocks: a search asks for many divisions
    return [
        ParamSpec(
            name,
            shape,
            dtype,
            element_bytes,
            stage=own_stage[name],
            shards=shards[name],
            is_tied=name == EMBEDDING and plan.pp > 1,
        )
        for name, shape in shapes.items()
    ]


def _shards(name: str, shape: tuple[int, ...], tp: int) -> tuple[TensorShard, ...]:
    if tp == 1:
        return ()
    if ".qkv." in name:
        return tuple(_fused(shape, index, tp) for index in range(tp))
    dim = 0 if name == EMBEDDING or ".up." in name else 1 if name.endswith(("out.weight", "down.weight")) else None
    if dim is None:
        return tuple(TensorShard.whole(shape, index, tp) for index in range(tp))
    return tuple(TensorShard.even(shape, dim, index, tp) for index in range(tp))


def _fused(shape: tuple[int, ...], index: int, tp: int) -> TensorShard:
    """Rows of q, of k and of v."""
    third = shape[0] // 3
    share = third // tp
    starts = [part * third + index * share for part in range(3)]
    return TensorShard(shape, 0, tuple(ShardPiece(start, start + share) for start in starts))


# ---- blocks --------------------------------------------------------------------------------------------------------


MASK_BYTES = 1  # of dropout, an element
FLOAT32_BYTES = 4


class RankShape(NamedTuple):
    """What one rank of a plan has of a GPT.

    scores  queries × keys of one head that it computes; heads: those that it has within attention
    """

    size: GptSize
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
        length, spec = self.size.length, self.plan.context_spec
        if not self.is_fused:
            return float(length * length)
        return float(max(scores_per_index(spec, length, causal=True)))

    @property
    def heads(self) -> float:
        return self.size.heads / self.plan.tp / self.plan.ulysses


# ---- operations ------------------------------------------------------------------------------------


def block_operations(rank: RankShape) -> tuple[Operation, ...]:
    h, t = rank.size.width, rank.plan.tp
    return (
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


def first_operations(rank: RankShape) -> tuple[Operation, ...]:
    moved = 2 * rank.hidden * rank.element_bytes
    return (
        Operation(OperationKind.LOOKUP, 0.0, moved, has_weight=True),
        _pointwise(rank, rank.hidden_here, reads=2, writes=1, mask=1),  # positions, dropout
    )


def last_operations(rank: RankShape) -> tuple[Operation, ...]:
    """The head, and the cross-entropy of its outputs in float32: converted, maximum, exponentials, sum."""
    columns = -(-rank.size.vocabulary // rank.plan.tp)
    passes = rank.element_bytes + 5 * FLOAT32_BYTES
    return (
        _linear(rank, rank.size.width, columns),
        Operation(OperationKind.POINTWISE, 0.0, rank.tokens * columns * passes),
    )


def _pointwise(rank: RankShape, num_elements: float, *, reads: int, writes: int, mask: int = 0) -> Operation:
    per_element = (reads + writes) * rank.element_bytes + mask * MASK_BYTES
    return Operation(OperationKind.POINTWISE, 0.0, num_elements * per_element)


def _dropout_and_add(rank: RankShape) -> Operation:
    return _pointwise(rank, rank.hidden_here, reads=2, writes=1, mask=1)


def _linear(rank: RankShape, inner: int, columns: int) -> Operation:
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


def _attention(rank: RankShape) -> tuple[Operation, ...]:
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


def block_collectives(rank: RankShape) -> tuple[Collective, ...]:
    """Two sums over tensor ranks, each way; and what attention exchanges along the sequence."""
    return (*_tensor_sums(rank, 2), *_context_exchange(rank))


def first_collectives(rank: RankShape) -> tuple[Collective, ...]:
    """Each rank looks up its part of the vocabulary."""
    if rank.plan.tp == 1:
        return ()
    bytes_ = rank.hidden * rank.element_bytes
    if rank.plan.sequence_parallel:
        return (
            Collective("tp", Change.REDUCE_SCATTER, bytes_, 1, 0),
            Collective("tp", Change.ALL_GATHER, bytes_, 0, 1),
        )
    return (Collective("tp", Change.ALL_REDUCE, bytes_, 1, 0),)


def last_collectives(rank: RankShape) -> tuple[Collective, ...]:
    """The gradients of the head's inputs; of each token's outputs a maximum, a sum and one value."""
    if rank.plan.tp == 1:
        return ()
    bytes_ = rank.hidden * rank.element_bytes
    scalars = Collective("tp", Change.ALL_REDUCE, rank.tokens * FLOAT32_BYTES, 3, 0)
    if rank.plan.sequence_parallel:
        gathers = Collective("tp", Change.ALL_GATHER, bytes_, 1, 1)
        return (gathers, Collective("tp", Change.REDUCE_SCATTER, bytes_, 0, 1), scalars)
    return (Collective("tp", Change.ALL_REDUCE, bytes_, 0, 1), scalars)


def _tensor_sums(rank: RankShape, times: int) -> tuple[Collective, ...]:
    if rank.plan.tp == 1:
        return ()
    bytes_ = rank.hidden * rank.element_bytes
    if not rank.plan.sequence_parallel:
        return (Collective("tp", Change.ALL_REDUCE, bytes_, times, times, times),)
    # Backward gathers the inputs again, for the gradients of weights (Korthikanti et al., section 4.2.2).
    return (
        Collective("tp", Change.ALL_GATHER, bytes_, times, 2 * times, times),
        Collective("tp", Change.REDUCE_SCATTER, bytes_, times, times, times),
    )


def _context_exchange(rank: RankShape) -> tuple[Collective, ...]:
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


# ---- activations -----------------------------------------------------------------------------------


def block_saved_bytes(rank: RankShape) -> dict[str, float]:
    """By `recompute`. Of each element of the hidden tensor: the inputs of two norms, of attention and of the MLP,
    and two dropout masks; split over tensor ranks: q, k, v, the input of the output layer, and twice four for the MLP;
    of each score two values and a mask.
    """
    e, t = rank.element_bytes, rank.plan.tp
    outside = rank.hidden_here * (4 * e + 2 * MASK_BYTES)
    inside = rank.hidden / t * 12 * e
    scores = 0.0 if rank.is_fused else rank.scores * rank.heads * (2 * e + MASK_BYTES)
    return {"none": outside + inside + scores, "selective": outside + inside, "full": rank.hidden_here * e}

"""GPT specs: the parameters of Megatron's GPT, and what each place of the tensor axis holds of them.

column  a layer whose outputs are split over tensor ranks, row one whose inputs are; a vocabulary is split by rows
Law: there are 12·l·h² (1 + 13/(12·h) + (V + s)/(12·l·h)) parameters, as in equation 2 of Narayanan et al. (2104.04473):
it leaves out a norm behind the last block (2·h parameters), and so does this.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.tensor_shard import ShardPiece, TensorShard

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

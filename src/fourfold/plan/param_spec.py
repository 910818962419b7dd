"""Parameter specs: the identity of a parameter, by which buckets, checkpoints, averages, `show` and `verify` speak.

name, shape  of the global tensor: the same on every rank and every mesh
shard        the part of it that a place of the tensor axis holds; the ranks of one place hold the same
Law: everything that is known about a parameter without its values is here, and nothing here depends on the data axis.
Law: plain data, so that code with torch can describe the optimizer to code without it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from fourfold.plan.tensor_shard import TensorShard

# ---- update spec ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateSpec:
    """How gradients are clipped, and what the optimizer is.

    optimizer              the name of its class
    is_layerwise           its update needs the norms of whole parameters
    num_states             by parameter group: tensors of optimizer state per parameter; needed to count memory
    full_precision_params  the parameters that are computed and updated in their own dtype, whatever the precision
    """

    clip: float | None = None
    optimizer: str = "the optimizer"
    is_layerwise: bool = False
    num_states: tuple[int, ...] = ()
    full_precision_params: frozenset[str] = frozenset()

    def waits_for_norm(self, precision: str) -> bool:
        """Whether updates wait for the norm of all gradients: for a clip, or to know whether they are finite."""
        return self.clip is not None or precision == "fp16"


# ---- parameter specs -----------------------------------------------------------------------------------------------


class ParamSpec(NamedTuple):
    """A parameter of the model.

    name           in the whole model, as `named_parameters` has it
    shape          of the global tensor
    dtype          by its name in torch
    param_group    the index of its optimizer group
    stage          the pipeline stage that computes with it
    shards         by place on the tensor axis: the part of the global tensor that its ranks hold, before the data axis
                   shards it; empty: every place holds all of it
    is_tied        another pipeline stage has a copy of it
    tensor_index   the place that `local_shape`, `num_elements` and `num_bytes` are of
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    param_group: int = 0
    stage: int = 0
    shards: tuple[TensorShard, ...] = ()
    tensor_index: int = 0
    is_tied: bool = False

    def at(self, tensor_index: int) -> Self:
        """The same parameter, as the ranks of this place on the tensor axis hold it."""
        return self._replace(tensor_index=tensor_index)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that a rank holds."""
        return self.shards[self.tensor_index].local_shape if self.shards else self.shape

    @property
    def num_replicas(self) -> int | None:
        """How many places of the tensor axis hold each element; None: more of some elements than of others."""
        counts = {piece.num_replicas for shard in self.shards for piece in shard.pieces} or {1}
        return counts.pop() if len(counts) == 1 else None

    @property
    def num_elements(self) -> int:
        """The elements that a rank holds."""
        return math.prod(self.local_shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the elements that a rank holds."""
        return self.num_elements * self.element_bytes

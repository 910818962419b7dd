"""Parameter specs: the identity of a parameter, by which buckets, checkpoints, averages, `show` and `verify` speak.

name, shape  of the global tensor: the same on every rank and every mesh
box          the part of it that a rank holds; the ranks of one tensor place hold the same
Law: everything that is known about a parameter without its values is here, and nothing here depends on the data axis.
"""

from typing import NamedTuple

from fourfold.words.box import Box
from fourfold.words.layout import WHOLE, Layout
from fourfold.words.mesh import Axis


class ParamSpec(NamedTuple):
    """A parameter of the model.

    name           in the whole model, as `named_parameters` has it
    shape          of the global tensor
    dtype          by its name in torch
    param_group    the index of its optimizer group
    stage          the pipeline stage that computes with it
    tensor_layout  how it is stored along the tensor axis
    local_box      the part of the global tensor that this rank holds, before the data axis shards it; None: all of it
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    param_group: int = 0
    stage: int = 0
    tensor_layout: Layout = WHOLE
    local_box: Box | None = None

    @property
    def box(self) -> Box:
        """The part of the global tensor that this rank holds."""
        return self.local_box or Box.whole(self.shape)

    @property
    def num_elements(self) -> int:
        """The elements that this rank holds."""
        return self.box.num_elements

    @property
    def num_bytes(self) -> int:
        """The bytes of the elements that this rank holds."""
        return self.num_elements * self.element_bytes

    @property
    def replicated_axes(self) -> tuple[Axis, ...]:
        """The mesh axes along which all ranks hold the same box."""
        return ("dp", "sp", "tp") if self.tensor_layout == WHOLE else ("dp", "sp")

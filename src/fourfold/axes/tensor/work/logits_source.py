"""Logits source: what split logits are made of, and how the whole logits are made of it.

local   the logits of this rank's classes
whole   those of all classes: the ranks' local ones, gathered
family  sources that were made of each other, as by `logits[:, :-1]`; they are gathered together, once
Law: `whole` has the values, the graph and the views that it would have if the first of the family had been gathered
at once. All ranks gather at the same place in the program.
"""

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fourfold.axes.tensor.work.cross_entropy import Vocabulary
from fourfold.axes.tensor.work.split_region import gather_last_dim
from fourfold.torch_kit.torch_private import are_transforms_active, suspend_transforms, version_of

Operation = Callable[[Tensor], Tensor]


class Family:
    """What split logits that were made of each other have in common."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Source]] = []
        """The first one, then what was made of it, in this order."""
        self.has_split_loss = False
        """Whether a loss was computed of local logits: the whole ones have no part in its graph."""
        self.is_whole_only = False
        """Whether someone may write into the memory of the whole logits, unseen by autograd, or `is_watched`."""
        self.is_watched = False
        """Whether hooks or changes were made that only the whole logits know of."""


class Source:
    """What split logits are made of.

    local      the logits of this rank's classes; their dtype may be narrower than `dtype`, that of the split logits
    parent     None, or what they are `operation(parent)` of
    """

    def __init__(
        self,
        local: Tensor,
        vocabulary: Vocabulary,
        *,
        parent: "Source | None" = None,
        operation: Operation | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.local, self.vocabulary, self.dtype = local, vocabulary, dtype or local.dtype
        self._parent, self._operation = parent, operation
        self.gathered: Tensor | None = None
        """The whole logits, once the family is gathered."""
        self._version = 0
        self.family = Family() if parent is None else parent.family
        self.family.members.append(weakref.ref(self))
        if parent is not None and parent.gathered is not None:
            self._make_whole()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.local.shape[:-1], self.vocabulary.num_classes)

    @property
    def wide_local(self) -> Tensor:
        """The local logits in the dtype of the split ones."""
        return self.local.to(self.dtype)

    @property
    def is_written(self) -> bool:
        """Whether the whole logits were changed in place: the local ones were not."""
        return self.gathered is not None and version_of(self.gathered) != self._version

    @property
    def stays_split(self) -> bool:
        """Whether what is computed of the local logits now is what the whole ones would give."""
        return (
            torch.is_grad_enabled()
            and not self.family.is_whole_only
            and not self.is_written
            and not are_transforms_active()
        )

    @property
    def whole(self) -> Tensor:
        """The whole logits, with their graph. Collective, unless the family is gathered already."""
        if self.gathered is None:
            # All of the family: later changes in place are seen through views of each other, as in torch.
            for member in self.family.members:
                if (source := member()) is not None:
                    source._make_whole()
        assert self.gathered is not None
        return self.gathered

    def _make_whole(self) -> None:
        with torch.inference_mode(False), torch.enable_grad(), _without_transforms():
            if self._parent is None or self._operation is None:
                assert self.vocabulary.group is not None
                self.vocabulary.group.meet("the whole logits")
                self.gathered = gather_classes(self.local, self.vocabulary)
            else:
                self.gathered = self._operation(self._parent.whole)
        self._version = version_of(self.gathered)

    def derive(self, local: Tensor, operation: Operation, dtype: torch.dtype | None = None) -> "Source":
        """The source whose local logits are these, and whose whole ones `operation` makes of this one's."""
        return Source(local, self.vocabulary, parent=self, operation=operation, dtype=dtype or self.dtype)


def _without_transforms() -> AbstractContextManager[Any]:
    """The whole logits belong to no transform of `torch.func` in which they are first used."""
    return suspend_transforms() if are_transforms_active() else contextlib.nullcontext()


def gather_classes(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The logits of all classes, of which this rank has the local ones. Collective."""
    assert vocabulary.group is not None
    return gather_last_dim(local, vocabulary.group, vocabulary.num_classes)

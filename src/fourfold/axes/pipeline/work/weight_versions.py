"""Weight versions: the weights that an asynchronous schedule computes with while newer ones exist.

version    of a stage's weights: how many updates they have seen since the pipeline was drained
staleness  how many updates the weights of a batch miss: its forward and its backward use the same ones
stash      copies of the versions that batches in flight use, and of the newest one
Law: no update writes memory that a forward has read and whose backward is still to come.
Source: weight stashing, PipeDream (Narayanan et al., SOSP 2019), §3.3.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from fourfold.torch_kit.param_access import untracked_access
from fourfold.torch_kit.torch_private import preserve_versions


class WeightVersions:
    """The versions of one stage's weights. The parameters hold the newest one, except inside `using`."""

    def __init__(self, parameters: Sequence[nn.Parameter], staleness: int) -> None:
        self._parameters, self._staleness = parameters, staleness
        self._newest = 0
        self._stash: dict[int, list[Tensor]] = {}

    def version_of(self, batch: int) -> int:
        """The version that a batch uses, counted from the last drain."""
        return max(0, batch - self._staleness)

    @contextlib.contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Inside, the parameters hold this version."""
        if not self._staleness:  # a batch ends before the next one begins
            yield
            return
        if version not in self._stash:
            assert version == self._newest, f"version {version} has been overwritten by version {self._newest}"
            self._stash_newest()
        with untracked_access():
            newest = [parameter.data for parameter in self._parameters]
            self._show(self._stash[version])
        try:
            yield
        finally:
            with untracked_access():
                self._show(newest)

    def _show(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor

    def _stash_newest(self) -> None:
        with untracked_access():
            self._stash[self._newest] = [parameter.data.clone() for parameter in self._parameters]

    @contextlib.contextmanager
    def in_update(self) -> Iterator[None]:
        """Inside, the parameters are updated. autograd does not count it: what forwards have saved is stashed."""
        with untracked_access(), preserve_versions(tuple(self._parameters)):
            yield

    def end_update(self, oldest_needed: int) -> None:
        """All parameters are updated. Versions before `oldest_needed` are freed."""
        self._newest += 1
        if self._staleness:
            self._stash_newest()
        for version in [each for each in self._stash if each < oldest_needed]:
            del self._stash[version]

    def restart(self) -> None:
        """The pipeline is drained: count from 0, with the newest weights."""
        self._newest = 0
        self._stash.clear()

    @property
    def num_bytes(self) -> int:
        """The bytes of the stash."""
        return sum(tensor.nbytes for tensors in self._stash.values() for tensor in tensors)

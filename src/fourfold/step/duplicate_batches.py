"""Duplicate batches: training is refused if all data ranks train on the same samples.

fingerprint  a hash of the tensors and strings of a batch; None if there is nothing to compare
Law: a third different batch that is the same on all data ranks changes no weight. One batch that is repeated is
trained, with one warning. Once ranks have had different batches, nothing is hashed or sent any more.

Not found: a model that is called in compiled code, or only by its parts; batches that are the same on only some ranks;
batches after the first `MAX_COMPARED`.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from fourfold.parts.torch_private import are_transforms_active
from fourfold.step.sequence.batch_consistency import DIGEST_BITS, batch_digest
from fourfold.words.errors import Problem, SettingError, TaskError

POLICIES = ("refuse", "allow")
# So many different batches that are the same on all ranks are no accident.
MAX_SAME_BATCHES = 3
# At most so many batches are compared if ranks never differ: one batch repeated, or nothing to compare.
MAX_COMPARED = 100


class DuplicateBatches:
    """Compares the batches of the data ranks until they differ. Every rank makes the same comparisons."""

    def __init__(self, policy: str, *, data_ranks: Sequence[int], is_log_rank: bool) -> None:
        """Raises SettingError for an unknown policy.

        data_ranks   the ranks that compare batches: those with different samples
        is_log_rank  this rank prints the warning
        """
        if policy not in POLICIES:
            need = " or ".join(f'"{each}"' for each in POLICIES)
            raise SettingError(Problem(f'same_batches = "{policy}"', need))
        self.num_left = MAX_COMPARED if policy == "refuse" and len(data_ranks) > 1 else 0
        """How many batches are compared from now on, at most."""
        self._data_ranks, self._is_log_rank = data_ranks, is_log_rank
        self._seen: list[int] = []

    def compare(self, by_rank: Sequence[int | None]) -> None:
        """Compare the fingerprints of one batch, by rank; None for a rank that has nothing to compare.

        Raises TaskError, on every rank, for the third different batch that is the same on all ranks.
        """
        fingerprints = [by_rank[rank] for rank in self._data_ranks]
        distinct = {each for each in fingerprints if each is not None}
        self.num_left = 0 if len(distinct) > 1 else self.num_left - 1
        if len(distinct) != 1 or sum(each is not None for each in fingerprints) == 1:
            return
        (fingerprint,) = distinct
        if fingerprint not in self._seen[:MAX_SAME_BATCHES]:
            self._seen.append(fingerprint)
        elif len(self._seen) < MAX_SAME_BATCHES:
            self._warn()
        if len(self._seen) >= MAX_SAME_BATCHES:
            raise TaskError(self._problem(), where="the batches")

    def _warn(self) -> None:
        if self._is_log_rank:
            self._is_log_rank = False
            got = f"all {len(self._data_ranks)} data ranks train on one batch again and again, and do the same work"
            warnings.warn(f'{got}; same_batches="allow" turns this warning off', stacklevel=5)

    def _problem(self) -> Problem:
        got = f"the same batches on all {len(self._data_ranks)} data ranks, {MAX_SAME_BATCHES} different ones in a row"
        attempt = 'ff.Feed(dataset, batch_size=…), ff.shard(loader), or same_batches="allow"'
        return Problem(got, "different samples on each data rank", attempt)


def fingerprint(tree: Any) -> int | None:
    """A hash of the tensors and strings in a batch, in any dicts, lists and data classes.

    None if there are none, or if there are objects of other types. Numbers that do not belong to samples, such as a
    step number, are left out: Python numbers and tensors without dims.
    """
    tensors, others = [], xxhash.xxh3_64()
    is_empty = True
    for path, leaf in _leaves(tree, ""):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, Tensor):
            if not _is_readable(leaf):
                return None
            if leaf.dim() == 0:
                continue
            tensors.append(leaf.resolve_conj().resolve_neg())
            is_empty = is_empty and not leaf.numel()
        elif isinstance(leaf, str | bytes):
            others.update(repr(leaf).encode())
            is_empty = is_empty and not leaf
        elif leaf is not None and not isinstance(leaf, bool | int | float | complex):
            return None
        others.update(path.encode())
    if is_empty:
        return None
    others.update(str(batch_digest(tensors)).encode())
    return others.intdigest() >> (64 - DIGEST_BITS)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything that is not a container, with its path."""
    if isinstance(tree, Mapping):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = vars(tree).items() if hasattr(tree, "__dict__") else ()
    else:
        yield path, tree
        return
    for name, part in parts:
        yield from _leaves(part, f"{path}/{name}")


def _is_readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read now."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.device.type == "meta" or are_transforms_active():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class InputFingerprints:
    """The training inputs that a model has been called with since the last `pop`: a forward pre-hook of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._fingerprints: list[int | None] = []
        self._handle, self._was_called = model.register_forward_pre_hook(self, with_kwargs=True), False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._was_called = True
        if self._model() is module and module.training and torch.is_grad_enabled():
            self._fingerprints.append(fingerprint((args, kwargs)))

    def __reduce__(self) -> tuple[type["NoFingerprints"], tuple[()]]:
        return NoFingerprints, ()  # in a copied or pickled model the hook does nothing

    def pop(self) -> int | None:
        """One fingerprint of all calls; None if there was no call, or one without a fingerprint."""
        calls, self._fingerprints = self._fingerprints, []
        if not calls or None in calls:
            return None
        return calls[0] if len(calls) == 1 else fingerprint([str(each) for each in calls])

    def remove_hook(self) -> None:
        """Stop collecting fingerprints."""
        self._model = lambda: None
        # A hook inside compiled code does nothing; removing it would cause a recompilation.
        if self._was_called:
            self._handle.remove()


class NoFingerprints:
    """Where batches are not compared; a forward pre-hook that does nothing."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def pop(self) -> int | None:
        raise AssertionError("batches are not compared")

    def remove_hook(self) -> None:
        pass

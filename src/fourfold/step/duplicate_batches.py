"""Same batches: data ranks that all train on the same samples are refused.

fingerprint  a hash of the tensors and texts of a batch; None where there is nothing to compare
Law: of batches that are each the same on all data ranks, the third different one moves no weight. One batch repeated is
trained, with one warning. Once the ranks have been seen to differ, nothing is hashed or sent any more.

Not found: a model that is called in compiled code, or by its parts; ranks of which only some have the same batches; and
what comes after the first `WATCHED` batches.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from fourfold.parts.torch_private import are_transforms_active
from fourfold.step.sequence.batch_consistency import DIGEST_BITS, batch_digest
from fourfold.words.errors import Problem, SettingError, TaskError

POLICIES = ("refuse", "allow")
MAX_SAME_BATCHES = 3  # so many different batches, each the same on all ranks, are no accident
MAX_COMPARED = (
    100  # batches that are compared at most, where ranks never differ: one batch repeated, or nothing to compare
)


class DuplicateBatches:
    """Compares the batches of the data ranks, until they differ. All ranks compare the same batches."""

    def __init__(self, policy: str, *, num_data_ranks: int, is_log_rank: bool) -> None:
        """Raises SettingError for an unknown policy. `speaks`: this rank prints the warning."""
        if policy not in POLICIES:
            need = " or ".join(f'"{each}"' for each in POLICIES)
            raise SettingError(Problem(f'same_batches = "{policy}"', need))
        self.is_active = policy == "refuse" and num_data_ranks > 1
        self._num_data_ranks, self._is_log_rank, self._num_left = num_data_ranks, is_log_rank, MAX_COMPARED
        self._seen: list[int] = []

    def compare(self, fingerprints: Sequence[int | None]) -> None:
        """Take in the fingerprints of one batch, by data rank; None for a rank that has nothing to compare.

        Raises TaskError, on all ranks alike, for the third different batch that all of them have.
        """
        self._num_left -= 1
        held = {each for each in fingerprints if each is not None}
        if len(held) > 1 or self._num_left == 0:
            self.is_active = False
        if len(held) != 1 or sum(each is not None for each in fingerprints) == 1:
            return
        (fingerprint,) = held
        if fingerprint not in self._seen[:MAX_SAME_BATCHES]:
            self._seen.append(fingerprint)
        elif len(self._seen) < MAX_SAME_BATCHES:
            self._warn()
        if len(self._seen) >= MAX_SAME_BATCHES:
            raise TaskError(self._problem(), where="the batches")

    def _warn(self) -> None:
        if self._is_log_rank:
            self._is_log_rank = False
            got = f"all {self._num_data_ranks} data ranks train on the same batch again and again, and do the same work"
            warnings.warn(f'{got}; same_batches="allow" ends this warning', stacklevel=5)

    def _problem(self) -> Problem:
        got = f"the same batches on all {self._num_data_ranks} data ranks, {MAX_SAME_BATCHES} different ones in a row"
        attempt = 'ff.Feed(dataset, batch_size=…), ff.shard(loader), or same_batches="allow"'
        return Problem(got, "samples of its own for each data rank", attempt)


def fingerprint(tree: Any) -> int | None:
    """A hash of the tensors and texts in a batch, whatever dicts, lists and data classes they are in.

    None where there are none, or where something else is among them. Numbers that belong to no sample, such as the
    number of a step, do not count: neither those of Python nor tensors without dims.
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
    """What is no container, and where it stands."""
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
    """Whether its numbers can be read here and now."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.device.type == "meta" or are_transforms_active():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class InputFingerprints:
    """What a model has been called with for training, since it was asked last: a forward pre-hook of the model."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._fingerprints: list[int | None] = []
        self._handle, self._was_called = None, False
        if model is not None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._was_called = True
        if self._model is not None and self._model() is module and module.training and torch.is_grad_enabled():
            self._fingerprints.append(fingerprint((args, kwargs)))

    def __reduce__(self) -> tuple[type["InputFingerprints"], tuple[None]]:
        return InputFingerprints, (None,)  # in a copy of the model, and in a file of it, the hook does nothing

    def pop(self) -> int | None:
        """One fingerprint of all calls; None where there was none, or one that has none."""
        found, self._fingerprints = self._fingerprints, []
        if not found or None in found:
            return None
        return found[0] if len(found) == 1 else fingerprint([str(each) for each in found])

    def remove_hook(self) -> None:
        """Listen no more."""
        self._model = None
        # Code that was compiled with the hook in it does nothing there, but would be compiled again without it.
        if self._handle is not None and self._was_called:
            self._handle.remove()
            self._handle = None

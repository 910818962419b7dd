"""Batches: data ranks must train on different ones, and ranks that work on the same samples on the same one.

digest     a hash of a batch; for data ranks, of its samples only
different  a third different batch that is the same on all data ranks changes no weight. One batch that is repeated is
           trained, with one warning. Once data ranks have had different batches, these are hashed no more
same       every step, evaluation and forward compares; ranks that differ take part in it without samples
Law: all ranks receive a broken row together, and refuse the step before a weight changes.

Not found: a model that is called in compiled code, or only by its parts; batches that are the same on only some data
ranks; those after the first `MAX_COMPARED`.
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

from fourfold.comm.channel import Channel
from fourfold.feed.sample_rng import Fingerprint, is_same_sample
from fourfold.proof.digests.table import DIGEST_BITS, TABLE, digest
from fourfold.torch_kit.torch_private import are_transforms_active
from fourfold.words.errors import Problem, SettingError
from fourfold.words.rank_groups import format_groups

POLICIES = ("error", "allow")
# So many different batches that are the same on all ranks are no accident.
MAX_SAME_BATCHES = 3
# At most so many batches are compared if ranks never differ: one batch repeated, or nothing to compare.
MAX_COMPARED = 100


def batch_digest(batch: Any) -> int:
    """The digest of the dtypes, shapes and values of all tensors of a batch, in dicts, lists and data classes."""
    return tensors_digest([(path, leaf) for path, leaf in _leaves(batch, "") if isinstance(leaf, Tensor)])


def samples_digest(batch: Any) -> int | None:
    """The digest of the tensors, arrays and texts of a batch.

    None if there are none, or if there are objects of other types. Numbers that do not belong to samples, such as a
    step number, are left out: Python numbers and tensors without dims.
    """
    tensors, others, is_empty = [], [], True
    for path, leaf in _leaves(batch, ""):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, Tensor):
            if not _is_readable(leaf):
                return None
            if leaf.dim() == 0:
                continue
            tensors.append((path, leaf))
            is_empty = is_empty and not leaf.numel()
        elif isinstance(leaf, str | bytes):
            others.append([path, repr(leaf)])
            is_empty = is_empty and not leaf
        elif leaf is not None and not isinstance(leaf, bool | int | float | complex):
            return None
    return None if is_empty else digest([others, tensors_digest(tensors)])


def tensors_digest(tensors: Sequence[tuple[str, Tensor]]) -> int:
    """Of tensors and where in the batch they are."""
    hashed = xxhash.xxh3_64()
    for path, tensor in tensors:
        hashed.update(f"{path} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        hashed.update(flat.view(torch.uint8).numpy().data)
    return hashed.intdigest() >> (64 - DIGEST_BITS)


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


# ---- the same on ranks that share samples -------------------------------------------------------------


def is_equal_across_ranks(number: int, ring_groups: Sequence[Channel], device: torch.device) -> bool:
    """Whether all ranks of a cp group have this number. Collective; `ring_groups` together reach them all."""
    differs = 0
    for group in ring_groups:
        rows = [row.tolist() for row in group.all_gather([torch.tensor([number, differs], device=device)])]
        differs = int(any(row != [number, 0] for row in rows))
    return not differs


def batch_mismatch_problem(axis: str = "", ranks: Sequence[int] = ()) -> Problem:
    """What is wrong if ranks that differ on this axis only have different batches; "": on another rank's axes."""
    if axis:
        group = f"ranks {', '.join(map(str, ranks))}, which differ only on {axis}"
    else:
        group = "the ranks that differ only on cp or tp"
    row = TABLE["batch"]
    return Problem(f"different batches on some of {group}", row.need, row.attempt)


# ---- different on data ranks --------------------------------------------------------------------------


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
        self.num_left = MAX_COMPARED if policy == "error" and len(data_ranks) > 1 else 0
        """How many batches are compared from now on, at most."""
        self._data_ranks, self._is_log_rank = data_ranks, is_log_rank
        self._seen: list[int] = []

    def compare(self, by_rank: Sequence[int | None]) -> None:
        """Compare the digests of one batch, by rank; None for a rank that has nothing to compare.

        Raises TaskError, on every rank, for the third different batch that is the same on all ranks.
        """
        digests = [by_rank[rank] for rank in self._data_ranks]
        distinct = {each for each in digests if each is not None}
        self.num_left = 0 if len(distinct) > 1 else self.num_left - 1
        if len(distinct) != 1 or sum(each is not None for each in digests) == 1:
            return
        (seen,), num = distinct, len(self._data_ranks)
        if seen not in self._seen[:MAX_SAME_BATCHES]:
            self._seen.append(seen)
        elif len(self._seen) < MAX_SAME_BATCHES and self._is_log_rank:
            self._is_log_rank = False
            got = f"all {num} data ranks train on one batch again and again, and do the same work"
            warnings.warn(f'{got}; same_batches="allow" turns this warning off', stacklevel=4)
        if len(self._seen) >= MAX_SAME_BATCHES:
            row = TABLE["samples"]
            got = f"the same batches on all {num} data ranks, {MAX_SAME_BATCHES} different ones in a row"
            raise row.error(Problem(got, row.need, row.attempt), where=row.where)


class InputDigests:
    """The training inputs that a model has been called with since the last `pop`: a forward pre-hook of the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._digests: list[int | None] = []
        self._handle, self._was_called = model.register_forward_pre_hook(self, with_kwargs=True), False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._was_called = True
        if self._model() is module and module.training and torch.is_grad_enabled():
            self._digests.append(samples_digest((args, kwargs)))

    def __reduce__(self) -> tuple[type["_NoDigests"], tuple[()]]:
        return _NoDigests, ()  # in a copied or pickled model the hook does nothing

    def pop(self) -> int | None:
        """One digest of all calls; None if there was no call, or one without a digest."""
        calls, self._digests = self._digests, []
        return digest(calls) if calls and None not in calls else None

    def remove_hook(self) -> None:
        """Stop collecting digests."""
        self._model = lambda: None
        # A hook inside compiled code does nothing; removing it would cause a recompilation.
        if self._was_called:
            self._handle.remove()


class _NoDigests:
    """A forward pre-hook that does nothing."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass


# ---- the same source ----------------------------------------------------------------------------------


def check_same_source(probes: Sequence[Fingerprint | None]) -> None:
    """Raise TaskError if ranks have different samples at one index of their sources.

    A feed gives each data rank its part of one source. If a rank's source were only that rank's part of the data, the
    feed would take a part of the part: samples would be left out, and the others trained in an order that no single
    process has. Not found: sources that differ only in other samples, and those whose samples change with each read.

    probes  by rank; None where a rank has none
    """
    known = [(rank, probe) for rank, probe in enumerate(probes) if probe is not None]
    for rank, probe in known[1:]:
        first_rank, first_probe = known[0]
        if not is_same_sample(first_probe, probe):
            row = TABLE["source"]
            got = f"another source on rank {rank} than on rank {first_rank}: one and the same sample differs"
            raise row.error(Problem(got, row.need, row.attempt), where=row.where)


def check_same_length(lengths: Sequence[int], name: str) -> None:
    """Raise TaskError if the ranks' sources differ in length."""
    if len(set(lengths)) > 1:
        row = TABLE["source"]
        got = f"{name}: {format_groups({rank: f'{length} samples' for rank, length in enumerate(lengths)})}"
        raise row.error(Problem(got, row.need, "the whole source"), where=row.where)

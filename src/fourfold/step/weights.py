"""Weights: the weights of a step, wherever they rest, and the master weights that the update keeps.

trained   the trainable parameters; the storage decides where they rest (`parts/data/weight_storage.py`)
others    frozen parameters and buffers: each rank has its own copy
precise   the weights that training continues from: the master weights if there are any, else those in the storage
Law: a read gives the precise weights; a write replaces both.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.data.sharded_params import NO_UNSHARD_SINK, UnshardSink
from fourfold.parts.data.weight_edits import WeightEdits
from fourfold.parts.data.weight_storage import WeightStorage
from fourfold.parts.optim.master_weights import MasterWeights
from fourfold.plan.data.buckets import Bucket
from fourfold.step.model_guard import ModelGuard
from fourfold.words.errors import Problem, TaskError


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in order of definition; without those that have no elements."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}


class Weights:
    """The weights of a step. Making it broadcasts the first rank's. Collective."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        storage: WeightStorage,
        master_weights: MasterWeights,
        data_ranks: Communicator,
        *,
        is_mean: bool = True,
    ) -> None:
        """`is_mean`: local steps end with the plain mean of the ranks' weights, not with an outer optimizer step."""
        self.model, self.trainable = model, trainable_parameters(model)
        self.storage, self.master_weights, self._data_ranks = storage, master_weights, data_ranks
        self._trained_ids = {id(p) for p in self.trainable.values()}
        self._broadcast()
        self.guard = ModelGuard(model, self.trainable)
        masters = "the update changes the master weights, and would overwrite these" if self.flat_names else ""
        outer = "" if is_mean else "the outer step would not see what is written between two averages of the weights"
        self._edit_loss_reason = storage.edit_loss_reason or masters or outer
        flats = self.flats if self._edit_loss_reason else ()
        self.edits = WeightEdits(self.trainable, buckets, flats, is_sharded=storage.is_sharded)
        self.edits.add_master_weights(buckets, storage.shards, master_weights)

    @property
    def flats(self) -> Sequence[Tensor]:
        """By bucket: the weights that this rank holds, flat."""
        return [shard.flat for shard in self.storage.shards]

    @property
    def flat_names(self) -> Collection[str]:
        """The parameters for which `weight_shard` is flat."""
        return self.trainable.keys() if self.storage.is_sharded else self.master_weights.param_names

    def edit_problems(self, *, compare_all: bool, sampled: bool = True) -> list[Problem]:
        """The weights that were written outside of `edit` and would be lost.

        `compare_all` reads all weights, `sampled` only samples of them.
        """
        if not self._edit_loss_reason:
            return []
        names = self.edits.edited_params(sampled=sampled) + (self.edits.mismatched_params() if compare_all else [])
        if not names:
            return []
        more = len(set(names)) - 1
        got = f"{names[0]}{f' and {more} more' if more else ''}, written outside of step.edit()"
        need = f"step.edit() or step.load_weights(…): {self._edit_loss_reason}"
        return [Problem(got, need, "with step.edit() as model: …")]

    def _broadcast(self) -> None:
        self.storage.broadcast()
        self._broadcast_others()

    def _broadcast_others(self) -> None:
        """Broadcast the first rank's frozen parameters and buffers, and wait until weights can be read."""
        others = [p.data for p in self.model.parameters() if id(p) not in self._trained_ids]
        for tensor in (*others, *self.model.buffers()):
            self._data_ranks.broadcast(tensor)
        self.storage.wait_written()

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, weights may be written on any rank; afterwards all ranks have the first one's. Collective."""
        with (
            torch.no_grad(),
            self.storage.private_copies(),
            self.guard.checking_edits(),
            self._masters_shown() as edited,
        ):
            yield
        self._broadcast_others()
        for value in edited.values():
            self._data_ranks.broadcast(value)
        self.load_weights(edited)

    @contextlib.contextmanager
    def _masters_shown(self) -> Iterator[dict[str, Tensor]]:
        """Inside, parameters are replaced by their whole master weights; afterwards these are in the dict, edited."""
        views = {name: self.trainable[name].data for name in self.master_weights.param_names}
        edited: dict[str, Tensor] = {}
        for name in views:
            self.trainable[name].data = self.full_weight(name, self.weight_shard(name))
        try:
            yield edited
        finally:
            for name, view in views.items():
                edited[name] = self.trainable[name].data
                self.trainable[name].data = view

    @torch.no_grad()
    def full_weight(self, name: str, shard: Tensor) -> Tensor:
        """A copy of the whole tensor of which `shard` is this rank's part, split as `weight_shard` is. Collective."""
        if name not in self.master_weights.param_names:
            return self.storage.full_weight(name, shard)
        return self.master_weights.full_weight(name, shard, self.trainable[name], self._data_ranks.all_reduce)

    @contextlib.contextmanager
    def swapped_weights(self, shards: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trainable weights are others, given in the form of `weight_shard`. Collective."""
        before = {name: self.full_weight(name, self.weight_shard(name)) for name in shards}
        self.load_weights({name: self.full_weight(name, value) for name, value in shards.items()})
        try:
            yield
        finally:
            self.load_weights(before)

    def weight_shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter's precise weights: flat; or the parameter itself, if it rests whole."""
        if name in self.master_weights.param_names:
            return self.master_weights.local_shard(name)
        return self.storage.local_shard(name)

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; no rank may be reading them. Collective."""
        self.storage.load(values)
        for name in values.keys() & self.master_weights.param_names:
            self.master_weights.load_parameter(name, values[name])
        self.storage.wait_written()
        torch.autograd.graph.increment_version(list(self.trainable.values()))
        self.edits.accept_edits()

    def model_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict`, without copies. Raises TaskError if it lacks a trained weight."""
        with untracked_access():  # state_dict() hooks may read placeholders; a copy is refused below
            tensors = self.model.state_dict(keep_vars=True)
        missing = [name for name in self.trainable if name not in tensors]
        # Precise weights replace the model's own by identity, so a copy would not be found.
        missing += [name for name in self.flat_names if name in tensors and tensors[name] is not self.trainable[name]]
        if missing:
            got = f"a state_dict() without {missing[0]} itself{f' and {len(missing) - 1} more' if missing[1:] else ''}"
            need = "every trainable parameter itself under its own name, not a copy"
            raise TaskError(Problem(got, need, "the state_dict() of torch.nn.Module"), where="the model")
        return tensors

    def unsharded(self, kind: str, sink: UnshardSink = NO_UNSHARD_SINK) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may run. Collective if weights rest split; `sink` is called before shards are read."""
        return self.storage.phase(kind, sink)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        for name, weight in self.storage.named_weights():
            has_master = name in self.master_weights.param_names
            yield name, self.full_weight(name, self.weight_shard(name)) if has_master else weight

"""Weights: where a model's weights rest, and which rank may write them.

flat      a bucket's buffer of weights; it may exist once per host, or rest split. A parameter is a view of its slot
others    frozen parameters and buffers: each rank has its own copy
precise   the weights that training continues from: the master weights if there are any, else those in the flats
Law: between steps every rank has rank 0's weights, or its shard of them, and each element is written by one rank of
its host.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.parts import mixed_precision
from fourfold.parts.comm.communicator import Communicator
from fourfold.parts.comm.reduce.protocol import BucketSlice, Transport
from fourfold.parts.data.flat_params import flatten_params
from fourfold.parts.data.param_access import untracked_access
from fourfold.parts.data.sharded_params import ShardedParams
from fourfold.parts.data.weight_edits import WeightEdits
from fourfold.parts.optim.master_weights import MasterWeightPolicy, MasterWeights
from fourfold.parts.torch_private import own_children, own_parameters
from fourfold.plan.data.buckets import Bucket
from fourfold.words.errors import Problem, TaskError


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in order of definition; without those that have no elements."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}


class Weights:
    """The weights of a step. Making it moves them into flats and broadcasts rank 0's. Collective."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        transport: Transport,
        communicator: Communicator,
        policy: MasterWeightPolicy,
        *,
        is_mean: bool = True,
    ) -> None:
        """`is_mean`: local steps end with the plain mean of the ranks' weights, not with an outer optimizer step."""
        self.model, self.trainable = model, trainable_parameters(model)
        self._transport, self._communicator = transport, communicator
        self.master_weights = MasterWeights(self.trainable, buckets, transport, policy)
        for name in self.master_weights.param_names:
            # Before the weights are copied into flats, which rounds them.
            communicator.broadcast(self.trainable[name].data)
            self.master_weights.load_parameter(name, self.trainable[name].data)
        if policy.precision != "keep":
            mixed_precision.cast_model(model, policy.precision)
        self.sharded_params: ShardedParams | None = None
        self.flats: Sequence[Tensor]
        if transport.unshards_params:
            by_bucket = [[self.trainable[slot.name] for slot in bucket.slots] for bucket in buckets]
            self.sharded_params = ShardedParams(by_bucket, buckets, transport)
            self.shards: Sequence[BucketSlice] = self.sharded_params.shards
            self.flats = [shard.flat for shard in self.shards]
        else:
            self.flats = flatten_params(self.trainable, buckets, transport)
            self.shards = [BucketSlice(0, flat.numel(), flat) for flat in self.flats]
        self._trained_ids = {id(p) for p in self.trainable.values()}
        self._modules = list(model.modules())
        self._initial_child_ids = self._child_ids()
        self.broadcast()
        self._initial_data_ptrs = self._data_ptrs()
        self._edit_loss_reason = self._find_edit_loss_reason() or (
            "" if is_mean else "the outer step would not see what is written between two averages of the weights"
        )
        self.edits = WeightEdits(
            self.trainable, buckets, self.flats if self._edit_loss_reason and self.sharded_params is None else ()
        )
        if self.sharded_params is None:
            self.edits.add_master_weights(buckets, self.shards, self.master_weights)

    @property
    def is_host_shared(self) -> bool:
        """Whether the ranks of a host have one copy of the weights."""
        return self._transport.shared_weights is not None

    def _data_ptrs(self) -> dict[str, int]:
        with untracked_access():
            return {name: p.data_ptr() for name, p in self.trainable.items()}

    def _find_edit_loss_reason(self) -> str:
        """Why training does not continue from weights that are written in place; empty if it does."""
        if self.sharded_params is not None:
            return "between steps the parameters are placeholders, and the weights rest split"
        if self.master_weights.param_names:
            return "the update changes the master weights, and would overwrite these"
        if self._transport.shared_weights is not None and self._transport.size > 1:
            return "the ranks of a host share these weights, and each rank would write them"
        return ""

    def edit_problems(self, *, compare_all: bool, sampled: bool = True) -> list[Problem]:
        """The weights that were written outside of `edit` and would be lost.

        `compare_all` reads all weights, `sampled` only samples of them.
        """
        if not self._edit_loss_reason:
            return []
        names = list(
            dict.fromkeys(
                self.edits.edited_params(sampled=sampled) + (self.edits.mismatched_params() if compare_all else [])
            )
        )
        if not names:
            return []
        got = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}, written outside of step.edit()"
        return [
            Problem(
                got, f"step.edit() or step.load_weights(…): {self._edit_loss_reason}", "with step.edit() as model: …"
            )
        ]

    def check_storage(self) -> None:
        """Raise TaskError if parameters are not those that the buckets were made of."""
        problems = self.problems()
        if problems:
            raise TaskError(problems, where="the model")

    def problems(self) -> list[Problem]:
        """Why parameters are not those that the buckets were made of."""
        with untracked_access():
            return self._problems()

    def _problems(self) -> list[Problem]:
        problems = []
        moved = [name for name, ptr in self._data_ptrs().items() if ptr != self._initial_data_ptrs[name]]
        if moved:
            got = (
                f"{moved[0]}{f' and {len(moved) - 1} more' if len(moved) > 1 else ''} with another storage than before"
            )
            need = "weights that are changed in place, and one TrainStep for each model"
            problems.append(Problem(got, need, "p.copy_(…) inside step.edit(), or a new TrainStep"))
        if not self._has_initial_trainable():
            got = (
                "other trainable parameters than when the step was built: frozen, tied, parametrized or replaced since"
            )
            problems.append(Problem(got, "the parameters that it was built with", "a new TrainStep"))
        return problems

    def _has_initial_trainable(self) -> bool:
        """Whether the model's trainable parameters are those of the build."""
        # Called in every step: over the modules of the build, since walking the model by name takes 0.5 ms.
        parameters = [p for module in self._modules for p in own_parameters(module).values() if p is not None]
        now = {id(p) for p in parameters if p.requires_grad and p.numel() > 0}
        return self._child_ids() == self._initial_child_ids and now == self._trained_ids

    def _child_ids(self) -> list[int]:
        return [id(child) for module in self._modules for child in own_children(module).values()]

    def broadcast(self) -> None:
        """Broadcast rank 0's weights and buffers. Collective."""
        if self.sharded_params is not None:
            self.sharded_params.shard_params(self._communicator.broadcast)
        elif self._transport.shared_weights is not None:
            self._transport.broadcast_weights()
        else:
            for flat in self.flats:
                self._communicator.broadcast(flat)
        others = [p.data for p in self.model.parameters() if id(p) not in self._trained_ids]
        for tensor in (*others, *self.model.buffers()):
            self._communicator.broadcast(tensor)
        if self._transport.shared_weights is not None:
            self._communicator.all_gather_json(None)  # a barrier: the first rank of each host has written, all may read

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, weights may be written on any rank; afterwards all ranks have rank 0's. Collective."""
        with torch.no_grad(), self._private_copies(), self._master_weights_shown() as edited:
            yield
        if self.sharded_params is None:
            self.check_storage()
            self.broadcast()
        for value in edited.values():
            self._communicator.broadcast(value)
        self.load_weights(edited)

    @contextlib.contextmanager
    def _master_weights_shown(self) -> Iterator[dict[str, Tensor]]:
        """Inside, parameters are replaced by their whole master weights; afterwards these are in the dict, edited."""
        views = {name: self.trainable[name].data for name in self.master_weights.param_names}
        edited: dict[str, Tensor] = {}
        for name in views:
            self.trainable[name].data = self.full_weight(name)
        try:
            yield edited
        finally:
            for name, view in views.items():
                edited[name] = self.trainable[name].data
                self.trainable[name].data = view

    @torch.no_grad()
    def full_weight(self, name: str, shard: Tensor | None = None) -> Tensor:
        """A copy of a parameter's precise weights, or of another tensor given by shards like theirs. Collective."""
        parameter = self.trainable[name]
        local = self.weight_shard(name) if shard is None else shard
        holder = self.master_weights if name in self.master_weights.param_names else self.sharded_params
        if holder is None:
            return local.clone()
        whole = holder.pad_to_full(name, local, parameter)
        if self._transport.replica_index:
            whole.zero_()  # replica 0 adds the same shard
        if self.sharded_params is not None or self.master_weights.is_sharded:
            self._communicator.all_reduce(whole)
        return whole.view(parameter.shape)

    @contextlib.contextmanager
    def swapped_weights(self, shards: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trainable weights are others, given in the form of `weight_shard`. Collective."""
        before = {name: self.full_weight(name) for name in shards}
        self.load_weights({name: self.full_weight(name, value) for name, value in shards.items()})
        try:
            yield
        finally:
            self.load_weights(before)

    def weight_shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter's precise weights: flat; or the parameter itself, if it rests whole."""
        if name in self.master_weights.param_names:
            return self.master_weights.local_shard(name)
        return self.model_shard(name)

    def model_shard(self, name: str) -> Tensor:
        """This rank's shard of the weights that the model computes with: flat, or the parameter itself."""
        return self.trainable[name].detach() if self.sharded_params is None else self.sharded_params.local_shard(name)

    @property
    def flat_names(self) -> Collection[str]:
        """The parameters for which `weight_shard` is flat."""
        return self.master_weights.param_names if self.sharded_params is None else self.trainable.keys()

    @contextlib.contextmanager
    def _private_copies(self) -> Iterator[None]:
        """Inside, every rank may write weights without changing another rank's; afterwards only rank 0's are kept.

        Weights that exist once per host are copied on all ranks but rank 0. Weights that rest split are unsharded on
        all ranks; afterwards rank 0's are broadcast and sharded.
        """
        if self.sharded_params is not None:
            with self.sharded_params.all_unsharded():
                self._initial_data_ptrs, resting = self._data_ptrs(), self._initial_data_ptrs
                yield
                self.check_storage()
                self._initial_data_ptrs = resting
                self.broadcast()
            return
        if self._transport.shared_weights is None:
            yield
            return
        views = {name: p.data for name, p in self.trainable.items()}
        if self._communicator.rank:
            for p in self.trainable.values():
                p.data = p.data.clone()
        self._communicator.all_gather_json(None)  # a barrier: all copies are made, rank 0 may write
        try:
            yield
        finally:
            if self._communicator.rank:
                for name, p in self.trainable.items():
                    p.data = views[name]

    @torch.no_grad()
    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; no rank may be reading them. Collective."""
        if self.sharded_params is not None:
            self.sharded_params.load_weights(values)
        elif self._transport.is_writer:
            for name, value in values.items():
                self.trainable[name].copy_(value)
        for name in values.keys() & self.master_weights.param_names:
            self.master_weights.load_parameter(name, values[name])
        if self._transport.shared_weights is not None:
            self._communicator.all_gather_json(None)
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

    @contextlib.contextmanager
    def unsharded(self, kind: str) -> Iterator[None]:
        """Inside, the model may be called. Collective if weights rest split."""
        with contextlib.nullcontext() if self.sharded_params is None else self.sharded_params.phase(kind):
            yield

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        if self.sharded_params is None:
            for name, p in self.trainable.items():
                yield name, self.full_weight(name) if name in self.master_weights.param_names else p.detach()
            return
        for bucket, flat in self.sharded_params.unsharded_buckets():
            for name, start, stop in bucket.slots:
                rounded = flat[start:stop].view(self.trainable[name].shape)
                yield name, self.full_weight(name) if name in self.master_weights.param_names else rounded

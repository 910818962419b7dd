"""Weights: where a model's weights lie, and who may write there.

home     a trainable parameter's place in the flat of its bucket, which may exist once per host, or rest split
others   frozen parameters and buffers: each rank has its own
precise  the weights that training goes on from: the update's own where it has some, else those in the homes
Law: between steps every rank has rank 0's weights, or its share of them, and each home is written by one rank of its
host.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.parts import comm, data, lowered
from fourfold.parts.edits import WeightEdits
from fourfold.parts.gathered import ShardedParams
from fourfold.parts.masters import MasterWeightPolicy, MasterWeights
from fourfold.parts.uses import untracked_access
from fourfold.plan.data import Bucket
from fourfold.words.errors import Problem, TaskError


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to be trained, by name, in order of definition; those of no elements have nothing to learn."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}


class Weights:
    """The weights of a step. Building one moves them into their homes, and brings rank 0's to all. Collective."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        transport: comm.Transport,
        ranks: comm.Communicator,
        policy: MasterWeightPolicy,
        *,
        is_mean: bool = True,
    ) -> None:
        """`is_mean`: with local steps, weights become the mean of all ranks'; no outer step starts from an anchor."""
        self.model, self.trainable = model, trainable_of(model)
        self._transport, self._ranks = transport, ranks
        self.masters = MasterWeights(self.trainable, buckets, transport, policy)
        for name in self.masters.param_names:
            # Before the homes: there they are rounded.
            ranks.broadcast(self.trainable[name].data)
            self.masters.load_parameter(name, self.trainable[name].data)
        if policy.precision != "keep":
            lowered.cast_model(model, policy.precision)
        self.gathered: ShardedParams | None = None
        self.flats: Sequence[Tensor]
        if transport.unshards_params:
            by_bucket = [[self.trainable[slot.name] for slot in bucket.slots] for bucket in buckets]
            self.gathered = ShardedParams(by_bucket, buckets, transport)
            self.homes: Sequence[comm.BucketSlice] = self.gathered.shards
            self.flats = [home.flat for home in self.homes]
        else:
            self.flats = data.flatten_params(self.trainable, buckets, transport)
            self.homes = [comm.BucketSlice(0, flat.numel(), flat) for flat in self.flats]
        self._trained = {id(p) for p in self.trainable.values()}
        self._modules = list(model.modules())
        self._children = self._child_ids()
        self.broadcast()
        self._places = self._where()
        self._loses = self._why_lost() or ("" if is_mean else "what is written between meetings is no step")
        self.edits = WeightEdits(self.trainable, buckets, self.flats if self._loses and self.gathered is None else ())
        if self.gathered is None:
            self.edits.add_master_weights(buckets, self.homes, self.masters)

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of a host have one copy of the weights."""
        return self._transport.shared_weights is not None

    def _where(self) -> dict[str, int]:
        with untracked_access():
            return {name: p.data_ptr() for name, p in self.trainable.items()}

    def _why_lost(self) -> str:
        """Why training does not go on from weights that are written in place; empty where it does."""
        if self.gathered is not None:
            return "between steps these are placeholders, and the weights rest split"
        if self.masters.param_names:
            return "the update works on its own copy of the weights, and would overwrite these"
        if self._transport.shared_weights is not None and self._transport.size > 1:
            return "the ranks of a host share these weights, and each would write them"
        return ""

    def edit_problems(self, *, thoroughly: bool, sampled: bool = True) -> list[Problem]:
        """What has been written past `edit` and its like, and would be lost. `thoroughly` reads all weights."""
        if not self._loses:
            return []
        names = list(
            dict.fromkeys(
                self.edits.edited_params(sampled=sampled) + (self.edits.mismatched_params() if thoroughly else [])
            )
        )
        if not names:
            return []
        got = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}, written outside of step.edit()"
        return [Problem(got, f"step.edit() or step.put(…): {self._loses}", "with step.edit() as model: …")]

    def check(self) -> None:
        """Raise TaskError where parameters are no longer what the buckets were made of."""
        problems = self.problems()
        if problems:
            raise TaskError(problems, where="the model")

    def problems(self) -> list[Problem]:
        """Why parameters are no longer what the buckets were made of."""
        with untracked_access():
            return self._problems()

    def _problems(self) -> list[Problem]:
        problems = []
        moved = [name for name, place in self._where().items() if place != self._places[name]]
        if moved:
            got = (
                f"{moved[0]}{f' and {len(moved) - 1} more' if len(moved) > 1 else ''} with another storage than before"
            )
            need = "weights changed in place, and one TrainStep a model"
            problems.append(Problem(got, need, "p.copy_(…) inside step.edit(), or a new TrainStep"))
        if not self._trains_the_same():
            got = "other parameters to train than when the step was built: frozen, tied, parametrized or replaced since"
            problems.append(Problem(got, "the parameters that it was built with", "a new TrainStep"))
        return problems

    def _trains_the_same(self) -> bool:
        """Whether the model's trainable parameters are still those it had."""
        # Asked in every step: over the modules of then, since to walk through the model by name takes 0.5 ms.
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        now = {id(p) for p in parameters if p.requires_grad and p.numel() > 0}
        return self._child_ids() == self._children and now == self._trained

    def _child_ids(self) -> list[int]:
        return [id(child) for module in self._modules for child in module._modules.values()]

    def broadcast(self) -> None:
        """Bring rank 0's weights and buffers to every rank. Collective."""
        if self.gathered is not None:
            self.gathered.shard_params(self._ranks.broadcast)
        elif self._transport.shared_weights is not None:
            self._transport.broadcast_weights()
        else:
            for flat in self.flats:
                self._ranks.broadcast(flat)
        others = [p.data for p in self.model.parameters() if id(p) not in self._trained]
        for tensor in (*others, *self.model.buffers()):
            self._ranks.broadcast(tensor)
        if self._transport.shared_weights is not None:
            self._ranks.all_gather_json(None)  # the hosts' first ranks have written: all may read

    @contextlib.contextmanager
    def edited(self) -> Iterator[None]:
        """Within, weights may be written on any rank; afterwards all have rank 0's. Collective."""
        with torch.no_grad(), self._copies(), self._unrounded() as edited:
            yield
        if self.gathered is None:
            self.check()
            self.broadcast()
        for value in edited.values():
            self._ranks.broadcast(value)
        self.put(edited)

    @contextlib.contextmanager
    def _unrounded(self) -> Iterator[dict[str, Tensor]]:
        """Within: parameters with master weights are these, whole, on every rank; afterwards they are in the dict."""
        views = {name: self.trainable[name].data for name in self.masters.param_names}
        edited: dict[str, Tensor] = {}
        for name in views:
            self.trainable[name].data = self.precise(name)
        try:
            yield edited
        finally:
            for name, view in views.items():
                edited[name] = self.trainable[name].data
                self.trainable[name].data = view

    @torch.no_grad()
    def precise(self, name: str, share: Tensor | None = None) -> Tensor:
        """A copy of a trainable parameter's precise weights, or of what else lies as they do. Collective."""
        parameter = self.trainable[name]
        here = self.share(name) if share is None else share
        holder = self.masters if name in self.masters.param_names else self.gathered
        if holder is None:
            return here.clone()
        whole = holder.pad_to_full(name, here, parameter)
        if self._transport.replica_index:
            whole.zero_()  # replica 0 has the same
        if self.gathered is not None or self.masters.is_sharded:
            self._ranks.all_reduce(whole)
        return whole.view(parameter.shape)

    @contextlib.contextmanager
    def replaced(self, shares: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, trainable weights are others, given as `share` gives them. Collective."""
        before = {name: self.precise(name) for name in shares}
        self.put({name: self.precise(name, value) for name, value in shares.items()})
        try:
            yield
        finally:
            self.put(before)

    def share(self, name: str) -> Tensor:
        """What this rank has of a trainable parameter's precise weights, as it lies: flat, or the parameter."""
        if name in self.masters.param_names:
            return self.masters.local_shard(name)
        return self.home(name)

    def home(self, name: str) -> Tensor:
        """What the model computes with of a trainable parameter, as it rests here: flat, or the parameter."""
        return self.trainable[name].detach() if self.gathered is None else self.gathered.local_shard(name)

    @property
    def apart(self) -> Collection[str]:
        """The parameters whose precise weights are flat, and this rank's share of them."""
        return self.masters.param_names if self.gathered is None else self.trainable.keys()

    @contextlib.contextmanager
    def _copies(self) -> Iterator[None]:
        """Within: where weights exist once per host, all ranks but rank 0 have copies of their own.

        Where they rest split all ranks have, and rank 0's come home.
        """
        if self.gathered is not None:
            with self.gathered.all_unsharded():
                self._places, resting = self._where(), self._places
                yield
                self.check()
                self._places = resting
                self.broadcast()
            return
        if self._transport.shared_weights is None:
            yield
            return
        views = {name: p.data for name, p in self.trainable.items()}
        if self._ranks.rank:
            for p in self.trainable.values():
                p.data = p.data.clone()
        self._ranks.all_gather_json(None)  # all copies are made: rank 0 may write
        try:
            yield
        finally:
            if self._ranks.rank:
                for name, p in self.trainable.items():
                    p.data = views[name]

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; nobody may be reading them. Collective."""
        if self.gathered is not None:
            self.gathered.load_weights(values)
        elif self._transport.is_writer:
            for name, value in values.items():
                self.trainable[name].copy_(value)
        for name in values.keys() & self.masters.param_names:
            self.masters.load_parameter(name, values[name])
        if self._transport.shared_weights is not None:
            self._ranks.all_gather_json(None)
        torch.autograd.graph.increment_version(list(self.trainable.values()))
        self.edits.accept_edits()

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put back the model's `state_dict`, which fits; nobody may be reading it. Collective."""
        own = self.own()
        trained = {id(p): name for name, p in self.trainable.items()}
        # What is trained may exist once per host, and then one rank writes it, or rest split.
        self.model.load_state_dict({n: v for n, v in values.items() if id(own[n]) not in self._trained}, strict=False)
        self.put({trained[id(p)]: values[name] for name, p in own.items() if id(p) in trained})

    def own(self) -> dict[str, Any]:
        """The model's `state_dict`, without copies. Raises TaskError where it does not have the trained weights."""
        with untracked_access():  # a copy of a placeholder is refused here, as any copy
            own = self.model.state_dict(keep_vars=True)
        missing = [name for name in self.trainable if name not in own]
        # The precise weights of these are put in place of the model's: a copy is not recognized.
        missing += [name for name in self.apart if name in own and own[name] is not self.trainable[name]]
        if missing:
            got = f"a state_dict() without {missing[0]} itself{f' and {len(missing) - 1} more' if missing[1:] else ''}"
            need = "every trainable parameter under its own name, no copy of it"
            raise TaskError(Problem(got, need, "state_dict() as torch.nn.Module has it"), where="the model")
        return own

    @contextlib.contextmanager
    def read(self, kind: str) -> Iterator[None]:
        """Within: the model may be called. Collective, if weights rest split."""
        with contextlib.nullcontext() if self.gathered is None else self.gathered.phase(kind):
            yield

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, one after the other; read only. Collective: every rank goes to the end."""
        if self.gathered is None:
            for name, p in self.trainable.items():
                yield name, self.precise(name) if name in self.masters.param_names else p.detach()
            return
        for bucket, flat in self.gathered.unsharded_buckets():
            for name, start, stop in bucket.slots:
                rounded = flat[start:stop].view(self.trainable[name].shape)
                yield name, self.precise(name) if name in self.masters.param_names else rounded

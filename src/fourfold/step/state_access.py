"""State access: reading, changing and restoring what training continues from, between steps.

Law: every rank makes these calls in the same order, and an update that waits is run before weights are used.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.proof.digests.weights import BUFFERS, FROZEN, MASTER_WEIGHTS, WEIGHTS, ReplicatedTensor
from fourfold.step.assembly import Assembly
from fourfold.step.persistent_state import SavedState, cloned, local_state, readers_of, state_problems, weight_problems
from fourfold.torch_kit.option_text import IMPLEMENTATION_OPTIONS
from fourfold.words.errors import Problem, TrainingError

STATES_BY_NAME = ("model", "optimizer", "outer", "codec")


class StateAccess:
    """The state of one rank's step."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._calls, self._checks, self._timing = assembly.calls, assembly.checks, assembly.timing
        self._state, self._weights, self._local_sgd = assembly.state, assembly.state.weights, assembly.parts.local_sgd

    def enter(self, call: str) -> None:
        """Begin a call that all ranks must be in, with updated weights. Collective."""
        self._calls.enter(call)
        self._timing.flush()

    def check_no_edits(self, call: str, *, compare_all: bool = False) -> None:
        """Raise TaskError if weights have been written outside of `edit`, and the next update would ignore it."""
        self._checks.check_no_edits(call, compare_all=compare_all, sampled=not self._timing.has_pending)

    def check_synchronized(self) -> None:
        """Raise TrainingError unless all ranks have the same weights."""
        if not self._checks.is_synchronized:
            interval = self._assembly.programs.sync_interval
            got = f"the state after step {self._calls.num_steps}, with local_steps = {interval}"
            need = "the same weights on all ranks, which they have just after averaging them"
            after = -(-self._calls.num_steps // interval) * interval
            raise TrainingError(Problem(got, need, f"after step {after}"))

    @contextlib.contextmanager
    def edit(self, model: nn.Module) -> Iterator[nn.Module]:
        """See `TrainStep.edit`."""
        self.check_no_edits("edit()")
        self.enter("edit()")
        with self._weights.edit():
            yield model
        self._local_sgd.finish_sync()
        torch.autograd.graph.increment_version(list(model.parameters()))
        self._weights.edits.accept_edits()

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """See `TrainStep.load_weights`."""
        self.check_no_edits("load_weights()")
        self._calls.enter("load_weights()")  # all ranks are here: none reads weights
        values = self._assembly.pipeline.restricted(values) if isinstance(values, Mapping) else values
        whole_tensors, trainable = self._weights.whole_tensors, self._weights.trainable
        problems = weight_problems(values, trainable, whole_tensors.shape)
        self._calls.raise_on_all_ranks(problems, where="the weights")
        self._timing.flush()
        local = {name: whole_tensors.local(name, value) for name, value in values.items()}
        self._weights.load_weights(local)
        self._local_sgd.update_reference(local)

    @contextlib.contextmanager
    def swapped_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """See `TrainStep.swapped_weights`."""
        self.check_no_edits("swapped_weights()")
        self.enter("swapped_weights()")
        with self._weights.swapped_weights(weights):
            yield
            self._calls.enter("the end of swapped_weights()")  # all ranks have finished with them

    def state_dict(self) -> dict[str, Any]:
        """See `TrainStep.state_dict`."""
        self.check_no_edits("state_dict()", compare_all=True)
        self.enter("state_dict()")
        self.check_synchronized()
        return {**self._groups_and_record(), **self._assembly.pipeline.all_state(self._state.state_dict())}

    def state_refs(self) -> dict[str, Any]:
        """See `TrainStep.state_refs`."""
        self.check_synchronized()
        self._timing.flush()
        return {**self._groups_and_record(), **self._state.state_refs()}

    def _groups_and_record(self) -> dict[str, Any]:
        programs, optimizer = self._assembly.programs, self._assembly.optimizer
        record: dict[str, Any] = {
            "order": programs.launch_order,
            "nominal_count": programs.nominal_count,
            "optimizer": type(optimizer).__name__,
        }
        if scale := self._assembly.parts.loss_scale.state:
            record["scale"] = scale
        if proof := self._assembly.proof.state:
            record["proof"] = proof
        groups = [{k: cloned(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return {"groups": groups, "record": record}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TrainStep.load_state_dict`."""
        self._calls.enter("load_state_dict()")
        state = self._own_state(state)
        optimizer, weights = self._assembly.optimizer, self._weights
        problems = state_problems(
            state, weights.model_state_dict(), weights.trainable, optimizer, weights.whole_tensors.shape
        )
        self._calls.raise_on_all_ranks(problems, where="the state")
        self._load(readers_of(state))

    def _own_state(self, state: Any) -> Any:
        """What this rank's stage has of a state; anything else as it is, to be refused."""
        if not isinstance(state, Mapping):
            return state
        parts = {key: value for key, value in state.items() if key in STATES_BY_NAME and isinstance(value, Mapping)}
        return {**state, **{key: self._assembly.pipeline.restricted(value) for key, value in parts.items()}}

    def load_saved_state(self, saved: SavedState) -> None:
        """See `TrainStep.load_saved_state`."""
        self._calls.enter("load_saved_state()")
        self._load(saved)

    def _load(self, saved: SavedState) -> None:
        saved = local_state(saved, self._weights.whole_tensors)
        self._timing.flush()
        self._state.load(saved)
        for group, options in zip(self._assembly.optimizer.param_groups, saved.groups, strict=True):
            # Options such as `foreach` choose an implementation; that was done when the step was built.
            group.update({k: cloned(v) for k, v in options.items() if k not in IMPLEMENTATION_OPTIONS})
        record = saved.record
        self._assembly.proof.load_state(record.get("proof"))
        self._assembly.parts.loss_scale.load_state(record.get("scale") or {})
        # Launch orders are valid only for the same numbers of buckets; otherwise the next step records new ones.
        programs = self._assembly.programs
        if launch_orders := programs.split_order(record["order"]):
            self.set_record(launch_orders, record["nominal_count"])
        else:
            programs.nominal_count = record["nominal_count"]
        self._state.load_codec_state(saved.codec)

    def set_record(self, launch_orders: Mapping[int, Sequence[int]], count: float | None) -> None:
        """Fix the launch orders, by stage, and the nominal count for all later steps, the same on every rank."""
        programs = self._assembly.programs
        before = programs.nominal_count
        if before is not None and count is not None and before != count:
            # Residuals were divided by the previous nominal count.
            for codec in self._assembly.codecs:
                codec.scale_residual(before / count)
        programs.set_record(launch_orders, count)
        self._assembly.parts.stage.gradients.set_launch_order(programs.reduction_order)

    def replicated_tensors(self, model: nn.Module) -> Iterator[ReplicatedTensor]:
        """The weights in this rank's own memory, and the buffers that it saves, which its data ranks have too."""
        mesh, axis = self._calls.world.along("cp", "tp"), self._assembly.pipeline
        saved = self._weights.model_state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and axis.is_own(name):
                yield ReplicatedTensor(BUFFERS, name, 0, buffer, mesh.rank)
        holders = {WEIGHTS: self._weights.storage, MASTER_WEIGHTS: self._weights.master_weights}
        for name, parameter in model.named_parameters():
            shard = self._assembly.tensor.shard_number(name)
            if name not in self._weights.trainable:
                yield ReplicatedTensor(FROZEN, name, 0, parameter, shard)
                continue
            for kind, holder in holders.items():
                yield from (
                    ReplicatedTensor(kind, name, part.start, part.tensor, shard) for part in holder.held_parts(name)
                )

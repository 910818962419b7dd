"""Train step: the user's door to one training step on all ranks.

Law: after k steps, losses and weights equal those of one process that trains on all the samples.
Law: only the step calls the model; what a call returns is what the model returns.
Law: every rank makes the collective calls in the same order, and an update that waits is run before weights are used.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.pipeline.attach.axis import PipelineAxis
from fourfold.axes.tensor.work.whole_tensors import WholeTensors
from fourfold.comm.communicator import Communicator
from fourfold.comm.rank_layout import RankLayout
from fourfold.model.model_call import eval_mode
from fourfold.model.objective import Objective
from fourfold.optim.user_optimizer import OptimizerSource
from fourfold.plan.param_spec import TensorShard
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.step.argument_checks import StepKeywords, StepOptions
from fourfold.step.assembly import assemble
from fourfold.step.model_checks import join_mesh
from fourfold.step.persistent_state import (
    CodecState,
    SavedState,
    cloned,
    local_state,
    readers_of,
    state_problems,
    weight_problems,
)
from fourfold.step.step_runner import (
    AsynchronousRunner,
    ForwardRun,
    InferenceModel,
    Metrics,
    StepRunner,
    inference_model,
)
from fourfold.torch_kit.deferred_init import OWN_WEIGHTS, InitialModel, InitialWeights
from fourfold.torch_kit.option_text import IMPLEMENTATION_OPTIONS
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.program import Action, Program
from fourfold.words.trace_events import Recorder

STATES_BY_NAME = ("model", "optimizer", "outer", "codec")


class TrainStep:
    """One training step: `step(batch)` is one optimizer update. `ff.parallelize` makes it.

    The batch is this rank's part of the global batch; it may be empty. Every rank must call the methods that say
    "Collective", in the same order; DivergenceError names the ranks that are in different calls.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: OptimizerSource,
        *,
        plan: Plan,
        communicator: Communicator,
        initial_weights: InitialWeights = OWN_WEIGHTS,
        **options: Unpack[StepKeywords],
    ) -> None:
        initial, chosen = InitialModel(model, initial_weights), StepOptions(**options)
        self.model, self.plan, self.seed = model, plan, chosen.seed
        self.communicator = join_mesh(communicator, model, loss, plan, chosen)
        self._assembly = assembly = assemble(initial, loss, optimizer, plan, self.communicator, chosen)
        self._parts, self._calls, self._programs = assembly.parts, assembly.calls, assembly.programs
        self._weights, self._checks, self.optimizer = assembly.state.weights, assembly.checks, assembly.optimizer
        self._runner = (AsynchronousRunner if plan.is_asynchronous else StepRunner)(model, assembly)

    @property
    def num_steps(self) -> int:
        """Steps done, including those before a resume: errors name them."""
        return self._calls.num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._calls.num_steps = number

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of the trained parameters."""
        return self._assembly.state.buckets

    @property
    def program(self) -> tuple[Action, ...]:
        """The actions of a step. With local steps: of one at whose end weights are averaged."""
        return self._programs.of_ranks[self.rank]

    @property
    def programs(self) -> Program:
        """As `program`, of all ranks."""
        return self._programs.of_ranks

    @property
    def topology(self) -> Topology:
        """The machines that the ranks run on."""
        return self._programs.blueprint.topology

    @property
    def ranks_by_memory(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that meet in shared memory, a tuple for each."""
        return self._programs.blueprint.ranks_by_memory

    @property
    def objective(self) -> Objective:
        """The loss that is trained."""
        return self._parts.objective

    @property
    def codec_state(self) -> CodecState:
        """What the codecs remember."""
        return self._assembly.state.codec_state

    @property
    def transport_name(self) -> str:
        """What joins the data ranks, and why, in words."""
        return self._assembly.transport_name

    @property
    def is_synchronized(self) -> bool:
        """Whether all ranks have the same weights: always, or with local steps just after they are averaged."""
        return self._checks.is_synchronized

    @property
    def rank(self) -> int:
        return self._calls.world.rank

    @property
    def dp_index(self) -> int:
        """This rank's index on the data axis."""
        return self.plan.mesh.coordinates(self.rank)["dp"]

    @property
    def tensor_shards(self) -> Mapping[str, TensorShard]:
        """By parameter: the part of it that this rank's place on the tensor axis holds; empty if tp = 1."""
        return self._assembly.tensor.shards

    @property
    def pipeline(self) -> PipelineAxis:
        """Which stages of the model this rank has, and who has the others."""
        return self._assembly.pipeline

    @property
    def adds_totals(self) -> bool:
        """Whether this rank adds its sums to those over all ranks: one of those that have the same samples does."""
        return "loss" in self._parts.added_totals

    @property
    def device(self) -> torch.device:
        return self._parts.device

    @property
    def busy_seconds(self) -> dict[str, float]:
        """The time of this rank's last step by verb name, without waits."""
        return self._runner.executor.busy_seconds

    def request_stop(self, stop: bool) -> None:
        """Whether this rank wants to stop the run. If any rank does, `stop_requested` is True on all after a step."""
        self._runner.is_stop_requested = stop

    @property
    def stop_requested(self) -> bool:
        """Whether any rank had requested a stop when the last step began; the same on every rank."""
        return self._runner.totals.num_stop_requests > 0

    def peer_is_dead(self, rank: int) -> bool:
        """Whether a rank's process has ended, as far as this host can tell. Not collective: waits poll it."""
        return self._calls.world.is_peer_dead(rank)

    def check_peers(self) -> None:
        """Raise PeerError if another rank of this host has ended. Not collective: waits call it."""
        self._calls.world.check_peers()

    def set_recorder(self, recorder: Recorder) -> None:
        """Record this rank's actions, buckets and waits from now on; `NULL_RECORDER` ends it. Not collective."""
        self._parts.meter.recorder = recorder

    # ---- steps and forwards --------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Metrics:
        """One optimizer update on this rank's batch `(inputs, targets)`. Collective.

        Raises DivergenceError if another rank is in another call, or at another place in the feed's order.
        """
        return self._runner.train(batch)

    def evaluate(self, batch: Any) -> Metrics:
        """The loss of the global batch, without training on it; NaN if the batch is empty on all ranks. Collective."""
        return self._runner.evaluate(batch)

    def dry_run(self, batch: Any, *, training: bool = False) -> None:
        """Check with one batch that the plan may split the batch and the model computes the same. Collective.

        Raises TaskError, on every rank, if not. The first step does the same. `training`: a step on this batch follows.
        """
        self._runner.dry_run(batch, training=training)

    def run_forward(self, batch: Any) -> ForwardRun | None:
        """Outputs and loss of this rank's part of a batch, without training on it; None without samples. Collective.

        `batch` may be None on ranks that have none. Raises TaskError on the ranks of one sequence if their batches
        differ.
        """
        return self._runner.run_forward(batch)

    # ---- other collectives ---------------------------------------------------------------------------

    def all_reduce(self, values: Tensor) -> list[float]:
        """The elements of a tensor, flattened and in float64, summed over all ranks. Collective.

        Raises SettingError for anything but a tensor of real numbers, and DivergenceError if ranks give different
        numbers of elements.
        """
        return self._runner.all_reduce(values)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. Collective."""
        self._calls.enter("all_gather_json()")
        return self._calls.world.all_gather_json(value)

    def check_drift(self) -> None:
        """Compare the weights that several ranks have now, as `drift_check` does after every so many steps. Collective.

        Raises DivergenceError, on every rank, if they differ in a bit; with local steps, TrainingError unless the ranks
        have just averaged their weights.
        """
        self._enter("check_drift()")
        self._check_synchronized()
        self._checks.compare_replicas(self._runner.replicated_tensors())

    # ---- weights and state ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def edit(self) -> Iterator[nn.Module]:
        """Change weights by hand, inside the block; after it every rank has rank 0's weights. Collective."""
        self._check_no_edits("edit()")
        self._enter("edit()")
        with self._weights.edit():
            yield self.model
        self._parts.local.sgd.finish_sync()
        torch.autograd.graph.increment_version(list(self.model.parameters()))
        self._weights.edits.accept_edits()

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """Inside the block, any rank may call the model, as often as it likes, without training it. Collective.

        Raises PlanError with pp > 1, where a rank has one stage of the model: see `inference`. Needed only if weights
        are stored split among hosts (zero 3): outside of steps, parameters are then placeholders filled with NaN. Ranks
        wait at the end of the block until no rank needs their shards.
        """
        self._assembly.pipeline.check_whole_model("step.unsharded()", "with step.inference() as model: …")
        with self._unsharded():
            yield self.model

    @contextlib.contextmanager
    def _unsharded(self) -> Iterator[None]:
        self._calls.begin_among_tensor_ranks("unsharded()")
        self._assembly.timing.flush()
        with torch.no_grad(), self._weights.unsharded("unsharded"):
            yield

    @contextlib.contextmanager
    def inference(self) -> Iterator[InferenceModel]:
        """As `unsharded`, in evaluation mode; each call of the model runs a forward-only program. Collective."""
        called = inference_model(self.model, self._runner, self._assembly.pipeline)
        with eval_mode(self.model), self._unsharded(), called as model:
            yield model
            self._calls.checker.meet("the end")

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, whole, one at a time; read only. Collective: all ranks iterate to the end."""
        self._calls.begin_among_tensor_ranks("named_weights()")
        self._assembly.timing.flush()
        return self._assembly.pipeline.all_named(self._weights.named_weights())

    def flush(self) -> None:
        """Run the updates that `update = "in_forward"` leaves to the next forward. Collective.

        The step's own methods, such as `evaluate` and `state_dict`, do it themselves. Before weights are used in any
        other way, all ranks must call this; otherwise the use raises TrainingError.
        """
        self._calls.begin("flush()")
        self._assembly.timing.flush()

    def load_weights(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; the same values on every rank. Collective.

        Raises TaskError, before anything is changed, for names or shapes that the model does not have.
        """
        self._check_no_edits("load_weights()")
        self._calls.enter("load_weights()")  # all ranks are here: none reads weights
        values = self._assembly.pipeline.restricted(values) if isinstance(values, Mapping) else values
        whole_tensors, trainable = self._weights.whole_tensors, self._weights.trainable
        problems = weight_problems(values, trainable, whole_tensors.shape)
        self._calls.raise_on_all_ranks(problems, where="the weights")
        self._assembly.timing.flush()
        local = {name: whole_tensors.local(name, value) for name, value in values.items()}
        self._weights.load_weights(local)
        self._parts.local.sgd.update_reference(local)

    @contextlib.contextmanager
    def swapped_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trainable weights are others, given in the form of `weight_shards`. Collective."""
        self._check_no_edits("swapped_weights()")
        self._enter("swapped_weights()")
        with self._weights.swapped_weights(weights):
            yield
            self._calls.enter("the end of swapped_weights()")  # all ranks have finished with them

    @property
    def whole_tensors(self) -> WholeTensors:
        """How tensors as large as this rank's parameters become whole, and are cut."""
        return self._weights.whole_tensors

    @property
    def weight_shards(self) -> dict[str, Tensor]:
        """This rank's shard of every trainable parameter, of its master weights if it has them; no copies.

        A parameter that is stored whole and has no master weights is returned itself; all others are flat, with the
        elements `state_layout.ranges`. Not collective.
        """
        return {name: self._weights.weight_shard(name) for name in self._weights.trainable}

    @property
    def state_layout(self) -> RankLayout:
        """Which elements of the optimizer states this rank has, and with whom."""
        return self._assembly.state.layout

    def weight_layout(self, name: str) -> RankLayout:
        """Which elements of a trainable parameter this rank's `weight_shards` have, and with whom."""
        return self._weights.weight_layout(name)

    def state_dict(self) -> dict[str, Any]:
        """All state by parameter name, independent of the mesh; tensors are copies. Collective.

        model      name -> tensor: master weights if the parameter has them
        optimizer  name -> key -> a tensor in the parameter's shape, or a scalar
        groups     the options of each parameter group
        record     launch order, nominal count, and the loss scale if there is one
        codec      name -> key -> [ranks, elements]: what each rank's codec keeps between steps
        outer      name -> tensor: the outer momentum of local steps

        With local steps the optimizer's tensors are means over the ranks, and TrainingError is raised unless ranks have
        just averaged their weights.
        """
        self._check_no_edits("state_dict()", compare_all=True)
        self._enter("state_dict()")
        self._check_synchronized()
        return {**self._groups_and_record(), **self._assembly.pipeline.all_state(self._assembly.state.state_dict())}

    def state_refs(self) -> dict[str, Any]:
        """`state_dict` without copies: each optimizer tensor is a list of consecutive flat slices.

        If optimizer states are stored split, these are only this rank's: the elements `state_layout.ranges`. With
        local steps each rank has its own states. Collective if updates wait for the next forward: see `flush`.
        """
        self._check_synchronized()
        self._assembly.timing.flush()
        return {**self._groups_and_record(), **self._assembly.state.state_refs()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on this mesh or another. Collective.

        Raises TaskError, before anything is changed, if it is not the state of such a model and optimizer.
        """
        self._calls.enter("load_state_dict()")
        state = self._own_state(state)
        optimizer, weights = self.optimizer, self._weights
        problems = state_problems(
            state, weights.model_state_dict(), weights.trainable, optimizer, weights.whole_tensors.shape
        )
        self._calls.raise_on_all_ranks(problems, where="the state")
        self._load(readers_of(state))

    def load_saved_state(self, saved: SavedState) -> None:
        """Restore a state that is read a tensor at a time, and that fits this model and optimizer. Collective."""
        self._calls.enter("load_saved_state()")
        self._load(saved)

    # ---- how state is reached --------------------------------------------------------------------------

    def _enter(self, call: str) -> None:
        """Begin a call that all ranks must be in, with updated weights. Collective."""
        self._calls.enter(call)
        self._assembly.timing.flush()

    def _check_no_edits(self, call: str, *, compare_all: bool = False) -> None:
        """Raise TaskError if weights have been written outside of `edit`, and the next update would ignore it."""
        self._checks.check_no_edits(call, compare_all=compare_all, sampled=not self._assembly.timing.has_pending)

    def _check_synchronized(self) -> None:
        """Raise TrainingError unless all ranks have the same weights."""
        if not self._checks.is_synchronized:
            interval = self._programs.blueprint.sync_interval
            got = f"the state after step {self._calls.num_steps}, with local_steps = {interval}"
            need = "the same weights on all ranks, which they have just after averaging them"
            after = -(-self._calls.num_steps // interval) * interval
            raise TrainingError(Problem(got, need, f"after step {after}"))

    def _groups_and_record(self) -> dict[str, Any]:
        programs, optimizer = self._programs, self.optimizer
        record: dict[str, Any] = {
            "order": programs.launch_order,
            "nominal_count": programs.nominal_count,
            "optimizer": type(optimizer).__name__,
        }
        if scale := self._parts.loss_scale.state:
            record["scale"] = scale
        if proof := self._assembly.proof.state:
            record["proof"] = proof
        groups = [{k: cloned(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return {"groups": groups, "record": record}

    def _own_state(self, state: Any) -> Any:
        """What this rank's stage has of a state; anything else as it is, to be refused."""
        if not isinstance(state, Mapping):
            return state
        parts = {key: value for key, value in state.items() if key in STATES_BY_NAME and isinstance(value, Mapping)}
        return {**state, **{key: self._assembly.pipeline.restricted(value) for key, value in parts.items()}}

    def _load(self, saved: SavedState) -> None:
        saved = local_state(saved, self._weights.whole_tensors)
        self._assembly.timing.flush()
        self._assembly.state.load(saved)
        for group, options in zip(self.optimizer.param_groups, saved.groups, strict=True):
            # Options such as `foreach` choose an implementation; that was done when the step was built.
            group.update({k: cloned(v) for k, v in options.items() if k not in IMPLEMENTATION_OPTIONS})
        record = saved.record
        self._assembly.proof.load_state(record.get("proof"))
        self._parts.loss_scale.load_state(record.get("scale") or {})
        # Launch orders are valid only for the same numbers of buckets; otherwise the next step records new ones.
        programs = self._programs
        if launch_orders := programs.split_order(record["order"]):
            self._runner.set_record(launch_orders, record["nominal_count"])
        else:
            programs.nominal_count = record["nominal_count"]
        self._assembly.state.codec_state.load(saved.codec)

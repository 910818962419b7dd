"""Train step: the user's door to one training step on all ranks.

whole forward  in place of a model's forward where ranks have one stage each: it computes all stages, and every rank
               has the outputs. So methods that call the model, such as `generate` of transformers, work as they are
Law: after k steps, losses and weights equal those of one process that trains on all the samples.
Law: only the step calls the model; what a call returns is what the model returns.
"""

import contextlib
import functools
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
from fourfold.plan.plan import Plan
from fourfold.plan.tensor_shard import TensorShard
from fourfold.plan.topology import Topology
from fourfold.step.argument_checks import StepKeywords, StepOptions
from fourfold.step.assembly import assemble
from fourfold.step.model_checks import join_mesh
from fourfold.step.persistent_state import CodecState, SavedState
from fourfold.step.state_access import StateAccess
from fourfold.step.step_runner import AsynchronousRunner, ForwardRun, Metrics, StepRunner
from fourfold.torch_kit.deferred_init import OWN_WEIGHTS, InitialModel, InitialWeights
from fourfold.torch_kit.tensor_tree import is_plain
from fourfold.words.errors import Problem, SettingError
from fourfold.words.program import Action, Program
from fourfold.words.trace_events import Recorder

# ---- inference -----------------------------------------------------------------------------------------------------

WHERE = "a call of the model"


class InferenceModel:
    """The model of a step, to be called without training it. Attributes are the model's.

    call  the model's outputs for the inputs of a batch
    """

    def __init__(self, model: nn.Module, call: Callable[[Any], Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The model's outputs for the inputs of a batch: one argument, or keywords as a dict of inputs has them."""
        return self._call(_batch_inputs(inputs, named_inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def inference_model(model: nn.Module, runner: StepRunner, pipeline: PipelineAxis) -> Iterator[InferenceModel]:
    """Inside, a model to call; where it is cut into stages, its own methods call all of them too."""
    if not pipeline.is_cut:
        yield InferenceModel(model, runner.infer)
        return
    runner.check_dry_run("step.inference()")
    forward, is_instances_own = model.forward, "forward" in vars(model)

    def restore() -> None:
        if is_instances_own:
            vars(model)["forward"] = forward
        else:
            vars(model).pop("forward", None)

    def infer(inputs: Any) -> Any:
        _check_values(inputs)
        restore()  # the stages run the model's own forward
        try:
            return runner.infer(inputs)
        finally:
            vars(model)["forward"] = whole_forward

    @functools.wraps(forward)  # transformers reads its signature
    def whole_forward(*inputs: Any, **named_inputs: Any) -> Any:
        return infer(_batch_inputs(inputs, named_inputs))

    vars(model)["forward"] = whole_forward
    try:
        yield InferenceModel(model, infer)
    finally:
        restore()


def _batch_inputs(inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> Any:
    if len(inputs) + bool(named_inputs) != 1:
        names = f" and {', '.join(named_inputs)}" if named_inputs else ""
        got = f"a call of the model with {len(inputs)} inputs by position{names}"
        need = "what a batch has: one input, or a dict of inputs, each given by its name"
        raise SettingError(Problem(got, need, "model(inputs), or model(tokens=…, positions=…)"))
    return named_inputs or inputs[0]


def _check_values(inputs: Any) -> None:
    """Raise SettingError for an input that a stage would change for its own blocks only, such as a KV cache."""
    named = inputs if isinstance(inputs, dict) else {"the input": inputs}
    problems = [
        Problem(
            f"{name} is a {type(value).__name__}, and pp is above 1",
            "tensors and numbers: a cache would have the keys of one stage only",
            "use_cache=False",
        )
        for name, value in named.items()
        if not is_plain(value)
    ]
    if problems:
        raise SettingError(problems, where=WHERE)


# ---- step ----------------------------------------------------------------------------------------------------------


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
        self._access = access = StateAccess(assembly)
        self._runner = (AsynchronousRunner if plan.is_asynchronous else StepRunner)(model, assembly, access)

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
        return self._assembly.buckets

    @property
    def program(self) -> tuple[Action, ...]:
        """The actions of a step. With local steps: of one at whose end weights are averaged."""
        return self._programs.at_sync

    @property
    def programs(self) -> Program:
        """As `program`, of all ranks."""
        return self._programs.of_ranks

    @property
    def local_program(self) -> tuple[Action, ...]:
        """With local steps: the actions of a step without an average of weights."""
        return self._programs.between

    @property
    def topology(self) -> Topology:
        """The machines that the ranks run on."""
        return self._programs.topology

    @property
    def ranks_by_memory(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that meet in shared memory, a tuple for each."""
        return self._programs.ranks_by_memory

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
        self._access.enter("check_drift()")
        self._access.check_synchronized()
        self._checks.compare_replicas(self._access.replicated_tensors(self.model))

    # ---- weights and state ---------------------------------------------------------------------------

    def edit(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Change weights by hand, inside the block; after it every rank has rank 0's weights. Collective."""
        return self._access.edit(self.model)

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
            self._calls.meet_tensor_ranks("the end")

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
        self._access.load_weights(values)

    def swapped_weights(self, weights: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Inside, the trainable weights are others, given in the form of `weight_shards`. Collective."""
        return self._access.swapped_weights(weights)

    @property
    def whole_tensors(self) -> WholeTensors:
        """How tensors as large as this rank's parameters become whole, and are cut."""
        return self._weights.whole_tensors

    @property
    def weight_shards(self) -> dict[str, Tensor]:
        """This rank's shard of every trainable parameter, of its master weights if it has them; no copies.

        A parameter that is stored whole and has no master weights is returned itself; all others are flat, with the
        elements `shard_ranges`. Not collective.
        """
        return {name: self._weights.weight_shard(name) for name in self._weights.trainable}

    @property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        return self.state_layout.ranges

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
        return self._access.state_dict()

    def state_refs(self) -> dict[str, Any]:
        """`state_dict` without copies: each optimizer tensor is a list of consecutive flat slices.

        If optimizer states are stored split, these are only this rank's: the elements `shard_ranges`. With local steps
        each rank has its own states. Collective if updates wait for the next forward: see `flush`.
        """
        return self._access.state_refs()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on this mesh or another. Collective.

        Raises TaskError, before anything is changed, if it is not the state of such a model and optimizer.
        """
        self._access.load_state_dict(state)

    def load_saved_state(self, saved: SavedState) -> None:
        """Restore a state that is read a tensor at a time, and that fits this model and optimizer. Collective."""
        self._access.load_saved_state(saved)

"""Build: a model, a loss, an optimizer and a plan become one training step.

TrainStep  one optimizer update per call, the same on every mesh
record     what the first step taught and all later steps keep: the launch order and the nominal count
Law: after k steps, losses and weights equal those of one process that saw all the samples.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import psutil
import torch
from torch import Tensor, nn

from fourfold.parts import codec, comm, data, local, lowered, memory, optim
from fourfold.parts.in_place import InPlace
from fourfold.parts.masters import Policy, host_of
from fourfold.parts.options import Options
from fourfold.parts.step_hooks import StepHooks
from fourfold.plan.data import RESTS, Bucket, Rest, Spec, Step, fill, limit, lower, turns
from fourfold.plan.memory import is_in_place
from fourfold.plan.order import Stretch
from fourfold.plan.plan import Plan
from fourfold.plan.precision import Scale, computed, reduced
from fourfold.plan.rng import seed_of
from fourfold.run import drift, fits
from fourfold.run.actions import Actions
from fourfold.run.arguments import refuse_arguments
from fourfold.run.batch import Microbatch, cut, evaluating, halves, mapped
from fourfold.run.batch_statistics import FrozenStatistics
from fourfold.run.dry_run import DryRun
from fourfold.run.guard import Guard
from fourfold.run.metrics import Metrics
from fourfold.run.objective import Measured, Objective, is_uneven, uneven
from fourfold.run.outline import outline
from fourfold.run.own_optimizer import Unchanged, refuse_own
from fourfold.run.parts import Parts
from fourfold.run.refuse import compare, refuse, refuse_for, refuse_optimizer, refuse_own_loss
from fourfold.run.remembered import Remembered
from fourfold.run.runtime import Runtime
from fourfold.run.same_batches import SameBatches, fingerprint
from fourfold.run.same_source import refuse_other_sources
from fourfold.run.sequence import Tokens
from fourfold.run.sequence.alike import unlike
from fourfold.run.settings import DRIFT_CHECK, is_due
from fourfold.run.state import State, copied
from fourfold.run.weights import Weights, trainable_of
from fourfold.words.action import LOSS, Action
from fourfold.words.arguments import shown
from fourfold.words.errors import (
    DivergenceError,
    FourfoldError,
    OptimizerError,
    Problem,
    SettingError,
    TaskError,
    TrainingError,
)
from fourfold.words.host_memory import available_bytes
from fourfold.words.layout import SPLIT
from fourfold.words.spans import Recorder
from fourfold.words.task import Task
from fourfold.words.world import cores


def parallelize(
    model: nn.Module,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: optim.OptimizerFactory,
    plan: Plan | None = None,
    *,
    clip: float | None = None,
    seed: int = 0,
    skip_nan: int = 0,
    same_batches: str = "refuse",
    drift_check: int = DRIFT_CHECK,
) -> "TrainStep":
    """Lay one training step over the ranks of the plan. Collective. Without a plan, all ranks are data ranks.

    Reads the launcher's environment and joins the process group that is there, or makes one. Rank 0's weights and
    buffers are broadcast first. `loss(outputs, targets)` returns unreduced values (their global mean is trained),
    a pair (sum, count), or a scalar: a mean over what torch's loss functions count, else over its samples. None: the
    model's own loss, of batches that are dicts of its inputs, labels among them. `optimizer` is called once, with the
    original parameters; its options are then used by an update over flat buffers. `clip` bounds the global norm of
    the gradient. `seed` seeds torch's generator, differently on every data index. `skip_nan` is how many steps in a row
    may be left out because the global loss, or with `clip` the norm, is not finite; the next one raises TrainingError.
    Steps raise TaskError where all data ranks give the same batches, three different ones in a row, unless
    `same_batches="allow"`; batches of a `Feed` are never the same.
    After every `drift_check` steps, ranks compare the weights that several of them hold (0: never), and raise
    DivergenceError where these differ.

    Raises PlanError, OptimizerError or TaskError where the plan cannot be carried out.
    """
    refuse_arguments(model=model, loss=loss, optimizer=optimizer, plan=plan, clip=clip, seed=seed, skip_nan=skip_nan)
    ranks = comm.join()
    plan = plan or Plan(dp=ranks.size)
    refuse(model, plan, ranks, clip=clip)
    _set_threads(ranks)
    torch.manual_seed(seed_of(seed, plan.mesh.at(ranks.rank)["dp"]))
    options = {"clip": clip, "skip_nan": skip_nan, "seed": seed}
    options |= {"same_batches": same_batches, "drift_check": drift_check}
    return TrainStep(model.to(ranks.device), loss, optimizer, plan=plan, ranks=ranks, **options)


class Traffic(NamedTuple):
    """What a rank has waited for others, and sent to them."""

    waiting_seconds: float
    sent_bytes: float


class TrainStep:
    """`step(batch)` is one optimizer update; the batch is this rank's part of the global one, and may be empty."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] | None,
        optimizer: optim.OptimizerFactory,
        *,
        plan: Plan,
        ranks: comm.Ranks,
        clip: float | None,
        skip_nan: int = 0,
        seed: int = 0,
        same_batches: str = "refuse",
        drift_check: int = DRIFT_CHECK,
    ) -> None:
        refuse_own_loss(loss, plan)
        self.model, self.plan, self._ranks = model, plan, ranks
        self.objective = Objective(loss)
        self.optimizer = optim.build(optimizer, list(model.parameters()))
        refuse_optimizer(self.optimizer, plan)
        refuse_own(self.optimizer, plan)
        self._unchanged = Unchanged(self.optimizer, plan)
        self._frozen = FrozenStatistics(model, plan)
        trainable = trainable_of(model)
        own = data.specs(trainable, optim.groups(self.optimizer, trainable))
        shapes = {name: list(p.shape) for name, p in trainable.items()}
        self._same_batches = SameBatches(same_batches, num_data_ranks=plan.dp, speaks=ranks.rank == 0)
        options = {"clip": clip, "skip_nan": skip_nan, "same_batches": same_batches, "drift_check": drift_check}
        compare(ranks, own, shapes, plan=plan, options=options, optimizer=self.optimizer)
        self._options = Options(self.optimizer)
        # A split over one rank is whole.
        rest = RESTS[plan.zero if plan.num_shares > 1 else 0]
        split = rest.state == SPLIT
        specs = computed(own, plan.precision, kept=lowered.kept(model))
        self.buckets = _buckets(plan, specs, ranks, shares=plan.num_sharing if split else 1)
        by_bucket = [[trainable[slot.name] for slot in bucket.slots] for bucket in self.buckets]
        codecs = _codecs(plan, self.buckets, by_bucket)
        layerwise = optim.by_parameter(self.optimizer)
        allow_unused = plan.unused == "allow"
        in_place = InPlace(trainable, self.buckets, allow_unused=allow_unused) if is_in_place(plan) else None
        request = _request(plan, self.buckets, rest, num_norms=2 * len(trainable) if layerwise else len(trainable))
        held = None if in_place is None else in_place.own
        self._transport, self.transport = comm.connect(ranks, request, choice=plan.transport, codecs=codecs, held=held)
        if rest.weight == SPLIT and not self._transport.gathers:
            rest = RESTS[2]  # the weights exist once per host: nothing is gathered before use
        self.remembered = Remembered(codecs, ranks)
        apart = comm.Apart(self._transport, ranks.size) if plan.sync == "local" else None
        self._transport = apart or self._transport
        policy = Policy(plan.precision, split, host_of(plan.offload, ranks.device))
        outer = local.Outer(plan.outer_lr, plan.outer_momentum) if apart is not None else local.Outer()
        self._weights = Weights(model, self.buckets, self._transport, ranks, policy, is_mean=outer.is_mean)
        self._local = None
        if apart is not None:
            self._local = local.Local(self._weights.flats, self.buckets, apart, outer)
        by_slot = allow_unused or layerwise
        if in_place is not None:
            self._gradients = in_place
            pieces = in_place.pieces(self._weights.flats, self.buckets)
        else:
            self._gradients = data.Gradients(trainable, self.buckets, self._transport, allow_unused=allow_unused)
            pieces = data.pieces(self._weights, self.buckets, self._transport, by_slot=by_slot, cut=split)
        prepare = self._transport.take if split else None
        flat = optim.FlatOptimizer(self.optimizer, self.buckets, pieces, prepare=prepare)
        self._state = State(
            self._weights, self.buckets, flat, self._transport, ranks, self.remembered, self._local, is_split=split
        )
        # What gradients are divided by: of all ranks, or of one, if each learns by itself.
        self._sharing = plan.dp if self._local is not None else 1
        self._scale = Scale() if plan.precision == "fp16" else None
        in_grad = in_place is not None
        hooks = StepHooks(self.optimizer, self.buckets, by_bucket, in_place=in_grad, by_slot=by_slot)
        parts = Parts(
            self._gradients,
            self._transport,
            flat,
            by_bucket,
            self._weights.flats,
            rest,
            self._weights.edits,
            self._weights.gathered,
            self._local,
            hooks,
            self._scale,
        )
        self._actions = Actions(
            model,
            self.objective,
            parts,
            clip=clip,
            update=plan.update,
            agree=lambda count: sum(ranks.exchange(count)) / self._sharing,
            waits=plan.sp > 1 or parts.gathered is not None or _may_wait_in_backward(plan, rest),
        )
        self._tokens = Tokens(model, loss, plan, ranks, seed=seed) if loss is not None and plan.sp > 1 else None
        self._dry_run = DryRun(
            model,
            self.objective,
            plan,
            ranks.device,
            self._weights,
            num_sharing=ranks.world.local_size,
            speaks=ranks.rank == 0,
        )
        self._runtime = Runtime(self._actions)
        self._guard = Guard(ranks, model, limit=skip_nan)
        self._drift = drift.Drift(ranks, drift_check)
        self._outline = Step(
            plan.microbatches,
            len(self.buckets),
            rest,
            clip is not None or self._scale is not None,
            allow_unused,
            plan.update,
            trust=layerwise and split,
        )
        self._lower()
        self._recorded, self._num_calls = False, 0
        self.program: tuple[Action, ...]
        """What a step does; with local steps one that ends with a meeting, the others do `program_apart`."""
        self.steps = 0
        """Steps done, those before a resumption included: errors name them."""

    def _lower(self) -> None:
        """Make the programs of what is known of a step."""
        if self._local is None:
            self.program = self.program_apart = lower(self._outline)
            return
        self.program = lower(self._outline._replace(sync="meet"))
        self.program_apart = lower(self._outline._replace(sync="apart"))

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have the same weights: always, or with local steps when they have just met."""
        return self.steps % self.plan.period == 0

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def ask(self, stop: bool) -> None:
        """Whether this rank wants the run to stop: `asked` tells all ranks after the next step."""
        self._actions.asked = stop

    @property
    def asked(self) -> bool:
        """Whether some rank wanted the run to stop when the last step ended; the same on every rank."""
        totals = self._actions.totals
        return totals is not None and totals.asked > 0

    def has_died(self, rank: int) -> bool:
        """Whether a rank's process has ended, as far as this host can tell. Not collective: waits ask it."""
        return self._ranks.has_died(rank)

    def look(self) -> None:
        """Raise PeerError where another rank of this host has ended. Not collective: waits call it."""
        self._ranks.look()

    def tell(self, recorder: Recorder) -> None:
        """From now on `recorder` hears of every action, bucket and wait of this rank; `SILENT` ends it."""
        self._runtime.recorder = self._actions.recorder = recorder
        for way in (self._transport, *(self._tokens.links if self._tokens is not None else ())):
            way.recorder = recorder
        if self._local is None:
            self._gradients.recorder = recorder  # elsewhere gradients go nowhere

    @property
    def busy_seconds(self) -> dict[str, float]:
        """What this rank's last step was spent on, by the verbs' names, waiting left out."""
        return self._runtime.busy_seconds

    @property
    def data_index(self) -> int:
        """This rank's place on the data axis."""
        return self.plan.mesh.at(self.rank)["dp"]

    @property
    def device(self) -> torch.device:
        return self._ranks.device

    def __call__(self, batch: Any) -> Metrics:
        """One optimizer update on this rank's batch `(inputs, targets)`. Collective.

        Raises DivergenceError where another rank is in another call, or has another part of the feed's order.
        """
        begin, (waited, sent) = time.perf_counter(), self._traffic()
        samples = getattr(batch, "samples", None)
        self._refuse_changes()
        call = _name(f"step {self.steps + 1}", samples)
        self._transport.enter(comm.with_options(call, self._options.text()))
        watches = self._same_batches.is_watching and samples is None
        compares_sources = self._num_calls == 0 and samples is not None
        if not self._recorded or watches or compares_sources:
            self._transport.agree()  # The first step also exchanges what is no sum.
        if compares_sources:
            refuse_other_sources(self._ranks.exchange(getattr(batch, "probe", None)))
        if watches:
            self._compare_data_ranks(batch)
        self.try_out(batch, training=True)
        batch, self._actions.unlike = self._compared(batch)
        self._guard.begin()
        loss_scale = None if self._scale is None else self._scale.value
        program = self.program_apart if (self.steps + 1) % self.plan.period else self.program
        with self._reading(batch, self.plan.microbatches) as microbatches:
            self._runtime.run(program, microbatches)
        if self._actions.is_hooked:
            self._weights.check()  # a hook may have given parameters other storage
        totals = self._actions.totals
        assert totals is not None
        if self._num_calls == 0:
            self.objective.settle()
        self._num_calls, self.steps = self._num_calls + 1, self.steps + 1
        if self.device.type == "cpu":
            _mind_memory(self._num_calls)
        skipped = self._guard.judge(self._actions, self.steps, samples)
        if self._drift.is_wanted(self.steps, self.plan.period):
            self._drift.compare(list(self._held()), f"after step {self.steps}", manner=self._options.manner())
        if not self._recorded and skipped is None:
            self._record(self._ranks.exchange(self._gradients.completion_order)[0], totals.count / self._sharing)
        if not self._recorded and not totals.count:
            self._actions.nominal_count = None  # what was estimated from no elements is no estimate
        return Metrics(
            loss=totals.loss / totals.count if totals.count else float("nan"),
            samples=round(totals.samples / self.plan.sp),
            tokens=round(totals.tokens) or None,
            grad_norm=self._actions.grad_norm,
            seconds=time.perf_counter() - begin,
            waiting_seconds=self._traffic().waiting_seconds - waited,
            sent_bytes=self._traffic().sent_bytes - sent,
            skipped=skipped,
            loss_scale=loss_scale,
            overflowed=self._actions.overflowed,
        )

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Metrics:
        """The loss of the global batch without training on it; NaN where it is empty everywhere. Collective."""
        begin, (waited, _) = time.perf_counter(), self._traffic()
        self._enter("evaluate()", getattr(batch, "samples", None))
        self._actions.settle()
        self.try_out(batch)
        batch, problem = self._compared(batch)
        local = torch.zeros(7, dtype=torch.float64)
        with self._weights.read("evaluate"), self._reading(batch) as (part,), evaluating(self.model):
            if part.samples:
                loss = self.objective(self.model, part).loss
                values = [loss.total, loss.count, part.samples, part.tokens, 0.0, loss.other, loss.square]
                local = torch.tensor([float(value) for value in values], dtype=torch.float64)
        local[4] = problem is not None
        total, count, samples, tokens, num_unlike, other, square = self._sum(local)
        if num_unlike:
            raise TaskError(problem or unlike(), where="the batch")
        if is_uneven(count, other, square):
            raise TaskError(uneven(self.objective.names), where="the loss")
        return Metrics(
            loss=total / count if count else float("nan"),
            samples=round(samples / self.plan.sp),
            tokens=round(tokens) or None,
            grad_norm=None,
            seconds=time.perf_counter() - begin,
            waiting_seconds=self._traffic().waiting_seconds - waited,
        )

    def try_out(self, batch: Any, *, training: bool = False) -> None:
        """Show by a first batch that the loss and the model can be cut as the plan has it. Collective.

        Raises TaskError, on every rank, where they cannot. The first step does it too. `training`: it is a step's.
        """
        if self._tokens is not None and not self._tokens.is_tried:
            self._transport.agree()
            self._tokens.try_out(batch, self._weights.read("try out"))
            self._weights.edits.accept()
        if self._dry_run.is_due(training=training):
            self._transport.agree()
            few = batch if self._tokens is None else self._tokens.few(batch)
            self._dry_run.run(few, self._weights.read, self._ranks.exchange, training=training)
            self._weights.edits.accept()

    @contextlib.contextmanager
    def reading(self, batch: Any) -> Iterator[Microbatch]:
        """This rank's part of a batch; within, the model's attention reaches all tokens of it.

        Collective among the ranks that share sequences. Raises TaskError on them where their batches are not the same.
        """
        batch, problem = self._compared(batch)
        if problem is not None:
            raise TaskError(problem, where="the batch")
        with self._reading(batch) as (part,):
            yield part

    def measured(self, batch: Any) -> tuple[Microbatch, Measured]:
        """What the model makes of this rank's part of a batch that is not empty: see `reading`."""
        with self.reading(batch) as part:
            return part, self.objective(self.model, part)

    @contextlib.contextmanager
    def _reading(self, batch: Any, count: int = 1) -> Iterator[list[Microbatch]]:
        """The same in microbatches, of a batch that has been compared."""
        if self._tokens is None:
            yield cut(batch, count, self.device)
            return
        part, kept = self._tokens.cut(batch)
        parts = cut(part, count, self.device, kept=kept)
        with self._tokens.routing(parts, self.steps, getattr(batch, "samples", None)):
            yield parts

    def _compared(self, batch: Any) -> tuple[Any, Problem | None]:
        """The batch; where ranks that share its sequences have other ones none of its samples, and what is wrong."""
        problem = None if self._tokens is None else self._tokens.unlike(batch)
        return (batch if problem is None else mapped(halves(batch), lambda tensor: tensor[:0])), problem

    def _compare_data_ranks(self, batch: Any) -> None:
        """Raise TaskError, on every rank, where all data ranks train on the same batches. Collective."""
        everyone = self._ranks.exchange(fingerprint(batch))
        places = [self.plan.mesh.at(rank) for rank in range(self._ranks.size)]
        self._same_batches.compare([one for one, place in zip(everyone, places, strict=True) if place["sp"] == 0])

    def sum(self, values: Tensor) -> list[float]:
        """The elements of a tensor, flattened and in float64, summed over the data ranks. Collective.

        Raises SettingError for what is no tensor of real numbers, and DivergenceError where ranks give different
        numbers of elements.
        """
        if not isinstance(values, Tensor) or values.is_complex():
            got = "values of complex numbers" if isinstance(values, Tensor) else shown("values", values)
            problem = Problem(got, "a tensor of real numbers", "torch.tensor([…]), or torch.view_as_real(…)")
            call = f"sum() of no tensor of real numbers after step {self.steps}"
            self._refuse(call, SettingError(problem, where="the arguments of sum()"))
        self._enter(f"sum() of {values.numel()} values")
        return self._sum(values.detach().double().flatten())

    def _sum(self, values: Tensor) -> list[float]:
        sums: list[float] = []
        for some in values.split(comm.NUM_LOSS_SCALARS):  # no values are one empty part: the ranks meet all the same
            self._transport.measure(LOSS, some)
            sums += self._transport.measured(LOSS)
        return sums

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. Collective."""
        self._enter("exchange()")
        self._transport.agree()
        return self._ranks.exchange(value)

    def check_drift(self) -> None:
        """Compare the weights that several ranks hold now, as `drift_check` does every so many steps. Collective.

        Raises DivergenceError, on every rank, where they differ in a bit, and TrainingError between meetings of local
        steps.
        """
        self._enter("check_drift()")
        self._transport.agree()
        self._actions.settle()
        self._refuse_apart()
        self._drift.compare(list(self._held()), f"after step {self.steps}", manner=self._options.manner())

    def _held(self) -> Iterator[drift.Held]:
        """The weights in this rank's own memory."""
        weights, gathered, shares = self._weights, self._weights.gathered is not None, self._state.shares
        for name, parameter in self.model.named_parameters():
            if name not in weights.trainable:
                if drift.holds_frozen(self.plan):
                    yield drift.Held(drift.FROZEN, name, 0, parameter)
            elif gathered:
                yield drift.Held(drift.WEIGHTS, name, shares[name][0], weights.home(name))
            elif self._transport.weights is None or self._transport.writes:
                yield drift.Held(drift.WEIGHTS, name, 0, parameter)
            if name in weights.masters.names:
                start = shares[name][0] if weights.masters.is_split else 0
                yield drift.Held(drift.MASTERS, name, start, weights.masters.stretch(name))

    @contextlib.contextmanager
    def edit(self) -> Iterator[nn.Module]:
        """Change weights by hand: inside the block they are yours, after it every rank has rank 0's. Collective."""
        self._refuse_edits("edit()")
        self._enter("edit()")
        self._transport.agree()
        self._actions.settle()
        with self._weights.edited():
            yield self.model
        if self._local is not None:
            self._local.met()
        torch.autograd.graph.increment_version(list(self.model.parameters()))
        self._weights.edits.accept()

    @contextlib.contextmanager
    def read(self) -> Iterator[nn.Module]:
        """Call the model by hand: within, on any rank and as often as one likes, without training it. Collective.

        Needed only where weights rest split among hosts (zero 3): outside of steps parameters are placeholders there,
        NaN in their shapes. Other ranks wait at the end of the block until no rank needs their shares any more.
        """
        self._enter("read()")
        self._actions.settle()
        with torch.no_grad(), self._weights.read("read"):
            yield self.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, one after the other; read only. Collective: every rank goes to the end."""
        self._enter("weights()")
        self._actions.settle()
        return self._weights.each()

    def flush(self) -> None:
        """Have the weights as they are after the last step: `update = "in_forward"` leaves it to the next. Collective.

        All that is done with a step, such as `evaluate` and `state_dict`, sees to it by itself. Before weights are
        used in another way, all ranks call this; where they do not, TrainingError is raised at the use.
        """
        self._enter("flush()")
        self._actions.settle()

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; the same values on every rank. Collective.

        Raises TaskError, having changed nothing, where names or shapes are none of the model's.
        """
        self._refuse_edits("put()")
        self._enter("put()")
        self._transport.agree()  # all are here: nobody reads weights any more
        self._refuse_unfit(fits.weight_problems(values, self._weights.trainable), where="the weights")
        self._actions.settle()
        self._weights.put(values)
        if self._local is not None:
            self._local.put(values)

    @property
    def shares_of_weights(self) -> dict[str, Tensor]:
        """Of each trainable parameter what this rank has of its weights, as training goes on from them: no copies.

        The parameter; or, where the update has weights of its own, its flattened elements `shares` of these.
        """
        return {name: self._weights.share(name) for name in self._weights.trainable}

    @contextlib.contextmanager
    def replaced(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, trainable weights are others, given as `shares_of_weights` has them. Collective."""
        self._refuse_edits("replaced()")
        self._enter("replaced()")
        self._transport.agree()
        self._actions.settle()
        with self._weights.replaced(weights):
            yield
            self._enter("the end of replaced()")
            self._transport.agree()  # nobody computes with them any more

    def state_dict(self) -> dict[str, Any]:
        """All state by parameter name, independent of the mesh; tensors are copies. Collective.

        "model": name -> tensor, weights as the update has them; "optimizer": name -> key -> tensor in the parameter's
        shape or a scalar; "groups": options by group; "record": launch order, nominal count, and the scale of the loss
        where it has one; "codec": name -> key -> [ranks, elements], what each rank's codec remembers; "outer": with
        local steps, the outer momentum by name. Then the optimizer's tensors are means over ranks, and TrainingError is
        raised between meetings.
        """
        self._refuse_edits("state_dict()", thoroughly=True)
        self._enter("state_dict()")
        self._transport.agree()
        self._actions.settle()
        self._refuse_apart()
        return {**self._decisions(), **self._state.saved()}

    def living_state(self) -> dict[str, Any]:
        """`state_dict` without a copy: the optimizer's tensors are lists of consecutive flat stretches.

        Where optimizer states rest split these are this rank's only: `shares` says which elements they are. With local
        steps too: each rank has states of its own. Collective where updates wait for the next forward: see `flush`.
        """
        self._refuse_apart()
        self._actions.settle()
        return {**self._decisions(), **self._state.living()}

    def _refuse_apart(self) -> None:
        if not self.is_whole:
            got = f"the state after step {self.steps}, with local_steps = {self.plan.period}"
            need = "weights that all ranks have alike"
            after = -(-self.steps // self.plan.period) * self.plan.period
            raise TrainingError(Problem(got, need, f"after step {after}"))

    @property
    def shares(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        return self._state.shares

    @property
    def is_replica(self) -> bool:
        """Whether other ranks, whose numbers are less, hold the same shares as this one."""
        return self._transport.replica > 0

    @property
    def is_split(self) -> bool:
        """Whether optimizer states rest split over the data ranks."""
        return self._state.is_split

    def _decisions(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "order": list(self._outline.order),
            "nominal_count": self._actions.nominal_count,
            "optimizer": type(self.optimizer).__name__,
        }
        if self._scale is not None:
            record["scale"] = self._scale.state
        groups = [{k: copied(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"groups": groups, "record": record}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, on this or another mesh. Collective.

        Raises TaskError, having changed nothing, where it is not the state of such a model and optimizer.
        """
        self._enter("load_state_dict()")
        self._transport.agree()
        found = fits.problems(state, self._weights.own(), self._weights.trainable, self.optimizer)
        self._refuse_unfit(found, where="the state")
        self._actions.settle()
        self._state.load(state)
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            # How an update is carried out was chosen when the step was built.
            group.update({k: copied(v) for k, v in options.items() if k not in optim.IMPLEMENTATION})
        record = state["record"]
        if self._scale is not None and record.get("scale"):
            self._scale.load(record["scale"])
        # The launch order is of use only where the buckets are the same; else this mesh records one of its own.
        if sorted(record["order"]) == list(range(len(self.buckets))):
            self._record(list(record["order"]), record["nominal_count"])
        else:
            self._actions.nominal_count = record["nominal_count"]
        self._state.remember(state)

    def _refuse_unfit(self, found: Sequence[Problem], *, where: str) -> None:
        """Raise TaskError on every rank where any has found a problem: nobody may wait for it. Collective."""
        told = dict.fromkeys(tuple(each) for problems in self._ranks.exchange(found) for each in problems)
        if told:
            raise TaskError([Problem(*each) for each in told], where=where)

    def _traffic(self) -> Traffic:
        """What this rank has waited and sent so far."""
        ways = (self._transport, *(self._tokens.links if self._tokens is not None else ()))
        return Traffic(sum(way.waiting_seconds for way in ways), sum(way.sent_bytes for way in ways))

    def _refuse_changes(self) -> None:
        """Raise where the optimizer or the model has since the build what a step would leave out."""
        call = f"step {self.steps + 1}"
        if problems := self._unchanged.problems():
            self._refuse(f"{call}, which its optimizer cannot do", OptimizerError(problems, where="the optimizer"))
        if problems := [*self._weights.problems(), *self._frozen.problems()]:
            self._refuse(f"{call}, which its model cannot do", TaskError(problems, where="the model"))
        # Loops that write weights in each step are found in their first steps, whatever they write.
        is_early = self._num_calls & (self._num_calls - 1) == 0
        self._refuse_edits(call, thoroughly=is_early or is_due(self.steps, self._drift.every, self.plan.period))

    def _refuse_edits(self, call: str, *, thoroughly: bool = False) -> None:
        """Raise TaskError where somebody has written weights that the next update would not go on from."""
        if self._local is not None and self.is_whole:
            self._weights.edits.accept()  # they become the anchor
        if problems := self._weights.edit_problems(thoroughly=thoroughly, sampled=not self._actions.waits):
            self._refuse(f"{call}, with weights that were written", TaskError(problems, where="the model"))

    def _refuse(self, call: str, error: FourfoldError) -> NoReturn:
        """Raise an error of this rank's; ranks that have no such error raise DivergenceError."""
        self._transport.enter(call)
        try:
            self._transport.agree()
        except DivergenceError as divergence:
            raise error from divergence
        raise error

    def _enter(self, call: str, samples: Stretch | None = None) -> None:
        self._transport.enter(_name(f"{call} after step {self.steps}", samples))

    def _record(self, order: list[int], count: float) -> None:
        """Freeze what the first step taught: the same on every rank from now on."""
        self._outline = self._outline._replace(order=tuple(order))
        self._lower()
        self._gradients.launch_order = list(order)
        before = self._actions.nominal_count
        if before is not None and before != count and isinstance(self._transport, comm.Coded):
            # What is remembered was divided by the count of before.
            self._transport.rescale(before / count)
        self._actions.nominal_count = count
        self._recorded = True


def _name(call: str, samples: Stretch | None) -> str:
    """A call, and its part of the feed's order where it is known: ranks may be as many steps on, and a batch apart."""
    return call if samples is None else f"{call}, {samples}, {samples.num_samples} samples"


def _codecs(plan: Plan, buckets: Sequence[Bucket], by_bucket: Sequence[Sequence[nn.Parameter]]) -> list[codec.Codec]:
    """One for each bucket, or none at all."""
    coding = plan.coding
    if coding is None:
        return []
    return [
        codec.make(coding, reduced(bucket, plan.reduce), [tuple(p.shape) for p in some], device=some[0].device)
        for bucket, some in zip(buckets, by_bucket, strict=True)
    ]


def _buckets(plan: Plan, specs: Sequence[Spec], ranks: comm.Ranks, *, shares: int) -> tuple[Bucket, ...]:
    # With a codec on one host too: what it keeps depends on the buckets, and the training is to be the same.
    travels = ranks.num_hosts > 1 or plan.codec != "none"
    return fill(specs, bucket_bytes=limit(specs, plan.bucket_bytes, travels=travels), shares=shares)


def _may_wait_in_backward(plan: Plan, rest: Rest) -> bool:
    """Whether a rank may wait for a sum within backward while another waits there for the totals of all hosts."""
    # Split gradients pass through a few slots: backward waits for one to be free. Updates in backward need the totals.
    return plan.update == "in_backward" and rest.gradient == SPLIT


def _request(plan: Plan, buckets: Sequence[Bucket], rest: Rest, *, num_norms: int) -> comm.Request:
    """What the buckets of a plan need of a transport."""
    return comm.Request(
        sizes=tuple(bucket.size for bucket in buckets),
        dtypes=tuple(data.dtype_of(reduced(bucket, plan.reduce)) for bucket in buckets),
        turns=turns(len(buckets), few=rest.gradient == SPLIT),
        rest=rest,
        num_scalars=max(8, num_norms),
        shard=plan.num_shares if rest.state == SPLIT else None,
        weight_dtypes=tuple(data.dtype_of(bucket) for bucket in buckets),
    )


def check(task: Task, plan: Plan) -> nn.Module:
    """The outline of a task's model.

    Raise TaskError, PlanError, OptimizerError or SettingError for what can be known of a task before processes are
    started.
    """
    model = outline(task, most_bytes=available_bytes())
    refuse_for(model, plan, clip=task.clip)
    refuse_own_loss(task.loss, plan)
    comm.refuse_impossible(plan.transport, "cuda" if torch.cuda.is_available() else "cpu")
    optimizer = optim.build(task.optimizer, list(model.parameters()))
    refuse_optimizer(optimizer, plan)
    refuse_own(optimizer, plan)
    return model


def _mind_memory(num_steps: int) -> None:
    """After each step of a process on a CPU: what its C library keeps of what is freed."""
    if num_steps == 1:
        # Not before: states are made in the first step, and would lie between gradients that are gone after it.
        memory.keep_freed_memory()
    elif num_steps == 2:
        memory.give_back_freed_memory()


def _set_threads(ranks: comm.Ranks) -> None:
    # torch's own default is the number of physical cores: only another number was somebody's choice.
    defaults = {cores(), psutil.cpu_count(logical=False)}
    chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in defaults
    if ranks.world.local_size > 1 and not chosen:
        torch.set_num_threads(max(1, cores() // ranks.world.local_size))

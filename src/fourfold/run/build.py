"""Build: a model, a loss, an optimizer and a plan become one training step.

TrainStep  one optimizer update per call, the same on every mesh
record     what the first step taught and all later steps keep: the launch order and the nominal count
Law: after k steps, losses and weights equal those of one process that saw all the samples.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from fourfold.parts import codec, comm, data, local, memory, optim
from fourfold.plan.data import RESTS, Spec, Step, fill, lower, turns
from fourfold.plan.order import Stretch
from fourfold.plan.plan import Plan
from fourfold.run.actions import Actions, Parts
from fourfold.run.batch import call, cut, evaluating, measure
from fourfold.run.guard import Guard, Skipped
from fourfold.run.outline import outline
from fourfold.run.refuse import model_problems, refuse, refuse_optimizer, sync_problems, update_problems
from fourfold.run.remembered import Remembered
from fourfold.run.runtime import Runtime
from fourfold.words.action import LOSS, Action
from fourfold.words.errors import PlanError, Problem, TaskError, TrainingError
from fourfold.words.layout import SPLIT
from fourfold.words.spans import Recorder
from fourfold.words.task import Task
from fourfold.words.world import cores


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a step says of itself. Global, the same on every rank, except the times, which are this rank's.

    loss             mean over all elements of the global batch
    tokens           None where the inputs carry no positions
    grad_norm        norm of the global gradient before clipping; None without `clip`. With local steps: the root of
                     the mean square of all ranks' own
    waiting_seconds  part of `seconds` spent reducing gradients and waiting for other ranks
    sent_bytes       of gradients and weights, that this rank has sent to other hosts or over gloo or NCCL, as by ring
    skipped          why the step changed nothing, where `skip_nan` left it out; None for all others
    """

    loss: float
    samples: int
    tokens: int | None
    grad_norm: float | None
    seconds: float
    waiting_seconds: float
    sent_bytes: float = 0.0
    skipped: Skipped | None = None


def parallelize(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: optim.OptimizerFactory,
    plan: Plan | None = None,
    *,
    clip: float | None = None,
    seed: int = 0,
    skip_nan: int = 0,
) -> "TrainStep":
    """Lay one training step over the ranks of the plan. Collective.

    Reads the launcher's environment and joins the process group that is there, or makes one. Rank 0's weights and
    buffers are broadcast first. `loss(outputs, targets)` returns unreduced values (their global mean is trained),
    a pair (sum, count), or a scalar (a mean over its samples). `optimizer` is called once, with the original
    parameters; its options are then used by an update over flat buffers. `clip` bounds the global norm of the
    gradient. `seed` seeds torch's generator, differently on every data index. `skip_nan` is how many steps in a row
    may be left out because the global loss, or with `clip` the norm, is not finite; the next one raises TrainingError.

    Raises PlanError, OptimizerError or TaskError where the plan cannot be carried out.
    """
    plan = plan or Plan()
    ranks = comm.join()
    refuse(model, plan, ranks, clip=clip)
    _set_threads(ranks)
    if ranks.device.type == "cpu":
        memory.keep_freed_memory()
    torch.manual_seed(seed + 1_000_003 * plan.mesh.at(ranks.rank)["dp"])
    return TrainStep(model.to(ranks.device), loss, optimizer, plan=plan, ranks=ranks, clip=clip, skip_nan=skip_nan)


class TrainStep:
    """`step(batch)` is one optimizer update; the batch is this rank's part of the global one, and may be empty."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: optim.OptimizerFactory,
        *,
        plan: Plan,
        ranks: comm.Ranks,
        clip: float | None,
        skip_nan: int = 0,
    ) -> None:
        self.model, self.plan, self._loss, self._ranks = model, plan, loss, ranks
        trainable = self._trainable = trainable_of(model)
        self.optimizer = optim.build(optimizer, list(model.parameters()))
        refuse_optimizer(self.optimizer, plan)
        group_of = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        groups = {name: group_of[id(p)] for name, p in trainable.items()}
        specs = data.specs(trainable, groups)
        options = {"clip": clip, "skip_nan": skip_nan}
        compare(ranks, specs, {name: list(p.shape) for name, p in trainable.items()}, plan=plan, options=options)
        # A split over one rank is whole.
        rest = RESTS[plan.zero if plan.dp > 1 else 0]
        split = self._split = rest.state == SPLIT
        self.buckets = fill(specs, bucket_bytes=plan.bucket_bytes, shares=plan.dp if split else 1)
        allow_unused, layerwise = plan.unused == "allow", optim.by_parameter(self.optimizer)
        # One rank's update has ended when the next bucket comes: its slot is free, unless the ranks will meet in it.
        frees_early = plan.update == "in_backward" and plan.dp == plan.microbatches == 1 and plan.sync == "step"
        request = comm.Request(
            sizes=tuple(bucket.size for bucket in self.buckets),
            dtypes=tuple(data.dtype_of(bucket) for bucket in self.buckets),
            turns=turns(len(self.buckets), few=rest.gradient == SPLIT or frees_early),
            rest=rest,
            num_scalars=max(8, (2 if layerwise else 1) * len(trainable)),
        )
        codecs = self._codecs(plan)
        self._transport, self.transport = comm.connect(ranks, request, choice=plan.transport, codecs=codecs)
        apart = comm.Apart(self._transport) if plan.sync == "local" else None
        self._transport = apart or self._transport
        self.remembered = Remembered(codecs, ranks)
        self._weights = data.rehome(trainable, self.buckets, self._transport)
        self._broadcast()
        self._local = None
        if apart is not None:
            outer = local.Outer(plan.outer_lr, plan.outer_momentum)
            self._local = local.Local(self._weights, self.buckets, apart, outer)
        self._gradients = data.Gradients(trainable, self.buckets, self._transport, allow_unused=allow_unused)
        pieces = data.pieces(self._weights, self.buckets, self._transport, by_slot=allow_unused or layerwise, cut=split)
        prepare = self._transport.take if split else None
        self._flat = optim.FlatOptimizer(self.optimizer, self.buckets, pieces, prepare=prepare)
        by_bucket = [[trainable[slot.name] for slot in bucket.slots] for bucket in self.buckets]
        parts = Parts(self._gradients, self._transport, self._flat, by_bucket, self._weights, rest, self._local)
        # What gradients are divided by: of all ranks, or of one, if each learns by itself.
        self._sharing = plan.dp if self._local is not None else 1
        self._actions = Actions(
            model,
            loss,
            parts,
            clip=clip,
            update=plan.update,
            agree=lambda count: sum(ranks.exchange(count)) / self._sharing,
        )
        self._runtime = Runtime(self._actions)
        self._guard = Guard(ranks, model, limit=skip_nan)
        self._homes = {name: p.data_ptr() for name, p in trainable.items()}
        trust = layerwise and split
        self._outline = Step(
            plan.microbatches, len(self.buckets), rest, clip is not None, allow_unused, plan.update, trust=trust
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

    def _codecs(self, plan: Plan) -> list[codec.Codec]:
        """One for each bucket, or none at all."""
        coding = plan.coding
        if coding is None:
            return []
        by_bucket = [[tuple(self._trainable[slot.name].shape) for slot in bucket.slots] for bucket in self.buckets]
        pairs = zip(self.buckets, by_bucket, strict=True)
        return [codec.make(coding, bucket, shapes, device=self.device) for bucket, shapes in pairs]

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
        self._transport.recorder = recorder
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
        begin, waited = time.perf_counter(), self._transport.waiting_seconds
        sent = self._transport.sent_bytes
        samples = getattr(batch, "samples", None)
        self._transport.enter(_name(f"step {self.steps + 1}", samples))
        self._look_at_parameters()
        if not self._recorded:
            self._transport.agree()  # The first step also exchanges what is no sum.
        self._guard.begin()
        program = self.program_apart if (self.steps + 1) % self.plan.period else self.program
        self._runtime.run(program, cut(batch, self.plan.microbatches, self._ranks.device))
        totals = self._actions.totals
        assert totals is not None
        self._num_calls, self.steps = self._num_calls + 1, self.steps + 1
        if self._num_calls == 2 and self.device.type == "cpu":
            memory.give_back_freed_memory()
        skipped = self._guard.judge(self._actions, self.steps, samples)
        if not self._recorded and skipped is None:
            self._record(self._ranks.exchange(self._gradients.completion_order)[0], totals.count / self._sharing)
        return Metrics(
            loss=totals.loss / totals.count,
            samples=round(totals.samples),
            tokens=round(totals.tokens) or None,
            grad_norm=self._actions.grad_norm,
            seconds=time.perf_counter() - begin,
            waiting_seconds=self._transport.waiting_seconds - waited,
            sent_bytes=self._transport.sent_bytes - sent,
            skipped=skipped,
        )

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Metrics:
        """The loss of the global batch without training on it; NaN where it is empty everywhere. Collective."""
        begin, waited = time.perf_counter(), self._transport.waiting_seconds
        self._enter("evaluate()", getattr(batch, "samples", None))
        inputs, targets, samples, tokens = cut(batch, 1, self._ranks.device)[0]
        local = torch.zeros(4, dtype=torch.float64)
        if samples:
            with evaluating(self.model):
                loss = measure(self._loss(call(self.model, inputs), targets), samples)
            local = torch.tensor([loss.total.item(), loss.count, samples, tokens], dtype=torch.float64)
        total, count, samples, tokens = self._sum(local)
        return Metrics(
            loss=total / count if count else float("nan"),
            samples=round(samples),
            tokens=round(tokens) or None,
            grad_norm=None,
            seconds=time.perf_counter() - begin,
            waiting_seconds=self._transport.waiting_seconds - waited,
        )

    def sum(self, values: Tensor) -> list[float]:
        """A few float64 scalars [n ≤ 8], summed over the data ranks. Collective."""
        self._enter("sum()")
        return self._sum(values)

    def _sum(self, values: Tensor) -> list[float]:
        self._transport.measure(LOSS, values)
        return self._transport.measured(LOSS)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. Collective."""
        self._enter("exchange()")
        self._transport.agree()
        return self._ranks.exchange(value)

    @contextlib.contextmanager
    def edit(self) -> Iterator[nn.Module]:
        """Change weights by hand: inside the block they are yours, after it every rank has rank 0's. Collective."""
        self._enter("edit()")
        self._transport.agree()
        with torch.no_grad(), self._copies():
            yield self.model
        self._look_at_parameters()
        self._broadcast()
        if self._local is not None:
            self._local.begin()
        torch.autograd.graph.increment_version(list(self.model.parameters()))

    @contextlib.contextmanager
    def _copies(self) -> Iterator[None]:
        """Within: where weights exist once per host, all ranks but rank 0 have copies of their own."""
        if self._transport.weights is None:
            yield
            return
        views = {name: p.data for name, p in self._trainable.items()}
        if self.rank:
            for p in self._trainable.values():
                p.data = p.data.clone()
        self._ranks.exchange(None)  # all copies are made: rank 0 may write
        try:
            yield
        finally:
            if self.rank:
                for name, p in self._trainable.items():
                    p.data = views[name]

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Replace trainable weights, by name; the same values on every rank. Collective."""
        self._enter("put()")
        self._transport.agree()  # all are here: nobody reads weights any more
        if self._transport.writes:
            for name, value in values.items():
                self._trainable[name].copy_(value)
        if self._transport.weights is not None:
            self._ranks.exchange(None)
        torch.autograd.graph.increment_version(list(self._trainable.values()))

    def state_dict(self) -> dict[str, Any]:
        """All state by parameter name, independent of the mesh; tensors are copies. Collective.

        "model": name -> tensor; "optimizer": name -> key -> tensor in the parameter's shape or a scalar;
        "groups": options by group; "record": launch order and nominal count; "codec": name -> key -> [ranks, elements],
        what each rank's codec remembers; "outer": with local steps, the outer momentum by name. Then the optimizer's
        tensors are means over ranks, and TrainingError is raised between meetings.
        """
        self._enter("state_dict()")
        self._transport.agree()
        living = self.living_state()
        mine = {name: {k: _told(v) for k, v in state.items()} for name, state in living["optimizer"].items() if state}
        rows = self._ranks.exchange(mine) if self._split else [mine]
        states: dict[str, dict[str, Any]] = {name: {} for name in living["optimizer"]}
        for name, key, told in [(n, k, v) for row in rows for n, keys in row.items() for k, v in keys.items()]:
            if key not in states[name]:
                parts = living["optimizer"][name].get(key, [])
                states[name][key] = told if not isinstance(told, dict) else self._whole(name, parts, told["dtype"])
        model = {name: _copy(value) for name, value in self.model.state_dict().items()}
        outer = {name: value.clone() for name, value in living["outer"].items()}
        kept = {"codec": self.remembered.saved(), "outer": outer}
        return {**self._decisions(), "model": model, "optimizer": states, **kept}

    def _whole(self, name: str, parts: Sequence[Tensor], dtype: str) -> Tensor:
        """A tensor of the optimizer's state in its parameter's shape, from the shares of all ranks."""
        parameter = self._trainable[name]
        if not self._split:
            whole = torch.cat([part.clone() for part in parts])
            if self._local is not None:
                self._ranks.sum(whole)
                whole.div_(self.plan.dp)
            return whole.view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=getattr(torch, dtype), device=parameter.device)
        low = self.shares[name][0]
        for part in parts:
            whole[low : low + part.numel()] = part
            low += part.numel()
        self._ranks.sum(whole)
        return whole.view(parameter.shape)

    def living_state(self) -> dict[str, Any]:
        """`state_dict` without a copy: the optimizer's tensors are lists of consecutive flat stretches.

        Where optimizer states rest split these are this rank's only: `shares` says which elements they are. With local
        steps too: each rank has states of its own.
        """
        if not self.is_whole:
            got = f"the state after step {self.steps}, with local_steps = {self.plan.period}"
            need = "weights that all ranks have alike"
            after = -(-self.steps // self.plan.period) * self.plan.period
            raise TrainingError(Problem(got, need, f"after step {after}"))
        states = {
            slot.name: self._flat.stretches(bucket.index, slot.start, slot.stop)
            for bucket in self.buckets
            for slot in bucket.slots
        }
        outer = {} if self._local is None else self._local.momenta
        model = self.model.state_dict(keep_vars=True)
        return {**self._decisions(), "model": model, "optimizer": states, "outer": outer}

    @functools.cached_property
    def shares(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the elements [start, stop) of its flattened form whose optimizer state is this rank's."""
        result = {}
        for bucket in self.buckets:
            first, last = 0, bucket.size
            if self._split:
                first, last, _ = self._transport.own(bucket.index)
            for slot in bucket.slots:
                low, high = max(first, slot.start), min(last, slot.stop)
                result[slot.name] = (low - slot.start, max(low, high) - slot.start)
        return result

    @property
    def is_split(self) -> bool:
        """Whether optimizer states rest split over the data ranks."""
        return self._split

    def _decisions(self) -> dict[str, Any]:
        return {
            "groups": [{k: _copy(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "record": {"order": list(self._outline.order), "nominal_count": self._actions.nominal_count},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave, on this or another mesh. Collective."""
        self._enter("load_state_dict()")
        self._transport.agree()
        self._load_model(state["model"])
        for bucket in self.buckets:
            slots = [
                (slot.start, slot.stop, {k: _flat(v) for k, v in state["optimizer"][slot.name].items()})
                for slot in bucket.slots
            ]
            self._flat.load_state(bucket.index, slots)
        if self._local is not None:
            self._local.load(state.get("outer", {}))
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(options)
        record = state["record"]
        # The launch order is of use only where the buckets are the same; else this mesh records one of its own.
        if sorted(record["order"]) == list(range(len(self.buckets))):
            self._record(record["order"], record["nominal_count"])
        else:
            self._actions.nominal_count = record["nominal_count"]
        for name in self.remembered.living:
            self.remembered.put(name, state.get("codec", {}).get(name, {}))

    def _enter(self, call: str, samples: Stretch | None = None) -> None:
        self._transport.enter(_name(f"{call} after step {self.steps}", samples))

    @torch.no_grad()
    def _load_model(self, values: Mapping[str, Tensor]) -> None:
        own = self.model.state_dict(keep_vars=True)
        trained = {id(p): name for name, p in self._trainable.items()}
        # What is trained may exist once per host, and then one rank writes it; the rest is each rank's own.
        kept = {name: own[name].detach() if id(own.get(name)) in trained else value for name, value in values.items()}
        self.model.load_state_dict(kept)
        self.put({trained[id(p)]: values[name] for name, p in own.items() if id(p) in trained})

    def _look_at_parameters(self) -> None:
        """Raise TaskError where parameters are no longer what the buckets were made of."""
        problems = []
        moved = [name for name, p in self._trainable.items() if p.data_ptr() != self._homes[name]]
        if moved:
            got = (
                f"{moved[0]}{f' and {len(moved) - 1} more' if len(moved) > 1 else ''} with another storage than before"
            )
            need = "weights changed in place, and one TrainStep a model"
            problems.append(Problem(got, need, "p.copy_(…) inside step.edit(), or a new TrainStep"))
        if trainable_of(self.model).keys() != self._trainable.keys():
            problems.append(Problem("requires_grad was changed after the step was built", "a new TrainStep"))
        if problems:
            raise TaskError(problems, where="the model")

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

    def _broadcast(self) -> None:
        """Bring rank 0's weights and buffers to every rank."""
        ranks = self._ranks
        if self._transport.weights is not None:
            self._transport.spread()
        else:
            for flat in self._weights:
                ranks.broadcast(flat)
        trained = {id(p) for p in self._trainable.values()}
        rest = [p.data for p in self.model.parameters() if id(p) not in trained]
        for tensor in (*rest, *self.model.buffers()):
            ranks.broadcast(tensor)
        if self._transport.weights is not None:
            ranks.exchange(None)  # the hosts' first ranks have written: all may read


def _name(call: str, samples: Stretch | None) -> str:
    """A call, and its part of the feed's order where it is known: ranks may be as many steps on, and a batch apart."""
    return call if samples is None else f"{call}, {samples}"


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to be trained, by name, in order of definition; those of no elements have nothing to learn."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}


def compare(
    ranks: comm.Ranks,
    specs: Sequence[Spec],
    shapes: Mapping[str, list[int]],
    *,
    plan: Plan,
    options: Mapping[str, Any],
) -> None:
    """Raise PlanError unless every rank has the same parameters, plan and options. Collective."""
    mine = [f"{s.name} {shapes[s.name]} {s.dtype}, group {s.group}" for s in specs]
    mine += [f"{name} {value}" for name, value in options.items()]
    mine += plan.to_toml(defaults=True).splitlines()
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=16).hexdigest()
    if len(set(ranks.exchange(digest))) == 1:
        return
    everyone = ranks.exchange(mine)
    for rank, theirs in enumerate(everyone):
        for first, other in itertools.zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if first != other:
                problem = Problem(f"rank 0 has {first}, rank {rank} has {other}", "the same on every rank")
                raise PlanError(problem, where="the ranks")


def check(task: Task, plan: Plan) -> None:
    """Raise TaskError, PlanError or OptimizerError for what can be known of a task before processes are started."""
    model = outline(task)
    problems = model_problems(model, plan) + update_problems(plan, task.clip) + sync_problems(plan)
    if problems:
        raise PlanError(problems, where="the plan")
    comm.refuse_impossible(plan.transport, "cuda" if torch.cuda.is_available() else "cpu")
    refuse_optimizer(optim.build(task.optimizer, list(model.parameters())), plan)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _told(value: Any) -> Any:
    """What another rank must know of a value of the optimizer's state."""
    return {"dtype": str(value[0].dtype).removeprefix("torch.")} if isinstance(value, list) else value


def _flat(value: Any) -> Any:
    return value.reshape(-1) if isinstance(value, Tensor) else value


def _set_threads(ranks: comm.Ranks) -> None:
    # torch's own default is the number of physical cores: only another number was somebody's choice.
    defaults = {cores(), psutil.cpu_count(logical=False)}
    chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in defaults
    if ranks.world.local_size > 1 and not chosen:
        torch.set_num_threads(max(1, cores() // ranks.world.local_size))

"""Step runner: a batch through the checks, the layout of batches and the programs, to metrics.

whole forward  in place of a model's forward where ranks have one stage each: it computes all stages, and every rank
               has the outputs. So methods that call the model, such as `generate` of transformers, work as they are
Law: what raises on one rank before its program runs raises on all ranks.
Law: notes of the call are made of the traceback when an error passes; a step without one costs nothing more.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.pipeline.attach.axis import PipelineAxis
from fourfold.comm.reduce.scalars import NUM_LOSS_SCALARS
from fourfold.model.batch import NO_SAMPLES, Microbatch, num_targets, unpack_batch
from fourfold.model.loss_sum import Loss
from fourfold.model.model_call import eval_mode
from fourfold.model.objective import UserLoss
from fourfold.orders.sample_order import BatchRange
from fourfold.plan.damaged_samples import DamagedRecord, records_of_ranks
from fourfold.proof.digests.weights import BUFFERS, FROZEN, MASTER_WEIGHTS, WEIGHTS, ReplicatedTensor
from fourfold.step.assembly import Assembly
from fourfold.step.executor import Executor
from fourfold.step.step_checks import Skipped, sample_list
from fourfold.step.step_state import TOTALS, StepRequest, StepState, StepTotals, wait_totals
from fourfold.torch_kit import memory
from fourfold.torch_kit.tensor_tree import is_plain
from fourfold.words.argument_checks import format_argument
from fourfold.words.error_notes import add_notes, has_note, innermost_self, user_place
from fourfold.words.errors import Problem, SettingError, TaskError
from fourfold.words.program import LOSS

# ---- metrics --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The results of one step: global, the same on every rank, except the times, which are this rank's.

    loss             mean over all elements of the global batch
    samples          of the global batch
    tokens           of the global batch, padding included; None unless the inputs are a dict that shows them, with
                     `position_ids`, `positions`, `input_ids`, `tokens`, `inputs_embeds` or `labels` of two dims
    targets          elements of the targets of the global batch, ignored ones included; without targets, of the
                     `labels` in its dict; None if there are neither
    grad_norm        norm of the global gradient before clipping; None without `clip`, unless the loss is scaled. With
                     local steps: the root mean square of the ranks' own norms
    seconds          duration of the step
    waiting_seconds  part of `seconds` spent reducing gradients and waiting for other ranks
    data_seconds     how long this rank waited for the batch before the step; None if no feed has read the batch
    sent_bytes       gradients, weights and activations that this rank has sent to other hosts, or over gloo or NCCL;
                     collectives are counted as for a ring
    skipped          why the step changed nothing, if `skip_nan` skipped it; else None
    loss_scale       what the loss was multiplied by for backward; None without `precision = "fp16"`
    out_of_turn      unshards of buckets that the program did not have, where it had others: weights used in another
                     order than before. They are correct, and the ranks wait for each other once more
    overflowed       the scaled gradient was not finite: the step has changed nothing, and the next scale is half
    damaged          the samples that are missing from the global batch because they cannot be read
    """

    loss: float
    samples: int
    tokens: int | None
    grad_norm: float | None
    seconds: float
    waiting_seconds: float
    sent_bytes: float = 0.0
    skipped: Skipped | None = None
    loss_scale: float | None = None
    out_of_turn: int = 0
    overflowed: bool = False
    damaged: tuple[DamagedRecord, ...] = ()
    data_seconds: float | None = None
    targets: int | None = None


# ---- notes of a call -----------------------------------------------------------------------------------------------

MAX_EXTRA = 100  # characters of what a module says of itself
MAX_SAMPLES = 8  # any of a batch may be the cause: these find the rest, by the position in the epoch


def noting_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method(self, batch)` of what has a `model`: an error of model or loss names the module, batch and samples."""

    @functools.wraps(method)
    def call(self: Any, batch: Any, **options: Any) -> Any:
        try:
            return method(self, batch, **options)
        except Exception as error:
            failed = innermost_self(error, (nn.Module, UserLoss))
            if failed is not None:
                add_notes(error, [f"  in {_describe(failed, self.model)}"])
            if has_note(error):
                add_notes(error, _describe_batch(batch))
            raise

    return call


def _describe(failed: nn.Module | UserLoss, model: nn.Module) -> str:
    if not isinstance(failed, nn.Module):
        return f"the loss, {failed}"
    name = next((name for name, each in model.named_modules() if each is failed), None)
    text = f"{type(failed).__name__}({failed.extra_repr()[:MAX_EXTRA]}){user_place(type(failed).forward)}"
    if name is None:
        return text
    return f"module {name}, {text}" if name else f"the model, {text}"


def _describe_batch(batch: Any) -> list[str]:
    """Shapes and dtypes of a rank's batch, and its samples if a feed has read it."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    named = zip(("inputs", "targets"), batch, strict=True) if is_pair else [("inputs", batch)]
    lines = [f"  batch: {', '.join(_describe_values(name, values) for name, values in named)}"]
    samples = getattr(batch, "samples", None)
    if samples is not None:
        lines.append(f"  samples: {sample_list(samples.sample_ids(), limit=MAX_SAMPLES)} ({samples})")
    return lines


def _describe_values(name: str, values: Any) -> str:
    """The dtype and shape of each tensor: "inputs float32 [32, 64]"."""
    if isinstance(values, Mapping):
        return ", ".join(_describe_values(f"{name}[{key!r}]", each) for key, each in values.items())
    if isinstance(values, Tensor):
        return f"{name} {str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    return f"{name} {type(values).__name__}"


# ---- runner --------------------------------------------------------------------------------------------------------


class ForwardRun(NamedTuple):
    """This rank's part of a batch, the model's outputs, and the loss."""

    part: Microbatch
    outputs: Any
    loss: Loss


class StepRunner:
    """The training steps and forwards of one rank."""

    def __init__(self, model: nn.Module, assembly: Assembly) -> None:
        self.model, self._assembly = model, assembly
        self._parts, self._calls, self._programs = assembly.parts, assembly.calls, assembly.programs
        self._checks, self._weights = assembly.checks, assembly.state.weights
        self.executor = Executor(assembly.timing)
        self.is_stop_requested = False
        """Whether this rank wants to stop the run."""
        self.totals = StepTotals(*[0.0] * len(TOTALS))
        """Of the last step."""

    @noting_batch
    def train(self, batch: Any) -> Metrics:
        """See `TrainStep.__call__`."""
        begin, meter = time.perf_counter(), self._parts.meter
        waited, sent, out_of_turn = meter.waiting_seconds, meter.sent_bytes, self._num_out_of_turn
        samples, damaged = getattr(batch, "samples", None), getattr(batch, "damaged", ())
        data_seconds = getattr(batch, "data_seconds", None)
        batch, problem = self.begin_step(batch)
        loss_scale = self._parts.loss_scale.reported
        number, count = self._calls.num_steps + 1, self._assembly.split.num_microbatches
        layout = self._assembly.batches.microbatches(batch, count, step=number - 1, samples=samples)
        with self._leaving_after_error(), layout as microbatches:
            measures_count = self._measures_count
            nominal = None if measures_count else self._programs.nominal_count
            request = StepRequest(microbatches, nominal, self.is_stop_requested, problem, damaged, num_targets(batch))
            step = StepState(self._parts, request)
            self.executor.train(self._programs.of_step(number, measures_count=measures_count), step)
        step = self._assembly.timing.newest_ended(step)
        self.totals = totals = step.read_totals()
        skipped = self._finish_step(step, samples)
        return Metrics(
            loss=totals.loss / totals.count if totals.count else float("nan"),
            **self._counts(totals),
            grad_norm=step.grad_norm,
            seconds=time.perf_counter() - begin,
            waiting_seconds=meter.waiting_seconds - waited,
            sent_bytes=meter.sent_bytes - sent,
            skipped=skipped,
            loss_scale=loss_scale,
            out_of_turn=self._num_out_of_turn - out_of_turn,
            overflowed=step.overflowed,
            damaged=self._gather_damaged(totals, step.request.damaged),
            data_seconds=data_seconds,
        )

    def _counts(self, totals: StepTotals) -> dict[str, Any]:
        """What a global batch has of each; ranks with shards of the tokens have all counted their samples whole."""
        num_shards = self._assembly.split.num_token_shards
        samples, targets = round(totals.num_samples / num_shards), round(totals.num_targets / num_shards)
        return {"samples": samples, "tokens": round(totals.num_tokens) or None, "targets": targets or None}

    @property
    def _measures_count(self) -> bool:
        """Whether the next step measures its nominal count though it knows one: gradients must have their true size in
        backward. With one microbatch the measure is the step's own count.
        """
        return self._parts.objective.is_scale_dependent and self._assembly.split.num_microbatches == 1

    @contextlib.contextmanager
    def _leaving_after_error(self) -> Iterator[None]:
        """Within, this rank ends with an error for the others too: they may wait for what it would have sent."""
        try:
            yield
        except BaseException:
            self._calls.world.leave()
            raise

    def begin_step(self, batch: Any) -> tuple[Any, Problem | None]:
        """Compare what ranks begin a step with. Returns the batch, without samples if ranks differ. Collective."""
        self._check_batch(f"step {self._calls.num_steps + 1}", batch)
        has_pending = self._assembly.timing.has_pending
        self._checks.before_step(batch, compares_all=not self._programs.has_record, has_pending_updates=has_pending)
        batch, problem = self._assembly.batches.compare(batch)
        self.dry_run(batch, training=True)
        self._checks.save_buffers()
        return batch, problem

    def _check_batch(self, call: str, batch: Any) -> None:
        """Raise TaskError for what is no batch, and DivergenceError on the ranks that have one."""
        try:
            unpack_batch(batch)
        except TaskError as error:
            self._calls.raise_after_mismatch(f"{call}, whose batch is refused", error)

    def _gather_damaged(self, totals: StepTotals, own: Sequence[DamagedRecord]) -> tuple[DamagedRecord, ...]:
        """The damaged samples of the global batch, the same on every rank. Collective if there is one."""
        if not totals.num_damaged:
            return ()
        return records_of_ranks(self._calls.world.all_gather_json(list(own)))

    def _finish_step(self, step: StepState, samples: BatchRange | None) -> Skipped | None:
        """After a step: count it, check it, and keep what later steps need of it. Returns why it was skipped."""
        programs, totals = self._programs, step.read_totals()
        if self._checks.num_calls == 0:
            self._parts.objective.finish_first_step()
        skipped = self._checks.after_step(step, samples)
        memory.tune_freed_memory(self._parts.device, self._checks.num_calls)
        self._checks.compare_replicas_if_due(self.replicated_tensors())
        self._learn_use_orders()
        if not programs.has_record:
            # Without elements there is no estimate.
            programs.nominal_count = step.nominal_count if totals.count else None
            if skipped is None:
                # By stage: the order in which the buckets of its first rank became complete.
                stage = self._parts.stage
                own = [(stage.pp_index, stage.gradients.countdown.completion_order)]
                by_rank = self._calls.world.all_gather_json(own)
                orders = {index: order for each in reversed(by_rank) for index, order in each}
                self.set_record(orders, self._parts.local.scope.nominal_count(totals.count))
        return skipped

    @property
    def _num_out_of_turn(self) -> int:
        return self._weights.storage.num_out_of_turn

    def _learn_use_orders(self) -> None:
        """What phases have unsharded, the programs have from now on; a use out of turn changes them."""
        self._programs.set_use_orders({self._parts.stage.pp_index: self._weights.storage.use_orders()})

    @noting_batch
    @torch.no_grad()
    def evaluate(self, batch: Any) -> Metrics:
        """See `TrainStep.evaluate`."""
        begin, meter = time.perf_counter(), self._parts.meter
        waited, damaged = meter.waiting_seconds, getattr(batch, "damaged", ())
        self._check_batch(f"evaluate() after step {self._calls.num_steps}", batch)
        self._checks.before_evaluation("evaluate()", getattr(batch, "samples", None))
        self._assembly.timing.flush()
        batch, problem = self._assembly.batches.compare(batch)
        self.dry_run(batch)
        with self._leaving_after_error(), self._microbatch(batch) as part, eval_mode(self.model):
            request = StepRequest([part], batch_mismatch=problem, damaged=damaged, num_targets=num_targets(batch))
            step = StepState(self._parts, request)
            self.executor.evaluate(self._programs.evaluation, step)
        self._learn_use_orders()
        totals = wait_totals(step)
        return Metrics(
            loss=totals.loss / totals.count if totals.count else float("nan"),
            **self._counts(totals),
            grad_norm=None,
            seconds=time.perf_counter() - begin,
            waiting_seconds=meter.waiting_seconds - waited,
            damaged=self._gather_damaged(totals, damaged),
        )

    @noting_batch
    def dry_run(self, batch: Any, *, training: bool = False) -> None:
        """See `TrainStep.dry_run`."""
        pipeline = self._assembly.pipeline
        pipeline.skeleton.training = self.model.training
        if self._assembly.proof.is_needed(training=training):
            self._calls.checker.check_same()
            pipeline.follow_modes(self.model)
            self._assembly.proof.run(batch, training=training)
            self._weights.edits.accept_edits()

    @contextlib.contextmanager
    def _microbatch(self, batch: Any) -> Iterator[Microbatch]:
        """This rank's part of a batch that has been compared; inside, attention reaches all of its tokens."""
        samples = getattr(batch, "samples", None)
        with self._assembly.batches.microbatches(batch, 1, step=self._calls.num_steps, samples=samples) as (part,):
            yield part

    @noting_batch
    @torch.no_grad()
    def run_forward(self, batch: Any) -> ForwardRun | None:
        """See `TrainStep.run_forward`."""
        self._checks.before_evaluation("run_forward()")
        self._assembly.timing.flush()
        if batch is None:
            self._calls.checker.meet("no batch")
        batch, problem = (None, None) if batch is None else self._assembly.batches.compare(batch)
        if problem is not None:
            raise TaskError(problem, where="the batch")
        layout = contextlib.nullcontext(NO_SAMPLES) if batch is None else self._microbatch(batch)
        with self._leaving_after_error(), layout as part:
            step = StepState(self._parts, StepRequest([part]))
            self.executor.evaluate(self._programs.forward_only, step)
        self._learn_use_orders()
        return ForwardRun(part, step.outputs[0], step.losses[0]) if 0 in step.losses else None

    def infer(self, inputs: Any) -> Any:
        """The model's outputs, on this rank only, while weights are unsharded and no gradient is recorded.

        With several stages on their ranks together. Raises TaskError if these have other inputs.
        """
        self._calls.checker.meet("a forward")
        self._assembly.pipeline.check_same_inputs(inputs)
        part = Microbatch(inputs, None, num_samples=1, num_tokens=0)  # nothing is summed: the counts are not read
        step = StepState(self._parts, StepRequest([part]))
        with self._leaving_after_error():
            self.executor.infer(self._programs.inference, step)
        learn = functools.partial(self._assembly.pipeline_check.learn_outputs, inputs)
        return self._assembly.pipeline.last_outputs(step.outputs.get(0), learn)

    def all_reduce(self, values: Tensor) -> list[float]:
        """See `TrainStep.all_reduce`."""
        if not isinstance(values, Tensor) or values.is_complex():
            got = "values of complex numbers" if isinstance(values, Tensor) else format_argument("values", values)
            problem = Problem(got, "a tensor of real numbers", "torch.tensor([…]), or torch.view_as_real(…)")
            call = f"all_reduce() of invalid values after step {self._calls.num_steps}"
            self._calls.raise_after_mismatch(call, SettingError(problem, where="the arguments of all_reduce()"))
        self._calls.begin(f"all_reduce() of {values.numel()} values")
        sums: list[float] = []
        # split() of no values gives one empty chunk: the ranks are still compared.
        for chunk in values.detach().double().flatten().split(NUM_LOSS_SCALARS):
            self._parts.scalars.all_reduce_async(LOSS, chunk)
            sums += self._parts.scalars.wait(LOSS)
        return sums

    def set_record(self, launch_orders: Mapping[int, Sequence[int]], count: float | None) -> None:
        """Fix the launch orders, by stage, and the nominal count for all later steps, the same on every rank."""
        programs = self._programs
        before = programs.nominal_count
        if before is not None and count is not None and before != count:
            # Residuals were divided by the previous nominal count.
            self._assembly.state.codec_state.scale_residuals(before / count)
        programs.set_record(launch_orders, count)
        self._parts.stage.gradients.set_launch_order(programs.reduction_order)

    def replicated_tensors(self) -> Iterator[ReplicatedTensor]:
        """The weights in this rank's own memory, and the buffers that it saves, which its data ranks have too."""
        mesh, axis = self._calls.world.along("cp", "tp"), self._assembly.pipeline
        saved = self._weights.model_state_dict()
        for name, buffer in self.model.named_buffers():
            if name in saved and axis.is_own(name):
                yield ReplicatedTensor(BUFFERS, name, 0, buffer, mesh.rank)
        holders = {WEIGHTS: self._weights.storage, MASTER_WEIGHTS: self._weights.master_weights}
        for name, parameter in self.model.named_parameters():
            shard = self._assembly.tensor.shard_number(name)
            if name not in self._weights.trainable:
                yield ReplicatedTensor(FROZEN, name, 0, parameter, shard)
                continue
            for kind, holder in holders.items():
                yield from (
                    ReplicatedTensor(kind, name, part.start, part.tensor, shard) for part in holder.held_parts(name)
                )


class AsynchronousRunner(StepRunner):
    """The steps of an asynchronous schedule. While batches are in flight, a step compares nothing with other stages:
    they are in other steps.
    """

    @property
    def _measures_count(self) -> bool:
        return False  # ranks are in several steps at once

    def begin_step(self, batch: Any) -> tuple[Any, Problem | None]:
        if not self._assembly.timing.has_pending:
            if not self._programs.has_record:
                # A loaded state with other buckets has set it. The first step's program measures it again, and drains.
                self._programs.nominal_count = None
            return super().begin_step(batch)
        self._checks.check_unchanged(has_pending_updates=True)
        return batch, None


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
    if not pipeline.known.outputs:
        need = "a batch before, which shows each stage what the others return"
        raise SettingError(Problem("step.inference() before the first step", need, "step.dry_run(batch)"))
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

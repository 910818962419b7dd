"""Batch statistics: of which samples a batch normalization takes them, while a step runs the user's model.

own      each rank's forward has its own statistics: torch's normalization as it is
synced   statistics of the samples of all ranks, by `model/sync_batch_norm.py`
frozen   in a dry run: running statistics in place of the batch's, so that the samples of a batch do not depend on each
         other, and any other coupling is seen
handler  computes a call of F.batch_norm in training mode, in place of torch
frozen   in evaluation mode, with running statistics: each sample is normalized independently
Law: outside of forwards and backwards of a step the user's modules are as the user made them: their classes, their
state_dict, their forward. Inside, an instance has a `forward` of its own, which calls the user's.
Law: in a loop of the user's, which calls the model when it likes, a training call has the statistics of all ranks from
`begin` to `remove`, or it raises: in a forward, under `no_sync()`, in a recomputation. A copy of the model is plain.

A function mode inside that forward finds the call, so subclasses with a forward of their own are synced too; modes are
off in backward, but a checkpoint's second forward goes through the instance, and so does `torch.func.functional_call`.
Law: a normalization that was frozen when the step was built is frozen in each step, or the step is refused. Where the
ranks share statistics, it may change its mode, on all ranks together.
"""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.comm.channel import make_channel
from fourfold.comm.communicator import Communicator
from fourfold.comm.meter import CommMeter
from fourfold.model.objective import Objective
from fourfold.model.sync_batch_norm import (
    BACKWARD_END,
    FORWARD_END,
    NormCall,
    StatisticsExchange,
    sync_batch_norm,
)
from fourfold.plan.batch_norm import FIRST_LENGTH, SYNC
from fourfold.torch_kit.torch_private import BatchNormBase, base_batch_norm_forward
from fourfold.words.errors import Problem, TaskError, TrainingError

# ---- batch norms ---------------------------------------------------------------------------------------------------


def uses_batch_stats(norm: nn.Module) -> bool:
    """Whether a batch normalization, in its present mode, uses the statistics of the batch."""
    return isinstance(norm, BatchNormBase) and (norm.training or norm.running_mean is None)


def is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of these, or is in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def frozen_norms(model: nn.Module) -> list[tuple[str, BatchNormBase]]:
    """The batch normalizations of a model that are frozen now, by name."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, BatchNormBase) and not uses_batch_stats(m)]


class NormWatch:
    """What is checked of the normalizations of a model around its steps."""

    def check(self) -> None:
        """Raise TaskError if there are problems."""
        if problems := self.problems():
            raise TaskError(problems, where="the model")

    def problems(self) -> list[Problem]:
        """What is wrong with their present modes."""
        return []

    def call_text(self, *, in_training: bool) -> str:
        """What a call says of their modes, which ranks must then have compared before the call's forward; or ""."""
        return ""


class FrozenBatchNorms(NormWatch):
    """Batch normalizations that must stay frozen, because a batch is split into `num_parts` parts."""

    def __init__(self, frozen: Sequence[tuple[str, BatchNormBase]], num_parts: int) -> None:
        self._frozen, self._num_parts = frozen, num_parts

    def problems(self) -> list[Problem]:
        """Which of them are not frozen any more."""
        names = [name or "the model" for name, norm in self._frozen if norm.training]
        if not names:
            return []
        shown = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        got = f"batch normalization at {shown} in training mode, whose statistics were frozen at the build"
        need = f"no statistics over a batch that is split into {self._num_parts} parts"
        attempt = "norm.eval() after each model.train(), or a train() of the model that keeps its norms frozen"
        return [Problem(got, need, attempt)]


class SyncBatchNorms(NormWatch):
    """Batch normalizations whose statistics are of all ranks: they must be in the same modes on all ranks.

    Other pipeline stages have the modules `elsewhere`: there, this rank has no running statistics.
    """

    def __init__(self, model: nn.Module, elsewhere: Sequence[str] = ()) -> None:
        self._model, self._elsewhere = model, elsewhere

    def call_text(self, *, in_training: bool) -> str:
        """In an evaluation only norms without running statistics need other ranks."""
        norms = {name: module for name, module in self._model.named_modules() if isinstance(module, BatchNormBase)}
        if not in_training:
            return ", with statistics of the batch" if not all(map(self._has_running_stats, norms.items())) else ""
        frozen = [
            name or "the model"
            for name, norm in norms.items()
            if not norm.training and self._has_running_stats((name, norm))
        ]
        if not frozen:
            return ", with statistics of the batch"
        digest = zlib.crc32(" ".join(frozen).encode())
        shown = f"{', '.join(frozen[:3])}{f' … ({len(frozen)} of them, checksum {digest:08x})' if frozen[3:] else ''}"
        return f", with frozen batch normalization at {shown}"

    def _has_running_stats(self, named: tuple[str, BatchNormBase]) -> bool:
        name, norm = named
        return norm.track_running_stats if is_inside(name, self._elsewhere) else norm.running_mean is not None


# ---- statistics ----------------------------------------------------------------------------------------------------


class BatchNormCall(NamedTuple):
    """The arguments of F.batch_norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


Handler = Callable[[BatchNormCall], Tensor]


class BatchStatistics:
    """How the forwards and backwards of one rank take batch statistics: by itself, so it needs no other."""

    def in_forward(self, *, has_samples: bool) -> AbstractContextManager[None]:
        """Within, the model runs forward with all ranks."""
        return contextlib.nullcontext()

    def in_backward(self) -> AbstractContextManager[None]:
        """Within, the backward of that forward runs."""
        return contextlib.nullcontext()

    def in_dry_run(self) -> AbstractContextManager[None]:
        """Within, this rank tries the model by itself."""
        return contextlib.nullcontext()

    def needs_empty_ranks(self) -> bool:
        """Whether a rank without samples must run forward and backward with the others."""
        return False

    def run_empty(self, model: nn.Module, objective: Objective) -> Tensor | None:
        """The forward of a rank without samples. Returns a loss for `in_backward`, if other ranks need its backward."""
        objective.dummy_forward(model)
        return None

    def evaluate_empty(self, model: nn.Module, objective: Objective) -> None:
        """The same in an evaluation."""

    def evaluates_together(self) -> bool:
        """Whether ranks need each other in an evaluation, in the present modes of their norms."""
        return False


class SyncedStatistics(BatchStatistics):
    """The ranks of `exchange` run each forward together."""

    def __init__(
        self,
        model: nn.Module,
        exchange: StatisticsExchange,
        *,
        skeleton: nn.Module | None = None,
        elsewhere: Sequence[str] = (),
    ) -> None:
        """`skeleton`: what dry runs call; None: the model. `elsewhere`: modules that other pipeline stages have."""
        self._model, self._exchange, self._elsewhere = model, exchange, elsewhere
        self._skeleton = model if skeleton is None else skeleton

    def in_forward(self, *, has_samples: bool) -> AbstractContextManager[None]:
        self._exchange.has_samples = has_samples
        return self._together(FORWARD_END)

    def in_backward(self) -> AbstractContextManager[None]:
        return self._together(BACKWARD_END)

    @contextlib.contextmanager
    def _together(self, end: int) -> Iterator[None]:
        norms = batch_norms(self._model, self._elsewhere)
        if not self._model.training and not self.evaluates_together():
            yield
            return
        self._exchange.begin([name for name, _ in norms])
        with intercept_batch_norm([Synced(norm, n, self._exchange) for n, (_, norm) in enumerate(norms)]):
            yield
        self._exchange.end(end)

    def in_dry_run(self) -> AbstractContextManager[None]:
        return frozen_statistics(self._skeleton)

    def needs_empty_ranks(self) -> bool:
        return True

    def run_empty(self, model: nn.Module, objective: Objective) -> Tensor | None:
        return objective.dummy_loss(model)

    def evaluate_empty(self, model: nn.Module, objective: Objective) -> None:
        if self.evaluates_together():
            objective.dummy_forward(model)

    def evaluates_together(self) -> bool:
        # Norms with running statistics need no other rank.
        return any(uses_batch_stats(norm) for _, norm in batch_norms(self._model, self._elsewhere))


def make_exchange(world: Communicator, meter: CommMeter, *, transport: str) -> StatisticsExchange:
    """Of all ranks that have samples. Collective. `transport`: the plan's."""
    rows = make_channel(
        world.along("dp", "cp"),
        "batch norm",
        meter,
        choice=transport,
        may_cross_hosts=True,
        first_length=FIRST_LENGTH,
    )
    return StatisticsExchange(rows, world.device)


def batch_norms(model: nn.Module, elsewhere: Sequence[str] = ()) -> list[tuple[str, BatchNormBase]]:
    """The batch normalizations of a model, by name, but for those in these modules."""
    return [
        (name or "the model", norm)
        for name, norm in model.named_modules()
        if isinstance(norm, BatchNormBase) and not is_inside(name, elsewhere)
    ]


def own_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Within, each SyncBatchNorm is a plain one, of this rank's samples: torch's own needs GPUs."""
    norms = [norm for _, norm in batch_norms(model) if isinstance(norm, nn.SyncBatchNorm)]
    return intercept_batch_norm([_Intercepted(norm, lambda call: F.batch_norm(*call)) for norm in norms])


def frozen_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Within, each batch normalization of a model normalizes by its running statistics, and keeps them."""
    return intercept_batch_norm([_Intercepted(norm, _normalize_frozen) for _, norm in batch_norms(model)])


def _normalize_frozen(call: BatchNormCall) -> Tensor:
    """By running statistics; without them, by those of a standard normal distribution."""
    x, mean, variance = call.input, call.running_mean, call.running_var
    mean = x.new_zeros(x.shape[1]) if mean is None else mean
    variance = x.new_ones(x.shape[1]) if variance is None else variance
    return F.batch_norm(x, mean, variance, call.weight, call.bias, eps=call.eps)


# ---- interception ---------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Passes calls of F.batch_norm in training mode to a handler."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm and (call := BatchNormCall(*args, **kwargs or {})).training:
            return self._handler(call)
        return func(*args, **kwargs or {})


class _Intercepted:
    """The forward of a norm, whose call of F.batch_norm goes to a handler."""

    def __init__(self, norm: BatchNormBase, handler: Handler) -> None:
        self.norm, self._handler = norm, handler
        self._forward: Callable[..., Any] = norm.forward
        if type(norm).forward is nn.SyncBatchNorm.forward:
            self._forward = functools.partial(base_batch_norm_forward, norm)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Mode(self._handler):
            return self._forward(*args, **kwargs)


class Synced(_Intercepted):
    """The forward of a norm, with statistics of all ranks. `number`: of the norm in the model."""

    def __init__(self, norm: BatchNormBase, number: int, exchange: StatisticsExchange) -> None:
        super().__init__(norm, self.normalize)
        self._number, self._exchange = number, exchange

    def normalize(self, call: BatchNormCall) -> Tensor:
        """With statistics of all ranks."""
        norm_call = NormCall(self._exchange, self._number, call.running_mean, call.running_var, call.momentum, call.eps)
        return sync_batch_norm(call.input, call.weight, call.bias, norm_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracked = self.norm.num_batches_tracked
        before = None if tracked is None or self._exchange.has_samples else tracked.clone()
        outputs = super().__call__(*args, **kwargs)
        if tracked is not None and before is not None and not self._exchange.count:
            tracked.copy_(before)  # no rank has samples: one device would not run forward
        return outputs


@contextlib.contextmanager
def intercept_batch_norm(forwards: Sequence[_Intercepted]) -> Iterator[None]:
    """Within, these norms have these forwards."""
    before = [vars(each.norm).get("forward") for each in forwards]
    for each in forwards:
        vars(each.norm)["forward"] = each
    try:
        yield
    finally:
        for each, forward in zip(forwards, before, strict=True):
            if forward is None:
                vars(each.norm).pop("forward", None)
            else:
                vars(each.norm)["forward"] = forward


# ---- statistics in a loop of the user's -----------------------------------------------------------------------------


class LoopStatistics:
    """How the norms of a model take batch statistics while the user's loop calls it: here a rank needs no other."""

    def begin(self) -> None:
        """From now on the norms take them so."""

    def end_backward(self) -> None:
        """A backward that reduces has ended on this rank. Raises DivergenceError if another rank is elsewhere."""

    def check(self) -> None:
        """Raise TaskError if a norm of the model takes them otherwise."""

    def check_join(self) -> None:
        """Raise TrainingError if ranks cannot have different numbers of batches."""

    def remove(self) -> None:
        """From now on the norms are as the user made them."""


class SyncedInLoop(LoopStatistics):
    """The ranks of `exchange` call each norm together."""

    def __init__(self, model: nn.Module, exchange: StatisticsExchange) -> None:
        self._model, self._exchange = model, exchange
        self._forwards: dict[BatchNormBase, SyncedInTraining] = {}
        self._interception: AbstractContextManager[None] = contextlib.nullcontext()

    def begin(self) -> None:
        norms = batch_norms(self._model)
        self._exchange.begin([name for name, _ in norms])
        self._forwards = {
            norm: SyncedInTraining(norm, n, self._exchange, self._model) for n, (_, norm) in enumerate(norms)
        }
        self._interception = intercept_batch_norm(list(self._forwards.values()))
        self._interception.__enter__()

    def end_backward(self) -> None:
        self._exchange.end(BACKWARD_END)

    def check(self) -> None:
        others = [
            name for name, norm in batch_norms(self._model) if uses_batch_stats(norm) and not self._is_synced(norm)
        ]
        if not others:
            return
        shown = f"{', '.join(others[:3])}{' …' if others[3:] else ''}"
        got = f"batch normalization at {shown}, which is new, or has another forward, since the optimizer was wrapped"
        need = f"with {SYNC} the norms that the model had then"
        raise TaskError(
            Problem(got, need, "changing the model first, and wrapping the optimizer then"), where="the model"
        )

    def _is_synced(self, norm: BatchNormBase) -> bool:
        return norm in self._forwards and vars(norm).get("forward") is self._forwards[norm]

    def check_join(self) -> None:
        got = f"join() with {SYNC}"
        need = "ranks that call each norm together: a rank that has run out of batches calls none"
        attempt = "as many batches on every rank, as ff.shard(loader) gives; or GroupNorm"
        raise TrainingError(Problem(got, need, attempt))

    def remove(self) -> None:
        self._interception.__exit__(None, None, None)
        self._interception = contextlib.nullcontext()


class SyncedInTraining(Synced):
    """The forward of a norm, with statistics of all ranks while it or the model is in training mode.

    As with SyncBatchNorm, an evaluation needs no other rank: some loops evaluate on one.
    """

    def __init__(self, norm: BatchNormBase, number: int, exchange: StatisticsExchange, model: nn.Module) -> None:
        super().__init__(norm, number, exchange)
        self._model, self._own_forward = model, norm.forward

    def normalize(self, call: BatchNormCall) -> Tensor:
        if self.norm.training or self._model.training:
            return super().normalize(call)
        return F.batch_norm(*call)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _itself, (self._own_forward,)  # a copied or pickled model is a plain one


def _itself(forward: Any) -> Any:
    return forward

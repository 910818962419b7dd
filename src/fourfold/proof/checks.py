"""Proof: on the first batch, before a weight changes, that the laid-out model computes what one device would.

check    a question that a batch answers, such as whether the tensor ranks together compute what the whole model does
report   what one rank has found, as JSON; all ranks judge the reports of all
learned  what a check has shown, as JSON. It is kept with the state of a run: one that goes on with the same model,
         code, plan, packages and kind of batch takes it over and computes nothing
strictest  the configuration that proves most; a dry run falls back on the next one where a configuration is unavailable
Law: TaskError is raised on every rank or on none. An exception of a rank's own model is raised on that rank, and a
TaskError on the others.
Law: all ranks run the same configuration, so its memory must be there on every one of them.
Law: on exit, every attribute of every module has its value from before, and so have the contents of dicts, lists and
plain tensors among them.

A model may cache tensors in attributes, such as tables of positions. In a dry run they would be made in float64.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn

from fourfold.comm.communicator import Communicator
from fourfold.environment.standard_streams import print_stderr
from fourfold.proof.digests.table import digest
from fourfold.proof.weight_write_check import is_identical
from fourfold.torch_kit import memory
from fourfold.words.errors import FourfoldError, Problem, TaskError

# ---- preserving a module --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def preserve_module(model: nn.Module) -> Iterator[None]:
    """Within, forwards and backwards of the model leave no trace; its gradients are None."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    values = [value for each in attributes for value in each.values()]
    contents = [(value, value.copy()) for value in values if isinstance(value, dict | list) and hasattr(value, "copy")]
    tensors = [(value, value.detach().clone()) for value in values if _is_plain(value)]
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        for container, before in contents:
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)
        for tensor, before in tensors:
            if not is_identical(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _is_plain(value: Any) -> bool:
    """Whether this is a tensor with numbers of its own: neither of a device without memory, nor of a class that stands
    in for one."""
    return type(value) is Tensor and value.layout is torch.strided and value.device.type != "meta"


# ---- configuration -------------------------------------------------------------------------------------------------

_WEIGHTS = {"free": "random weights", "near": "weights near the model's own", "own": "the model's own weights"}


class CheckConfig(NamedTuple):
    """The dtype (None: the model's), the weights (a key of `_WEIGHTS`), and whether gradients are compared."""

    dtype: torch.dtype | None
    weights: str
    has_gradients: bool

    def __str__(self) -> str:
        dtype = "the model's own dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"in {dtype}, with {_WEIGHTS[self.weights]}{'' if self.has_gradients else ', without gradients'}"


STRICTEST_SEQUENCE_CHECK = CheckConfig(torch.float64, "free", True)
SEQUENCE_CHECKS = (STRICTEST_SEQUENCE_CHECK, CheckConfig(torch.float64, "near", True), CheckConfig(None, "free", True))
WEAKEST_SEQUENCE_CHECK = CheckConfig(None, "own", False)
STRICTEST_LOSS_CHECK = CheckConfig(torch.float64, "near", True)
LOSS_CHECKS = (STRICTEST_LOSS_CHECK, CheckConfig(torch.float64, "own", True), CheckConfig(None, "own", True))


class CheckUnavailable(Exception):
    """A model cannot be checked with one configuration. Another one may work."""


class MemoryFit(NamedTuple):
    """Whether weights and gradients of the dry run fit into memory: in float64, and in the model's dtype."""

    fits_float64: bool = True
    fits_model_dtype: bool = True


def find_memory_fit(
    model: nn.Module, device: torch.device, *, num_local_ranks: int, num_activations: int = 0
) -> MemoryFit:
    """Whether a dry run fits into the free memory of this device, which `num_local_ranks` ranks share.

    `num_activations` is how many numbers autograd keeps of a forward.
    """
    elements = sum(p.numel() for p in model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # The weights and their gradients.
    float64_bytes = 2 * 8 * elements + 8 * num_activations
    return fit_of_bytes(float64_bytes, 2 * weight_bytes, device, num_local_ranks=num_local_ranks)


def fit_of_bytes(
    float64_bytes: int, model_dtype_bytes: int, device: torch.device, *, num_local_ranks: int
) -> MemoryFit:
    """Whether so many bytes of each rank fit into the free memory of this device, which `num_local_ranks` share."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu":
        free = psutil.virtual_memory().available
    else:
        return MemoryFit()
    return MemoryFit(float64_bytes * num_local_ranks <= free, model_dtype_bytes * num_local_ranks <= free)


# ---- checks --------------------------------------------------------------------------------------------------------


QUIET_SECONDS = 2.0
Report = dict[str, Any]
Learned = Mapping[str, Any]


class Check(Protocol):
    """A question.

    claim  what it shows, as the words behind "checking that"
    phase  under which weights are gathered for it, where they rest split; None: they are not
    """

    claim: str
    phase: str | None

    def is_needed(self, *, training: bool) -> bool:
        """Whether no batch has answered it yet."""
        ...

    def memory_fits(self) -> Sequence[bool]:
        """Which ways of checking fit into this rank's memory; `inspect` gets those that fit on all."""
        ...

    def inspect(self, batch: Any, fits: Sequence[bool], *, training: bool) -> Report:
        """What this rank finds. The model may be called. May raise, also what the model raises."""
        ...

    def judge(self, reports: Sequence[Report], *, training: bool) -> Learned | None:
        """What the reports of all ranks show; None: nothing. Raises TaskError if the plan cannot train this.

        With a true `is_weaker`, the check could not be made as it should be: a run that goes on makes it again.
        """
        ...

    def learn(self, learned: Learned, batch: Any) -> None:
        """Take over what `judge` has returned, here or in the run that this one goes on from."""
        ...


class Proof:
    """The checks of one rank, in the order in which ranks make them.

    preserved  the modules whose attributes and gradients are the same before and after each check
    unsharded  within `unsharded(phase)` the model has its weights; entering it is collective where they rest split
    key        a digest of the model, its code, the plan and the kind of a batch: for what the answers hold
    """

    def __init__(
        self,
        checks: Sequence[Check],
        world: Communicator,
        preserved: nn.Module,
        unsharded: Callable[[str], AbstractContextManager[None]],
        key: Callable[[Any], int],
    ) -> None:
        self._checks, self._world, self._preserved = checks, world, preserved
        self._unsharded, self._key = unsharded, key
        self._current = ""
        self.state: dict[str, Any] = {}
        """What is kept: the key, and what was learned by claim."""
        self._is_kept = False
        """Whether the state is that of an earlier run, and has not been taken over yet."""

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Take over what an earlier run has learned, if the next batch shows that it holds for this one."""
        self._is_kept = bool(state)
        self.state = dict(state or {})

    def is_needed(self, *, training: bool) -> bool:
        """Whether a batch must be checked before it is used."""
        return any(check.is_needed(training=training) for check in self._checks)

    def run(self, batch: Any, *, training: bool) -> None:
        """Make the checks that are needed. Collective."""
        self._take_over(batch)
        with self._told(), memory.freed_memory_kept(self._world.device):
            for check in self._checks:
                if check.is_needed(training=training):
                    self._current = check.claim
                    self._make(check, batch, training=training)

    def _take_over(self, batch: Any) -> None:
        key = f"{digest(self._world.all_gather_json(self._key(batch))):016x}"
        if self.state.get("key") != key:
            self.state = {"key": key, "learned": {}}
        elif self._is_kept:
            for check in self._checks:
                if (learned := self.state.get("learned", {}).get(check.claim)) is not None:
                    check.learn(learned, batch)
        self._is_kept = False

    def _make(self, check: Check, batch: Any, *, training: bool) -> None:
        fits = list(check.memory_fits())
        if fits:
            fits = list(map(all, zip(*self._world.all_gather_json(fits), strict=True)))
        report: Report = {}
        error: Exception | None = None
        with contextlib.nullcontext() if check.phase is None else self._unsharded(check.phase):
            try:
                with preserve_module(self._preserved):
                    report = check.inspect(batch, fits, training=training)
            except Exception as caught:  # raised below, after the other ranks have received the report
                error = caught
        summary = None if error is None else summarize_error(error)
        reports = self._world.all_gather_json(report | {"error": summary})
        if error is not None:
            raise error
        for rank, each in enumerate(reports):
            if each["error"] is not None:
                raise peer_failed(rank, each["error"])
        learned = check.judge(reports, training=training)
        if learned is not None:
            learned = json.loads(json.dumps(learned))
            if not learned.get("is_weaker", False):
                self.state["learned"][check.claim] = learned
            check.learn(learned, batch)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Within, the first rank says what is checked, if that takes long."""
        told = "fourfold: before the first step: checking that"
        timer = threading.Timer(QUIET_SECONDS, lambda: print_stderr(f"{told} {self._current}"))
        timer.daemon = True
        if self._world.rank == 0:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()


def raise_problems(reports: Sequence[Report], where: str, key: str = "problems") -> None:
    """Raise TaskError for the problems that any rank has found."""
    problems = [Problem(*problem) for report in reports for problem in report.get(key, ())]
    if problems:
        raise TaskError(list(dict.fromkeys(problems)), where=where)


def out_of_step_problem() -> Problem:
    """What is wrong if a rank has met another one in another collective of the tensor axis."""
    got = "tensor ranks that sum different tensors in one forward or backward"
    return Problem(got, "a model that computes the same on each of them", "no branches by rank")


def peer_failed(rank: int, text: str) -> TaskError:
    """The error of the ranks that learn in a check that another rank has failed."""
    return TaskError(Problem(f"rank {rank} failed on its first batch: {text}"), where="the task")


def first_line(error: Exception) -> str:
    """Of what an error says; its class if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def summarize_error(error: Exception) -> str:
    lines = str(error).splitlines()
    if isinstance(error, FourfoldError):  # its first line is the number of problems
        return "; ".join(line.strip() for line in lines[1:])
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

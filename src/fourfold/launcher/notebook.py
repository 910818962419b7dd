"""Launch from a notebook: `ff.launch(function, n=2)` runs a function on ranks that are forks of this process.

rank    it has all that the notebook has defined, in one thread, and meets the others in a private file
output  of rank 0; it is written where this process writes
Law: when `launch` returns or raises, none of its ranks is left. What a rank returns travels as JSON: nothing is
unpickled.

Law: the model, the optimizer and the random state of this process stay as they are.
"""

import atexit
import contextlib
import gc
import itertools
import json
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fourfold.comm import init
from fourfold.environment.processes import end_with_parent, set_process_name
from fourfold.environment.rendezvous import STORE_VARIABLE
from fourfold.environment.temporary_folder import temporary_folder
from fourfold.environment.world import from_environment
from fourfold.launcher import env_store, failure_report
from fourfold.launcher.forked_process import ForkedProcess, fork
from fourfold.launcher.local_job import AgentRendezvous
from fourfold.launcher.process_defaults import THREAD_VARIABLES, loopback_variables
from fourfold.launcher.worker import destroy_group
from fourfold.optim.user_optimizer import OptimizerSource
from fourfold.plan.plan import Plan
from fourfold.step.argument_checks import check_arguments
from fourfold.verification.command import check_verifiable, verify_batches
from fourfold.verification.comparison import VerifyResult
from fourfold.verification.one_device import Training
from fourfold.words.argument_checks import callable_problems
from fourfold.words.errors import FourfoldError, LaunchError, PlanError, Problem, SettingError, TaskError

STDIN, STDOUT, STDERR = 0, 1, 2
POLL_SECONDS = 0.05
WHERE = "ff.launch"
ATTEMPT = "ff.launch(train, n=2), not train()"


class RankError(FourfoldError):
    """A rank of `ff.launch` failed. The message has the rank and the traceback of its error."""

    exit_code = 1


def launch(function: Callable[..., Any], *args: Any, n: int = 2, **kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)` on `n` ranks, which are forks of this process; returns what rank 0 returns.

    function  calls `ff.parallelize`, `ff.train` or `torch.distributed` as a script under `fourfold run` does. It sees
              everything that this process has defined, and changes nothing here. Each rank computes in one thread
    n         the number of ranks, on CPUs
    The result is what JSON can hold: numbers, strings, lists, dicts, None. Save anything else to a file.

    What rank 0 prints is printed here. An interrupt (Ctrl-C, "interrupt kernel") ends the ranks. Raises RankError, with
    the traceback of the rank that failed first; LaunchError where this process cannot fork ranks: after CUDA has
    started, inside a rank, with a process group, or on another system than Linux; TaskError if the result of rank 0 is
    not JSON.
    """
    _check(function, n)
    with temporary_folder() as folder:
        rendezvous = AgentRendezvous(run_id=uuid.uuid4().hex)
        world = _world_variables(folder, rendezvous, n)
        reader, writer = os.pipe()
        ranks: list[ForkedProcess] = []
        launcher = os.getpid()
        try:
            with _interrupts_held():  # one between a fork and its entry in the list would leave a rank
                for rank in range(n):
                    variables = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}

                    def main(rank: int = rank, variables: Mapping[str, str] = variables) -> None:
                        end_with_parent(launcher)
                        _run_rank(lambda: function(*args, **kwargs), folder, rank, variables, writer)

                    ranks.append(fork(main, keep=(writer,), new_session=True))
            os.close(writer)
            codes = _wait(ranks, reader, folder)
        finally:
            with _interrupts_held():
                _kill(ranks)
                os.close(reader)
                rendezvous.shutdown()
        return _result(folder, codes)


def _check(function: object, n: int) -> None:
    """Raises LaunchError with every reason why this process cannot run the function on `n` ranks."""
    script = "fourfold run -n N script.py"
    problems = callable_problems("function", function, need="a function that every rank calls", attempt=ATTEMPT)
    if type(n) is not int or n < 1:
        problems.append(Problem(f"n = {n!r}", "a number of ranks, at least 1", "n=2"))
    if sys.platform != "linux":
        problems.append(Problem(f"the system {sys.platform}", "Linux: ranks are forks of this process", script))
    if from_environment() is not None:
        problems.append(Problem("a rank", "a process that no launcher has started", "the function itself"))
    if torch.cuda.is_initialized():
        got = "CUDA has started in this process"
        problems.append(Problem(got, "no use of CUDA before: it does not survive a fork", f"a new kernel, or {script}"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        got = "a process group in this process"
        problems.append(Problem(got, "none: ranks make their own", "torch.distributed.destroy_process_group()"))
    if problems:
        raise LaunchError(problems, where=WHERE)


def _world_variables(folder: Path, rendezvous: AgentRendezvous, n: int) -> dict[str, str]:
    store = rendezvous.next_rendezvous().bootstrap_store_info
    assert store is not None
    run_id = rendezvous.get_run_id()
    return {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": store.master_addr,
        "MASTER_PORT": str(store.master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        STORE_VARIABLE: str(folder / f"store-{run_id}"),
        **dict.fromkeys(THREAD_VARIABLES, "1"),
        **loopback_variables(),
    }


# ---- in a rank


def _run_rank(function: Callable[[], Any], folder: Path, rank: int, variables: Mapping[str, str], output: int) -> None:
    """Run the function and leave its result, or the record of its error, in the folder."""
    gc.freeze()  # what the notebook has left to collect is not for a rank to destroy
    atexit._clear()  # the notebook's own, which end its connections
    os.environ.update(variables)
    torch.set_num_threads(1)  # the threads of a pool that the notebook has used are not in the fork
    set_process_name(f"fourfold-{rank}")
    _redirect_streams(output if rank == 0 else os.open(os.devnull, os.O_WRONLY))
    env_store.install()
    atexit.register(destroy_group, os.getpid())
    try:
        result = function()
        if rank == 0:
            _write_result(folder, result)
    except BaseException as error:  # whatever the function raises
        failure_report.save_record(_record_file(folder, rank), failure_report.make_record(error, rank=rank))
        atexit.unregister(destroy_group)  # it would wait for a collective that others have left
        raise SystemExit(1) from None


def _redirect_streams(output: int) -> None:
    """A notebook's own streams lead to connections that a rank does not have."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STDIN)
    for number in (STDOUT, STDERR):
        os.dup2(output, number)
    sys.stdin = open(STDIN, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def _write_result(folder: Path, result: Any) -> None:
    try:
        text = json.dumps(result)
    except (TypeError, ValueError) as error:
        got = f"rank 0 returned a {type(result).__name__} ({error})"
        problem = Problem(got, "a JSON value", ".tolist(), or save it to a file")
        raise TaskError(problem, where=WHERE) from None
    (folder / "result").write_text(text)


# ---- in the notebook


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end.

    Python runs the handler in the main thread, whichever thread gets the signal: with threads, blocking SIGINT in this
    one would not hold it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _wait(ranks: list[ForkedProcess], output: int, folder: Path) -> dict[int, int | None]:
    """Print what rank 0 prints until all ranks have ended, or one has failed and it is known why.

    Returns their exit codes; None for a rank that still runs.
    """

    def exit_codes() -> dict[int, int | None]:
        return {number: rank.poll() for number, rank in enumerate(ranks)}

    is_open = True
    while None in (codes := exit_codes()).values() and not any(codes.values()):
        if is_open:
            is_open = _print_output(output, POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)
    failure_report.wait_for_first_failure(exit_codes, lambda: _records(folder, len(ranks)))
    while is_open and select.select([output], [], [], 0.0)[0]:
        is_open = _print_output(output, 0.0)
    return exit_codes()


def _print_output(output: int, seconds: float) -> bool:
    """Print what is there within `seconds`; False at the end of the output."""
    if not select.select([output], [], [], seconds)[0]:
        return True
    content = os.read(output, 65536)
    sys.stdout.write(content.decode(errors="replace"))
    sys.stdout.flush()
    return bool(content)


def _kill(ranks: list[ForkedProcess]) -> None:
    """Kill the ranks that are left, and the processes that they have started."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _result(folder: Path, exit_codes: Mapping[int, int | None]) -> Any:
    """What rank 0 returned. Raises RankError with the first cause of a failure."""
    if not any(exit_codes.values()):
        return json.loads((folder / "result").read_text())
    codes = {rank: code for rank, code in exit_codes.items() if code is not None}
    names = [f"rank {rank} of {len(exit_codes)}" for rank in exit_codes]
    raise RankError(failure_report.first_cause(_records(folder, len(exit_codes)), codes, names).text)


def _records(folder: Path, num_ranks: int) -> dict[int, failure_report.FailureRecord]:
    records = {rank: failure_report.load_record(_record_file(folder, rank)) for rank in range(num_ranks)}
    return {rank: record for rank, record in records.items() if record is not None}


def _record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


# ---- Verify from Python: `ff.verify` trains with a plan, on ranks that are forks of this process, and on one device -

STEPS, SEED = 10, 0


def verify(
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any] | None,
    optimizer: OptimizerSource,
    batches: Iterable[Any],
    plan: Plan,
    *,
    steps: int = STEPS,
    clip: float | None = None,
    tensor: Mapping[str, str] | None = None,
) -> VerifyResult:
    """Train a few steps with a plan and on one device, and compare losses, gradients, weights, buffers and states.

    model, loss, optimizer, clip, tensor  as for `ff.parallelize`; none of them is changed
    batches  global batches, each of which is divided among the data ranks; the first `steps` of them are used
    plan     how the mesh trains. Its ranks are forks of this process, on CPUs; under a launcher they are those of the
             job, every rank calls this with the same arguments, and every rank gets the result

    `result.ok` says whether the plan trains as one device does, `result.problems` where it does not, and `result.bound`
    how far numbers may deviate and why; `print(result)` shows all of it. Raises PlanError for a plan whose training is
    not meant to equal one device's, and SettingError for arguments of the wrong kind.
    """
    check_arguments(
        model=model, loss=loss, optimizer=optimizer, plan=plan, tensor=tensor or {}, clip=clip, seed=SEED, skip_nan=0
    )
    if plan is None:
        raise PlanError(Problem("no plan", "the plan to compare with one device", "ff.Plan(dp=2)"), where="ff.verify")
    check_verifiable(plan)
    used = list(itertools.islice(batches, steps))
    if not used:
        problem = Problem("no batches", "at least one global batch (inputs, targets)", "batches = [next(iter(loader))]")
        raise SettingError(problem, where="ff.verify")

    def rank() -> dict[str, Any]:
        torch.manual_seed(SEED)
        own = model if isinstance(model, nn.Module) else model()
        training = Training(own, loss, optimizer, plan, {"clip": clip, "tensor": tensor, "seed": SEED})
        result = verify_batches(training, used)
        return init.init_communicator().all_gather_json(None if result is None else result.as_json())[0]

    if plan.mesh.size == 1 or init.world().size > 1:
        with torch.random.fork_rng():
            return VerifyResult(**rank())
    return VerifyResult(**launch(rank, n=plan.mesh.size))

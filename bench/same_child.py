"""The ranks of one checkout: they run cases and commands, and write records of the results.

request  a line of JSON: a case, or the arguments of a `fourfold` command
record   what a rank writes about a case: FILE.json with facts by group, and on rank 0 FILE.safetensors with tensors
Law: of the checkout only the public names that the design fixes are used: `ff.parallelize`, `ff.train`, `ff.Plan`,
`ff.Task`, `ff.Data`, `ff.Feed`, `ff.DistributedOptimizer`, `ff.optim`, documented methods of a TrainStep, and
`python -m fourfold`.

    python -m bench.same_child CHECKOUT FOLDER IN:OUT…      (a rank for each pair of open files)

One process imports everything and forks the ranks, so that they start at once.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import importlib
import itertools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bench import same_models
from bench.same_cases import NEW_NAMES, STEPS, Case, data_ranks, plan_fields
from bench.same_record import Recorder

CASE_SECONDS = 60
METRICS = ("loss", "samples", "tokens", "grad_norm")
# Recorded if a version has them; the design does not fix them.
MORE_METRICS = ("sent_bytes", "loss_scale", "overflowed")
Record = dict[str, Any]


def _plan(ff: Any, case: Case) -> Any:
    """The case's plan, under the field names that this checkout has."""
    known = {field.name for field in dataclasses.fields(ff.Plan)}
    fields = plan_fields(case)
    return ff.Plan(**{name if name in known else NEW_NAMES[name]: value for name, value in fields.items()})


def _metrics(metrics: Any) -> Record:
    fixed = {name: getattr(metrics, name) for name in METRICS}
    return fixed | {name: getattr(metrics, name) for name in MORE_METRICS if hasattr(metrics, name)}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a nested state by name: tensors, and plain values as their repr."""
    if isinstance(value, Mapping):
        children = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(number), each) for number, each in enumerate(value)]
    else:
        return {path: value if isinstance(value, Tensor) else repr(value)}
    leaves: dict[str, Any] = {f"{path} (keys)".strip(): [key for key, _ in children]}
    for key, each in children:
        leaves |= _leaves(each, f"{path}.{key}" if path else key)
    return leaves


class CaseRecord:
    """What this rank records about a case."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}

    def state(self, title: str, state: Any) -> None:
        """Record a state: its tensors, and its other values as facts."""
        for name, leaf in _leaves(state).items():
            if isinstance(leaf, Tensor):
                self.tensors[f"{title} {name}"] = leaf.detach().clone().contiguous()
            else:
                self.facts.setdefault("states", {})[f"{title} {name}"] = leaf

    def write(self, file: str, rank: int, calls: Any, outcome: str) -> None:
        """Write the record. Rank 0 stores the tensors, the others a digest of each."""
        self.facts |= {"outcome": outcome, "collectives": calls}
        if rank == 0:
            save_file(self.tensors, f"{file}.safetensors")
        else:
            digests = {
                name: hashlib.blake2b(each.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
                for name, each in self.tensors.items()
            }
            self.facts["weights and states, other ranks"] = digests
        Path(f"{file}.json").write_text(json.dumps(self.facts))


def _loop(ff: Any, case: Case, record: CaseRecord) -> None:
    """Three steps of a user's loop and an evaluation; with `reload`, a second TrainStep loads the state and steps."""
    rank, plan = dist.get_rank(), _plan(ff, case)
    build = functools.partial(ff.parallelize, same_models.model(case), same_models.LOSSES[case["loss"]])
    make = same_models.optimizer(case, ff.optim)
    step = build(make, plan, clip=case["clip"])
    batches: list[Any] = same_models.batches(case, rank // case["cp"])
    if case["api"] == "feed":
        size = 2 * case["microbatches"] * data_ranks(case)
        source = same_models.Source(case, size * (STEPS + 2) + 1)
        batches = list(itertools.islice(ff.Feed(source, plan, batch_size=size, seed=3), STEPS + 2))
    metrics = [_metrics(step(batch)) for batch in batches[:STEPS]]
    metrics.append(_metrics(step.evaluate(batches[STEPS])))
    state = step.state_dict()
    record.state("state", state)
    if case["reload"]:
        other = ff.parallelize(
            same_models.model(case), same_models.LOSSES[case["loss"]], make, plan, clip=case["clip"], seed=1
        )
        other.load_state_dict(state)
        steps = 3 if case["sync"] == "local" else 1  # with local SGD, ranks are equal only after they average
        metrics += [_metrics(other(batches[STEPS + 1 - number % 2])) for number in range(steps)]
        record.state("state after a reload", other.state_dict())
    record.facts["losses"] = [each["loss"] for each in metrics]
    record.facts["metrics"] = metrics


def _wrap(ff: Any, case: Case, record: CaseRecord) -> None:
    """Three steps of a torch loop; all microbatches but the last of a step are under `no_sync`."""
    model = same_models.model(case)
    inner = same_models.optimizer(case, ff.optim)(model.parameters())
    optimizer = ff.DistributedOptimizer(inner, model, _plan(ff, case))
    rank, losses, norms = dist.get_rank(), [], []
    for step, (inputs, targets) in enumerate(same_models.batches(case, rank)[:STEPS]):
        for number in range(case["microbatches"]):
            is_last = number == case["microbatches"] - 1
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                some = slice(number, None, case["microbatches"])
                if isinstance(inputs, dict):
                    outputs = model(**{name: value[some] for name, value in inputs.items()})
                else:
                    outputs = model(inputs[some])
                loss = F.cross_entropy(outputs.flatten(0, -2), targets[some].flatten())
                loss.backward()
                losses.append(loss.item())
        record.state(f"gradients {step}", {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        if case["clip"] is not None:
            norms.append(float(optimizer.clip_grad_norm_(case["clip"])))
        optimizer.step()
        optimizer.zero_grad()
    record.facts |= {"losses": losses, "metrics": norms}
    record.state("model", model.state_dict())
    record.state("optimizer", optimizer.state_dict())


def _train(ff: Any, case: Case, record: CaseRecord, name: str) -> None:
    """A run of three steps, all traced; its folder is compared separately."""
    size = 2 * case["microbatches"] * data_ranks(case)
    task = ff.Task(
        model=functools.partial(same_models.model, case),
        loss=same_models.LOSSES[case["loss"]],
        data=lambda: ff.Data(
            train=same_models.Source(case, size * STEPS + 1), valid=same_models.Source(case, size + 1, first=50)
        ),
        optimizer=same_models.optimizer(case, ff.optim),
        steps=STEPS,
        batch_size=size,
        clip=case["clip"],
    )
    result = ff.train(task, _plan(ff, case), name=name, trace_every=1, checkpoint_every=STEPS)
    record.facts["losses"] = [result.loss, result.valid]


def run_case(ff: Any, recorder: Recorder, request: Record) -> Record:
    """Run a case, and write its record. A refusal by this version is a result too."""
    case, record = request["case"], CaseRecord()
    drivers = {"wrap": _wrap, "train": functools.partial(_train, name=request["name"])}
    recorder.begin()
    try:
        drivers.get(case["api"], _loop)(ff, case, record)
        outcome = "trained"
    except ff.FourfoldError as error:
        outcome = f"refused: {type(error).__name__}"
        print(f"{outcome}: {error}", file=sys.stderr)
    finally:
        calls = recorder.end()
    record.write(f"{request['file']}-{dist.get_rank()}", dist.get_rank(), calls, outcome)
    return {"outcome": outcome}


def run_command(recorder: Recorder, request: Record) -> Record:
    """`python -m fourfold ARGUMENT…` in this process, which is a rank of a launched world."""
    sys.argv, code = ["fourfold", *request["words"]], 0
    recorder.begin()
    try:
        runpy.run_module("fourfold", run_name="__main__", alter_sys=False)
    except SystemExit as exit_:
        code = exit_.code or 0
    CaseRecord().write(f"{request['file']}-{dist.get_rank()}", dist.get_rank(), recorder.end(), f"code {code}")
    return {"outcome": f"code {code}"}


def _destroy_groups(recorder: Recorder) -> None:
    """Destroy the process groups of a case: each has threads and sockets."""
    gc.collect()
    dist.barrier()
    for group in recorder.groups:
        # Fourfold may have destroyed it already, or this rank may not be a member.
        with contextlib.suppress(ValueError, AssertionError):
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
    recorder.groups = []


def serve(ff: Any, recorder: Recorder, pipes: Sequence[int]) -> None:
    """Serve one request per line until the input ends."""
    requests, replies = os.fdopen(pipes[0]), os.fdopen(pipes[1], "w")

    def reply_with(value: Record) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    reply_with({"ready": ff.__file__})
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        try:
            reply = run_case(ff, recorder, request) if "case" in request else run_command(recorder, request)
            _destroy_groups(recorder)
        except BaseException:
            reply = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        reply_with(reply)


def run_rank(ff: Any, recorder: Recorder, folder: str, rank: int, pipes: Sequence[tuple[int, int]]) -> None:
    """Run a forked process as a rank: with a log file of its own, and a launcher's environment variables."""
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for other in [other for other in pipes if other != pipes[rank]]:
        os.close(other[0])
        os.close(other[1])
    variables = {"RANK": rank, "WORLD_SIZE": len(pipes), "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": len(pipes)}
    os.environ.update({name: str(value) for name, value in variables.items()})
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(pipes))
    serve(ff, recorder, pipes[rank])


def main(checkout: Path, folder: str, pipes: Sequence[tuple[int, int]]) -> None:
    """Import, fork the ranks, and wait for them."""
    recorder = Recorder()
    import fourfold as ff

    assert Path(ff.__file__).is_relative_to(checkout / "src"), f"{ff.__file__} is not of {checkout}"
    for name in ff.__all__:
        getattr(ff, name)  # loads it: public names are imported lazily
    importlib.import_module("torch._dynamo")  # torch would import it during a DistributedOptimizer's first step
    for rank in range(len(pipes)):
        if os.fork() == 0:
            try:
                run_rank(ff, recorder, folder, rank, pipes)
            except BaseException:
                traceback.print_exc()
            os._exit(0)  # without destroying process groups: other ranks may be gone
    for pair in pipes:
        os.close(pair[0])
        os.close(pair[1])
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    ends = [tuple(map(int, pair.split(":"))) for pair in sys.argv[3:]]
    main(Path(sys.argv[1]), sys.argv[2], [(requests, replies) for requests, replies in ends])

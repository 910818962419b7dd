"""One rank of one checkout: runs cases and commands, and writes down what came of them.

request  a line of JSON on the standard input: a case, or the words of a `fourfold` command
record   what a rank writes of a case: FILE.json with facts by group, and on rank 0 FILE.safetensors with tensors
Law: of the checkout only the names of the design's contracts are used: `ff.parallelize`, `ff.train`, `ff.Plan`,
`ff.Task`, `ff.Data`, `ff.Feed`, `ff.DistributedOptimizer`, `ff.optim`, methods of a step that the contracts name, and
`python -m fourfold`.

    python -m bench.same_child RENDEZVOUS CHECKOUT      (RANK and WORLD_SIZE in the environment)
"""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import itertools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
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
# Told where a version has them; the contracts do not name them.
MORE_METRICS = ("sent_bytes", "loss_scale", "overflowed")
Record = dict[str, Any]


def _plan(ff: Any, case: Case) -> Any:
    """The case's plan, under the field names that this checkout has."""
    known = {field.name for field in dataclasses.fields(ff.Plan)}
    fields = plan_fields(case)
    return ff.Plan(**{name if name in known else NEW_NAMES[name]: value for name, value in fields.items()})


def _metrics(metrics: Any) -> Record:
    told = {name: getattr(metrics, name) for name in METRICS}
    return told | {name: getattr(metrics, name) for name in MORE_METRICS if hasattr(metrics, name)}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """A nested state as names and leaves: tensors, and plain values as they print."""
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


class Kept:
    """What is to be written of a case on this rank."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}

    def state(self, title: str, state: Any) -> None:
        """Keep a state: its tensors to be stored, its values as facts."""
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


def _loop(ff: Any, case: Case, kept: Kept) -> None:
    """Three steps of a loop of one's own, an evaluation, and a step of another one that has loaded the state."""
    rank, plan = dist.get_rank(), _plan(ff, case)
    build = functools.partial(ff.parallelize, same_models.model(case), same_models.LOSSES[case["loss"]])
    make = same_models.optimizer(case, ff.optim)
    step = build(make, plan, clip=case["clip"])
    batches: list[Any] = same_models.batches(case, rank // case["sp"])
    if case["door"] == "feed":
        size = 2 * case["microbatches"] * data_ranks(case)
        source = same_models.Source(case, size * (STEPS + 2) + 1)
        batches = list(itertools.islice(ff.Feed(source, plan, batch_size=size, seed=3), STEPS + 2))
    told = [_metrics(step(batch)) for batch in batches[:STEPS]]
    told.append(_metrics(step.evaluate(batches[STEPS])))
    state = step.state_dict()
    kept.state("state", state)
    if case["reload"]:
        other = ff.parallelize(
            same_models.model(case), same_models.LOSSES[case["loss"]], make, plan, clip=case["clip"], seed=1
        )
        other.load_state_dict(state)
        steps = 3 if case["sync"] == "local" else 1  # a state is whole where ranks meet
        told += [_metrics(other(batches[STEPS + 1 - number % 2])) for number in range(steps)]
        kept.state("state after a reload", other.state_dict())
    kept.facts["losses"] = [each["loss"] for each in told]
    kept.facts["metrics"] = told


def _wrap(ff: Any, case: Case, kept: Kept) -> None:
    """Three steps of a torch loop, with microbatches outside and inside of `no_sync`."""
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
        kept.state(f"gradients {step}", {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        if case["clip"] is not None:
            norms.append(float(optimizer.clip_grad_norm_(case["clip"])))
        optimizer.step()
        optimizer.zero_grad()
    kept.facts |= {"losses": losses, "metrics": norms}
    kept.state("model", model.state_dict())
    kept.state("optimizer", optimizer.state_dict())


def _train(ff: Any, case: Case, kept: Kept, name: str) -> None:
    """A run of three steps, each of them traced; its folder holds the rest."""
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
    kept.facts["losses"] = [result.loss, result.valid]


def run_case(ff: Any, recorder: Recorder, request: Record) -> Record:
    """Run a case, and write its record. What a version refuses is a result."""
    case, kept = request["case"], Kept()
    doors = {"wrap": _wrap, "train": functools.partial(_train, name=request["name"])}
    recorder.begin()
    try:
        doors.get(case["door"], _loop)(ff, case, kept)
        outcome = "trained"
    except ff.FourfoldError as error:
        outcome = f"refused: {type(error).__name__}"
        print(f"{outcome}: {error}", file=sys.stderr)
    finally:
        calls = recorder.end()
    kept.write(f"{request['file']}-{dist.get_rank()}", dist.get_rank(), calls, outcome)
    return {"outcome": outcome}


def run_command(recorder: Recorder, request: Record) -> Record:
    """`python -m fourfold WORD…` in this process, which is a rank of a launcher's world."""
    sys.argv, code = ["fourfold", *request["words"]], 0
    recorder.begin()
    try:
        runpy.run_module("fourfold", run_name="__main__", alter_sys=False)
    except SystemExit as leaving:
        code = leaving.code or 0
    Kept().write(f"{request['file']}-{dist.get_rank()}", dist.get_rank(), recorder.end(), f"code {code}")
    return {"outcome": f"code {code}"}


def _sweep(recorder: Recorder) -> None:
    """End the groups of a case: each has threads and sockets."""
    gc.collect()
    dist.barrier()
    for group in recorder.groups:
        # Fourfold may have ended it, or this rank may be none of its members.
        with contextlib.suppress(ValueError, AssertionError):
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
    recorder.groups = []


def serve(rendezvous: str, checkout: Path) -> None:
    """Join, import the checkout, then a request per line until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints is not an answer
    recorder = Recorder()
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    import fourfold as ff

    assert Path(ff.__file__).is_relative_to(checkout / "src"), f"{ff.__file__} is not of {checkout}"

    def say(value: Record) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    say({"ready": ff.__file__})
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        try:
            reply = run_case(ff, recorder, request) if "case" in request else run_command(recorder, request)
            _sweep(recorder)
        except BaseException:
            reply = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        say(reply)
    os._exit(0)  # without the groups' own end: other ranks may be gone


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))

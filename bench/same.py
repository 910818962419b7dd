"""Compares two checkouts of this project: they must compute the same results, bit for bit.

    python -m bench.same OLD NEW [--quick] [--case N …] [--run NAME …] [--no-runs] [--list]

OLD and NEW are folders of checkouts. Each runs in its own processes, driven only through the public names that the
design fixes (`bench.same_child`), so that everything else may be renamed in NEW.

case   one of 60 trainings, drawn from a seed: plan, model, loss, optimizer, batches, on 1 to 4 ranks (`same_cases`)
run    a run folder that `fourfold train` writes: one per zero level and codec, local steps, mixed precision
world  the processes of one checkout and one number of ranks; it runs many cases

Compared of a case: the loss and metrics of 3 steps and an evaluation, and every tensor and value of `state_dict()` on
all ranks. With `reload`, a second TrainStep loads the state and takes another step; its state is compared too. With
DistributedOptimizer, gradients are compared too. Then the collectives: which calls reach a ProcessGroup of
torch.distributed, in which order in each group, with kind, elements, dtype, bytes, peers and tags (`same_record`).
Transfers through shared memory make no such call. Traces show their order (cases with the api "train", and all runs):
which bucket is ready, sent, updated and gathered; the log has the bytes sent.

Compared of a run: log, settings, plan, trace, collectives, and all checkpoints (manifest; file, title, dtype, shape and
bytes of each tensor) of a run that each checkout writes from scratch. Then the run of OLD is truncated after step 3,
and each checkout resumes a copy: the resumed runs are compared with each other, and their last checkpoint with that of
the uninterrupted run.

A case in which a process fails or hangs is run once more in a new world, and the first failure is printed.
Not compared: times, the text of messages, GPUs, several hosts. The exit code is 1 if anything differs or fails.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import same_cases
from bench.same_cases import Case
from bench.same_compare import Difference, compare_records
from bench.same_runs import compare_checkpoints, compare_runs, truncate_run
from bench.same_world import CheckoutWorld, WorldFailed

GROUPS = ("outcome", "losses", "metrics", "weights", "states", "collectives", "log", "trace", "checkpoints", "resumed")
NUMBERS = ("losses", "metrics", "weights", "log", "checkpoints", "resumed")
SHOWN = 6  # differences of one case or run
RUN_RANKS = 2
TEXT_BYTES = 40_000


class Checkouts(NamedTuple):
    """The two folders, and the folder in which their processes write."""

    old: Path
    new: Path
    work_dir: Path

    def folder(self, side: str) -> Path:
        return self.work_dir / side

    def worlds(self, size: int) -> dict[str, CheckoutWorld]:
        """A world for each checkout, not started yet."""
        return {side: CheckoutWorld(getattr(self, side), size, folder=self.folder(side)) for side in ("old", "new")}


class Report:
    """What was compared, and the differences that were found."""

    def __init__(self) -> None:
        self.compared: dict[str, int] = {}
        self.differing: dict[str, int] = {}
        self.found: list[tuple[str, list[Difference]]] = []
        self.refused: list[str] = []
        """Cases that OLD refuses: all that is compared is that NEW refuses them too."""
        self.num_cases = self.num_runs = self.num_retried = 0

    def add(self, title: str, groups: Iterable[str], found: list[Difference]) -> None:
        """Record a comparison of these groups and the differences found."""
        differing = {difference.group for difference in found}
        for group in {*groups, *differing}:
            self.compared[group] = self.compared.get(group, 0) + 1
            self.differing[group] = self.differing.get(group, 0) + (group in differing)
        if found:
            self.found.append((title, sorted(found, key=lambda each: GROUPS.index(each.group))))

    def print(self, seconds: float) -> None:
        print(f"\n{'group':<16}{'compared':>10}{'same':>8}{'differ':>8}")
        for group in GROUPS:
            if count := self.compared.get(group, 0):
                differ = self.differing[group]
                print(f"{group:<16}{count:>10}{count - differ:>8}{differ:>8}")
        if self.found:
            print("\ndifferences (OLD | NEW)")
        for title, found in self.found:
            print(f"  {title}")
            for difference in found[:SHOWN]:
                print(f"      {difference}")
            if len(found) > SHOWN:
                print(f"      and {len(found) - SHOWN} more")
        for title in self.refused:
            print(f"\nrefused by OLD: {title}")
        what = f"{self.num_cases} cases and {self.num_runs} runs"
        if self.num_retried:
            print(f"\n{self.num_retried} cases failed once and were run again: see above")
        largest = max((each.size for _, found in self.found for each in found if each.group in NUMBERS), default=0.0)
        verdict = (
            f"different: {len(self.found)} entries above, of {what}; largest difference {largest:.3g}"
            if self.found
            else None
        )
        print(f"\n{verdict or f'the same: {what}'}   ({seconds:.0f} s)", flush=True)


def run_both(
    worlds: dict[str, CheckoutWorld], requests: dict[str, dict[str, Any]]
) -> tuple[list[Difference], str | None]:
    """Send both worlds their requests at once; returns differences and OLD's outcome, None if a world failed."""
    outcomes, failed = dict[str, str](), False
    for world in worlds.values():
        world.begin()
    for side, world in worlds.items():
        world.send(requests[side])
    for side, world in worlds.items():
        try:
            outcomes[side] = world.outcome()
        except WorldFailed as error:
            failed, outcomes[side] = True, f"failed: {error}"
    if failed:
        return [Difference("outcome", side.upper(), text) for side, text in outcomes.items()], None
    if outcomes["old"] != outcomes["new"]:
        return [Difference("outcome", "both", f"{outcomes['old']} | {outcomes['new']}")], outcomes["old"]
    return [], outcomes["old"]


def run_case(report: Report, worlds: dict[str, CheckoutWorld], checkouts: Checkouts, number: int, case: Case) -> None:
    """One case in both checkouts."""
    name, files = f"case-{number}", {side: str(checkouts.folder(side) / f"case-{number}") for side in worlds}
    requests = {side: {"case": case, "name": name, "file": files[side]} for side in worlds}
    found, outcome = run_both(worlds, requests)
    if outcome is None and case["api"] != "train":  # a run that exists already would be resumed
        failures = "; ".join(
            f"{each.where} {each.detail.splitlines()[0]}" for each in found if each.detail != "trained"
        )
        print(f"run again: --case {number}, where {failures}", flush=True)
        found, outcome = run_both(worlds, requests)
        report.num_retried += 1
    groups = ["outcome"]
    if outcome is not None:
        groups += ["losses", "weights", "collectives"]
        groups += ["metrics", "states"] if case["api"] != "train" else ["log", "trace", "checkpoints"]
        found += compare_records(files["old"], files["new"], case["ranks"])
        folders = [checkouts.folder(side) / "runs" / name for side in worlds]
        if all(folder.exists() for folder in folders):
            found += compare_runs(*folders, where="run")
    report.num_cases += 1
    title = f"--case {number}: {same_cases.describe(case)}"
    report.refused += [title] if outcome not in (None, "trained") else []
    report.add(title, groups, found)


def run_folder(report: Report, worlds: dict[str, CheckoutWorld], checkouts: Checkouts, fields: dict[str, Any]) -> None:
    """One run by both checkouts from scratch, then resumed by both from copies of OLD's run."""
    name, sides = same_cases.run_name(fields), list(worlds)
    for side in sides:
        (checkouts.folder(side) / f"{name}.toml").write_text(same_cases.toml(fields))

    def train(run: str) -> tuple[list[Difference], str | None]:
        words = ["train", "lm", f"{name}.toml", *same_cases.RUN_WORDS, f"name={run}"]
        files = {side: str(checkouts.folder(side) / run) for side in sides}
        found, outcome = run_both(worlds, {side: {"words": words, "file": files[side]} for side in sides})
        if outcome not in (None, "code 0"):
            report.refused.append(f"--run {name}: {outcome}")
        return found + (compare_records(files["old"], files["new"], RUN_RANKS) if outcome else []), outcome

    report.num_runs += 1
    groups = ("outcome", "collectives", "log", "trace", "checkpoints")
    found, outcome = train(name)
    runs = [checkouts.folder(side) / "runs" for side in sides]
    if outcome == "code 0":
        found += compare_runs(runs[0] / name, runs[1] / name, where="from scratch")
    report.add(f"--run {name}, from scratch", groups, found)
    if outcome != "code 0":
        return
    copy = f"{name}-resumed"
    for run in runs:
        truncate_run(runs[0] / name, run / copy)
    found, outcome = train(copy)
    if outcome == "code 0":
        found += compare_runs(runs[0] / copy, runs[1] / copy, where="resumed by OLD | by NEW")
        found += compare_checkpoints(runs[0] / name, runs[1] / copy, where="uninterrupted by OLD | resumed by NEW")
    report.add(f"--run {name}, resumed", ("resumed",), [each._replace(group="resumed") for each in found])


def make_text(folder: Path) -> None:
    """Write the text that the runs train on: words of a small vocabulary, from a seed."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(300)]
    text = " ".join(draw.choices(words, k=TEXT_BYTES // 4))[:TEXT_BYTES]
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text)


def compare(checkouts: Checkouts, cases: dict[int, Case], runs: Sequence[dict[str, Any]]) -> Report:
    """Run all cases and runs: for each number of ranks, in one world of each checkout."""
    report = Report()
    for side in ("old", "new"):
        make_text(checkouts.folder(side))
    for size in sorted({case["ranks"] for case in cases.values()} | ({RUN_RANKS} if runs else set())):
        of_size = {number: case for number, case in cases.items() if case["ranks"] == size}
        begin, worlds = time.monotonic(), checkouts.worlds(size)
        try:
            for number, case in of_size.items():
                run_case(report, worlds, checkouts, number, case)
            summary = f"{len(of_size):>3} cases"
            if size == RUN_RANKS and runs:
                for fields in runs:
                    run_folder(report, worlds, checkouts, fields)
                summary += f", {len(runs)} runs"
        finally:
            for world in worlds.values():
                world.end()
        print(f"{size} rank{'s' if size > 1 else ' '}  {summary:<20}{time.monotonic() - begin:>6.0f} s", flush=True)
    return report


def _describe_checkout(folder: Path) -> str:
    git_log = subprocess.run(["git", "-C", folder, "log", "-1", "--format=%h %s"], capture_output=True, text=True)
    return f"{folder}  {git_log.stdout.strip()[:80]}"


def select(arguments: argparse.Namespace, count: int) -> tuple[Sequence[int], list[dict[str, Any]]]:
    """The numbers of the cases, and the runs, that the command line selects."""
    runs = [same_cases.RUNS[number] for number in same_cases.QUICK_RUNS] if arguments.quick else list(same_cases.RUNS)
    if arguments.case or arguments.run:
        named = [fields for fields in same_cases.RUNS if same_cases.run_name(fields) in (arguments.run or [])]
        return arguments.case or [], named
    return range(same_cases.NUM_QUICK if arguments.quick else count), [] if arguments.no_runs else runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.same", description="Compares what two checkouts compute.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"{same_cases.NUM_QUICK} cases and 4 runs")
    parser.add_argument("--case", type=int, nargs="+", help="only these cases")
    parser.add_argument("--run", nargs="+", help="only these runs, by name")
    parser.add_argument("--no-runs", action="store_true", help="no run folders")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    arguments = parser.parse_args()
    cases, share = same_cases.generate()
    if arguments.list:
        print("\n".join(f"{number:>3}  {same_cases.describe(case)}" for number, case in enumerate(cases)))
        return 0
    numbers, runs = select(arguments, len(cases))
    old, new = (folder.resolve() for folder in (arguments.old, arguments.new))
    print(f"OLD  {_describe_checkout(old)}\nNEW  {_describe_checkout(new)}")
    plan = (
        f"{len(numbers)} cases and {len(runs)} runs; all {len(cases)} cases cover {share:.0%} of the pairs of options"
    )
    print(f"{plan}\n", flush=True)
    begin, work_dir = time.monotonic(), Path(tempfile.mkdtemp(prefix="fourfold-same-"))
    try:
        report = compare(Checkouts(old, new, work_dir), {number: cases[number] for number in numbers}, runs)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    report.print(time.monotonic() - begin)
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Whether two checkouts of this project compute the same, bit for bit.

    python -m bench.same OLD NEW [--quick] [--case N …] [--run NAME …] [--no-runs] [--list]

OLD and NEW are folders of checkouts. Each runs in processes of its own, driven by the names of the design's contracts
alone (`bench.same_child`), so that everything else may have other names in NEW.

case   one of 60 trainings, drawn from a seed: plan, model, loss, optimizer, batches, on 1 to 4 ranks (`same_cases`)
run    a run folder that `fourfold train` writes: one per zero level and codec, local steps, mixed precision
world  the processes of one checkout and one number of ranks; it runs many cases

Compared of a case: the loss and metrics of 3 steps and an evaluation; every tensor and value of `state_dict()`, on
all ranks, with `reload` after one more step of a step that has loaded the state; with DistributedOptimizer gradients,
too. And the collectives: which calls reach a ProcessGroup of torch.distributed, in which order in each group, with
kind, elements, dtype, bytes, peers and tags (`same_record`).
What travels by shared memory makes no such call. Its order is seen in the traces of cases with the door "train" and
of all runs: which bucket is ready, sent, updated and gathered, in order; and in the log, the bytes sent.

Compared of a run: log, settings, plan, trace, collectives, and all checkpoints (manifest; file, title, dtype, shape and
bytes of each tensor), when both write it from scratch. Then the run of OLD is cut after step 3, and each checkout
resumes a copy: the resumed runs are compared with each other, and their last checkpoint with that of the run that was
never cut.

A case in which a process fails or hangs is asked for once more in a new world, and the first failure is printed.
Not compared: times, the text of messages, GPUs, several hosts. The exit code is 1 where anything differs or fails.
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
from bench.same_runs import compare_checkpoints, compare_runs, cut
from bench.same_world import CheckoutWorld, WorldFailed

GROUPS = ("outcome", "losses", "metrics", "weights", "states", "collectives", "log", "trace", "checkpoints", "resumed")
NUMBERS = ("losses", "metrics", "weights", "log", "checkpoints", "resumed")
SHOWN = 6  # differences of one case or run
RUN_RANKS = 2
TEXT_BYTES = 40_000


class Checkouts(NamedTuple):
    """The two folders, and where their processes write."""

    old: Path
    new: Path
    place: Path

    def folder(self, side: str) -> Path:
        return self.place / side

    def worlds(self, size: int) -> dict[str, CheckoutWorld]:
        """A world of each, not started yet."""
        return {side: CheckoutWorld(getattr(self, side), size, folder=self.folder(side)) for side in ("old", "new")}


class Report:
    """What was compared and what differed, and how it is printed."""

    def __init__(self) -> None:
        self.compared: dict[str, int] = {}
        self.differing: dict[str, int] = {}
        self.found: list[tuple[str, list[Difference]]] = []
        self.refused: list[str] = []
        """What OLD has not trained: nothing was compared but that NEW does not, either."""
        self.num_cases = self.num_runs = self.num_again = 0

    def add(self, title: str, groups: Iterable[str], found: list[Difference]) -> None:
        """Take in a comparison of these groups."""
        told = {difference.group for difference in found}
        for group in {*groups, *told}:
            self.compared[group] = self.compared.get(group, 0) + 1
            self.differing[group] = self.differing.get(group, 0) + (group in told)
        if found:
            self.found.append((title, sorted(found, key=lambda each: GROUPS.index(each.group))))

    def print(self, seconds: float) -> None:
        print(f"\n{'group':<16}{'compared':>10}{'same':>8}{'differ':>8}")
        for group in GROUPS:
            if count := self.compared.get(group, 0):
                differ = self.differing[group]
                print(f"{group:<16}{count:>10}{count - differ:>8}{differ:>8}")
        if self.found:
            print("\nwhat differs (OLD | NEW)")
        for title, found in self.found:
            print(f"  {title}")
            for difference in found[:SHOWN]:
                print(f"      {difference}")
            if len(found) > SHOWN:
                print(f"      and {len(found) - SHOWN} more")
        for title in self.refused:
            print(f"\nnot trained by OLD: {title}")
        what = f"{self.num_cases} cases and {self.num_runs} runs"
        if self.num_again:
            print(f"\n{self.num_again} cases failed once, and were asked again: see above")
        largest = max((each.size for _, found in self.found for each in found if each.group in NUMBERS), default=0.0)
        verdict = (
            f"different: {len(self.found)} entries above, of {what}; largest difference {largest:.3g}"
            if self.found
            else None
        )
        print(f"\n{verdict or f'the same: {what}'}   ({seconds:.0f} s)", flush=True)


def ask_both(
    worlds: dict[str, CheckoutWorld], requests: dict[str, dict[str, Any]]
) -> tuple[list[Difference], str | None]:
    """Have both worlds do the same at once; how their outcomes differ, and OLD's, or None where one failed."""
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
    found, outcome = ask_both(worlds, requests)
    if outcome is None and case["door"] != "train":  # a run that is there already would go on
        told = "; ".join(f"{each.where} {each.told.splitlines()[0]}" for each in found if each.told != "trained")
        print(f"asked again: --case {number}, where {told}", flush=True)
        found, outcome = ask_both(worlds, requests)
        report.num_again += 1
    groups = ["outcome"]
    if outcome is not None:
        groups += ["losses", "weights", "collectives"]
        groups += ["metrics", "states"] if case["door"] != "train" else ["log", "trace", "checkpoints"]
        found += compare_records(files["old"], files["new"], case["ranks"])
        folders = [checkouts.folder(side) / "runs" / name for side in worlds]
        if all(folder.exists() for folder in folders):
            found += compare_runs(*folders, where="run")
    report.num_cases += 1
    title = f"--case {number}: {same_cases.describe(case)}"
    report.refused += [title] if outcome not in (None, "trained") else []
    report.add(title, groups, found)


def run_folder(report: Report, worlds: dict[str, CheckoutWorld], checkouts: Checkouts, fields: dict[str, Any]) -> None:
    """One run of both checkouts from scratch, then resumed by both from a copy of OLD's."""
    name, sides = same_cases.run_name(fields), list(worlds)
    for side in sides:
        (checkouts.folder(side) / f"{name}.toml").write_text(same_cases.toml(fields))

    def train(run: str) -> tuple[list[Difference], str | None]:
        words = ["train", "lm", f"{name}.toml", *same_cases.RUN_WORDS, f"name={run}"]
        files = {side: str(checkouts.folder(side) / run) for side in sides}
        told, outcome = ask_both(worlds, {side: {"words": words, "file": files[side]} for side in sides})
        if outcome not in (None, "code 0"):
            report.refused.append(f"--run {name}: {outcome} of OLD")
        return told + (compare_records(files["old"], files["new"], RUN_RANKS) if outcome else []), outcome

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
        cut(runs[0] / name, run / copy)
    found, outcome = train(copy)
    if outcome == "code 0":
        found += compare_runs(runs[0] / copy, runs[1] / copy, where="resumed by OLD | by NEW")
        found += compare_checkpoints(runs[0] / name, runs[1] / copy, where="never cut by OLD | resumed by NEW")
    report.add(f"--run {name}, resumed", ("resumed",), [each._replace(group="resumed") for each in found])


def make_text(folder: Path) -> None:
    """What the runs train on: words of a small vocabulary, from a seed."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(300)]
    text = " ".join(draw.choices(words, k=TEXT_BYTES // 4))[:TEXT_BYTES]
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text)


def compare(checkouts: Checkouts, cases: dict[int, Case], runs: Sequence[dict[str, Any]]) -> Report:
    """All cases and runs, a world of each checkout at a time for each number of ranks."""
    report = Report()
    for side in ("old", "new"):
        make_text(checkouts.folder(side))
    for size in sorted({case["ranks"] for case in cases.values()} | ({RUN_RANKS} if runs else set())):
        own = {number: case for number, case in cases.items() if case["ranks"] == size}
        begin, worlds = time.monotonic(), checkouts.worlds(size)
        try:
            for number, case in own.items():
                run_case(report, worlds, checkouts, number, case)
            told = f"{len(own):>3} cases"
            if size == RUN_RANKS and runs:
                for fields in runs:
                    run_folder(report, worlds, checkouts, fields)
                told += f", {len(runs)} runs"
        finally:
            for world in worlds.values():
                world.end()
        print(f"{size} rank{'s' if size > 1 else ' '}  {told:<20}{time.monotonic() - begin:>6.0f} s", flush=True)
    return report


def _named(folder: Path) -> str:
    told = subprocess.run(["git", "-C", folder, "log", "-1", "--format=%h %s"], capture_output=True, text=True)
    return f"{folder}  {told.stdout.strip()[:80]}"


def chosen(asked: argparse.Namespace, count: int) -> tuple[Sequence[int], list[dict[str, Any]]]:
    """The numbers of the cases, and the runs, that are asked for."""
    runs = [same_cases.RUNS[number] for number in same_cases.QUICK_RUNS] if asked.quick else list(same_cases.RUNS)
    if asked.case or asked.run:
        named = [fields for fields in same_cases.RUNS if same_cases.run_name(fields) in (asked.run or [])]
        return asked.case or [], named
    return range(same_cases.NUM_QUICK if asked.quick else count), [] if asked.no_runs else runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.same", description="Do two checkouts compute the same?")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"{same_cases.NUM_QUICK} cases and 4 runs")
    parser.add_argument("--case", type=int, nargs="+", help="these cases alone")
    parser.add_argument("--run", nargs="+", help="these runs alone, by name")
    parser.add_argument("--no-runs", action="store_true", help="no run folders")
    parser.add_argument("--list", action="store_true", help="print the cases, and run none")
    asked = parser.parse_args()
    cases, share = same_cases.generate()
    if asked.list:
        print("\n".join(f"{number:>3}  {same_cases.describe(case)}" for number, case in enumerate(cases)))
        return 0
    numbers, runs = chosen(asked, len(cases))
    old, new = (folder.resolve() for folder in (asked.old, asked.new))
    print(f"OLD  {_named(old)}\nNEW  {_named(new)}")
    told = f"{len(numbers)} cases and {len(runs)} runs; all {len(cases)} cases have {share:.0%} of the pairs of options"
    print(f"{told}\n", flush=True)
    begin, place = time.monotonic(), Path(tempfile.mkdtemp(prefix="fourfold-same-"))
    try:
        report = compare(Checkouts(old, new, place), {number: cases[number] for number in numbers}, runs)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    report.print(time.monotonic() - begin)
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())

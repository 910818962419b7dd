"""`fourfold feed bench`: its words, the trainings that they ask for, and where the results go.

Law: an unknown word or value is an error that names the closest one, before anything is written.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.output import print_text, write_file
from fourfold.words.errors import Problem, SettingError
from fourfold.words.field import Field, read_words
from fourfold.words.run_files import LOG_FILE, RUNS_DIR
from fourfold.words.units import Dimension

if TYPE_CHECKING:
    from fourfold_bench.result import Result
    from fourfold_bench.run import Options
    from fourfold_bench.workload import Workload

WHERE = "fourfold feed bench"
DEFAULT_FOLDER = "feed-bench"
MAX_ACCELERATORS = 64


COUNT = Field(type=int, minimum=1)
SECONDS = Field(type=float, above=0, below=math.inf)
WORDS = {
    "accelerator": Field(type=str),
    "compute": Field(type=str),
    "accelerators": Field(type=int, minimum=1, maximum=MAX_ACCELERATORS),
    **dict.fromkeys(("samples", "steps", "epochs", "batch_size", "read_threads"), COUNT),
    "format": Field(type=str),
    "cache": Field(type=str, choices=("keep", "drop")),
    "direct": Field(type=bool),
    "origin": Field(dimension=Dimension.BYTES_PER_SECOND),
    "staged": Field(type=bool),
    "scale": Field(type=float, above=0, maximum=1e6),
    "checkpoint": Field(dimension=Dimension.BYTES, minimum=0),
    "seed": Field(type=int, minimum=0, maximum=2**63 - 1),
    **dict.fromkeys(("folder", "json", "page"), Field(type=os.PathLike)),
}


def parse_words(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The workload or the file, and the values of the words. Raises SettingError with all problems."""
    names, values, problems = read_words(words, WORDS, lists=("accelerators",))
    if len(names) != 1:
        got = " and ".join(names) if names else "no workload"
        problems.append(Problem(got, "one workload, or one FILE.yaml", f"{WHERE} unet3d"))
    if problems:
        raise SettingError(problems, where=WHERE)
    return names[0], values


def run_bench(words: Sequence[str]) -> int:
    """`fourfold feed bench`; returns the exit code: 1 if a threshold of MLPerf Storage is not met."""
    name, values = parse_words(words)
    from fourfold.report.document import render
    from fourfold_bench.page import describe_feed_bench
    from fourfold_bench.result import format_result, format_sweep

    folder = Path(values.pop("folder", DEFAULT_FOLDER))
    json_file, page = values.pop("json", None), values.pop("page", folder / "bench.html")
    results = []
    for workload, options in _trainings(name, values, folder):
        results.append(_run(workload, options))
        print_text(format_result(results[-1]) + "\n")
    if len(results) > 1:
        print_text(format_sweep(results) + "\n")
    files = {page: render(describe_feed_bench(results))}
    if json_file is not None:
        files[json_file] = json.dumps([each.to_json() for each in results], indent=1) + "\n"
    for path, text in files.items():
        write_file(Path(path), text, where=WHERE)
        print_text(f"wrote {path}")
    return 1 if any(each.passes is False for each in results) else 0


def _run(workload: "Workload", options: "Options") -> "Result":
    from fourfold_bench.run import run_workload

    return run_workload(workload, options, say=print_text)


def _trainings(name: str, values: Mapping[str, Any], folder: Path) -> "list[tuple[Workload, Options]]":
    """What to run: each workload with each number of accelerators. Raises SettingError."""
    from fourfold_bench.run import Options
    from fourfold_bench.workload import Experiment, open_recipe

    values = dict(values)
    accelerator, compute = values.pop("accelerator", None), values.pop("compute", None)
    if name.endswith((".yaml", ".yml")):
        from fourfold_bench.dlio_yaml import read_dlio_yaml

        workloads = [read_dlio_yaml(Path(name))]
    else:
        opened = open_recipe(name, accelerator)
        if isinstance(opened, Experiment):
            values = {**opened.settings, **values}
            workloads = [_workload_of(each, accelerator) for each in opened.workloads]
        else:
            workloads = [opened]
    if compute is not None:
        seconds, source = _compute_seconds(compute)
        workloads = [dataclasses.replace(each, compute=seconds, accelerator=source) for each in workloads]
    sizes = values.pop("accelerators", [1])
    if "checkpoint" in values:
        values["checkpoint"] = int(values["checkpoint"])
    # What an experiment stages, it reads directly first, and then in a second epoch from copies.
    staged = values.pop("staged", False)
    again = [each for each in workloads if isinstance(staged, list) and each.name in staged]
    ways = [(each, {"staged": staged is True}) for each in workloads]
    ways += [(each, {"staged": True, "epochs": max(2, values.get("epochs", 2))}) for each in again]
    return [
        (each, Options(folder=folder, accelerators=size, **{**values, **way})) for each, way in ways for size in sizes
    ]


def _workload_of(name: str, accelerator: str | None) -> Any:
    """A workload of an experiment, on this accelerator if DLIO has it."""
    from fourfold_bench.workload import open_recipe, read_recipe

    return open_recipe(name, accelerator if accelerator in read_recipe(name)["accelerators"] else None)


def _compute_seconds(text: str) -> tuple[Any, str]:
    """A time in seconds, or the median step of a run; and what to call the accelerator."""
    from fourfold_bench.workload import Seconds

    with contextlib.suppress(ValueError):  # then it is a run
        return Seconds((SECONDS.parse(text),)), "own"
    log = next((path for path in (Path(text, LOG_FILE), Path(RUNS_DIR, text, LOG_FILE)) if path.is_file()), None)
    if log is None:
        problem = Problem(f"compute = {text}", "seconds above 0, or the folder of a run", "compute=0.2")
        raise SettingError(problem, where=WHERE)
    from fourfold.cli.plan.run import median_step_seconds

    seconds = median_step_seconds(log)
    if seconds is None:
        raise SettingError(Problem(f"{log}: no steps", "a run with steps"), where=WHERE)
    return Seconds((seconds,)), f"rank of {log.parent.name}"

"""`fourfold feed bench`: its words, the trainings that they ask for, and where the results go.

size   a number of bytes, as 1e9, 200MB or 4GiB
Law: an unknown word or value is an error that names the closest one, before anything is written.
"""

import dataclasses
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.output import print_text
from fourfold.words.errors import Problem, SettingError, closest_match, os_error_text
from fourfold.words.run_files import LOG_FILE, RUNS_DIR

if TYPE_CHECKING:
    from fourfold.feed.bench.result import Result
    from fourfold.feed.bench.run import Options
    from fourfold.feed.bench.workload import Workload

SIZE = re.compile(r"(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*(?P<prefix>[kMGT]?)(?P<binary>i?)B?(?:/s)?", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
WHERE = "fourfold feed bench"
DEFAULT_FOLDER = "feed-bench"
MAX_ACCELERATORS = 64


def parse_size(text: str) -> float:
    """A number of bytes. Raises ValueError."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    base = 1024 if match["binary"] else 1000
    return float(match["number"]) * base ** POWERS[match["prefix"].lower()]


def _positive(parse: Any) -> Any:
    def check(text: str) -> Any:
        value = parse(text)
        if not 0 < value < float("inf"):
            raise ValueError(text)
        return value

    return check


def _choice(*words: str) -> Any:
    def check(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return check


def _count(text: str) -> int:
    value = float(text)
    if not value.is_integer() or value < 1:
        raise ValueError(text)
    return int(value)


def _seed(text: str) -> int:
    if not 0 <= int(text) < 2**63:
        raise ValueError(text)
    return int(text)


def _counts(text: str) -> list[int]:
    counts = [_count(part) for part in text.split(",")]
    if max(counts) > MAX_ACCELERATORS:
        raise ValueError(text)
    return counts


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


# Word -> how its text is read, and what is needed.
WORDS: dict[str, tuple[Any, str]] = {
    "accelerator": (str, "a100, h100 or v100"),
    "compute": (str, "seconds above 0, or the folder of a run"),
    "accelerators": (_counts, f"whole numbers from 1 to {MAX_ACCELERATORS}, with commas between them"),
    **dict.fromkeys(("samples", "steps", "epochs", "batch_size"), (_count, "a whole number above 0")),
    "read_threads": (_count, "a whole number above 0"),
    "format": (str, "npy or npz"),
    "cache": (_choice("keep", "drop"), "keep or drop"),
    "direct": (_bool, "true or false"),
    "origin": (_positive(parse_size), "bytes a second above 0, such as 200MB"),
    "staged": (_bool, "true or false"),
    "scale": (_positive(float), "a number above 0"),
    "checkpoint": (parse_size, "bytes, such as 1GB, or 0"),
    "seed": (_seed, "a whole number of at least 0"),
    "folder": (Path, "a folder"),
    "json": (Path, "a file"),
    "page": (Path, "a file"),
}


def parse_words(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The workload or the file, and the values of the words. Raises SettingError with all problems."""
    names = [word for word in words if "=" not in word]
    problems, values = [], dict[str, Any]()
    for word in words:
        key, is_pair, text = word.partition("=")
        if not is_pair:
            continue
        if key not in WORDS:
            close = closest_match(key, WORDS)
            problems.append(Problem(word, "a known word", f"{close}={text}" if close else f"one of {', '.join(WORDS)}"))
            continue
        if key in values:
            problems.append(Problem(f"{key}, twice", "each word once"))
        parse, need = WORDS[key]
        try:
            values[key] = parse(text)
        except (ValueError, KeyError, OverflowError):
            problems.append(Problem(f"{key} = {text or '(nothing)'}", need))
    if len(names) != 1:
        got = " and ".join(names) if names else "no workload"
        problems.append(Problem(got, "one workload, or one FILE.yaml", f"{WHERE} unet3d"))
    if problems:
        raise SettingError(problems, where=WHERE)
    return names[0], values


def run_bench(words: Sequence[str]) -> int:
    """`fourfold feed bench`; returns the exit code: 1 if a threshold of MLPerf Storage is not met."""
    name, values = parse_words(words)
    from fourfold.feed.bench.result import format_result, format_sweep
    from fourfold.report.feed_bench_page import render_feed_bench

    folder, json_file, page = (values.pop(key, None) for key in ("folder", "json", "page"))
    folder = folder or Path(DEFAULT_FOLDER)
    results = []
    for workload, options in _trainings(name, values, folder):
        results.append(_run(workload, options))
        print_text(format_result(results[-1]) + "\n")
    if len(results) > 1:
        print_text(format_sweep(results) + "\n")
    _write(page or folder / "bench.html", render_feed_bench(results))
    if json_file is not None:
        _write(json_file, json.dumps([each.to_json() for each in results], indent=1) + "\n")
    return 1 if any(each.passes is False for each in results) else 0


def _run(workload: "Workload", options: "Options") -> "Result":
    from fourfold.feed.bench.run import run_workload

    return run_workload(workload, options, say=print_text)


def _trainings(name: str, values: Mapping[str, Any], folder: Path) -> "list[tuple[Workload, Options]]":
    """What to run: each workload with each number of accelerators. Raises SettingError."""
    from fourfold.feed.bench.run import Options
    from fourfold.feed.bench.workload import Experiment, open_recipe

    values = dict(values)
    accelerator, compute = values.pop("accelerator", None), values.pop("compute", None)
    if name.endswith((".yaml", ".yml")):
        from fourfold.feed.bench.dlio_yaml import read_dlio_yaml

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
    from fourfold.feed.bench.workload import open_recipe, read_recipe

    return open_recipe(name, accelerator if accelerator in read_recipe(name)["accelerators"] else None)


def _compute_seconds(text: str) -> tuple[Any, str]:
    """A time in seconds, or the median step of a run; and what to call the accelerator."""
    from fourfold.feed.bench.workload import Seconds

    try:
        return Seconds((_positive(float)(text),)), "own"
    except ValueError:
        pass
    log = next((path for path in (Path(text, LOG_FILE), Path(RUNS_DIR, text, LOG_FILE)) if path.is_file()), None)
    if log is None:
        raise SettingError(Problem(f"compute = {text}", WORDS["compute"][1], "compute=0.2"), where=WHERE)
    from fourfold.report.run_record import read_log

    steps = [line["seconds"] for line in read_log(log) if "loss" in line and "step" in line]
    if len(steps) < 2:
        raise SettingError(Problem(f"{log}: {len(steps)} steps", "at least 2, of which the first is left out"))
    return Seconds((statistics.median(steps[1:]),)), f"rank of {log.parent.name}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        got = f"{path} could not be written: {os_error_text(error)}"
        raise SettingError(Problem(got, "a place that can be written to", "another PATH"), where=WHERE) from None
    print_text(f"wrote {path}")

"""Run folders of two checkouts: compares them, and truncates copies of a run to resume it.

log         metrics.jsonl, without times
trace       trace.json: what each rank did, in order, by lane and verb; without times and waits
checkpoint  manifest.json, and the stored tensors of all files
Law: only file formats that versions share are used here.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from bench.same_cases import NEW_NAMES, SAVED_STEP
from bench.same_compare import Difference, Stored, compare_facts, compare_tensors, read_tensors

TIMES = ("seconds", "waiting_seconds", "data_seconds", "pause_seconds", "elapsed_seconds", "rate")
LOCAL = ("versions", "machine", "cores", "host", "name")  # of settings.json: this machine, and this checkout
LOG_BYTES = "metrics_bytes"  # of a manifest: the length of a log that holds times


def read_log(folder: Path) -> list[Any]:
    """The lines of the log without times, and without stragglers and waits for data, which depend on time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if "late" not in line and "data" not in line]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in kept]


def read_settings(folder: Path) -> dict[str, Any]:
    """settings.json without what belongs to the machine, and plan.toml under the newest names."""
    settings = json.loads((folder / "settings.json").read_text())
    plan = dict(line.split(" = ", 1) for line in (folder / "plan.toml").read_text().splitlines() if " = " in line)
    settings = {name: value for name, value in settings.items() if name not in LOCAL}
    if isinstance(settings.get("identity"), dict):
        settings["identity"] = {NEW_NAMES.get(name, name): value for name, value in settings["identity"].items()}
    return {"settings": settings, "plan": {NEW_NAMES.get(name, name): value for name, value in plan.items()}}


def read_trace(folder: Path) -> dict[str, list[str]]:
    """The names of events in order, by rank, step, lane and verb.

    The order between verbs is not compared: a bucket may be ready before or after another one is sent. Reductions end
    in any order, so their ends are sorted.
    """
    path = folder / "trace.json"
    if not path.exists():
        return {}
    events = [event for event in json.loads(path.read_text())["traceEvents"] if "ts" in event]
    names_by_place: dict[str, list[str]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        name, _, what = event["name"].partition(" ")
        if name in ("wait", "data", ""):  # the wait for data has had two lanes
            continue
        place = f"rank {event['pid']} step {event['args']['step']} {event['cat']} {name[:1]}… {what}".rstrip()
        names_by_place.setdefault(place, []).append(name)
    return {
        place: sorted(names) if place.endswith("done") else names for place, names in sorted(names_by_place.items())
    }


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The manifest without the log's length, and all tensors, named by file and title."""
    manifest = json.loads((folder / "manifest.json").read_text())
    inner = manifest.get("manifest", manifest)
    facts = {name: value for name, value in inner.items() if name != LOG_BYTES}
    facts["keys of the file"] = sorted(manifest)
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= {f"{path.name} {name}": each for name, each in read_tensors(path).items()}
    return facts, stored


def compare_checkpoints(old: Path, new: Path, *, where: str) -> list[Difference]:
    """All checkpoints of two runs."""
    names = [sorted(path.name for path in (run / "checkpoints").glob("step-*")) for run in (old, new)]
    found = compare_facts(names[0], names[1], group="checkpoints", where=f"{where} names")
    for name in [name for name in names[0] if name in names[1]]:
        facts, stored = zip(*(read_checkpoint(run / "checkpoints" / name) for run in (old, new)), strict=True)
        place = f"{where} {name}"
        found += compare_facts(facts[0], facts[1], group="checkpoints", where=f"{place} manifest")
        found += compare_tensors(stored[0], stored[1], group="checkpoints", where=place)
    return found


def compare_runs(old: Path, new: Path, *, where: str) -> list[Difference]:
    """Two run folders: log, settings, plan, trace and checkpoints."""
    found = compare_facts(read_log(old), read_log(new), group="log", where=where)
    found += compare_facts(read_settings(old), read_settings(new), group="log", where=f"{where} settings")
    found += compare_facts(read_trace(old), read_trace(new), group="trace", where=where)
    return found + compare_checkpoints(old, new, where=where)


def truncate_run(run: Path, copy: Path) -> None:
    """Copy a finished run as it was after its saved step, without later checkpoints and log lines."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.partition("-")[2]) > SAVED_STEP:
            shutil.rmtree(path)
    log = copy / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", SAVED_STEP + 1) <= SAVED_STEP]
    log.write_text("".join(kept))
    for name in ("trace.json", "report.html"):
        (copy / name).unlink(missing_ok=True)

"""Runs to report on, and what the data of their pages holds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.plan.plan import Plan
from fourfold.report.document import encode
from fourfold.trace.trace_file import encode_trace
from tests.recorded_traces import trace

NASTY = "<b>&\"'</script><!--"


def make_run(folder: Path, *, task: str = "lm", loss: float = 3.0, tokens: int | None = 2048) -> Path:
    """The folder of a run of six steps, with a trace."""
    folder.mkdir()
    (folder / "plan.toml").write_text(Plan(dp=2).to_toml(defaults=True))
    versions = {"fourfold": "0.1.0", "torch": "2.13.0", "python": "3.11.2"}
    settings = {"task": task, "steps": 6, "batch_size": 8, "clip": None, "transport": "shared memory"}
    (folder / "settings.json").write_text(json.dumps({**settings, "versions": versions, "cores": 2}))
    times = {"seconds": 0.5, "waiting_seconds": 0.125, "data_seconds": 0.25}
    unit = "tokens" if tokens else "samples"
    counts = {"samples": 8, "tokens": tokens, "units": tokens or 8, "unit": unit}
    lines = [{"step": n, "loss": loss - 0.1 * n, **counts, "elapsed_seconds": 0.5 * n, **times} for n in range(1, 7)]
    valid = {"step": 6, "valid": {"loss": 2.34567, "bits per byte": 3.3841}}
    finished = {"finished": 6, "seconds": 3.25, "rate": 3780.9, "unit": unit, "valid": valid["valid"]}
    log(folder, *lines, valid, finished)
    (folder / "trace.json").write_bytes(encode_trace(trace(late=1.0)))
    return folder


def log(folder: Path, *lines: dict[str, Any]) -> None:
    """Append lines to the log of a run."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def parts(data: Any, title: str = "") -> Iterator[dict[str, Any]]:
    """The parts of a page as its script reads them, those of folds too; with `title`, of one card."""
    for card in json.loads(encode(data))["cards"]:
        if title in ("", card["title"]):
            yield from _unfolded(card["parts"])


def _unfolded(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for part in found:
        yield part
        yield from _unfolded(part.get("parts", []))


def titles(data: Any) -> list[str]:
    """The titles of the cards."""
    return [card["title"] for card in data["cards"]]


def rows(data: Any, title: str) -> list[list[str]]:
    """The rows of the tables of a card."""
    return [row for part in parts(data, title) if part["kind"] == "table" for row in part["rows"]]


def curves(data: Any, title: str) -> dict[str, list[list[float]]]:
    """The points of a card's curves and marks, by name."""
    drawn = [part for part in parts(data, title) if part["kind"] == "lines"]
    return {each["name"]: each["points"] for part in drawn for each in part["series"]}


def texts(data: Any) -> list[str]:
    """Every text that a reader can see on the page, with those that the pointer shows."""
    data = json.loads(encode(data))
    found = [data["title"], data["under"], *(text for pair in data["figures"] for text in pair), *titles(data)]
    for part in parts(data):
        found += [part[name] for name in ("text", "x", "y") if name in part]
        found += [part["title"]] if part["kind"] == "fold" else []
        found += [name for name, _ in part.get("keys", ())]
        found += [*part.get("columns", ()), *(cell for row in part.get("rows", ()) for cell in row)]
        found += [text for name, _, label, _ in part.get("bars", ()) for text in (name, label)]
        found += [text for name, blocks in part.get("lanes", ()) for text in (name, *(block[0] for block in blocks))]
        named = [each["name"] for each in part.get("series", ()) if each["named"]]
        found += named if len(named) > 1 or part.get("legend") else []
    return [text for text in found if text]


def visible_text(data: Any) -> str:
    """All of it, in one text."""
    return " ".join(" ".join(texts(data)).split())

"""Summary: what a run says at its end, and the texts that its log and screen share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    loss    mean of the last steps
    valid   "loss" and the task's own measures
    units_per_second  over the whole run
    sample  what the task's `sample` returned, on rank 0
    stopped  why the run ended before its last step, if a callback asked for it
    """

    folder: Path | None
    steps: int
    loss: float
    valid: Mapping[str, float]
    units_per_second: float
    seconds: float
    sample: str | None
    stopped: str | None = None


def format_offload(device: str) -> str:
    """What is printed for a plan with offload = "states"."""
    if device == "cpu":
        return 'offload = "states": optimizer states are in host memory already, as everything is on CPU ranks'
    return 'offload = "states": optimizer states and weights to be updated are in host memory, where the update runs'


def format_metrics(valid: Mapping[str, float]) -> str:
    """Measures in one line: `loss 2.031   bits per byte 2.930`."""
    return "   ".join(f"{name} {value:.4f}" for name, value in valid.items())


def format_summary(result: RunResult, unit: str, *, steps: int) -> str:
    """What is printed at the end of a run. `steps`: those that `result.seconds` were spent on."""
    rows = [(f"validation {name}" if name == "loss" else name, f"{value:.4f}") for name, value in result.valid.items()]
    rows += [("training loss", f"{result.loss:.4f}")]
    if steps:
        rows += [(f"{unit} per second", f"{result.units_per_second:,.0f}")]
        rows += [("time", f"{result.seconds:.1f} s for {steps} steps")]
    else:
        rows += [("steps", f"all {result.steps} had been done; nothing was left to train")]
    rows += [("stopped", f"after step {result.steps}, {result.stopped}")] if result.stopped is not None else []
    rows += [("folder", str(result.folder))]
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
    return text if not result.sample else f"{text}\n\nsample\n{result.sample}"

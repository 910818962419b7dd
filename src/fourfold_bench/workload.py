"""Workload: what DLIO says of a training: its files, its batches, and how long its accelerator computes.

record    the bytes of one sample in a file; their number varies by `record_bytes_stdev`
sample    what the model gets of a record: its first bytes, or the record repeated, `sample_bytes` long
scaled    fewer samples, fewer epochs or smaller records than the workload has; times are never scaled
Law: the workloads that come with Fourfold are the files of `workloads`, with the values of DLIO; what a run
changes of them, it says.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from fourfold.words.errors import Problem, SettingError, closest_match

WORKLOADS = resources.files("fourfold_bench") / "workloads"
SUFFIX = ".toml"
# By type of distribution: the numbers that it needs, as numpy's generator takes them.
DISTRIBUTIONS = {
    "normal": ("mean", "stdev"),
    "uniform": ("min", "max"),
    "gamma": ("shape", "scale"),
    "exponential": ("scale",),
    "poisson": ("lam",),
}


@dataclass(frozen=True)
class Seconds:
    """A time that is always the same, or drawn. `numbers`: those of `DISTRIBUTIONS`, or the time itself."""

    numbers: tuple[float, ...]
    distribution: str = ""

    def draw(self, rng: np.random.Generator) -> float:
        """A time. Never negative: as DLIO does, the absolute value is taken."""
        if not self.distribution:
            return self.numbers[0]
        return abs(float(getattr(rng, self.distribution)(*self.numbers)))

    @property
    def mean(self) -> float:
        """The mean of the distribution."""
        first, *others = self.numbers
        if self.distribution == "uniform":
            return (first + others[0]) / 2
        return first * others[0] if self.distribution == "gamma" else first

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.mean:g} s"
        return f"{self.distribution}({', '.join(f'{number:g}' for number in self.numbers)}), {self.mean:g} s on average"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training as DLIO describes it. Sizes in bytes, times in seconds.

    batch_size        samples of one accelerator
    steps             at most so many in an epoch; None: all
    threshold         the utilization that MLPerf Storage requires; None: it requires none
    checkpoint_bytes  what a checkpoint writes; 0: there is none
    preprocess        spent on each sample by the thread that reads it
    notes             what is otherwise than in DLIO
    """

    name: str
    accelerator: str
    format: str
    num_files: int
    samples_per_file: int
    record_bytes: int
    record_bytes_stdev: int = 0
    sample_bytes: int
    batch_size: int
    compute: Seconds
    read_threads: int = 1
    epochs: int = 1
    steps: int | None = None
    threshold: float | None = None
    checkpoint_bytes: int = 0
    preprocess: Seconds = Seconds((0.0,))
    notes: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int:
        return self.num_files * self.samples_per_file

    @property
    def bytes_per_second(self) -> float:
        """What one accelerator reads while it always computes."""
        return self.batch_size * self.record_bytes / self.compute.mean

    def steps_of_epoch(self, accelerators: int) -> int:
        """The steps of an epoch, in whole batches."""
        steps = self.num_samples // (self.batch_size * accelerators)
        return steps if self.steps is None else min(steps, self.steps)

    def with_samples(self, num_samples: int) -> "Workload":
        """The workload with about so many samples: fewer files, at last with fewer samples in each."""
        num_files = -(-num_samples // self.samples_per_file)
        return dataclasses.replace(self, num_files=num_files, samples_per_file=-(-num_samples // num_files))

    def with_scaled_bytes(self, scale: float) -> "Workload":
        """The workload with every size multiplied by `scale`."""
        sizes = ("record_bytes", "record_bytes_stdev", "sample_bytes", "checkpoint_bytes")
        scaled = {name: round(scale * getattr(self, name)) for name in sizes}
        scaled["record_bytes"], scaled["sample_bytes"] = (max(16, scaled[name]) for name in (sizes[0], sizes[2]))
        return dataclasses.replace(self, **scaled)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Several workloads on the same storage; what it changes of each of them, by the names of the settings."""

    name: str
    workloads: tuple[str, ...]
    settings: Mapping[str, Any]


def recipe_names() -> list[str]:
    """The workloads and experiments that come with Fourfold."""
    return sorted(file.name.removesuffix(SUFFIX) for file in WORKLOADS.iterdir() if file.name.endswith(SUFFIX))


def read_recipe(name: str) -> dict[str, Any]:
    """The file of a workload or an experiment. Raises SettingError, with the closest name, if there is none."""
    if name not in recipe_names():
        close = closest_match(name, recipe_names())
        need = f"one of {', '.join(recipe_names())}, or a FILE.yaml of DLIO"
        raise SettingError(Problem(f"the workload {name}", need, close or "unet3d"), where="fourfold feed bench")
    return tomllib.loads((WORKLOADS / f"{name}{SUFFIX}").read_text(encoding="utf-8"))


def open_recipe(name: str, accelerator: str | None = None) -> Workload | Experiment:
    """The workload on an accelerator (None: its first), or the experiment. Raises SettingError."""
    values = read_recipe(name)
    if "workloads" in values:
        return Experiment(name=name, workloads=tuple(values.pop("workloads")), settings=values)
    accelerators = values.pop("accelerators")
    chosen = next(iter(accelerators)) if accelerator is None else accelerator
    if chosen not in accelerators:
        close = closest_match(chosen, accelerators) or next(iter(accelerators))
        need = f"one of {', '.join(accelerators)}, for which DLIO has a time of {name}, or compute=SECONDS"
        raise SettingError(Problem(f"accelerator = {chosen}", need, f"accelerator={close}"), where=name)
    values |= accelerators[chosen]
    values.setdefault("sample_bytes", values["record_bytes"])
    compute = Seconds((values.pop("compute_seconds"),))
    return Workload(name=name, accelerator=chosen, compute=compute, **values)

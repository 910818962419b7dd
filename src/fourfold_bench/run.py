"""Run: an emulated training from its workload to its result: data, ceiling, epochs, ceiling again, checkpoint.

scaled down  without other words a run reads as much as a laptop can: enough for a few steps, at most MAX_DATA_BYTES
Law: what is smaller than in the workload is said; what cannot be measured is an error before data is written.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fourfold.words.errors import Problem, SettingError
from fourfold.words.units import format_bytes
from fourfold_bench.disk import direct_problem, measure_ceiling, measure_checkpoint
from fourfold_bench.ranks import Training, no_copies, run_ranks
from fourfold_bench.result import Result, make_epochs
from fourfold_bench.source import WRITERS, DataShape, Reads, check_format, generate
from fourfold_bench.staged_files import list_shards
from fourfold_bench.workload import Workload

MAX_DATA_BYTES = 4 * 2**30
MAX_CHECKPOINT_BYTES = 2**29
LEAST_STEPS, EPOCH_SECONDS, EPOCHS = 10, 5.0, 2  # of a run that says neither samples nor steps
MIN_STEPS = 3  # of an epoch: two are counted
FALLBACK_FORMAT = "npy"
GENERATING_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run changes of its workload; None: nothing, or as much as a laptop can.

    folder       where the data is generated, and stays
    accelerators how many are emulated
    cache        "keep": files stay in the page cache; "drop": they are dropped from it before each epoch
    direct       read past the page cache
    origin       hold the storage to so many bytes a second
    staged       copy the files ahead of need to another folder, as packs with a cache are; it begins empty
    scale        multiplies all sizes, and `origin`; times stay
    """

    folder: Path
    accelerators: int = 1
    samples: int | None = None
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    read_threads: int | None = None
    format: str | None = None
    cache: str = "keep"
    direct: bool = False
    origin: float | None = None
    staged: bool = False
    scale: float = 1.0
    checkpoint: int | None = None
    seed: int = 0
    ceiling_seconds: float = 1.5


def fit_workload(full: Workload, options: Options) -> Workload:
    """The workload as it is run. Raises SettingError if it has too few samples for what is measured."""
    workload = full.with_scaled_bytes(options.scale)
    changes = {name: getattr(options, name) for name in ("batch_size", "read_threads")}
    workload = dataclasses.replace(workload, **{name: value for name, value in changes.items() if value is not None})
    form = options.format or (workload.format if workload.format in WRITERS else FALLBACK_FORMAT)
    global_batch = workload.batch_size * options.accelerators
    steps = options.steps or max(LEAST_STEPS, math.ceil(EPOCH_SECONDS / workload.compute.mean))
    samples = options.samples
    if samples is None:
        fitting = MAX_DATA_BYTES // workload.record_bytes // global_batch
        samples = global_batch * max(MIN_STEPS, min(steps, fitting if options.steps is None else steps))
    workload = workload.with_samples(min(samples, workload.num_samples))
    if workload.num_samples < MIN_STEPS * global_batch:
        got = f"{workload.num_samples:,} samples for {options.accelerators} × {workload.batch_size} in a step"
        need = f"{MIN_STEPS * global_batch:,}: {MIN_STEPS} steps an epoch, of which the first is not counted"
        attempt = f"samples={MIN_STEPS * global_batch}, or a smaller batch_size"
        raise SettingError(Problem(got, need, attempt), where=full.name)
    if options.steps is not None and options.steps < MIN_STEPS:
        got = f"steps = {options.steps}"
        raise SettingError(Problem(got, f"at least {MIN_STEPS}: the first is not counted", f"steps={MIN_STEPS}"))
    limits = [each for each in (full.steps, options.steps) if each is not None]
    return dataclasses.replace(
        workload,
        format=form,
        steps=min(limits, default=None),
        epochs=options.epochs or min(workload.epochs, EPOCHS),
        checkpoint_bytes=_checkpoint_bytes(workload, options),
    )


def _checkpoint_bytes(workload: Workload, options: Options) -> int:
    if options.checkpoint is not None:
        return options.checkpoint
    return min(workload.checkpoint_bytes, MAX_CHECKPOINT_BYTES)


def describe_scaling(full: Workload, workload: Workload, options: Options) -> list[str]:
    """What is otherwise than in the workload, in words."""
    accelerators = options.accelerators
    pairs = [
        ("samples", full.num_samples, workload.num_samples),
        ("steps an epoch", full.steps_of_epoch(accelerators), workload.steps_of_epoch(accelerators)),
        ("epochs", full.epochs, workload.epochs),
        ("batch size", full.batch_size, workload.batch_size),
        ("read threads", full.read_threads, workload.read_threads),
        ("record bytes", full.record_bytes, workload.record_bytes),
        ("checkpoint bytes", full.checkpoint_bytes, workload.checkpoint_bytes),
    ]
    texts = [f"{name} {now:,} instead of {before:,}" for name, before, now in pairs if now != before]
    if workload.format != full.format:
        texts.append(f"format {workload.format} instead of {full.format}")
    return [*texts, *workload.notes]


def run_workload(full: Workload, options: Options, *, say: Callable[[str], None] = lambda text: None) -> Result:
    """Emulate a training. `say` is called with what happens. Raises DataError and SettingError."""
    workload = fit_workload(full, options)
    shape = _data_shape(workload, options.seed)
    check_format(shape)
    folder = options.folder / shape.folder_name(workload.name)
    say(f"data in {folder}: {format_bytes(shape.num_bytes)}")
    generate(shape, folder, threads=GENERATING_THREADS, progress=_say_tenths(shape.num_files, say))
    paths = shape.paths(folder)
    if options.direct and (problem := direct_problem(paths[0])):
        raise SettingError(Problem(f"direct = true: {problem}", "a file system with direct I/O", "direct=false"))
    record_bytes = sum(path.stat().st_size for path in paths) / len(shape)
    sizes = {"record_bytes": workload.record_bytes, "threads": workload.read_threads * options.accelerators}
    before = measure_ceiling(paths, **sizes, seconds=options.ceiling_seconds)
    training = _make_training(workload, options, shape, folder)
    say(f"{training.epochs} epochs of {training.steps} steps on {training.size} emulated {workload.accelerator}")
    with no_copies(training):
        epochs = make_epochs(run_ranks(training))
    after = measure_ceiling(paths, **sizes, seconds=options.ceiling_seconds)
    size = workload.checkpoint_bytes
    return Result(
        workload=workload,
        accelerators=options.accelerators,
        scaled=tuple(describe_scaling(full, workload, options)),
        cache=_describe_cache(options),
        epochs=epochs,
        ceilings=(before, after),
        origin=training.origin,
        is_staged=options.staged,
        need=workload.batch_size * record_bytes / workload.compute.mean,
        checkpoint=measure_checkpoint(folder, size) if size else None,
    )


def _data_shape(workload: Workload, seed: int) -> DataShape:
    names = ("format", "num_files", "samples_per_file", "record_bytes", "record_bytes_stdev")
    return DataShape(**{name: getattr(workload, name) for name in names}, seed=seed)


def _make_training(workload: Workload, options: Options, shape: DataShape, folder: Path) -> Training:
    reads = Reads(workload.sample_bytes, workload.read_threads, options.direct, workload.preprocess, options.seed)
    return Training(
        shape=shape,
        folder=folder,
        reads=reads,
        compute=workload.compute,
        size=options.accelerators,
        batch_size=workload.batch_size,
        epochs=workload.epochs,
        steps=workload.steps_of_epoch(options.accelerators),
        drops_cache=options.cache == "drop",
        origin=None if options.origin is None else options.origin * options.scale,
        seed=options.seed,
        shards=list_shards(shape, folder) if options.staged else (),
    )


def _say_tenths(num_files: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Says how many files have been generated, ten times in all."""

    def progress(done: int) -> None:
        if 10 * done // num_files > 10 * (done - 1) // num_files:
            say(f"generated {done:,} of {num_files:,} files")

    return progress


def _describe_cache(options: Options) -> str:
    if options.direct:
        return "not used: reads are direct"
    return "dropped before each epoch" if options.cache == "drop" else "kept: what was read or written may be in it"

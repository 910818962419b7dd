"""`fourfold checkpoint`: list, verify and export a run's checkpoints.

Law: these commands change nothing in a run's folder.
"""

import contextlib
import time
from pathlib import Path

from fourfold.cli.errors import nearest_file
from fourfold.environment.standard_streams import print_stderr
from fourfold.words.errors import CheckpointError, Problem, SettingError, UnreadableCheckpointError, os_error_text
from fourfold.words.run_files import RUNS_DIR
from fourfold.words.terminal_text import escape_controls
from fourfold.words.text_table import align_columns
from fourfold.words.units import format_bytes

AGE_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def list_checkpoints(run: str) -> int:
    """`fourfold checkpoint list`; returns the exit code."""
    from fourfold.checkpoint.manifest_file import read_manifest
    from fourfold.checkpoint.store import CheckpointStore

    store = CheckpointStore(_find_run(run))
    rows = [("step", "size", "age", "ranks", "validation loss", "")]
    best = store.best_step()
    for step in store.steps():
        path = store.step_dir(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            word = "cannot be read here" if isinstance(error, UnreadableCheckpointError) else "damaged"
            rows.append((str(step), "", "", "", "", f"{word}: {error.problems[0].got}"))
            continue
        size = format_bytes(sum(file.num_bytes for file in manifest.files.values()))
        loss = manifest.valid.get("loss")
        word = "best" if step == best else ""
        age = _format_age(time.time() - path.stat().st_mtime)
        rows.append((str(step), size, age, str(len(manifest.files)), "" if loss is None else f"{loss:.4f}", word))
    if len(rows) == 1:
        print(escape_controls(f"{store.path} holds no checkpoint"))
        return 0
    print("\n".join(align_columns([[*map(escape_controls, row)] for row in rows], ">>>>><")))
    return 0


def verify_checkpoints(run: str) -> int:
    """`fourfold checkpoint verify`; returns the exit code: 1 if a checkpoint is damaged."""
    from fourfold.checkpoint.manifest_file import verify_checkpoint
    from fourfold.checkpoint.store import CheckpointStore

    store = CheckpointStore(_find_run(run))
    steps, code = store.steps(), 0
    for step in steps:
        try:
            problems = verify_checkpoint(store.step_dir(step))
            word = "damaged" if problems else "good"
        except UnreadableCheckpointError as error:
            problems, word = [problem.got for problem in error.problems], "cannot be read here"
        print(escape_controls(f"{store.step_dir(step)}   {word}"))
        for text in problems:
            print(escape_controls(f"  {text}"))
        code = 1 if problems else code
    if not steps:
        raise CheckpointError(Problem(f"{store.path} holds no checkpoint", "at least one"))
    return code


def export_checkpoint(run: str, file: str | None, *, step: int | None, ema: bool) -> int:
    """`fourfold checkpoint export`; returns the exit code."""
    from fourfold.checkpoint.store import CheckpointStore, newest_valid
    from fourfold.checkpoint.weights_file import export_weights

    run_dir = _find_run(run)
    steps = CheckpointStore(run_dir).steps()
    if step is not None and step not in steps:
        need = f"one of {', '.join(map(str, steps))}" if steps else "a run with checkpoints"
        raise SettingError(Problem(f"--step {step}", need), where=str(run_dir))
    source = newest_valid(run_dir, step=step)
    if step is None and source != CheckpointStore(run_dir).step_dir(steps[-1]):
        print_stderr(escape_controls(f"warning: a newer checkpoint is damaged: fourfold checkpoint verify {run}"))
    target = Path(file or f"{run_dir.name}-{source.name.removeprefix('step-')}{'-ema' if ema else ''}.safetensors")
    if target.exists():
        raise SettingError(Problem(f"{target} exists already", "a new file", "another FILE"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = export_weights(source, target, ema=ema)
    except OSError as error:
        got = f"{target} could not be written: {os_error_text(error)}"
        raise SettingError(Problem(got, "a file that can be written", "another FILE")) from None
    print(escape_controls(f"{target}   {format_bytes(num_bytes)} of weights from {source}"))
    return 0


def _find_run(run: str) -> Path:
    for path in (Path(run), Path(RUNS_DIR, run)):
        with contextlib.suppress(OSError):  # a name that is too long for a file system
            if run and path.is_dir():
                return path
    raise SettingError(
        Problem(f"{run} (no such folder)", "a run's folder, or its name", nearest_file(Path(RUNS_DIR, run), "*"))
    )


def _format_age(seconds: float) -> str:
    name, unit = next(((n, u) for n, u in AGE_UNITS if seconds >= u), AGE_UNITS[-1])
    return f"{seconds / unit:.0f} {name}"

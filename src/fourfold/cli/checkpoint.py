"""`fourfold checkpoint`: list, verify and export a run's checkpoints.

Law: these commands change nothing in a run's folder.
"""

import os
import time
from pathlib import Path

from fourfold.cli.errors import find_run
from fourfold.cli.output import print_text
from fourfold.environment.standard_streams import print_stderr
from fourfold.words.errors import (
    CheckpointError,
    Problem,
    SettingError,
    UnreadableCheckpointError,
    closest_match,
    os_error_text,
)
from fourfold.words.terminal_text import escape_controls, table_lines
from fourfold.words.units import format_bytes

ENDINGS = {"safetensors": ".safetensors", "hf": "-hf", "dcp": "-dcp"}
AGE_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def list_checkpoints(run: str) -> int:
    """`fourfold checkpoint list`; returns the exit code."""
    from fourfold.checkpoint.store import CheckpointStore, read_manifest

    store = CheckpointStore(find_run(run, "fourfold checkpoint list"))
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
        loss = manifest.measures.get("loss")
        word = "best" if step == best else ""
        age = _format_age(time.time() - path.stat().st_mtime)
        rows.append((str(step), size, age, str(len(manifest.files)), "" if loss is None else f"{loss:.4f}", word))
    if len(rows) == 1:
        print_text(f"{store.path} holds no checkpoint")
        return 0
    print_text("\n".join(table_lines([[*map(escape_controls, row)] for row in rows], ">>>>><")))
    return 0


def verify_checkpoints(run: str) -> int:
    """`fourfold checkpoint verify`; returns the exit code: 1 if a checkpoint is damaged."""
    from fourfold.checkpoint.store import CheckpointStore, verify_checkpoint

    store = CheckpointStore(find_run(run, "fourfold checkpoint verify"))
    steps, code = store.steps(), 0
    for step in steps:
        try:
            problems = verify_checkpoint(store.step_dir(step))
            word = "damaged" if problems else "good"
        except UnreadableCheckpointError as error:
            problems, word = [problem.got for problem in error.problems], "cannot be read here"
        print_text(f"{store.step_dir(step)}   {word}")
        for text in problems:
            print_text(f"  {text}")
        code = 1 if problems else code
    if not steps:
        raise CheckpointError(Problem(f"{store.path} holds no checkpoint", "at least one"))
    return code


def export_checkpoint(run: str, target: str | None, *, form: str, step: int | None, ema: bool) -> int:
    """`fourfold checkpoint export`; returns the exit code."""
    if form not in ENDINGS:
        close = closest_match(form, ENDINGS) or "hf"
        raise SettingError(Problem(f"--format {form}", f"one of {', '.join(ENDINGS)}", f"--format {close}"))
    source = _checkpoint_to_export(run, step)
    path = Path(
        target or f"{source.parent.parent.name}-{source.name.removeprefix('step-')}{'-ema' * ema}{ENDINGS[form]}"
    )
    _check_target(path, form)
    from fourfold.checkpoint import export  # not on top: it imports torch

    writers = {"safetensors": export.export_weights, "hf": export.export_pretrained, "dcp": export.export_dcp}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = writers[form](source, path, ema=ema)
    except OSError as error:
        got = f"{path} could not be written: {os_error_text(error)}"
        raise SettingError(Problem(got, "a place that can be written to", "another PATH")) from None
    print_text(f"{path}   {format_bytes(num_bytes)} of weights from {source}")
    if form == "hf":
        for name in export.read_config(path).get("architectures") or ():
            print_text(f"transformers.{name}.from_pretrained({str(path)!r}) loads it")
    elif form == "dcp":
        print_text(f"torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id={str(path)!r})")
        print_text(
            "loads it into a model; it reads .metadata, which is a pickle: share it only with people who trust you"
        )
    return 0


def _checkpoint_to_export(run: str, step: int | None) -> Path:
    """The folder of the checkpoint, which has been verified."""
    from fourfold.checkpoint.store import CheckpointStore, newest_valid

    run_dir = find_run(run, "fourfold checkpoint export")
    steps = CheckpointStore(run_dir).steps()
    if step is not None and step not in steps:
        need = f"one of {', '.join(map(str, steps))}" if steps else "a run with checkpoints"
        raise SettingError(Problem(f"--step {step}", need), where=str(run_dir))
    source = newest_valid(run_dir, step=step)
    if step is None and source != CheckpointStore(run_dir).step_dir(steps[-1]):
        print_stderr(escape_controls(f"warning: a newer checkpoint is damaged: fourfold checkpoint verify {run}"))
    return source


def _check_target(path: Path, form: str) -> None:
    """Raise SettingError if something is there that an export would overwrite."""
    if form == "safetensors":
        if os.path.lexists(path):
            raise SettingError(Problem(f"{path} exists already", "a new file", "another PATH"))
    elif path.suffix == ENDINGS["safetensors"]:
        attempt = f"{path.with_suffix('')}, or --format safetensors"
        raise SettingError(Problem(f"{path} with --format {form}", "the name of a folder", attempt))
    elif os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise SettingError(Problem(f"{path} exists already", "a new folder, or an empty one", "another PATH"))


def _format_age(seconds: float) -> str:
    name, unit = next(((n, u) for n, u in AGE_UNITS if seconds >= u), AGE_UNITS[-1])
    return f"{seconds / unit:.0f} {name}"

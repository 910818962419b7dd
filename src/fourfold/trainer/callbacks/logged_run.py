"""Logged runs: which run of a tracking service a folder belongs to, and how much of it is logged there already.

    runs/NAME/callbacks/wandb.json   {"run": "1b0c…", "step": 120, "evaluated": 100}

Law: no step is logged twice. After a restart from an older checkpoint, the steps that are logged already are trained
again but not logged again: such services can append, and not replace.
"""

import json
import os
from pathlib import Path

FOLDER = "callbacks"
STEP_DIGITS = 12  # the file keeps its length, so that a step is noted in place


class LoggedRun:
    """What a file in the run's folder says, and what is written to it. The file stays open until `close`."""

    def __init__(self, folder: Path, service: str, *, step: int) -> None:
        """Open the file, or make one for a run that begins after `step`. Raises OSError, and ValueError if damaged."""
        path = folder / FOLDER / f"{service}.json"
        path.parent.mkdir(exist_ok=True)
        self.run_id = ""
        """The service's name for the run; "" if it has none yet."""
        self._step = self._evaluated = step
        if path.exists():
            self._read(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def _read(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text())
            self.run_id, self._step, self._evaluated = str(record["run"]), int(record["step"]), int(record["evaluated"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged; without it, a new run starts there") from None

    def set_run(self, run_id: str) -> None:
        """From now on the folder belongs to this run of the service."""
        self.run_id = run_id
        os.ftruncate(self._file, 0)
        self._write()

    def take_step(self, step: int) -> bool:
        """Whether a step is still to be logged; from now on it is not."""
        if step <= self._step:
            return False
        self._step = step
        self._write()
        return True

    def take_evaluation(self, step: int) -> bool:
        """Whether the evaluation after a step is still to be logged; from now on it is not."""
        if step <= self._evaluated:
            return False
        self._evaluated = step
        self._write()
        return True

    def _write(self) -> None:
        # Before the step is logged: a process killed in between loses a step there, and doubles none.
        record = f'{{"run": {json.dumps(self.run_id)}, "step": {self._step:{STEP_DIGITS}}, '
        record += f'"evaluated": {self._evaluated:{STEP_DIGITS}}}}\n'
        os.pwrite(self._file, record.encode(), 0)

    def close(self) -> None:
        os.close(self._file)

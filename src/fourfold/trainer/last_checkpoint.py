"""Last checkpoint: a finished run holds its result in memory until the disk has it.

Law: a run has finished only when its last step is saved. All ranks try again, give up and write the weights together.
"""

import time
from collections.abc import Callable
from typing import NoReturn

from fourfold.checkpoint.manager import CheckpointLog, CheckpointManager, TrainingProgress
from fourfold.environment.known_waits import waiting_for
from fourfold.step.train_step import TrainStep
from fourfold.words.errors import Problem, TrainingError
from fourfold.words.units import format_bytes

RETRY_SECONDS = 5.0


def wait_until_saved(
    checkpoints: CheckpointManager,
    step: TrainStep,
    log: CheckpointLog,
    *,
    last: int,
    wait_seconds: int,
    is_stopping: Callable[[], bool],
) -> bool:
    """Wait for the checkpoint of step `last`, and write it again while it fails. Collective.

    Returns whether it is written: not if `wait_seconds` have passed, or `is_stopping()` on any rank. Raises PeerError
    if a rank died while it wrote its file.
    """
    begin, has_said = time.monotonic(), False
    while True:
        checkpoints.wait_for_writer()
        reasons = checkpoints.take_failures()
        own = checkpoints.is_saved(last), time.monotonic() - begin < wait_seconds, is_stopping()
        views = step.all_gather_json(own)
        (is_saved, has_time, _), is_stopped = views[0], any(view[2] for view in views)
        if is_saved or is_stopped or not has_time:
            if is_saved:
                checkpoints.remove_weights()  # an earlier attempt's
            if is_saved and has_said:
                log.log_message(f"the checkpoint of step {last} is written")
            return is_saved
        if reasons and not has_said:
            has_said = True
            held = f"the result of {format_bytes(checkpoints.num_bytes)} is held in memory"
            wait = f"up to {wait_seconds} s (disk_seconds)"
            log.log_message(f"warning: {reasons[0]}; {held}, and written as soon as the disk takes it: waiting {wait}")
        with waiting_for("room on the disk"):
            time.sleep(RETRY_SECONDS)
        checkpoints.save_again()


def save_weights_alone(checkpoints: CheckpointManager, step: TrainStep, progress: TrainingProgress) -> NoReturn:
    """Save the weights without the rest, where the disk has room for them. Collective. Raises TrainingError."""
    folder, failure = checkpoints.save_weights(progress)
    view = [checkpoints.newest_step(), checkpoints.last_reason, failure]
    resumed, reason, failure = step.all_gather_json(view)[0]
    got = f"all {progress.step} steps are done, but the last checkpoint could not be written: {reason}"
    attempt = f"the same command, which {f'resumes from step {resumed}' if resumed else 'starts over'}"
    if failure:
        checkpoints.remove_weights(keep_whole=True)
        got = f"{got}; nor could the weights alone: {failure}"
    else:
        attempt = f"fourfold checkpoint export {folder}, which has the weights; or {attempt}"
    raise TrainingError(Problem(got, "a disk that can be written and has room", attempt), where="training")

"""Intervals: whether something that happens every n steps is due after this step."""

DRIFT_CHECK = (
    1000  # steps; a check takes about as long as the smallest step, so less than 0.1 % (docs/measured-notes.md)
)


def is_due(step: int, every: int, period: int) -> bool:
    """Whether an every-`every`-steps action is due at `step`, given that ranks agree only every `period` steps.

    Between those steps the weights of the ranks differ, so the action waits for the next multiple of `period`.
    """
    return every > 0 and step % period == 0 and step // every > (step - period) // every

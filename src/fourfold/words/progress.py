"""Progress line: where a run stands, as the trainer hands it to whatever shows it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressLine:
    """Where a run stands. Loss, throughput and waiting are means of the last steps.

    units_per_second  over all ranks
    waiting_fraction  see `measures.waiting_fraction`
    wait              what the run waits for at the moment; "" while it trains
    """

    step: int
    num_steps: int
    loss: float
    units_per_second: float
    unit: str
    waiting_fraction: float
    remaining_seconds: float | None
    wait: str = ""

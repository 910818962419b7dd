"""A callback of your own next to shipped ones: it warns of large gradients and stops a run that is good enough.

python examples/own_callback.py
fourfold train examples/own_task.py:task evaluate_every=50 callback=examples/own_callback.py:GoodEnough,csv
"""

from pathlib import Path

from own_task import task  # the file next to this one

import fourfold as ff
from fourfold.callbacks import CSV, EarlyStopping, EvaluateEvent, StartEvent, StepEvent


class GoodEnough(ff.Callback):
    """Writes the steps with large gradients into a file, and stops at an accuracy. Called on rank 0 only."""

    def __init__(self, accuracy: float = 0.97, max_norm: float = 10.0) -> None:
        self._accuracy, self._max_norm = accuracy, max_norm  # every rank makes one: open nothing here
        self._path = Path()

    def on_start(self, event: StartEvent) -> None:
        self._path = event.folder / "large_gradients.txt"

    def on_step(self, event: StepEvent) -> None:
        if event.grad_norm is not None and event.grad_norm > self._max_norm:
            with self._path.open("a") as file:
                file.write(f"step {event.step}: {event.grad_norm:.1f}\n")

    def on_evaluate(self, event: EvaluateEvent) -> None:
        if event.metrics["accuracy"] >= self._accuracy:
            self.request_stop(f"accuracy {event.metrics['accuracy']:.3f}")  # all ranks stop after this step


def main() -> None:
    result = ff.train(
        task(),
        ff.Plan(dp=ff.world().size),
        callbacks=[GoodEnough(), CSV(), EarlyStopping("accuracy", mode="max", patience=5)],
        evaluate_every=25,
        checkpoint_every=0,
        clip=100.0,
    )
    assert result.stopped is not None
    assert result.valid["accuracy"] >= 0.97
    if result.folder is not None:  # rank 0
        assert len((result.folder / "metrics.csv").read_text().splitlines()) == result.steps + 1


if __name__ == "__main__":
    main()

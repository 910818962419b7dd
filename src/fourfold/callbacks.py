"""ff.callbacks: loggers, a CSV writer and early stopping, for `ff.train(task, callbacks=[…])`. See docs/callbacks.md.

Law: every callback here is derived from `ff.Callback`, as your own are.
"""

from fourfold.trainer.callbacks.csv_writer import CSV
from fourfold.trainer.callbacks.early_stopping import EarlyStopping
from fourfold.trainer.callbacks.mlflow import MLflow
from fourfold.trainer.callbacks.tensorboard import TensorBoard
from fourfold.trainer.callbacks.trackio import Trackio
from fourfold.trainer.callbacks.wandb import WandB
from fourfold.words.callback import CheckpointEvent, EndEvent, EvaluateEvent, FaultEvent, StartEvent, StepEvent

__all__ = [
    "CSV",
    "CheckpointEvent",
    "EarlyStopping",
    "EndEvent",
    "EvaluateEvent",
    "FaultEvent",
    "MLflow",
    "StartEvent",
    "StepEvent",
    "TensorBoard",
    "Trackio",
    "WandB",
]

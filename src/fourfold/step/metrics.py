"""Metrics: the results of one step."""

import dataclasses

from fourfold.plan.damaged_samples import DamagedRecord
from fourfold.step.nan_guard import Skipped


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The results of one step: global, the same on every rank, except the times, which are this rank's.

    loss             mean over all elements of the global batch
    samples          of the global batch
    tokens           of the global batch, padding included; None unless the inputs are a dict with `position_ids`,
                     `positions`, `input_ids` or `tokens`
    grad_norm        norm of the global gradient before clipping; None without `clip`, unless the loss is scaled. With
                     local steps: the root mean square of the ranks' own norms
    seconds          duration of the step
    waiting_seconds  part of `seconds` spent reducing gradients and waiting for other ranks
    data_seconds     how long this rank waited for the batch before the step; None if no feed has read the batch
    sent_bytes       gradients, weights and activations that this rank has sent to other hosts, or over gloo or NCCL;
                     collectives are counted as for a ring
    skipped          why the step changed nothing, if `skip_nan` skipped it; else None
    loss_scale       what the loss was multiplied by for backward; None without `precision = "fp16"`
    out_of_turn      unshards of buckets that the program did not have, where it had others: weights used in another
                     order than before. They are correct, and the ranks wait for each other once more
    overflowed       the scaled gradient was not finite: the step has changed nothing, and the next scale is half
    damaged          the samples that are missing from the global batch because they cannot be read
    """

    loss: float
    samples: int
    tokens: int | None
    grad_norm: float | None
    seconds: float
    waiting_seconds: float
    sent_bytes: float = 0.0
    skipped: Skipped | None = None
    loss_scale: float | None = None
    out_of_turn: int = 0
    overflowed: bool = False
    damaged: tuple[DamagedRecord, ...] = ()
    data_seconds: float | None = None

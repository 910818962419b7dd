"""Metrics: what a step says of itself."""

import dataclasses

from fourfold.step.nan_guard import Skipped


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a step says of itself. Global, the same on every rank, except the times, which are this rank's.

    loss             mean over all elements of the global batch
    tokens           None where the inputs carry no positions
    grad_norm        norm of the global gradient before clipping; None without `clip`, unless the loss is scaled. With
                     local steps: the root of the mean square of all ranks' own
    waiting_seconds  part of `seconds` spent reducing gradients and waiting for other ranks
    sent_bytes       of gradients and weights, that this rank has sent to other hosts or over gloo or NCCL, as by ring
    skipped          why the step changed nothing, where `skip_nan` left it out; None for all others
    loss_scale       what the loss was multiplied by for backward; None without `precision = "fp16"`
    overflowed       whether the scaled gradient was not finite: the step has changed nothing, the next scale is half
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
    overflowed: bool = False

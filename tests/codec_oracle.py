"""The oracle of training with a codec: all workers in one process, one after the other, in plain torch.

worker  what a data rank is: its part of the batch, and its own codec for each bucket
Law: the oracle shares only buckets and codecs with the code under test, and those have tests of their own.
"""

import torch
from torch import Tensor, nn

from fourfold.parts.codec import registry
from fourfold.parts.codec.protocol import Codec
from fourfold.parts.data.flat_params import param_specs
from fourfold.plan.data.buckets import Bucket, make_buckets
from fourfold.step.batch import Microbatch, split_microbatches
from fourfold.step.loss_sum import sum_loss
from fourfold.step.model_call import call_model
from fourfold.step.weights import trainable_parameters
from fourfold.testing.codecs import simulate_reduce
from fourfold.testing.oracle import TrainingResult
from tests.cases import Case, batches, local_batch, loss, model, optimizer


class CodecWorkers:
    """`size` workers that train one model."""

    def __init__(self, case: Case, size: int) -> None:
        self.case, self.size, self.model = case, size, model(case.model)
        self.optimizer = optimizer(case)(self.model.parameters())
        group_of = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self.trainable = trainable_parameters(self.model)
        specs = param_specs(self.trainable, {name: group_of[id(p)] for name, p in self.trainable.items()})
        self.buckets = make_buckets(specs, bucket_bytes=case.bucket_bytes)
        self.codecs = [[self._make_codec(bucket) for _ in range(size)] for bucket in self.buckets]

    def _make_codec(self, bucket: Bucket) -> Codec:
        codec_spec = self.case.plan(self.size).codec_spec
        assert codec_spec is not None
        shapes = [tuple(self.trainable[slot.name].shape) for slot in bucket.slots]
        return registry.make_codec(codec_spec, bucket, shapes, device=torch.device("cpu"))

    def _worker_gradient(self, parts: list[Microbatch], unit: float) -> tuple[dict[str, Tensor], Tensor]:
        """A worker's gradients by parameter, divided by `unit`, and the sum and count of its loss."""
        self.model.zero_grad()
        totals = torch.zeros(2, dtype=torch.float64)
        for part in parts:
            if part.num_samples:
                value = sum_loss(loss(self.case)(call_model(self.model, part.inputs), part.targets), part.num_samples)
                (value.total / unit).backward()
                totals += torch.tensor([value.total.item(), value.count], dtype=torch.float64)
        named = self.trainable.items()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}, totals

    def step(self, batch, unit: float) -> tuple[float, float | None]:
        """One update; returns loss and gradient norm."""
        microbatches = self.case.microbatches
        parts = [
            split_microbatches(local_batch(batch, self.size, w), microbatches, torch.device("cpu"))
            for w in range(self.size)
        ]
        # If gradients rest split, every microbatch is reduced separately.
        rounds = (
            [[i] for i in range(microbatches)] if self.case.zero == 2 and self.size > 1 else [list(range(microbatches))]
        )
        totals = [torch.zeros(bucket.size, dtype=torch.float64) for bucket in self.buckets]
        loss_sum = torch.zeros(2, dtype=torch.float64)
        for indices in rounds:
            results = [self._worker_gradient([of_worker[i] for i in indices], unit) for of_worker in parts]
            loss_sum += sum(each for _, each in results)
            for bucket, codecs, total in zip(self.buckets, self.codecs, totals, strict=True):
                flats = [torch.cat([g[slot.name].flatten() for slot in bucket.slots]) for g, _ in results]
                simulate_reduce(codecs, flats)
                total += flats[0]
        for bucket, total in zip(self.buckets, totals, strict=True):
            for slot in bucket.slots:
                parameter = self.trainable[slot.name]
                parameter.grad = (total[slot.start : slot.stop] * (unit / loss_sum[1])).view(parameter.shape)
        norm = None
        if self.case.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.trainable.values(), self.case.clip).item()
        self.optimizer.step()
        return float(loss_sum[0] / loss_sum[1]), norm


def train(case: Case, size: int, *, unit: float = 1.0) -> TrainingResult:
    """The case with `size` workers. Codecs see gradients as sums over elements, divided by `unit`."""
    workers = CodecWorkers(case, size)
    results = [workers.step(batch, unit) for batch in batches(case)]
    weights = {name: p.detach().clone() for name, p in workers.model.named_parameters()}
    return TrainingResult([value for value, _ in results], [norm for _, norm in results if norm is not None], weights)

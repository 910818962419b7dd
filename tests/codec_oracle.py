"""The oracle of training with a codec: all workers in one process, one after the other, in plain torch.

worker  what a data rank is: its part of the batch, and its own codec for each bucket
place   of the tensor axis: its shards of the parameters are what its buckets hold and its codecs compress
Law: the oracle shares only buckets and codecs with the code under test, and those have tests of their own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.data.rules.buckets import Bucket, make_buckets
from fourfold.axes.data.work.weight_storage import param_specs
from fourfold.axes.tensor.attach.axis import place_shards
from fourfold.axes.tensor.rules.dims import TensorSpec
from fourfold.axes.tensor.work.layers import local_part
from fourfold.comm.codec import registry
from fourfold.comm.codec.protocol import Codec
from fourfold.model.batch import Microbatch, split_microbatches
from fourfold.model.loss_sum import sum_loss
from fourfold.model.model_call import call_model
from fourfold.model.weights import trainable_parameters
from fourfold.plan.param_spec import ParamSpec, TensorShard
from fourfold.testing.oracle import TrainingResult, simulate_reduce
from tests.cases import TENSOR_RULES, Case, batches, local_batch, loss, model, optimizer


class Place(NamedTuple):
    """A place of the tensor axis: its shards by parameter, its buckets, and by bucket the workers' codecs."""

    shards: Mapping[str, TensorShard]
    buckets: Sequence[Bucket]
    codecs: Sequence[Sequence[Codec]]


class CodecWorkers:
    """`size` workers that train one model, each of them on `tp` places."""

    def __init__(self, case: Case, size: int, tp: int = 1) -> None:
        self.case, self.size, self.model = case, size, model(case.model)
        self.optimizer = optimizer(case)(self.model.parameters())
        group_of = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self.trainable = trainable_parameters(self.model)
        shards = place_shards(self.model, TENSOR_RULES.get(case.model, {}), TensorSpec(tp))
        specs = param_specs(self.trainable, {n: group_of[id(p)] for n, p in self.trainable.items()}, shards)
        self.places = [self._make_place([spec.at(index) for spec in specs]) for index in range(tp)]

    def _make_place(self, specs: Sequence[ParamSpec]) -> Place:
        shards = {s.name: s.shards[s.tensor_index] if s.shards else TensorShard.whole(s.shape) for s in specs}
        buckets = make_buckets(specs, bucket_bytes=self.case.bucket_bytes)
        return Place(shards, buckets, [[self._make_codec(each, shards) for _ in range(self.size)] for each in buckets])

    def _make_codec(self, bucket: Bucket, shards: Mapping[str, TensorShard]) -> Codec:
        codec_spec = self.case.plan(self.size).codec_spec
        assert codec_spec is not None
        shapes = [shards[slot.name].local_shape for slot in bucket.slots]
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
        totals = {name: torch.zeros_like(p) for name, p in self.trainable.items()}
        loss_sum = torch.zeros(2, dtype=torch.float64)
        for indices in rounds:
            results = [self._worker_gradient([of_worker[i] for i in indices], unit) for of_worker in parts]
            loss_sum += sum(each for _, each in results)
            sums = {name: torch.zeros_like(p) for name, p in self.trainable.items()}
            for place in self.places:
                self._reduce(place, [grads for grads, _ in results], sums)
            for name, value in sums.items():
                totals[name] += value
        for name, parameter in self.trainable.items():
            parameter.grad = totals[name] * (unit / loss_sum[1])
        norm = None
        if self.case.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.trainable.values(), self.case.clip).item()
        self.optimizer.step()
        return float(loss_sum[0] / loss_sum[1]), norm

    @staticmethod
    def _reduce(place: Place, grads: Sequence[Mapping[str, Tensor]], sums: Mapping[str, Tensor]) -> None:
        """Reduce the workers' gradients as a place does, into the whole sums."""
        for bucket, codecs in zip(place.buckets, place.codecs, strict=True):
            slots = [(slot, place.shards[slot.name]) for slot in bucket.slots]
            flats = [torch.cat([_local(g[s.name], shard).flatten() for s, shard in slots]) for g in grads]
            simulate_reduce(codecs, flats)
            for slot, shard in slots:
                local = flats[0][slot.start : slot.stop].view(shard.local_shape)
                if shard.is_whole:
                    sums[slot.name].copy_(local)
                    continue
                parts = local.split([piece.length for piece in shard.pieces], shard.dim)
                for piece, part in zip(shard.pieces, parts, strict=True):
                    sums[slot.name].narrow(shard.dim, piece.start, piece.length).copy_(part)


def _local(whole: Tensor, shard: TensorShard) -> Tensor:
    return whole if shard.is_whole else local_part(whole, shard)


def train(case: Case, size: int, *, tp: int = 1, unit: float = 1.0) -> TrainingResult:
    """The case with `size` workers. Codecs see gradients as sums over elements, divided by `unit`."""
    workers = CodecWorkers(case, size, tp)
    results = [workers.step(batch, unit) for batch in batches(case)]
    weights = {name: p.detach().clone() for name, p in workers.model.named_parameters()}
    return TrainingResult([value for value, _ in results], [norm for _, norm in results if norm is not None], weights)

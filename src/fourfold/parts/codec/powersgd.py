"""powersgd: each matrix as a product of two thin factors, found by one step of power iteration from the last ones.

M  [rows, columns]  this rank's gradient + remainder of one parameter
P  [rows, rank]     M · Q, summed over ranks, then its columns orthogonalised
R  [rank, columns]  Pᵀ · M, summed over ranks; the Q of the next step is its transpose
Law: Σ over ranks of sent = P · R; each rank remembers M − P · Pᵀ · M, its own part of what that leaves out.

Source: Vogels et al., "PowerSGD" (2019), Alg. 1 and 2. Vectors, and matrices whose factors would be no smaller, are
sent whole in the first round. The remainder is the rank's own, not M − (sum)/N as in PyTorch's hook: the sum over ranks
is the same, but the differences between ranks do not pile up in it.
"""

import zlib

import torch
from torch import Tensor

from fourfold.parts import memory
from fourfold.parts.codec.protocol import CodecReduction, Message, accumulation_dtype, residual_by_param
from fourfold.plan.codec import CodecSpec, Combine, FactoredMatrix, Shapes, codec_rounds, low_rank_spec, unpadded_length
from fourfold.plan.data.buckets import Bucket

MIN_RELATIVE_NORM = 1e-6  # of the largest right factor's norm


class PowerSGD:
    """See `Codec`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self._rank = codec_rounds(spec, bucket, shapes), spec.matrix_rank
        self._bucket, self._layout = bucket, low_rank_spec(bucket, shapes, spec.matrix_rank)
        self._seeds = {
            each.slot_index: zlib.crc32(bucket.slots[each.slot_index].name.encode()) for each in self._layout.matrices
        }
        dtype = self.message_dtype = accumulation_dtype(bucket)
        self.num_elements = unpadded_length(bucket)
        self.residual: Tensor = memory.allocate_private(self.num_elements, dtype, device)
        # What the first round sends: left factors, then what goes whole.
        self._first_message = torch.zeros(self._layout.num_p + self._layout.num_dense, dtype=dtype, device=device)
        self._second_message = torch.zeros(self._layout.num_q, dtype=dtype, device=device)
        self.prev_q = torch.zeros_like(self._second_message)
        """Right factors of the step before, [rank, columns] each: equal on every rank."""
        for each in self._layout.matrices:
            self._init_factor(each)

    @torch.no_grad()
    def reduce(self, flat: Tensor) -> CodecReduction:
        rest = self.residual.add_(flat)
        self._fill_first_message(rest)
        (total,) = yield Message(self._first_message, Combine.SUM)
        self._copy_uncompressed(total, flat)
        if not self._layout.matrices:
            return
        bases = [self._orthonormal_basis(each, total) for each in self._layout.matrices]
        for each, base in zip(self._layout.matrices, bases, strict=True):
            right, matrix = self._q_factor(self._second_message, each), _matrix(rest, each)
            # Pᵀ · M, not Mᵀ · P: the same numbers, and several times as fast on a CPU.
            torch.mm(base.T, matrix, out=right)
            matrix.addmm_(base, right, alpha=-1)
        (total,) = yield Message(self._second_message, Combine.SUM)
        self.prev_q.copy_(total)
        for each, base in zip(self._layout.matrices, bases, strict=True):
            right = self._q_factor(self.prev_q, each)
            matrix = _matrix(flat, each)
            if matrix.dtype == right.dtype:
                torch.mm(base, right, out=matrix)
            else:
                matrix.copy_(base @ right)
            if not torch.isfinite(right).all():
                # A gradient that is not finite has been sent so; nothing of it may come back in later steps.
                _matrix(rest, each).zero_()
                self._init_factor(each)
            else:
                self._reinit_dead_factors(each, right)

    def _fill_first_message(self, rest: Tensor) -> None:
        """Fill the first message, and keep of what goes whole what its sum cannot lose: nothing."""
        for each in self._layout.matrices:
            torch.mm(
                _matrix(rest, each), self._q_factor(self.prev_q, each).T, out=self._p_factor(self._first_message, each)
            )
        at = self._layout.num_p
        for start, stop in self._layout.dense_ranges:
            self._first_message[at : at + stop - start] = rest[start:stop]
            rest[start:stop] = 0.0
            at += stop - start

    def _copy_uncompressed(self, total: Tensor, flat: Tensor) -> None:
        at = self._layout.num_p
        for start, stop in self._layout.dense_ranges:
            flat[start:stop] = total[at : at + stop - start]
            at += stop - start

    def _orthonormal_basis(self, each: FactoredMatrix, total: Tensor) -> Tensor:
        """Orthonormal columns that span those of the summed left factor; in float64, where nearly equal ones differ."""
        return torch.linalg.qr(self._p_factor(total, each).double()).Q.to(total.dtype)

    def _p_factor(self, flat: Tensor, each: FactoredMatrix) -> Tensor:
        return flat[each.p_start : each.p_start + each.rows * self._rank].view(each.rows, self._rank)

    def _q_factor(self, flat: Tensor, each: FactoredMatrix) -> Tensor:
        return flat[each.q_start : each.q_start + each.columns * self._rank].view(self._rank, each.columns)

    def _init_factor(self, each: FactoredMatrix) -> None:
        """A first right factor: random, the same on every rank and in whatever bucket the parameter lies."""
        self._q_factor(self.prev_q, each).copy_(self._random_factor(each))

    def _random_factor(self, each: FactoredMatrix) -> Tensor:
        generator = torch.Generator().manual_seed(self._seeds[each.slot_index])
        return torch.randn(self._rank, each.columns, generator=generator, dtype=torch.float64)

    def _reinit_dead_factors(self, each: FactoredMatrix, right: Tensor) -> None:
        """Replace right factors that are nothing but rounding: a gradient of less than full rank leaves such.

        The next step would otherwise go along directions that depend on the order of sums, on the mesh that is.
        """
        norms = torch.linalg.vector_norm(right, dim=1)
        lost = norms <= norms.max() * MIN_RELATIVE_NORM
        if lost.any():
            right[lost] = self._random_factor(each).to(right.dtype)[lost]

    def scale_residual(self, factor: float) -> None:
        self.residual.mul_(factor)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        found = residual_by_param(self._bucket, self.residual)
        for each in self._layout.matrices:
            found[self._bucket.slots[each.slot_index].name]["warm"] = self._q_factor(self.prev_q, each).view(-1)
        return found


def _matrix(flat: Tensor, each: FactoredMatrix) -> Tensor:
    return flat[each.start : each.start + each.rows * each.columns].view(each.rows, each.columns)

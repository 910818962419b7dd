"""powersgd: each matrix as a product of two thin factors, from one step of power iteration per reduction.

M  [rows, columns]  this rank's gradient + residual of one parameter
P  [rows, rank]     M · Q, summed over ranks, then its columns orthogonalised
R  [rank, columns]  Pᵀ · M, summed over ranks; its transpose is the Q of the next reduction
Law: Σ over ranks of what was sent = P · R. A rank's residual is M − P · Pᵀ · M, its own part of what P · R leaves out.

Source: Vogels et al., "PowerSGD" (2019), Alg. 1 and 2. Vectors, and matrices whose factors would not be
smaller, are sent whole in the first round. The residual is the rank's own, not M − (sum)/N as in PyTorch's hook: the
sum over ranks is the same, but differences between ranks do not accumulate in it.
"""

import zlib

import torch
from torch import Tensor

from fourfold.axes.data.rules.buckets import Bucket
from fourfold.comm.codec.protocol import RESIDUAL_KEY, CodecReduction, Message, ResidualCodec, SavedRows
from fourfold.plan.codec import CodecSpec, Combine, FactoredMatrix, Shapes, low_rank_spec

Q_KEY = "warm"
MIN_RELATIVE_NORM = 1e-6  # of the largest norm of a row of R


class PowerSGD(ResidualCodec):
    """A `Codec`."""

    def __init__(self, spec: CodecSpec, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        super().__init__(spec, bucket, shapes, device)
        self._rank, self._layout = spec.matrix_rank, low_rank_spec(bucket, shapes, spec.matrix_rank)
        self._seeds = {
            each.slot_index: zlib.crc32(bucket.slots[each.slot_index].name.encode()) for each in self._layout.matrices
        }
        dtype = self.message_dtype = self.residual.dtype
        # The first round sends all P, then the parameters that go whole; the second all R.
        self._first_message = torch.zeros(self._layout.num_p + self._layout.num_dense, dtype=dtype, device=device)
        self._second_message = torch.zeros(self._layout.num_q, dtype=dtype, device=device)
        self.prev_q = torch.zeros_like(self._second_message)
        """The R of the reduction before, [rank, columns] each: equal on every rank."""
        for each in self._layout.matrices:
            self._init_factor(each)

    @torch.no_grad()
    def reduce(self, flat: Tensor) -> CodecReduction:
        residual = self.residual.add_(flat)
        self._fill_first_message(residual)
        (total,) = yield Message(self._first_message, Combine.SUM)
        self._copy_uncompressed(total, flat)
        if not self._layout.matrices:
            return
        bases = [self._orthonormal_basis(each, total) for each in self._layout.matrices]
        for each, base in zip(self._layout.matrices, bases, strict=True):
            right, matrix = self._q_factor(self._second_message, each), _matrix(residual, each)
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
                # The gradient that is not finite was sent. Nothing of it may come back in later reductions.
                _matrix(residual, each).zero_()
                self._init_factor(each)
            else:
                self._reinit_dead_factors(each, right)

    def _fill_first_message(self, residual: Tensor) -> None:
        """Fill the first message. What goes whole leaves no residual."""
        for each in self._layout.matrices:
            torch.mm(
                _matrix(residual, each),
                self._q_factor(self.prev_q, each).T,
                out=self._p_factor(self._first_message, each),
            )
        offset = self._layout.num_p
        for start, stop in self._layout.dense_ranges:
            self._first_message[offset : offset + stop - start] = residual[start:stop]
            residual[start:stop] = 0.0
            offset += stop - start

    def _copy_uncompressed(self, total: Tensor, flat: Tensor) -> None:
        offset = self._layout.num_p
        for start, stop in self._layout.dense_ranges:
            flat[start:stop] = total[offset : offset + stop - start]
            offset += stop - start

    def _orthonormal_basis(self, each: FactoredMatrix, total: Tensor) -> Tensor:
        """Orthonormal columns that span those of the summed P. In float64, where nearly equal columns still differ."""
        return torch.linalg.qr(self._p_factor(total, each).double()).Q.to(total.dtype)

    def _p_factor(self, flat: Tensor, each: FactoredMatrix) -> Tensor:
        return flat[each.p_start : each.p_start + each.rows * self._rank].view(each.rows, self._rank)

    def _q_factor(self, flat: Tensor, each: FactoredMatrix) -> Tensor:
        return flat[each.q_start : each.q_start + each.columns * self._rank].view(self._rank, each.columns)

    def _init_factor(self, each: FactoredMatrix) -> None:
        """A first Q: random, but the same on every rank and whichever bucket the parameter is in."""
        self._q_factor(self.prev_q, each).copy_(self._random_factor(each))

    def _random_factor(self, each: FactoredMatrix) -> Tensor:
        generator = torch.Generator().manual_seed(self._seeds[each.slot_index])
        return torch.randn(self._rank, each.columns, generator=generator, dtype=torch.float64)

    def _reinit_dead_factors(self, each: FactoredMatrix, right: Tensor) -> None:
        """Replace rows of R that are only rounding errors; a gradient of less than full rank has such rows.

        Otherwise the directions of the next reduction would depend on the order of sums, and so on the mesh.
        """
        norms = torch.linalg.vector_norm(right, dim=1)
        is_dead = norms <= norms.max() * MIN_RELATIVE_NORM
        if is_dead.any():
            right[is_dead] = self._random_factor(each).to(right.dtype)[is_dead]

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        state = super().state_tensors()
        for each in self._layout.matrices:
            state[self._bucket.slots[each.slot_index].name][Q_KEY] = self._q_factor(self.prev_q, each).view(-1)
        return state

    def reshard(self, key: str, saved: SavedRows, out: Tensor) -> None:
        if key == RESIDUAL_KEY:
            super().reshard(key, saved, out)
        elif (row := saved.row(0, out.numel())) is not None:
            out.copy_(row)  # equal on every rank


def _matrix(flat: Tensor, each: FactoredMatrix) -> Tensor:
    return flat[each.start : each.start + each.rows * each.columns].view(each.rows, each.columns)

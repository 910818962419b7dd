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
from fourfold.parts.codec.talk import Message, Talk, by_slot, work_dtype
from fourfold.plan.codec import Coding, Matrix, Meet, Shapes, factor, length, rounds
from fourfold.plan.data import Bucket

DEAD = 1e-6  # of the largest right factor's norm


class PowerSGD:
    """See `Codec`."""

    def __init__(self, coding: Coding, bucket: Bucket, shapes: Shapes, device: torch.device) -> None:
        self.rounds, self._rank = rounds(coding, bucket, shapes), coding.rank
        self._bucket, self._layout = bucket, factor(bucket, shapes, coding.rank)
        self._seeds = {each.slot: zlib.crc32(bucket.slots[each.slot].name.encode()) for each in self._layout.matrices}
        dtype = self.message_dtype = work_dtype(bucket)
        self.length = length(bucket)
        self.remainder: Tensor = memory.private(self.length, dtype, device)
        # What the first round sends: left factors, then what goes whole.
        self._first = torch.zeros(self._layout.num_left + self._layout.num_whole, dtype=dtype, device=device)
        self._second = torch.zeros(self._layout.num_right, dtype=dtype, device=device)
        self.warm = torch.zeros_like(self._second)
        """Right factors of the step before, [rank, columns] each: equal on every rank."""
        for each in self._layout.matrices:
            self._draw(each)

    @torch.no_grad()
    def talk(self, flat: Tensor) -> Talk:
        rest = self.remainder.add_(flat)
        self._multiply(rest)
        (total,) = yield Message(self._first, Meet.SUM)
        self._take_whole(total, flat)
        if not self._layout.matrices:
            return
        bases = [self._base(each, total) for each in self._layout.matrices]
        for each, base in zip(self._layout.matrices, bases, strict=True):
            right, matrix = self._right(self._second, each), _matrix(rest, each)
            # Pᵀ · M, not Mᵀ · P: the same numbers, and several times as fast on a CPU.
            torch.mm(base.T, matrix, out=right)
            matrix.addmm_(base, right, alpha=-1)
        (total,) = yield Message(self._second, Meet.SUM)
        self.warm.copy_(total)
        for each, base in zip(self._layout.matrices, bases, strict=True):
            right = self._right(self.warm, each)
            matrix = _matrix(flat, each)
            if matrix.dtype == right.dtype:
                torch.mm(base, right, out=matrix)
            else:
                matrix.copy_(base @ right)
            if not torch.isfinite(right).all():
                # A gradient that is not finite has been sent so; nothing of it may come back in later steps.
                _matrix(rest, each).zero_()
                self._draw(each)
            else:
                self._draw_again(each, right)

    def _multiply(self, rest: Tensor) -> None:
        """Fill the first message, and keep of what goes whole what its sum cannot lose: nothing."""
        for each in self._layout.matrices:
            torch.mm(_matrix(rest, each), self._right(self.warm, each).T, out=self._left(self._first, each))
        at = self._layout.num_left
        for start, stop in self._layout.whole:
            self._first[at : at + stop - start] = rest[start:stop]
            rest[start:stop] = 0.0
            at += stop - start

    def _take_whole(self, total: Tensor, flat: Tensor) -> None:
        at = self._layout.num_left
        for start, stop in self._layout.whole:
            flat[start:stop] = total[at : at + stop - start]
            at += stop - start

    def _base(self, each: Matrix, total: Tensor) -> Tensor:
        """Orthonormal columns that span those of the summed left factor; in float64, where nearly equal ones differ."""
        return torch.linalg.qr(self._left(total, each).double()).Q.to(total.dtype)

    def _left(self, flat: Tensor, each: Matrix) -> Tensor:
        return flat[each.left : each.left + each.rows * self._rank].view(each.rows, self._rank)

    def _right(self, flat: Tensor, each: Matrix) -> Tensor:
        return flat[each.right : each.right + each.columns * self._rank].view(self._rank, each.columns)

    def _draw(self, each: Matrix) -> None:
        """A first right factor: random, the same on every rank and in whatever bucket the parameter lies."""
        self._right(self.warm, each).copy_(self._drawn(each))

    def _drawn(self, each: Matrix) -> Tensor:
        generator = torch.Generator().manual_seed(self._seeds[each.slot])
        return torch.randn(self._rank, each.columns, generator=generator, dtype=torch.float64)

    def _draw_again(self, each: Matrix, right: Tensor) -> None:
        """Replace right factors that are nothing but rounding: a gradient of less than full rank leaves such.

        The next step would otherwise go along directions that depend on the order of sums, on the mesh that is.
        """
        norms = torch.linalg.vector_norm(right, dim=1)
        lost = norms <= norms.max() * DEAD
        if lost.any():
            right[lost] = self._drawn(each).to(right.dtype)[lost]

    def scale(self, factor: float) -> None:
        self.remainder.mul_(factor)

    def state(self) -> dict[str, dict[str, Tensor]]:
        found = by_slot(self._bucket, self.remainder)
        for each in self._layout.matrices:
            found[self._bucket.slots[each.slot].name]["warm"] = self._right(self.warm, each).view(-1)
        return found


def _matrix(flat: Tensor, each: Matrix) -> Tensor:
    return flat[each.start : each.start + each.rows * each.columns].view(each.rows, each.columns)

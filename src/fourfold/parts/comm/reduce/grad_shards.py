"""TODO."""

from collections.abc import Sequence

from torch import Tensor

from fourfold.parts import memory


class GradShards:
    """This rank's shares of the gradients, where they rest split: what each round adds up to."""

    def __init__(self, grad_buffers: Sequence[Tensor], num_shards: int) -> None:
        self.flats = [
            memory.allocate_private(flat.numel() // num_shards, flat.dtype, flat.device) for flat in grad_buffers
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: the first sum of every bucket replaces what is there."""
        self._is_first_round = [True] * len(self.flats)

    def accumulate(self, bucket: int, total: Tensor) -> None:
        """Take in the sum of a round."""
        if self._is_first_round[bucket]:
            self.flats[bucket].copy_(total)
        else:
            self.flats[bucket].add_(total)
        self._is_first_round[bucket] = False

"""Batch normalization over ranks: what the ranks send each other for it.

row      what one rank sends in one exchange: float64 numbers, the place in the model in front
message  a row over a network: its first part, of the same length for all rows, then the rest of a long one
pass     a forward or a backward; at its end ranks exchange one more row, which says so
Law: the bytes that `fourfold show` prints are those that a step sends.
"""

from collections.abc import Sequence

HEADER_LENGTH = 2
"""Elements of a row in front of its values: the place in the model, and how many values a channel has on this rank."""
FIRST_LENGTH = 512
"""Elements of a message's first part: gloo ends a process that receives more than it expects, and NCCL waits."""
ELEMENT_BYTES = 8
SYNC = 'batch_norm = "sync"'


def message_length(num_elements: int) -> int:
    """Elements that a row takes over a network."""
    return max(FIRST_LENGTH, num_elements)


def statistics_sent_bytes(channels: Sequence[int], num_ranks: int) -> int:
    """Bytes that each of `num_ranks` ranks sends in a step, with norms of so many channels, each used once.

    Of each channel a row has two values: in forward the mean and the sum of squares, in backward two sums.
    """
    rows = [HEADER_LENGTH, *(HEADER_LENGTH + 2 * num_channels for num_channels in channels)]
    return 2 * sum(map(message_length, rows)) * ELEMENT_BYTES * (num_ranks - 1)

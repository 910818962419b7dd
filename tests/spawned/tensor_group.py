"""What the ranks of a spawned world do as a tensor group. Results are JSON."""

import os
import signal
from typing import Any

import torch

from fourfold.axes.tensor.work.cross_entropy import Vocabulary, cross_entropy
from fourfold.axes.tensor.work.split_logits import split_logits
from fourfold.comm import init
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import make_tensor_group
from fourfold.words.errors import DivergenceError
from tests.tensor_group_oracle import FLOATS, SHAPES, all_results, bits, expected_results, tensor_of


def differences(choice: str) -> dict[str, Any]:
    """The collectives whose results are not those of one process, bit by bit; of tensors of all shapes and dtypes."""
    group, wrong = make_tensor_group(init.init_communicator(), "tensor", CommMeter(), choice=choice), []
    for shape in (*SHAPES, (300, 301)):
        for dtype in FLOATS:
            tensors = [tensor_of(rank, shape, dtype, layout="transposed") for rank in range(group.size)]
            found = all_results(group, tensors[group.index])
            expected = expected_results(tensors, group.index)
            wrong += [
                f"{name} of {list(shape)} ({dtype})"
                for name, value in expected.items()
                if bits(found[name]) != bits(value.contiguous())
            ]
    return {"wrong": wrong, "name": group.name, "sent_bytes": group.meter.sent_bytes}


def products(num_rounds: int) -> bool:
    """Whether sums of products that ranks write into their buffers are those of one process, round after round."""
    group = make_tensor_group(init.init_communicator(), "tensor", CommMeter())
    weights = [tensor_of(rank, (64, 48), torch.float32) for rank in range(group.size)]
    for number in range(num_rounds):
        inputs = torch.full((8 + number % 5, 64), 1.0 + number)
        partial = group.buffer((len(inputs), 48), torch.float32)
        torch.mm(inputs, weights[group.index], out=partial)
        expected = torch.mm(inputs, weights[0]) + torch.mm(inputs, weights[1])
        if not torch.equal(group.all_reduce(partial), expected):
            return False
    return True


def logits_that_rank_0_reads() -> str:
    """The error of a rank: over messages, a gather of rank 0 and the other rank's loss would end both processes."""
    comm = init.init_communicator()
    group = make_tensor_group(comm, "tensor", CommMeter(), choice="gloo")
    logits = split_logits(torch.randn(3, 64, requires_grad=True) * 1.0, Vocabulary(group, 64 * comm.rank, 128))
    try:
        str(logits) if comm.rank == 0 else cross_entropy(logits, torch.zeros(3, dtype=torch.long))
    except DivergenceError as error:
        return str(error)
    return "no error"


def sum_with_the_dead() -> None:
    """Rank 1 is killed while rank 0 waits for it in a sum."""
    group = make_tensor_group(init.init_communicator(), "tensor", CommMeter())
    group.all_reduce(torch.ones(3))
    if group.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.ones(3))

"""Tensor step worker: one rank that trains its part of the GPT of `bench/models.py`, two ranks or more along tp.

configuration  a way to split the model: Fourfold's rules, torch's `parallelize_module`, or parts without messages
parts          "alone": each rank trains a model with its share of the heads, widths and tokens: the lower bound
Law: Fourfold and torch split the same layers and train the same; all see the same batches.

    python -m bench.tensor_step_worker CONFIGURATION CASE LIMIT RENDEZVOUS  (RANK and WORLD_SIZE in the environment)
"""

import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import CASES, GPT, LENGTH, VOCABULARY, Attention, Case, Layer, losses
from bench.worker import NUM_BATCHES, Step, run_turn, torch_step

FOURFOLD, DTENSOR, ALONE = "fourfold", "dtensor", "alone"
HEAD_SIZE = 32
RULES = {
    "tokens": "vocabulary",
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "head": "vocabulary",
}


class ByHeadAttention(Attention):
    """The same attention; the fused layer has q, k and v of one head side by side, so slices of it are whole heads."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        q_BHLK, k_BHLK, v_BHLK = self.qkv(x_BLD).unflatten(-1, (-1, 3, HEAD_SIZE)).permute(3, 0, 2, 1, 4)
        out_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        return self.out(out_BHLK.transpose(1, 2).flatten(2))


def build_model() -> GPT:
    torch.manual_seed(0)
    model = GPT()
    for module in model.modules():
        if isinstance(module, Attention):
            module.__class__ = ByHeadAttention
    return model


def fourfold(case: Case, **fields: Any) -> Step:
    import fourfold as ff  # here: torch's way is measured without it

    optimizer = functools.partial(torch.optim.AdamW, lr=case.lr, fused=True)
    plan = ff.Plan(tp=int(os.environ["WORLD_SIZE"]), **fields)
    step = ff.parallelize(build_model(), losses, optimizer, plan, tensor=RULES)
    return lambda batch: step(batch).loss


def dtensor(case: Case) -> Step:
    # Here: no other configuration should import them.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build_model()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan |= {
            f"blocks.{number}.attention.qkv": ColwiseParallel(),
            f"blocks.{number}.attention.out": RowwiseParallel(),
            f"blocks.{number}.mlp.0": ColwiseParallel(),
            f"blocks.{number}.mlp.2": RowwiseParallel(),
        }
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    # One fused update cannot hold tensors and DTensors at once.
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) is is_split] for is_split in (True, False)]
    return torch_step(model, torch.optim.AdamW([{"params": group} for group in groups], lr=case.lr, fused=True))


def alone(case: Case) -> Step:
    """Models of a rank's share of the weights, each trained by itself."""
    from fourfold.torch_kit.memory import keep_freed_memory

    keep_freed_memory()
    model = build_model()
    size = int(os.environ["WORLD_SIZE"])
    model.tokens, model.head = nn.Embedding(VOCABULARY // size, 256), nn.Linear(256, VOCABULARY // size, bias=False)
    for block in model.blocks:
        assert isinstance(block, Layer)
        attention, mlp = block.attention, block.mlp
        attention.qkv, attention.out = nn.Linear(256, 3 * 256 // size), nn.Linear(256 // size, 256)
        mlp[0], mlp[2] = nn.Linear(256, 4 * 256 // size), nn.Linear(4 * 256 // size, 256)
    inner = torch_step(model, torch.optim.AdamW(model.parameters(), lr=case.lr, fused=True))
    return lambda batch: inner((batch[0] % (VOCABULARY // size), batch[1] % (VOCABULARY // size)))


CONFIGURATIONS: Mapping[str, Callable[[Case], Step]] = {FOURFOLD: fourfold, DTENSOR: dtensor, ALONE: alone}


def main(arguments: Iterable[str], reply_stream: TextIO) -> None:
    configuration, case_name, limit, rendezvous = arguments
    signal.alarm(int(limit))  # the kernel ends this process then, whatever it does
    torch.set_num_threads(1)
    if configuration != ALONE:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    case = CASES[case_name]
    assert case.draw_batch(1, torch.Generator())[0].shape[1] == LENGTH, "a case of the GPT"
    step = CONFIGURATIONS[configuration](case)
    batches = itertools.cycle(case.batches(0, NUM_BATCHES))  # tensor ranks train on the same
    print(json.dumps({"ready": True}), file=reply_stream, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_turn(step, batches, **json.loads(line))), file=reply_stream, flush=True)
    os._exit(0)  # skips the shutdown of the process group: another rank may be gone already


if __name__ == "__main__":
    # What libraries print goes to stderr: stdout is for the replies to the parent.
    with os.fdopen(os.dup(1), "w") as reply_stream:
        os.dup2(2, 1)
        main(sys.argv[1:], reply_stream)

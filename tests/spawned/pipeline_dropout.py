"""What the ranks of a spawned world do about dropout with pp > 1. Results are JSON."""

import functools
from typing import Any

import torch
from torch import nn

import fourfold as ff
from fourfold.axes.pipeline.work.chain import find_chain, seeded_segments
from fourfold.plan.rng import microbatch_seed
from fourfold.tasks.lm import LanguageModel
from tests import cases
from tests.spawned.tensor_dropout import SEED, token_batches, token_loss

RATE, MICROBATCHES, WIDTH = 0.1, 4, 16


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return LanguageModel(width=WIDTH, layers=4, heads=2, kv_heads=1, dropout=0.3).double()


def trainings(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The weights of all stages after two steps, by run."""
    return [_train(**fields) for fields in runs]


def _train(**fields: Any) -> dict[str, Any]:
    plan = ff.Plan(microbatches=MICROBATCHES, **fields)
    step = ff.parallelize(make_model(), token_loss, functools.partial(torch.optim.SGD, lr=RATE), plan, seed=SEED)
    torch.manual_seed(torch.distributed.get_rank())  # what is drawn does not depend on the states of the generators
    for batch in token_batches():
        step(cases.local_batch(batch, plan.dp, step.dp_index))
    return {name: weight.tolist() for name, weight in step.named_weights()}


def one_process(dp: int) -> dict[str, Any]:
    """The same training by hand: the whole model, with the numbers of each data index, step and microbatch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, batch in enumerate(token_batches()):
        for number in range(dp * MICROBATCHES):
            inputs, targets = cases.local_batch(batch, dp * MICROBATCHES, number)
            seed = microbatch_seed(SEED, number // MICROBATCHES, step, number % MICROBATCHES)
            with seeded_segments(model, find_chain(model), seed, targets.device):
                outputs = model(**inputs)
            (token_loss(outputs, targets).sum() / batch[1].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.tolist() for name, weight in model.named_parameters()}

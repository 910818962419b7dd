"""Stand-ins: shapes without values. What needs the values says whose they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.pipeline.work.stand_in import OUTPUT, Source, StandIn, StandInUsed, UnknownValue, stand_in
from fourfold.axes.pipeline.work.values import describe, stand_in_of, take_apart

EMBEDDING = Source(OUTPUT, "embedding")
CPU = torch.device("cpu")


def make(source: Source = EMBEDDING) -> Tensor:
    return stand_in((2, 3), torch.float32, CPU, source, needs_gradient=True)


KEPT = {
    "sum": (lambda x: x + torch.ones(3), (2, 3)),
    "in place": (lambda x: x.mul_(2).add_(torch.ones(3)), (2, 3)),
    "product": (lambda x: x @ x.mT, (2, 2)),
    "view": (lambda x: x.flatten().unsqueeze(0), (1, 6)),
    "written": (lambda x: x.clone().index_fill_(1, torch.tensor([0]), 1.0), (2, 3)),
    "where": (lambda x: torch.where(x > 0, x, torch.zeros(3)), (2, 3)),
    "layer": (lambda x: nn.Linear(3, 4)(x), (2, 4)),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), (1, 2, 3)),
    "half": (lambda x: x.bfloat16(), (2, 3)),
}
READ = {
    "branch": lambda x: bool((x > 0).any()),
    "number": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "index": lambda x: [1, 2][x.sum().long()],
    "size that follows from values": lambda x: x[x > 0],
    "write into a tensor": lambda x: torch.zeros(2, 3).copy_(x),
    "comparison": lambda x: torch.equal(x, torch.zeros(2, 3)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_computed_with_a_stand_in_is_one_with_the_shape_that_it_has(name):
    compute, shape = KEPT[name]
    got = compute(make())
    real = compute(torch.ones(2, 3))
    assert isinstance(got, StandIn)
    assert (got.shape, got.dtype, got.device, got.sources) == (shape, real.dtype, CPU, {EMBEDDING})
    assert got.shape == real.shape


@pytest.mark.parametrize("name", READ)
def test_what_needs_values_says_whose_and_where(name):
    with pytest.raises(StandInUsed) as caught:
        READ[name](make())
    assert caught.value.sources == {EMBEDDING}
    assert caught.value.place.startswith(" (test_stand_ins.py, line ")


def test_a_result_is_of_the_sources_of_all_its_operands():
    other = Source(OUTPUT, "blocks.0")
    x = make()
    x += make(other)
    assert isinstance(x, StandIn)
    assert x.sources == {EMBEDDING, other}


def test_what_only_needs_a_shape_has_values():
    x = make()
    assert torch.equal(torch.zeros_like(x[:, 0]), torch.zeros(2))
    assert torch.equal(x.new_ones(x.shape[0], device=x.device), torch.ones(2))


def test_an_object_of_another_stage_cannot_be_used():
    value = stand_in_of(describe(object()), CPU, EMBEDDING)
    assert isinstance(value, UnknownValue)
    for use in (bool, len, list, lambda v: v.keys, lambda v: v == 1, lambda v: v + 1):
        with pytest.raises(StandInUsed):
            use(value)


def test_a_value_is_taken_apart_and_built_again():
    value = {"hidden": torch.ones(2), "rest": (None, [3, "text"])}
    form, leaves = take_apart(value)
    assert form.build(iter(leaves)) == value
    other = form.build(stand_in_of(describe(each), CPU, EMBEDDING) for each in leaves)
    assert isinstance(other["hidden"], StandIn)
    assert other["rest"] == value["rest"]

"""Laws of the facts of a task, which a fake step counts on the meta device."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup
from fourfold.losses import cross_entropy
from fourfold.model.model_call import call_model
from fourfold.plan.plan import Plan
from fourfold.planner.predict.facts import ModelFacts, OperationKind, SegmentFacts
from fourfold.planner.task_facts import source
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.planner.task_facts.fake_step import lay_out
from fourfold.planner.task_facts.operations import MetaCalls
from fourfold.planner.task_facts.segments import equal_blocks
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.step.recomputed_blocks import Recompute
from fourfold.tasks import lm
from fourfold.torch_kit.torch_private import storage_key
from fourfold.words.errors import PlanError, TaskError
from fourfold.words.layout import Change
from fourfold.words.task import Data, Task

WIDTH, LENGTH, BYTES, SAMPLES = 32, 24, 256, 3


def tiny_lm(layers: int = 3, **settings: object) -> Task:
    return lm.task(width=WIDTH, layers=layers, length=LENGTH, heads=2, batch_size=8, **settings)  # type: ignore[arg-type]


def products(segment: SegmentFacts) -> float:
    kinds = (OperationKind.PRODUCT, OperationKind.ATTENTION)
    return sum(operation.flops for operation in segment.operations if operation.kind in kinds)


def test_the_products_of_a_language_model_are_those_of_the_formula():
    # Two for each weight of a matrix and token, and 2 s² h for causal attention; 2 s h V for the logits: arXiv
    # 2104.04473, appendix, whose attention is not causal, and whose matrices have 12 h² weights.
    task = tiny_lm()
    facts = TaskFacts(task).facts(Plan())
    weights = sum(p.numel() for name, p in task.model().named_parameters() if "blocks.0." in name and p.dim() == 2)
    block = 2 * LENGTH * weights + 2 * LENGTH**2 * WIDTH
    assert [products(each) for each in facts.blocks] == [block] * 3
    assert (products(facts.first), products(facts.last)) == (0, 2 * LENGTH * WIDTH * BYTES)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_ranks_of_an_axis_share_the_products_evenly(fields: dict):
    source = TaskFacts(tiny_lm())
    whole, part = (source.facts(Plan(**each)) for each in ({}, fields))
    size = Plan(**fields).mesh.size
    for one, other in zip(whole.segments, part.segments, strict=True):
        assert products(other) == products(one) / size


def test_a_block_more_adds_the_facts_of_a_block():
    few, many = (TaskFacts(tiny_lm(layers)).facts(Plan()) for layers in (2, 5))
    assert [len(each.blocks) for each in (few, many)] == [2, 5]
    assert {(each.operations, *each.saved_bytes.values()) for each in (*few.blocks, *many.blocks)} == {
        (few.blocks[0].operations, *few.blocks[0].saved_bytes.values())
    }
    assert (few.first, few.last) == (many.first, many.last)


def held_bytes(task: Task, samples: int, recompute: str) -> int:
    """What a real forward on the CPU holds, besides weights and the batch."""
    model = task.model()
    source = task.data().train
    inputs, targets = torch.utils.data.default_collate([source[number] for number in range(samples)])
    memory = PeakMemory()
    batch = [*inputs.values(), targets]
    memory.track("known", [*model.parameters(), *model.buffers(), *batch])
    before = memory.current_bytes
    names = [f"blocks.{number}" for number in range(len(model.blocks))] if recompute != "none" else []  # type: ignore[arg-type]
    alone = MessageTensorGroup(CommMeter(), torch.device("cpu"))
    blocks = Recompute(model, names, alone, selective=recompute == "selective")
    with memory, blocks.installed() if names else contextlib.nullcontext():
        loss = task.loss(call_model(model, inputs), targets).sum()  # type: ignore[misc]
        held = memory.current_bytes - before
    assert loss.requires_grad
    return held


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_saved_bytes_are_those_that_a_real_forward_holds(recompute: str):
    task = tiny_lm()
    facts = TaskFacts(task).facts(Plan())
    kept = sum(segment.saved_bytes[recompute] for segment in facts.segments)
    few, many = (held_bytes(task, samples, recompute) for samples in (SAMPLES, 2 * SAMPLES))
    assert kept == pytest.approx((many - few) / SAMPLES, rel=0.01)


def collectives(facts: ModelFacts, axis: str) -> dict[tuple[Change, float], tuple[int, int, int]]:
    found = [each for each in facts.blocks[0].collectives if each.axis == axis]
    return {(each.change, each.whole_bytes): (each.forward, each.backward, each.recompute) for each in found}


def test_tensor_ranks_sum_twice_in_forward_and_twice_in_backward():
    facts = TaskFacts(tiny_lm()).facts(Plan(tp=2))
    hidden = 4.0 * LENGTH * WIDTH
    # With `recompute`, the block's inputs are gathered and its forward sums again.
    expected = {(Change.ALL_REDUCE, hidden): (2, 2, 2), (Change.ALL_GATHER, hidden): (0, 0, 1)}
    assert collectives(facts, "tp") == expected
    assert facts.boundary_bytes == hidden


@pytest.mark.parametrize("splits", [False, True])
def test_a_tensor_rank_keeps_its_part_of_the_inputs_of_blocks_that_are_computed_again(splits: bool):
    hidden = 4.0 * LENGTH * WIDTH
    for block in TaskFacts(tiny_lm()).facts(Plan(tp=2, sequence_parallel=splits)).blocks:
        assert block.saved_bytes["full"] == hidden / 2
        assert block.saved_bytes["none"] > block.saved_bytes["selective"] > hidden


def test_a_ring_sends_keys_and_values_once_in_forward_and_twice_in_backward():
    facts = TaskFacts(tiny_lm()).facts(Plan(cp=2))
    assert collectives(facts, "cp") == {(Change.ALL_GATHER, 2 * 4.0 * LENGTH * WIDTH): (1, 2, 1)}


def test_params_have_one_segment_each_and_those_of_a_stage_are_its_own():
    source, plan = TaskFacts(tiny_lm(4)), Plan(pp=2, microbatches=2)
    facts, blocks = source.facts(plan), source.stage_blocks(plan)
    names = [name for segment in facts.segments for name in segment.params]
    specs = source.specs(plan)
    assert sorted(names) == sorted(spec.name for spec in specs)
    stages = {spec.name: spec.stage for spec in specs}
    for stage, own in enumerate(blocks):
        assert {stages[name] for place in own for name in facts.blocks[place].params} == {stage}


class Reads(nn.Module):
    """Reads a value in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if float(x.sum()) > 0 else self.layers(-x)


class OneByOne(Reads):
    """Calls its layers once for each sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layers(each[None]) for each in x])


class Compares(Reads):
    """Compares each sample with each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return hidden + (hidden @ hidden.T).sum()


class NeedsValues(nn.Module):
    """Its constructor reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.norm = float(self.layer.weight.detach().norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.norm


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Reads, "do not depend on the values"),
        (Reads, r"49.0 to 53.0 operations in a forward of a sample, by the first 8"),
        (Compares, "for 2, 4 and 6 samples"),
        (OneByOne, "the same operations for any number of samples"),
        (NeedsValues, "whose constructor needs no values"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_reason(model: type[nn.Module], message: str):
    samples = [((-1) ** number * torch.ones(4), torch.tensor(1)) for number in range(8)]
    loss = functools.partial(F.cross_entropy, reduction="none")
    task = Task(model=model, loss=loss, data=lambda: Data(train=samples), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    with pytest.raises(TaskError, match=message):
        TaskFacts(task).facts(Plan())


def test_two_byte_precision_halves_what_crosses_a_boundary():
    source = TaskFacts(tiny_lm())
    assert source.facts(Plan(precision="bf16")).boundary_bytes == source.facts(Plan()).boundary_bytes / 2


class Dilated(nn.Module):
    """A block whose cost depends on a setting that is no parameter."""

    def __init__(self, times: tuple[int, int]) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(8, 8), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times[0]):
            x = self.layer(x)
        return x


def test_blocks_with_other_settings_are_counted_for_themselves():
    samples = [(torch.ones(8), torch.tensor(1))] * 8
    loss = functools.partial(F.cross_entropy, reduction="none")
    task = Task(
        model=lambda: nn.Sequential(*(Dilated((times, 0)) for times in (1, 2, 1, 2))),
        loss=loss,
        data=lambda: Data(train=samples),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
    flops = [products(block) for block in TaskFacts(task).facts(Plan()).blocks]
    assert flops == [128.0, 256.0, 128.0, 256.0]


def test_heads_that_cannot_be_divided_are_a_problem_of_the_plan():
    source = TaskFacts(tiny_lm())
    for _ in range(2):  # the second one is remembered
        with pytest.raises(PlanError, match="ulysses = 4, 2 heads"):
            source.facts(Plan(cp=4, ulysses=4))


def count_calls(monkeypatch, name: str) -> list[tuple[object, ...]]:
    """The arguments of each call of a function that counts, as they are made."""
    calls, function = list[tuple[object, ...]](), getattr(source, name)

    def call(*args: object) -> object:
        calls.append(args[1:])
        return function(*args)

    monkeypatch.setattr(source, name, call)
    return calls


def test_activations_are_counted_when_they_are_read_and_kernels_once_for_alike_variants(monkeypatch):
    forwards, memories = (count_calls(monkeypatch, f"record_{each}") for each in ("forward", "memory"))
    source = TaskFacts(tiny_lm())
    variants = [source.facts(plan) for plan in (Plan(cp=2), Plan(cp=2, ulysses=2), Plan(cp=2, ring="gather"))]
    assert len(forwards) == 3  # numbers of samples
    assert memories == []
    assert {each.blocks[0].operations for each in variants} == {variants[0].blocks[0].operations}
    kept = [each.saved_bytes["full"] for each in variants[0].segments]
    assert [each.saved_bytes["full"] for each in variants[0].segments] == kept
    assert {each[1] for each in memories} == {"full"}
    assert len(memories) == 2  # numbers of samples


def test_a_known_call_gives_the_form_that_its_operation_gives():
    aten, calls = torch.ops.aten, MetaCalls()
    x, n = torch.empty(3, 3, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    cases = [(aten.clone.default, each) for each in ((x,), (x.t(),), (n,))]
    cases += [(aten.mul.Tensor, (n, factor)) for factor in (1, 1.0, True)]
    cases += [(aten.sum.dim_IntList, (x, [dim], keep)) for dim in (0, 1) for keep in (False, True)]
    cases += [(aten.t.default, (x,)), (aten.detach.default, (x,))]
    for func, args in cases * 2:
        known, own = calls.call(func, args, {}), func(*args)
        assert (known.shape, known.stride(), known.dtype) == (own.shape, own.stride(), own.dtype)
        assert (storage_key(known) == storage_key(args[0])) == (storage_key(own) == storage_key(args[0]))


def test_equal_blocks_are_found_where_modules_know_their_own_names():
    # The first block splits the tokens, and the others are equal, though each module has its name in its role.
    model = lay_out(tiny_lm(5), Plan(tp=2, sequence_parallel=True)).model
    blocks = {f"blocks.{number}": model.get_submodule(f"blocks.{number}") for number in range(5)}
    assert equal_blocks(blocks) == [0, 1, 1, 1, 1]


class Vocabulary(nn.Module):
    """Logits of many classes, for each token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(classes, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, classes)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens_BL)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("classes", "length"), [(128_256, 128), (151_936, 100), (256_000, 48), (32_000, 512)])
def test_large_vocabularies_have_facts_whatever_the_logits_dtype(classes: int, length: int, dtype: torch.dtype):
    # The loss works on so many rows at a time: here few samples are less rows than that, and more samples are more.
    tokens = torch.zeros(4, length, dtype=torch.int64)
    task = Task(
        model=functools.partial(Vocabulary, classes),
        loss=lambda logits, targets: cross_entropy(logits.to(dtype), targets),
        data=lambda: Data(train=[(row, row) for row in tokens]),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
    facts = TaskFacts(task).facts(Plan())
    assert products(facts.last) == 2 * length * 8 * classes

"""Laws of the bytes that a rank holds at its peak: predicted, counted by a fake rank, and held on a CPU."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.fake_rank import rank_bytes
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.model.model_call import call_model
from fourfold.model.sdpa_interception import AttentionCall, AttentionHandler
from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.facts import TemporaryPeak
from fourfold.planner.predict.memory import predict_memory
from fourfold.planner.task_facts.fake_memory import PeakMemory, upper_envelope
from fourfold.planner.task_facts.fake_ranks import FakeChannel
from fourfold.planner.task_facts.operations import FakeAttention
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.tasks import hf, lm
from fourfold.words.task import Task

BATCH = 16


@functools.cache
def language_model(layers: int = 8) -> TaskFacts:
    return TaskFacts(lm.task(width=64, layers=layers, heads=4, length=64, batch_size=BATCH))


def gpt2(folder: Path, *, vocabulary: int, length: int) -> TaskFacts:
    """A model of transformers, whose head is tied to its embedding."""
    sizes = {"n_layer": 8, "n_embd": 64, "n_head": 4, "vocab_size": vocabulary, "n_positions": length}
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0, **sizes}))
    return TaskFacts(hf.task(str(path), length=length, batch_size=BATCH))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TaskFacts:
    return gpt2(tmp_path_factory.mktemp("tied"), vocabulary=512, length=128)


def check_prediction(source: TaskFacts, plan: Plan, *, error: float = 0.05) -> None:
    topology = Topology.regular(hosts=1, ranks_per_host=plan.mesh.size, device="cuda")
    blueprint = lower(plan, source.specs(plan), topology, source.update_spec)
    for place, parts in enumerate(predict_memory(blueprint, source)):
        fake = rank_bytes(source, plan, place)
        assert parts.total == pytest.approx(fake.total, rel=error), (place, parts, fake)


PIPELINES = st.sampled_from(
    [{"pp": 1}, {"pp": 1, "microbatches": 4}]
    + [{"pp": 2, "microbatches": 4, "schedule": each} for each in ("gpipe", "1f1b")]
    + [{"pp": 4, "microbatches": 8, "schedule": "zero-bubble", "recompute": "none"}]
    + [{"pp": 2, "microbatches": 4, "schedule": "interleaved", "interleave": 2}]
)
RANKS = st.sampled_from([{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"cp": 4, "ulysses": 2}])
RECOMPUTES = st.sampled_from(["none", "selective", "full"])


@settings(max_examples=8, deadline=None)
@given(pipeline=PIPELINES, ranks=RANKS, recompute=RECOMPUTES, precision=st.sampled_from(["keep", "bf16"]))
def test_predicted_memory_is_that_of_a_rank_that_runs_its_whole_list(
    pipeline: dict, ranks: dict, recompute: str, precision: str
):
    fields: dict = {"recompute": recompute, "precision": precision} | ranks | pipeline
    plan = Plan(**fields)
    check_prediction(language_model(), plan)


@pytest.mark.parametrize(("schedule", "fields"), [
    ("gpipe", {"pp": 2, "microbatches": 4, "recompute": "full"}), ("1f1b", {"pp": 4, "microbatches": 8}),
    ("zero-bubble", {"pp": 2, "microbatches": 4, "recompute": "none"}),
])  # fmt: skip
def test_predicted_memory_of_tied_weights(tied: TaskFacts, schedule: str, fields: dict):
    check_prediction(tied, Plan(schedule=schedule, **fields))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_memory_of_a_rank_without_a_pipeline_is_predicted_almost_to_the_byte(recompute: str):
    check_prediction(language_model(), Plan(recompute=recompute), error=1e-5)


def test_between_the_halves_of_a_backward_a_rank_keeps_the_factors_of_the_gradients_of_weights():
    check_prediction(
        TaskFacts(lm.task(layers=8, batch_size=32)), Plan(pp=4, microbatches=8, schedule="zero-bubble"), error=0.03
    )


@pytest.mark.parametrize("fields", [{}, {"pp": 2, "microbatches": 8, "recompute": "full"}])
def test_predicted_memory_of_a_loss_that_is_computed_some_rows_at_a_time(tmp_path: Path, fields: dict):
    check_prediction(gpt2(tmp_path, vocabulary=50_257, length=1024), Plan(**fields))


@settings(max_examples=4, deadline=None)
@given(ranks=RANKS, recompute=RECOMPUTES)
def test_the_peak_of_a_deep_model_follows_from_those_of_two_and_three_blocks(ranks: dict, recompute: str):
    plan = Plan(recompute=recompute, **ranks)
    two, three, nine = (rank_bytes(language_model(layers), plan).total for layers in (2, 3, 9))
    assert nine == two + 7 * (three - two)


def held_by_a_real_step(task: Task) -> int:
    """The peak of a forward and backward on the CPU, with gradients and the states of AdamW."""
    model, source = task.model(), task.data().train
    inputs, targets = torch.utils.data.default_collate([source[number] for number in range(BATCH)])
    resting = [torch.empty_like(p) for p in model.parameters() for _ in range(3)]
    memory = PeakMemory()
    memory.track("resting", [*model.parameters(), *resting])
    memory.track("batch", [*inputs.values(), targets])

    def store(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(store)
    with memory:
        loss = task.loss(call_model(model, inputs), targets).sum()  # type: ignore[misc]
        loss.backward()
    return sum(size for kind, size in memory.bytes_by_kind.items() if kind != "batch")


def test_a_fake_rank_holds_what_a_real_step_holds():
    task = lm.task(width=64, layers=3, heads=4, length=64, batch_size=BATCH)
    assert rank_bytes(TaskFacts(task), Plan()).total == pytest.approx(held_by_a_real_step(task), rel=0.002)


PEAKS = st.lists(st.builds(TemporaryPeak, st.integers(-1000, 1000), st.integers(-100, 100)), min_size=1, max_size=12)


@given(moments=PEAKS, num_samples=st.integers(1, 1000))
def test_the_moments_that_are_kept_hold_most_for_every_number_of_samples(moments: list, num_samples: int):
    def most(peaks: list) -> float:
        return max(each.call_bytes + each.sample_bytes * num_samples for each in peaks)

    kept = list(upper_envelope(moments))
    assert most(kept) == pytest.approx(most(moments))
    overtakes = [(a.call_bytes - b.call_bytes) / (b.sample_bytes - a.sample_bytes) for a, b in itertools.pairwise(kept)]
    assert overtakes == sorted(overtakes)


RINGS = [("zigzag", 1), ("plain", 1), ("gather", 1), ("rsa", 1), ("zigzag", 2), ("zigzag", 4)]


@pytest.mark.parametrize(("ring", "ulysses"), RINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_sequence_ranks_hold_what_ranks_with_real_tensors_hold(ring: str, ulysses: int, dtype: torch.dtype):
    plan = Plan(cp=4, ring=ring, ulysses=ulysses)
    around, heads = (FakeChannel(size, size - 1) for size in (4 // ulysses, ulysses))
    group = ContextGroup(around, heads, ring)

    def real(call: AttentionCall) -> Tensor:
        return context_attention(call.q, call.k, call.v, group)

    assert held_by_attention(FakeAttention(plan.context_spec), dtype, "meta") == held_by_attention(real, dtype, "cpu")


def held_by_attention(attend: AttentionHandler, dtype: torch.dtype, device: str) -> tuple[int, int]:
    """After a forward, and at the peak of its backward."""
    tensors = [torch.zeros(3, 4, 32, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    memory = PeakMemory()
    with memory:
        q, k, v = (tensor * 1 for tensor in tensors)
        out = attend(AttentionCall(q, k, v))
        del q, k, v
        kept = memory.current_bytes
        out.backward(torch.empty_like(out))
    return kept, memory.peak_bytes

"""Laws of `fourfold show` for the context axis: it reports what attention does."""

import pytest
import torch

from fourfold.axes.context.show import saved_bytes, sent_bytes, trace_model
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.cli import run_commands
from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.fake_ranks import FakeChannel
from fourfold.show.describe import show
from fourfold.step.initial_model import build_meta_model
from fourfold.tasks import digits, lm
from fourfold.words.errors import PlanError

TASK = lm.task(length=96, heads=4, kv_heads=2, layers=3, width=64, batch_size=6)


@pytest.mark.parametrize(
    "plan",
    [
        *(Plan(cp=4, ring=ring) for ring in ("zigzag", "plain", "rsa", "gather")),
        Plan(cp=4, ulysses=2),
        Plan(dp=2, cp=2, ulysses=2),
    ],
    ids=str,
)
def test_the_reported_bytes_equal_those_that_a_rank_saves_and_sends(plan: Plan) -> None:
    seen = trace_model(TASK, build_meta_model(TASK))
    (form,) = seen.attention_calls
    samples = (TASK.batch_size or 0) // plan.dp
    around, heads = FakeChannel(plan.cp // plan.ulysses), FakeChannel(plan.ulysses)
    axis = ContextGroup(around, heads, plan.ring)
    q, k, v = (
        torch.randn(samples, num, seen.length // plan.cp, form.head_size, requires_grad=True)
        for num in (form.heads, form.kv_heads, form.kv_heads)
    )
    saved: dict[int, int] = {}

    def record_saved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
        out = context_attention(q, k, v, axis, is_causal=True, enable_gqa=True)
    if plan.ring != "rsa":
        assert saved_bytes(plan, seen, samples, seen.length) == 3 * sum(saved.values())
    out.sum().backward()
    assert sent_bytes(plan, seen, samples, seen.length) == 3 * (around.meter.sent_bytes + heads.meter.sent_bytes)


def test_every_token_has_one_rank_and_padding_is_reported() -> None:
    text = show(Plan(cp=4), lm.task(length=100))
    assert "samples of 100 tokens, padded to 104, 26 a rank" in text
    rows = [
        line.split(maxsplit=2)[2] for line in text.splitlines() if line.strip().startswith(("0 ", "1 ", "2 ", "3 "))
    ]
    held = [range(int(first), int(last) + 1) for row in rows[-4:] for first, last in _spans(row)]
    assert sorted(token for span in held for token in span) == list(range(104))


def _spans(row: str) -> list[list[str]]:
    return [span.split(" to ") for span in row.split(" and ")]


def test_a_task_without_positions_is_refused() -> None:
    with pytest.raises(PlanError, match="positions"):
        show(Plan(cp=2), digits.task())


def test_show_needs_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_commands.show(["lm", "cp=2"]) == 0
    assert "pp 1 × dp 1 × cp 2 × tp 1 = 2 ranks" in capsys.readouterr().out

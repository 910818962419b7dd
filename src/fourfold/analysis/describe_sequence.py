"""Show, the sequence axis: who holds which tokens, what each rank computes and keeps of attention, what it sends.

Law: arithmetic on the plan and on the shapes of attention, which are those of a model without memory behind it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.plan.plan import Plan
from fourfold.plan.sequence import (
    AttentionSize,
    TokenRanges,
    attention_sent_elements,
    padded_length,
    ring_size,
    scores_per_index,
    token_ranges,
)
from fourfold.step.batch import POSITION_KEYS
from fourfold.step.model_call import call_model, eval_mode
from fourfold.step.sequence.sdpa_interception import AttentionCall, intercept_attention
from fourfold.words.errors import PlanError, Problem
from fourfold.words.task import Task
from fourfold.words.text_table import align_columns
from fourfold.words.units import format_bytes

MAX_ROWS = 16
RING_TEXTS = {
    "zigzag": "keys and values travel around",
    "plain": "keys and values travel around",
    "rsa": "keys travel around, then values; a row of scores is held whole",
    "gather": "keys and values of all are brought to each",
}


class AttentionShape(NamedTuple):
    """A call of attention, as far as it matters here."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    is_causal: bool
    element_bytes: int

    def attention(self, samples: int, length: int) -> AttentionSize:
        return AttentionSize(samples, length, self.heads, self.head_size, self.kv_heads, self.value_size)

    @property
    def token_bytes(self) -> int:
        """Of a token's query, key, value and output, and the log-sum-exp, which is never narrower than float32."""
        sizes = (self.heads + self.kv_heads) * (self.head_size + self.value_size)
        return self.element_bytes * sizes + max(4, self.element_bytes) * self.heads

    def __str__(self) -> str:
        shared = "" if self.heads == self.kv_heads else f", {self.kv_heads} of keys and values"
        sizes = f"{self.head_size}" if self.head_size == self.value_size else f"{self.head_size} and {self.value_size}"
        return f"{self.heads} heads{shared}, of size {sizes}{', causal' if self.is_causal else ''}"


class ModelTrace(NamedTuple):
    """What one sample is to the model: its length, and the calls of attention in one forward."""

    length: int
    attention_calls: Counter[AttentionShape]


def format_sequence(plan: Plan, task: Task, model: nn.Module) -> str:
    """The part of `fourfold show` for sp > 1. Raises PlanError where tokens cannot be told from positions."""
    seen = trace_model(task, model)
    padded = padded_length(seen.length, plan.sp, plan.ring, plan.ulysses)
    spans = token_ranges(padded, plan.sp, plan.ring, plan.ulysses)
    causal = any(form.is_causal for form in seen.attention_calls)
    places = ring_size(plan.sp, plan.ulysses)
    shape = f"a ring of {places}" if plan.ulysses == 1 else f"heads among {plan.ulysses}, a ring of {places}"
    pads = f", padded to {padded:,}" if padded != seen.length else ""
    head = f"sequence  {plan.ring}, {shape}; samples of {seen.length:,} tokens{pads}, {padded // plan.sp:,} a rank"
    shares = scores_per_index(padded, places, plan.ring, causal=causal)
    rows = [
        ("index", "work, even = 1", "tokens"),
        *(_format_row(i, spans[i], shares, plan.ulysses) for i in range(plan.sp)),
    ]
    samples = -(-task.batch_size // plan.dp)
    return "\n".join([head, *_format_table(rows), *_format_costs(plan, seen, samples, padded)])


def trace_model(task: Task, model: nn.Module) -> ModelTrace:
    """One sample through a model that may have no values. Raises PlanError where there is nothing to split."""
    inputs, _ = task.data().train[0]
    name = next((name for name in POSITION_KEYS if isinstance(inputs, dict) and name in inputs), None)
    if name is None:
        need = f"inputs that are a dict with {' or '.join(POSITION_KEYS)}"
        raise PlanError(Problem(f"sp > 1 and inputs of type {type(inputs).__name__}", need, "sp = 1"), where="the plan")
    try:
        calls = _attention_calls(model, inputs)
    except (RuntimeError, NotImplementedError):
        # Some models compute with values; an error of the task's own comes again here.
        calls = _attention_calls(task.model(), inputs)
    if not calls:
        need = "a model that attends by torch.nn.functional.scaled_dot_product_attention"
        raise PlanError(Problem("sp > 1 and a model that does not attend", need, "sp = 1"), where="the plan")
    return ModelTrace(len(inputs[name]), calls)


def _attention_calls(model: nn.Module, inputs: Mapping[str, Any]) -> Counter[AttentionShape]:
    device = next(model.parameters()).device
    calls: Counter[AttentionShape] = Counter()

    def record_call(seen: AttentionCall) -> Tensor:
        q, k, v = seen.q, seen.k, seen.v
        calls[AttentionShape(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], seen.is_causal, q.element_size())] += 1
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    with torch.no_grad(), eval_mode(model), intercept_attention(record_call):
        call_model(model, {name: _batch_of_zeros(part, device) for name, part in inputs.items()})
    return calls


def _batch_of_zeros(part: Any, device: torch.device) -> Any:
    return torch.zeros((1, *part.shape), dtype=part.dtype, device=device) if isinstance(part, Tensor) else part


def _format_row(index: int, spans: TokenRanges, shares: Sequence[int], ulysses: int) -> tuple[str, str, str]:
    even = sum(shares) / len(shares)
    tokens = " and ".join(f"{start:,} to {stop - 1:,}" for start, stop in spans)
    return str(index), f"{shares[index // ulysses] / even:.2f}", tokens


def _format_table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 2], ("…", "…", "…"), rows[-1]]
    return [f"  {line}" for line in align_columns(rows, ">><")]


def _format_costs(plan: Plan, seen: ModelTrace, samples: int, padded: int) -> list[str]:
    several = [
        f"{number} {'call' if number == 1 else 'calls'} of {form}" for form, number in seen.attention_calls.items()
    ]
    held = "queries, keys, values, outputs and a log-sum-exp a row"
    if plan.ring == "rsa":
        held += "; here the rows of scores as well, which are not counted"
    sent, kept = sent_bytes(plan, seen, samples, padded), saved_bytes(plan, seen, samples, padded)
    return [
        f"  attention  {'; '.join(several)}: {RING_TEXTS[plan.ring]}",
        f"  sent       {format_bytes(sent)} over a network, by each rank in each step of {samples} samples",
        f"  kept       {format_bytes(kept)} on each rank until backward: {held}",
    ]


def sent_bytes(plan: Plan, seen: ModelTrace, samples: int, padded: int) -> float:
    """Keys, values and their gradients that each rank sends in a step."""
    return sum(
        number
        * form.element_bytes
        * attention_sent_elements(form.attention(samples, padded), plan.sp, ulysses=plan.ulysses)
        for form, number in seen.attention_calls.items()
    )


def saved_bytes(plan: Plan, seen: ModelTrace, samples: int, padded: int) -> float:
    """What blocks of attention need again in backward, of one microbatch."""
    tokens = samples / plan.microbatches * padded / plan.sp
    return tokens * sum(number * form.token_bytes for form, number in seen.attention_calls.items())

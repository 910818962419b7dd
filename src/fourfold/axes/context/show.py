"""Describe the context axis: each rank's tokens, its work in attention, what it saves for backward, what it sends.

Law: every number is arithmetic on the plan and on the shapes of attention, which one forward gives: of the meta model,
else of the model.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.axes.context.rules.layout import (
    AttentionSize,
    TokenRanges,
    attention_sent_elements,
    scores_per_index,
)
from fourfold.feed.data_input import open_data
from fourfold.feed.stream import Stream
from fourfold.model.batch import POSITION_KEYS
from fourfold.model.model_call import call_model, eval_mode
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.plan.plan import Plan
from fourfold.words.errors import PlanError, Problem
from fourfold.words.task import DEFAULT_BATCH_SIZE, Task
from fourfold.words.terminal_text import align_columns
from fourfold.words.units import format_bytes

MAX_ROWS = 16
RING_TEXTS = {
    "zigzag": "keys and values travel around the ring",
    "plain": "keys and values travel around the ring",
    "rsa": "keys travel around the ring, then values; each rank holds full rows of scores",
    "gather": "each rank gathers the keys and values of all",
}


class AttentionShape(NamedTuple):
    """The shape of a call of attention, without its batch and length."""

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
        """Bytes of a token's query, key, value, output and log-sum-exp; the last is at least float32."""
        sizes = (self.heads + self.kv_heads) * (self.head_size + self.value_size)
        return self.element_bytes * sizes + max(4, self.element_bytes) * self.heads

    def __str__(self) -> str:
        kv_heads = "" if self.heads == self.kv_heads else f", {self.kv_heads} of keys and values"
        sizes = f"{self.head_size}" if self.head_size == self.value_size else f"{self.head_size} and {self.value_size}"
        return f"{self.heads} heads{kv_heads}, of size {sizes}{', causal' if self.is_causal else ''}"


class ModelTrace(NamedTuple):
    """One sample in the model: its length, and the calls of attention in one forward."""

    length: int
    attention_calls: Counter[AttentionShape]


def format_context(plan: Plan, task: Task, model: nn.Module) -> str:
    """The part of `fourfold show` for cp > 1. Raises PlanError if the inputs have no token positions."""
    trace = trace_model(task, model)
    spec = plan.context_spec
    padded = spec.padded_length(trace.length)
    ranges = spec.token_ranges(padded)
    causal = any(shape.is_causal for shape in trace.attention_calls)
    ring = f"a ring of {spec.ring_size}"
    split = ring if plan.ulysses == 1 else f"heads among {plan.ulysses}, {ring}"
    padding = f", padded to {padded:,}" if padded != trace.length else ""
    head = f"context   {plan.ring}, {split}; samples of {trace.length:,} tokens{padding}, {padded // plan.cp:,} a rank"
    num_scores = scores_per_index(spec, padded, causal=causal)
    rows = [
        ("index", "work, even = 1", "tokens"),
        *(_format_row(i, ranges[i], num_scores, plan.ulysses) for i in range(plan.cp)),
    ]
    samples = -(-(task.batch_size or DEFAULT_BATCH_SIZE) // plan.dp)
    return "\n".join([head, *_format_table(rows), *_format_costs(plan, trace, samples, padded)])


def trace_model(task: Task, model: nn.Module) -> ModelTrace:
    """Run one sample through a model, which may be a meta model. Raises PlanError if there is nothing to split."""
    source: Any = open_data(task.data(), where="the task's data").train.source
    if isinstance(source, Stream):
        need = "numbered samples: the plan is shown for one"
        raise PlanError(Problem("cp > 1 and a stream as data", need, "a list of some of its samples"), where="the plan")
    inputs, _ = source[0]
    name = next((name for name in POSITION_KEYS if isinstance(inputs, dict) and name in inputs), None)
    if name is None:
        need = f"inputs that are a dict with {' or '.join(POSITION_KEYS)}"
        raise PlanError(Problem(f"cp > 1 and inputs of type {type(inputs).__name__}", need, "cp = 1"), where="the plan")
    try:
        calls = _attention_calls(model, inputs)
    except RuntimeError:  # NotImplementedError is one
        # Some models read values, and a meta model has none. If the error is the task's own, it is raised again here.
        calls = _attention_calls(task.model(), inputs)
    if not calls:
        need = "a model that attends by torch.nn.functional.scaled_dot_product_attention"
        raise PlanError(Problem("cp > 1 and a model that does not attend", need, "cp = 1"), where="the plan")
    return ModelTrace(len(inputs[name]), calls)


def _attention_calls(model: nn.Module, inputs: Mapping[str, Any]) -> Counter[AttentionShape]:
    device = next(model.parameters()).device
    calls: Counter[AttentionShape] = Counter()

    def record_call(call: AttentionCall) -> Tensor:
        q, k, v = call.q, call.k, call.v
        calls[AttentionShape(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], call.is_causal, q.element_size())] += 1
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    with torch.no_grad(), eval_mode(model), intercept_attention(record_call):
        call_model(model, {name: _batch_of_zeros(value, device) for name, value in inputs.items()})
    return calls


def _batch_of_zeros(value: Any, device: torch.device) -> Any:
    return torch.zeros((1, *value.shape), dtype=value.dtype, device=device) if isinstance(value, Tensor) else value


def _format_row(index: int, ranges: TokenRanges, num_scores: Sequence[int], ulysses: int) -> tuple[str, str, str]:
    """`num_scores`: by ring index."""
    mean = sum(num_scores) / len(num_scores)
    tokens = " and ".join(f"{start:,} to {stop - 1:,}" for start, stop in ranges)
    return str(index), f"{num_scores[index // ulysses] / mean:.2f}", tokens


def _format_table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 2], ("…", "…", "…"), rows[-1]]
    return [f"  {line}" for line in align_columns(rows, ">><")]


def _format_costs(plan: Plan, trace: ModelTrace, samples: int, padded: int) -> list[str]:
    calls = [
        f"{number} {'call' if number == 1 else 'calls'} of {shape}" for shape, number in trace.attention_calls.items()
    ]
    what = "queries, keys, values, outputs and a log-sum-exp a row"
    if plan.ring == "rsa":
        what += "; the rows of scores come on top"
    sent, saved = sent_bytes(plan, trace, samples, padded), saved_bytes(plan, trace, samples, padded)
    return [
        f"  attention  {'; '.join(calls)}: {RING_TEXTS[plan.ring]}",
        f"  sent       {format_bytes(sent)} over a network, by each rank in each step of {samples} samples",
        f"  kept       {format_bytes(saved)} on each rank until backward: {what}",
    ]


def sent_bytes(plan: Plan, trace: ModelTrace, samples: int, padded: int) -> float:
    """Bytes that each rank sends in a step: keys, values and their gradients; with Ulysses also queries and outputs."""
    return sum(
        number
        * shape.element_bytes
        * attention_sent_elements(shape.attention(samples, padded), plan.cp, ulysses=plan.ulysses)
        for shape, number in trace.attention_calls.items()
    )


def saved_bytes(plan: Plan, trace: ModelTrace, samples: int, padded: int) -> float:
    """Bytes that attention saves for the backward of one microbatch."""
    tokens = samples / plan.microbatches * padded / plan.cp
    return tokens * sum(number * shape.token_bytes for shape, number in trace.attention_calls.items())

"""Operations: what a forward calls on tensors of the meta device, as the kernels of all samples and of one.

form        of a tensor: shape, strides and dtype; of an argument: its type and value
kernel      one call, for all samples of a forward
view        a result in the memory of an argument: no kernel
allocation  a result that nothing has written yet: no kernel
chunked     of the last segment: a loss over a large vocabulary is computed some rows at a time, so that more samples
            are more kernels; those of one name and size count as one
Law: every kernel of a forward is counted once, in its segment; those of backward follow from them. The flops of each
segment are affine in the samples, or the step has no facts. A result that is known from an earlier call has the form,
and the memory of its own, that the operation would give it.

fused   scores are not kept: queries, keys, values, outputs and a number for each row are
Law: what autograd keeps of a call is what torch's fused kernels, or those of the context axis, keep of it.

Context ranks run the attention of a step, with fake peers. With dropout and one context rank, torch computes the call
on a CPU by its products, and so does this.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.axes.context.work.attention import context_attention
from fourfold.axes.context.work.context_group import ContextGroup
from fourfold.axes.context.work.dropout import AttentionDropout
from fourfold.model.sdpa_interception import AttentionCall, intercept_attention
from fourfold.planner.predict.facts import Collective, Operation, OperationKind
from fourfold.planner.task_facts.fake_ranks import MAX_HOPS, META, FakeChannel
from fourfold.planner.task_facts.segments import SegmentTracker
from fourfold.torch_kit.recompute import kept
from fourfold.torch_kit.tensor_tree import tree_leaves
from fourfold.torch_kit.torch_private import TorchDispatchMode, is_in_backward, storage_key
from fourfold.words.errors import Problem, TaskError
from fourfold.words.layout import Change, collective_sent_bytes

# ---- calls whose results are known -----------------------------------------------------------------------------------


PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class MetaCalls:
    """The results that are known."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
        """By operation and the forms of its arguments; None: its result is in the memory of an argument."""

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`func(*args, **kwargs)`."""
        key = (func, *_form_of((tuple(args), tuple(kwargs.items()))))
        if _UNKNOWN in key:
            return func(*args, **kwargs)
        if (form := self._forms.get(key)) is not None:
            return torch.empty_strided(form[0], form[1], dtype=form[2], device=META)
        result = func(*args, **kwargs)
        if key not in self._forms:
            self._forms[key] = _result_form(result, (args, kwargs))
        return result


_UNKNOWN = object()


def _form_of(value: Any) -> list[Any]:
    """The form of an argument, flat; with _UNKNOWN in it: it is none that can be compared."""
    if isinstance(value, Tensor):
        return [value.shape, value.stride(), value.dtype] if value.device == META else [_UNKNOWN]
    if isinstance(value, list | tuple):
        return [len(value), *(part for each in value for part in _form_of(each))]
    return [type(value), value] if isinstance(value, PLAIN) else [_UNKNOWN]


def _result_form(result: Any, arguments: Any) -> tuple[Any, ...] | None:
    if not isinstance(result, Tensor) or result.device != META:
        return None
    keys = {storage_key(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    return None if storage_key(result) in keys else (result.shape, result.stride(), result.dtype)


# ---- kernels of a forward --------------------------------------------------------------------------------------------


ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm: 0, ATEN.bmm: 0, ATEN.addmm: 1, ATEN.baddbmm: 1}
"""By product: the place of its left factor among the arguments."""
BATCHED = {ATEN.bmm, ATEN.baddbmm}
CONVOLUTIONS = {ATEN.convolution}
ALLOCATIONS = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided}
LOOKUPS = {ATEN.embedding, ATEN.index_select, ATEN.gather, ATEN.index}


class Kernel(NamedTuple):
    """A call. The sizes are those of `Operation`, of all samples together."""

    name: str
    kind: OperationKind
    flops: float
    num_bytes: float
    has_weight: bool = False
    rows: float = 0.0
    columns: int = 0
    inner: int = 0
    batch: float = 0.0


class KernelRecorder(TorchDispatchMode):
    """Within: `kernels` gets every kernel of a forward, with its segment. `weights`: the model's parameters."""

    def __init__(self, tracker: SegmentTracker, weights: Iterable[Tensor], calls: MetaCalls) -> None:
        super().__init__()
        self._calls = calls
        self.kernels: list[tuple[int, Kernel]] = []
        self._tracker = tracker
        self._weights = {storage_key(weight) for weight in weights}

    def add(self, kernel: Kernel) -> None:
        """Count a kernel that is not called by torch's name."""
        self.kernels.append((self._tracker.current, kernel))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._calls.call(func, args, kwargs or {})
        if not is_in_backward() and func.overloadpacket not in ALLOCATIONS:
            given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            keys = {storage_key(tensor) for tensor in given}
            is_written = "out" in (kwargs or {}) or func.overloadpacket.__name__.endswith("_")
            if made and (is_written or any(storage_key(tensor) not in keys for tensor in made)):
                self.add(self._kernel(func, args, given, made))
        return result

    def _kernel(self, func: Any, args: Sequence[Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> Kernel:
        packet = func.overloadpacket
        num_bytes = float(sum(_moved_bytes(tensor) for tensor in (*given, *made)))
        has_weight = any(storage_key(tensor) in self._weights for tensor in given)
        name = str(func)
        if packet in PRODUCTS:
            left, right = args[PRODUCTS[packet] :][:2]
            rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
            batch = left.shape[0] if packet in BATCHED else 0
            flops = 2.0 * (batch or 1) * rows * inner * columns
            return Kernel(name, OperationKind.PRODUCT, flops, num_bytes, has_weight, rows, columns, inner, batch)
        if packet in CONVOLUTIONS:
            weight = given[1]
            flops = 2.0 * made[0].numel() * math.prod(weight.shape[1:])
            return Kernel(name, OperationKind.CONVOLUTION, flops, num_bytes, has_weight)
        if packet in LOOKUPS:
            # A lookup reads the rows that it returns, not the table.
            num_bytes = 2.0 * made[0].nbytes + sum(tensor.nbytes for tensor in given[1:])
            return Kernel(name, OperationKind.LOOKUP, 0.0, num_bytes, has_weight)
        return Kernel(name, OperationKind.POINTWISE, float(made[0].numel()), num_bytes, has_weight)


def _moved_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's memory that a kernel reads or writes: expanded dims are one element long."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * (
        tensor.element_size()
    )


# ---- operations of a sample ------------------------------------------------------------------------------------------


Kernels = Sequence[tuple[int, Kernel]]


def operations_of_sample(forwards: Mapping[int, Kernels]) -> dict[int, list[Operation]]:
    """By segment. `forwards`: by number of samples, three of them. Raises TaskError."""
    numbers = sorted(forwards)
    segments = sorted({segment for kernels in forwards.values() for segment, _ in kernels})
    found: dict[int, list[Operation]] = {}
    for segment in segments:
        lists = [[kernel for owner, kernel in forwards[number] if owner == segment] for number in numbers]
        _check_affine(lists, numbers)
        if segment == segments[-1] and any(_keys(each) != _keys(lists[0]) for each in lists):
            lists = [_merged(each) for each in lists]
        if _keys(lists[0]) != _keys(lists[1]):
            got = f"a forward that calls other operations for {numbers[1]} samples than for {numbers[0]}"
            attempt = "a loop over tokens, not samples"
            raise TaskError(Problem(got, "the same operations for any number of samples", attempt))
        found[segment] = [operation_of(few, many, *numbers[:2]) for few, many in zip(*lists[:2], strict=True)]
    return found


def _keys(kernels: Sequence[Kernel]) -> list[tuple[object, ...]]:
    """What is the same for any number of samples."""
    return [(each.name, each.has_weight, each.columns, each.inner) for each in kernels]


def _merged(kernels: Sequence[Kernel]) -> list[Kernel]:
    found: dict[tuple[object, ...], Kernel] = {}
    for key, each in zip(_keys(kernels), kernels, strict=True):
        before = found.get(key)
        found[key] = (
            each
            if before is None
            else before._replace(
                flops=before.flops + each.flops,
                num_bytes=before.num_bytes + each.num_bytes,
                rows=before.rows + each.rows,
            )
        )
    return list(found.values())


def _check_affine(lists: Sequence[Sequence[Kernel]], numbers: Sequence[int]) -> None:
    flops = [sum(int(kernel.flops) for kernel in each) for each in lists]  # whole numbers: sums are exact
    if (flops[2] - flops[1]) * (numbers[1] - numbers[0]) != (flops[1] - flops[0]) * (numbers[2] - numbers[1]):
        few, many, more = (f"{each:g}" for each in flops)
        got = f"a step with {few}, {many} and {more} operations for {numbers[0]}, {numbers[1]} and {numbers[2]} samples"
        need, attempt = "as many for each sample", "a loss that compares no samples of a batch with each other"
        raise TaskError(Problem(got, need, attempt))


def operation_of(few: Kernel, many: Kernel, num_few: int, num_many: int) -> Operation:
    """The operation of one sample, from the same call with few and with many samples."""

    def per_sample(values: tuple[float, float]) -> float:
        return (values[1] - values[0]) / (num_many - num_few)

    moved = per_sample((few.num_bytes, many.num_bytes))
    batch = per_sample((few.batch, many.batch))
    rows = few.rows if few.batch else per_sample((few.rows, many.rows))
    flops = per_sample((few.flops, many.flops))
    fixed = max(0.0, few.num_bytes - num_few * moved)
    return Operation(few.kind, flops, moved, fixed, few.has_weight, rows, few.columns, few.inner, batch)


# ---- Fake attention: scaled_dot_product_attention on the meta device, as the kernels of a run compute it ------------


class FakeAttention:
    """Handles the calls of a forward. `recorder`: None where kernels are not counted."""

    def __init__(self, spec: ContextSpec, recorder: KernelRecorder | None = None) -> None:
        self._spec, self._recorder = spec, recorder
        sizes = spec.size // spec.ulysses, spec.ulysses
        ring, heads = (FakeChannel(size, size - 1, max_hops=MAX_HOPS) for size in sizes)
        self._group = ContextGroup(ring, heads, spec.ring)
        """Seen from the last rank, which has the most work of a causal ring in plain order."""

    def __call__(self, call: AttentionCall) -> Tensor:
        if self._recorder is not None:
            return self._recorded(call, self._recorder)
        if self._spec.size == 1:
            return call.run_sdpa() if call.dropout_p else _fused(call)
        dropout = AttentionDropout(call.dropout_p) if call.dropout_p else None
        options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale, "enable_gqa": call.enable_gqa}
        with intercept_attention(_fused):  # of ranks that have all tokens of some heads
            return context_attention(call.q, call.k, call.v, self._group, mask=call.mask, dropout=dropout, **options)

    def _recorded(self, call: AttentionCall, recorder: KernelRecorder) -> Tensor:
        """One kernel, unless torch computes the call by its products."""
        if call.dropout_p and self._spec.size == 1:
            return call.run_sdpa()
        num_scores = call.q.shape[:-1].numel() * call.k.shape[-2] * self._spec.size
        flops = 2.0 * num_scores * (call.q.shape[-1] + call.v.shape[-1]) / (2 if call.is_causal else 1)
        moved = sum(tensor.nbytes for tensor in (call.q, call.k, call.v)) + call.q.nbytes
        recorder.add(Kernel("attention", OperationKind.ATTENTION, flops, float(moved)))
        return _fused(call)


def _fused(call: AttentionCall) -> Tensor:
    return _Fused.apply(call.q, call.k, call.v)  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, rows = kept(lambda: _results(q, v))
        ctx.save_for_backward(q, k, v, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the sum of each row's exponentials."""
    # Heads of one token lie next to each other, as torch's kernels leave them: merging them copies nothing.
    out = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])).transpose(-2, -3)
    return out, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def attention_collectives(call: AttentionCall, spec: ContextSpec, num_samples: int) -> list[Collective]:
    """What context ranks send each other for a call, for one of its samples.

    A ring sends keys and values as often as an all-gather of them does: once in forward; in backward again, and their
    gradients. An exchange of heads moves queries, keys, values and outputs once in each direction.
    """
    keys_values = (call.k.nbytes + call.v.nbytes) / num_samples
    exchanged = keys_values + 2 * call.q.nbytes / num_samples
    ring_length = spec.size // spec.ulysses
    sent = {
        Change.ALL_GATHER: ((ring_length - 1) * keys_values, 1, 2),
        Change.ALL_TO_ALL: (exchanged * (spec.ulysses - 1) / spec.ulysses, 1, 1),
    }
    return [
        Collective("cp", change, _whole_bytes(change, num_bytes, spec.size), forward, backward, recompute=1)
        for change, (num_bytes, forward, backward) in sent.items()
        if num_bytes
    ]


def _whole_bytes(change: Change, sent_bytes: float, size: int) -> float:
    """The whole tensor for which each of `size` ranks sends so many bytes."""
    return sent_bytes / collective_sent_bytes(change, whole_bytes=1, size=size)

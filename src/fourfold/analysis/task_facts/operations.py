"""Operations: the kernels that a forward calls, on tensors of the meta device.

kernel      one call, for all samples of a forward
view        a result in the memory of an argument: no kernel
allocation  a result that nothing has written yet: no kernel
Law: every kernel of a forward is counted once, in its segment; those of backward follow from them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.analysis.task_facts.meta_calls import MetaCalls
from fourfold.analysis.task_facts.segments import SegmentTracker
from fourfold.parts.torch_private import TorchDispatchMode, is_in_backward, storage_key
from fourfold.plan.predict.facts import OperationKind
from fourfold.step.tensor_tree import tree_leaves

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

"""Loss kinks: functions that look like a multiple of a mean until their input is large or small enough.

kink  an autograd node such as clamp, in `mean.clamp(max=1)`, that makes one element of a mean over the batch
Law: a scalar loss with a kink is not a mean, even if the first batch does not reach the kink: in a later batch, one
part may lie beyond the kink and the full batch not.

Only torch's own functions are found, and only between the loss and a mean of torch's, or outputs with a row for each
sample. `if loss > 1` and `torch.where` are not found; nor is, in a model that computes its own loss, what is done to
means made by hand.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

# Names of autograd's nodes without "Backward0".
from fourfold.parts.torch_private import grad_shapes, saved_maximum, saved_minimum
from fourfold.step.dry_run.loss_graph import Node, op_name, topological_order
from fourfold.step.torch_losses import NONNEGATIVE_LOSSES, LossCall

KINKED_OPS = frozenset(
    {"Abs", "Amax", "Amin", "Clamp", "ClampMax", "ClampMin", "Fmax", "Fmin", "Hardtanh", "HuberLoss", "LeakyRelu"}
    | {"Max", "Maximum", "Min", "Minimum", "Relu", "SmoothL1Loss", "Threshold"}
)


def find_kinks(value: Tensor, calls: Sequence[LossCall], outputs: Iterable[Tensor]) -> Sequence[str]:
    """The names of all kinks between a scalar and means over the batch, or outputs with a row for each sample."""
    ends = {tensor.grad_fn for tensor in (*(call.value for call in calls), *outputs)} - {None}
    nonnegative = {call.value.grad_fn for call in calls if call.name in NONNEGATIVE_LOSSES} - {None}
    if value.grad_fn is None or not ends:
        return []
    depends_on_ends, kinks = set(ends), []
    for node in topological_order(value.grad_fn, ends):
        if node in ends or not any(before in depends_on_ends for before, _ in node.next_functions):
            continue
        depends_on_ends.add(node)
        if _is_identity_clamp(node, nonnegative):
            nonnegative.add(node)
        elif _is_kink(node):
            kinks.append(op_name(node))
    return kinks


def _is_kink(node: Node) -> bool:
    return op_name(node) in KINKED_OPS and all(math.prod(shape) == 1 for shape in grad_shapes(node))


def _is_identity_clamp(node: Node, nonnegative: set[Node]) -> bool:
    """Whether a node clamps, at 0 or below, a value that is never negative."""
    is_floor = op_name(node) == "Relu"
    if op_name(node) in ("Clamp", "ClampMin"):
        minimum = saved_minimum(node)
        is_floor = saved_maximum(node) is None and minimum is not None and bool(minimum <= 0)
    return is_floor and node.next_functions[0][0] in nonnegative

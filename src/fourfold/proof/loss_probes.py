"""Loss probes: what a hand-made scalar loss does with samples that a later batch may bring.

probe    a few samples, changed unevenly from the first to the last: outputs of other sizes or of a small loss, targets
         with a value that a loss may leave out, such as -100, 0 or False in a mask
guarded  not a mean over samples, but made of the same means of torch's, whose counts each step compares: then only a
         step with uneven counts is refused
Law: for every probe, and each way to cut it, the loss is a mean over the samples, or guarded; else it is refused. What
raises an error or is not finite shows nothing.

One of torch's own means, given as it is, needs no probe: its targets are counted in every step.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.axes.tensor.work.split_logits import whole_logits
from fourfold.model.fixed_random import without_randomness
from fourfold.model.loss_sum import is_uneven, with_others
from fourfold.model.objective import ForwardResult
from fourfold.proof.float64_mode import Float64Mode, WidenOperandsMode
from fourfold.proof.loss_check import LossComparison, compare_losses, largest_number
from fourfold.proof.random_weights import cast_real
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map

CPU = torch.device("cpu")
NUM_ROWS = 4
CUTS = (1, 2)
SHORT = 4  # a dim that all outputs and targets share, such as tokens, is cut to this length where they are large
LARGE = 1_000_000
LEFT_OUT = (-100, -1, 0, 1, 2, 255)  # targets that losses ignore, and tokens that pad
NUM_DESCENTS = 10
SCALES = (1e-3, 1.0, 30.0, -1e3)
DESCENTS = (1.0, 0.2, 0.0, 0.0)

ComputeLoss = Callable[[Any, Any, int], ForwardResult]
"""`compute(outputs, targets, num_samples)`: the loss of changed samples."""


class Probed(NamedTuple):
    """What probes have shown."""

    fault: LossComparison | None = None
    """A probe for which the loss is no mean over samples."""
    is_mixed: bool = False
    """Whether the loss is guarded by the number of samples: each part must have as many counted elements for each."""


class Probe(NamedTuple):
    """Changed outputs and targets; `change` says how, in words. `is_finite`: the change is to a finite value."""

    outputs: Any
    targets: Any
    change: str
    is_finite: bool = True


def probe_loss(compute: ComputeLoss, result: ForwardResult, targets: Any, num_samples: int) -> Probed:
    """What a scalar loss, computed of the outputs of a forward and of targets, does with changed ones.

    In float64 on the CPU; where the loss does not run there, as it is, with values that the first batch has too.
    """
    whole = tree_map(result.outputs, lambda tensor: whole_logits(tensor).detach()), targets
    means, is_of_rows = [call.name for call in result.calls], _is_of_rows(compute, whole, num_samples, result.raw_loss)
    short, own = _shortened(whole), next((t.device for t in tree_leaves(whole)), CPU)
    for device, dtype in ((CPU, torch.float64), (own, None)):
        for samples in (short,) if short is whole else (short, whole):
            rows = _Rows(num_samples, device, dtype)
            with _float64() if dtype is not None else contextlib.nullcontext(), without_randomness(device):
                taken = Probe(tree_map(samples[0], rows), tree_map(samples[1], rows), "")
                comparisons = _compare(compute, taken, means)
                if comparisons and all(each.is_additive for each in comparisons):
                    return _run(compute, _probes(compute, taken, is_free=device == CPU), means)
                if is_of_rows and (faults := [each for each in comparisons if _is_fault(each)]):
                    return Probed(faults[0])
    return Probed()


def _is_of_rows(compute: ComputeLoss, samples: tuple[Any, Any], num_samples: int, value: Tensor) -> bool:
    """Whether the loss depends on nothing else than rows of outputs and targets, one for each sample."""
    if any(not leaf.dim() or len(leaf) != num_samples for leaf in tree_leaves(samples)):
        return False
    with contextlib.suppress(Exception), without_randomness(value.device):  # of the user's loss
        again = compute(*samples, num_samples).raw_loss.detach()
        return bool(torch.allclose(again, value, rtol=1e-5, atol=0.0))
    return False


def probe_model_loss(compute: ComputeLoss, inputs: Any, num_samples: int, *, means: Sequence[str]) -> Probed:
    """The same for a model that computes its loss of its inputs: only integers and masks are changed."""
    device = next(tree_leaves(inputs)).device
    inputs, is_free = tree_map(inputs, _Rows(num_samples, device, None)), device == CPU
    probes = (
        Probe(None, changed, change)
        for leaf in tree_leaves(inputs)
        if not leaf.is_floating_point()
        for value in ([int(not leaf.any())] if _is_mask(leaf) else _left_out(leaf, is_free=is_free)[:1])
        for changed, change in [_with_left_out(inputs, leaf, value)]
    )
    return _run(compute, probes, means)


def _run(compute: ComputeLoss, probes: Iterator[Probe], means: Sequence[str]) -> Probed:
    is_mixed = False
    for probe in probes:
        for comparison in _compare(compute, probe, means):
            if _is_fault(comparison):
                return Probed(comparison)
            is_mixed |= not comparison.is_additive and not comparison.is_uneven
    return Probed(None, is_mixed)


def _is_fault(comparison: LossComparison) -> bool:
    """Whether the loss is neither a mean over samples nor guarded."""
    return not comparison.is_additive and not comparison.is_uneven and not comparison.is_mixed


def _compare(compute: ComputeLoss, probe: Probe, means: Sequence[str]) -> list[LossComparison]:
    """The loss of a probe, compared with the losses of its parts, for each cut; none if it cannot be computed."""
    try:
        full = compute(probe.outputs, probe.targets, NUM_ROWS)
        floats = [t for t in tree_leaves(full.outputs) if t.is_floating_point() and t.numel()]
        itemsize = min(t.dtype.itemsize for t in (*floats, full.raw_loss))
        options = {"min_itemsize": itemsize, "max_output": largest_number(floats)}
        full = full._replace(outputs=())  # they are the same in all parts
    except Exception:  # of the user's loss, for values that it need not know
        return []
    found: list[LossComparison | None] = []
    for cut in CUTS:
        with contextlib.suppress(Exception):  # the same: it may need two samples
            found.append(_compare_cut(compute, probe, full, cut, means, options))
    return [each for each in found if each is not None]


def _compare_cut(
    compute: ComputeLoss, probe: Probe, full: ForwardResult, cut: int, means: Sequence[str], options: dict[str, Any]
) -> LossComparison | None:
    sizes, spans = [cut, NUM_ROWS - cut], [(0, cut), (cut, NUM_ROWS)]
    parts = [compute(_cut(probe.outputs, s), _cut(probe.targets, s), s[1] - s[0]) for s in spans]
    forwards = (full, *parts)
    values = [float(each.raw_loss.detach()) for each in forwards]
    # `nan_to_num` makes a 0 of what is not finite, which is no mean, and no loss that leaves these values out.
    if not all(map(math.isfinite, values)) or not (probe.is_finite or values[0]):
        return None
    if not all(float(each.loss.count) for each in forwards):
        return None
    comparison = compare_losses(full, parts, part_sizes=sizes, **options)
    # Whether each step would see it: the same means, whose counts are uneven, or not proportional to the samples.
    is_same = bool(means) and all([call.name for call in each.calls] == list(means) for each in forwards)
    sums = [0.0] * 3
    for part, size in zip(parts, sizes, strict=True):
        loss = with_others(part.loss.total, part.loss.count, [float(size)])
        sums = [a + float(b) for a, b in zip(sums, (loss.count, loss.other_count, loss.other_square), strict=True)]
    is_uneven_, is_mixed = is_same and comparison.is_uneven, is_same and is_uneven(*sums)
    return comparison._replace(change=probe.change, is_uneven=is_uneven_, is_mixed=is_mixed)


# ---- changed samples --------------------------------------------------------------------------------------------


class _Rows:
    """Takes NUM_ROWS samples of a tensor, again from the first one where there are fewer."""

    def __init__(self, num_samples: int, device: torch.device, dtype: torch.dtype | None) -> None:
        self._num_samples, self._device, self._dtype = num_samples, device, dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.dim() and len(tensor) % self._num_samples == 0:
            index = torch.arange(NUM_ROWS, device=tensor.device) % self._num_samples
            tensor = tensor.unflatten(0, (self._num_samples, -1))[index].flatten(0, 1)
        return cast_real(tensor.detach().to(self._device), self._dtype)


def _cut(tree: Any, span: tuple[int, int]) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        rows = len(tensor) // NUM_ROWS if tensor.dim() and len(tensor) % NUM_ROWS == 0 else 0
        return tensor[span[0] * rows : span[1] * rows] if rows else tensor

    return tree_map(tree, cut)


def _shortened(samples: tuple[Any, Any]) -> tuple[Any, Any]:
    """The samples, or where they are large, their first tokens: a dim that all tensors have."""
    leaves = [leaf for leaf in tree_leaves(samples) if leaf.dim() > 1]
    shared = set.intersection(*(set(leaf.shape[1:]) for leaf in leaves)) if leaves else set[int]()
    if not shared or sum(leaf.numel() for leaf in leaves) <= LARGE:
        return samples

    def shorten(tensor: Tensor) -> Tensor:
        lengths = [size if size not in shared else min(size, SHORT) for size in tensor.shape[1:]]
        return tensor[(slice(None), *map(slice, lengths))] if tensor.dim() > 1 else tensor

    return tree_map(samples, shorten)


def _probes(compute: ComputeLoss, taken: Probe, *, is_free: bool) -> Iterator[Probe]:
    outputs, targets = taken.outputs, taken.targets
    for scales in (SCALES, SCALES[::-1]):
        yield Probe(tree_map(outputs, lambda t, s=scales: _scaled(t, s)), targets, ", for outputs of other sizes")
    with contextlib.suppress(RuntimeError, ValueError):  # a loss that cannot be differentiated here
        yield Probe(_descended(compute, outputs, targets), targets, ", once some are learned")
    for leaf in tree_leaves(targets):
        for value in _left_out(leaf, is_free=is_free):
            yield Probe(outputs, *_with_left_out(targets, leaf, value), is_finite=math.isfinite(value))


def _scaled(tensor: Tensor, scales: Sequence[float]) -> Tensor:
    if not tensor.is_floating_point() or not tensor.dim() or len(tensor) % NUM_ROWS:
        return tensor
    factors = torch.tensor(scales, dtype=tensor.dtype, device=tensor.device).repeat_interleave(len(tensor) // NUM_ROWS)
    return tensor * factors.reshape(-1, *[1] * (tensor.dim() - 1))


def _descended(compute: ComputeLoss, outputs: Any, targets: Any) -> Any:
    """Outputs of which some have a small loss."""
    size = largest_number(outputs, targets)
    for step in range(NUM_DESCENTS):
        result = compute(outputs, targets, NUM_ROWS)
        leaves = [t for t in tree_leaves(result.outputs) if t.requires_grad]
        gradients = torch.autograd.grad(result.raw_loss.sum(), leaves, allow_unused=True)
        length = size * 0.01 ** (step / NUM_DESCENTS)
        moves = {
            id(t): length * _scaled(g.sign(), DESCENTS) for t, g in zip(leaves, gradients, strict=True) if g is not None
        }
        outputs = tree_map(result.outputs, lambda t, m=moves: t.detach() - m[id(t)] if id(t) in m else t)
    return outputs


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _left_out(tensor: Tensor, *, is_free: bool) -> list[Any]:
    """Values that a loss may leave out. Not `is_free`: integers of the tensor's range. A GPU survives no bad index."""
    if not tensor.numel():
        return []
    if tensor.dtype == torch.bool:
        return [False, True]
    if tensor.is_floating_point():
        return [0.0, math.nan]
    low, high = (int(each) for each in tensor.aminmax())
    return [each for each in dict.fromkeys((*LEFT_OUT, low, high)) if is_free or low <= each <= high]


def _with_left_out(tree: Any, leaf: Tensor, value: Any) -> tuple[Any, str]:
    """The same tree, whose `leaf` has more elements of this value in each sample than in the one before."""
    changed = leaf.clone()
    rows = changed.reshape(NUM_ROWS, -1) if leaf.dim() and len(leaf) % NUM_ROWS == 0 else changed[None][:0]
    for row, elements in enumerate(rows):
        num_left_out = row * len(elements) // NUM_ROWS if len(elements) >= NUM_ROWS else row // (NUM_ROWS - 1)
        elements[len(elements) - num_left_out :] = value
    changed = rows.reshape(leaf.shape) if len(rows) else changed
    where = "in a mask" if leaf.dtype == torch.bool else "among the targets"
    return tree_map(tree, lambda each: changed if each is leaf else each), f", with more of {value} {where}"


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    with Float64Mode(new_tensors=True), WidenOperandsMode({}, torch.float64):
        yield

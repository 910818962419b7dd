"""Cross entropy of split logits: losses and gradients are those of all classes, and no logits are sent."""

import itertools
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.axes.tensor.work.cross_entropy import Vocabulary, split_cross_entropy
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import TensorGroup, make_tensor_group
from fourfold.plan.param_spec import TensorShard
from fourfold.testing import threads
from fourfold.testing.saved_tensors import recording_saved
from fourfold.words.errors import TaskError

TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.bfloat16: (1e-5, 2e-2),
    torch.float16: (1e-5, 2e-3),
}
OPTIONS = [{}, {"ignore_index": 3}, {"label_smoothing": 0.1}, {"ignore_index": 3, "label_smoothing": 1.0}]


class Counting:
    """A tensor group that counts the elements of its collectives, by name."""

    def __init__(self, group: TensorGroup) -> None:
        self._group, self.elements = group, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if not callable(found) or name in ("buffer", "meet", "num_chunks"):
            return found

        def call(tensor: Tensor, *args: Any) -> Tensor:
            self.elements.append((name, tensor.numel()))
            return cast(Tensor, found(tensor, *args))

        return call


def draw(num_classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(3, 7, num_classes, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(num_classes, (3, 7), generator=generator)


def split(comm: Any, whole: Tensor, transport: str = "auto") -> tuple[Tensor, Vocabulary, Counting]:
    """This rank's logits, as a head that is split by vocabulary makes them."""
    group = Counting(make_tensor_group(comm, "tensor", CommMeter(), choice=transport))
    ((start, stop, _, _),) = TensorShard.even((whole.shape[-1],), 0, comm.rank, comm.size).pieces
    return (
        whole[..., start:stop].clone().requires_grad_(),
        Vocabulary(cast(TensorGroup, group), start, whole.shape[-1]),
        group,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("ranks", "num_classes"), [(2, 16), (2, 57), (4, 57), (4, 5)])
def test_losses_and_gradients_are_those_of_all_classes(ranks, num_classes, dtype):
    """Of 5 classes on 4 ranks, the last rank has none."""
    logits, targets = draw(num_classes, dtype)
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

    def body(comm):
        found = []
        for options in OPTIONS:
            local, vocabulary, group = split(comm, logits)
            wide = logits.double().requires_grad_()
            losses = split_cross_entropy(local, targets, vocabulary, **options)
            flat = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none", **options)
            expected = flat.view(targets.shape)
            (expected_grad,) = torch.autograd.grad((expected * weights).sum(), wide)
            (grad,) = torch.autograd.grad((losses * weights).sum(), local)
            assert [name for name, _ in group.elements] == ["all_reduce_max", "all_reduce"]
            numbers = 4 if options.get("label_smoothing") else 3
            assert sum(count for _, count in group.elements) == numbers * targets.numel()
            expected_grad = expected_grad[..., vocabulary.start : vocabulary.start + local.shape[-1]]
            torch.testing.assert_close(losses.double(), expected, rtol=0, atol=TOLERANCES[dtype][0])
            torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=TOLERANCES[dtype][1])
            found.append(losses.detach())
        return found

    results = threads.run(ranks, body)
    for first, other in itertools.combinations(results, 2):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_rank_whose_logits_are_all_minus_infinity_has_no_gradient():
    logits, targets = draw(8)
    logits[0, :, 4:] = -torch.inf
    targets %= 4
    wide = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum"), wide)

    def body(comm):
        local, vocabulary, _ = split(comm, logits)
        (grad,) = torch.autograd.grad(split_cross_entropy(local, targets, vocabulary).sum(), local)
        start = vocabulary.start
        torch.testing.assert_close(grad, expected[..., start : start + 4], rtol=0, atol=1e-12)

    threads.run(2, body)


def test_each_rank_keeps_one_copy_of_its_own_logits():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 512, generator=generator)

    def body(comm):
        local, vocabulary, _ = split(comm, logits)
        with recording_saved() as saved:
            split_cross_entropy(local, torch.arange(64), vocabulary)
        return saved.num_bytes / local.nbytes

    assert max(threads.run(2, body)) <= 1.1


def test_a_target_that_no_rank_has_is_rejected_on_all():
    logits, targets = draw(57)
    targets[0, 0] = 57

    def body(comm):
        local, vocabulary, _ = split(comm, logits)
        with pytest.raises(TaskError, match=r"1 of 21 targets that are not classes: 57 .* 0 to 56"):
            split_cross_entropy(local, targets, vocabulary)

    threads.run(2, body)


def test_all_ranks_see_a_logit_that_is_not_a_number():
    logits, targets = draw(8)
    logits[1, 2, 6] = torch.nan

    def body(comm):
        local, vocabulary, _ = split(comm, logits)
        losses = split_cross_entropy(local, targets, vocabulary)
        assert losses.isnan().nonzero().tolist() == [[1, 2]]

    threads.run(2, body)

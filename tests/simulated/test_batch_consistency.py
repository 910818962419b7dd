"""Laws of the comparison of batches within a context group. Ranks are threads."""

import contextlib
import dataclasses
import functools

import pytest
import torch

from fourfold.proof.digests.batches import batch_digest
from fourfold.testing import threads
from fourfold.words.errors import TaskError
from tests.cases import Case, batches, build_step, local_batch

pytestmark = pytest.mark.usefixtures("without_dry_run")

LM = Case(model="lm", batch_sizes=(4, 4, 4))


def another_target(inputs, targets, comm, dp):
    targets[0, 3] += comm.rank == comm.size - 1  # on one rank
    return inputs, targets


def fewer_samples(inputs, targets, comm, dp):
    some = slice(0 if comm.rank == comm.size - 1 else len(targets))
    return {name: tensor[some] for name, tensor in inputs.items()}, targets[some]


def shorter(inputs, targets, comm, dp):
    some = slice(targets.shape[1] - 4 * (comm.rank == 0))
    return {name: tensor[:, some] for name, tensor in inputs.items()}, targets[:, some]


def batch_of_another_group(inputs, targets, comm, dp):
    return local_batch(batches(LM)[1], dp, comm.rank % dp)  # as if every dp-th rank were in one context group


MISMATCHES = {"another target": another_target, "fewer": fewer_samples, "shorter": shorter}


@pytest.mark.parametrize(("dp", "cp", "ulysses", "kind"), [
    *((*mesh, kind) for mesh, kind in zip([(1, 2, 1), (3, 2, 1), (2, 4, 2)], MISMATCHES, strict=True)),
    (3, 2, 1, "another group"),  # where sums over all ranks would be the same
    (2, 3, 1, "another group"),
])  # fmt: skip
def test_different_batches_within_a_sequence_group_are_refused_in_later_steps_too(dp, cp, ulysses, kind):
    case = dataclasses.replace(LM, cp=cp, ulysses=ulysses, batch_sizes=(6, 6), microbatches=2)
    refused = functools.partial(
        pytest.raises,
        TaskError,
        match="different batches on some of .* differ only on cp",
    )

    def body(comm):
        step = build_step(case, dp * cp, comm)
        first, second = (local_batch(batch, dp, step.dp_index) for batch in batches(case))
        step(first)
        step(second)
        batch = MISMATCHES.get(kind, batch_of_another_group)(*second, comm, dp)
        is_mismatch = step._assembly.batches.compare(batch)[1] is not None
        with refused() if is_mismatch else contextlib.nullcontext():
            step.run_forward(batch)
        before = {name: weight.clone() for name, weight in step.named_weights()}
        for use in (step.evaluate, step):
            with refused():
                use(batch)
        assert all(torch.equal(weight, before[name]) for name, weight in step.named_weights())
        return is_mismatch

    found = threads.run(dp * cp, body)
    groups = [found[first : first + cp] for first in range(0, dp * cp, cp)]
    assert any(found)
    assert all(len(set(group)) == 1 for group in groups)


@pytest.mark.parametrize("tensor", [
    torch.arange(24).view(2, 6, 2)[..., 0],
    torch.arange(24).view(2, 12)[:, ::2],
    torch.arange(24).view(2, 12)[:, ::2] > 3,
    torch.arange(24).view(2, 12)[1:, 3:4],
    torch.ones(2, 1).expand(2, 5),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(()),
    torch.ones(0, 5),
])  # fmt: skip
def test_a_digest_does_not_depend_on_strides(tensor):
    assert batch_digest({"x": tensor}) == batch_digest({"x": tensor.clone(memory_format=torch.contiguous_format)})
    assert batch_digest({"x": tensor}) != batch_digest({"x": tensor.unsqueeze(0)})
    assert not tensor.numel() or batch_digest({"x": tensor}) != batch_digest(
        {"x": tensor.logical_not().to(tensor.dtype)}
    )
